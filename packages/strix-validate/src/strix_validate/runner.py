# SPDX-License-Identifier: BSD-3-Clause
"""Run the selected checks of the named tiers (groups of checks), and make the record of the run."""

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
    """A name in --only or --skip matches no check.

    Also raised if a name in --only matches only checks that do not apply to the run's options, such
    as its size, device or server.
    """


def select(
    available: Mapping[str, Sequence[Check]],
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
) -> dict[str, list[Check]]:
    """Return by tier the checks that `only` names and `skip` does not name.

    A name in either list is a tier's name, or it matches ids as :func:`checks.is_named` describes.

    Args:
        available: All checks by tier.
        only: Names; without any, all checks are selected.
        skip: Names.

    Raises:
        NoSuchCheck: A name matches no check. Without this error, a misspelt name would run no
            check, or every check, and the user would not notice.
    """

    def is_selected(tier: str, check: Check, names: Sequence[str]) -> bool:
        # The name "attention" selects the whole tier, not only its checks attention/vllm-*.
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

    This compares only the first part of a name, since tiers.GROUPS lists the first parts of ids and
    needs no import of a tier's module. :func:`select` compares whole ids later. A pattern without a
    slash is left to :func:`select`, because its "*" can match the slash of an id.
    """
    groups: list[str] = []
    for tier in tiers_:
        groups += tiers.GROUPS.get(tier, (tier,))
    for name in names:
        first, slash, _ = name.partition("/")
        if not slash and "*" in name:
            continue
        if name not in tiers_ and not any(fnmatchcase(group, first) for group in groups):
            raise NoSuchCheck(f"no check of {', '.join(tiers_)} is called {name}")


def run(
    names: Sequence[str],
    options: RunOptions,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    print_line: Callable[[str], None] = lambda line: None,
    on_progress: Callable[[Record], None] = lambda record: None,
) -> Record:
    """Run the selected checks of the named tiers, and return their record.

    Ctrl-C ends the run. The record then has the results so far, and Record.unfinished is the number
    of checks that did not run.

    Args:
        names: The tiers.
        options: Options of the checks.
        only: The checks to run, see :func:`select`.
        skip: The checks to leave out.
        print_line: Called with each line to print when a tier begins.
        on_progress: Called with the record before the first check, and after each result.

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
    on_progress(report)
    # Libraries print to standard output, which is reserved for the record.
    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(KeyboardInterrupt):
        for name, tier in loaded.items():
            for line in _announce(name, tier, selected[name], options):
                print_line(line)
            for result in _run_tier(name, tier, selected[name], options, report):
                reason, fix = host.shorten(result.reason), host.shorten(result.fix)
                short = replace(result, reason=reason, fix=fix)
                judged = skips.judge(short, report.device)
                report.checks.append(record.make_check_record(name, judged))
                report.unfinished -= 1
                report.seconds = round(perf_counter() - begin, 1)
                report.summary = record.summarise(report.checks)
                on_progress(report)
    return report


def _select_applicable(
    loaded: Mapping[str, tiers.Tier],
    options: RunOptions,
    only: Sequence[str],
    skip: Sequence[str],
) -> dict[str, list[Check]]:
    """Return the selected checks that apply to the run's options, by tier.

    Raises:
        NoSuchCheck: See :func:`select`. Also raised if a name in `only` matches no check that
            applies to the options.
    """
    available = {name: tier.checks() for name, tier in loaded.items()}
    selected = select(available, only, skip)
    applicable = {
        name: [check for check in available[name] if tier.applies(check, options)]
        for name, tier in loaded.items()
    }
    for name in only:
        named = select(available, [name])
        if any(set(named[tier]) & set(applicable[tier]) for tier in available):
            continue
        if named.get("serve"):
            raise NoSuchCheck(f"{name} is for another kind of server: see --model and --questions")
        raise NoSuchCheck(f"{name} needs another --size or --device")
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
    """Yield the lines to print before a tier begins."""
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
    """Yield the results, then a failure for each check without a result.

    An exception ends the tier, so later checks have no result. For example, a fault of the GPU is
    raised by whichever call next reads the GPU's memory.
    """
    missing = dict.fromkeys(selected)
    reason = "the tier returned no result for this check"
    try:
        for result in results:
            missing.pop(result.check, None)
            yield result
    except Exception as error:
        reason = f"the tier ended before this check: {type(error).__name__}: {error}"
    for check in missing:
        yield Result(check, State.FAILED, reason)
