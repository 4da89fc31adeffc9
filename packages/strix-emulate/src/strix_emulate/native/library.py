# SPDX-License-Identifier: BSD-3-Clause
"""Runs of instructions in C: libstrix-emulate, where it is installed; else numpy does all.

emulate.c stops in front of what it does not decide (a race, an address out of bounds); that one
instruction is numpy's. So both give the same results and the same traps.
"""

import ctypes
import hashlib
import os
import sys
from functools import cache
from pathlib import Path

import numpy as np

from strix_emulate.code.decode import EXEC, NULL, Operand, Unknown
from strix_emulate.instructions.crosslane import dpp_lanes, gives_zero
from strix_emulate.instructions.microops import MicroOp
from strix_emulate.memory.waves import ZERO, constant, constant_half

_I, _L, _P = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
FILES = {"none": 0, "v": 1, "s": 2, "const": 3, "mask": 4, "scc": 5, "spare": 6, "lane": 7}
HANDLERS = {
    "vector": 0, "scalar": 1, "wmma_f16": 2, "wmma_bf16": 3, "permlane16": 4, "permlanex16": 5,
    "readlane": 6, "readfirstlane": 7, "writelane": 8, "load": 9, "store": 10,
    "saveexec": 11, "load_scalar": 12, "bpermute": 13, "permute": 14, "swizzle": 15,
    "wmma_half": 16, "wmma_iu8": 17, "permlane64": 18, "atomic": 19, "guard": 20,
}  # fmt: skip
#: by level of x86-64: some of what only processors of that level have
LEVELS = {
    2: {"sse4_2", "popcnt"}, 3: {"avx2", "fma", "bmi2", "f16c"},
    4: {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma"},
}  # fmt: skip
SOURCES = (
    "native/emulate.c", "native/numbers.h", "native/memory.h", "native/shadow.h",
    "native/matrix.h", "native/exchange.h",
    "native/library.py", "native/generate.py", "instructions/microops.py",
    "instructions/atomics.py", "instructions/mnemonics.py",
    *(f"arithmetic/{name}.py" for name in (
        "translate", "operations", "subdword", "doubles", "floats", "scalars", "mode_register",
    )),
)  # fmt: skip
_CLAMP, _FLUSH, _FACTOR = 1, 2, 4


def _fields(kind, names: str) -> list:
    return [(name, kind) for name in names.split()]


class COperand(ctypes.Structure):
    """An operand, as emulate.c reads it."""

    _fields_ = [*_fields(_I, "file index bits half neg abs flush pad"), ("value", ctypes.c_uint64)]


class COp(ctypes.Structure):
    """An instruction, as emulate.c reads it."""

    _fields_ = [
        ("function", _P), *_fields(_I, "handler results sources after write_exec step place"),
        ("factor", ctypes.c_float),
        *_fields(_I, "dpp zero_bound fetch_inactive"),
        *_fields(_I, "size words offset half extended memory highest resource acquires indexed"
                    " number polls"),
        ("valid", ctypes.c_uint32), ("written", ctypes.c_uint32 * 2),
        ("lanes", ctypes.c_uint8 * 32), ("apertures", ctypes.c_uint32 * 2),
        ("target", COperand), ("flag", COperand), ("source", COperand * 4),
    ]  # fmt: skip


class CMemory(ctypes.Structure):
    """A space of memory, as emulate.c reads it."""

    _fields_ = [
        *_fields(_P, "bytes written read writers places slots"),
        *_fields(_L, "size stride shift strict copies"),
        ("ranges", _P), *_fields(_L, "range_count last seen"),
    ]  # fmt: skip


#: Whether atomics ordered accesses with two tags.
ORDER = ctypes.CFUNCTYPE(ctypes.c_int, _L, _L)


class CState(ctypes.Structure):
    """The registers of waves, as emulate.c reads them."""

    _fields_ = [
        *_fields(_P, "v s scc"), *_fields(_L, "n halves"), ("tags", _P),
        *_fields(_L, "exec_changed ordered"),
        ("order", _P), ("asked", _L * 2), ("answer", _L),
        *_fields(_P, "stored touched polled"), ("polled_memory", _L),
        ("masks", _P), ("spare", _P * 8), ("log", _P),
        *_fields(_L, "full readers shared"), ("memory", CMemory * 3),
    ]  # fmt: skip


class _Named(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("function", _P)]


class Library:
    """A loaded libstrix-emulate; functions: addresses by the names of the tables."""

    def __init__(self, path: Path):
        self.path = path
        found = ctypes.CDLL(str(path))
        found.strix_operations.restype = ctypes.POINTER(_Named)
        found.strix_digest.restype = ctypes.c_char_p
        if found.strix_digest().decode() != digest():
            raise OSError(f"{path} was made from another version of strix-emulate")
        self.run = found.strix_run
        self.run.restype = ctypes.c_long
        self.run.argtypes = [_P, _P, ctypes.c_long, _P]
        self.functions: dict[str, int] = {}
        for entry in found.strix_operations():
            if not entry.name:
                break
            self.functions[entry.name.decode()] = entry.function


@cache
def digest() -> str:
    """Hash all that decides what the library does."""
    return hashlib.sha256(
        b"".join((Path(__file__).parents[1] / name).read_bytes() for name in SOURCES)
    ).hexdigest()


def loaded() -> Library | None:
    """Return the library for this processor: of the folder STRIX_EMULATE_NATIVE, or installed."""
    return _found()[0]


@cache
def _found() -> tuple[Library | None, str]:
    """Find the library, or why numpy goes on alone."""
    asked = os.environ.get("STRIX_EMULATE_NATIVE", "")
    if asked == "off":
        return None, "STRIX_EMULATE_NATIVE is off"
    folder = Path(asked) if asked else Path(sys.prefix, "lib")
    for level in range(processor_level(), 1, -1):
        path = folder / f"libstrix-emulate-v{level}.so"
        try:
            if path.exists():
                return Library(path), path.name
        except (OSError, AttributeError) as error:
            return None, str(error)
    return None, "no libstrix-emulate is installed (package strix-emulate-native)"


def forget() -> None:
    """Forget the library: the environment variable changed."""
    _found.cache_clear()


def processor_level() -> int:
    """Return the level of x86-64, 2 to 4, that this machine has; 1 where Linux does not say."""
    try:
        flags = Path("/proc/cpuinfo").read_text().partition("\nflags")[2].partition("\n")[0].split()
    except OSError:
        return 1
    return max([1, *(level for level, wanted in LEVELS.items() if wanted <= set(flags))])


def describe() -> str:
    """Say in a line what executes instructions here."""
    found, why = _found()
    return f"{why}, and numpy for the rest" if found else f"numpy alone: {why}"


def _bits(kind: str) -> int:
    return 32 if kind in ("mask", "scc", "lane") else int(kind[-2:])


def _operand(op: Operand, kind: str, keeps: bool = True) -> COperand:
    """Encode an operand. Raise Unknown for what C does not read."""
    if kind == "bf16":
        raise Unknown("bf16")
    if kind == "lane":
        return COperand(bits=32, file=FILES["lane"])
    found = COperand(bits=_bits(kind), index=op.index, half=op.half == "h", neg=op.neg, abs=op.abs,
                     flush=kind in ("f16", "f32", "f64") and not keeps)  # fmt: skip
    if kind == "scc":
        found.file = FILES["scc"]
    elif op.kind == "const" or (op.kind == "s" and op.index == NULL):
        if kind == "mask":
            raise Unknown("a constant mask")
        number = op if op.kind == "const" else ZERO
        half = op.half and op.kind == "const"
        value = constant_half(op, kind, op.half == "h") if half else constant(number, kind)
        found.file = FILES["const"]
        found.value = int(np.asarray(value).view(f"u{np.asarray(value).itemsize}"))
    else:
        found.file = FILES["mask" if kind == "mask" else op.kind]
    return found


def encode(micro: MicroOp, functions: dict[str, int]) -> COp:
    """Encode the micro as C executes it. Raise Unknown if C has none."""
    op = COp(handler=HANDLERS[micro.handler], sources=len(micro.sources))
    if micro.function is not None:
        if micro.name not in functions:
            raise Unknown("not in the library")
        op.function = functions[micro.name]
    if micro.handler == "scalar" and {"f16", "h16"} & {kind for _, kind in micro.sources}:
        raise Unknown("16 bits of a scalar register")
    keeps = micro.keeps or (True,) * len(micro.sources)
    for i, ((source, kind), keep) in enumerate(zip(micro.sources, keeps, strict=True)):
        op.source[i] = _operand(source, kind, keep)
    _encode_targets(op, micro)
    if micro.dpp is not None:
        _encode_dpp(op, micro.dpp)
    if micro.after.keys() & {"factor", "clamp"} and micro.kind != "f32":
        raise Unknown("output modifiers of 16 and 64 bits")
    op.after = (_CLAMP * ("clamp" in micro.after) | _FLUSH * ("flush" in micro.after)
                | _FACTOR * ("factor" in micro.after))  # fmt: skip
    op.factor = micro.after.get("factor", 1)
    for key, value in micro.access.items():
        setattr(op, key, value)
    op.highest = _highest(op, micro.handler)
    return op


def _encode_targets(op: COp, micro: MicroOp) -> None:
    written: list[int] = []
    if micro.target is not None:
        if micro.target.kind not in ("v", "s"):
            raise Unknown("target")
        op.target = COperand(file=FILES[micro.target.kind], index=micro.target.index,
                             bits=_bits(micro.kind), half=micro.target.half == "h")  # fmt: skip
        if micro.target.kind == "s" and micro.target.index != NULL:
            count = micro.access.get("words", _bits(micro.kind) // 32)
            written += range(micro.target.index, micro.target.index + count)
    if micro.flag is not None:
        op.flag = COperand(file=FILES[micro.flag.kind], index=micro.flag.index, bits=32)
        written += [micro.flag.index] * (micro.flag.kind == "s")
    op.write_exec = bool({EXEC, EXEC + 1} & {*written}) or micro.handler == "saveexec"


def _encode_dpp(op: COp, dpp: dict) -> None:
    source, valid, lanes = dpp_lanes(dpp)
    op.dpp, op.zero_bound, op.fetch_inactive = 1, gives_zero(dpp), bool(dpp.get("fi"))
    # both halves of a wave64 have the same sources, in themselves, but other rows to write
    op.lanes[:] = source[:32].tolist()
    valid, lanes = (np.packbits(x, bitorder="little").view(np.uint32) for x in (valid, lanes))
    op.valid, op.written[:] = int(valid[0]), lanes.tolist()


def _highest(op: COp, handler: str) -> int:
    """Return the last vector register that it touches; 8 are counted for each operand of WMMA."""
    ends = [-1]
    matrix = handler.startswith("wmma")
    for operand in (op.target, *list(op.source)[: op.sources]):
        if operand.file == FILES["v"]:
            count = 8 if matrix else max(operand.bits // 32, 1)
            ends.append(operand.index + (max(count, op.words) if operand is op.target else count))
    return max(ends) - 1


def encode_step(micros: tuple[MicroOp, ...], functions: dict[str, int]) -> list[COp]:
    """Encode operations of one step, in an order in which none writes what a later one reads."""
    ops = [encode(micro, functions) for micro in micros]
    if len(ops) < 2:
        return ops
    first, second = ops
    if first.handler == HANDLERS["store"] or not _feeds(first, second):
        return ops
    if not _feeds(second, first):
        return [second, first]
    if first.handler == HANDLERS["load"]:
        raise Unknown("both loads write the address")
    move = COp.from_buffer_copy(first)
    bits = first.target.bits
    move.function, move.sources, move.after = functions[f"v_mov_b{bits}"], 1, 0
    move.source[0] = COperand(file=FILES["spare"], bits=bits)
    first.target.file = FILES["spare"]
    return [first, second, move]


def _feeds(first: COp, second: COp) -> bool:
    """Return whether the second reads what the first writes."""
    width = max(1, first.words) if first.words else max(1, first.target.bits // 32)
    written = set(range(first.target.index, first.target.index + width))
    for source in list(second.source)[: second.sources]:
        read = {source.index, source.index + (source.bits == 64)}
        other_half = source.bits == first.target.bits == 16 and source.half != first.target.half
        if source.file == first.target.file and written & read and not other_half:
            return True
    return bool(first.flag.file)
