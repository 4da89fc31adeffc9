# SPDX-License-Identifier: BSD-3-Clause
"""A kernel as basic blocks. Each instruction is compiled to a Python function on `Waves`."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from strix_emulate.arithmetic import mode_register, operations, scalars
from strix_emulate.code.decode import EXEC, VCC, Instruction, Unknown, decode
from strix_emulate.code.kernel import Kernel
from strix_emulate.errors import Trap
from strix_emulate.instructions import atomics, crosslane, flow, salu, valu, vmem
from strix_emulate.instructions.flow import branch_target
from strix_emulate.instructions.microops import NO_OPERATION, Compiled, compiled_for_c
from strix_emulate.instructions.steps import Step, Traits
from strix_emulate.instructions.uses import Uses
from strix_emulate.memory import addressing, waits
from strix_emulate.memory.waits import operand_bits
from strix_emulate.memory.waves import GENERAL_SCALARS, LANES, VCC_OPERAND, Waves
from strix_emulate.native.runs import Run, Session
from strix_emulate.native.traces import Trace

#: Instructions without an effect here. Most are hints, or waits for hazards, which an emulator
#: without timing does not have.
NO_EFFECT = {
    "s_clause",
    "s_code_end",
    "s_decperflevel",
    "s_delay_alu",
    "s_incperflevel",
    "s_nop",
    "s_set_inst_prefetch_distance",
    "s_sethalt",
    "s_setprio",
    "s_sleep",
    "s_ttracedata",
    "s_ttracedata_imm",
    "s_version",
    "s_wait_event",
    "s_wait_idle",
    "s_waitcnt_depctr",
    "s_wakeup",
}
#: The message of S_SENDMSG that releases vector registers.
_DEALLOC_VGPRS = 3
WAITS = {
    "s_waitcnt",
    "s_waitcnt_lgkmcnt",
    "s_waitcnt_vmcnt",
    "s_waitcnt_vscnt",
}
#: Instructions that write the mode register, which controls how later instructions compute.
MODES = {
    "s_denorm_mode",
    "s_round_mode",
    "s_setreg_b32",
    "s_setreg_imm32_b32",
}
#: Jumps to the address in a register, and function calls, which write the return address.
CALLS = {
    "s_call_b64",
    "s_setpc_b64",
    "s_swappc_b64",
}
#: Barriers of a workgroup, and of the whole grid.
BARRIERS = {
    "s_barrier",
    "ds_gws_barrier",
}


def _scc_is_clear(g: Waves):
    return ~g.scc[:, 0]


def _scc_is_set(g: Waves):
    return g.scc[:, 0]


def _vcc_is_zero(g: Waves):
    return g.either(VCC) == 0


def _vcc_is_not_zero(g: Waves):
    return g.either(VCC) != 0


def _exec_is_zero(g: Waves):
    return g.either(EXEC) == 0


def _exec_is_not_zero(g: Waves):
    return g.either(EXEC) != 0


#: By mnemonic of a conditional branch: function on waves that returns which waves jump.
_CONDITIONS: dict[str, Callable] = {
    "s_cbranch_scc0": _scc_is_clear,
    "s_cbranch_scc1": _scc_is_set,
    "s_cbranch_vccz": _vcc_is_zero,
    "s_cbranch_vccnz": _vcc_is_not_zero,
    "s_cbranch_execz": _exec_is_zero,
    "s_cbranch_execnz": _exec_is_not_zero,
}
#: Instructions that end a block.
BLOCK_ENDS = {
    "s_endpgm",
    "s_branch",
    *_CONDITIONS,
    *BARRIERS,
    *CALLS,
}
#: Instructions that end a function if no branch of the function jumps past them.
_FUNCTION_ENDS = {
    "s_branch",
    "s_endpgm",
    "s_setpc_b64",
}
#: If the functions of a file have more bytes than this, each function is decoded when it is called.
#: RCCL's file has 88 million bytes.
_MAX_CODE = 8 << 20
#: Bytes of code in which to search for the end of a function. The sizes are tried in this order.
_FUNCTION_SIZES = (1 << 12, 1 << 16, 1 << 20)


@dataclass(eq=False)
class Block:
    """A basic block: steps, and the control instruction that ends them.

    Attributes:
        start: Address of the first instruction.
        steps: The instructions before `end`.
        end: The control instruction, or None if waves go on to the next block without one.
        end_registers: Bit mask of the registers that `end` reads or writes.
        condition: Function on waves that returns which waves jump. None if `end` is not a
            conditional branch.
        taken: Address of the block to which `end` jumps, if it is a branch, or else -1.
        next: Address of the block that follows this block in the code.
        entered: Number of entries into the block, summed over all waves.
        polls: Whether the block may poll memory that other waves change (see scheduler.PATIENCE).
        parts: The steps, grouped for execution in C. None before the block is first executed.
        went: Address of the block that waves entered after a conditional branch, the last time
            that they did not diverge.
        trace: The trace that begins here (:mod:`strix_emulate.native.traces`).
        untraced_entries: Number of times that waves began here without a trace.
        trace_attempts: Number of traces from here that were useless or too short.
    """

    start: int
    steps: list[Step] = field(default_factory=list)
    end: Instruction | None = None
    end_registers: int = 0
    condition: Callable | None = None
    taken: int = -1
    next: int = -1
    entered: int = 0
    polls: bool = False
    parts: list[Step | Run] | None = None
    went: int = -1
    trace: Trace | None = None
    untraced_entries: int = 0
    trace_attempts: int = 0

    @property
    def length(self) -> int:
        """The number of instructions, with `end`."""
        return len(self.steps) + (self.end is not None)

    def tail(self, address: int, steps: list[Step]) -> "Block":
        """Return a new block that begins at an address in this one, with the same end."""
        return replace(
            self,
            start=address,
            steps=steps,
            entered=0,
            parts=None,
            trace=None,
            untraced_entries=0,
            trace_attempts=0,
        )


def supported_mnemonics() -> set[str]:
    """Return the mnemonics that the emulator executes, without the suffix of an encoding."""
    return {
        *operations.NAMES,
        *scalars.NAMES,
        *crosslane.COMPILERS,
        *NO_EFFECT,
        *BLOCK_ENDS,
        *_COMPILERS,
        *vmem.names(),
        "s_sendmsg",
    }


class Blocks(dict[int, Block]):
    """Blocks by address.

    A jump into the middle of a block adds a block. A jump to a function of a large file adds the
    function's blocks.

    Attributes:
        kernel: The kernel.
        gpu: Name of the target.
        polls: Whether the kernel may poll memory that other waves change.
        orders: Whether anything besides barriers may order the waves' accesses.
        numbers: Numbers of loads and stores by their addresses (:class:`uses.Uses`).
        spaces: The memories of the launch, or None between launches.
        functions: The compiled functions, which access the memories of `spaces`, by traits.
    """

    def __init__(self, spaces: addressing.Spaces, kernel: Kernel):
        super().__init__()
        self.kernel = kernel
        self.gpu = spaces.target.name
        self.polls = spaces.polls
        self.orders = spaces.orders
        self.numbers: dict[int, int] = {}
        self.attach(spaces, None)

    def attach(self, spaces: addressing.Spaces | None, session: Session | None) -> None:
        """Attach to the memories of another launch, or to none. `functions` becomes empty."""
        self.spaces = spaces
        self.functions: dict[Traits, Callable] = {}
        for block in self.values():
            for part in block.parts or ():
                if isinstance(part, Run):
                    part.session = session
            if block.trace is not None:
                block.trace.session = session

    def __missing__(self, address: int) -> Block:
        block = self._find_tail(address)
        if block is not None:
            self[address] = block
            return block
        instructions = decode_function(self.kernel, address)
        if not instructions:
            message = f"jumps to {address:#x}, which is not an instruction of the kernel"
            raise Trap("bounds", message)
        if self.spaces and self.spaces.arena.stores:
            self.spaces.arena.record_stores(instructions)
        self.update(_make_blocks(instructions, self))
        return self[address]

    def _find_tail(self, address: int) -> Block | None:
        """Return the rest of the block that has an instruction at the address, or None."""
        for block in self.values():
            for i, step in enumerate(block.steps):
                if step.instruction.address == address:
                    return block.tail(address, block.steps[i:])
            if block.end is not None and block.end.address == address:
                return block.tail(address, [])
        return None


def compile_blocks(
    instructions: list[Instruction],
    kernel: Kernel,
    spaces: addressing.Spaces,
    numbers: dict[int, int] | None = None,
) -> Blocks:
    """Return the basic blocks by address. An unsupported instruction becomes a step that traps."""
    blocks = Blocks(spaces, kernel)
    blocks.numbers = numbers or {}
    blocks.update(_make_blocks(instructions, blocks))
    return blocks


def _make_blocks(instructions: list[Instruction], home: Blocks) -> dict[int, Block]:
    instructions = flow.mark_swaps(instructions)
    blocks, lines = _split_at_control(instructions, home.kernel.width)
    initial = mode_register.initial(home.kernel)
    entry = _find_modes(blocks, lines, initial)
    for start, block in blocks.items():
        mode = entry.get(start, initial)
        for ins in lines[start]:
            block.steps.append(_step(ins, mode, home))
            block.polls |= vmem.reads_shared_memory(ins)
            mode = _mode_after(ins, mode)
    return blocks


def _split_at_control(
    instructions: list[Instruction],
    width: int,
) -> tuple[dict[int, Block], dict[int, list[Instruction]]]:
    """Return the blocks by address, still without steps, and the instructions of each block.

    Args:
        instructions: The instructions.
        width: Lanes of a wave.
    """
    starts = set()
    for ins in instructions:
        if ins.name in BLOCK_ENDS:
            starts.add(ins.address + ins.size)
            if "branch" in ins.name:
                starts.add(branch_target(ins))
    blocks: dict[int, Block] = {}
    lines: dict[int, list[Instruction]] = {}
    block = None
    for ins in instructions:
        if block is None or block.end is not None or ins.address in starts:
            block = Block(ins.address)
            blocks[ins.address] = block
            lines[ins.address] = []
        block.next = ins.address + ins.size
        if ins.name not in BLOCK_ENDS or ins.unknown:
            lines[block.start].append(ins)
            continue
        block.end = ins
        block.end_registers = _control_registers(ins, width)
        if "branch" in ins.name:
            block.condition = _CONDITIONS.get(ins.name)
            block.taken = branch_target(ins)
    return blocks, lines


def _control_registers(ins: Instruction, width: int) -> int:
    """Return the bit mask of the registers that a control instruction reads or writes.

    EXEC is not included, because no load writes it.
    """
    bits = operand_bits(*ins.operands)
    if ins.name.startswith("s_cbranch_vcc"):
        bits |= waits.registers("s", VCC, width // LANES)
    return bits


class Program:
    """A kernel's instructions, and properties derived from them, for all launches.

    Attributes:
        instructions: The instructions.
        partial: Whether `instructions` lacks called functions. They are decoded when they are
            called, so the properties allow for any instruction.
    """

    def __init__(self, instructions: list[Instruction], partial: bool = False):
        self.instructions = instructions
        self.partial = partial
        self._blocks: Blocks | None = None

    @classmethod
    def from_kernel(cls, kernel: Kernel) -> "Program":
        """Decode a kernel.

        Raises:
            DisassemblerError: There is no suitable libLLVM.
        """
        instructions = decode_kernel(kernel)
        has_calls = any(ins.name in CALLS for ins in instructions)
        return cls(instructions, partial=_is_large(kernel) and has_calls)

    @cached_property
    def uses(self) -> Uses:
        """The stores that loaded values can reach."""
        return Uses(self.instructions)

    @cached_property
    def cell(self) -> int:
        """Bytes of a shadow cell: the smallest access of the kernel, at most 4."""
        if self.partial:
            return 1
        sizes = [vmem.access_size(ins) for ins in self.instructions]
        return min([4, *filter(None, sizes)])

    @cached_property
    def scalars(self) -> int:
        """Number of general scalar registers that the kernel may use."""
        if self.partial:
            return GENERAL_SCALARS
        bits = 0
        for ins in self.instructions:
            for part in ins.pair or (ins,):
                bits |= operand_bits(*part.operands)
        scalar_bits = bits >> 256 & (1 << GENERAL_SCALARS) - 1
        return scalar_bits.bit_length()

    @cached_property
    def polls(self) -> bool:
        """Whether the kernel may poll memory that other waves change."""
        return self.partial or any(map(vmem.reads_shared_memory, self.instructions))

    @cached_property
    def orders(self) -> bool:
        """Whether anything besides barriers may order its waves' accesses."""
        if self.partial or self.polls:
            return True
        return any(ins.name in atomics.NAMES for ins in self.instructions)

    @cached_property
    def communicates(self) -> list[str]:
        """Mnemonics by which its workgroups may wait for each other, sorted."""
        names = set()
        for ins in self.instructions:
            if vmem.communicates(ins) or (self.partial and ins.name in CALLS):
                names.add(ins.name)
        return sorted(names)

    @cached_property
    def whole_words(self) -> bool:
        """Whether accesses of 4 bytes may reach past an array's end (`Arena.whole_words`).

        Compilers replace an atomic of 16 bits by a compare-and-swap of the word that contains it.
        """
        return self.partial or any("cmpswap_b32" in ins.name for ins in self.instructions)

    def blocks(
        self,
        kernel: Kernel,
        spaces: addressing.Spaces,
        session: Session | None,
    ) -> Blocks:
        """Return the blocks for one launch, which ends with :meth:`release`."""
        if self._blocks is None:
            self._blocks = compile_blocks(
                self.instructions,
                kernel,
                spaces,
                self.uses.numbers,
            )
            return self._blocks
        self._blocks.attach(spaces, session)
        for block in self._blocks.values():
            block.entered = 0
        return self._blocks

    def release(self) -> None:
        """Release the memories of the launch."""
        if self._blocks is not None:
            self._blocks.attach(None, None)


