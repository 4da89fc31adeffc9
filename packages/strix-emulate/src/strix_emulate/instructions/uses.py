# SPDX-License-Identifier: BSD-3-Clause
"""The stores of a kernel that a loaded value may influence, derived from the code alone."""

import re
from dataclasses import dataclass

from strix_emulate.arithmetic import scalars
from strix_emulate.code.decode import EXEC, M0, VCC, Instruction
from strix_emulate.instructions.flow import (
    post_dominators,
    predecessors,
    reads_vcc_implicitly,
    written_operands,
)
from strix_emulate.instructions.mnemonics import has_action
from strix_emulate.memory.waits import operand_bits, registers

#: All bits. This value means that the loaded value decides whether waves execute a store, a barrier
#: or other code with an effect. So the loaded value may influence every store.
DECIDES = -1
_EXEC = registers("s", EXEC, 2)
_VCC = registers("s", VCC, 2)
_M0 = registers("s", M0)
#: Bit of SCC in a bit mask of registers. No register has this bit.
_SCC = 1 << 600
#: Where code diverges, the loaded value may decide the lane mask of a part of the code: which lanes
#: execute that part. In a bit mask of registers, the bits of EXEC and of the scalar registers that
#: hold such a lane mask are shifted by this number. The lane masks of all parts together are the
#: lanes that were active before the code diverged. These lanes do not depend on the value.
_PART = 601
_PART_OF_EXEC = _EXEC << _PART
#: If EXEC has changed since the load, and a vector instruction overwrites a register that depends
#: on the value, the register still has the value in the lanes that are not active. Its bit is then
#: shifted by this number, until EXEC is written again.
_INACTIVE = 2 * _PART
_PLAIN = (1 << _PART) - 1
_VECTORS = registers("v", 0, 256)
_WRITES_SCC = {
    "s_addk_i32",
    *scalars.WITH_SCC,
    *scalars.COMPARES,
    *scalars.IMMEDIATE,
    *scalars.CARRIES,
    *scalars.SAVEEXEC,
    *scalars.WREXEC,
}
_READS_SCC = {*scalars.CARRIES, *scalars.SELECTS}
#: Vector and memory instructions that overwrite all of their target in the active lanes, unless
#: _ACCUMULATES matches them too.
_WHOLE = re.compile(r"(v|global|flat|buffer|scratch|ds)_\w+_[biuf](32|64|96|128)$")
#: Instructions that may read lanes which are not active. Those with DPP may, too.
_READS_INACTIVE = re.compile(r"v_readlane|v_permlane|v_wmma|ds_(b?permute|swizzle)")
_ACCUMULATES = re.compile(r"v_(dual_)?fmac|v_writelane|v_dot\w+acc|v_dot2c")
#: Scalar instructions whose target is also a source.
_READS_TARGET = ("s_addk_", "s_mulk_", "s_bitset", "s_fmac_")
_CALLS = ("s_swappc_b64", "s_setpc_b64", "s_call_b64")


def is_store(ins: Instruction) -> bool:
    """Return whether an instruction is a store or an atomic, or DS_APPEND or DS_CONSUME."""
    return has_action(ins.name, "store", "atomic", "count")


@dataclass(frozen=True)
class _Branch:
    """The code that a branch executes or skips.

    `_branch` returns it only if the code does no more than write registers: it has no store,
    atomic, DS_APPEND, DS_CONSUME, barrier or trap.

    Attributes:
        body: Indices of the instructions between the branch and the place where its paths meet.
        ends: Index of that place. Empty if the paths only meet at the end of the kernel.
        written: Bit mask of the registers that the body writes.
        writes_exec: Whether the body writes EXEC.
    """

    body: set[int]
    ends: list[int]
    written: int
    writes_exec: bool


