# SPDX-License-Identifier: BSD-3-Clause
"""Run Triton kernels on torch's tensors in the memory of the emulated device.

The program prints JSON: whether a kernel's results are right for three sizes, and facts about the
device. With the argument "outside", the program then launches a kernel that accesses memory outside
of its tensor.
"""

import json
import sys
import threading

from strix_emulate import torch_device

torch_device.install()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def add(X, Y, Z, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, i < n, other=0.0)
    tl.store(Z + i, x + tl.load(Y + i, i < n, other=0.0), i < n)


def run(n: int, length: int) -> bool:
    """Add the first n numbers of two tensors; return whether all `length` sums are right.

    If n is larger than `length`, the kernel accesses memory outside of the tensors.
    """
    x = torch.randn(length, device="cuda")
    y = torch.randn(length).cuda()
    z = torch.zeros_like(x)
    add[(triton.cdiv(n, 128),)](x, y, z, n, BLOCK=128)
    torch.cuda.synchronize()
    return torch.equal(z, x + y)


@torch.library.custom_op("emulated::where", mutates_args=(), device_types="cuda")
def where(x: torch.Tensor) -> torch.Tensor:
    """Return whether the tensor is on the device inside of a custom operator."""
    return torch.tensor(x.is_cuda, device="cuda")


def call_registered_kernels() -> list[bool]:
    """Register operators for CUDA only, in two different ways; return whether each works."""
    defined = torch.library.Library("emulated_kernels", "DEF")
    for name in ("first", "second"):
        defined.define(f"{name}(Tensor x) -> Tensor")
    defined.impl("first", torch.neg, "CUDA")
    for_cuda = torch.library.Library("emulated_kernels", "IMPL", "CUDA")
    for_cuda.impl("second", torch.neg)
    x = torch.ones(3, device="cuda")
    operators = torch.ops.emulated_kernels
    return [torch.equal(f(x), -x) for f in (operators.first, operators.second)]


def measure(n: int) -> float:
    """Return the milliseconds that a run takes, measured with events as an autotuner does."""
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    run(n, n)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def clear_caches() -> None:
    """Clear a large buffer, as an autotuner does before it measures a kernel."""
    driver = triton.runtime.driver.active
    cache = driver.get_empty_cache_for_benchmark()
    driver.clear_cache(cache)
    answers["cleared"] = True


def add_arrays() -> list[bool]:
    """Add numpy's arrays on the device; return whether each way to move them there works."""
    array = np.ones(128, np.float32)
    sums = []
    for x in (
        torch.from_numpy(array).cuda(),
        torch.from_numpy(array).to("cuda"),
        torch.from_numpy(array).to(torch.ones(1, device="cuda").device),
        torch.as_tensor(array, device="cuda"),
        torch.nn.Parameter(torch.from_numpy(array)).cuda(),
    ):
        z = torch.zeros_like(x)
        add[(1,)](x, x, z, 128, BLOCK=128)
        sums.append(torch.equal(z, torch.full((128,), 2.0)))
    return sums


def use_accelerator() -> bool:
    """Call functions of torch.accelerator; return whether they find one device and use it."""
    accelerator = torch.accelerator
    accelerator.set_device_index("cuda:0")
    with accelerator.device_index(accelerator.current_device_index()):
        x = torch.ones(1, device=accelerator.current_accelerator())
    accelerator.synchronize()
    accelerator.empty_cache()
    return accelerator.is_available() and accelerator.device_count() == 1 and x.is_cuda


def pin() -> bool:
    """Copy numbers to the device from tensors in pinned memory; return whether they are right."""
    allocated = torch.tensor([1, 2], pin_memory=True, device="cpu")
    moved = torch.tensor([1, 2], device="cpu").pin_memory()
    copies = [x.to("cuda", non_blocking=True).tolist() for x in (allocated, moved)]
    return copies == [[1, 2], [1, 2]]


torch.manual_seed(0)
answers = {
    "equal": [run(n, n) for n in (1, 128, 1000)],
    "milliseconds": measure(1),
    "arrays": add_arrays(),
    "memory": torch.cuda.mem_get_info(),
    "total_memory": torch.cuda.get_device_properties(0).total_memory,
    "accelerator": use_accelerator(),
    "registered": call_registered_kernels(),
    "pinned": pin(),
    "device": [
        torch.empty(1, device="cuda").is_cuda,
        bool(where(torch.ones(1))),
        torch.cuda.get_device_name(),
    ],
}
# torch's modes are active only in the thread that enters them. The autotuner has to work in another
# thread, too.
thread = threading.Thread(target=clear_caches)
thread.start()
thread.join()
generator = torch.Generator(device="cuda").manual_seed(1)
answers["drawn"] = torch.rand(4, generator=generator, device="cuda").is_cuda
print(json.dumps(answers), flush=True)
if sys.argv[1:] == ["outside"]:
    run(1 << 20, 128)