def _find_modes(
    blocks: dict[int, Block],
    lines: dict[int, list[Instruction]],
    start: mode_register.Mode,
) -> dict[int, mode_register.Mode | None]:
    """Return the mode at the start of each block that branches reach from the first block.

    After a block, waves may also go on to the next block in the code. The mode is None if it
    depends on the path, or is not supported.
    """
    pending = list(blocks)[:1]
    entry: dict[int, mode_register.Mode | None] = dict.fromkeys(pending, start)
    while pending:
        block = blocks.get(pending.pop())
        if block is None:
            continue
        mode = entry[block.start]
        for ins in lines[block.start]:
            mode = _mode_after(ins, mode)
        for place in {block.next, block.taken} - {-1}:
            merged = mode if entry.get(place, mode) == mode else None
            if place not in entry or entry[place] != merged:
                entry[place] = merged
                pending.append(place)
    return entry


def _mode_after(ins: Instruction, mode: mode_register.Mode | None) -> mode_register.Mode | None:
    if ins.name not in MODES or not mode:
        return mode
    try:
        return mode_register.after(ins, mode)
    except Unknown:
        return None


def decode_kernel(kernel: Kernel) -> list[Instruction]:
    """Return the kernel's instructions, and those of all functions in its file if it calls any.

    Functions of a large file are not included (see `decode_function`). Addresses count from the
    kernel's first instruction.

    Raises:
        DisassemblerError: There is no suitable libLLVM.
    """
    instructions = decode(kernel.code, width=kernel.width, target=kernel.target)
    has_calls = any(ins.name in CALLS for ins in instructions)
    if kernel.image is None or _is_large(kernel) or not has_calls:
        return instructions
    others = []
    for first, size in kernel.image.code:
        start = first - kernel.image.entry
        code = kernel.image.data[first : first + size]
        others += decode(
            code,
            start,
            kernel.width,
            padded=True,
            target=kernel.target,
        )
    addresses = {ins.address for ins in instructions}
    return instructions + [ins for ins in others if ins.address not in addresses]


