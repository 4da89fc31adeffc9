# SPDX-License-Identifier: BSD-3-Clause
"""Workgroups on several cores, where that changes nothing: forked processes over one memory.

Workgroups have only global memory in common. Each process runs whole workgroups, with a race shadow
of its own; afterwards the shadows say whether one touched what another wrote. If so, or if anything
trapped, memory is put back and one core does it all again: so results, traps and counts are its.
Without checks there is no shadow, and what a kernel with a race gives may differ.
"""

import ctypes
import multiprocessing
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait

import numpy as np

from strix_emulate.errors import Trap
from strix_emulate.memory.arena import READ_ONLY, Arena
from strix_emulate.memory.shadow import shared_zeros

#: Wave-instructions, and those for a byte that may change, below which processes cost more than
#: they save.
WORTH, _WORTH_OF_BYTE = 500_000, 1 / 64
_READ, _WRITTEN = 1, 2
_PR_SET_PDEATHSIG = 1
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Answer:
    """Of a share: wave-instructions, how many waves entered each block, CPU seconds."""

    executed: int
    entered: dict[int, int]
    seconds: float


def one_core(names: list[str]) -> str:
    """Say why the workgroups of a kernel must stay on one core; nothing if they need not.

    names: of instructions by which they may wait for each other.
    """
    if sys.platform != "linux" or multiprocessing.current_process().daemon:
        return "no processes can be forked here"
    return f"workgroups may wait for each other: {', '.join(names)}" if names else ""


def worth(left: float, arena: Arena) -> bool:
    """Return whether so many wave-instructions are worth the processes."""
    if left < WORTH:
        return False
    return left >= _WORTH_OF_BYTE * sum(end - start for start, end in _spans(arena))


def deal(jobs: Sequence[int], count: int) -> list[list[int]]:
    """Deal shares of about the same work, even if it grows from job to job or alternates.

    They depend on nothing but the numbers, as does what the processes find.
    """
    count = min(count, len(jobs))
    found: list[list[int]] = [[] for _ in range(count)]
    for number, job in enumerate(jobs):
        place = number % (2 * count)
        found[min(place, 2 * count - 1 - place)].append(job)
    return found


def split(
    shares: list[list[int]],
    execute: Callable[[list[int]], Answer],
    arena: Arena,
    since: int,
    budget: int,
) -> list[Answer] | None:
    """Return what execute(share) answers for each share, each in a process of its own.

    None: memory is as it was before, and one core is to do it. since: the lowest tag of these
    workgroups. budget: the most wave-instructions of all.
    """
    spans = _spans(arena)
    cells = sum(-(-end // arena.cell) - start // arena.cell for start, end in spans)
    try:
        kept = [arena.bytes[start:end].copy() for start, end in spans]
        rows = shared_zeros(len(shares) * cells).reshape(len(shares), -1)
    except (MemoryError, OSError):
        return None

    def child(number: int, sender) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            answer = execute(shares[number])
        except (Trap, MemoryError):
            # one core finds it as well
            return
        if arena.checked:
            _note(rows[number], arena, spans, since)
        sender.send(answer)

    answers = _fork(child, len(shares))
    within = answers is not None and sum(answer.executed for answer in answers) <= budget
    if within and not (arena.checked and _meet(rows)):
        return answers
    for (start, end), old in zip(spans, kept, strict=True):
        arena.bytes[start:end] = old
    return None


def _spans(arena: Arena) -> list[tuple[int, int]]:
    """Return where bytes may change: offsets of the start and the end."""
    rows = arena.ranges().tolist()
    return sorted({(at, at + size) for _, size, at, mode in rows if mode != READ_ONLY and size})


def _note(row: np.ndarray, arena: Arena, spans, since: int) -> None:
    """Note for each cell how it was touched."""
    at = 0
    for start, end in spans:
        cells = slice(start // arena.cell, -(-end // arena.cell))
        here = row[at : at + cells.stop - cells.start]
        here[arena.read[cells] >= since] = _READ
        here[arena.written[cells] >= since] = _WRITTEN
        at += len(here)


def _meet(rows: np.ndarray, chunk: int = 1 << 20) -> bool:
    """Return whether any cell was written by one process and touched by another."""
    for at in range(0, rows.shape[1], chunk):
        part = rows[:, at : at + chunk]
        if (((part > 0).sum(axis=0) > 1) & (part == _WRITTEN).any(axis=0)).any():
            return True
    return False


def _fork(child: Callable, count: int) -> list[Answer] | None:
    """Return what the processes send; None as soon as one ends without sending."""
    processes, receivers, answers = [], [], []
    try:
        for number in range(count):
            receiver, sender = _FORK.Pipe(duplex=False)
            process = _FORK.Process(target=child, args=(number, sender), daemon=True)
            process.start()
            sender.close()
            processes.append(process)
            receivers.append(receiver)
        waiting = list(receivers)
        while waiting:
            ready = wait(waiting)
            for receiver in [each for each in waiting if each in ready]:
                answers.append(receiver.recv())
                waiting.remove(receiver)
        return answers
    except (EOFError, OSError):
        return None
    finally:
        for process, receiver in zip(processes, receivers, strict=True):
            process.kill()
            process.join()
            receiver.close()
