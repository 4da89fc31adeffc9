# SPDX-License-Identifier: BSD-3-Clause
"""Loading of libstrix-emulate, and encoding of instructions for it.

The C library is optional: without it, numpy executes all instructions. emulate.c stops before an
instruction that it cannot judge, for example because of a possible race or an address out of
bounds. numpy then executes that instruction. So results and traps are the same with and without C.
"""

import ctypes
import hashlib
import os
import sys
from functools import cache
from pathlib import Path

import numpy as np

from strix_emulate.code.decode import EXEC, NULL, Operand, Unknown
from strix_emulate.instructions.crosslane import dpp_lanes, reads_zero
from strix_emulate.instructions.microops import MicroOp
from strix_emulate.memory.waves import ZERO, constant_half, constant_value

#: Numbers of the kinds of operands. emulate.c has the same numbers.
FILES = {
    "none": 0,
    "v": 1,
    "s": 2,
    "const": 3,
    "mask": 4,
    "scc": 5,
    "spare": 6,
    "lane": 7,
}
#: Numbers of the handlers of operations. generate.py defines them as macros for emulate.c.
HANDLERS = {
    "vector": 0,
    "scalar": 1,
    "wmma_f16": 2,
    "wmma_bf16": 3,
    "permlane16": 4,
    "permlanex16": 5,
    "readlane": 6,
    "readfirstlane": 7,
    "writelane": 8,
    "load": 9,
    "store": 10,
    "saveexec": 11,
    "load_scalar": 12,
    "bpermute": 13,
    "permute": 14,
    "swizzle": 15,
    "wmma_half": 16,
    "wmma_iu8": 17,
    "permlane64": 18,
    "atomic": 19,
    "guard": 20,
}
#: Processor flags by which each level of x86-64 is recognized.
LEVELS = {
    2: {"sse4_2", "popcnt"},
    3: {"avx2", "fma", "bmi2", "f16c"},
    4: {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma"},
}
#: Files from which the library is made.
SOURCES = (
    "native/emulate.c",
    "native/numbers.h",
    "native/memory.h",
    "native/shadow.h",
    "native/matrix.h",
    "native/exchange.h",
    "native/library.py",
    "native/generate.py",
    "instructions/microops.py",
    "instructions/atomics.py",
    "instructions/mnemonics.py",
    "arithmetic/translate.py",
    "arithmetic/operations.py",
    "arithmetic/subdword.py",
    "arithmetic/doubles.py",
    "arithmetic/floats.py",
    "arithmetic/scalars.py",
    "arithmetic/mode_register.py",
)
#: Output modifiers, as bits of COp.after.
_CLAMP = 1
_FLUSH = 2
_FACTOR = 4

_Int = ctypes.c_int32
_Long = ctypes.c_int64
_Word = ctypes.c_uint32
_Pointer = ctypes.c_void_p


def _fields(kind, names: str) -> list:
    return [(name, kind) for name in names.split()]


class COperand(ctypes.Structure):
    """An operand: the structure Operand of emulate.c."""

    _fields_ = [
        *_fields(_Int, "file index bits half neg abs flush pad"),
        ("value", ctypes.c_uint64),
    ]


class COp(ctypes.Structure):
    """An operation: the structure Op of emulate.c."""

    _fields_ = [
        ("function", _Pointer),
        *_fields(_Int, "handler results sources after write_exec step place"),
        ("factor", ctypes.c_float),
        *_fields(_Int, "dpp zero_bound fetch_inactive"),
        *_fields(_Int, "size words offset half extended memory highest"),
        *_fields(_Int, "resource acquires indexed number polls"),
        ("valid", _Word),
        ("written", _Word * 2),
        ("lanes", ctypes.c_uint8 * 32),
        ("apertures", _Word * 2),
        ("target", COperand),
        ("flag", COperand),
        ("source", COperand * 4),
    ]


class CMemory(ctypes.Structure):
    """A memory: the structure Memory of emulate.c."""

    _fields_ = [
        *_fields(_Pointer, "bytes written read writers store_addresses slots"),
        *_fields(_Long, "size stride shift strict co_writers"),
        ("ranges", _Pointer),
        *_fields(_Long, "range_count last_range accessed_ranges"),
    ]


#: C's type of Order.classify, which returns how atomics order accesses with two tags.
CLASSIFY = ctypes.CFUNCTYPE(ctypes.c_int, _Long, _Long)


class CState(ctypes.Structure):
    """The registers and memories of waves: the structure State of emulate.c."""

    _fields_ = [
        *_fields(_Pointer, "v s scc"),
        *_fields(_Long, "n halves"),
        ("tags", _Pointer),
        *_fields(_Long, "exec_changed atomics_order"),
        ("classify", _Pointer),
        ("classified", _Long * 2),
        ("classification", _Long),
        *_fields(_Pointer, "stored loaded_ranges polled"),
        ("polled_memory", _Long),
        ("masks", _Pointer),
        ("spare", _Pointer * 8),
        ("log", _Pointer),
        *_fields(_Long, "full has_readers shares_cells"),
        ("memory", CMemory * 3),
    ]


class _Named(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", _Pointer),
    ]


class Library:
    """A loaded libstrix-emulate.

    Attributes:
        path: Its file.
        run: strix_run of emulate.c.
        functions: Addresses of functions by their names in the tables.
    """

    def __init__(self, path: Path):
        """Load the library.

        Raises:
            OSError: The library cannot be loaded, or was compiled from another version.
            AttributeError: The library lacks a function.
        """
        self.path = path
        library = ctypes.CDLL(str(path))
        library.strix_operations.restype = ctypes.POINTER(_Named)
        library.strix_digest.restype = ctypes.c_char_p
        if library.strix_digest().decode() != digest():
            raise OSError(f"{path} was compiled from another version of strix-emulate")
        self.run = library.strix_run
        self.run.restype = ctypes.c_long
        self.run.argtypes = [_Pointer, _Pointer, ctypes.c_long, _Pointer]
        self.functions: dict[str, int] = {}
        for entry in library.strix_operations():
            if not entry.name:
                break
            self.functions[entry.name.decode()] = entry.function


@cache
def digest() -> str:
    """Return a hash of the files from which the library is made."""
    package = Path(__file__).parents[1]
    sources = b"".join((package / name).read_bytes() for name in SOURCES)
    return hashlib.sha256(sources).hexdigest()


def load_library() -> Library | None:
    """Return the library for this processor, or None.

    If the environment variable STRIX_EMULATE_NATIVE is set, it is the library's folder, or "off".
    """
    return _load()[0]


@cache
def _load() -> tuple[Library | None, str]:
    """Return the library and its file's name, or None and the reason."""
    setting = os.environ.get("STRIX_EMULATE_NATIVE", "")
    if setting == "off":
        return None, "STRIX_EMULATE_NATIVE is off"
    folder = Path(setting) if setting else Path(sys.prefix, "lib")
    for level in range(processor_level(), 1, -1):
        path = folder / f"libstrix-emulate-v{level}.so"
        try:
            if path.exists():
                return Library(path), path.name
        except (OSError, AttributeError) as error:
            return None, str(error)
    return None, "no libstrix-emulate is installed (package strix-emulate-native)"


def reload() -> None:
    """Make the next call of `load_library` read the environment variable again."""
    _load.cache_clear()


def processor_level() -> int:
    """Return the machine's level of x86-64, from 1 to 4. It is 1 if it is not known."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return 1
    flags = text.partition("\nflags")[2].partition("\n")[0].split()
    levels = [level for level, needed in LEVELS.items() if needed <= set(flags)]
    return max([1, *levels])


def describe() -> str:
    """Return a line that says whether C or numpy executes instructions."""
    library, detail = _load()
    if library is None:
        return f"numpy alone: {detail}"
    return f"{detail}, and numpy for the remaining instructions"


def _count_bits(kind: str) -> int:
    return 32 if kind in ("mask", "scc", "lane") else int(kind[-2:])


def _encode_operand(
    op: Operand,
    kind: str,
    keeps_denormals: bool = True,
) -> COperand:
    """Encode an operand.

    Raises:
        Unknown: C does not support such an operand.
    """
    if kind == "bf16":
        raise Unknown("an operand in bfloat16")
    if kind == "lane":
        return COperand(bits=32, file=FILES["lane"])
    encoded = COperand(
        bits=_count_bits(kind),
        index=op.index,
        half=op.half == "h",
        neg=op.neg,
        abs=op.abs,
        flush=kind in ("f16", "f32", "f64") and not keeps_denormals,
    )
    if kind == "scc":
        encoded.file = FILES["scc"]
    elif op.kind == "const" or (op.kind == "s" and op.index == NULL):
        if kind == "mask":
            raise Unknown("a constant mask")
        encoded.file = FILES["const"]
        encoded.value = _constant_bits(op, kind)
    elif kind == "mask":
        encoded.file = FILES["mask"]
    else:
        encoded.file = FILES[op.kind]
    return encoded


def _constant_bits(op: Operand, kind: str) -> int:
    """Return the bits of a constant, or of the null register."""
    if op.kind != "const":
        value = constant_value(ZERO, kind)
    elif op.half:
        value = constant_half(op, kind, op.half == "h")
    else:
        value = constant_value(op, kind)
    number = np.asarray(value)
    return int(number.view(f"u{number.itemsize}"))


def encode(micro: MicroOp, functions: dict[str, int]) -> COp:
    """Encode an operation for C.

    Args:
        micro: The operation.
        functions: Addresses of functions by name.

    Raises:
        Unknown: C cannot execute it.
    """
    op = COp(handler=HANDLERS[micro.handler], sources=len(micro.sources))
    if micro.function is not None:
        if micro.name not in functions:
            raise Unknown("not in the library")
        op.function = functions[micro.name]
    kinds = {kind for _, kind in micro.sources}
    if micro.handler == "scalar" and kinds & {"f16", "h16"}:
        raise Unknown("16 bits of a scalar register")
    keeps = micro.keeps_denormals or (True,) * len(micro.sources)
    pairs = zip(micro.sources, keeps, strict=True)
    for i, ((source, kind), keeps_denormals) in enumerate(pairs):
        op.source[i] = _encode_operand(source, kind, keeps_denormals)
    _encode_targets(op, micro)
    if micro.dpp is not None:
        _encode_dpp(op, micro.dpp)
    _encode_modifiers(op, micro)
    for name, value in micro.access.items():
        setattr(op, name, value)
    op.highest = _highest_register(op, micro.handler)
    return op


def _encode_modifiers(op: COp, micro: MicroOp) -> None:
    after = micro.after
    if after.keys() & {"factor", "clamp"} and micro.kind != "f32":
        raise Unknown("output modifiers of 16 and 64 bits")
    op.after = 0
    for name, bit in (("clamp", _CLAMP), ("flush", _FLUSH), ("factor", _FACTOR)):
        if name in after:
            op.after |= bit
    op.factor = after.get("factor", 1)


def _encode_targets(op: COp, micro: MicroOp) -> None:
    target = micro.target
    written: set[int] = set()
    if target is not None:
        if target.kind not in ("v", "s"):
            raise Unknown("a target that is not a register")
        op.target = COperand(
            file=FILES[target.kind],
            index=target.index,
            bits=_count_bits(micro.kind),
            half=target.half == "h",
        )
        if target.kind == "s" and target.index != NULL:
            count = micro.access.get("words", _count_bits(micro.kind) // 32)
            written |= set(range(target.index, target.index + count))
    if micro.flag is not None:
        op.flag = COperand(
            file=FILES[micro.flag.kind],
            index=micro.flag.index,
            bits=32,
        )
        if micro.flag.kind == "s":
            written.add(micro.flag.index)
    writes_exec = bool(written & {EXEC, EXEC + 1})
    op.write_exec = writes_exec or micro.handler == "saveexec"


def _encode_dpp(op: COp, dpp: dict) -> None:
    source, valid, lanes = dpp_lanes(dpp)
    op.dpp = 1
    op.zero_bound = reads_zero(dpp)
    op.fetch_inactive = bool(dpp.get("fi"))
    # In a wave64, DPP reads only lanes of the same half. Counted from the start of its half, each
    # source lane is the same in both halves, so the first half describes both. But the rows to
    # write may differ between the halves, so the masks of both are kept.
    op.lanes[:] = source[:32].tolist()
    op.valid = int(_pack_lanes(valid)[0])
    op.written[:] = _pack_lanes(lanes).tolist()


def _pack_lanes(flags: np.ndarray) -> np.ndarray:
    return np.packbits(flags, bitorder="little").view(np.uint32)


def _highest_register(op: COp, handler: str) -> int:
    """Return the number of the last vector register that an operation accesses, or -1.

    Each operand of a matrix operation counts as 8 registers.
    """
    is_matrix = handler.startswith("wmma")
    # The target of a load or store has a register for each word.
    operands = [(op.target, op.words)]
    operands += [(source, 0) for source in list(op.source)[: op.sources]]
    ends = [0]
    for operand, words in operands:
        if operand.file == FILES["v"]:
            count = 8 if is_matrix else max(operand.bits // 32, 1)
            ends.append(operand.index + max(count, words))
    return max(ends) - 1


def encode_step(micros: tuple[MicroOp, ...], functions: dict[str, int]) -> list[COp]:
    """Encode the operations of a step, so that none writes a register that a later one reads.

    Raises:
        Unknown: C cannot execute them.
    """
    ops = [encode(micro, functions) for micro in micros]
    if len(ops) < 2:
        return ops
    first, second = ops
    if first.handler == HANDLERS["store"] or not _feeds(first, second):
        return ops
    if not _feeds(second, first):
        return [second, first]
    if first.handler == HANDLERS["load"]:
        raise Unknown("two loads, each of which writes the address register of the other one")
    # Each operation reads what the other one writes. So the first one writes to a spare register,
    # which is copied to the target at the end.
    move = COp.from_buffer_copy(first)
    bits = first.target.bits
    move.function = functions[f"v_mov_b{bits}"]
    move.sources = 1
    move.after = 0
    move.source[0] = COperand(file=FILES["spare"], bits=bits)
    first.target.file = FILES["spare"]
    return [first, second, move]


def _feeds(first: COp, second: COp) -> bool:
    """Return whether the second operation may read a register that the first one writes.

    It counts as doing so if the first one writes a flag.
    """
    target = first.target
    width = max(1, first.words or target.bits // 32)
    written = set(range(target.index, target.index + width))
    for source in list(second.source)[: second.sources]:
        if source.file != target.file:
            continue
        read = {source.index}
        if source.bits == 64:
            read.add(source.index + 1)
        is_other_half = source.bits == target.bits == 16 and source.half != target.half
        if written & read and not is_other_half:
            return True
    return bool(first.flag.file)
