# SPDX-License-Identifier: BSD-3-Clause
"""Which stores of a kernel what a load gives may reach, by its code alone."""

import re

from strix_emulate.arithmetic import scalars
from strix_emulate.code.decode import EXEC, VCC, Instruction
from strix_emulate.instructions import atomics
from strix_emulate.instructions.flow import operand_bits, predecessors, written_operands
from strix_emulate.memory.waits import registers

#: What a load gives decides where waves go, so it may change anything.
DECIDES = -1
_EXEC, _VCC = registers("s", EXEC, 2), registers("s", VCC, 2)
#: A bit behind those of the registers.
_SCC = 1 << 600
_WRITES_SCC = {*scalars.WITH_SCC, *scalars.COMPARES, *scalars.IMMEDIATE, *scalars.CARRIES,
               *scalars.SAVEEXEC, *scalars.WREXEC}  # fmt: skip
_READS_SCC = {*scalars.CARRIES, *scalars.SELECTS}
_STORE = re.compile(r"(global|flat|buffer|scratch|ds)_store_")
#: Vector instructions that leave nothing of what their target held, where lanes are active.
_WHOLE = re.compile(r"(v|global|flat|buffer|scratch|ds)_\w+_[biuf](32|64|96|128)$")
_KEEPS = re.compile(r"v_(dual_)?fmac|v_writelane|v_dot\w+acc|v_dot2c")
_CALLS = ("s_swappc_b64", "s_setpc_b64", "s_call_b64")


def stores(ins: Instruction) -> bool:
    """Return whether an instruction changes memory: a store or an atomic."""
    return bool(_STORE.match(ins.name)) or ins.name in atomics.NAMES


class Uses:
    """Where values go in a kernel's code.

    numbers: of each store and atomic by its address, and of each other memory instruction.
    """

    def __init__(self, instructions: list[Instruction]) -> None:
        self._instructions = instructions
        self._places = {ins.address: place for place, ins in enumerate(instructions)}
        self._following: list[list[int]] | None = None
        self._reached: dict[int, int] = {}
        #: whether all of the code is known
        self.complete = not any(ins.name in _CALLS for ins in instructions)
        self.numbers: dict[int, int] = {}
        self.loads: list[Instruction] = []
        changing = 0
        for ins in instructions:
            if stores(ins):
                self.numbers[ins.address] = changing % 64
                changing += 1
            elif "_load" in ins.name:
                self.numbers[ins.address] = len(self.loads)
                self.loads.append(ins)

    def of(self, load: Instruction) -> int:
        """Return as bits the numbers of the stores that what a load gives may reach; or DECIDES."""
        place = self._places[load.address]
        if place not in self._reached:
            self._reached[place] = self._follow(place)
        return self._reached[place]

    def _follow(self, place: int) -> int:
        if self._following is None:
            self._following = [[] for _ in self._instructions]
            for after, before in enumerate(predecessors(self._instructions)):
                for earlier in before:
                    self._following[earlier].append(after)
        loaded = operand_bits(self._instructions[place].operands[0])
        # registers that hold it: since EXEC was changed, and as long as it was not
        known: dict[int, list[int]] = {}
        asked = [(after, loaded, False) for after in self._following[place]]
        reached = 0
        while asked:
            here, bits, changed = asked.pop()
            held = known.setdefault(here, [0, 0])
            if not bits & ~held[changed]:
                continue
            bits = held[changed] = held[changed] | bits
            ins = self._instructions[here]
            if _decides(ins, bits):
                return DECIDES
            if stores(ins) and bits & (_EXEC | operand_bits(*ins.operands)):
                reached |= 1 << self.numbers[ins.address]
            bits = _bits_behind(ins, bits, changed)
            if here == place:
                bits |= loaded
            changed = changed or _writes_exec(ins)
            if bits:
                asked += [(after, bits, changed) for after in self._following[here]]
        return reached


def _decides(ins: Instruction, bits: int) -> bool:
    """Return whether waves go where registers with these bits say.

    Where EXEC says it, waves without active lanes skip what would do nothing.
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


def _bits_behind(ins: Instruction, bits: int, changed: bool) -> int:
    """Return the registers that depend on the value behind an instruction.

    bits: in front of it; changed: other lanes may be active than at the load.
    """
    before, after = bits, bits
    for part in ins.pair or (ins,):
        written = operand_bits(*written_operands(part))
        depends = bool(before & _read_bits(part, written))
        target = written
        if part.name in scalars.SAVEEXEC or part.name in scalars.WREXEC:
            after = after & ~_EXEC | (_EXEC if depends or before & _EXEC else 0)
            after = after & ~_SCC | (_SCC if depends or before & _EXEC else 0)
            # the target gets EXEC as it was, or the result
            depends = bool(before & _EXEC) or (depends and part.name in scalars.WREXEC)
        elif part.name.startswith("v_cmpx"):
            target = _EXEC
            depends = depends or bool(before & _EXEC)
        else:
            # lanes, or the code that they skip, depend on it
            depends = depends or bool(before & _EXEC and not written & _EXEC)
            if part.name in _WRITES_SCC:
                target |= _SCC
        if depends:
            after |= target
        elif target & _SCC or _replaces(part, changed):
            after &= ~target
    return after


def _read_bits(ins: Instruction, written: int) -> int:
    """Return the registers that an instruction reads."""
    sources = [op for op in ins.operands if op not in written_operands(ins)]
    if len(ins.operands) > 1 and ins.operands[0] in ins.operands[1:]:
        sources.append(ins.operands[0])
    bits = operand_bits(*sources)
    if ins.name in _READS_SCC or ins.name.startswith("s_cmov"):
        bits |= _SCC
    if ins.name.startswith("v_div_fmas"):
        bits |= _VCC
    if ins.name in ("s_or_b32", "s_or_b64") and written & _EXEC:
        # what joins lanes again: the ones that were active are among those that had been
        bits &= ~_EXEC
    return bits


def _replaces(ins: Instruction, changed: bool) -> bool:
    """Return whether nothing is left of what the targets held."""
    if ins.name.startswith("s_"):
        return not ins.name.startswith("s_cmov")
    if ins.name.startswith("v_cmp") or "lane_b32" in ins.name:
        return not ins.name.startswith("v_writelane")
    whole = _WHOLE.match(ins.name) and not _KEEPS.match(ins.name) and ins.suffix != "dpp"
    return bool(whole) and not changed