def _is_large(kernel: Kernel) -> bool:
    if kernel.image is None:
        return False
    return sum(size for _, size in kernel.image.code) > _MAX_CODE


def decode_function(kernel: Kernel, address: int) -> list[Instruction]:
    """Return the instructions of the function at an address of a large file.

    The function ends at the first of _FUNCTION_ENDS that no branch of the function jumps past.

    Returns:
        The instructions, or [] if the file is not large, if there is no code at the address, or if
        there is no end within 1 MiB.
    """
    image = kernel.image
    if image is None or not _is_large(kernel):
        return []
    at = address + image.entry
    for first, size in image.code:
        if not first <= at < first + size:
            continue
        for room in _FUNCTION_SIZES:
            code = image.data[at : min(at + room, first + size)]
            instructions = _decode_to_end(kernel, code, address)
            if instructions:
                return instructions
    return []


def _decode_to_end(
    kernel: Kernel,
    code: bytes,
    address: int,
) -> list[Instruction]:
    """Return the instructions of a function, or [] if its end is not in the code."""
    farthest = address
    instructions = []
    for ins in decode(code, address, kernel.width, target=kernel.target):
        instructions.append(ins)
        if "branch" in ins.name and not ins.unknown:
            farthest = max(farthest, branch_target(ins))
        if ins.name in _FUNCTION_ENDS and ins.address + ins.size > farthest:
            return instructions
    return []


