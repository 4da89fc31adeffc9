# SPDX-License-Identifier: BSD-3-Clause
"""The wait counters: the outstanding memory instructions, and the registers that they will write.

The emulator executes a load at once, but no instruction may use the load's registers until an
s_waitcnt guarantees the result. VMEM loads finish in the order of issue, and so do stores and LDS
instructions, each among themselves. Scalar loads finish in any order (RDNA3.5 ISA, "Data dependency
resolution").
"""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from strix_emulate.code.decode import NULL, Instruction, Operand, Unknown
from strix_emulate.code.target import Target
from strix_emulate.memory.findings import Findings
from strix_emulate.memory.shadow import Touch
from strix_emulate.memory.tags import (
    epoch_after_release,
    make_tags,
    wave_of,
)
from strix_emulate.memory.waves import Waves

#: Numbers of the counters.
VM = 0
STORE = 1
LGKM = 2
#: A counter has six bits. A wave with this many outstanding instructions issues the next one only
#: when one of them has finished.
COUNTER_LIMIT = 63


class Outstanding:
    """An outstanding instruction, as the entry of a counter. It is never modified.

    Attributes:
        registers: Bit mask of the registers that the instruction will write.
        ordered: Whether the instruction finishes in order with others of its counter.
        instruction_text: The instruction, for messages.
        issuers: Flags of the waves that issued the instruction. None means that all waves did.
        half: "l" or "h" if the instruction writes half a register, or else "".
        atomic: Whether the instruction is an atomic.
        number: A number that is the same for equal entries.
    """

    __slots__ = ("atomic", "half", "instruction_text", "issuers", "number", "ordered", "registers")

    def __init__(
        self,
        registers: int,
        ordered: bool,
        instruction_text: str,
        issuers: np.ndarray | None = None,
        half: str = "",
        atomic: bool = False,
    ):
        if issuers is not None and issuers.all():
            issuers = None
        self.registers = registers
        self.ordered = ordered
        self.instruction_text = instruction_text
        self.half = half
        self.atomic = atomic
        self.issuers = issuers
        issuer_bytes = None if issuers is None else issuers.tobytes()
        key = (registers, ordered, instruction_text, issuer_bytes)
        self.number = _numbers.get(key, -1)
        if self.number < 0:
            self.number = next(_next_number)
            _numbers[key] = self.number

    def for_waves(self, issuers: np.ndarray | None) -> "Outstanding":
        """Return the entry with other issuers, or as it is if `issuers` is None."""
        if issuers is None:
            return self
        return Outstanding(
            self.registers,
            self.ordered,
            self.instruction_text,
            issuers,
            self.half,
            self.atomic,
        )


_Entries = tuple[Outstanding, ...]


class State:
    """The entries of the three counters. A state is never modified. Use `of` to get a state.

    Attributes:
        queues: Entries by counter, in the order of issue.
        pending: Bit mask of the registers that the entries will write.
        together: Whether all waves issued all entries.
        only_atomics: Whether all entries are atomics.
    """

    __slots__ = ("_following", "only_atomics", "pending", "queues", "together")

    def __init__(self, queues: tuple[_Entries, ...]):
        self.queues = queues
        self.pending = 0
        self.together = True
        self.only_atomics = True
        for queue in queues:
            for entry in queue:
                self.pending |= entry.registers
                self.together &= entry.issuers is None
                self.only_atomics &= entry.atomic
        #: Cached results of `issued` and `waited`, by their arguments.
        self._following: dict[Any, Any] = {}

    @staticmethod
    def of(queues: Iterable[_Entries]) -> "State":
        """Return the `State` with these entries.

        It is the same object for equal entries, until the cache is full and is cleared.
        """
        queues = tuple(queues)
        key = tuple([tuple([entry.number for entry in queue]) for queue in queues])
        state = _states.get(key)
        if state is None:
            if len(_states) > _MAX_STATES:
                # A State that is in use remains valid after the cache has been cleared.
                _states.clear()
                NOTHING._following.clear()
            state = State(queues)
            _states[key] = state
        return state

    def _replace(self, counter: int, queue: _Entries) -> "State":
        queues = list(self.queues)
        queues[counter] = queue
        return State.of(queues)

    def issued(self, counter: int, entry: Outstanding) -> "State":
        """Return the state after an instruction was issued, with `entry` in the counter's queue."""
        key = (counter, -1 - entry.number)
        if key not in self._following:
            queue = (*self.queues[counter], entry)
            self._following[key] = self._replace(counter, queue)
        return self._following[key]

    def waited(self, counter: int, allowed: int) -> tuple["State", list[int]]:
        """Return the state after a wait until at most `allowed` entries are outstanding.

        The second result has the positions in the old queue of the entries that remain.
        """
        key = (counter, allowed)
        if key not in self._following:
            remaining = _remaining(self.queues[counter], allowed)
            state = self._replace(counter, tuple(entry for _, entry in remaining))
            self._following[key] = (state, [number for number, _ in remaining])
        return self._following[key]