class Uses:
    """The flow of loaded values through the code of a kernel.

    Attributes:
        complete: Whether all of the flow is known: the kernel calls no function, and M0 selects no
            vector registers.
        numbers: Numbers of loads and stores, by address. A load has its position in `loads`. A
            store or atomic has its position among the stores and atomics, modulo 64.
        loads: The loads.
    """

    def __init__(self, instructions: list[Instruction]) -> None:
        self._instructions = instructions
        self._places = {ins.address: place for place, ins in enumerate(instructions)}
        self._successors: list[list[int]] | None = None
        self._meetings: dict[int, int] | None = None
        self._reached: dict[int, int] = {}
        self.complete = True
        for ins in instructions:
            if ins.name in _CALLS or ins.name.startswith("v_movrel"):
                self.complete = False
        self.numbers: dict[int, int] = {}
        self.loads: list[Instruction] = []
        store_count = 0
        for ins in instructions:
            if is_store(ins):
                self.numbers[ins.address] = store_count % 64
                store_count += 1
            elif "_load" in ins.name:
                self.numbers[ins.address] = len(self.loads)
                self.loads.append(ins)

    def reached_stores(self, load: Instruction) -> int:
        """Return the stores that a loaded value may reach: bits of their numbers, or DECIDES."""
        place = self._places[load.address]
        if place not in self._reached:
            self._reached[place] = self._follow(place)
        return self._reached[place]

    def _all_successors(self) -> list[list[int]]:
        """Return for each instruction the indices of those that may be executed next."""
        if self._successors is None:
            self._successors = [[] for _ in self._instructions]
            for after, before in enumerate(predecessors(self._instructions)):
                for earlier in before:
                    self._successors[earlier].append(after)
        return self._successors

    def _branch(self, place: int) -> _Branch | None:
        """Return what the branch at an index decides.

        Return None if code with an effect depends on it, or if no path from it leads to the end.
        For example, a branch in `tanh` selects one of two approximations. It only decides what is
        computed, so the result is not None.
        """
        if self._meetings is None:
            self._meetings = post_dominators(self._all_successors())
        meeting = self._meetings.get(place)
        if meeting is None:
            return None
        body: set[int] = set()
        waiting = list(self._all_successors()[place])
        while waiting:
            here = waiting.pop()
            if here == meeting or here in body:
                continue
            if _has_effect(self._instructions[here]):
                return None
            body.add(here)
            waiting += self._all_successors()[here]
        written = 0
        writes_exec = False
        for here in body:
            written |= _targets(self._instructions[here])
            writes_exec = writes_exec or _writes_exec(self._instructions[here])
        ends = [meeting] if meeting < len(self._instructions) else []
        return _Branch(body, ends, written, writes_exec)

    def _follow(self, place: int) -> int:
        """Return the result of `reached_stores` for the load with the index `place`."""
        successors = self._all_successors()
        loaded = operand_bits(self._instructions[place].operands[0])
        # For each instruction, two bit masks of the registers that depend on the value: while EXEC
        # is the same as at the load, and after EXEC has changed.
        holding: dict[int, list[int]] = {}
        waiting = [(after, loaded, False) for after in successors[place]]
        reached = 0
        while waiting:
            here, bits, exec_changed = waiting.pop()
            here_holding = holding.setdefault(here, [0, 0])
            if not bits & ~here_holding[exec_changed]:
                continue
            here_holding[exec_changed] |= bits
            bits = here_holding[exec_changed]
            ins = self._instructions[here]
            depending = _depending(bits)
            if _decides(ins, depending):
                branch = self._branch(here)
                if branch is None or place in branch.body:
                    return DECIDES
                writes_exec = exec_changed or branch.writes_exec
                waiting += [(after, bits | branch.written, writes_exec) for after in branch.ends]
            if is_store(ins) and depending & (_EXEC | _source_bits(ins)):
                reached |= 1 << self.numbers[ins.address]
            bits = _bits_behind(ins, bits, exec_changed)
            if here == place:
                bits |= loaded
            exec_changed = exec_changed or _writes_exec(ins)
            if bits:
                waiting += [(after, bits, exec_changed) for after in successors[here]]
        return reached


def _decides(ins: Instruction, bits: int) -> bool:
    """Return whether one of these registers decides to which address an instruction jumps.

    The answer for a branch on EXEC is False, because waves without active lanes only skip code that
    would do nothing.
    """
    if ins.name.startswith("s_cbranch_scc"):
        return bool(bits & _SCC)
    return ins.name.startswith("s_cbranch_vcc") and bool(bits & _VCC)


def _has_effect(ins: Instruction) -> bool:
    """Return whether an instruction is a store (see `is_store`), a barrier or a trap."""
    return is_store(ins) or ins.name in ("s_barrier", "ds_gws_barrier", "s_trap")


def _targets(ins: Instruction) -> int:
    """Return the bit mask of the registers that an instruction writes, including EXEC and SCC."""
    bits = 0
    for part in ins.pair or (ins,):
        bits |= operand_bits(*written_operands(part))
        if part.name in _WRITES_SCC:
            bits |= _SCC
        if _writes_exec(part):
            bits |= _EXEC
    return bits


def _writes_exec(ins: Instruction) -> bool:
    if ins.name in scalars.SAVEEXEC or ins.name in scalars.WREXEC or ins.name.startswith("v_cmpx"):
        return True
    return bool(operand_bits(*written_operands(ins)) & _EXEC)


