# SPDX-License-Identifier: BSD-3-Clause
"""The stores of a kernel that a loaded value may influence, derived from the code alone."""

import re

from strix_emulate.arithmetic import scalars
from strix_emulate.code.decode import EXEC, VCC, Instruction
from strix_emulate.instructions.flow import operand_bits, predecessors, written_operands
from strix_emulate.instructions.mnemonics import has_action
from strix_emulate.memory.waits import registers

#: This bit means that the loaded value decides to which address waves jump, so that the value may
#: influence every store.
DECIDES = -1
_EXEC = registers("s", EXEC, 2)
_VCC = registers("s", VCC, 2)
#: A bit that no register uses.
_SCC = 1 << 600
_WRITES_SCC = {
    *scalars.WITH_SCC,
    *scalars.COMPARES,
    *scalars.IMMEDIATE,
    *scalars.CARRIES,
    *scalars.SAVEEXEC,
    *scalars.WREXEC,
}
_READS_SCC = {*scalars.CARRIES, *scalars.SELECTS}
#: Vector instructions that overwrite all of their target in the active lanes.
_WHOLE = re.compile(r"(v|global|flat|buffer|scratch|ds)_\w+_[biuf](32|64|96|128)$")
_ACCUMULATES = re.compile(r"v_(dual_)?fmac|v_writelane|v_dot\w+acc|v_dot2c")
_CALLS = ("s_swappc_b64", "s_setpc_b64", "s_call_b64")


def is_store(ins: Instruction) -> bool:
    """Return whether an instruction changes memory: a store or an atomic."""
    return has_action(ins.name, "store", "atomic")


class Uses:
    """The flow of loaded values through a kernel's code.

    Attributes:
        complete: Whether all of the code is known, because the kernel calls no function.
        numbers: Numbers of loads and stores, by address. A load has its position in `loads`. A
            store or atomic has its position among the stores and atomics, modulo 64.
        loads: The loads.
    """

    def __init__(self, instructions: list[Instruction]) -> None:
        self._instructions = instructions
        self._places = {ins.address: place for place, ins in enumerate(instructions)}
        self._successors: list[list[int]] | None = None
        self._reached: dict[int, int] = {}
        self.complete = not any(ins.name in _CALLS for ins in instructions)
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
        """Return a bit mask of the numbers of the stores that a value may reach, or DECIDES."""
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

    def _follow(self, place: int) -> int:
        """Follow a loaded value through the code. `place` is the index of the load."""
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
            if _decides(ins, bits):
                return DECIDES
            if is_store(ins) and bits & (_EXEC | operand_bits(*ins.operands)):
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

    The answer for a call is always True. For a branch on EXEC it is False, because waves without
    active lanes only skip code that would do nothing.
    """
    if ins.name.startswith("s_cbranch_scc"):
        return bool(bits & _SCC)
    if ins.name.startswith("s_cbranch_vcc"):
        return bool(bits & _VCC)
    return ins.name in _CALLS


def _writes_exec(ins: Instruction) -> bool:
    if ins.name in scalars.SAVEEXEC or ins.name in scalars.WREXEC or ins.name.startswith("v_cmpx"):
        return True
    return bool(operand_bits(*written_operands(ins)) & _EXEC)


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
        depends = bool(bits & _read_bits(part, written))
        exec_depends = bool(bits & _EXEC)
        target = written
        if part.name in scalars.SAVEEXEC or part.name in scalars.WREXEC:
            after &= ~(_EXEC | _SCC)
            if depends or exec_depends:
                after |= _EXEC | _SCC
            # The target of SAVEEXEC gets the old EXEC, and that of WREXEC the result.
            depends = exec_depends or (depends and part.name in scalars.WREXEC)
        elif part.name.startswith("v_cmpx"):
            target = _EXEC
            depends = depends or exec_depends
        else:
            # If EXEC depends on the value, so do the lanes that are written. A branch on EXEC may
            # also have skipped the instruction.
            depends = depends or (exec_depends and not written & _EXEC)
            if part.name in _WRITES_SCC:
                target |= _SCC
        if depends:
            after |= target
        elif target & _SCC or _replaces(part, exec_changed):
            after &= ~target
    return after


def _read_bits(ins: Instruction, written: int) -> int:
    """Return the registers that an instruction reads."""
    written_by_it = written_operands(ins)
    sources = [op for op in ins.operands if op not in written_by_it]
    if len(ins.operands) > 1 and ins.operands[0] in ins.operands[1:]:
        sources.append(ins.operands[0])
    bits = operand_bits(*sources)
    if ins.name in _READS_SCC or ins.name.startswith("s_cmov"):
        bits |= _SCC
    if ins.name.startswith("v_div_fmas"):
        bits |= _VCC
    if ins.name in ("s_or_b32", "s_or_b64") and written & _EXEC:
        # S_OR of EXEC only reactivates lanes that were active before the code diverged, so its
        # result does not depend on the value.
        bits &= ~_EXEC
    return bits


def _replaces(ins: Instruction, exec_changed: bool) -> bool:
    """Return whether an instruction overwrites all of its targets."""
    if ins.name.startswith("s_"):
        return not ins.name.startswith("s_cmov")
    if ins.name.startswith("v_cmp") or "lane_b32" in ins.name:
        return not ins.name.startswith("v_writelane")
    if exec_changed or ins.suffix == "dpp":
        return False
    return bool(_WHOLE.match(ins.name)) and not _ACCUMULATES.match(ins.name)
