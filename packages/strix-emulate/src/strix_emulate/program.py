# SPDX-License-Identifier: BSD-3-Clause
"""A kernel's instructions as basic blocks of Python functions on Waves."""

from collections.abc import Callable
from dataclasses import dataclass, field

from strix_emulate import crosslane, operations, salu, valu, vmem, waits
from strix_emulate.decode import EXEC, VCC, Instruction, Unknown, decode
from strix_emulate.errors import Trap
from strix_emulate.loader import Kernel
from strix_emulate.salu import simm16

#: Hints, and waits for hazards that do not exist on a machine without timing.
NO_EFFECT = {
    "s_nop", "s_delay_alu", "s_clause", "s_sleep", "s_waitcnt_depctr",
    "s_set_inst_prefetch_distance",
    "s_setprio", "s_wait_idle", "s_code_end",
}  # fmt: skip
WAITS = {"s_waitcnt", "s_waitcnt_vscnt", "s_waitcnt_vmcnt", "s_waitcnt_lgkmcnt"}
CONTROL = {
    "s_endpgm", "s_barrier", "s_branch", "s_cbranch_scc0", "s_cbranch_scc1", "s_cbranch_vccz",
    "s_cbranch_vccnz", "s_cbranch_execz", "s_cbranch_execnz",
}  # fmt: skip
_CONDITIONS = {
    "s_cbranch_scc0": lambda g: ~g.scc[:, 0], "s_cbranch_scc1": lambda g: g.scc[:, 0],
    "s_cbranch_vccz": lambda g: g.S[VCC, :, 0] == 0,
    "s_cbranch_vccnz": lambda g: g.S[VCC, :, 0] != 0,
    "s_cbranch_execz": lambda g: g.S[EXEC, :, 0] == 0,
    "s_cbranch_execnz": lambda g: g.S[EXEC, :, 0] != 0,
}  # fmt: skip


@dataclass
class Step:
    """One compiled instruction; reads: bits of the registers it touches; target: a load's own."""

    run: Callable
    reads: int
    target: int
    counter: int
    half: str
    instruction: Instruction


@dataclass
class Block:
    """Steps up to a control instruction, which `end` names; taken and next are block addresses."""

    start: int
    steps: list[Step] = field(default_factory=list)
    end: Instruction | None = None
    condition: Callable | None = None
    taken: int = -1
    next: int = -1
    entered: int = 0


def supported() -> set[str]:
    """Mnemonics that the machine executes, without the suffix of an encoding."""
    memory = {
        f"{space}_{what}_{kind}"
        for space in ("global", "flat", "scratch", "buffer", "ds")
        for what in ("load", "store")
        for kind in vmem.TYPES
    }
    return {*operations.NAMES, *salu.NAMES, *crosslane.COMPILERS, *NO_EFFECT, *WAITS,
            *CONTROL, *memory,
            *vmem.NO_EFFECT,
            "s_sendmsg", *(f"s_load_b{n}" for n in (32, 64, 128, 256, 512))}  # fmt: skip


def compile_blocks(
    instructions: list[Instruction], kernel: Kernel, spaces: vmem.Spaces
) -> dict[int, Block]:
    """Basic blocks by address. What cannot be executed becomes a step that traps when reached."""
    mode = valu.Mode(kernel.denormals_32, kernel.denormals_16_64, kernel.ieee, kernel.clamp_nan)
    starts = {0}
    for ins in instructions:
        if ins.name in CONTROL:
            starts.add(ins.address + ins.size)
            if "branch" in ins.name:
                starts.add(_target(ins))
    blocks: dict[int, Block] = {}
    block = Block(0)
    for ins in instructions:
        if ins.address in starts:
            if block.end is None and ins.address:
                block.next = ins.address
            block = blocks[ins.address] = Block(ins.address)
        if ins.name in CONTROL and not ins.unknown:
            block.end, block.next = ins, ins.address + ins.size
            if "branch" in ins.name:
                block.condition, block.taken = _CONDITIONS.get(ins.name), _target(ins)
        else:
            block.steps.append(_step(ins, mode, spaces))
    return blocks


def decode_kernel(kernel: Kernel) -> list[Instruction]:
    """The kernel's instructions. Raises DisassemblerError without a suitable libLLVM."""
    return decode(kernel.code)


def _target(ins: Instruction) -> int:
    return ins.address + ins.size + 4 * simm16(ins.operands[0].text)


def _step(ins: Instruction, mode: valu.Mode, spaces: vmem.Spaces) -> Step:
    try:
        if ins.unknown:
            raise Unknown(ins.unknown)
        run = _compile(ins, mode, spaces)
    except (Unknown, IndexError, ValueError) as error:
        run = _trap(f"cannot execute `{ins.text}`: {error}")
    reads = target = 0
    counter = -1
    parts = ins.pair or (ins,)
    if vmem.is_memory(ins.name) and "store" not in ins.name and ins.operands:
        target = _bits(ins.operands[:1])
        counter = waits.LGKM if ins.name.startswith(("ds_", "s_")) else waits.VM
        reads = _bits(ins.operands[1:])
    else:
        for part in parts:
            reads |= _bits(part.operands)
    return Step(run, reads, target, counter, vmem.loaded_half(ins), ins)


def _bits(operands) -> int:
    bits = 0
    for op in operands:
        if op.kind in "vs":
            bits |= waits.registers(op.kind, op.index, op.count)
    return bits


def _trap(message: str) -> Callable:
    def run(_):
        raise Trap("unknown", message)

    return run


def _compile(ins: Instruction, mode: valu.Mode, spaces: vmem.Spaces) -> Callable:
    name = ins.name
    if ins.pair:
        return valu.compile_pair(ins, mode)
    if name in NO_EFFECT or (name == "s_sendmsg" and "MSG_DEALLOC_VGPRS" in ins.raw):
        return lambda _g: None
    if name in WAITS:
        return waits.compile_wait(ins)
    if vmem.is_memory(name):
        return vmem.compile_memory(ins, spaces)
    if name in crosslane.COMPILERS:
        return crosslane.COMPILERS[name](ins)
    if name in salu.NAMES:
        return salu.compile_scalar(ins)
    return valu.compile_vector(ins, mode)
