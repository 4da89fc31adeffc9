# SPDX-License-Identifier: BSD-3-Clause
"""Execution of workgroups on several cores, in forked processes that share global memory.

Results, traps and counts are the same as on one core. Workgroups have only global memory in common.
Each process runs whole workgroups and records their accesses in its own race shadow. Afterwards the
shadows show whether one process touched a cell that another one wrote. If so, or if a process
trapped or was lost, or the budget was exceeded, memory is restored and one core repeats the work of
all processes.

Without checks there is no shadow, so the results of a kernel with a race may differ.
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
from strix_emulate.memory.pages import shared_zeros

#: Minimum number of wave-instructions, in all and per byte that may change. With fewer, processes
#: cost more time than they save.
WORTH = 500_000
_WORTH_OF_BYTE = 1 / 64
#: Kinds of access to a cell.
_READ = 1
_WRITTEN = 2
_PR_SET_PDEATHSIG = 1
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Answer:
    """The counts of one process.

    Attributes:
        executed: Wave-instructions.
        entered: Number of entries into each block, summed over all waves, by the block's address.
        seconds: CPU seconds.
    """

    executed: int
    entered: dict[int, int]
    seconds: float


def find_one_core_reason(names: list[str]) -> str:
    """Return the reason why the workgroups of a kernel must stay on one core, or "".

    Args:
        names: Mnemonics of the kernel by which workgroups may wait for each other.
    """
    if sys.platform != "linux" or multiprocessing.current_process().daemon:
        return "no processes can be forked here"
    if names:
        return f"workgroups may wait for each other: {', '.join(names)}"
    return ""


def is_worthwhile(instructions: float, arena: Arena) -> bool:
    """Return whether this number of wave-instructions is worth the cost of forked processes."""
    if instructions < WORTH:
        return False
    changing = sum(end - start for start, end in _changing_spans(arena))
    return instructions >= _WORTH_OF_BYTE * changing


def deal(jobs: Sequence[int], count: int) -> list[list[int]]:
    """Divide the jobs into up to `count` shares of about the same work, and return the shares.

    The shares are about equal even if the work grows or alternates from job to job. They depend
    only on the arguments, so that every run gives the same findings.
    """
    count = min(count, len(jobs))
    shares: list[list[int]] = [[] for _ in range(count)]
    for number, job in enumerate(jobs):
        place = number % (2 * count)
        shares[min(place, 2 * count - 1 - place)].append(job)
    return shares


def run_shares(
    shares: list[list[int]],
    execute: Callable[[list[int]], Answer],
    arena: Arena,
    first_tag: int,
    budget: int,
) -> list[Answer] | None:
    """Call execute(share) for each share in a process of its own.

    Args:
        shares: Jobs of each process.
        execute: Runs a share and returns its counts.
        arena: Global memory, which the processes share.
        first_tag: Lowest tag of the workgroups in the shares.
        budget: Maximum number of wave-instructions of all processes.

    Returns:
        The answers, or None if one core has to do the work. Memory is then as before the call.
    """
    spans = _changing_spans(arena)
    cells = sum(-(-end // arena.cell) - start // arena.cell for start, end in spans)
    try:
        saved = [arena.bytes[start:end].copy() for start, end in spans]
        rows = shared_zeros(len(shares) * cells).reshape(len(shares), -1)
    except (MemoryError, OSError):
        return None

    def run_child(number: int, sender) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            answer = execute(shares[number])
        except (Trap, MemoryError):
            # Send no answer. The parent then repeats the work on one core, where the error occurs
            # again.
            return
        if arena.checked:
            _record_touches(rows[number], arena, spans, first_tag)
        sender.send(answer)

    answers = _run_processes(run_child, len(shares))
    if answers is not None:
        is_within = sum(answer.executed for answer in answers) <= budget
        if is_within and not (arena.checked and _has_conflict(rows)):
            return answers
    for (start, end), old in zip(spans, saved, strict=True):
        arena.bytes[start:end] = old
    return None


def _changing_spans(arena: Arena) -> list[tuple[int, int]]:
    """Return (start, end) of each span of memory that may change, as offsets."""
    spans = set()
    for _, size, at, mode in arena.ranges().tolist():
        if mode != READ_ONLY and size:
            spans.add((at, at + size))
    return sorted(spans)


def _record_touches(
    row: np.ndarray,
    arena: Arena,
    spans,
    first_tag: int,
) -> None:
    """Record in `row`, for each cell of the spans, how this process touched the cell."""
    at = 0
    for start, end in spans:
        cells = slice(start // arena.cell, -(-end // arena.cell))
        touches = row[at : at + cells.stop - cells.start]
        touches[arena.read[cells] >= first_tag] = _READ
        touches[arena.written[cells] >= first_tag] = _WRITTEN
        at += len(touches)


def _has_conflict(rows: np.ndarray, chunk: int = 1 << 20) -> bool:
    """Return whether one process wrote a cell that another one touched."""
    for at in range(0, rows.shape[1], chunk):
        part = rows[:, at : at + chunk]
        is_shared = (part > 0).sum(axis=0) > 1
        is_written = (part == _WRITTEN).any(axis=0)
        if (is_shared & is_written).any():
            return True
    return False


def _run_processes(child: Callable, count: int) -> list[Answer] | None:
    """Return the processes' answers, or None as soon as a process ends without an answer.

    Return None also if a process cannot be started.
    """
    processes = []
    receivers = []
    answers = []
    try:
        for number in range(count):
            receiver, sender = _FORK.Pipe(duplex=False)
            process = _FORK.Process(
                target=child,
                args=(number, sender),
                daemon=True,
            )
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
