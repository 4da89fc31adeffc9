# SPDX-License-Identifier: BSD-3-Clause
"""Atomic read-modify-writes of global memory and LDS (RDNA3.5 ISA, chapter 16: DS, MUBUF, FLAT).

Atomics of different waves do not race with each other. They order the accesses before and after
them (:mod:`strix_emulate.memory.happens_before`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from strix_emulate.code.decode import M0, Instruction, Operand, Unknown
from strix_emulate.errors import Trap
from strix_emulate.instructions.microops import Compiled, MicroOp, compiled_for_c
from strix_emulate.instructions.mnemonics import (
    GLOBAL_ATOMICS,
    LDS_ATOMICS,
    MEMORY,
    MemoryKind,
)
from strix_emulate.memory import addressing, polls
from strix_emulate.memory.shadow import Touch
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


class _Operation(NamedTuple):
    """The operation of an atomic.

    Attributes:
        function: Function that returns the new value, given the old value and one or two operands.
            None if the new value is the operand.
        ufunc: A ufunc whose `at` does the same, or None.
    """

    function: Callable | None
    ufunc: Any = None


def _increment(old, limit):
    return np.where(old >= limit, old.dtype.type(0), old + old.dtype.type(1))


def _decrement(old, limit):
    return np.where((old == 0) | (old > limit), limit, old - old.dtype.type(1))


def _subtract_clamped(old, x):
    return np.where(old < x, old.dtype.type(0), old - x)


def _compare_and_swap(old, x, expected):
    return np.where(old == expected, x, old)


_OPERATIONS: dict[str, _Operation] = {
    "add": _Operation(lambda old, x: old + x, np.add),
    "sub": _Operation(lambda old, x: old - x, np.subtract),
    "rsub": _Operation(lambda old, x: x - old),
    "inc": _Operation(_increment),
    "dec": _Operation(_decrement),
    "csub": _Operation(_subtract_clamped),
    "and": _Operation(lambda old, x: old & x, np.bitwise_and),
    "or": _Operation(lambda old, x: old | x, np.bitwise_or),
    "xor": _Operation(lambda old, x: old ^ x, np.bitwise_xor),
    "min": _Operation(lambda old, x: np.where(x < old, x, old)),
    "max": _Operation(lambda old, x: np.where(x > old, x, old)),
    "swap": _Operation(None),
    "cmpswap": _Operation(_compare_and_swap),
    # The LDS's names of swap and cmpswap, and MSKOR, which only the LDS has. The first operand of
    # MSKOR is the mask.
    "storexchg": _Operation(None),
    "cmpstore": _Operation(_compare_and_swap),
    "mskor": _Operation(lambda old, mask, x: (old & ~mask) | x),
}
#: Atomic operations with which code takes a lock.
_LOCKS = {"swap", "cmpswap", "storexchg", "cmpstore"}
_COMPARES = {"cmpswap", "cmpstore"}
_TWO_SOURCES = {"cmpswap", "cmpstore", "mskor"}
#: Atomics by mnemonic.
NAMES = {name: kind for name, kind in MEMORY.items() if kind.action == "atomic"}


def _functions_for_c() -> dict[str, tuple[str, tuple[str, ...], Callable]]:
    table = {}
    for types_by_operation in (GLOBAL_ATOMICS, LDS_ATOMICS):
        for operation, types in types_by_operation.items():
            function = _OPERATIONS[operation].function
            if function is None:
                continue
            count = 3 if operation in _TWO_SOURCES else 2
            for type_name in types:
                name = f"atomic_{operation}_{type_name}"
                table[name] = (type_name, (type_name,) * count, function)
    return table


#: Functions of atomics for C: kind of the result, kinds of the sources, function. A swap has no
#: function, because it stores its operand.
FUNCTIONS = _functions_for_c()


def compile_atomic(ins: Instruction, spaces: addressing.Spaces) -> Compiled:
    """Compile an atomic, DS_APPEND or DS_CONSUME. Raise Unknown if it is not supported."""
    kind = MEMORY[ins.name]
    if kind.action == "count":
        return _compile_counter(ins, spaces)
    allowed = spaces.target.cache | {"offset"}
    if kind.space == "buffer":
        allowed |= {"offen"}
    if ins.modifiers.keys() - allowed:
        raise Unknown(f"unsupported modifiers {sorted(ins.modifiers.keys() - allowed)}")
    atomic = _read_atomic(ins, kind, spaces)
    counter = VM if atomic.target is not None else STORE
    if kind.space == "ds":
        counter = LGKM
    if kind.space == "flat":

        def compile_for(space: str) -> Callable:
            counters = (LGKM, counter) if space == "ds" else (counter, LGKM)
            return atomic.compile_run(*atomic.locate(space), counters)

        run = addressing.compile_flat(ins, atomic.address[0], compile_for)
        return Compiled(run)
    return atomic.compile(*atomic.locate(kind.space), counter)


def _read_atomic(ins: Instruction, kind: MemoryKind, spaces: addressing.Spaces) -> "_Atomic":
    """Return an atomic, with its operands divided into target, data and address."""
    operands = list(ins.operands)
    returns = kind.returns or "glc" in ins.modifiers
    target = None
    if kind.space == "buffer":
        # A buffer atomic writes the old value to the register that has the data.
        if returns:
            target = operands[0]
        data, *address = operands
    else:
        if returns:
            target = operands.pop(0)
        data = operands[1]
        address = operands[:1]
    if kind.space == "global":
        address.append(operands[2])
    elif kind.space == "flat":
        address.append(Operand("off"))
    data_registers = [data.index]
    if kind.operation in _TWO_SOURCES:
        second = operands[2].index if kind.space == "ds" else data.index + kind.size // 4
        data_registers.append(second)
    return _Atomic(ins, kind, target, data_registers, address, spaces)


def _dtype(type_name: str) -> np.dtype:
    """Return numpy's type for "u32", "i64", "f32" and so on. "b32" is an unsigned integer."""
    letter = "u" if type_name[0] == "b" else type_name[0]
    return np.dtype(f"{letter}{int(type_name[1:]) // 8}")