#: An id for each distinct entry, by its content. Kernels with much divergence have many entries.
_numbers: dict[tuple, int] = {}
_next_number = itertools.count()
#: States by the ids of the entries in each counter's queue.
_states: dict[tuple, State] = {}
_MAX_STATES = 100_000
NOTHING = State(((), (), ()))
_states[(), (), ()] = NOTHING


class Queues:
    """The outstanding instructions of waves.

    Attributes:
        state: The entries of the counters.
        touched: The accesses (`Touch`) of each entry, by counter and entry. The inner lists are
            replaced, and never modified.
    """

    __slots__ = ("state", "touched")

    def __init__(self, state: State = NOTHING, touched: list[list] | None = None):
        self.state = state
        self.touched = touched or [[], [], []]


def registers(kind: str, first: int, count: int = 1) -> int:
    """Return the bit mask of registers. Vector registers have bits 0 to 255, scalar ones follow."""
    offset = 256 if kind == "s" else 0
    return ((1 << count) - 1) << (first + offset)


def operand_bits(*operands: Operand) -> int:
    """Return the bit mask of the operands' registers, with the bits of :func:`registers`."""
    bits = 0
    for op in operands:
        if op.kind in ("v", "s"):
            bits |= registers(op.kind, op.index, op.count)
    return bits


def issue(
    g: Waves,
    counter: int,
    entry: Outstanding,
    touches: Any = (),
) -> None:
    """Record that a memory instruction with these accesses is outstanding."""
    queues = g.queues
    queues.state = queues.state.issued(counter, entry)
    queues.touched[counter] = [*queues.touched[counter], touches]
    wait(g, counter, COUNTER_LIMIT)


def issue_all(
    g: Waves,
    counters: tuple[int, ...],
    entry: Outstanding,
    touches: tuple[Touch, ...] = (),
) -> None:
    """Issue an instruction that several counters count.

    A wait for the first of the counters guarantees the result.

    Flat instructions are in order in both counters since GFX10 (LLVM's
    hasFlatLgkmVMemCountInOrder).
    """
    issue(g, counters[0], entry, touches)
    for counter in counters[1:]:
        issue(g, counter, Outstanding(0, True, entry.instruction_text, atomic=entry.atomic))


