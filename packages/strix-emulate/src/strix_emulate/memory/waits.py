# SPDX-License-Identifier: BSD-3-Clause
"""The wait counters: results that are outstanding, and the registers they keep off limits.

The machine executes a load at once, but its registers stay forbidden until an s_waitcnt that
guarantees the result. VMEM loads, stores and LDS instructions finish in order, scalar loads in any
order (RDNA3.5 ISA, "Data dependency resolution").
"""

import re
from typing import Any

import numpy as np

from strix_emulate.code.decode import Instruction, Unknown
from strix_emulate.memory import happens_before
from strix_emulate.memory.arena import Touch
from strix_emulate.memory.findings import Findings
from strix_emulate.memory.waves import Waves

VM, STORE, LGKM = 0, 1, 2
_MAXIMUM = {"vmcnt": 63, "lgkmcnt": 63, "expcnt": 7}
_COUNTER = {"vmcnt": VM, "lgkmcnt": LGKM}


class Outstanding:
    """One instruction that a counter counts; never changed.

    registers: bits of those that it will write; ordered: whether its counter keeps it in order;
    who: the waves that issued it, None for all; place: see :class:`runs.Plan`. state: a number for
    what of it decides what waits do.
    """

    __slots__ = ("ordered", "place", "registers", "state", "text", "touches", "who")

    def __init__(
        self, registers: int, ordered: bool, text: str, touches: tuple[Touch, ...] = (),
        who: np.ndarray | None = None, place: Any = None,
    ):  # fmt: skip
        self.registers, self.ordered, self.text, self.touches = registers, ordered, text, touches
        self.who, self.place = who, place
        state = (registers, ordered, None if who is None else who.tobytes())
        self.state = _STATES.setdefault(state, len(_STATES))

    def of(self, who: np.ndarray | None) -> "Outstanding":
        """The same of other waves."""
        return Outstanding(self.registers, self.ordered, self.text, self.touches, who, self.place)

    def at(self, place: tuple[bool, int] | None) -> "Outstanding":
        """The same at another place."""
        found = self._twin()
        found.place = place
        return found

    def touching(self, touches: tuple[Touch, ...]) -> "Outstanding":
        """The same with what it touched."""
        found = self._twin()
        found.touches = touches
        return found

    def _twin(self) -> "Outstanding":
        # without its state anew: this is done for each access
        found = Outstanding.__new__(Outstanding)
        found.registers, found.ordered, found.text = self.registers, self.ordered, self.text
        found.touches, found.who, found.place = self.touches, self.who, self.place
        found.state = self.state
        return found


_STATES: dict[tuple, int] = {}


def registers(kind: str, first: int, count: int = 1) -> int:
    """Bits that stand for registers: vector registers first, then scalar ones."""
    return ((1 << count) - 1) << (first + (256 if kind == "s" else 0))


def issue(g: Waves, counter: int, entry: Outstanding) -> None:
    """Note that a memory instruction is under way, and its registers with it."""
    g.queues[counter].append(entry)
    g.pending |= entry.registers


def issue_all(g: Waves, counters: tuple[int, ...], entry: Outstanding) -> None:
    """An instruction that several counters count; the first guarantees what the entry says.

    Flat ones: in order in both since GFX10 (LLVM's hasFlatLgkmVMemCountInOrder).
    """
    issue(g, counters[0], entry)
    for counter in counters[1:]:
        issue(g, counter, Outstanding(0, True, entry.text))


def check(g: Waves, touched: int, target: int, counter: int, findings: Findings) -> None:
    """Finds an instruction that touches registers that are still to be written.

    target: registers that a load will write itself, by way of counter. Loads that one counter
    keeps in order may have the same target, or halves of it, since each writes what it loads and
    nothing else, and "completion is reported to a wavefront in execution order" (LLVM's guide,
    "Memory Model", of LDS operations; of VMEM loads among themselves it says the same). LLVM places
    no wait there for VMEM, hipBLASLt's generator none for LDS.
    """
    for number, queue in enumerate(g.queues):
        for entry in queue:
            in_order = number == counter and entry.ordered
            forbidden = touched if in_order else touched | target
            if entry.registers & forbidden:
                text = f"uses a register that `{entry.text}` has yet to write: no wait"
                findings.found("pending", text)


