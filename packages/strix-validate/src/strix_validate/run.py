# SPDX-License-Identifier: BSD-3-Clause
"""Runs the wanted checks of the named tiers and makes their record."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from time import perf_counter

from strix_validate import TARGET, host, record, skips, tiers
from strix_validate.checks import Check, Options, Result, State, is_named
from strix_validate.record import Record


class NoSuchCheck(ValueError):
    """--only or --skip names no check."""


def select(
    checks: Sequence[Check], only: Sequence[str] = (), skip: Sequence[str] = ()
) -> list[Check]:
    """The checks named in only, or all, without those named in skip.

    Raises:
        NoSuchCheck: a misspelt name; it would otherwise run nothing, or everything, and look fine.
    """
    for name in (*only, *skip):
        if not any(is_named(check.id, [name]) for check in checks):
            raise NoSuchCheck(f"no check is called {name}")
    return [
        check
        for check in checks
        if (not only or is_named(check.id, only)) and not is_named(check.id, skip)
    ]


def run(
    names: Sequence[str],
    options: Options,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Record:
    """The record of the wanted checks of the named tiers.

    Args:
        say: called with a line when a tier begins.

    Raises:
        NoSuchCheck: see :func:`select`.
        ModuleNotFoundError: a named tier needs a package that is not installed.
    """
    began, begin = datetime.now(UTC), perf_counter()
    modules = {name: tiers.load(name) for name in names}
    known = {name: module.checks() for name, module in modules.items()}
    wanted = set(select([check for some in known.values() for check in some], only, skip))
    device = host.describe_device(options.device)
    machine = host.machine(device)
    found = []
    # libraries print; stdout belongs to the record
    with contextlib.redirect_stdout(sys.stderr):
        for name, module in modules.items():
            applies = getattr(module, "applies", lambda check, options: True)
            chosen = [c for c in known[name] if c in wanted and applies(c, options)]
            if chosen:
                say(f"{name}: {len(chosen)} checks")
            elif wanted & set(known[name]):
                say(f"{name}: the wanted checks need another size or kind of device")
            found += (
                record.of_result(name, skips.judge(_clean(result), machine))
                for result in _complete(chosen, module.run(chosen, options))
            )
    gpu_is_ours = device.build == "rocm" and device.architecture.split(":")[0] == TARGET
    return Record(
        created=began,
        command=list(names),
        size=options.size.value,
        subject="packages" if gpu_is_ours else "harness",
        versions=host.versions(),
        packages=host.packages(),
        host=host.describe_host(),
        device=device,
        checks=found,
        summary=record.summarise(found),
        seconds=round(perf_counter() - begin, 1),
    )


def _complete(chosen: list[Check], results):
    """The results, plus a failure for each check that a tier left out: not run is not passed."""
    missing = dict.fromkeys(chosen)
    for result in results:
        missing.pop(result.check, None)
        yield result
    for check in missing:
        yield Result(check, State.FAILED, "the tier gave no result for it")


def _clean(result: Result) -> Result:
    return replace(result, reason=host.shorten(result.reason))