def check_pending(
    g: Waves,
    touched: int,
    target: int,
    counter: int,
    findings: Findings,
    stored: tuple[int, str] = (0, ""),
) -> None:
    """Report an instruction that uses registers which an outstanding load has yet to write.

    Two uses are allowed:

    * Loads that finish in order may write the same register, or halves of it. LLVM's guide says
      about LDS operations: "completion is reported to a wavefront in execution order" ("Memory
      Model"). VMEM loads are in order among themselves, too. LLVM places no wait between such VMEM
      loads, and hipBLASLt's generator places no wait between such LDS loads.
    * A store of 8 or 16 bits may read one half of a register while a load into the other half is
      outstanding. LLVM inserts no wait before such a store (llvm-project#194477). A vector
      operation on one half must wait for the load. LLVM inserts a wait before the operation
      (llvm-project#157795), because on GFX11 accesses to the two halves may disturb each other
      (LLVM's feature d16-write-vgpr32).

    Args:
        g: The waves.
        touched: Bit mask of the registers that the instruction reads or writes, without `target`.
        target: For a memory instruction, bit mask of the registers that it will write.
        counter: The counter of this memory instruction.
        findings: Receives the finding.
        stored: For a store of half a register, the register's bit mask and the half.
    """
    half_bits, half = stored
    for number, queue in enumerate(g.queues.state.queues):
        for entry in queue:
            in_order = number == counter and entry.ordered
            forbidden = touched if in_order else touched | target
            if entry.half and half and entry.half != half:
                forbidden &= ~half_bits
            if entry.registers & forbidden:
                message = (
                    f"uses a register that `{entry.instruction_text}` has yet to write; a wait is "
                    "missing"
                )
                findings.report("pending", message)


def wait(g: Waves, counter: int, allowed: int) -> None:
    """Remove the entries that must have finished when at most `allowed` are outstanding."""
    queues = g.queues
    if len(queues.state.queues[counter]) <= allowed:
        return
    queues.state, remaining = queues.state.waited(counter, allowed)
    touched = queues.touched[counter]
    queues.touched[counter] = [touched[number] for number in remaining]


def _remaining(queue: _Entries, allowed: int) -> list[tuple[int, Outstanding]]:
    """Return the entries that may be outstanding after a wait, with their old positions."""
    if allowed == 0:
        return []
    entries = list(enumerate(queue))
    if all(entry.issuers is None for entry in queue):
        ordered = [number for number, entry in entries if entry.ordered]
        newest = set(ordered[-allowed:])
        # Any of the unordered entries may still be outstanding.
        return [(i, entry) for i, entry in entries if not entry.ordered or i in newest]
    waves = next(len(entry.issuers) for entry in queue if entry.issuers is not None)
    newer = np.zeros(waves, np.int64)
    remaining = []
    for number, entry in reversed(entries):
        issuers = np.ones(waves, bool) if entry.issuers is None else entry.issuers
        waiting = issuers
        if entry.ordered:
            waiting = issuers & (newer < allowed)
            newer += issuers
        if waiting.any():
            remaining.append((number, entry.for_waves(waiting)))
    return remaining[::-1]


def at_barrier(g: Waves) -> None:
    """Postpone outstanding accesses, because a barrier does not order them.

    This includes LDS accesses. LDS operations of different waves "can be reordered relative to each
    other", and only s_waitcnt lgkmcnt(0) orders them (LLVM's guide, "Memory Model GFX10-GFX11").
    """
    _postpone(g, at_barrier=True)


def wait_for_stores(g: Waves, allowed: int) -> None:
    """Wait for stores. If any must finish, begin an epoch, so that later stores release them."""
    if len(g.queues.state.queues[STORE]) > allowed:
        wait(g, STORE, allowed)
        at_release(g)


def at_release(g: Waves) -> None:
    """Postpone outstanding accesses, because a release does not order them. Begin an epoch.

    Atomics are not postponed, because a wave may have many of them outstanding, each of which is a
    release. So a release orders outstanding atomics, except for the last one without a return
    value.
    """
    if not g.queues.state.only_atomics:
        _postpone(g, at_barrier=False)
    g.epoch[:] = epoch_after_release(g.epoch)
    g.tags = make_tags(g.workgroup, g.epoch, g.wave)


