# SPDX-License-Identifier: BSD-3-Clause
"""Scalar instructions (SOP1, SOP2, SOPC, SOPK) other than branches, waits and memory."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np

from strix_emulate.arithmetic.mode_register import (
    HW_ID1,
    MODE,
    SHADER_CYCLES,
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
from strix_emulate.instructions.microops import MicroOp, executes
from strix_emulate.memory.addressing import Spaces
from strix_emulate.memory.waits import LGKM, Outstanding, issue, registers
from strix_emulate.memory.waves import Waves, reader, scalar_writer

_SCC = Operand("scc")
#: number of a message
_GET_REALTIME = 0x83


def compile_scalar(ins: Instruction) -> Callable:
    """Return a function that executes the instruction on Waves. Raise Unknown."""
    name = ins.name
    if ins.modifiers:
        raise Unknown(f"modifiers {sorted(ins.modifiers)}")
    micro = _micro_op(ins)
    if micro is not None:
        run = _on_waves(micro)
        return executes(run, micro)
    if name in SAVEEXEC or name in WREXEC:
        return _saveexec(ins)
    return _other(ins)


#: With a constant of 16 bits: the same with two sources, of which the target is the first.
_SHORT = {"s_movk_i32": "s_mov_b32", "s_addk_i32": "s_add_i32", "s_mulk_i32": "s_mul_i32"}


def _micro_op(ins: Instruction) -> MicroOp | None:
    """Return what the tables say of it, or None. SCC is the flag."""
    name, ops = ins.name, list(ins.operands)
    if name in PLAIN:
        kind, kinds, function = PLAIN[name]
        flag, target = None, ops.pop(0)
        ops += [target] if name.startswith("s_fmac") else []
    elif name in WITH_SCC:
        kind, kinds, function = WITH_SCC[name]
        flag, target = _SCC, ops.pop(0)
    elif name in COMPARES:
        kind, function = COMPARES[name]
        flag, target, kinds, kind = _SCC, None, (kind, "u32" if "bitcmp" in name else kind), ""
    elif name in IMMEDIATE:
        kind, function = IMMEDIATE[name]
        if kind == "u32":
            ops[1] = replace(ops[1], value=int(ops[1].value) & 0xFFFF)
        flag, target, kinds, kind, name = _SCC, None, (kind, kind), "", name.replace("cmpk", "cmp")
    elif name in _SHORT:
        ops = ops if name == "s_movk_i32" else [ops[0], *ops]
        return _micro_op(replace(ins, name=_SHORT[name], operands=tuple(ops)))
    elif name in CARRIES:
        kind, flag, target = "u32", _SCC, ops.pop(0)
        kinds, function = CARRIES[name]
        ops.append(_SCC)
    elif name in SELECTS:
        kind, flag, target = name[-3:], None, ops.pop(0)
        kinds, function = SELECTS[name]
        ops.append(_SCC)
    else:
        return None
    if len(ops) != len(kinds):
        raise Unknown(f"{len(ops)} sources, expected {len(kinds)}")
    sources = tuple(zip(ops, kinds, strict=True))
    return MicroOp(
        name, function, kind, target, sources, (True,) * len(kinds), flag, handler="scalar"
    )


def _array(read: Callable) -> Callable:
    """Make read give an array also where the source is a constant."""
    return lambda g: np.atleast_2d(read(g))


def _on_waves(micro: MicroOp) -> Callable:
    function = micro.function
    reads = [(lambda g: g.scc) if kind == "scc" else _array(reader(op, kind))
             for op, kind in micro.sources]  # fmt: skip
    if micro.flag is None:
        write = scalar_writer(
            cast(Operand, micro.target), "u32" if micro.kind == "h16" else micro.kind
        )
        if micro.kind == "h16":
            # the high half is 0
            bits = lambda x: np.asarray(x).astype(np.float16).view(np.uint16).astype(U32)  # noqa: E731
            return lambda g: write(g, bits(function(*(read(g) for read in reads))))
        return lambda g: write(g, function(*(read(g) for read in reads)))
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


def compile_getreg(ins: Instruction, mode: int, spaces: Spaces) -> Callable:
    """Compile S_GETREG_B32 of MODE, of SHADER_CYCLES (a cycle is a wave-instruction here) and of
    HW_ID1."""
    register, first, size = hardware_register(ins.operands[1])
    values: dict[int, Callable] = {
        MODE: lambda _g: mode,
        SHADER_CYCLES: lambda _g: spaces.clock() & (1 << spaces.target.cycles) - 1,
        HW_ID1: lambda g: _place(g, spaces.target),
    }
    if register not in values:
        raise Unknown("a hardware register other than MODE, HW_ID1 and SHADER_CYCLES")
    write, value, bits = scalar_writer(ins.operands[0]), values[register], (1 << size) - 1
    return lambda g: write(g, np.asarray(value(g) >> first & bits).astype(U32))


def _place(g: Waves, target: Target) -> np.ndarray:
    """Return where waves are, as HW_ID1 has it: workgroups one after the other on the processors of
    all engines, their waves on SIMDs."""
    processor, wave = g.workgroup % target.processors, g.wave
    array, processor = processor % (2 * target.engines), processor // (2 * target.engines)
    slot = wave // target.simds % target.waves
    place = slot | wave % target.simds << 8 | processor << 10
    return (place | (array & 1) << 16 | array >> 1 << 18)[:, None]


def compile_setreg(ins: Instruction, start: int) -> Callable:
    """Compile S_SETREG_B32 of MODE, which has to give back what the kernel began with."""
    _, first, size = hardware_register(ins.operands[1])
    read, mask = reader(ins.operands[0], "u32"), (1 << size) - 1

    def run(g: Waves):
        if ((np.asarray(read(g)) & U32(mask)) != U32(start >> first & mask)).any():
            raise Trap("unknown", f"`{ins.text}` sets a mode that the kernel did not begin with")

    return run


def compile_message(ins: Instruction) -> Callable:
    """Compile S_SENDMSG_RTN_B64 for the time of HIP's wall_clock64: the host's, at 100 MHz."""
    target, message = ins.operands
    if message.value != _GET_REALTIME:
        raise Unknown("a message other than MSG_RTN_GET_REALTIME")
    write = scalar_writer(target, "u64")
    entry = Outstanding(registers("s", target.index, 2), False, ins.text)

    def run(g: Waves):
        write(g, np.full((g.n, 1), time.monotonic_ns() // 10, np.uint64))
        issue(g, LGKM, entry)

    return run


def compile_trap(ins: Instruction) -> Callable:
    """Compile S_TRAP 2, to which LLVM compiles abort(); 3 is for a debugger, which is not there."""
    number = int(ins.operands[0].value)
    if number not in (2, 3):
        raise Unknown("a trap other than 2 and 3")

    def run(_g: Waves):
        if number == 2:
            raise Trap("abort", "the kernel called abort(), or an assertion in it failed")

    return run


def compile_getpc(ins: Instruction, spaces: Spaces) -> Callable:
    """Compile S_GETPC_B64: the address of what follows."""
    write, behind = scalar_writer(ins.operands[0], "u64"), ins.address + ins.size
    return lambda g: write(g, np.full((g.n, 1), spaces.code + behind, np.uint64))


def _saveexec(ins: Instruction) -> Callable:
    kind, both = ins.name[-3:], ins.name in WREXEC
    function, exec_ = (SAVEEXEC | WREXEC)[ins.name], Operand("s", EXEC)
    read, read_exec = _array(reader(ins.operands[1], kind)), reader(exec_, kind)
    save, write = scalar_writer(ins.operands[0], kind), scalar_writer(exec_, kind)

    def run(g: Waves):
        old = read_exec(g).copy()
        result = function(read(g), old)
        save(g, result if both else old)
        write(g, result)
        g.scc[...] = result != 0

    if both:
        return run
    sources = ((ins.operands[1], kind), (exec_, kind))
    micro = MicroOp(ins.name, function, kind, ins.operands[0], sources, handler="saveexec")
    return executes(run, micro)


def _other(ins: Instruction) -> Callable:
    name, ops = ins.name, ins.operands
    if name not in OTHER:
        raise Unknown("mnemonic")
    kind = f"u{name[-2:]}"
    write, read = scalar_writer(ops[0], kind), reader(ops[0], kind)
    if name.startswith("s_cmov"):
        source = reader(ops[1], kind)
        return lambda g: write(g, np.where(g.scc, source(g), read(g)))
    place, on, bits = reader(ops[1], "u32"), name.startswith("s_bitset1"), int(kind[1:])
    one = U32(1) if bits == 32 else np.uint64(1)
    bit = lambda g: one << (place(g) & U32(bits - 1)).astype(one.dtype)  # noqa: E731
    return lambda g: write(g, read(g) | bit(g) if on else read(g) & ~bit(g))
