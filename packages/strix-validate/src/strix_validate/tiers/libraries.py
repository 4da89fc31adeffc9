# SPDX-License-Identifier: BSD-3-Clause
"""What lies below attention: products, factors, convolutions, memory, torch.compile; bitsandbytes.

Each group runs in a child process, because what it looks for also crashes: see isolated.
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
from strix_validate.tiers import isolated

_MODULES = (gemm, races, host_memory, inductor, bitsandbytes_numerics)
_ON_CPU = "on a CPU: this checks the harness, and no library of a GPU"


def checks() -> list[Check]:
    """List the checks of all libraries; convolutions last, which take longest."""
    return [check for module in (*_MODULES, convolution) for check in module.checks()]


def applies(check: Check, options: RunOptions) -> bool:
    """Return False on a CPU for MIOpen's find modes, which change nothing there."""
    has_mode = check in convolution.checks() and convolution.MODES[convolution.mode_of(check)]
    return options.device == "cuda" or not has_mode


def run(wanted: list[Check], options: RunOptions) -> Iterator[Result]:
    """See strix_validate.tiers."""
    for result in _run(wanted, options):
        said = f"{result.reason} {_ON_CPU}".strip() if options.device == "cpu" else result.reason
        yield replace(result, reason=said)


def _run(wanted: list[Check], options: RunOptions) -> Iterator[Result]:
    for module in _MODULES:
        chosen = [check for check in wanted if check in module.checks()]
        yield from isolated.run(module.__name__, chosen, options)
    for mode, environment in convolution.MODES.items():
        chosen = [check for check in wanted if check.id.startswith(f"conv/{mode}/")]
        found = isolated.run(convolution.__name__, chosen, options, environment)
        yield from map(convolution.with_remedy, found)
