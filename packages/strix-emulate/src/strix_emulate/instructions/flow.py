# SPDX-License-Identifier: BSD-3-Clause
"""Data flow in a kernel's code: predecessors, registers that instructions write, copies."""

import re
from dataclasses import replace
from functools import reduce

from strix_emulate.code.decode import Instruction, Operand
from strix_emulate.instructions.mnemonics import MEMORY
from strix_emulate.memory.waits import operand_bits, registers

#: Instructions that write none of their operands.
_WRITES_NOTHING = re.compile(r"s_cmp|s_bitcmp|s_wait|s_set|s_sendmsg$|s_cbranch|v_cmpx|\w+_store_")
#: Vector operations that also write their second operand: a mask, or the other register of a swap.
_TWO_RESULTS = re.compile(r"v_(add|sub|subrev)_co_|v_div_scale_|v_mad_[ui]64_|v_swap_")
#: Instructions that copy registers, with the positions of the operands from which they may copy.
_COPIES = {
    "v_mov_b32": (1,),
    "v_dual_mov_b32": (1,),
    "v_cndmask_b32": (1, 2),
    "v_dual_cndmask_b32": (1, 2),
    "v_readfirstlane_b32": (1,),
    "v_readlane_b32": (1,),
    "v_writelane_b32": (1,),
    "s_mov_b32": (1,),
    "s_mov_b64": (1,),
    "s_cmov_b32": (0, 1),
    "s_cmov_b64": (0, 1),
    "s_cselect_b32": (1, 2),
    "s_cselect_b64": (1, 2),
}


def branch_target(ins: Instruction) -> int:
    """Return the address to which a branch jumps."""
    return ins.address + ins.size + 4 * int(ins.operands[0].value)


def written_operands(ins: Instruction) -> tuple[Operand, ...]:
    """Return the operands that an instruction writes. Call it for each half of a VOPD pair."""
    if not ins.operands or _WRITES_NOTHING.match(ins.name):
        return ()
    kind = MEMORY.get(ins.name)
    if kind is not None and kind.action == "atomic":
        returns = kind.returns or "glc" in ins.modifiers
        return ins.operands[:1] if returns else ()
    if _TWO_RESULTS.match(ins.name):
        return ins.operands[:2]
    return ins.operands[:1]


def reads_vcc_implicitly(ins: Instruction) -> bool:
    """Return whether a vector instruction reads VCC although VCC is not one of its operands.

    The branches s_cbranch_vccz and s_cbranch_vccnz read VCC too, but are not considered here.
    """
    return ins.name.startswith(("v_div_fmas", "v_dual_cndmask"))


def predecessors(instructions: list[Instruction]) -> list[list[int]]:
    """Return for each instruction the indices of those that may be executed right before it."""
    numbers = {ins.address: i for i, ins in enumerate(instructions)}
    before: list[list[int]] = [[] for _ in instructions]
    for i, ins in enumerate(instructions):
        leaves = ins.name in ("s_branch", "s_endpgm", "s_setpc_b64")
        following = numbers.get(ins.address + ins.size)
        if following is not None and not leaves:
            before[following].append(i)
        if "branch" in ins.name and not ins.unknown:
            target = numbers.get(branch_target(ins))
            if target is not None:
                before[target].append(i)
    return before


def post_dominators(successors: list[list[int]]) -> dict[int, int]:
    """Return for each instruction the index of the first later one on all paths to the end.

    The algorithm is that of Cooper, Harvey and Kennedy, "A Simple, Fast Dominance Algorithm", on
    the reversed graph.

    Args:
        successors: For each instruction, the indices of those that may be executed next.

    Returns:
        The immediate post-dominator of each instruction. The index behind the last instruction
        stands for the end of the kernel. Instructions from which no path leads to the end are
        missing.
    """
    end = len(successors)
    order = _order_to_the_end(successors)
    position = {place: i for i, place in enumerate(order)}
    nearest = {end: end}

    def join(one: int, other: int) -> int:
        while one != other:
            if position[one] < position[other]:
                one = nearest[one]
            else:
                other = nearest[other]
        return one

    has_changed = True
    while has_changed:
        has_changed = False
        for place in reversed(order[:-1]):
            known = [later for later in successors[place] or [end] if later in nearest]
            common = reduce(join, known)
            if nearest.get(place) != common:
                nearest[place] = common
                has_changed = True
    del nearest[end]
    return nearest


