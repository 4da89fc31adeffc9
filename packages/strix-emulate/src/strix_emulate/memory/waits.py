# SPDX-License-Identifier: BSD-3-Clause
"""The wait counters: results that are outstanding, and the registers they keep off limits.

The machine executes a load at once, but its registers stay forbidden until an s_waitcnt that
guarantees the result. VMEM loads, stores and LDS instructions finish in order, scalar loads in any
order (RDNA3.5 ISA, "Data dependency resolution").
"""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from strix_emulate.code.decode import NULL, Instruction, Unknown
from strix_emulate.code.target import Target
from strix_emulate.memory import happens_before
from strix_emulate.memory.findings import Findings
from strix_emulate.memory.shadow import Touch
from strix_emulate.memory.waves import Waves

VM, STORE, LGKM = 0, 1, 2
#: A counter has six bits: a wave that has so much outstanding issues no more until some is done.
MOST = 63


class Outstanding:
    """One instruction that a counter counts; never changed.

    registers: bits of those that it will write; ordered: whether its counter keeps it in order;
    who: the waves that issued it, None for all; half: "l" or "h" if it writes half a register.
    number: the same for entries that are the same.
    """

    __slots__ = ("half", "number", "ordered", "registers", "text", "who")

    def __init__(
        self,
        registers: int,
        ordered: bool,
        text: str,
        who: np.ndarray | None = None,
        half: str = "",
    ):
        self.registers, self.ordered, self.text, self.half = registers, ordered, text, half
        self.who = who = None if who is None or who.all() else who
        key = (registers, ordered, text, None if who is None else who.tobytes())
        self.number = _NUMBERS.get(key, -1)
        if self.number < 0:
            self.number = _NUMBERS[key] = next(_COUNT)

    def of(self, who: np.ndarray | None) -> "Outstanding":
        """Return the same entry of other waves."""
        if who is None:
            return self
        return Outstanding(self.registers, self.ordered, self.text, who, self.half)


_Entries = tuple[Outstanding, ...]


class State:
    """What the three counters count; never changed, and the same object for the same entries.

    pending: bits of the registers that are still to be written; together: whether all waves issued
    all of it.
    """

    __slots__ = ("_after", "pending", "queues", "together")

    def __init__(self, queues: tuple[_Entries, ...]):
        self.queues = queues
        self.pending, self.together = 0, True
        for queue in queues:
            for entry in queue:
                self.pending |= entry.registers
                self.together &= entry.who is None
        self._after: dict[Any, Any] = {}

    @staticmethod
    def of(queues: Iterable[_Entries]) -> "State":
        """Return the state with these entries."""
        queues = tuple(queues)
        key = tuple([tuple([entry.number for entry in queue]) for queue in queues])
        found = _STATES.get(key)
        if found is None:
            if len(_STATES) > _MOST_STATES:
                # those that are in use stay as they are
                _STATES.clear()
                NOTHING._after.clear()
            found = _STATES[key] = State(queues)
        return found

    def _with(self, counter: int, queue: _Entries) -> "State":
        return State.of((*self.queues[:counter], queue, *self.queues[counter + 1 :]))

    def issued(self, counter: int, entry: Outstanding) -> "State":
        """Return the state with one more entry."""
        key = (counter, -1 - entry.number)
        if key not in self._after:
            self._after[key] = self._with(counter, (*self.queues[counter], entry))
        return self._after[key]

    def waited(self, counter: int, allowed: int) -> tuple["State", list[int]]:
        """Return the state when at most `allowed` are outstanding, and which entries are left."""
        key = (counter, allowed)
        if key not in self._after:
            left = _left(self.queues[counter], allowed)
            state = self._with(counter, tuple(entry for _, entry in left))
            self._after[key] = state, [number for number, _ in left]
        return self._after[key]


#: by what they are; kernels that part waves in many ways have many
_NUMBERS: dict[tuple, int] = {}
_COUNT = itertools.count()
_STATES: dict[tuple, State] = {}
_MOST_STATES = 100_000
NOTHING = State(((), (), ()))
_STATES[(), (), ()] = NOTHING


