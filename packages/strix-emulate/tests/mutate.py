# SPDX-License-Identifier: BSD-3-Clause
"""Delete single instructions of a kernel, launch it again, and test whether the fault is caught."""

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from strix_emulate.code.decode import Instruction, read
from strix_emulate.errors import Trap
from strix_emulate.instructions.steps import Step
from strix_emulate.memory import waits
from strix_emulate.run.program import NO_EFFECT, WAITS

#: A function that runs a kernel with these instructions, and returns whether its results are
#: correct. It may raise Trap.
Judge = Callable[[list[Instruction]], bool]


_NOTHING = read(b"\x00\x00\x80\xbf", "s_nop 0")


@dataclass
class Verdicts:
    """The verdicts about deletions of single instructions.

    Attributes:
        caught: The number of deletions by verdict: "wrong", or the kind of trap.
        survived: The texts of deleted instructions that nothing caught.
    """

    caught: Counter = field(default_factory=Counter)
    survived: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        total = sum(self.caught.values()) + len(self.survived)
        return sum(self.caught.values()) / total if total else 0.0


def delete(instructions: list[Instruction], address: int) -> list[Instruction]:
    """Return a copy of the instructions in which the instruction at this address does nothing."""
    result = list(instructions)
    for i, ins in enumerate(instructions):
        if ins.address == address:
            result[i] = replace(_NOTHING, address=address, size=ins.size)
    return result


def judge_deletions(
    instructions: list[Instruction], addresses: list[int], judge: Judge
) -> Verdicts:
    """Delete one instruction at a time, and return the verdicts."""
    verdicts = Verdicts()
    texts = {ins.address: ins.text for ins in instructions}
    for address in addresses:
        try:
            is_correct = judge(delete(instructions, address))
        except Trap as trap:
            verdicts.caught[trap.kind] += 1
            continue
        if is_correct:
            verdicts.survived.append(f"{address:#x} {texts[address]}")
        else:
            verdicts.caught["wrong"] += 1
    return verdicts


def barriers(instructions: list[Instruction]) -> list[int]:
    """Return the addresses of all barriers."""
    return [ins.address for ins in instructions if ins.name == "s_barrier"]


def busy_waits(instructions: list[Instruction], judge: Judge) -> tuple[list[int], int]:
    """Return the addresses of waits that had to wait, and the number of idle waits.

    A wait is idle if there was never more outstanding than it allows. Compilers place such waits
    wherever branches of control flow merge. If a wait for stores (vscnt) is deleted, this has an
    effect only on memory that other waves read. A wait between loads into the two halves of a
    register is left out, because the loads' counter keeps the loads in order without the wait
    (waits.check_pending).
    """
    waits_of_kernel = [
        ins.address
        for ins, after in pairwise(instructions)
        if ins.name in WAITS and not after.name.endswith("_d16_hi")
    ]
    with _watched() as retired:
        judge(instructions)
    busy = [address for address in waits_of_kernel if address in retired]
    return busy, len(waits_of_kernel) - len(busy)


@contextlib.contextmanager
def _watched() -> Iterator[set[int]]:
    """Collect the addresses of waits that had to wait."""
    retired: set[int] = set()
    address = 0
    wait = waits.wait
    execute = Step.execute
    issue = Step.issue

    def counted(g, counter, allowed):
        if len(g.queues.state.queues[counter]) > allowed:
            retired.add(address)
        wait(g, counter, allowed)

    def located(original):
        def run(step, *arguments):
            nonlocal address
            address = step.instruction.address
            original(step, *arguments)

        return run

    waits.wait, Step.execute, Step.issue = counted, located(execute), located(issue)
    try:
        yield retired
    finally:
        waits.wait = wait
        Step.execute = execute
        Step.issue = issue


def sample(instructions: list[Instruction], count: int, seed: int = 1) -> list[int]:
    """Return the addresses of random instructions whose deletion can make a difference.

    Waits and barriers are left out, because they are judged separately. Also left out are the
    kernel's end, hints, messages, invalidation of the nearest cache, and branches that only save
    time by skipping code without active lanes.
    """
    skipped = (
        NO_EFFECT
        | WAITS
        | {
            "s_endpgm",
            "s_sendmsg",
            "buffer_gl0_inv",
            "s_barrier",
            "s_cbranch_execz",
            "s_cbranch_execnz",
        }
    )
    real = [ins.address for ins in instructions if ins.name not in skipped]
    return sorted(random.Random(seed).sample(real, min(count, len(real))))
