# SPDX-License-Identifier: BSD-3-Clause
"""A kernel's instructions as basic blocks of Python functions on Waves."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

from strix_emulate.arithmetic import mode_register, operations, scalars
from strix_emulate.code.decode import EXEC, VCC, Instruction, Unknown, decode
from strix_emulate.code.kernel import Kernel
from strix_emulate.errors import Trap
from strix_emulate.instructions import atomics, crosslane, flow, salu, valu, vmem
from strix_emulate.instructions.flow import branch_target, operand_bits
from strix_emulate.instructions.microops import NO_OPERATION, Compiled, compiled_for_c
from strix_emulate.instructions.steps import Step, Traits
from strix_emulate.instructions.uses import Uses
from strix_emulate.memory import addressing, waits
from strix_emulate.memory.waves import GENERAL_SCALARS
from strix_emulate.native.runs import Run, Session
from strix_emulate.native.traces import Trace

#: Hints, and waits for hazards that do not exist on a machine without timing.
NO_EFFECT = {
    "s_nop", "s_delay_alu", "s_clause", "s_sleep", "s_waitcnt_depctr",
    "s_set_inst_prefetch_distance",
    "s_setprio", "s_wait_idle", "s_code_end", "s_wakeup", "s_sethalt", "s_incperflevel",
    "s_decperflevel", "s_ttracedata", "s_ttracedata_imm", "s_version", "s_wait_event",
}  # fmt: skip
#: of S_SENDMSG
_DEALLOC_VGPRS = 3
WAITS = {"s_waitcnt", "s_waitcnt_vscnt", "s_waitcnt_vmcnt", "s_waitcnt_lgkmcnt"}
#: They change what follows them in the code, not the state of waves.
MODES = {"s_setreg_imm32_b32", "s_setreg_b32", "s_denorm_mode", "s_round_mode"}
#: To where a register says: function calls. The first writes where to return to.
CALLS = {"s_swappc_b64", "s_setpc_b64", "s_call_b64"}
#: Of a workgroup, and of the whole grid.
BARRIERS = {"s_barrier", "ds_gws_barrier"}
CONTROL = {
    "s_endpgm", *BARRIERS, "s_branch", "s_cbranch_scc0", "s_cbranch_scc1", "s_cbranch_vccz",
    "s_cbranch_vccnz", "s_cbranch_execz", "s_cbranch_execnz", *CALLS,
}  # fmt: skip
_CONDITIONS = {
    "s_cbranch_scc0": lambda g: ~g.scc[:, 0], "s_cbranch_scc1": lambda g: g.scc[:, 0],
    "s_cbranch_vccz": lambda g: g.either(VCC) == 0, "s_cbranch_vccnz": lambda g: g.either(VCC) != 0,
    "s_cbranch_execz": lambda g: g.either(EXEC) == 0,
    "s_cbranch_execnz": lambda g: g.either(EXEC) != 0,
}  # fmt: skip


@dataclass(eq=False)
class Block:
    """Steps up to a control instruction, which `end` names; taken and next are block addresses.

    polls: it asks for memory that other waves change (see machine.PATIENCE). went: where the last
    waves that stayed together went from here; trace, begun, tried: see :mod:`native.traces`.
    """

    start: int
    steps: list[Step] = field(default_factory=list)
    end: Instruction | None = None
    condition: Callable | None = None
    taken: int = -1
    next: int = -1
    entered: int = 0
    polls: bool = False
    #: what executes the steps, once the block was reached
    parts: list[Step | Run] | None = None
    went: int = -1
    trace: Trace | None = None
    begun: int = 0
    tried: int = 0


#: what another block with the same end does not have from it
_FRESH: dict[str, Any] = {"entered": 0, "parts": None, "trace": None, "begun": 0, "tried": 0}


def supported() -> set[str]:
    """List mnemonics that the machine executes, without the suffix of an encoding."""
    return {*operations.NAMES, *scalars.NAMES, *crosslane.COMPILERS, *NO_EFFECT, *WAITS,
            *CONTROL, *MODES, *vmem.names(),
            "s_getpc_b64", "s_getreg_b32", "s_sendmsg", "s_sendmsg_rtn_b64", "s_trap"}  # fmt: skip


class Blocks(dict[int, Block]):
    """Blocks by address; what is jumped to inside of one becomes a block of its own.

    spaces: the memories of the launch; made: functions of its steps on them; numbers: of loads and
    stores by their addresses, as :class:`uses.Uses` has them.
    """

    def __init__(self, spaces: addressing.Spaces, kernel: Kernel):
        super().__init__()
        self.kernel = kernel
        self.gpu, self.shares = spaces.target.name, spaces.shares
        self.numbers: dict[int, int] = {}
        self.attach(spaces, None)

    def attach(self, spaces: addressing.Spaces | None, session: Session | None) -> None:
        """Attach to the memories of another launch, or to none: what was compiled stays."""
        self.spaces = spaces
        self.made: dict[Traits, Callable] = {}
        for block in self.values():
            for part in block.parts or ():
                if isinstance(part, Run):
                    part.session = session
            if block.trace is not None:
                block.trace.session = session

    def __missing__(self, address: int) -> Block:
        for block in list(self.values()):
            for i, step in enumerate(block.steps):
                if step.instruction.address == address:
                    tail = replace(block, start=address, steps=block.steps[i:], **_FRESH)
                    self[address] = tail
                    return tail
            if block.end is not None and block.end.address == address:
                self[address] = replace(block, start=address, steps=[], **_FRESH)
                return self[address]
        if later := decode_function(self.kernel, address):
            if self.spaces and self.spaces.arena.code:
                self.spaces.arena.know(later)
            self.update(_blocks(later, self))
            return self[address]
        raise Trap("bounds", f"jumps to {address:#x}, which is not an instruction of the kernel")


def compile_blocks(
    instructions: list[Instruction],
    kernel: Kernel,
    spaces: addressing.Spaces,
    numbers: dict[int, int] | None = None,
) -> Blocks:
    """Compile basic blocks by address. What cannot be executed becomes a step that traps."""
    found = Blocks(spaces, kernel)
    found.numbers = numbers or {}
    found.update(_blocks(instructions, found))
    return found


def _blocks(instructions: list[Instruction], home: Blocks) -> dict[int, Block]:
    instructions = flow.mark_swaps(instructions)
    parting = [ins for ins in instructions if ins.name in CONTROL]
    starts = {ins.address + ins.size for ins in parting}
    starts |= {branch_target(ins) for ins in parting if "branch" in ins.name}
    found: dict[int, Block] = {}
    lines: dict[int, list[Instruction]] = {}
    block = None
    for ins in instructions:
        if block is None or block.end is not None or ins.address in starts:
            block = found[ins.address] = Block(ins.address)
            lines[ins.address] = []
        block.next = ins.address + ins.size
        if ins.name in CONTROL and not ins.unknown:
            block.end = ins
            if "branch" in ins.name:
                block.condition, block.taken = _CONDITIONS.get(ins.name), branch_target(ins)
        else:
            lines[block.start].append(ins)
    initial = mode_register.initial(home.kernel)
    entry = _modes_at(found, lines, initial)
    for start, block in found.items():
        mode = entry.get(start, initial)
        for ins in lines[start]:
            block.steps.append(_step(ins, mode, home))
            block.polls |= vmem.polls(ins)
            mode = _mode_after(ins, mode)
    return found


class Program:
    """A kernel's instructions, and what stays known of them from launch to launch.

    partial: functions that it calls are decoded when they are called, and may do anything.
    """

    def __init__(self, instructions: list[Instruction], partial: bool = False):
        self.instructions, self.partial = instructions, partial
        self._blocks: Blocks | None = None

    @classmethod
    def of(cls, kernel: Kernel) -> "Program":
        """Decode a kernel. Raise DisassemblerError without a suitable libLLVM."""
        found = decode_kernel(kernel)
        return cls(found, _is_large(kernel) and any(ins.name in CALLS for ins in found))

    @cached_property
    def uses(self) -> Uses:
        """Where values go."""
        return Uses(self.instructions)

    @cached_property
    def cell(self) -> int:
        """Bytes of a shadow cell: the smallest access of the kernel."""
        sizes = [size for ins in self.instructions if (size := vmem.access_size(ins))]
        return 1 if self.partial else min([4, *sizes])

    @cached_property
    def scalars(self) -> int:
        """How many of the general scalar registers it may use."""
        if self.partial:
            return GENERAL_SCALARS
        bits = 0
        for ins in self.instructions:
            for part in ins.pair or (ins,):
                bits |= operand_bits(*part.operands)
        scalars = bits >> 256 & (1 << GENERAL_SCALARS) - 1
        return scalars.bit_length()

    @cached_property
    def polls(self) -> bool:
        """Whether it asks for memory that other waves change."""
        return self.partial or any(map(vmem.polls, self.instructions))

    @cached_property
    def orders(self) -> bool:
        """Whether more than barriers orders its waves."""
        return self.partial or any(
            ins.name in atomics.NAMES or vmem.polls(ins) for ins in self.instructions
        )

    @cached_property
    def communicates(self) -> list[str]:
        """By what its workgroups may wait for each other."""
        calls = CALLS if self.partial else ()
        found = [x.name for x in self.instructions if vmem.communicates(x) or x.name in calls]
        return sorted({*found})

    @cached_property
    def whole_words(self) -> bool:
        """Whether words may reach past an array's end.

        Atomics of 16 bits are compare-and-swap of the word around them.
        """
        return self.partial or any("cmpswap_b32" in ins.name for ins in self.instructions)

    def blocks(self, kernel: Kernel, spaces: addressing.Spaces, session: Session | None) -> Blocks:
        """Return the blocks for one launch, up to :meth:`release`."""
        if self._blocks is None:
            self._blocks = compile_blocks(self.instructions, kernel, spaces, self.uses.numbers)
        else:
            self._blocks.attach(spaces, session)
            for block in self._blocks.values():
                block.entered = 0
        return self._blocks

    def release(self) -> None:
        """Let the memories of the launch go."""
        if self._blocks is not None:
            self._blocks.attach(None, None)


def _modes_at(
    blocks: dict[int, Block], lines: dict, start: mode_register.Mode
) -> dict[int, mode_register.Mode | None]:
    """Find the mode at each block that is reached; None where it depends on the way there."""
    todo = list(blocks)[:1]
    entry: dict[int, mode_register.Mode | None] = dict.fromkeys(todo, start)
    while todo:
        block = blocks.get(todo.pop())
        if block is None:
            continue
        mode = entry[block.start]
        for ins in lines[block.start]:
            mode = _mode_after(ins, mode)
        for place in {block.next, block.taken} - {-1}:
            merged = mode if entry.get(place, mode) == mode else None
            if place not in entry or entry[place] != merged:
                entry[place] = merged
                todo.append(place)
    return entry


def _mode_after(ins: Instruction, mode: mode_register.Mode | None) -> mode_register.Mode | None:
    try:
        return mode_register.after(ins, mode) if ins.name in MODES and mode else mode
    except Unknown:
        return None


def decode_kernel(kernel: Kernel) -> list[Instruction]:
    """Decode the kernel's instructions, and if it calls functions all of the file, unless large.

    Addresses count from the kernel's first instruction. Raise DisassemblerError without a suitable
    libLLVM.
    """
    found = decode(kernel.code, width=kernel.width, target=kernel.target)
    if kernel.image is None or _is_large(kernel) or not any(ins.name in CALLS for ins in found):
        return found
    others = []
    for first, size in kernel.image.code:
        start = first - kernel.image.entry
        code = kernel.image.data[first : first + size]
        others += decode(code, start, kernel.width, padded=True, target=kernel.target)
    inside = {ins.address for ins in found}
    return found + [ins for ins in others if ins.address not in inside]


#: Files with more bytes of code (RCCL's has 88 million) are decoded function by function.
_MOST_CODE = 8 << 20


def _is_large(kernel: Kernel) -> bool:
    return kernel.image is not None and sum(size for _, size in kernel.image.code) > _MOST_CODE


def decode_function(kernel: Kernel, address: int) -> list[Instruction]:
    """Decode a large file's function that begins there; return [] where no code is.

    It ends with a way out behind which none of its branches leads, at most a MiB away.
    """
    if kernel.image is None or not _is_large(kernel):
        return []
    at = address + kernel.image.entry
    ends = [first + size for first, size in kernel.image.code if first <= at < first + size]
    for end, room in product(ends, (1 << 12, 1 << 16, 1 << 20)):
        code, reach, found = kernel.image.data[at : min(at + room, end)], address, []
        for ins in decode(code, address, kernel.width, target=kernel.target):
            found.append(ins)
            if "branch" in ins.name and not ins.unknown:
                reach = max(reach, branch_target(ins))
            if ins.name in _LEAVES and ins.address + ins.size > reach:
                return found
    return []


_LEAVES = {"s_endpgm", "s_setpc_b64", "s_branch"}


def _step(ins: Instruction, mode: mode_register.Mode | None, home: Blocks) -> Step:
    key = (
        ins.text,
        ins.code,
        ins.swap_words,
        mode,
        home.gpu,
        home.shares,
        (ins.address if ins.name == "s_getpc_b64" else 0),
    )
    traits = _TRAITS.get(key)
    if traits is not None:
        return Step(ins, traits, partial(_compiled, ins, mode), home)
    compiled = _compiled(ins, mode, home.spaces)
    reads = target = 0
    counter = -1
    if vmem.is_memory(ins.name) and "store" not in ins.name and ins.operands:
        target = operand_bits(*ins.operands[:1])
        counter = waits.LGKM if ins.name.startswith(("ds_", "s_")) else waits.VM
        reads = operand_bits(*ins.operands[1:])
    else:
        for part in ins.pair or (ins,):
            reads |= operand_bits(*part.operands)
    traits = Traits(reads, target, counter, compiled.executable, vmem.stored_half(ins))
    if len(_TRAITS) > _MOST_TRAITS:
        _TRAITS.clear()
    _TRAITS[key] = traits
    return Step(ins, traits, partial(_compiled, ins, mode), home)


#: what is known of instructions, by their text, bytes and mode: kernels are launched more than once
_TRAITS: dict[tuple, Traits] = {}
_MOST_TRAITS = 100_000


def _compiled(ins: Instruction, mode: mode_register.Mode | None, spaces) -> Compiled:
    try:
        if ins.unknown:
            raise Unknown(ins.unknown)
        if mode is None and (ins.name.startswith("v_") or ins.name in (*MODES, "s_getreg_b32")):
            raise Unknown("in a mode that is not known here")
        return _compile(ins, mode, spaces)
    except (Unknown, IndexError, ValueError) as error:
        return _trap(f"cannot execute `{ins.text}`: {error}")


def _trap(message: str) -> Compiled:
    def run(_):
        raise Trap("unknown", message)

    return Compiled(run)


def _set_mode(ins: Instruction, mode: Any, _spaces: addressing.Spaces) -> Compiled:
    mode_register.after(ins, mode)
    if ins.name == "s_setreg_b32":
        return salu.compile_setreg(ins, mode.start)
    return NO_OPERATION


_COMPILERS: dict[str, Callable[..., Compiled]] = {
    **dict.fromkeys(MODES, _set_mode),
    **dict.fromkeys(WAITS, lambda ins, _mode, spaces: compiled_for_c(
        waits.compile_wait(ins, spaces.target), waits=True)),
    "s_getreg_b32": lambda ins, mode, spaces: salu.compile_getreg(ins, mode.bits, spaces),
    "s_sendmsg_rtn_b64": lambda ins, _mode, _spaces: salu.compile_message(ins),
    "s_trap": lambda ins, _mode, _spaces: salu.compile_trap(ins),
    "s_getpc_b64": lambda ins, _mode, spaces: salu.compile_getpc(ins, spaces),
}  # fmt: skip


def _compile(ins: Instruction, mode: Any, spaces: addressing.Spaces) -> Compiled:
    name = ins.name
    if ins.pair:
        return valu.compile_pair(ins, mode)
    if name in NO_EFFECT or (name == "s_sendmsg" and ins.operands[0].value == _DEALLOC_VGPRS):
        return NO_OPERATION
    if name in _COMPILERS:
        return _COMPILERS[name](ins, mode, spaces)
    if vmem.is_memory(name):
        return vmem.compile_memory(ins, spaces)
    if name.startswith("v_wmma") and name not in spaces.target.wmma:
        raise Unknown(f"not an instruction of {spaces.target.name}")
    if name in crosslane.COMPILERS:
        return crosslane.COMPILERS[name](ins, mode)
    if name in scalars.NAMES:
        return salu.compile_scalar(ins)
    return valu.compile_vector(ins, mode)
