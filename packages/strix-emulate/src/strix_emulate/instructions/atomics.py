# SPDX-License-Identifier: BSD-3-Clause
"""Atomic read-modify-writes of global memory and LDS (RDNA3.5 ISA, chapter 16: DS, MUBUF, FLAT).

Atomics of different waves are no race with each other: they order what comes before and after them
(:mod:`strix_emulate.memory.happens_before`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from strix_emulate.code.decode import M0, Instruction, Operand, Unknown
from strix_emulate.errors import Trap
from strix_emulate.instructions.forms import Form, executes
from strix_emulate.memory import addressing
from strix_emulate.memory.waits import (
    LGKM,
    STORE,
    VM,
    Outstanding,
    at_release,
    issue,
    issue_all,
    registers,
)
from strix_emulate.memory.waves import Waves

#: name: (new value of old, data and second data, or None for the data; ufunc with an `at` that does
#: the same, or None)
_OPERATIONS: dict[str, tuple[Any, Any]] = {
    "add": (lambda old, x: old + x, np.add),
    "sub": (lambda old, x: old - x, np.subtract),
    "rsub": (lambda old, x: x - old, None),
    "inc": (lambda old, x: np.where(old >= x, old.dtype.type(0), old + old.dtype.type(1)), None),
    "dec": (lambda old, x: np.where((old == 0) | (old > x), x, old - old.dtype.type(1)), None),
    "csub": (lambda old, x: np.where(old < x, old.dtype.type(0), old - x), None),
    "and": (lambda old, x: old & x, np.bitwise_and),
    "or": (lambda old, x: old | x, np.bitwise_or),
    "xor": (lambda old, x: old ^ x, np.bitwise_xor),
    "min": (lambda old, x: np.where(x < old, x, old), None),
    "max": (lambda old, x: np.where(x > old, x, old), None),
    "swap": (None, None),
    "cmpswap": (lambda old, x, expected: np.where(old == expected, x, old), None),
    # LDS has other names, and the mask first
    "storexchg": (None, None),
    "cmpstore": (lambda old, x, expected: np.where(old == expected, x, old), None),
    "mskor": (lambda old, mask, x: (old & ~mask) | x, None),
}
#: by which locks are taken
_LOCKS = {"swap", "cmpswap", "storexchg", "cmpstore"}
_TWO_SOURCES = {"cmpswap", "cmpstore", "mskor"}
_GLOBAL = {
    **dict.fromkeys(("add", "sub", "inc", "dec"), ("u32", "u64")),
    **dict.fromkeys(("and", "or", "xor", "swap"), ("b32", "b64")), "csub": ("u32",),
    **dict.fromkeys(("min", "max"), ("u32", "i32", "u64", "i64", "f32")),
    "cmpswap": ("b32", "b64", "f32"),
}  # fmt: skip
_LDS = {
    **dict.fromkeys(("add", "sub", "rsub", "inc", "dec"), ("u32", "u64")),
    **dict.fromkeys(("and", "or", "xor", "storexchg", "mskor"), ("b32", "b64")),
    **dict.fromkeys(("min", "max"), ("u32", "i32", "u64", "i64", "f32", "f64")),
    "cmpstore": ("b32", "b64", "f32", "f64"),
}  # fmt: skip
_GLOBAL["add"] += ("f32",)
_LDS["add"] += ("f32",)
#: every mnemonic: (space, operation, kind, whether LDS returns the old value)
NAMES = {
    **{f"{space}_atomic_{op}_{kind}": (space, op, kind, False)
       for space in ("global", "flat", "buffer") for op, kinds in _GLOBAL.items()
       for kind in kinds if (space, op) != ("flat", "csub")},
    **{f"ds_{op}{rtn}_{kind}": ("ds", op, kind, bool(rtn))
       for op, kinds in _LDS.items() for kind in kinds for rtn in ("", "_rtn")
       if rtn or op != "storexchg"},
}  # fmt: skip

#: of those that are more than a copy, for C: kind of the result, kinds of sources, function
FUNCTIONS = {
    f"atomic_{op}_{kind}": (kind, (kind,) * (3 if op in _TWO_SOURCES else 2), _OPERATIONS[op][0])
    for table in (_GLOBAL, _LDS) for op, kinds in table.items() for kind in kinds
    if _OPERATIONS[op][0] is not None
}  # fmt: skip
COUNTED = {"ds_append", "ds_consume"}


def compile_atomic(ins: Instruction, spaces: addressing.Spaces) -> Callable:
    """Return a function that executes the instruction on Waves. Raise Unknown."""
    if ins.name in COUNTED:
        return _counted(ins, spaces)
    space, op, kind, returns = NAMES[ins.name]
    dtype = np.dtype({"b": "u"}.get(kind[0], kind[0]) + str(int(kind[1:]) // 8))
    size, words = dtype.itemsize, dtype.itemsize // 4
    returns = returns or "glc" in ins.modifiers
    allowed = spaces.target.cache | {"offset"} | ({"offen"} if space == "buffer" else set())
    if ins.modifiers.keys() - allowed:
        raise Unknown(f"modifiers {sorted(ins.modifiers.keys() - allowed)}")
    ops = list(ins.operands)
    offset = ins.modifiers.get("offset", 0)
    counters = (VM if returns else STORE, LGKM)
    target: Any
    if space == "buffer":
        data, target = ops[0], ops[0]
        locate = addressing.locate_buffer(ins, ops[1:], size, True, spaces.arena)
    else:
        target = ops.pop(0) if returns else None
        address, data = ops[:2]
        if space != "ds":
            base = ops[2] if space == "global" else Operand("off")
            locate = addressing.locate_global(ins, [address, base], size, True, spaces.arena)
    first = data.index
    given = [first]
    if op in _TWO_SOURCES:
        given.append(ops[2].index if space == "ds" else first + words)
    function, ufunc = _OPERATIONS[op]
    takes = returns and op in _LOCKS
    bits = registers("v", target.index, words) if returns else 0

    def operand(g: Waves, register: int, inside):
        raw = g.VF[register : register + words][:, g.lanes]
        raw = raw if inside is None else raw[:, inside]
        return np.ascontiguousarray(raw.T).view(dtype).ravel()

    def on(memory, locate, counters):
        issued = Outstanding(bits, True, ins.text)

        def run(g: Waves):
            at, inside, _ = locate(g)
            if (at % size).any():
                raise Trap(
                    "misaligned", f"an atomic of {size} bytes that is not at a multiple of it"
                )
            places = at // size
            values = [operand(g, register, inside) for register in given]
            old = _apply(memory.bytes.view(dtype), places, values, function, ufunc, returns)
            _order(g, memory, at, inside, size, takes)
            if returns:
                result = old.view(np.uint32).reshape(-1, words).T
                if inside is not None:
                    whole = np.zeros((words, len(inside)), np.uint32)
                    whole[:, inside] = result
                    result = whole
                for i in range(words):
                    g.VF[target.index + i][g.lanes] = result[i]
            issue_all(g, counters, issued)

        if len(counters) > 1:
            return run
        rest = [address] if space == "ds" else ops[1:] if space == "buffer" else [address, ops[2]]
        form = Form(
            "" if function is None else f"atomic_{op}_{kind}", function, f"b{8 * size}",
            replace(target, count=words) if returns else None,
            (*addressing.sources(ins, rest, 2),
             *((Operand("v", register), f"b{8 * size}") for register in given)),
            shape="atomic",
            access=addressing.access(ins, rest) | {"size": size, "words": words},
        )  # fmt: skip
        return executes(
            run, form, issues=(counters[0], issued), orders=partial(ordered, takes=takes)
        )

    if space in ("global", "buffer"):
        return on(spaces.arena, locate, counters[:1])
    in_lds = on(spaces.lds, addressing.locate_lds(address, offset, size, spaces),
                (LGKM,) if space == "ds" else counters[::-1])  # fmt: skip
    if space == "ds":
        return in_lds
    private = addressing.locate_scratch(ins, [address, Operand("off")], size, spaces)
    return addressing.in_apertures(
        ins, address, on(spaces.arena, locate, counters), in_lds,
        on(spaces.scratch, private, counters),
    )  # fmt: skip


def _order(g: Waves, memory, at, inside, size: int, takes: bool = False) -> None:
    """Note that atomics order what is before and after them; they are no race."""
    if not memory.checked:
        return
    marks = g.lane_array(g.tags)
    ordered(g, memory, at, size, marks if inside is None else marks[inside], takes)


def ordered(g: Waves, memory, at, size: int, marks, takes: bool = False) -> None:
    """Note for the race checks what an atomic at these offsets orders; takes: maybe a lock."""
    memory.track_atomic(at, size, marks, takes)
    if memory.order is not None:
        # the waves' accesses after it are not ordered by it
        at_release(g)


def _counted(ins: Instruction, spaces: addressing.Spaces) -> Callable:
    """Compile DS_APPEND, DS_CONSUME: each wave adds or subtracts how many of its lanes are active.

    The address is in M0, where LLVM puts the pointer (the ISA's pseudocode: M0.base).
    """
    if ins.modifiers.keys() - {"offset"}:
        raise Unknown(f"modifiers {sorted(ins.modifiers.keys() - {'offset'})}")
    locate = addressing.locate_lds(Operand("s", M0), ins.modifiers.get("offset", 0), 4, spaces)
    target, sign = ins.operands[0].index, -1 if "consume" in ins.name else 1
    issued = Outstanding(registers("v", target), True, ins.text)

    def run(g: Waves):
        at, right, _ = locate(g)
        if right is not None:
            raise Trap("bounds", "a counter outside of LDS")
        wave = np.arange(g.n * g.width)[g.lanes] // g.width
        _order(g, spaces.lds, at, None, 4)
        # one wave after the other: its first lane does it, all get what that found
        waves, first = np.unique(wave, return_index=True)
        old = np.zeros(g.n, np.uint32)
        count = g.mask.sum(axis=1)[waves] * sign
        old[waves] = _apply(
            spaces.lds.bytes.view(np.uint32), at[first] // 4, [count.astype(np.uint32)],
            lambda held, x: held + x, None, True)  # fmt: skip
        g.VF[target][g.lanes] = old[wave]
        issue(g, LGKM, issued)

    return run


def _apply(cells, places, data, function, ufunc, returns):
    """Apply lanes one by one where they share a cell; return what each found there, or None."""
    if ufunc is not None and not returns:
        ufunc.at(cells, places, data[0])
        return None
    old = np.zeros_like(data[0])
    left = np.arange(len(places))
    while len(left):
        _, first = np.unique(places[left], return_index=True)
        now = left[first]
        held = cells[places[now]]
        old[now] = held
        more = [x[now] for x in data]
        cells[places[now]] = function(held, *more) if function else more[0]
        left = np.delete(left, first)
    return old
