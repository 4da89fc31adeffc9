# SPDX-License-Identifier: BSD-3-Clause
"""Check operations other than attention: matrix products, factorisations, convolutions and so on.

Each group of checks runs in child processes of its own, because some of the bugs that the checks
look for crash the process; see strix_validate.tiers.isolated.
"""

from collections.abc import Iterator
from dataclasses import replace

from strix_validate.checks import Check, Result, RunOptions
from strix_validate.libraries import (
    bitsandbytes_numerics,
    convolution,
    gemm,
    host_memory,
    inductor,
    races,
)
from strix_validate.tiers import Tier, isolated

_MODULES = (gemm, races, host_memory, inductor, bitsandbytes_numerics)
_ON_CPU = "on a CPU: this checks the harness only, and no GPU library"


def checks() -> list[Check]:
    """List the checks of all libraries. Convolutions come last, because they take longest."""
    listed: list[Check] = []
    for module in (*_MODULES, convolution):
        listed += module.checks()
    return listed


def applies(check: Check, options: RunOptions) -> bool:
    """Return False on a CPU for a check that sets MIOpen's find mode, which has no effect there."""
    if options.device == "cuda" or check not in convolution.checks():
        return True
    environment = convolution.MODES[convolution.get_mode(check)]
    return not environment


def run(selected: list[Check], options: RunOptions) -> Iterator[Result]:
    """Yield one result per selected check."""
    for result in _run(selected, options):
        if options.device == "cpu":
            reason = f"{result.reason} {_ON_CPU}".strip()
            result = replace(result, reason=reason)
        yield result


def _run(selected: list[Check], options: RunOptions) -> Iterator[Result]:
    for module in _MODULES:
        bodies = module.checks()
        chosen = [check for check in selected if check in bodies]
        yield from isolated.run(module.__name__, chosen, options)
    for mode, environment in convolution.MODES.items():
        chosen = [check for check in selected if check.id.startswith(f"conv/{mode}/")]
        results = isolated.run(convolution.__name__, chosen, options, environment)
        yield from map(convolution.add_remedy, results)


TIER = Tier(checks, run, applies=applies)
