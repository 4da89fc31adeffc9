# SPDX-License-Identifier: BSD-3-Clause
"""Launches of kernels from Python, with numpy arrays in and out."""

import math
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from strix_emulate.code import hidden
from strix_emulate.code.decode import Instruction
from strix_emulate.code.kernel import STACK, Argument, Image, Kernel
from strix_emulate.errors import EmulatorError
from strix_emulate.memory.arena import READ_ONLY, UNWRITTEN, WRITABLE, Arena
from strix_emulate.memory.findings import CHECKS, Note
from strix_emulate.native import library as native
from strix_emulate.run.machine import Machine
from strix_emulate.run.options import Options, Outcome
from strix_emulate.run.program import Block, Program


@dataclass(frozen=True)
class Buffer:
    """The array that a pointer argument points into.

    Attributes:
        data: The array. A launch copies it to global memory, and copies the results back unless all
            buffers in the array have the mode "in".
        mode: "in" traps on stores. "out" reports loads of bytes that no store wrote, if the launch
            makes checks. "inout" allows all accesses, and also applies if buffers in the same array
            have different modes.
        offset: Offset of the pointer from the array's start, in bytes.
        host: Host address of the array, if the kernel may reach it by a pointer in another array;
            else 0.
    """

    data: np.ndarray
    mode: str = "inout"
    offset: int = 0
    host: int = 0


@dataclass(frozen=True)
class Launch:
    """The outcome of a launch.

    Attributes:
        kernel: The kernel.
        instructions: Its instructions, or those that replaced them.
        executed: Number of executed wave-instructions.
        seconds: CPU seconds of all processes.
        blocks: Basic blocks by address, each with the number of entries into it.
        cores: Number of processor cores that were used.
        one_core_reason: Why the kernel had to stay on one core although more were allowed, or "".
        notes: Findings that did not end the launch.
        disabled_checks: Checks that were not made.
    """

    kernel: Kernel
    instructions: list[Instruction]
    executed: int
    seconds: float
    blocks: dict[int, Block]
    cores: int
    one_core_reason: str
    notes: list[Note] = field(default_factory=list)
    disabled_checks: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Size:
    """Size of a launch.

    Attributes:
        grid: Workgroups as (x, y, z).
        block: Threads of a workgroup as (x, y, z).
        lds: Bytes of LDS of a workgroup.
    """

    grid: tuple[int, ...]
    block: tuple[int, ...]
    lds: int


@dataclass(frozen=True)
class _Placed:
    """An array in global memory.

    Attributes:
        address: Its address.
        data: The array.
        mode: The mode of all buffers in the array if they agree, or else "inout".
    """

    address: int
    data: np.ndarray
    mode: str