def _postpone(g: Waves, at_barrier: bool) -> None:
    if g.queues.state is NOTHING:
        return
    for queue, touched in zip(
        g.queues.state.queues,
        g.queues.touched,
        strict=True,
    ):
        for entry, touches in zip(queue, touched, strict=True):
            for touch in touches:
                if touch.atomic and not at_barrier:
                    continue
                tags = g.tags if entry.issuers is None else g.tags[entry.issuers]
                touch.memory.postpone(touch, wave_of(tags), at_barrier)


def select(queues: Queues, index) -> Queues:
    """Return the queues of some of the waves. `index` has the rows of these waves."""
    if queues.state.together:
        return Queues(queues.state, list(queues.touched))
    selected = []
    touched = []
    for queue, touches in zip(queues.state.queues, queues.touched, strict=True):
        entries = []
        touches_of_entries = []
        for entry, touch in zip(queue, touches, strict=True):
            if entry.issuers is not None:
                issuers = entry.issuers[index]
                if not issuers.any():
                    continue
                entry = entry.for_waves(issuers)
            entries.append(entry)
            touches_of_entries.append(touch)
        selected.append(tuple(entries))
        touched.append(touches_of_entries)
    return Queues(State.of(selected), touched)


def join(a: Queues, n: int, b: Queues, m: int) -> Queues:
    """Return the queues of n waves followed by those of m other waves."""
    if a.state is b.state and a.state.together:
        # All waves have the same entries, so only the accesses need to be joined.
        touched = []
        for touches_of_a, touches_of_b in zip(a.touched, b.touched, strict=True):
            pairs = zip(touches_of_a, touches_of_b, strict=True)
            touched.append([_unite(x, y) for x, y in pairs])
        return Queues(a.state, touched)
    queues = []
    for first, second in zip(a.state.queues, b.state.queues, strict=True):
        entries = [entry.for_waves(_pad(entry.issuers, n, 0, m)) for entry in first]
        entries += [entry.for_waves(_pad(entry.issuers, m, n, 0)) for entry in second]
        queues.append(tuple(entries))
    touched = [x + y for x, y in zip(a.touched, b.touched, strict=True)]
    return Queues(State.of(queues), touched)


def _unite(first: tuple, second: tuple) -> tuple:
    """Join two tuples of accesses. Waves that had diverged have some accesses in common."""
    ids = {id(touch) for touch in first}
    return first + tuple(touch for touch in second if id(touch) not in ids)


def _pad(issuers, size, before, after):
    """Return the issuers' flags, with `before` False flags in front of them and `after` behind."""
    flags = np.ones(size, bool) if issuers is None else issuers
    return np.concatenate([np.zeros(before, bool), flags, np.zeros(after, bool)])


def compile_wait(ins: Instruction, target: Target, begins_epoch: bool = False):
    """Compile a wait, such as s_waitcnt or s_waitcnt_vscnt, to a function on waves.

    If `begins_epoch` is true, a wait for stores begins an epoch (`wait_for_stores`).

    Raises:
        Unknown: The instruction has its count in a register.
    """
    if ins.name in ("s_waitcnt_vscnt", "s_waitcnt_vmcnt", "s_waitcnt_lgkmcnt"):
        if ins.operands[0].index != NULL:
            raise Unknown("a wait with the count in a register is not supported")
        counter = {"vscnt": STORE, "vmcnt": VM, "lgkmcnt": LGKM}[ins.name[10:]]
        allowed = int(ins.operands[1].value) & 0xFFFF
        if counter == STORE and begins_epoch:
            return lambda g: wait_for_stores(g, allowed)
        return lambda g: wait(g, counter, allowed)
    # The other bits of S_WAITCNT are for exports, which compute kernels do not have.
    bits = int(ins.operands[0].value)
    limits = []
    for name, first, size in target.counters:
        no_wait = (1 << size) - 1
        allowed = bits >> first & no_wait
        if allowed < no_wait:
            counter = {"vm": VM, "lgkm": LGKM}[name]
            limits.append((counter, allowed))

    def run(g: Waves):
        for counter, allowed in limits:
            wait(g, counter, allowed)

    return run
