# SPDX-License-Identifier: BSD-3-Clause
"""Launches of kernels from Python, with numpy arrays in and out."""

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from strix_emulate.code import hidden
from strix_emulate.code.decode import Instruction
from strix_emulate.code.kernel import STACK, Image, Kernel
from strix_emulate.errors import EmulatorError
from strix_emulate.memory.arena import READ_ONLY, UNWRITTEN, WRITABLE, Arena
from strix_emulate.memory.findings import CHECKS, Note
from strix_emulate.native import library as native
from strix_emulate.run.machine import Machine, Options
from strix_emulate.run.program import Block, Program


@dataclass(frozen=True)
class Buffer:
    """The array that a pointer argument points into, offset bytes from its start.

    A launch reads data first and updates it at the end. mode: "in" traps on stores, "out" traps on
    loads before a store, "inout" allows both. host: an address of the process at which the kernel
    may find the array as well, through a pointer in another array.
    """

    data: np.ndarray
    mode: str = "inout"
    offset: int = 0
    host: int = 0


@dataclass(frozen=True)
class Launch:
    """The outcome of a launch: wave-instructions, CPU seconds, how often each block was entered.

    notes, off: what checks found without ending it; those that were not made. cores: on how many;
    one_core: why on one though more were allowed, if that is the kernel's.
    """

    kernel: Kernel
    instructions: list[Instruction]
    executed: int
    seconds: float
    blocks: dict[int, Block]
    cores: int
    one_core: str
    notes: list[Note] = field(default_factory=list)
    off: frozenset[str] = frozenset()


_STATES = {"in": READ_ONLY, "inout": WRITABLE, "out": UNWRITTEN}
#: By-value arguments: bytes and whether the number is a float.
_FORMATS = {(1, False): "b", (2, False): "h", (4, False): "i", (8, False): "q", (2, True): "e",
            (4, True): "f", (8, True): "d"}  # fmt: skip


def launch(
    kernel: Kernel,
    grid: tuple[int, ...],
    arguments: list[Buffer | int | float | None],
    *,
    threads: int | tuple[int, ...] | None = None,
    lds: int | None = None,
    options: Options | None = None,
    instructions: list[Instruction] | None = None,
    reachable: Sequence[Buffer] = (),
) -> Launch:
    """Run a kernel over a grid of workgroups.

    Args:
        arguments: a buffer, a number, or None (a null pointer) for each argument in the kernel's
            metadata, except the trailing hidden and scratch ones.
        threads: workgroup size; None is the metadata's maximum.
        lds: bytes of LDS to allocate on top of the kernel's own; None is what the file says.
        reachable: arrays that are no arguments, but that pointers in arguments point to; with host.
        instructions: the decoded kernel, to run a modified one.

    Raises:
        Trap: the kernel did something forbidden; the message says where.
        EmulatorError: the arguments do not match the kernel.
    """
    options = options or Options()
    program = _program(kernel, options) if instructions is None else Program(instructions)
    kernel = kernel.with_stack(STACK)
    grid, block, total_lds = _sizes(kernel, grid, threads, lds)
    image = kernel.image if _reads_code(program.instructions) else None
    given = [a for a in (*arguments, *reachable) if isinstance(a, Buffer)]
    more = kernel.kernarg + (len(image.data) if image else 0) + 2048
    size = sum({id(a.data): a.data.nbytes + 256 for a in given}.values()) + more
    arena = Arena(size, program.cell, options.checks, options.checks, options.cores > 1)
    arena.whole_words = program.whole_words
    placed = _place(arena, given)
    kernarg = arena.place(_pack(kernel, arguments, placed, grid, block), READ_ONLY)
    code = _place_image(arena, image) if image else 0
    queue = arena.place(np.zeros(64, np.uint8), READ_ONLY)
    dispatch = arena.place(packet(kernel, grid, block, total_lds, kernarg), READ_ONLY)
    machine = Machine(kernel, program, arena, options, total_lds, code, dispatch, queue)
    started = time.process_time()
    outcome = machine.run(kernarg, grid, block)
    seconds = time.process_time() - started + outcome.seconds
    _read_back(arena, placed)
    return Launch(
        kernel, program.instructions, outcome.executed, seconds,
        {at: replace(block) for at, block in outcome.blocks.items()}, outcome.cores,
        outcome.one_core, outcome.notes, options.off if options.checks else frozenset(CHECKS),
    )  # fmt: skip


