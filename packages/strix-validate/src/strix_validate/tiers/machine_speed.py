# SPDX-License-Identifier: BSD-3-Clause
"""Measure the speed of the machine itself: copies in memory and to the GPU, matrix products."""

from collections.abc import Callable
from functools import cache

import torch

from strix_validate.checks import Body, Check, RunOptions, need_gpu
from strix_validate.timing import Timing, time_call

#: fp16 operations per clock of one multiprocessor's matrix units.
#: RDNA 3: 512 for each compute unit (WMMA, ISA guide). HIP counts two compute units as one
#: multiprocessor: https://github.com/ROCm/hip/issues/3198.
#: NVIDIA: without sparsity, from the data sheets of A100 and H100.
_OPERATIONS_PER_CLOCK = {
    "gfx1151": 1024,
    "gfx1100": 1024,
    "sm_80": 2048,
    "sm_90": 4096,
}
#: Bytes that are copied to the GPU and back to the host.
_HOST_COPY_BYTES = 256 * 2**20
#: Numbers of elements and of bytes of a copy within the GPU's memory, in fp16.
_COPY_ELEMENTS = 1 << 28
_COPY_BYTES = 2 * _COPY_ELEMENTS
#: Number of rows and of columns of each matrix in a product, and the product's operations.
_PRODUCT_SIZE = 4096
_PRODUCT_OPERATIONS = 2 * _PRODUCT_SIZE**3


def peak_tflops(arch: str, units: int, clock_mhz: float) -> float | None:
    """Return the peak rate in 10^12 fp16 operations per second.

    The result is None if the operations per clock of the architecture, or the clock, are unknown.
    """
    per_clock = _OPERATIONS_PER_CLOCK.get(arch.split(":")[0])
    if not per_clock or not clock_mhz:
        return None
    return units * per_clock * clock_mhz / 1e6


@cache
def peak(device: str) -> float | None:
    """Return the device's peak rate in 10^12 fp16 operations per second; None if it is unknown."""
    from strix_validate.doctor.host import describe_device

    description = describe_device(device)
    return peak_tflops(
        description.architecture,
        description.units,
        description.clock_mhz,
    )


def _time_on_gpu(
    options: RunOptions,
    shape: tuple[int, ...],
    function: Callable,
    dtype=torch.float16,
) -> Timing:
    """Time a function of two random tensors of this shape."""
    need_gpu(options, "only a GPU's speed is of interest")
    tensors = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2)]
    return time_call(lambda: function(*tensors), "cuda")


def _copy(options: RunOptions) -> dict:
    timing = _time_on_gpu(options, (_COPY_ELEMENTS,), lambda to, x: to.copy_(x))
    # a copy reads and writes each byte, so each byte counts twice
    return {"copy_gbps": 2 * _COPY_BYTES / timing.median / 1e6}


def _product(options: RunOptions) -> dict:
    timing = _time_on_gpu(options, (_PRODUCT_SIZE, _PRODUCT_SIZE), torch.mm)
    rate = _PRODUCT_OPERATIONS / timing.median / 1e9
    measured = {"product_tflops": rate}
    limit = peak(options.device)
    if limit:
        measured["product_of_peak"] = rate / limit
    return measured


def _product_fp32(options: RunOptions) -> dict:
    shape = (_PRODUCT_SIZE, _PRODUCT_SIZE)
    timing = _time_on_gpu(options, shape, torch.mm, torch.float32)
    return {"product_fp32_tflops": _PRODUCT_OPERATIONS / timing.median / 1e9}


def _host_copy(options: RunOptions) -> dict:
    need_gpu(options, "only a GPU's speed is of interest")
    on_host = torch.zeros(_HOST_COPY_BYTES, dtype=torch.uint8).pin_memory()
    on_gpu = on_host.to("cuda")
    to_gpu = time_call(lambda: on_gpu.copy_(on_host), "cuda")
    from_gpu = time_call(lambda: on_host.copy_(on_gpu), "cuda")
    return {
        "to_gpu_gbps": _HOST_COPY_BYTES / to_gpu.median / 1e6,
        "from_gpu_gbps": _HOST_COPY_BYTES / from_gpu.median / 1e6,
    }


#: Function of each check.
CHECKS: dict[Check, Body] = {
    Check(
        "bench/copy",
        "bytes per second that a copy of 512 MiB within the GPU's memory reads and writes",
        "memory that runs in one channel or at a lower clock, which slows decoding down",
    ): _copy,
    Check(
        "bench/product",
        "the rate of a product of 4096 by 4096 fp16 matrices",
        "a library without kernels for this GPU, which is 5 to 10 times slower: "
        "https://github.com/ROCm/legacy-rocm-build/issues/4748",
    ): _product,
    Check(
        "bench/product-fp32",
        "the rate of a product of 4096 by 4096 fp32 matrices",
        "a library that is 20 times slower in fp32 than another one: "
        "https://github.com/ROCm/legacy-rocm-build/issues/5807",
    ): _product_fp32,
    Check(
        "bench/host-copy",
        "bytes per second of a copy of 256 MiB to the GPU, and of one back",
        "models that load slowly from pinned memory, although the GPU shares this memory: "
        "https://llm-tracker.info/_TOORG/Strix-Halo",
    ): _host_copy,
}