def _order_to_the_end(successors: list[list[int]]) -> list[int]:
    """Return the indices of the instructions in postorder of the reversed graph. The end is last.

    Instructions from which no path leads to the end are missing.
    """
    end = len(successors)
    before: list[list[int]] = [[] for _ in range(end + 1)]
    for place, after in enumerate(successors):
        for later in after or [end]:
            before[later].append(place)
    order = []
    visited = {end}
    stack = [(end, iter(before[end]))]
    while stack:
        place, earlier_places = stack[-1]
        earlier = next((i for i in earlier_places if i not in visited), None)
        if earlier is None:
            order.append(place)
            stack.pop()
        else:
            visited.add(earlier)
            stack.append((earlier, iter(before[earlier])))
    return order


def mark_swaps(instructions: list[Instruction]) -> list[Instruction]:
    """Mark the plain loads whose value a compare-and-swap compares on some path of the code.

    If an atomic operation has no instruction, LLVM expands it into a loop of compare-and-swaps. A
    plain load before the loop loads the value that the first compare-and-swap compares. If that
    value is old, the compare-and-swap fails and returns the current value, so the load is not a
    race. The code may copy the loaded value before the compare-and-swap, and the load may load
    other words too.
    """
    waiting = []
    for number, ins in enumerate(instructions):
        if _is_compare_and_swap(ins):
            waiting.append((number, _compared_bits(ins)))
    if not waiting:
        return instructions
    before = predecessors(instructions)
    followed = [0] * len(instructions)
    words: dict[int, int] = {}
    while waiting:
        number, bits = waiting.pop()
        for earlier in before[number]:
            new = bits & ~followed[earlier]
            if not new:
                continue
            followed[earlier] |= new
            ins = instructions[earlier]
            loaded = _loaded_words(ins, new)
            if loaded:
                words[earlier] = words.get(earlier, 0) | loaded
            waiting.append((earlier, _bits_before(ins, new)))
    marked = list(instructions)
    for number, loaded in words.items():
        marked[number] = replace(marked[number], swap_words=loaded)
    return marked


def _is_compare_and_swap(ins: Instruction) -> bool:
    """Return whether an instruction is a compare-and-swap of bits, not of floats."""
    kind = MEMORY.get(ins.name)
    if kind is None or ins.unknown:
        return False
    return kind.operation in ("cmpswap", "cmpstore") and kind.type.startswith("b")


def _compared_bits(swap: Instruction) -> int:
    """Return the bit mask of the registers whose value a compare-and-swap compares with memory."""
    kind = MEMORY[swap.name]
    if kind.space == "ds":
        return operand_bits(swap.operands[3 if kind.returns else 2])
    if kind.space == "buffer":
        data = swap.operands[0]
    else:
        data = swap.operands[2 if "glc" in swap.modifiers else 1]
    half = data.count // 2
    return operand_bits(replace(data, index=data.index + half, count=half))


def _loaded_words(ins: Instruction, bits: int) -> int:
    """Return a bit mask of the words that a plain load loads into any of the registers `bits`."""
    if not _is_plain_load(ins):
        return 0
    target = ins.operands[0]
    first = registers(target.kind, target.index).bit_length() - 1
    return bits >> first & (1 << target.count) - 1


def _is_plain_load(ins: Instruction) -> bool:
    """Return whether an instruction loads whole registers, without GLC, and not from scratch."""
    kind = MEMORY.get(ins.name)
    if kind is None or kind.action not in ("load", "scalar_load"):
        return False
    if kind.space == "scratch" or "glc" in ins.modifiers:
        return False
    return kind.type.startswith("b") and kind.size >= 4


def _bits_before(ins: Instruction, bits: int) -> int:
    """Return the registers from which the values in `bits` after an instruction may come.

    `bits` and the result are bit masks of registers. They differ if the instruction copies or
    overwrites registers in `bits`.
    """
    unwritten = bits
    copied = 0
    for part in ins.pair or (ins,):
        written = operand_bits(*written_operands(part))
        if not written & bits:
            continue
        positions = () if part.modifiers else _COPIES.get(part.name, ())
        for position in positions:
            copied |= _copied_bits(part.operands[0], part.operands[position], bits)
        # Inactive lanes of a vector register keep their value.
        if not positions or part.name.startswith("s_"):
            unwritten &= ~written
    return unwritten | copied


def _copied_bits(target: Operand, source: Operand, bits: int) -> int:
    """Return the registers of `source` whose copies in `target` are in `bits`.

    `bits` and the result are bit masks of registers.
    """
    if source.kind not in ("v", "s") or source.neg or source.abs:
        return 0
    first_target = registers(target.kind, target.index).bit_length() - 1
    first_source = registers(source.kind, source.index).bit_length() - 1
    return (bits >> first_target & (1 << target.count) - 1) << first_source
