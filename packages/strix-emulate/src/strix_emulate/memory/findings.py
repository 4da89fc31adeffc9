# SPDX-License-Identifier: BSD-3-Clause
"""The checks of a launch. A finding of a check ends the launch, becomes a note, or is ignored."""

from dataclasses import dataclass

from strix_emulate.code.decode import Instruction
from strix_emulate.errors import EmulatorError, Trap

#: Checks whose findings may be harmless on hardware. All other traps end every launch.
CHECKS = ("pending", "race", "stale", "uninitialised", "barrier", "lds")


@dataclass(frozen=True)
class Note:
    """A finding that did not end the launch.

    Attributes:
        check: Name of the check.
        place: Address and text of the instruction.
        message: The first finding of the check at this place.
        count: Number of findings of the check at this place.
    """

    check: str
    place: str
    message: str
    count: int


def describe_place(instruction: Instruction | None) -> str:
    """Return an instruction's address and text, as traps show them."""
    if instruction is None:
        return "start"
    return f"{instruction.address:#x} `{instruction.text}`"


class Findings:
    """Collects the findings of a launch, or ends the launch.

    Attributes:
        disabled_checks: Checks that are not made.
        lenient: Whether no finding ends the launch.
        warn_only: Checks whose findings never end the launch.
        instruction: The instruction that is executed now, or None before the first one.
    """

    def __init__(
        self,
        disabled_checks: frozenset[str] = frozenset(),
        lenient: bool = False,
        warn_only: frozenset[str] = frozenset(),
    ) -> None:
        self.disabled_checks = disabled_checks
        self.lenient = lenient
        self.warn_only = warn_only
        self.instruction: Instruction | None = None
        self._notes: dict[tuple[str, str], Note] = {}

    def is_enabled(self, check: str) -> bool:
        """Return whether the check is made."""
        return check not in self.disabled_checks

    def ends_launch(self, check: str) -> bool:
        """Return whether a finding of this check ends the launch."""
        return not self.lenient and check not in self.warn_only | self.disabled_checks

    def report(self, check: str, message: str) -> None:
        """Report a finding at the current instruction, unless its check is disabled.

        Raises:
            Trap: Findings of this check end the launch.
        """
        if check in self.disabled_checks:
            return
        if self.ends_launch(check):
            raise Trap(check, message)
        self.note(check, self.instruction, message)

    def note(
        self,
        check: str,
        instruction: Instruction | None,
        message: str,
        count: int = 1,
    ) -> None:
        """Add a note of a finding, or count it if its check has a note at this instruction."""
        place = describe_place(instruction)
        earlier = self._notes.get((check, place))
        if earlier is not None:
            message = earlier.message
            count += earlier.count
        self._notes[check, place] = Note(check, place, message, count)

    @property
    def notes(self) -> list[Note]:
        """Notes in the order of their first occurrence."""
        return list(self._notes.values())


def parse(names: str) -> frozenset[str]:
    """Parse names of checks, separated by commas. "all" alone stands for every check.

    Raises:
        EmulatorError: A name is not one of CHECKS.
    """
    checks = frozenset(filter(None, names.split(",")))
    if checks == {"all"}:
        return frozenset(CHECKS)
    unknown = sorted(checks - set(CHECKS))
    if unknown:
        raise EmulatorError(f"unknown check {unknown[0]}; the checks are {', '.join(CHECKS)}")
    return checks


def add_default_value(arguments: list[str]) -> list[str]:
    """Return a command line in which a --no-checks without a value has the value "all".

    A value consists of names of checks. Arguments from "--" on are not changed.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    allowed = {*CHECKS, "all"}
    completed = []
    for i, text in enumerate(arguments):
        if text == "--no-checks" and i < end:
            following = arguments[i + 1].split(",") if i + 1 < end else []
            if not following or not set(following) <= allowed:
                text = "--no-checks=all"
        completed.append(text)
    return completed
