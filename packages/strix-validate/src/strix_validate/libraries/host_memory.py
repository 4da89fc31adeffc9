# SPDX-License-Identifier: BSD-3-Clause
"""Check that GPU kernels read and write host memory: pinned, and managed by the driver."""

import contextlib
import ctypes
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from strix_validate.checks import PLACEHOLDER, Body, CannotRun, Check, Result, RunOptions, require
from strix_validate.numerics import comparison, reference

ISSUE = "https://github.com/ggml-org/llama.cpp/issues/28211"
#: Numbers of elements. Two of them are neither a power of two nor a whole number of pages.
SIZES = (1, 1000, 1 << 20, (1 << 20) + 3)
#: How often the CPU or the GPU writes to the same memory. A cache that is not invalidated still has
#: the values of the previous round.
ROUNDS = 10
KINDS = ("pinned", "managed")


@dataclass(frozen=True)
class _Use:
    """A use of host memory by the GPU.

    Attributes:
        check: Checks the use with a kind of host memory.
        title: A description of the use.
        catches: The bug that the check catches.
    """

    check: Callable[[str, RunOptions], dict | Result]
    title: str
    catches: str


def checks() -> dict[Check, Body]:
    """Return one check for each kind of host memory and use, with its function."""
    bodies: dict[Check, Body] = {}
    for kind in KINDS:
        for name, use in _USES.items():
            title = f"{kind} host memory: {use.title}"
            check = Check(f"host-memory/{kind}-{name}", title, f"{use.catches}: {ISSUE}")
            bodies[check] = partial(use.check, kind)
    return bodies


def _read_by_kernel(host: Tensor, view: Tensor, values: Tensor) -> Tensor:
    host.copy_(values)
    return read(view).cpu()


def _write_by_kernel(host: Tensor, view: Tensor, values: Tensor) -> Tensor:
    write(view, values.to(view.device))
    if view.is_cuda:
        torch.cuda.synchronize()
    return host


def _check_words(transfer: Callable[..., Tensor], kind: str, options: RunOptions) -> dict:
    """Check that a transfer inverts each bit of every word."""
    generator = torch.Generator().manual_seed(1)
    for size in SIZES:
        with shared(kind, size, options.device) as (host, view):
            for n in range(ROUNDS):
                values = torch.randint(-(2**31), 2**31, (size,), generator=generator).int()
                wrong = int((transfer(host, view, values) != ~values).sum())
                require(not wrong, f"{wrong} of {size} words are wrong in round {n + 1}")
    return {"words": sum(SIZES) * ROUNDS}


def _check_weights(kind: str, options: RunOptions) -> Result:
    """Compare a linear layer with float64. Its weight is in host memory."""
    tokens, rows, columns = (16, 512, 768)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((tokens, columns), generator=generator).half()
    weight = torch.randn((rows, columns), generator=generator).half()
    with shared(kind, rows * columns // 2, options.device) as (host, view):
        host.view(torch.float16).view(rows, columns).copy_(weight)
        weight_view = view.view(torch.float16).view(rows, columns)
        out = multiply(x.to(options.device), weight_view).cpu()
    return comparison.compare(PLACEHOLDER, {"out": out}, reference.layer(x, weight), torch.float16)


def read(view: Tensor) -> Tensor:
    """Read words in a kernel that inverts each bit; a plain copy might not use a kernel."""
    return torch.bitwise_not(view)


def write(view: Tensor, values: Tensor) -> None:
    """Write values in a kernel that inverts each bit."""
    torch.bitwise_not(values, out=view)


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Compute a linear layer."""
    return x @ weight.T


_USES = {
    "read": _Use(
        partial(_check_words, _read_by_kernel),
        "a kernel reads from it",
        "a GPU that reads stale or wrong host memory",
    ),
    "write": _Use(
        partial(_check_words, _write_by_kernel),
        "a kernel writes to it",
        "a store that the CPU does not see",
    ),
    "weights": _Use(
        _check_weights,
        "a matrix product reads weights from it",
        "wrong logits from weights on the host",
    ),
}


@contextlib.contextmanager
def shared(kind: str, size: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield two tensors of 32-bit words in the same memory: one on the CPU, one on the device."""
    if device != "cuda":
        host = torch.empty(size, dtype=torch.int32)
        yield host, host
        return
    if kind == "pinned":
        host = torch.empty(size, dtype=torch.int32, pin_memory=True)
        yield host, torch.as_tensor(_Words(host.data_ptr(), size), device="cuda")
        torch.cuda.synchronize()
        return
    with _allocate_managed(4 * size) as address:
        words = (ctypes.c_int32 * size).from_address(address)
        view = torch.as_tensor(_Words(address, size), device="cuda")
        yield torch.frombuffer(words, dtype=torch.int32), view
        torch.cuda.synchronize()


@contextlib.contextmanager
def _allocate_managed(size: int) -> Iterator[int]:
    """Allocate managed memory of a size in bytes, and yield its address."""
    runtime, prefix = _find_runtime()
    pointer = ctypes.c_void_p()
    attach_global = 1
    allocate = getattr(runtime, f"{prefix}MallocManaged")
    status = allocate(
        ctypes.byref(pointer),
        ctypes.c_size_t(size),
        ctypes.c_uint(attach_global),
    )
    require(status == 0, f"{prefix}MallocManaged returned {status}")
    try:
        yield pointer.value or 0
    finally:
        getattr(runtime, f"{prefix}Free")(pointer)


class _Words:
    """32-bit words at an address, of which torch can make a tensor."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "<i4",
            "data": (address, False),
            "version": 2,
        }


def _find_runtime() -> tuple[ctypes.CDLL, str]:
    """Return the runtime that torch has loaded, and the prefix of its functions.

    Raises:
        CannotRun: torch has loaded no runtime.
    """
    torch.cuda.init()
    for line in Path("/proc/self/maps").read_text().splitlines():
        match = re.search(r"/\S*/lib(amdhip64|cudart)\S*\.so\S*$", line)
        if match:
            prefix = "hip" if match.group(1) == "amdhip64" else "cuda"
            return ctypes.CDLL(match.group()), prefix
    raise CannotRun("torch has loaded no HIP or CUDA runtime")
