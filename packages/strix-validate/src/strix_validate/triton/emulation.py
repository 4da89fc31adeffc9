# SPDX-License-Identifier: BSD-3-Clause
"""Execute the compiled gfx1151 code of intercepted Triton launches on a CPU, with strix-emulate."""

import ctypes
import gc
from functools import partial
from typing import Any

import numpy as np
import strix_emulate as emulator
import torch

from strix_validate.triton.stand_in import InterceptedLaunch

_WAVE_SIZE = 32
#: Dtypes of tensors that may hold addresses of other tensors.
_ADDRESS_DTYPES = (torch.int64, torch.uint64)


def execute(launch: InterceptedLaunch) -> tuple[emulator.Launch, str]:
    """Execute a compiled kernel on CPU tensors, with every check of the emulator.

    Returns:
        The executed launch, and a message, or "" if there is none. The message describes a race in
        LDS that disappears when each barrier waits for all outstanding LDS operations. Triton's
        fences before these barriers request this wait, so LLVM lost it.

    Raises:
        Trap: A check of the emulator failed.
        EmulatorError: A tensor is not in host memory.
    """
    compiled = launch.compiled
    elf = compiled.asm["hsaco"]
    kernel = emulator.parse_elf(elf, compiled.name, compiled.metadata.shared)[0]
    values = launch.values()
    storages: dict[int, np.ndarray] = {}
    arguments = _build_arguments(compiled.src.signature, values, storages)
    reachable = _build_reachable(values, storages)
    run = partial(
        emulator.launch,
        kernel,
        launch.workgroups(),
        arguments,
        threads=compiled.metadata.num_warps * _WAVE_SIZE,
        reachable=reachable,
    )
    try:
        return run(), ""
    except emulator.Trap as trap:
        if trap.kind != "race" or "LDS" not in str(trap):
            raise
        # After a trap the tensors are as before the launch, so the launch can be repeated.
        try:
            launched = run(options=emulator.Options(barriers_wait=True))
        except emulator.Trap:
            raise trap from None
        return launched, str(trap)


def _build_arguments(
    signature: dict[str, str],
    values: dict[str, Any],
    storages: dict[int, np.ndarray],
) -> list:
    """Return the kernel's arguments: buffers for tensors, otherwise numbers or None.

    Args:
        signature: Triton's types, by name of the parameter.
        values: The arguments' values in Python, by name of the parameter.
        storages: Arrays of host memory by address. The function adds the tensors' arrays.
    """
    arguments: list[emulator.Buffer | int | float | None] = []
    for name, type_name in signature.items():
        if type_name == "constexpr":  # the value is in the code, so the kernel takes no argument
            continue
        value = values[name]
        if hasattr(value, "data_ptr"):
            arguments.append(_point_to(value, storages))
        else:
            arguments.append(_convert_number(value, type_name))
    return arguments


def _build_reachable(
    values: dict[str, Any],
    storages: dict[int, np.ndarray],
) -> list[emulator.Buffer]:
    """Return buffers of the tensors whose addresses the kernel reads from other tensors.

    Tensors that share a storage with one of the arguments are left out.
    """
    argument_addresses = set(storages)
    tables = []
    for value in values.values():
        if getattr(value, "dtype", None) in _ADDRESS_DTYPES:
            tables.append(value)
    buffers = []
    for tensor in _find_pointed_to(tables):
        if tensor.untyped_storage().data_ptr() not in argument_addresses:
            buffers.append(_point_to(tensor, storages))
    return buffers


def _find_pointed_to(tables: list) -> list:
    """Find the live CPU tensors whose addresses these integer tensors hold, one per storage."""
    if not tables:
        return []
    numbers = [table.detach().view(-1).numpy().view("i8") for table in tables]
    addresses = np.unique(np.concatenate(numbers))
    tensors = {}
    for candidate in gc.get_objects():
        if not isinstance(candidate, torch.Tensor):
            continue
        if candidate.device.type != "cpu" or candidate.layout is not torch.strided:
            continue
        storage = candidate.untyped_storage()
        start = storage.data_ptr()
        end = start + storage.nbytes()
        if ((addresses >= start) & (addresses < end)).any():
            tensors[start] = candidate
    return list(tensors.values())


def _convert_number(value, type_name: str) -> int | float | None:
    if value is None:
        return None
    return float(value) if type_name.startswith("fp") else int(value)


def _point_to(tensor, storages: dict[int, np.ndarray]) -> emulator.Buffer:
    """Return the buffer of a tensor. Tensors with the same storage share one array of its bytes."""
    # A tensor of triton_kernels wraps a torch tensor, which this line unwraps.
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
    offset = tensor.data_ptr() - address
    return emulator.Buffer(storages[address], "inout", offset, host=address)
