# SPDX-License-Identifier: BSD-3-Clause
"""Execute intercepted Triton launches with strix-emulate: the compiled gfx1151 code, on a CPU."""

import ctypes
import gc
from functools import partial

import numpy as np
import strix_emulate as emulator
import torch

from strix_validate.triton.stand_in import InterceptedLaunch


def execute(launch: InterceptedLaunch) -> tuple[emulator.Launch, str]:
    """Execute the compiled kernel on CPU tensors, with every check of the emulator.

    Returns:
        The launch, and the race in LDS that it has unless barriers wait for what is outstanding,
        as Triton's own fences before them ask: it is not Triton's but LLVM's. "" for none.

    Raises:
        Trap: the kernel did something forbidden. EmulatorError: a tensor is not in host memory.
    """
    compiled, values = launch.compiled, launch.values()
    kernel = emulator.parse_elf(compiled.asm["hsaco"], compiled.name, compiled.metadata.shared)[0]
    storages: dict[int, np.ndarray] = {}
    arguments = [
        _pointer(values[name], storages)
        if hasattr(values[name], "data_ptr")
        else _number(values[name], kind)
        for name, kind in compiled.src.signature.items()
        if kind != "constexpr"  # folded into the code
    ]
    tables = [
        t for t in values.values() if getattr(t, "dtype", None) in (torch.int64, torch.uint64)
    ]
    known = set(storages)
    reachable = [
        _pointer(tensor, storages) for tensor in _pointed_to(tables)
        if tensor.untyped_storage().data_ptr() not in known
    ]  # fmt: skip
    threads = compiled.metadata.num_warps * 32
    run = partial(
        emulator.launch, kernel, launch.workgroups(), arguments, threads=threads,
        reachable=reachable,
    )  # fmt: skip
    try:
        return run(), ""
    except emulator.Trap as trap:  # the tensors are as before the launch
        if trap.kind != "race" or "LDS" not in str(trap):
            raise
        try:
            return run(options=emulator.Options(drains=True)), str(trap)
        except emulator.Trap:
            raise trap from None


def _pointed_to(tables: list) -> list:
    """Find live tensors, one for each storage, whose addresses stand in these integer tensors."""
    if not tables:
        return []
    addresses = np.unique(np.concatenate([t.detach().view(-1).numpy().view("i8") for t in tables]))
    found = {}
    for tensor in (x for x in gc.get_objects() if isinstance(x, torch.Tensor)):
        if tensor.device.type == "cpu" and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            if ((addresses >= start) & (addresses < start + storage.nbytes())).any():
                found[start] = tensor
    return list(found.values())


def _number(value, kind: str) -> int | float | None:
    if value is None:
        return None
    return float(value) if kind.startswith("fp") else int(value)


def _pointer(tensor, storages: dict[int, np.ndarray]) -> emulator.Buffer:
    """Point to the bytes of the tensor's storage, one array for all tensors that share it."""
    # triton_kernels wrap a torch tensor
    tensor = getattr(getattr(tensor, "storage", None), "data", tensor)
    storage = tensor.untyped_storage()
    if storage.device.type != "cpu":
        raise emulator.EmulatorError(
            f"a tensor is on {storage.device}; the emulator needs host memory"
        )
    address = storage.data_ptr()
    if address not in storages:
        raw = (ctypes.c_uint8 * storage.nbytes()).from_address(address)
        storages[address] = np.frombuffer(raw, np.uint8)
    return emulator.Buffer(storages[address], "inout", tensor.data_ptr() - address, host=address)
