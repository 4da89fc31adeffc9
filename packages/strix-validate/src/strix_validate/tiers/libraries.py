# SPDX-License-Identifier: BSD-3-Clause
"""What lies below attention: products, factors, gradients, convolutions, memory, torch.compile.

Each group runs in a child process, because what it looks for also crashes: see isolated.
"""

from collections.abc import Iterator

import torch

from strix_validate.checks import Check, Result, RunOptions, State
from strix_validate.libraries import convolution, factors, gemm, gradients, host_memory, inductor
from strix_validate.tiers import isolated

_MODULES = (gemm, factors, gradients, host_memory, inductor)


def checks() -> list[Check]:
    """List the checks of all libraries; convolutions last, which take longest."""
    return [check for module in (*_MODULES, convolution) for check in module.checks()]


def applies(check: Check, options: RunOptions) -> bool:
    """Return False on a CPU for MIOpen's find modes, which change nothing there."""
    is_conv = check.id.startswith("conv/")
    return options.device == "cuda" or not is_conv or not convolution.environment(check)


def run(wanted: list[Check], options: RunOptions) -> Iterator[Result]:
    """See strix_validate.tiers."""
    if options.device == "cuda" and not torch.cuda.is_available():
        yield from (Result(check, State.SKIPPED, "torch sees no GPU") for check in wanted)
        return
    for module in _MODULES:
        known = set(module.checks())
        yield from isolated.run(module.__name__, [c for c in wanted if c in known], options)
    known = set(convolution.checks())
    wanted = [check for check in wanted if check in known]
    for mode, environment in convolution.MODES.items():
        chosen = [check for check in wanted if convolution.mode_of(check) == mode]
        found = isolated.run(convolution.__name__, chosen, options, environment)
        yield from map(convolution.with_remedy, found)
