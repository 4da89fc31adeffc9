# SPDX-License-Identifier: BSD-3-Clause
"""What checks find: an error that ends the launch, or a note with a place; and which are off."""

from dataclasses import dataclass

from strix_emulate.code.decode import Instruction
from strix_emulate.errors import EmulatorError, Trap

#: What may be correct on hardware, or look so. All else that traps cannot be executed.
CHECKS = ("pending", "race", "stale", "uninitialised", "barrier", "lds")


@dataclass(frozen=True)
class Note:
    """A finding that did not end the launch: place is the instruction, count how often it came."""

    check: str
    place: str
    message: str
    count: int


def where(instruction: Instruction | None) -> str:
    """Name an instruction as traps do."""
    return f"{instruction.address:#x} `{instruction.text}`" if instruction else "start"


class Findings:
    """What becomes of the findings of a launch.

    off: checks that are not made; lenient: findings are noted and the launch goes on; noted: those
    of these checks are. at: the instruction that is executed.
    """

    def __init__(
        self,
        off: frozenset[str] = frozenset(),
        lenient: bool = False,
        noted: frozenset[str] = frozenset(),
    ) -> None:
        self.off, self.lenient, self.noted = off, lenient, noted
        self.at: Instruction | None = None
        self._notes: dict[tuple[str, str], Note] = {}

    def on(self, check: str) -> bool:
        """Return whether the check is made."""
        return check not in self.off

    def found(self, check: str, message: str) -> None:
        """Raise Trap, unless the check is off or the launch goes on."""
        if check in self.off:
            return
        if not self.lenient and check not in self.noted:
            raise Trap(check, message)
        self.note(check, self.at, message)

    def ends(self, check: str) -> bool:
        """Return whether what the check finds ends the launch."""
        return not (self.lenient or check in self.noted or check in self.off)

    def note(
        self, check: str, instruction: Instruction | None, message: str, count: int = 1
    ) -> None:
        """Note a finding that does not end the launch."""
        here = where(instruction)
        known = self._notes.get((check, here))
        if known is not None:
            message, count = known.message, known.count + count
        self._notes[check, here] = Note(check, here, message, count)

    @property
    def notes(self) -> list[Note]:
        """In the order in which they came first."""
        return list(self._notes.values())


def parse(names: str) -> frozenset[str]:
    """Parse checks' names with commas between; "all" are all. Raise EmulatorError."""
    found = frozenset(filter(None, names.split(",")))
    if found == {"all"}:
        return frozenset(CHECKS)
    if unknown := sorted(found - set(CHECKS)):
        raise EmulatorError(f"no check is called {unknown[0]}; there are {', '.join(CHECKS)}")
    return found


def with_value(arguments: list[str]) -> list[str]:
    """Return a command line in which --no-checks, which may stand alone, has its value."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    found = []
    for i, text in enumerate(arguments):
        found.append(text)
        if text == "--no-checks" and i < end:
            named = arguments[i + 1].split(",") if i + 1 < end else []
            if not named or not set(named) <= {*CHECKS, "all"}:
                found[-1] = "--no-checks=all"
    return found
