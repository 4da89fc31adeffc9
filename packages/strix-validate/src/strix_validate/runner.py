# SPDX-License-Identifier: BSD-3-Clause
"""Run the wanted checks of the named tiers, and make their record."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from time import perf_counter
from types import ModuleType

from strix_validate import TARGET, skips, tiers
from strix_validate.checks import SEED, Check, Result, RunOptions, State, is_named
from strix_validate.doctor import host
from strix_validate.reporting import record
from strix_validate.reporting.record import Record


class NoSuchCheck(ValueError):
    """--only or --skip names no check, or --only none of this size and kind of device."""


def select(
    known: Mapping[str, Sequence[Check]], only: Sequence[str] = (), skip: Sequence[str] = ()
) -> dict[str, list[Check]]:
    """Return by tier the checks named in only, or all, without those named in skip.

    A name means the same everywhere: a tier, all of it, or else what :func:`checks.is_named` says:
    an id, its prefix up to a slash, or a pattern.

    Raises:
        NoSuchCheck: a misspelt name; it would otherwise run nothing, or everything, and look fine.
    """

    def named(tier: str, check: Check, names: Sequence[str]) -> bool:
        # "attention" is the tier, not only its checks attention/vllm-*
        return tier in names or is_named(check.id, [name for name in names if name not in known])

    for name in (*only, *skip):
        if not any(named(tier, check, [name]) for tier in known for check in known[tier]):
            raise NoSuchCheck(f"no check of {', '.join(known)} is called {name}")
    return {
        tier: [
            check
            for check in checks
            if (not only or named(tier, check, only)) and not named(tier, check, skip)
        ]
        for tier, checks in known.items()
    }


def refuse_misspelt(tiers_: Sequence[str], names: Sequence[str]) -> None:
    """Raise NoSuchCheck for a name that cannot fit, before torch is imported.

    The groups of ids are known without the tiers' modules; :func:`select` knows the ids as well.
    """
    groups = {group for tier in tiers_ for group in tiers.GROUPS.get(tier, (tier,))}
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
    """Run the wanted checks of the named tiers, and return their record.

    Ctrl-C ends the run and keeps what was measured: Record.unfinished then counts the other checks.

    Args:
        say: called with a line when a tier begins.
        keep: called with the record before the first check, and when another result is in it.

    Raises:
        NoSuchCheck: see :func:`select`.
        ModuleNotFoundError: a named tier needs a package that is not installed.
    """
    refuse_misspelt(names, [*only, *skip])
    os.environ[SEED] = str(options.seed)
    began, begin = datetime.now(UTC), perf_counter()
    modules = {name: tiers.load(name) for name in names}
    known = {name: module.checks() for name, module in modules.items()}
    wanted = select(known, only, skip)
    applies = {
        n: getattr(module, "applies", lambda check, options: True) for n, module in modules.items()
    }
    possible = {name: [c for c in known[name] if applies[name](c, options)] for name in modules}
    for name in only:
        if not any(set(checks) & set(possible[t]) for t, checks in select(known, [name]).items()):
            raise NoSuchCheck(f"{name} needs another size or kind of device")
    chosen = {name: [c for c in possible[name] if c in set(wanted[name])] for name in modules}
    device = host.describe_device(options.device)
    gpu_is_ours = device.build == "rocm" and device.architecture.split(":")[0] == TARGET
    found = Record(
        created=began,
        command=list(names),
        size=options.size.value,
        seed=options.seed,
        subject="packages" if gpu_is_ours else "harness",
        versions=host.versions(),
        packages=host.packages(),
        host=host.describe_host(),
        device=device,
        checks=[],
        summary=record.summarise([]),
        seconds=0,
        unfinished=sum(map(len, chosen.values())),
    )
    keep(found)
    # libraries print; stdout belongs to the record
    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(KeyboardInterrupt):
        for name, module in modules.items():
            if chosen[name]:
                say(f"{name}: {len(chosen[name])} checks")
                for line in _announce(module, chosen[name], options):
                    say(line)
            results = module.run(chosen[name], options)
            if name in tiers.ON_DEVICE and (options.device, device.type) == ("cuda", "none"):
                results = (Result(c, State.SKIPPED, "torch sees no GPU") for c in chosen[name])
            for result in _complete(chosen[name], results):
                said = replace(result, reason=host.shorten(result.reason))
                found.checks.append(record.of_result(name, skips.judge(said, device)))
                found.unfinished -= 1
                found.seconds = round(perf_counter() - begin, 1)
                found.summary = record.summarise(found.checks)
                keep(found)
    return found


def _announce(module: ModuleType, chosen: list[Check], options: RunOptions) -> Iterator[str]:
    """Yield what a tier has to say before it begins, such as what it costs."""
    announce = getattr(module, "announce", None)
    if announce:
        yield from announce(chosen, options)


def _complete(chosen: list[Check], results):
    """Yield the results, plus a failure for each check the tier left out: not run is not passed.

    A fault of the GPU comes up wherever its memory is read next, and ends the tier.
    """
    missing, reason = dict.fromkeys(chosen), "the tier gave no result for it"
    try:
        for result in results:
            missing.pop(result.check, None)
            yield result
    except Exception as error:
        reason = f"the tier ended before it: {type(error).__name__}: {error}"
    for check in missing:
        yield Result(check, State.FAILED, reason)