#: Mode of an array in global memory by the mode of its buffers.
_MODES = {"in": READ_ONLY, "inout": WRITABLE, "out": UNWRITTEN}
#: Format for Python's `struct` of an argument that is passed by value, by its size in bytes.
_INTEGER_FORMATS = {1: "B", 2: "H", 4: "I", 8: "Q"}
_FLOAT_FORMATS = {2: "e", 4: "f", 8: "d"}
#: Bytes for the queue and the dispatch packet. They include the unused space that the arena leaves
#: after the queue, the packet, the arguments and the image.
_EXTRA_ROOM = 2048
#: Maximum number of bytes that the arena leaves unused after an array.
_SPACE = 256


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
        kernel: The kernel.
        grid: Number of workgroups as (x,), (x, y) or (x, y, z).
        arguments: One value for each argument in the kernel's metadata: a buffer, a number, or None
            for a null pointer. Hidden arguments cannot be given. The last two arguments can be left
            out if they are pointers, because Triton appends two scratch pointers.
        threads: Number of threads of a workgroup, or a tuple like grid. None for the maximum in the
            metadata.
        lds: Bytes of LDS in addition to the kernel's own. None for the kernel's launch_lds.
        options: How the launch is executed.
        instructions: Decoded instructions to run instead of the kernel's own, to modify a kernel.
        reachable: Arrays that the kernel finds by a pointer stored in another array. Each has its
            host address in Buffer.host.

    Raises:
        Trap: The kernel did something forbidden or unsupported. The message says where.
        EmulatorError: The arguments do not match the kernel, or the GPU cannot launch this size.
    """
    options = options or Options()
    program = Program(instructions) if instructions is not None else _load(kernel, options)
    kernel = kernel.with_stack(STACK)
    size = _find_size(kernel, grid, threads, lds)
    buffers = [a for a in (*arguments, *reachable) if isinstance(a, Buffer)]
    arena = _make_arena(kernel, program, options, buffers)
    placed = _place_arrays(arena, buffers)
    kernarg = arena.place(_pack_arguments(kernel, arguments, placed, size), READ_ONLY)
    machine = _make_machine(kernel, program, arena, options, size, kernarg)
    started = time.process_time()
    outcome = machine.run(kernarg, size.grid, size.block)
    seconds = time.process_time() - started + outcome.seconds
    _read_back(arena, placed)
    return _describe_launch(kernel, program, options, outcome, seconds)


def _describe_launch(
    kernel: Kernel,
    program: Program,
    options: Options,
    outcome: Outcome,
    seconds: float,
) -> Launch:
    # Copy the blocks, because a later launch of the same program changes the counts in the
    # program's blocks.
    blocks = {at: replace(block) for at, block in outcome.blocks.items()}
    return Launch(
        kernel,
        program.instructions,
        outcome.executed,
        seconds,
        blocks,
        outcome.cores,
        outcome.one_core_reason,
        outcome.notes,
        options.disabled_checks if options.checks else frozenset(CHECKS),
    )


def _find_size(
    kernel: Kernel,
    grid: tuple[int, ...],
    threads: int | tuple[int, ...] | None,
    lds: int | None,
) -> _Size:
    """Return the size of a launch.

    Raises:
        EmulatorError: The GPU cannot launch a grid or workgroups of that size, or with that much
            LDS.
    """
    if not isinstance(threads, tuple):
        threads = (threads or kernel.max_threads,)
    block = (*threads, 1, 1)[: max(3, len(threads))]
    grid = (*grid, 1, 1)[: max(3, len(grid))]
    is_valid = len(grid) == len(block) == 3 and min(grid) >= 1 and min(block) >= 1
    if not is_valid or math.prod(block) > kernel.target.threads or not fits_packet(grid, block):
        raise EmulatorError(
            f"{kernel.name}: grid {grid} with {block} threads cannot be launched: each needs one "
            "to three sizes of at least 1, a workgroup can have at most "
            f"{kernel.target.threads} threads, and a dimension at most 2**32 - 1"
        )
    launch_lds = kernel.launch_lds if lds is None else lds
    total = kernel.lds + launch_lds
    if launch_lds < 0 or total > kernel.target.lds:
        raise EmulatorError(
            f"{kernel.name}: {kernel.lds} bytes of LDS and {launch_lds} more at launch; expected 0 "
            f"or more at launch, and at most {kernel.target.lds} in all"
        )
    return _Size(grid, block, total)


def _find_image(kernel: Kernel, program: Program) -> Image | None:
    """Return the kernel's image if the code may use constants, variables or functions in it.

    The code finds them with S_GETPC. Without this instruction, return None.
    """
    if any(ins.name == "s_getpc_b64" for ins in program.instructions):
        return kernel.image
    return None


def _make_arena(
    kernel: Kernel,
    program: Program,
    options: Options,
    buffers: list[Buffer],
) -> Arena:
    """Return global memory with room for the arrays and everything else that a launch needs."""
    array_sizes = {id(buffer.data): buffer.data.nbytes + _SPACE for buffer in buffers}
    size = sum(array_sizes.values()) + kernel.kernarg + _EXTRA_ROOM
    image = _find_image(kernel, program)
    if image:
        size += len(image.data)
    is_shared = options.cores > 1
    arena = Arena(size, program.cell, options.checks, options.checks, is_shared)
    arena.whole_words = program.whole_words
    return arena


def _make_machine(
    kernel: Kernel,
    program: Program,
    arena: Arena,
    options: Options,
    size: _Size,
    kernarg: int,
) -> Machine:
    """Place the image (if needed), queue and packet in memory; return the launch's `Machine`."""
    image = _find_image(kernel, program)
    code = _place_image(arena, image) if image else 0
    queue = arena.place(np.zeros(64, np.uint8), READ_ONLY)
    data = make_packet(kernel, size.grid, size.block, size.lds, kernarg)
    dispatch = arena.place(data, READ_ONLY)
    return Machine(kernel, program, arena, options, size.lds, code, dispatch, queue)


def _place_arrays(arena: Arena, buffers: list[Buffer]) -> dict[int, _Placed]:
    """Place each array once, even if several buffers point into it. Return the arrays by id()."""
    placed: dict[int, _Placed] = {}
    for buffer in {id(buffer.data): buffer for buffer in buffers}.values():
        modes = {other.mode for other in buffers if other.data is buffer.data}
        mode = modes.pop() if len(modes) == 1 else "inout"
        raw = np.ascontiguousarray(buffer.data).reshape(-1).view(np.uint8)
        address = arena.place(raw, _MODES[mode])
        placed[id(buffer.data)] = _Placed(address, buffer.data, mode)
        if buffer.host:
            arena.alias(buffer.host, len(raw), address)
    return placed


def _read_back(arena: Arena, placed: dict[int, _Placed]) -> None:
    """Copy the results of a launch into its arrays."""
    for array in placed.values():
        if array.mode != "in":
            data = array.data
            raw = arena.fetch(array.address, data.nbytes)
            data[...] = raw.view(data.dtype).reshape(data.shape)