class Queues:
    """What waves have outstanding: a state, and for each of its entries what it touched.

    touched: lists as long as the queues, which are not changed themselves.
    """

    __slots__ = ("state", "touched")

    def __init__(self, state: State = NOTHING, touched: list[list] | None = None):
        self.state, self.touched = state, touched or [[], [], []]


def registers(kind: str, first: int, count: int = 1) -> int:
    """Return bits that stand for registers: vector registers first, then scalar ones."""
    return ((1 << count) - 1) << (first + (256 if kind == "s" else 0))


def issue(g: Waves, counter: int, entry: Outstanding, touches: Any = ()) -> None:
    """Note that a memory instruction is under way, its registers and what it touched with it."""
    queues = g.queues
    queues.state = queues.state.issued(counter, entry)
    queues.touched[counter] = [*queues.touched[counter], touches]
    wait(g, counter, MOST)


def issue_all(
    g: Waves, counters: tuple[int, ...], entry: Outstanding, touches: tuple[Touch, ...] = ()
) -> None:
    """Issue an instruction that several counters count; the first guarantees what the entry says.

    Flat ones: in order in both since GFX10 (LLVM's hasFlatLgkmVMemCountInOrder).
    """
    issue(g, counters[0], entry, touches)
    for counter in counters[1:]:
        issue(g, counter, Outstanding(0, True, entry.text))


def check(
    g: Waves,
    touched: int,
    target: int,
    counter: int,
    findings: Findings,
    stored: tuple[int, str] = (0, ""),
) -> None:
    """Find an instruction that touches registers that are still to be written.

    stored: the register, and its half, that a store of 8 or 16 bits alone reads. A load into the
    other half does not matter to it: a memory instruction touches its own half only. To a vector
    operation it does, as a load of 16 bits writes all of the register on GFX11 (LLVM's feature
    d16-write-vgpr32, llvm-project#157795 and #194477). target: registers that a load will write
    itself, by way of counter. Loads that one counter keeps in order may have the same target, or
    halves of it, since each writes what it loads and nothing else, and "completion is reported to a
    wavefront in execution order" (LLVM's guide, "Memory Model", of LDS operations; of VMEM loads
    among themselves it says the same). LLVM places no wait there for VMEM, hipBLASLt's generator
    none for LDS.
    """
    for number, queue in enumerate(g.queues.state.queues):
        for entry in queue:
            in_order = number == counter and entry.ordered
            forbidden = touched if in_order else touched | target
            if entry.half and stored[1] and entry.half != stored[1]:
                forbidden &= ~stored[0]
            if entry.registers & forbidden:
                text = f"uses a register that `{entry.text}` has yet to write: no wait"
                findings.found("pending", text)


def wait(g: Waves, counter: int, allowed: int) -> None:
    """Remove what must have finished when at most `allowed` are outstanding."""
    queues = g.queues
    if len(queues.state.queues[counter]) <= allowed:
        return
    queues.state, left = queues.state.waited(counter, allowed)
    touched = queues.touched[counter]
    queues.touched[counter] = [touched[number] for number in left]


def _left(queue: _Entries, allowed: int) -> list[tuple[int, Outstanding]]:
    """Return the entries that a wait leaves, with their numbers in the queue."""
    if allowed == 0:
        return []
    entries = list(enumerate(queue))
    if all(entry.who is None for entry in queue):
        # unordered entries can be any of those that are left
        late = {number for number, entry in entries if entry.ordered}
        late = set(sorted(late)[-allowed:])
        return [(i, entry) for i, entry in entries if not entry.ordered or i in late]
    waves = next(len(entry.who) for entry in queue if entry.who is not None)
    newer = np.zeros(waves, np.int64)
    kept = []
    for number, entry in reversed(entries):
        who = left = np.ones(waves, bool) if entry.who is None else entry.who
        if entry.ordered:
            left = who & (newer < allowed)
            newer += who
        if left.any():
            kept.append((number, entry.of(left)))
    return kept[::-1]


