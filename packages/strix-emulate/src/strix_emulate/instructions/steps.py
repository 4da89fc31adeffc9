# SPDX-License-Identifier: BSD-3-Clause
"""An instruction of a kernel: its execution by numpy, and the check for missing waits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from strix_emulate.code.decode import Instruction
from strix_emulate.errors import Trap
from strix_emulate.instructions.microops import Compiled, Executable
from strix_emulate.memory import waits
from strix_emulate.memory.addressing import Spaces
from strix_emulate.memory.findings import Findings
from strix_emulate.memory.waves import Waves


@dataclass(eq=False)
class Traits:
    """Properties of an instruction. Equal instructions share one object.

    Attributes:
        reads: Bit mask of the registers that the instruction reads, or writes without their being
            in `target`.
        target: Bit mask of the registers that a memory instruction writes, such as a load, an
            atomic that returns the old value, or a lane exchange. 0 for other instructions.
        counter: Wait counter of a memory instruction that writes registers. -1 for other
            instructions.
        executable: The description with which C can execute the instruction.
        stored: For a store of half a register, the register's bit mask and the half, "l" or "h".
        c_operations: The instruction encoded for C. None before the first attempt to encode it, and
            False if C cannot execute it.
    """

    reads: int
    target: int
    counter: int
    executable: Executable
    stored: tuple[int, str] = (0, "")
    c_operations: list | Literal[False] | None = None


class Step:
    """One instruction of a kernel."""

    def __init__(
        self,
        instruction: Instruction,
        traits: Traits,
        make: Callable[[Spaces], Compiled],
        home: Any,
    ):
        """Initialize the step.

        Args:
            instruction: The instruction.
            traits: Its properties.
            make: Function that compiles the instruction for the memories of a launch.
            home: The kernel's `Blocks`, which have the memories of the launch.
        """
        self.instruction = instruction
        self.traits = traits
        self._make = make
        self._home = home

    @property
    def run(self) -> Callable:
        """Function on Waves that executes the instruction with numpy.

        It is compiled when a launch first needs it. Equal instructions share it.
        """
        run = self._home.functions.get(self.traits)
        if run is None:
            run = self._make(self._home.spaces).run
            self._home.functions[self.traits] = run
        return run

    def describe_to_c(self, op: Any) -> None:
        """Write the instruction's address, and its number in `Uses`, into an operation of C."""
        op.place = self.instruction.address
        op.number = self._home.numbers.get(op.place, 0)

    def execute(self, g: Waves, checks: Findings | None) -> None:
        """Execute the instruction with numpy, after the check for missing waits if `checks` is set.

        A trap names the instruction.
        """
        try:
            if checks:
                checks.instruction = self.instruction
                self.check(g, checks)
            elif g.queues.state is not waits.NOTHING:
                g.queues = waits.Queues()
            self.run(g)
        except Trap as trap:
            trap.instruction = trap.instruction or self.instruction
            raise

    def check(self, g, checks: Findings) -> None:
        """Report a missing wait, if a register that the instruction uses has yet to be loaded."""
        traits = self.traits
        pending = g.queues.state.pending
        if pending and pending & (traits.reads | traits.target) and checks.is_enabled("pending"):
            waits.check_pending(
                g, traits.reads, traits.target, traits.counter, checks, traits.stored
            )

    def issue(self, g, touches: Any = ()) -> None:
        """Update the wait counters as the instruction does, without accessing memory."""
        executable = self.traits.executable
        if executable.issues is not None:
            waits.issue_all(g, *executable.issues, touches)
        elif executable.waits:
            self.run(g)