def _depending(bits: int) -> int:
    """Return the registers that depend on the loaded value, and lane masks that it decides."""
    return bits | bits >> _PART


def _bits_behind(ins: Instruction, bits: int, exec_changed: bool) -> int:
    """Return the registers that depend on the loaded value after an instruction.

    Args:
        ins: The instruction.
        bits: The registers that depend on the loaded value before the instruction.
        exec_changed: Whether EXEC was written since the load, so that other lanes may be active.
    """
    after = bits
    for part in ins.pair or (ins,):
        written = operand_bits(*written_operands(part))
        replaced = written if _replaces(part) else 0
        if exec_changed:
            after |= (after & replaced & _VECTORS) << _INACTIVE
        else:
            after &= ~(replaced << _INACTIVE)
        if part.name in _WRITES_SCC:
            replaced |= _SCC
        if _writes_exec(part):
            # Both halves, because a wave of 32 lanes writes EXEC_LO only.
            replaced |= _EXEC
        after &= ~(replaced | replaced << _PART)
        after |= _dependent_targets(part, bits, written)
        if _writes_exec(part):
            after = after & ~(_PLAIN << _INACTIVE) | after >> _INACTIVE
    return after


def _dependent_targets(ins: Instruction, bits: int, written: int) -> int:
    """Return the targets of an instruction that depend on the loaded value after it.

    Args:
        ins: The instruction.
        bits: The registers that depend on the loaded value before the instruction.
        written: Bit mask of the instruction's targets.
    """
    depending = _depending(bits)
    if "dpp" in ins.suffix or _READS_INACTIVE.match(ins.name):
        depending |= bits >> _INACTIVE
    exec_before = bits & (_EXEC | _PART_OF_EXEC)
    sources = _source_bits(ins)
    depends = bool(depending & sources)
    scc = _SCC if ins.name in _WRITES_SCC and (depends or exec_before) else 0
    if ins.name.startswith("v_cmpx"):
        return exec_before | (_PART_OF_EXEC if depends else 0)
    if ins.name in scalars.SAVEEXEC or ins.name in scalars.WREXEC:
        exec_after = exec_before
        if bits & sources and not ins.name.startswith("s_and_saveexec"):
            exec_after |= _EXEC
        elif depends:
            exec_after |= _PART_OF_EXEC
        # The target of SAVEEXEC gets the old EXEC, and that of WREXEC the result.
        value = exec_after if ins.name in scalars.WREXEC else exec_before
        target = written if value & _EXEC else 0
        if value & _PART_OF_EXEC:
            target |= written << _PART
        return exec_after | target | scc
    if ins.name in ("s_or_b32", "s_or_b64") and written & _EXEC:
        # S_OR of EXEC with the other part reactivates all lanes that were active before the code
        # diverged.
        return written | scc if bits & sources & ~_EXEC else 0
    if ins.name in ("s_xor_b32", "s_xor_b64") and sources & _EXEC and not bits & sources:
        # S_XOR of one part with the lanes that were active before the code diverged yields the
        # other part.
        return written << _PART | scc if depends else 0
    # If EXEC depends on the value, so do the lanes that are written. A branch on EXEC may also have
    # skipped the instruction.
    if depends or (exec_before and not written & _EXEC):
        return written | scc
    return 0


def _source_bits(ins: Instruction) -> int:
    """Return the bit mask of the registers that an instruction reads, without EXEC as lane mask."""
    written = written_operands(ins)
    if ins.name.startswith(("v_swap_", "buffer_atomic_")):
        # These read the registers that they write.
        return operand_bits(*ins.operands)
    # The operands that an instruction writes come first. A source may be the same register.
    sources = list(ins.operands[len(written) :])
    if ins.name.startswith(_READS_TARGET):
        sources.append(ins.operands[0])
    bits = operand_bits(*sources)
    if ins.name in _READS_SCC or ins.name.startswith("s_cmov"):
        bits |= _SCC
    if reads_vcc_implicitly(ins):
        bits |= _VCC
    if has_action(ins.name, "count"):
        bits |= _M0
    return bits


def _replaces(ins: Instruction) -> bool:
    """Return whether an instruction overwrites its targets completely, at least in active lanes."""
    if ins.name.startswith("s_"):
        return not ins.name.startswith("s_cmov")
    if ins.name.startswith("v_cmp") or "lane_b32" in ins.name:
        return not ins.name.startswith("v_writelane")
    if "dpp" in ins.suffix:
        return False
    return bool(_WHOLE.match(ins.name)) and not _ACCUMULATES.match(ins.name)