def at_barrier(g: Waves) -> None:
    """Postpone accesses that still run: the barrier that their wave arrives at does not order them.

    Those of LDS as well: wavefronts' LDS operations "can be reordered relative to each other", and
    only s_waitcnt lgkmcnt(0) orders them (LLVM's guide, "Memory Model GFX10-GFX11").
    """
    _postpone(g, 1 << happens_before.BARRIER)


def at_release(g: Waves) -> None:
    """Postpone accesses that still run: an atomic orders neither them nor its wave's later ones."""
    _postpone(g, 1 << happens_before.RELEASE)
    g.epoch[:] = happens_before.after_release(g.epoch)
    g.tags = happens_before.tags(g.workgroup, g.epoch, g.wave)


def _postpone(g: Waves, unit: int) -> None:
    if g.queues.state is NOTHING:
        return
    for queue, touched in zip(g.queues.state.queues, g.queues.touched, strict=True):
        for entry, touches in zip(queue, touched, strict=True):
            for touch in touches:
                tags = g.tags if entry.who is None else g.tags[entry.who]
                touch.memory.postpone(touch, happens_before.who(tags), unit)


def select(queues: Queues, index) -> Queues:
    """Select the queues of the waves `index`."""
    if queues.state.together:
        return Queues(queues.state, list(queues.touched))
    found, touched = [], []
    for queue, touches in zip(queues.state.queues, queues.touched, strict=True):
        left = [
            (entry.of(entry.who[index]), touch) if entry.who is not None else (entry, touch)
            for entry, touch in zip(queue, touches, strict=True)
            if entry.who is None or entry.who[index].any()
        ]
        found.append(tuple(entry for entry, _ in left))
        touched.append([touch for _, touch in left])
    return Queues(State.of(found), touched)


def join(a: Queues, n: int, b: Queues, m: int) -> Queues:
    """Join the queues of n waves with those of m others behind them."""
    pairs = list(zip(a.touched, b.touched, strict=True))
    if a.state is b.state and a.state.together:
        # each wave has the same
        return Queues(a.state, [[_united(x, y) for x, y in zip(*p, strict=True)] for p in pairs])
    state = State.of(
        tuple(e.of(_padded(e.who, n, 0, m)) for e in first)
        + tuple(e.of(_padded(e.who, m, n, 0)) for e in second)
        for first, second in zip(a.state.queues, b.state.queues, strict=True)
    )
    return Queues(state, [x + y for x, y in pairs])


def _united(some: tuple, others: tuple) -> tuple:
    """Join what was touched; waves that had parted have some of it in common."""
    known = {id(touch) for touch in some}
    return some + tuple(touch for touch in others if id(touch) not in known)


def _padded(who, size, before, after):
    who = np.ones(size, bool) if who is None else who
    return np.concatenate([np.zeros(before, bool), who, np.zeros(after, bool)])


def compile_wait(ins: Instruction, target: Target):
    """Compile s_waitcnt, s_waitcnt_vscnt and relatives to a function on Waves. Raise Unknown."""
    if ins.name in ("s_waitcnt_vscnt", "s_waitcnt_vmcnt", "s_waitcnt_lgkmcnt"):
        if ins.operands[0].index != NULL:
            raise Unknown("a wait on a register")
        counter = {"vscnt": STORE, "vmcnt": VM, "lgkmcnt": LGKM}[ins.name[10:]]
        allowed = int(ins.operands[1].value) & 0xFFFF
        return lambda g: wait(g, counter, allowed)
    # other bits are for exports, of which there are none
    bits = int(ins.operands[0].value)
    limits = []
    for name, first, size in target.counters:
        # a limit of all ones waits for nothing
        allowed, most = bits >> first & (1 << size) - 1, (1 << size) - 1
        if allowed < most:
            limits.append(({"vm": VM, "lgkm": LGKM}[name], allowed))

    def run(g: Waves):
        for counter, allowed in limits:
            wait(g, counter, allowed)

    return run
