# SPDX-License-Identifier: BSD-3-Clause
"""Run the selected checks of the named tiers, and make their record."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from time import perf_counter
from typing import Literal

from strix_validate import TARGET, skips, tiers
from strix_validate.checks import SEED, Check, Result, RunOptions, State, is_named
from strix_validate.doctor import host
from strix_validate.reporting import record
from strix_validate.reporting.record import Record


class NoSuchCheck(ValueError):
    """--only or --skip names no check, or --only none of this size and kind of device."""


def select(
    available: Mapping[str, Sequence[Check]],
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
) -> dict[str, list[Check]]:
    """Return the checks that are named in only and not in skip, by tier.

    A name means the same in both: a tier, or else an id, its prefix up to a slash, or a pattern, as
    :func:`checks.is_named` has it.

    Args:
        available: All checks by tier.
        only: Names; without any, all checks are selected.
        skip: Names.

    Raises:
        NoSuchCheck: A name is misspelt; it would otherwise run nothing, or everything, and look
            fine.
    """

    def is_selected(tier: str, check: Check, names: Sequence[str]) -> bool:
        # "attention" is the tier, not only its checks attention/vllm-*.
        if tier in names:
            return True
        ids = [name for name in names if name not in available]
        return is_named(check.id, ids)

    matched: set[str] = set()
    selected: dict[str, list[Check]] = {}
    for tier, checks in available.items():
        selected[tier] = []
        for check in checks:
            matched.update(name for name in (*only, *skip) if is_selected(tier, check, [name]))
            is_wanted = not only or is_selected(tier, check, only)
            if is_wanted and not is_selected(tier, check, skip):
                selected[tier].append(check)
    for name in (*only, *skip):
        if name not in matched:
            raise NoSuchCheck(f"no check of {', '.join(available)} is called {name}")
    return selected


def refuse_misspelt(tiers_: Sequence[str], names: Sequence[str]) -> None:
    """Raise NoSuchCheck for a name that cannot match, before torch is imported.

    The groups of ids are known without the tiers' modules; :func:`select` compares the ids too.
    """
    groups: list[str] = []
    for tier in tiers_:
        groups += tiers.GROUPS.get(tier, (tier,))
    for name in names:
        first = name.split("/")[0]
        if name not in tiers_ and not any(fnmatchcase(group, first) for group in groups):
            raise NoSuchCheck(f"no check of {', '.join(tiers_)} is called {name}")


def run(
    names: Sequence[str],
    options: RunOptions,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
    keep: Callable[[Record], None] = lambda record: None,
) -> Record:
    """Run the selected checks of the named tiers, and return their record.

    Ctrl-C ends the run and keeps what was measured: Record.unfinished then counts the other checks.

    Args:
        names: The tiers.
        options: Options of the checks.
        only: The checks to run, see :func:`select`.
        skip: The checks to leave out.
        say: Called with a line when a tier begins.
        keep: Called with the record before the first check, and after each result.

    Raises:
        NoSuchCheck: See :func:`select`.
        ModuleNotFoundError: A named tier needs a package that is not installed.
    """
    refuse_misspelt(names, [*only, *skip])
    os.environ[SEED] = str(options.seed)
    created = datetime.now(UTC)
    begin = perf_counter()
    loaded = {name: tiers.load(name) for name in names}
    selected = _select_applicable(loaded, options, only, skip)
    report = _begin_record(names, options, created)
    report.unfinished = sum(map(len, selected.values()))
    keep(report)
    # Libraries print; standard output belongs to the record.
    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(KeyboardInterrupt):
        for name, tier in loaded.items():
            for line in _announce(name, tier, selected[name], options):
                say(line)
            for result in _run_tier(name, tier, selected[name], options, report):
                short = replace(result, reason=host.shorten(result.reason))
                judged = skips.judge(short, report.device)
                report.checks.append(record.make_check_record(name, judged))
                report.unfinished -= 1
                report.seconds = round(perf_counter() - begin, 1)
                report.summary = record.summarise(report.checks)
                keep(report)
    return report


def _select_applicable(
    loaded: Mapping[str, tiers.Tier],
    options: RunOptions,
    only: Sequence[str],
    skip: Sequence[str],
) -> dict[str, list[Check]]:
    """Return the selected checks that apply to the size and the kind of device, by tier.

    Raises:
        NoSuchCheck: See :func:`select`; or no check of a name in only applies.
    """
    available = {name: tier.checks() for name, tier in loaded.items()}
    selected = select(available, only, skip)
    applicable = {
        name: [check for check in available[name] if tier.applies(check, options)]
        for name, tier in loaded.items()
    }
    for name in only:
        named = select(available, [name])
        if not any(set(named[tier]) & set(applicable[tier]) for tier in available):
            raise NoSuchCheck(f"{name} needs another size or kind of device")
    return {
        name: [check for check in checks if check in selected[name]]
        for name, checks in applicable.items()
    }


def _begin_record(names: Sequence[str], options: RunOptions, created: datetime) -> Record:
    """Return the record of a run before its first check."""
    device = host.describe_device(options.device)
    is_target = device.build == "rocm" and device.architecture.split(":")[0] == TARGET
    subject: Literal["packages", "harness"] = "packages" if is_target else "harness"
    return Record(
        created=created,
        command=list(names),
        size=options.size.value,
        seed=options.seed,
        subject=subject,
        versions=host.read_versions(),
        packages=host.list_packages(),
        host=host.describe_host(),
        device=device,
        checks=[],
        summary=record.summarise([]),
        seconds=0,
    )


def _announce(
    name: str,
    tier: tiers.Tier,
    selected: list[Check],
    options: RunOptions,
) -> Iterator[str]:
    """Yield the lines to print before a tier begins, such as what it costs."""
    if not selected:
        return
    yield f"{name}: {len(selected)} checks"
    yield from tier.announce(selected, options)


def _run_tier(
    name: str,
    tier: tiers.Tier,
    selected: list[Check],
    options: RunOptions,
    report: Record,
) -> Iterator[Result]:
    """Yield a result for each selected check of a tier."""
    is_without_gpu = options.device == "cuda" and report.device.type == "none"
    if name in tiers.ON_DEVICE and is_without_gpu:
        for check in selected:
            yield Result(check, State.SKIPPED, "torch sees no GPU")
        return
    yield from _complete(selected, tier.run(selected, options))


def _complete(selected: list[Check], results: Iterable[Result]) -> Iterator[Result]:
    """Yield the results, and a failure for each check that has none: not run is not passed.

    A fault of the GPU is reported wherever its memory is read next, and ends the tier.
    """
    missing = dict.fromkeys(selected)
    reason = "the tier gave no result for it"
    try:
        for result in results:
            missing.pop(result.check, None)
            yield result
    except Exception as error:
        reason = f"the tier ended before it: {type(error).__name__}: {error}"
    for check in missing:
        yield Result(check, State.FAILED, reason)