def _step(
    ins: Instruction,
    mode: mode_register.Mode | None,
    home: Blocks,
) -> Step:
    key = (
        ins.text,
        ins.code,
        ins.swap_words,
        mode,
        home.gpu,
        home.polls,
        home.orders,
        ins.address if ins.name == "s_getpc_b64" else 0,
    )
    traits = _TRAITS.get(key)
    if traits is None:
        traits = _find_traits(ins, mode, home.spaces)
        if len(_TRAITS) > _MAX_TRAITS:
            _TRAITS.clear()
        _TRAITS[key] = traits
    return Step(ins, traits, partial(_compile_or_trap, ins, mode), home)


def _find_traits(
    ins: Instruction,
    mode: mode_register.Mode | None,
    spaces,
) -> Traits:
    compiled = _compile_or_trap(ins, mode, spaces)
    reads = 0
    target = 0
    counter = -1
    written = flow.written_operands(ins) if vmem.is_memory(ins.name) else ()
    if written:
        target = operand_bits(*written)
        # A buffer atomic returns the old value in the register that has its data.
        is_buffer_atomic = ins.name.startswith("buffer_atomic")
        reads = operand_bits(*ins.operands[0 if is_buffer_atomic else len(written) :])
        counter = waits.LGKM if ins.name.startswith(("ds_", "s_")) else waits.VM
    else:
        for part in ins.pair or (ins,):
            reads |= operand_bits(*part.operands)
            if flow.reads_vcc_implicitly(part):
                reads |= operand_bits(VCC_OPERAND)
    return Traits(
        reads,
        target,
        counter,
        compiled.executable,
        vmem.stored_half(ins),
    )


