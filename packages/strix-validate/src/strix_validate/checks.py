# SPDX-License-Identifier: BSD-3-Clause
"""What a check is, what came of it, and which ones are wanted."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class State(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"  # could not run; counts neither as passed nor as failed


class Severity(StrEnum):
    """Of a finding of the doctor. A warning leaves the check passed: it costs speed or memory."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Size(StrEnum):
    """How much of a tier is run; each size holds the ones before it."""

    QUICK = "quick"
    FULL = "full"
    STRESS = "stress"

    def holds(self, other: "Size") -> bool:
        order = list(Size)
        return order.index(other) <= order.index(self)


@dataclass(frozen=True)
class Check:
    """What is checked, and why: the bug that it would catch, with a link, or the reason for it."""

    id: str
    title: str
    why: str


@dataclass(frozen=True)
class Result:
    """Outcome of a check.

    reason says why it was skipped or failed, or how a pass is meant if that needs words; measured
    holds the numbers behind the state, in JSON types: a number that is not finite is None. severity
    and fix, the command that mends it, belong to findings of the doctor.
    """

    check: Check
    state: State
    reason: str = ""
    measured: dict = field(default_factory=dict)
    severity: Severity | None = None
    fix: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Options:
    """What a tier is told beside the wanted checks.

    device: "cuda" (also torch's name for a ROCm GPU), "cpu", or "none" for no torch; root: where
    the doctor looks for /proc, /sys, /etc and the like.
    """

    device: str = "cpu"
    size: Size = Size.QUICK
    root: Path = Path("/")


class CannotRun(Exception):
    """Raised by a check that has nothing to judge here, with the reason."""


def is_named(id_: str, names: Iterable[str]) -> bool:
    """True for "sdpa/flash/full-float16" if names has it, "sdpa/flash" or "sdpa"."""
    return any(f"{id_}/".startswith(f"{name}/") for name in names)


def exit_code(states: Iterable[State]) -> int:
    """0 all that ran passed, 1 a check failed, 3 nothing could be checked."""
    seen = set(states)
    if State.FAILED in seen:
        return 1
    return 0 if State.PASSED in seen else 3