@dataclass
class _Atomic:
    """An atomic instruction.

    Attributes:
        ins: The instruction.
        kind: Properties that follow from its mnemonic.
        target: Register that gets the old value, or None.
        data_registers: First register of each of its one or two data operands.
        address: Operands of its address.
        spaces: Memories of the launch.
    """

    ins: Instruction
    kind: MemoryKind
    target: Operand | None
    data_registers: list[int]
    address: list[Operand]
    spaces: addressing.Spaces

    def __post_init__(self):
        self.dtype = _dtype(self.kind.type)
        self.words = self.dtype.itemsize // 4
        bits = registers("v", self.target.index, self.words) if self.target else 0
        self.issued = Outstanding(bits, True, self.ins.text, atomic=True)
        self.may_lock = self.target is not None and self.kind.operation in _LOCKS

    def locate(self, space: str) -> tuple[Any, Callable]:
        """Return the memory of a space, and the locator of the atomic's offsets in it."""
        memory, (locate,) = addressing.make_locators(
            space,
            self.ins,
            self.address,
            self.dtype.itemsize,
            True,
            self.spaces,
            [self.ins.modifiers.get("offset", 0)],
        )
        return memory, locate

    def _read_data(self, g: Waves, register: int, inside):
        raw = g.VF[register : register + self.words][:, g.lanes]
        if inside is not None:
            raw = raw[:, inside]
        return np.ascontiguousarray(raw.T).view(self.dtype).ravel()

    def compile_run(self, memory, locate: Callable, counters: tuple) -> Callable:
        """Return a function on Waves that executes the atomic.

        A wait for the first of the counters guarantees the result.
        """
        size = self.dtype.itemsize
        function, ufunc = _OPERATIONS[self.kind.operation]

        def run(g: Waves):
            at, inside, _ = locate(g)
            self.spaces.note_store(g, inside)
            if (at % size).any():
                raise Trap(
                    "misaligned",
                    f"an atomic of {size} bytes whose address is not a multiple of {size} bytes",
                )
            data = [self._read_data(g, register, inside) for register in self.data_registers]
            cells = memory.bytes.view(self.dtype)
            old = _apply(cells, at // size, data, function, ufunc, self.target is not None)
            touches = _order(g, memory, at, inside, size, self.may_lock, self.target is not None)
            if self.target is not None:
                self._return_old(g, self.target.index, memory, at, inside, old)
            issue_all(g, counters, self.issued, touches)

        return run

    def _return_old(self, g: Waves, first: int, memory, at, inside, old) -> None:
        """Write the old values to the target, and record a poll."""
        result = old.view(np.uint32).reshape(-1, self.words).T
        if inside is not None:
            whole = np.zeros((self.words, len(inside)), np.uint32)
            whole[:, inside] = result
            result = whole
        for i, words in enumerate(result):
            g.VF[first + i][g.lanes] = words
        target_registers = range(first, first + self.words)
        compares = self.kind.operation in _COMPARES
        size = self.dtype.itemsize
        polls.record_active(g, memory, at, size, inside, target_registers, compares)

    def compile(self, memory, locate: Callable, counter: int) -> Compiled:
        """Compile the atomic for numpy and C. All its lanes must access this memory."""
        bits_kind = f"b{8 * self.dtype.itemsize}"
        operation = self.kind.operation
        function = _OPERATIONS[operation].function
        name = "" if function is None else f"atomic_{operation}_{self.kind.type}"
        target = self.target and replace(self.target, count=self.words)
        sources = list(addressing.address_sources(self.ins, self.address, 2))
        for register in self.data_registers:
            sources.append((Operand("v", register), bits_kind))
        access = addressing.memory_fields(self.ins, self.address) | {
            "size": self.dtype.itemsize,
            "words": self.words,
            "polls": (self.target is not None) + (operation in _COMPARES),
        }
        micro = MicroOp(
            name,
            function,
            bits_kind,
            target,
            tuple(sources),
            handler="atomic",
            access=access,
        )
        return compiled_for_c(
            self.compile_run(memory, locate, (counter,)),
            micro,
            issues=((counter,), self.issued),
            orders=partial(
                note_order,
                may_lock=self.may_lock,
                returns=self.target is not None,
            ),
        )


def _order(
    g: Waves, memory, at, inside, size: int, may_lock: bool, returns: bool
) -> tuple[Touch, ...]:
    """Record that atomics order the accesses before and after them. Return their own accesses."""
    if not memory.checked:
        return ()
    marks = g.lane_array(g.tags)
    if inside is not None:
        marks = marks[inside]
    touch = note_order(g, memory, at, size, marks, may_lock, returns)
    return () if touch is None else (touch,)


def note_order(
    g: Waves, memory, at, size: int, marks, may_lock: bool, returns: bool
) -> Touch | None:
    """Record an atomic, so that the race checks know the accesses that it orders.

    Args:
        g: The waves.
        memory: The memory that the atomic changes.
        at: Byte offsets in the memory, one for each active lane.
        size: Bytes that each lane changes.
        marks: The tag of each active lane's access (:mod:`strix_emulate.memory.tags`).
        may_lock: Whether the atomic may take a lock.
        returns: Whether the atomic returns the old value.

    Returns:
        The accesses of the atomic. None if no other wave sees them.
    """
    touch = memory.track_atomic(at, size, marks, may_lock, returns)
    if memory.order is not None:
        # Begin an epoch, because this atomic does not release later accesses of the waves.
        at_release(g)
    return touch


def _compile_counter(ins: Instruction, spaces: addressing.Spaces) -> Compiled:
    """Compile DS_APPEND or DS_CONSUME, which add or subtract the number of a wave's active lanes.

    The address is in M0, as in LLVM's code. (The ISA's pseudocode has M0.base.)
    """
    if ins.modifiers.keys() - {"offset"}:
        raise Unknown(f"unsupported modifiers {sorted(ins.modifiers.keys() - {'offset'})}")
    locate = addressing.locate_lds(Operand("s", M0), ins.modifiers.get("offset", 0), 4, spaces)
    target = ins.operands[0].index
    sign = -1 if ins.name == "ds_consume" else 1
    issued = Outstanding(registers("v", target), True, ins.text)

    def run(g: Waves):
        at, inside, _ = locate(g)
        if inside is not None:
            raise Trap("bounds", "the counter of DS_APPEND or DS_CONSUME lies outside of the LDS")
        spaces.note_store(g, None)
        wave = np.arange(g.n * g.width)[g.lanes] // g.width
        touches = _order(g, spaces.lds, at, None, 4, may_lock=False, returns=True)
        # Waves count one after the other. The first active lane of a wave counts for all its lanes,
        # and they all get the old value that it read.
        waves, first = np.unique(wave, return_index=True)
        old = np.zeros(g.n, np.uint32)
        count = g.mask.sum(axis=1)[waves] * sign
        old[waves] = _apply(
            spaces.lds.bytes.view(np.uint32),
            at[first] // 4,
            [count.astype(np.uint32)],
            np.add,
            None,
            True,
        )
        g.VF[target][g.lanes] = old[wave]
        issue(g, LGKM, issued, touches)

    return Compiled(run)


def _apply(cells, places, data, function, ufunc, returns: bool):
    """Apply the operations of the lanes. Lanes with the same cell are applied one after the other.

    Args:
        cells: The memory, as an array of the data's type.
        places: Index of each lane's cell.
        data: One or two arrays of operands, with a number for each lane.
        function: The operation. None for a copy of the operand.
        ufunc: A ufunc that does the same, or None.
        returns: Whether the old values are needed.

    Returns:
        The old value that each lane read, or None if the old values are not needed and a ufunc
        computed the new ones.
    """
    if ufunc is not None and not returns:
        ufunc.at(cells, places, data[0])
        return None
    old = np.zeros_like(data[0])
    waiting = np.arange(len(places))
    while len(waiting):
        _, first = np.unique(places[waiting], return_index=True)
        lanes = waiting[first]
        before = cells[places[lanes]]
        old[lanes] = before
        lane_data = [x[lanes] for x in data]
        cells[places[lanes]] = function(before, *lane_data) if function else lane_data[0]
        waiting = np.delete(waiting, first)
    return old