#: Traits of instructions by the values on which they depend, for all launches of this process.
_TRAITS: dict[tuple, Traits] = {}
_MAX_TRAITS = 100_000


def _compile_or_trap(
    ins: Instruction,
    mode: mode_register.Mode | None,
    spaces,
) -> Compiled:
    """Compile an instruction to a function on waves. If that is impossible, the function traps."""
    try:
        if ins.unknown:
            raise Unknown(ins.unknown)
        needs_mode = ins.name.startswith("v_") or ins.name in (*MODES, "s_getreg_b32")
        needs_mode = needs_mode or salu.uses_floats(ins.name)
        if mode is None and needs_mode:
            raise Unknown("the value of the mode register is not known here")
        return _compile(ins, mode, spaces)
    except (Unknown, IndexError, ValueError) as error:
        return _trap(f"cannot execute `{ins.text}`: {error}")


def _trap(message: str) -> Compiled:
    def run(_):
        raise Trap("unknown", message)

    return Compiled(run)


def _compile_mode(
    ins: Instruction,
    mode: Any,
    _spaces: addressing.Spaces,
) -> Compiled:
    mode_register.after(ins, mode)
    if ins.name == "s_setreg_b32":
        return salu.compile_setreg(ins, mode.start)
    return NO_OPERATION


def _compile_wait(
    ins: Instruction,
    _mode: Any,
    spaces: addressing.Spaces,
) -> Compiled:
    if spaces.orders and ins.name == "s_waitcnt_vscnt":
        # The wait begins an epoch, so it divides a run of C.
        return Compiled(waits.compile_wait(ins, spaces.target, begins_epoch=True))
    return compiled_for_c(waits.compile_wait(ins, spaces.target), waits=True)


def _compile_getreg(
    ins: Instruction,
    mode: Any,
    spaces: addressing.Spaces,
) -> Compiled:
    return salu.compile_getreg(ins, mode.bits, spaces)


def _compile_message(
    ins: Instruction,
    _mode: Any,
    _spaces: addressing.Spaces,
) -> Compiled:
    return salu.compile_message(ins)


def _compile_trap(
    ins: Instruction,
    _mode: Any,
    _spaces: addressing.Spaces,
) -> Compiled:
    return salu.compile_trap(ins)


def _compile_getpc(
    ins: Instruction,
    _mode: Any,
    spaces: addressing.Spaces,
) -> Compiled:
    return salu.compile_getpc(ins, spaces)


_COMPILERS: dict[str, Callable[..., Compiled]] = {
    **dict.fromkeys(MODES, _compile_mode),
    **dict.fromkeys(WAITS, _compile_wait),
    "s_getreg_b32": _compile_getreg,
    "s_sendmsg_rtn_b64": _compile_message,
    "s_trap": _compile_trap,
    "s_getpc_b64": _compile_getpc,
}


def _compile(
    ins: Instruction,
    mode: Any,
    spaces: addressing.Spaces,
) -> Compiled:
    name = ins.name
    if ins.pair:
        return valu.compile_pair(ins, mode)
    is_dealloc = name == "s_sendmsg" and ins.operands[0].value == _DEALLOC_VGPRS
    if name in NO_EFFECT or is_dealloc:
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
        return salu.compile_scalar(ins, mode)
    return valu.compile_vector(ins, mode)
