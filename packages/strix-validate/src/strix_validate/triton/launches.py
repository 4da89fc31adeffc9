# SPDX-License-Identifier: BSD-3-Clause
"""Describe the kernels that a function runs on the GPU."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

#: The largest number of kernels that a description names.
_MAX_KERNELS = 3


def describe(function: Callable[[], object]) -> str:
    """Call a function once, and describe the GPU kernels that took longest, the longest first.

    A Triton kernel's name is followed by its tile, warps, registers and spilled registers:
    "attn_fwd (BLOCK_M=128 BLOCK_N=64 num_warps=8, 256 VGPRs, 0 spilled)".
    """
    launched: dict[str, Any] = {}
    with _record_launches(launched), profile(activities=[ProfilerActivity.CUDA]) as trace:
        function()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in trace.events():
        times[event.name] += event.device_time_total
    descriptions = []
    for name, duration in times.most_common(_MAX_KERNELS):
        if not duration:
            continue
        if name in launched:
            descriptions.append(f"{name} ({describe_options(launched[name])})")
        else:
            descriptions.append(shorten(name))
    return ", ".join(descriptions)


def shorten(name: str) -> str:
    """Return a C++ kernel's name without its return type, template arguments and parameters."""
    return re.split("[<(]", name.removeprefix("void "))[0]


def _record_launches(launched: dict[str, Any]) -> Any:
    """Return a context in which each Triton launch adds its compiled kernel to a dict, by name."""
    from triton.compiler import CompiledKernel

    original = CompiledKernel.launch_metadata

    def launch_metadata(kernel: Any, *args: Any) -> Any:
        launched[kernel.name] = kernel
        return original(kernel, *args)

    return patch.object(CompiledKernel, "launch_metadata", launch_metadata)


def describe_options(kernel: Any) -> str:
    """Return the tile, warps, registers and spilled registers of a loaded Triton kernel.

    Of the kernel's constants, only block sizes are included.
    """
    arg_names = kernel.src.fn.arg_names
    constants = {arg_names[path[0]]: value for path, value in kernel.src.constants.items()}
    parts = [f"{name}={constants[name]}" for name in sorted(constants) if "BLOCK" in name]
    parts.append(f"num_warps={kernel.metadata.num_warps}")
    return f"{' '.join(parts)}, {kernel.n_regs} VGPRs, {kernel.n_spills} spilled"
