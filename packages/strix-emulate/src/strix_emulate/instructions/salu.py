# SPDX-License-Identifier: BSD-3-Clause
"""Scalar instructions (SOP1, SOP2, SOPC, SOPK) other than branches, waits and memory."""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np

from strix_emulate.arithmetic.mode_register import (
    HW_ID1,
    MODE,
    SHADER_CYCLES,
    Mode,
    finisher,
    hardware_register,
)
from strix_emulate.arithmetic.scalars import (
    CARRIES,
    COMPARES,
    IMMEDIATE,
    OTHER,
    PLAIN,
    SAVEEXEC,
    SELECTS,
    U32,
    WITH_SCC,
    WREXEC,
)
from strix_emulate.code.decode import EXEC, Instruction, Operand, Unknown
from strix_emulate.code.target import Target
from strix_emulate.errors import Trap
from strix_emulate.instructions.microops import Compiled, MicroOp, compiled_for_c
from strix_emulate.instructions.valu import vector_micro_op
from strix_emulate.memory.addressing import Spaces
from strix_emulate.memory.waits import LGKM, Outstanding, issue, registers
from strix_emulate.memory.waves import Waves, reader, scalar_writer

_SCC = Operand("scc")
#: Scalar instructions with a float as a source or as the result.
_FLOATS = re.compile(r"s_\w+_f(16|32)(_|$)")
#: Number of the message MSG_RTN_GET_REALTIME.
_GET_REALTIME = 0x83
#: Short forms with a constant of 16 bits, and the instructions that they stand for.
_SHORT = {"s_movk_i32": "s_mov_b32", "s_addk_i32": "s_add_i32", "s_mulk_i32": "s_mul_i32"}


def uses_floats(name: str) -> bool:
    """Return whether a mnemonic is that of a scalar instruction on floats."""
    return bool(_FLOATS.match(name))


def compile_scalar(ins: Instruction, mode: Mode) -> Compiled:
    """Compile a scalar instruction. Raise Unknown if it is not supported.

    The mode may be None if the instruction does not use floats.
    """
    if ins.modifiers:
        raise Unknown(f"unsupported modifiers {sorted(ins.modifiers)}")
    micro = _micro_op(ins)
    if uses_floats(ins.name) and not mode.is_usual:
        micro = _micro_op_of_vector(ins, mode)
    if micro is not None:
        return compiled_for_c(_make_run(micro), micro)
    if ins.name in SAVEEXEC or ins.name in WREXEC:
        return _compile_saveexec(ins)
    return Compiled(_compile_other(ins))


def _micro_op(ins: Instruction) -> MicroOp | None:
    """Return the operation of an instruction, or None if no table has it.

    If the operation has a flag, the flag is SCC.
    """
    if ins.name in _SHORT:
        return _micro_op(_expand_short(ins))
    if ins.name in COMPARES or ins.name in IMMEDIATE:
        return _comparison_micro_op(ins)
    name = ins.name
    flag = None
    if name in PLAIN:
        kind, kinds, function = PLAIN[name]
    elif name in WITH_SCC:
        kind, kinds, function = WITH_SCC[name]
        flag = _SCC
    elif name in CARRIES:
        kind = "u32"
        kinds, function = CARRIES[name]
        flag = _SCC
    elif name in SELECTS:
        kind = name[-3:]
        kinds, function = SELECTS[name]
    else:
        return None
    target, *operands = ins.operands
    if name.startswith("s_fmac"):
        operands.append(target)
    if name in CARRIES or name in SELECTS:
        operands.append(_SCC)
    sources = _pair_with_kinds(operands, kinds)
    return _scalar_micro(name, function, kind, target, sources, flag)


def _micro_op_of_vector(ins: Instruction, mode: Mode) -> MicroOp:
    """Return the operation of an instruction on floats in a mode that may change its result.

    Scalar instructions on floats "produce identical results with their VALU counterparts" (RDNA3.5
    ISA, "SALU Floating Point").
    """
    if ins.name in COMPARES:
        micro = _comparison_micro_op(ins)
        return replace(micro, keeps_denormals=tuple(mode.keeps(kind) for _, kind in micro.sources))
    operands = ins.operands
    if ins.name == "s_cvt_hi_f32_f16":
        operands = (operands[0], replace(operands[1], half="h"))
    name = ins.name.replace("s_", "v_", 1).replace("_hi_", "_")
    micro = vector_micro_op(replace(ins, name=name, operands=operands), mode)
    # C has functions of scalar instructions only for the usual mode, but it can flush denormals in
    # their float32 sources and results. So numpy computes float16 results, and results that this
    # mode changes by more than flushing.
    is_in_c = micro.name == name and micro.kind != "f16"
    return replace(micro, name=ins.name if is_in_c else "", handler="scalar")


