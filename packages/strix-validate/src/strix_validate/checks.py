# SPDX-License-Identifier: BSD-3-Clause
"""Checks, their results, and which ones are wanted."""

import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path

#: The variable that --seed sets: child processes draw inputs as well.
SEED = "STRIX_VALIDATE_SEED"


class State(StrEnum):
    """The outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"  # could not run: neither passed nor failed


class Severity(StrEnum):
    """How grave a doctor's finding is. A warning costs speed or memory; the check passes.

    Information, which is for the user to weigh, does so too.
    """

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Size(StrEnum):
    """How much of a tier runs; each size includes the ones before it."""

    QUICK = "quick"
    FULL = "full"
    STRESS = "stress"

    def holds(self, other: "Size") -> bool:
        """Return whether this size includes the other."""
        order = list(Size)
        return order.index(other) <= order.index(self)


@dataclass(frozen=True)
class Check:
    """What is checked, and why: the bug that it would catch, with a link. Ids are unique."""

    id: str
    title: str = field(default="", compare=False)
    why: str = field(default="", compare=False)


#: Of a result that tiers.run_each gives its check.
ANY = Check("")


@dataclass(frozen=True)
class Result:
    """Outcome of a check.

    reason: why it was skipped or failed, or a remark on a pass. measured: the numbers behind the
    state, in JSON types; None stands for a number that is not finite. severity and fix, the command
    that solves the problem, belong to findings of the doctor; so do needs_reboot, of the fix, and
    source, the links that replace the check's.
    """

    check: Check
    state: State
    reason: str = ""
    measured: dict = field(default_factory=dict)
    severity: Severity | None = None
    fix: str = ""
    seconds: float = 0.0
    needs_reboot: bool = False
    source: str = ""


@dataclass(frozen=True)
class RunOptions:
    """Options of a run.

    device: "cuda" (torch's name for ROCm GPUs as well), "cpu", or "none" for no torch. root: where
    the doctor looks for /proc, /sys, /etc and the like. weights: bytes of a model, for its flags.
    vllm: a source folder of vLLM to take instead of the installed one. url, model: a server that
    runs already, and what it calls its model; without url a folder to serve. plain_url: a server of
    the same model without speculation. questions: how many of 50 the first one must answer, 0 asks
    none. seed: of random inputs.
    """

    device: str = "cpu"
    size: Size = Size.QUICK
    root: Path = Path("/")
    weights: int = 0
    vllm: Path | None = None
    url: str = ""
    model: str = ""
    plain_url: str = ""
    questions: int = 0
    seed: int = 0


#: The function of a check: it returns what it measured, or a whole result; see tiers.run_each.
Body = Callable[[RunOptions], dict | Result]


class CannotRun(Exception):
    """A check has nothing to judge here; the message is the reason for the skip."""


def need_gpu(options: RunOptions, reason: str) -> None:
    """Raise CannotRun without a GPU."""
    if options.device != "cuda":
        raise CannotRun(reason)


def is_emulated(options: RunOptions) -> bool:
    """Return whether the GPU is strix-emulate's device."""
    if options.device != "cuda":
        return False
    import torch

    return "(emulated)" in torch.cuda.get_device_name()


class CheckFailed(Exception):
    """The verdict of a check: what is wrong, in words."""


def seed_of(name: str) -> int:
    """Return the seed of the inputs of this name: the same in every run, others with --seed."""
    return zlib.crc32(name.encode(), int(os.environ.get(SEED, "0")))


def require(condition: object, message: str) -> None:
    """Raise CheckFailed with the message if the condition is false.

    Verdicts are not assertions: ``python -O`` and PYTHONOPTIMIZE remove those.
    """
    if not condition:
        raise CheckFailed(message)


def judged(check: Check, faults: Sequence[str], measured: dict) -> Result:
    """Return the verdict of a check that has measured, and names every fault that it found."""
    return Result(check, State.FAILED if faults else State.PASSED, "; ".join(faults), measured)


def is_named(id_: str, names: Iterable[str]) -> bool:
    """Return whether names contains an id, its prefix up to a slash, or a pattern that it matches.

    For "sdpa/flash/full-float16" these are "sdpa/flash/full-float16", "sdpa/flash", "sdpa", and
    patterns of the shell such as "sdpa/*/full-*".
    """
    return any(fnmatchcase(id_, name) or fnmatchcase(id_, f"{name}/*") for name in names)


def exit_code(states: Iterable[State]) -> int:
    """Return 0 if every check that ran passed, 1 if one failed, 3 if nothing could be checked."""
    seen = set(states)
    if State.FAILED in seen:
        return 1
    return 0 if State.PASSED in seen else 3


def reason_of(body: Callable) -> str:
    """Return the docstring of a check's function, what the check catches, in one line."""
    return " ".join((body.__doc__ or "").split())


def named(*bodies: Callable) -> dict[str, Callable]:
    """Return functions by their names, as ids have them."""
    return {body.__name__.replace("_", "-"): body for body in bodies}


def described(group: str, bodies: Mapping[str, Callable]) -> dict[Check, Callable]:
    """Return the checks GROUP/NAME, entitled by the first sentence of what each one catches."""
    return {
        Check(f"{group}/{name}", reason_of(body).split(". ")[0], reason_of(body)): body
        for name, body in bodies.items()
    }
