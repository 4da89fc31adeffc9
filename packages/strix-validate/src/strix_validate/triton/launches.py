# SPDX-License-Identifier: BSD-3-Clause
"""Which kernels a call runs on the GPU."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any
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
    launched: dict[str, Any] = {}
    with _watched(launched), profile(activities=[ProfilerActivity.CUDA]) as trace:
        function()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in trace.events():
        times[event.name] += event.device_time_total
    names = [name for name, duration in times.most_common(_MOST) if duration]
    return ", ".join(
        f"{name} ({describe_options(launched[name])})" if name in launched else shorten(name)
        for name in names
    )


def shorten(name: str) -> str:
    """Return the name of a C++ kernel without its result, template arguments and parameters."""
    return re.split("[<(]", name.removeprefix("void "))[0]


def _watched(launched: dict[str, Any]) -> Any:
    """Return a context in which each launch of Triton's adds its compiled kernel, by name."""
    from triton.compiler import CompiledKernel

    original = CompiledKernel.launch_metadata

    def launch_metadata(kernel: Any, *given: Any) -> Any:
        launched[kernel.name] = kernel
        return original(kernel, *given)

    return patch.object(CompiledKernel, "launch_metadata", launch_metadata)


def describe_options(kernel: Any) -> str:
    """Say which tile and options a loaded kernel has; constants that are no tile are left out."""
    names = kernel.src.fn.arg_names
    constants = {names[path[0]]: value for path, value in kernel.src.constants.items()}
    parts = [f"{name}={constants[name]}" for name in sorted(constants) if "BLOCK" in name]
    parts.append(f"num_warps={kernel.metadata.num_warps}")
    return f"{' '.join(parts)}, {kernel.n_regs} VGPRs, {kernel.n_spills} spilled"
