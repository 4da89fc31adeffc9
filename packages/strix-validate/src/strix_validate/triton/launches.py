# SPDX-License-Identifier: BSD-3-Clause
"""Which kernels a call runs on the GPU."""

from collections import Counter
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

#: Kernels that are named, the longest first.
_MOST = 3


def describe(function: Callable[[], object]) -> str:
    """Call a function once; return its GPU kernels, the one that takes longest first.

    Of a kernel of Triton's, its tile, options, registers and spilled registers stand behind its
    name: "attn_fwd (BLOCK_M=128 BLOCK_N=64 num_warps=8, 256 VGPRs, 0 spilled)".
    """
    options = {}
    with _watched(options), profile(activities=[ProfilerActivity.CUDA]) as trace:
        function()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in trace.events():
        times[event.name] += event.device_time_total
    names = [name for name, duration in times.most_common(_MOST) if duration]
    return ", ".join(f"{name} ({options[name]})" if name in options else name for name in names)


def _watched(options: dict[str, str]):
    """Return a context in which each launch of Triton's adds its kernel's options, by name."""
    from triton.compiler import CompiledKernel

    original = CompiledKernel.launch_metadata

    def launch_metadata(kernel, *given):
        options[kernel.name] = describe_options(kernel)
        return original(kernel, *given)

    return patch.object(CompiledKernel, "launch_metadata", launch_metadata)


def describe_options(kernel) -> str:
    """Say which tile and options a compiled kernel has; constants that are no tile are left out."""
    names = kernel.src.fn.arg_names
    constants = {names[path[0]]: value for path, value in kernel.src.constants.items()}
    parts = [f"{name}={constants[name]}" for name in sorted(constants) if "BLOCK" in name]
    parts.append(f"num_warps={kernel.metadata.num_warps}")
    return f"{' '.join(parts)}, {kernel.n_regs} VGPRs, {kernel.n_spills} spilled"