def _expand_short(ins: Instruction) -> Instruction:
    """Return the long form of an instruction. Its target is also a source, except for S_MOVK."""
    operands = ins.operands
    if ins.name != "s_movk_i32":
        operands = (operands[0], *operands)
    return replace(ins, name=_SHORT[ins.name], operands=operands)


def _comparison_micro_op(ins: Instruction) -> MicroOp:
    operands = list(ins.operands)
    name = ins.name
    if name in COMPARES:
        kind, function = COMPARES[name]
        second_kind = "u32" if "bitcmp" in name else kind
    else:
        kind, function = IMMEDIATE[name]
        second_kind = kind
        name = name.replace("cmpk", "cmp")
        if kind == "u32":
            operands[1] = replace(operands[1], value=int(operands[1].value) & 0xFFFF)
    sources = _pair_with_kinds(operands, (kind, second_kind))
    return _scalar_micro(name, function, "", None, sources, _SCC)


def _pair_with_kinds(
    operands: list[Operand], kinds: tuple[str, ...]
) -> tuple[tuple[Operand, str], ...]:
    if len(operands) != len(kinds):
        raise Unknown(f"{len(operands)} sources, expected {len(kinds)}")
    return tuple(zip(operands, kinds, strict=True))


def _scalar_micro(
    name: str,
    function: Callable,
    kind: str,
    target: Operand | None,
    sources: tuple[tuple[Operand, str], ...],
    flag: Operand | None,
) -> MicroOp:
    keeps = (True,) * len(sources)
    return MicroOp(name, function, kind, target, sources, keeps, flag, handler="scalar")


def _array_reader(op: Operand, kind: str, keeps: bool) -> Callable:
    """Return a reader that returns an array, even if the source is a constant."""
    if kind == "scc":
        return lambda g: g.scc
    read = reader(op, kind, keeps)
    return lambda g: np.atleast_2d(read(g))


def _half_bits(x) -> np.ndarray:
    """Return float16 numbers as 32 bits. The high half is 0."""
    return np.asarray(x).astype(np.float16).view(np.uint16).astype(U32)


def _make_run(micro: MicroOp) -> Callable:
    """Return a function on Waves that executes an operation."""
    function = micro.function
    reads = []
    for (op, kind), keeps in zip(micro.sources, micro.keeps_denormals, strict=True):
        reads.append(_array_reader(op, kind, keeps))
    if micro.flag is None:
        target = cast(Operand, micro.target)
        finish = finisher(micro.after)
        if micro.kind in ("h16", "f16"):
            write = scalar_writer(target, "u32")
            return lambda g: write(g, _half_bits(finish(function(*(read(g) for read in reads)))))
        write = scalar_writer(target, micro.kind)
        return lambda g: write(g, finish(function(*(read(g) for read in reads))))
    if micro.target is None:

        def compare(g: Waves):
            g.scc[...] = function(*(read(g) for read in reads))

        return compare
    write = scalar_writer(micro.target, micro.kind)

    def run(g: Waves):
        value, scc = function(*(read(g) for read in reads))
        write(g, value)
        g.scc[...] = scc

    return run


def compile_getreg(ins: Instruction, mode: int, spaces: Spaces) -> Compiled:
    """Compile S_GETREG_B32 of MODE, SHADER_CYCLES or HW_ID1.

    SHADER_CYCLES has the low bits of the number of wave-instructions executed so far.
    """
    register, first, size = hardware_register(ins.operands[1])
    values: dict[int, Callable] = {
        MODE: lambda _g: mode,
        SHADER_CYCLES: lambda _g: spaces.clock() & (1 << spaces.target.cycles) - 1,
        HW_ID1: lambda g: _hardware_id(g, spaces.target),
    }
    if register not in values:
        raise Unknown("a hardware register other than MODE, HW_ID1 and SHADER_CYCLES")
    read = values[register]
    write = scalar_writer(ins.operands[0])
    mask = (1 << size) - 1

    def run(g: Waves):
        write(g, np.asarray(read(g) >> first & mask).astype(U32))

    return Compiled(run)


