# SPDX-License-Identifier: BSD-3-Clause
"""A GPU kernel reads and writes host memory: pinned, and managed by the driver."""

import contextlib
import ctypes
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from strix_validate.checks import ANY, Body, CannotRun, Check, Result, RunOptions, require
from strix_validate.numerics import comparison, reference

ISSUE = "https://github.com/ggml-org/llama.cpp/issues/28211"
#: Elements; neither a power of two nor a multiple of a page, but for one.
SIZES = (1, 1000, 1 << 20, (1 << 20) + 3)
#: Times that the CPU writes the same memory anew: a cache that is not invalidated shows the old.
ROUNDS = 10
KINDS = ("pinned", "managed")


def checks() -> dict[Check, Body]:
    """Return one check for each kind of host memory and use, with its function."""
    return {
        Check(
            f"host-memory/{kind}-{name}", f"{kind} host memory: {title}", f"{why}: {ISSUE}"
        ): partial(body, kind)
        for kind in KINDS
        for name, (body, title, why) in _BODIES.items()
    }


def _read_it(host: Tensor, view: Tensor, values: Tensor) -> Tensor:
    host.copy_(values)
    return read(view).cpu()


def _write_it(host: Tensor, view: Tensor, values: Tensor) -> Tensor:
    write(view, values.to(view.device))
    if view.is_cuda:
        torch.cuda.synchronize()
    return host


def _used(use: Callable[..., Tensor], kind: str, options: RunOptions) -> dict:
    generator = torch.Generator().manual_seed(1)
    for size in SIZES:
        with shared(kind, size, options.device) as (host, view):
            for n in range(ROUNDS):
                values = torch.randint(-(2**31), 2**31, (size,), generator=generator).int()
                wrong = int((use(host, view, values) != ~values).sum())
                require(not wrong, f"{wrong} of {size} words are wrong in round {n + 1}")
    return {"words": sum(SIZES) * ROUNDS}


def _weights(kind: str, options: RunOptions) -> Result:
    tokens, rows, columns = 16, 512, 768
    generator = torch.Generator().manual_seed(3)
    x, weight = (
        torch.randn(size, generator=generator).half()
        for size in ((tokens, columns), (rows, columns))
    )
    with shared(kind, rows * columns // 2, options.device) as (host, view):
        host.view(torch.float16).view(rows, columns).copy_(weight)
        out = multiply(x.to(options.device), view.view(torch.float16).view(rows, columns)).cpu()
    return comparison.compare(ANY, {"out": out}, reference.layer(x, weight), torch.float16)


def read(view: Tensor) -> Tensor:
    """Read by a kernel, with every bit inverted: a mere copy might be made without a kernel."""
    return torch.bitwise_not(view)


def write(view: Tensor, values: Tensor) -> None:
    """Write the values by a kernel, with every bit inverted."""
    torch.bitwise_not(values, out=view)


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Compute a linear layer."""
    return x @ weight.T


_BODIES: dict[str, tuple[Callable[[str, RunOptions], dict | Result], str, str]] = {
    "read": (
        partial(_used, _read_it), "a kernel reads it",
        "a GPU that reads stale or wrong host memory",
    ),
    "write": (partial(_used, _write_it), "a kernel writes it", "a store that the CPU does not see"),
    "weights": (_weights, "a product with weights in it", "wrong logits from weights on the host"),
}  # fmt: skip


@contextlib.contextmanager
def shared(kind: str, size: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield size words of 32 bits as the CPU's tensor and as the device's: the same memory."""
    if device != "cuda":
        host = torch.empty(size, dtype=torch.int32)
        yield host, host
        return
    if kind == "pinned":
        host = torch.empty(size, dtype=torch.int32, pin_memory=True)
        yield host, torch.as_tensor(_Words(host.data_ptr(), size), device="cuda")
        torch.cuda.synchronize()
        return
    runtime, prefix = _runtime()
    address = ctypes.c_void_p()
    attach_global = 1
    status = getattr(runtime, f"{prefix}MallocManaged")(
        ctypes.byref(address), ctypes.c_size_t(4 * size), ctypes.c_uint(attach_global)
    )
    require(status == 0, f"{prefix}MallocManaged returned {status}")
    place = address.value or 0
    try:
        words = (ctypes.c_int32 * size).from_address(place)
        view = torch.as_tensor(_Words(place, size), device="cuda")
        yield torch.frombuffer(words, dtype=torch.int32), view
        torch.cuda.synchronize()
    finally:
        getattr(runtime, f"{prefix}Free")(address)


class _Words:
    """Memory at an address, for torch to view: words of 32 bits."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "<i4", "data": (address, False), "version": 2,
        }  # fmt: skip


def _runtime() -> tuple[ctypes.CDLL, str]:
    """Find the runtime that torch has loaded; return it, and the prefix of its functions."""
    torch.cuda.init()
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.search(r"/\S*/lib(amdhip64|cudart)\S*\.so\S*$", line)
        if found:
            return ctypes.CDLL(found.group()), "hip" if found.group(1) == "amdhip64" else "cuda"
    raise CannotRun("torch has loaded no HIP or CUDA runtime")