def _sizes(kernel: Kernel, grid, threads, lds: int | None) -> tuple[tuple, tuple, int]:
    """Return grid and workgroup as (x, y, z), and all LDS in bytes. Raise EmulatorError."""
    block = threads if isinstance(threads, tuple) else (threads or kernel.max_threads,)
    block, grid = ((*block, 1, 1)[:3], (*grid, 1, 1)[:3])
    if min(grid) < 1 or min(block) < 1 or np.prod(block) > kernel.target.threads:
        raise EmulatorError(f"{kernel.name}: grid {grid} with {block} threads cannot be launched")
    size, most = kernel.lds + (kernel.launch_lds if lds is None else lds), kernel.target.lds
    if size > most:
        raise EmulatorError(f"{kernel.name}: {size} bytes of LDS, a workgroup has {most}")
    return grid, block, size


def _place(arena: Arena, given: list[Buffer]) -> dict[int, tuple]:
    """Place each array once, even if several arguments point into it.

    Returns by its id the address, the array, and the mode that all arguments give it, or "inout".
    """
    placed: dict[int, tuple] = {}
    for key, a in {id(a.data): a for a in given}.items():
        modes = {other.mode for other in given if other.data is a.data}
        mode = modes.pop() if len(modes) == 1 else "inout"
        raw = np.ascontiguousarray(a.data).reshape(-1).view(np.uint8)
        placed[key] = (arena.place(raw, _STATES[mode]), a.data, mode)
        if a.host:
            arena.alias(a.host, len(raw), placed[key][0])
    return placed


def _read_back(arena: Arena, placed: dict[int, tuple]) -> None:
    for address, data, mode in placed.values():
        if mode != "in":
            raw = arena.fetch(address, data.nbytes)
            data[...] = raw.view(data.dtype).reshape(data.shape)


def _program(kernel: Kernel, options: Options) -> Program:
    return _kept(kernel, kernel.image, options.native and native.loaded(), options.off)


@lru_cache(maxsize=32)
def _kept(kernel: Kernel, _image: Image | None, _library, _off: frozenset[str]) -> Program:
    """Keep a program for launches of the same kernel in the same way."""
    return Program.of(kernel)


def _reads_code(instructions: list[Instruction]) -> bool:
    return any(ins.name == "s_getpc_b64" for ins in instructions)


def _place_image(arena: Arena, image: Image) -> int:
    """Place the image for constants, variables, function pointers; return the kernel's address."""
    raw = np.frombuffer(image.data, np.uint8).copy()
    start = arena.place(raw, WRITABLE)
    first = int(arena.arrays[1, -1])
    for place in image.pointers:
        arena.bytes[first + place : first + place + 8].view(np.uint64)[...] += np.uint64(start)
    return start + image.entry


def packet(kernel: Kernel, grid, block, lds: int, kernarg: int) -> np.ndarray:
    """Make hsa_kernel_dispatch_packet_t: what HIP's and OpenCL's functions read sizes from."""
    threads = [g * b for g, b in zip(grid, block, strict=True)]
    dimensions = max([i + 1 for i in range(3) if threads[i] > 1], default=1)
    raw = struct.pack("<6H5I3Q", 2, dimensions, *block, 0, *threads, kernel.scratch, lds, 0,
                      kernarg, 0)  # fmt: skip
    return np.frombuffer(raw.ljust(64, b"\0"), np.uint8)


def _pack(kernel: Kernel, arguments, placed, grid, block) -> np.ndarray:
    """Pack the kernarg segment."""
    raw = bytearray(max(kernel.kernarg, 8))
    declared = [a for a in kernel.arguments if not a.kind.startswith("hidden")]
    hidden.write(raw, kernel, grid, block)
    if len(arguments) > len(declared):
        raise EmulatorError(
            f"{kernel.name} takes {len(declared)} arguments, {len(arguments)} given"
        )
    for i, described in enumerate(declared):
        if i >= len(arguments):
            # the scratch pointers that Triton appends stay null
            if described.kind == "by_value" or i < len(declared) - 2:
                raise EmulatorError(f"{kernel.name}: argument {i} of {len(declared)} is missing")
            continue
        value = arguments[i]
        is_pointer = described.kind in ("global_buffer", "dynamic_shared_pointer")
        if is_pointer != (value is None or isinstance(value, Buffer)):
            wanted = "a pointer" if is_pointer else f"{described.size} bytes by value"
            raise EmulatorError(f"{kernel.name}: argument {i} is {wanted}")
        if is_pointer:
            address = 0 if value is None else placed[id(value.data)][0] + value.offset
            struct.pack_into("<Q", raw, described.offset, address)
            continue
        code = _FORMATS.get((described.size, isinstance(value, float)))
        if code is None:
            raise EmulatorError(
                f"{kernel.name}: argument {i} of {described.size} bytes is not supported"
            )
        if not isinstance(value, float):
            value, code = int(value) & ((1 << 8 * described.size) - 1), code.upper()
        struct.pack_into(f"<{code}", raw, described.offset, value)
    return np.frombuffer(bytes(raw), np.uint8)