def _hardware_id(g: Waves, target: Target) -> np.ndarray:
    """Return HW_ID1 of waves.

    Successive workgroups are on workgroup processors of different shader arrays. The waves of a
    workgroup are on the SIMDs of its workgroup processor in turn.
    """
    processor = g.workgroup % target.processors
    arrays = 2 * target.engines
    array = processor % arrays
    processor_of_array = processor // arrays
    simd = g.wave % target.simds
    slot = g.wave // target.simds % target.waves
    identity = slot | simd << 8 | processor_of_array << 10
    return (identity | (array & 1) << 16 | array >> 1 << 18)[:, None]


def compile_setreg(ins: Instruction, start: int) -> Compiled:
    """Compile S_SETREG_B32 of MODE, which must restore the mode with which the kernel began."""
    _, first, size = hardware_register(ins.operands[1])
    read = reader(ins.operands[0], "u32")
    mask = U32((1 << size) - 1)
    expected = U32(start >> first) & mask

    def run(g: Waves):
        if ((np.asarray(read(g)) & mask) != expected).any():
            message = f"`{ins.text}` sets another mode than the mode at the kernel's start"
            raise Trap("unknown", message)

    return Compiled(run)


def compile_message(ins: Instruction) -> Compiled:
    """Compile S_SENDMSG_RTN_B64 for HIP's wall_clock64: the host's time in units of 10 ns."""
    target, message = ins.operands
    if message.value != _GET_REALTIME:
        raise Unknown("a message other than MSG_RTN_GET_REALTIME")
    write = scalar_writer(target, "u64")
    entry = Outstanding(registers("s", target.index, 2), False, ins.text)

    def run(g: Waves):
        write(g, np.full((g.n, 1), time.monotonic_ns() // 10, np.uint64))
        issue(g, LGKM, entry)

    return Compiled(run)


def compile_trap(ins: Instruction) -> Compiled:
    """Compile S_TRAP 2, to which LLVM compiles abort(), or S_TRAP 3, which has no effect here.

    S_TRAP 3 is a breakpoint for debuggers.
    """
    number = int(ins.operands[0].value)
    if number not in (2, 3):
        raise Unknown("a trap other than 2 and 3")

    def run(_g: Waves):
        if number == 2:
            raise Trap("abort", "the kernel called abort(), or an assertion in it failed")

    return Compiled(run)


def compile_getpc(ins: Instruction, spaces: Spaces) -> Compiled:
    """Compile S_GETPC_B64, which returns the address of the next instruction."""
    write = scalar_writer(ins.operands[0], "u64")
    next_address = ins.address + ins.size

    def run(g: Waves):
        write(g, np.full((g.n, 1), spaces.code_address + next_address, np.uint64))

    return Compiled(run)


def _compile_saveexec(ins: Instruction) -> Compiled:
    """Compile S_*_SAVEEXEC or S_*_WREXEC.

    The target of SAVEEXEC gets the old EXEC, and the target of WREXEC gets the new EXEC.
    """
    kind = ins.name[-3:]
    target, source = ins.operands
    exec_mask = Operand("s", EXEC)
    read = _array_reader(source, kind, True)
    read_exec = reader(exec_mask, kind)
    write_target = scalar_writer(target, kind)
    write_exec = scalar_writer(exec_mask, kind)
    saves_old = ins.name in SAVEEXEC
    function = SAVEEXEC[ins.name] if saves_old else WREXEC[ins.name]

    def run(g: Waves):
        old = read_exec(g).copy()
        result = function(read(g), old)
        write_target(g, old if saves_old else result)
        write_exec(g, result)
        g.scc[...] = result != 0

    if not saves_old:
        return Compiled(run)
    sources = ((source, kind), (exec_mask, kind))
    micro = MicroOp(ins.name, function, kind, target, sources, handler="saveexec")
    return compiled_for_c(run, micro)


def _compile_other(ins: Instruction) -> Callable:
    """Compile S_CMOV or S_BITSET to a function on Waves. Raise Unknown for other instructions."""
    if ins.name not in OTHER:
        raise Unknown("unsupported mnemonic")
    target, source = ins.operands
    kind = f"u{ins.name[-2:]}"
    read_target = reader(target, kind)
    write = scalar_writer(target, kind)
    if ins.name.startswith("s_cmov"):
        read = reader(source, kind)
        return lambda g: write(g, np.where(g.scc, read(g), read_target(g)))
    read_place = reader(source, "u32")
    bits = int(kind[1:])
    one = U32(1) if bits == 32 else np.uint64(1)

    def bit(g: Waves):
        return one << (read_place(g) & U32(bits - 1)).astype(one.dtype)

    if ins.name.startswith("s_bitset1"):
        return lambda g: write(g, read_target(g) | bit(g))
    return lambda g: write(g, read_target(g) & ~bit(g))
