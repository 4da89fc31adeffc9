# SPDX-License-Identifier: BSD-3-Clause
"""One instruction of a kernel, as numpy executes it, with all that is checked before it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from strix_emulate.code.decode import Instruction
from strix_emulate.errors import Trap
from strix_emulate.instructions.microops import Executable
from strix_emulate.memory import waits
from strix_emulate.memory.addressing import Spaces
from strix_emulate.memory.findings import Findings
from strix_emulate.memory.waves import Waves


@dataclass(eq=False)
class Traits:
    """Of an instruction: bits of the registers it touches; target: those of a load's own.

    Equal instructions have the same one. stored: a register of which it stores a half, and which.
    ops: what C executes; None until it is worked out, False
    if C cannot.
    """

    reads: int
    target: int
    counter: int
    executable: Executable
    stored: tuple[int, str] = (0, "")
    ops: list | Literal[False] | None = None


class Step:
    """One instruction of a kernel; home: its blocks, which know the memories of the launch."""

    def __init__(
        self, instruction: Instruction, traits: Traits, make: Callable[[Spaces], Callable], home
    ):
        self.instruction, self.traits, self._make, self._home = instruction, traits, make, home

    @property
    def run(self) -> Callable:
        """numpy's function on Waves; made when a launch needs it, once for equal instructions."""
        run = self._home.made.get(self.traits)
        if run is None:
            run = self._home.made[self.traits] = self._make(self._home.spaces)
        return run

    def tell(self, op: Any) -> None:
        """Tell C's operation which instruction of the kernel it is."""
        op.place = self.instruction.address
        op.number = self._home.numbers.get(op.place, 0)

    def execute(self, g: Waves, checks: Findings | None) -> None:
        """Execute it by numpy. A trap knows the instruction."""
        try:
            if checks:
                checks.at = self.instruction
                self.check(g, checks)
            elif g.queues.state is not waits.NOTHING:
                g.queues = waits.Queues()
            self.run(g)
        except Trap as trap:
            trap.instruction = trap.instruction or self.instruction
            raise

    def check(self, g, checks: Findings) -> None:
        """Find a wait that it needs and that is not there."""
        traits = self.traits
        pending = g.queues.state.pending
        if pending and pending & (traits.reads | traits.target) and checks.on("pending"):
            waits.check(g, traits.reads, traits.target, traits.counter, checks, traits.stored)

    def issue(self, g, touches: Any = ()) -> None:
        """Apply what it does to the wait counters, without touching memory."""
        issued = self.traits.executable.issues
        if issued is not None:
            waits.issue_all(g, *issued, touches)
        elif self.traits.executable.waits:
            self.run(g)
