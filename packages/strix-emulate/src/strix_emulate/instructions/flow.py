# SPDX-License-Identifier: BSD-3-Clause
"""Where values go in a kernel's code: control flow, registers that instructions write, copies."""

import re
from dataclasses import replace

from strix_emulate.code.decode import Instruction, Operand
from strix_emulate.instructions import atomics
from strix_emulate.memory.waits import registers

#: Instructions that write none of their operands.
_WRITES_NOTHING = re.compile(r"s_cmp|s_bitcmp|s_wait|s_set|s_sendmsg$|s_cbranch|v_cmpx|\w+_store_")
_RETURNING = re.compile(r"ds_\w+_rtn_|ds_(append|consume)")
#: Vector operations whose second operand is a mask that they write.
_TWO_RESULTS = re.compile(r"v_(add|sub|subrev)_co_|v_div_scale_|v_mad_[ui]64_")
_SWAP = re.compile(r"(global|flat|buffer)_atomic_cmpswap_b|ds_cmpstore_(rtn_)?b")
_LOAD = re.compile(r"((global|flat|buffer|ds|s|s_buffer)_load|ds_load_2addr(_stride64)?)_b\d\d+$")
#: Copies, and their sources' places. Inactive lanes keep what a vector register held.
_COPIES = {
    "v_mov_b32": (1,), "v_dual_mov_b32": (1,), "v_cndmask_b32": (1, 2),
    "v_dual_cndmask_b32": (1, 2), "v_readfirstlane_b32": (1,), "v_readlane_b32": (1,),
    "v_writelane_b32": (1,), "s_mov_b32": (1,), "s_mov_b64": (1,), "s_cmov_b32": (0, 1),
    "s_cmov_b64": (0, 1), "s_cselect_b32": (1, 2), "s_cselect_b64": (1, 2),
}  # fmt: skip


def branch_target(ins: Instruction) -> int:
    """Return the address that a branch goes to."""
    return ins.address + ins.size + 4 * int(ins.operands[0].value)


def operand_bits(*operands: Operand) -> int:
    """Return bits of the registers that operands name, as :func:`waits.registers` has them."""
    bits = 0
    for op in operands:
        if op.kind in ("v", "s"):
            bits |= registers(op.kind, op.index, op.count)
    return bits


def written_operands(ins: Instruction) -> tuple[Operand, ...]:
    """Return the operands that an instruction writes. A VOPD pair is two instructions."""
    name, ops = ins.name, ins.operands
    if not ops or _WRITES_NOTHING.match(name):
        return ()
    if name in atomics.NAMES and not ("glc" in ins.modifiers or _RETURNING.match(name)):
        return ()
    return ops[:2] if _TWO_RESULTS.match(name) else ops[:1]


def predecessors(instructions: list[Instruction]) -> list[list[int]]:
    """Return for each instruction the places of those that may come right before it."""
    places = {ins.address: i for i, ins in enumerate(instructions)}
    before: list[list[int]] = [[] for _ in instructions]
    for i, ins in enumerate(instructions):
        leaves = ins.name in ("s_branch", "s_endpgm", "s_setpc_b64")
        following = places.get(ins.address + ins.size)
        if following is not None and not leaves:
            before[following].append(i)
        if "branch" in ins.name and not ins.unknown:
            target = places.get(branch_target(ins))
            if target is not None:
                before[target].append(i)
    return before


def mark_swaps(instructions: list[Instruction]) -> list[Instruction]:
    """Mark plain loads of what a compare-and-swap compares, on any way from load to swap.

    LLVM expands an atomic that has no instruction into a loop of swaps, in front of which it loads
    what the first one compares. If the load gives an old value, the swap fails, and gives the next
    one. Copies may lie between; the load may give other words as well.
    """
    asked = [
        (place, _compared(ins))
        for place, ins in enumerate(instructions)
        if _SWAP.match(ins.name) and not ins.unknown
    ]
    if not asked:
        return instructions
    before = predecessors(instructions)
    known = [0] * len(instructions)
    words: dict[int, int] = {}
    while asked:
        place, bits = asked.pop()
        for earlier in before[place]:
            new = bits & ~known[earlier]
            if not new:
                continue
            known[earlier] |= new
            ins = instructions[earlier]
            loaded = _loaded_words(ins, new)
            if loaded:
                words[earlier] = words.get(earlier, 0) | loaded
            asked.append((earlier, _values_before(ins, new)))
    marked = list(instructions)
    for place, loaded in words.items():
        marked[place] = replace(marked[place], swap_words=loaded)
    return marked


def _compared(swap: Instruction) -> int:
    """Return the registers of the value that a compare-and-swap compares."""
    if swap.name.startswith("ds_"):
        return operand_bits(swap.operands[3 if "_rtn_" in swap.name else 2])
    data = swap.operands[0 if "buffer" in swap.name else int("glc" in swap.modifiers) + 1]
    half = data.count // 2
    return operand_bits(replace(data, index=data.index + half, count=half))


def _loaded_words(ins: Instruction, bits: int) -> int:
    """Return which words of what a plain load gives are in these registers, as bits."""
    if not _LOAD.match(ins.name) or "glc" in ins.modifiers:
        return 0
    target = ins.operands[0]
    first = registers(target.kind, target.index).bit_length() - 1
    return bits >> first & (1 << target.count) - 1


def _values_before(ins: Instruction, bits: int) -> int:
    """Return the registers that held the values of these before an instruction."""
    parts = ins.pair or (ins,)
    kept, copied = bits, 0
    for part in parts:
        written = operand_bits(*written_operands(part))
        if not written & bits:
            continue
        sources = _COPIES.get(part.name, ()) if not part.modifiers else ()
        for number in sources:
            copied |= _moved(part.operands[0], part.operands[number], bits)
        # lanes that are not active keep what they had
        if not sources or part.name.startswith("s_"):
            kept &= ~written
    return kept | copied


def _moved(target: Operand, source: Operand, bits: int) -> int:
    """Return the registers of the source that are copied to these ones of the target."""
    if source.kind not in ("v", "s") or source.neg or source.abs:
        return 0
    to = registers(target.kind, target.index).bit_length() - 1
    start = registers(source.kind, source.index).bit_length() - 1
    return (bits >> to & (1 << target.count) - 1) << start
