# SPDX-License-Identifier: BSD-3-Clause
"""Atomic read-modify-writes of global memory and LDS (RDNA3.5 ISA, chapter 16: DS, MUBUF, FLAT).

Atomics of different waves are no race with each other: they order what comes before and after them
(:mod:`strix_emulate.memory.happens_before`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from strix_emulate.code.decode import M0, Instruction, Operand, Unknown
from strix_emulate.errors import Trap
from strix_emulate.instructions.microops import MicroOp, executes
from strix_emulate.memory import addressing, polls
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
_COMPARES = {"cmpswap", "cmpstore"}
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
    allowed = spaces.target.cache | {"offset"} | ({"offen"} if space == "buffer" else set())
    if ins.modifiers.keys() - allowed:
        raise Unknown(f"modifiers {sorted(ins.modifiers.keys() - allowed)}")
    dtype = np.dtype({"b": "u"}.get(kind[0], kind[0]) + str(int(kind[1:]) // 8))
    size, ops = dtype.itemsize, list(ins.operands)
    returns = returns or "glc" in ins.modifiers
    # a buffer's data is where the old value goes
    target = (ops[0] if space == "buffer" else ops.pop(0)) if returns else None
    data, rest = (ops[0], ops[1:]) if space == "buffer" else (ops[1], ops[:1])
    if space in ("global", "flat"):
        rest.append(ops[2] if space == "global" else Operand("off"))
    given = [data.index]
    if op in _TWO_SOURCES:
        given.append(ops[2].index if space == "ds" else data.index + size // 4)
    atomic = _Atomic(ins, op, kind, dtype, target, given, spaces)
    counter = LGKM if space == "ds" else VM if returns else STORE

    def at(space: str) -> tuple[Any, Callable]:
        memory, (locate,) = addressing.located(
            space, ins, rest, size, True, spaces, [ins.modifiers.get("offset", 0)]
        )
        return memory, locate

    def part(space: str) -> Callable:
        memory, locate = at(space)
        return atomic.on(memory, locate, (LGKM, counter) if space == "ds" else (counter, LGKM))

    if space == "flat":
        return addressing.in_apertures(ins, rest[0], part)
    memory, locate = at(space)
    return atomic.compiled(memory, locate, counter, rest)


@dataclass
class _Atomic:
    """One of NAMES; target: where the old value goes, or None; given: registers of the data."""

    ins: Instruction
    op: str
    kind: str
    dtype: np.dtype
    target: Operand | None
    given: list[int]
    spaces: addressing.Spaces

    def __post_init__(self):
        self.words = self.dtype.itemsize // 4
        bits = registers("v", self.target.index, self.words) if self.target else 0
        self.issued = Outstanding(bits, True, self.ins.text)
        self.takes = self.target is not None and self.op in _LOCKS

    def _data(self, g: Waves, register: int, inside):
        raw = g.VF[register : register + self.words][:, g.lanes]
        raw = raw if inside is None else raw[:, inside]
        return np.ascontiguousarray(raw.T).view(self.dtype).ravel()

    def on(self, memory, locate: Callable, counters: tuple) -> Callable:
        """Compile it for a memory. counters: the one that guarantees the result first."""
        size, (function, ufunc) = self.dtype.itemsize, _OPERATIONS[self.op]

        def run(g: Waves):
            at, inside, _ = locate(g)
            self.spaces.note_store(g, inside)
            if (at % size).any():
                raise Trap(
                    "misaligned", f"an atomic of {size} bytes that is not at a multiple of it"
                )
            values = [self._data(g, register, inside) for register in self.given]
            cells = memory.bytes.view(self.dtype)
            old = _apply(cells, at // size, values, function, ufunc, self.target is not None)
            _order(g, memory, at, inside, size, self.takes)
            if self.target is not None:
                got = old.view(np.uint32).reshape(-1, self.words).T
                self._return(g, self.target.index, got, inside)
                written = range(self.target.index, self.target.index + self.words)
                compares = self.op in _COMPARES
                polls.note_active(g, memory, at, size, inside, written, compares)
            issue_all(g, counters, self.issued)

        return run

    def _return(self, g: Waves, first: int, result, inside) -> None:
        if inside is not None:
            whole = np.zeros((self.words, len(inside)), np.uint32)
            whole[:, inside] = result
            result = whole
        for i, words in enumerate(result):
            g.VF[first + i][g.lanes] = words

    def compiled(self, memory, locate: Callable, counter: int, rest: list) -> Callable:
        """Compile it for its only memory, for C as well. rest: the operands of the address."""
        size, function = self.dtype.itemsize, _OPERATIONS[self.op][0]
        data = ((Operand("v", register), f"b{8 * size}") for register in self.given)
        micro = MicroOp(
            "" if function is None else f"atomic_{self.op}_{self.kind}", function, f"b{8 * size}",
            self.target and replace(self.target, count=self.words),
            (*addressing.sources(self.ins, rest, 2), *data), handler="atomic",
            access=addressing.access(self.ins, rest) | {
                "size": size, "words": self.words,
                "polls": (self.target is not None) + (self.op in _COMPARES)},
        )  # fmt: skip
        return executes(
            self.on(memory, locate, (counter,)), micro, issues=((counter,), self.issued),
            orders=partial(ordered, takes=self.takes),
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