def wait(g: Waves, counter: int, allowed: int) -> None:
    """Removes what must have finished when at most `allowed` are outstanding."""
    queue = g.queues[counter]
    if len(queue) <= allowed:
        return
    if allowed == 0:
        queue.clear()
    elif all(entry.who is None for entry in queue):
        # unordered entries can be any of those that are left
        ordered = [entry for entry in queue if entry.ordered]
        late = {id(entry) for entry in ordered[-allowed:]}
        queue[:] = [entry for entry in queue if not entry.ordered or id(entry) in late]
    else:
        newer = np.zeros(g.n, np.int64)
        kept = []
        for entry in reversed(queue):
            who = np.ones(g.n, bool) if entry.who is None else entry.who
            if entry.ordered:
                left = who & (newer < allowed)
                newer += who
            else:
                left = who
            if left.any():
                kept.append(entry.of(left))
        queue[:] = reversed(kept)
    refresh(g)


def refresh(g: Waves) -> None:
    """Recomputes which registers are pending, after the queues changed."""
    g.pending = 0
    for queue in g.queues:
        for entry in queue:
            g.pending |= entry.registers


def at_barrier(g: Waves) -> None:
    """Accesses that still run are not ordered by the barrier that their wave arrives at.

    Those of LDS as well: wavefronts' LDS operations "can be reordered relative to each other", and
    only s_waitcnt lgkmcnt(0) orders them (LLVM's guide, "Memory Model GFX10-GFX11").
    """
    _postpone(g, 1 << happens_before.BARRIER)


def at_release(g: Waves) -> None:
    """Nor are they by an atomic; nor is what the wave does after it."""
    _postpone(g, 1 << happens_before.RELEASE)
    g.epoch = happens_before.after_release(g.epoch)
    g.tags = happens_before.tags(g.workgroup, g.epoch, g.wave)


def _postpone(g: Waves, unit: int) -> None:
    for queue in g.queues:
        for entry in queue:
            for touch in entry.touches:
                tags = g.tags if entry.who is None else g.tags[entry.who]
                touch.memory.postpone(touch, happens_before.who(tags), unit)


def select(queues, index):
    """Queues of the waves `index`."""
    return [
        [
            entry if entry.who is None else entry.of(entry.who[index])
            for entry in queue
            if entry.who is None or entry.who[index].any()
        ]
        for queue in queues
    ]


def join(first, n: int, second, m: int):
    """Queues of n waves followed by m others."""
    return [
        [e.of(_padded(e.who, n, 0, m)) for e in a] + [e.of(_padded(e.who, m, n, 0)) for e in b]
        for a, b in zip(first, second, strict=True)
    ]


def _padded(who, size, before, after):
    who = np.ones(size, bool) if who is None else who
    return np.concatenate([np.zeros(before, bool), who, np.zeros(after, bool)])


def compile_wait(ins: Instruction):
    """s_waitcnt, s_waitcnt_vscnt and relatives as a function on Waves. Raises Unknown."""
    if ins.name in ("s_waitcnt_vscnt", "s_waitcnt_vmcnt", "s_waitcnt_lgkmcnt"):
        if ins.operands[0].text != "null":
            raise Unknown("a wait on a register")
        counter = {"vscnt": STORE, "vmcnt": VM, "lgkmcnt": LGKM}[ins.name[10:]]
        allowed = int(ins.operands[1].text, 0)
        return lambda g: wait(g, counter, allowed)
    limits = []
    for name, value in re.findall(r"(\w+)\((\d+)\)", ins.raw):
        if name not in _MAXIMUM:
            raise Unknown(f"counter {name}")
        if name in _COUNTER and int(value) < _MAXIMUM[name]:
            limits.append((_COUNTER[name], int(value)))
    if not limits and not re.fullmatch(r"(\w+\(\d+\)\s*)+", ins.raw):
        # a number alone: all counters, in the encoding of SOPP's simm16
        raise Unknown(f"wait {ins.raw}")

    def run(g: Waves):
        for counter, allowed in limits:
            wait(g, counter, allowed)

    return run