def _load(kernel: Kernel, options: Options) -> Program:
    library = native.load_library() if options.native else None
    return _cached_program(kernel, kernel.image, library, options.disabled_checks)


@lru_cache(maxsize=32)
def _cached_program(
    kernel: Kernel,
    _image: Image | None,
    _library: native.Library | None,
    _disabled_checks: frozenset[str],
) -> Program:
    """Return the program for all launches of a kernel with the same library and disabled checks.

    All parameters are part of the cache's key. The image is one of them because kernels compare
    equal even if their images differ.
    """
    return Program.from_kernel(kernel)


def _place_image(arena: Arena, image: Image) -> int:
    """Place the image in global memory. Return the address of the kernel's first instruction."""
    raw = np.frombuffer(image.data, np.uint8).copy()
    start = arena.place(raw, WRITABLE)
    first = int(arena.arrays[1, -1])
    for place in image.pointers:
        pointer = arena.bytes[first + place : first + place + 8].view(np.uint64)
        pointer += np.uint64(start)
    return start + image.entry


def fits_packet(grid: tuple[int, ...], block: tuple[int, ...]) -> bool:
    """Return whether a dispatch packet can state a launch's threads: 32 bits per dimension."""
    return all(g * b < 1 << 32 for g, b in zip(grid, block, strict=True))


def make_packet(
    kernel: Kernel,
    grid,
    block,
    lds: int,
    kernarg: int,
) -> np.ndarray:
    """Return an hsa_kernel_dispatch_packet_t. Device functions read the grid's size from it.

    Args:
        kernel: The kernel.
        grid: Workgroups as (x, y, z).
        block: Threads of a workgroup as (x, y, z).
        lds: Bytes of LDS of a workgroup.
        kernarg: Address of the arguments.
    """
    threads = [g * b for g, b in zip(grid, block, strict=True)]
    dimensions = max([i + 1 for i in range(3) if threads[i] > 1], default=1)
    raw = struct.pack(
        "<6H5I3Q",
        2,
        dimensions,
        *block,
        0,
        *threads,
        kernel.scratch,
        lds,
        0,
        kernarg,
        0,
    )
    return np.frombuffer(raw.ljust(64, b"\0"), np.uint8)


def _pack_arguments(
    kernel: Kernel,
    arguments: list[Buffer | int | float | None],
    placed: dict[int, _Placed],
    size: _Size,
) -> np.ndarray:
    """Return the bytes of the kernarg segment.

    Raises:
        EmulatorError: The arguments do not match the kernel.
    """
    raw = bytearray(max(kernel.kernarg, 8))
    declared = [a for a in kernel.arguments if not a.kind.startswith("hidden")]
    hidden.write(raw, kernel, size.grid, size.block)
    if len(arguments) > len(declared):
        raise EmulatorError(
            f"{kernel.name} takes {len(declared)} arguments, {len(arguments)} given"
        )
    for i, argument in enumerate(declared):
        if i < len(arguments):
            _pack_argument(
                raw,
                f"{kernel.name}: argument {i}",
                argument,
                arguments[i],
                placed,
            )
        elif argument.kind == "by_value" or i < len(declared) - 2:
            # Only the last two arguments may be left out, and only if they are pointers, because
            # Triton appends two scratch pointers. They are then null.
            raise EmulatorError(
                f"{kernel.name}: argument {i} is missing; the kernel declares arguments 0 to "
                f"{len(declared) - 1}"
            )
    return np.frombuffer(bytes(raw), np.uint8)


def _pack_argument(
    raw: bytearray,
    label: str,
    argument: Argument,
    value: Buffer | int | float | None,
    placed: dict[int, _Placed],
) -> None:
    """Write one argument into the kernarg segment. `label` names the argument in messages."""
    is_pointer = argument.kind in ("global_buffer", "dynamic_shared_pointer")
    if is_pointer != (value is None or isinstance(value, Buffer)):
        expected = "a pointer" if is_pointer else f"{argument.size} bytes by value"
        raise EmulatorError(f"{label} must be {expected}")
    if value is None:
        struct.pack_into("<Q", raw, argument.offset, 0)
    elif isinstance(value, Buffer):
        address = placed[id(value.data)].address + value.offset
        struct.pack_into("<Q", raw, argument.offset, address)
    else:
        formats = _FLOAT_FORMATS if isinstance(value, float) else _INTEGER_FORMATS
        if argument.size not in formats:
            raise EmulatorError(
                f"{label} has {argument.size} bytes and cannot be given as {type(value).__name__}"
            )
        if not isinstance(value, float):
            value = int(value) & ((1 << 8 * argument.size) - 1)
        try:
            struct.pack_into(f"<{formats[argument.size]}", raw, argument.offset, value)
        except OverflowError:
            raise EmulatorError(f"{label}: {value} does not fit into a float") from None
