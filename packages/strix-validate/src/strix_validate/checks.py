# SPDX-License-Identifier: BSD-3-Clause
"""Checks, their results, and the options of a run."""

import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path

#: The environment variable with the value of --seed. runner.run sets it; derive_seed reads it, also
#: in child processes.
SEED = "STRIX_VALIDATE_SEED"


class State(StrEnum):
    """The outcome of a check.

    Attributes:
        PASSED: The check found no fault.
        FAILED: The check found a fault, raised an exception, or was skipped although no entry of
            skips.toml allows it.
        SKIPPED: The check could not run, and neither passed nor failed.
    """

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class Severity(StrEnum):
    """The severity of a finding of the doctor.

    Attributes:
        ERROR: The check found a fault, and fails.
        WARNING: The check found a fault that costs speed, memory or stability, and passes.
        INFO: The check found something for the user to weigh, and passes.
    """

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Size(StrEnum):
    """How much of a tier runs; each size includes the smaller sizes."""

    QUICK = "quick"
    FULL = "full"
    STRESS = "stress"

    def includes(self, other: "Size") -> bool:
        """Return whether this size includes the other."""
        order = list(Size)
        return order.index(other) <= order.index(self)


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        id: Its unique id.
        title: What it checks.
        purpose: The bug that the check would catch, with a link if there is one.
    """

    id: str
    title: str = field(default="", compare=False)
    purpose: str = field(default="", compare=False)


#: The value of Result.check until tiers.run_each sets the real check.
PLACEHOLDER = Check("")


@dataclass(frozen=True)
class Result:
    """The outcome of a check.

    Attributes:
        check: The check.
        state: The outcome.
        reason: Why the check was skipped or failed, or a remark if it passed.
        measured: The measured values, in JSON types. None stands for a number that is not finite.
        severity: The severity of a finding of the doctor.
        fix: What to do about a finding: a command, or an instruction if no command exists.
        seconds: How long the check took.
        needs_reboot: Whether the fix takes effect only at the next start of the machine.
        source: Links that replace those in the check's docstring.
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

    Attributes:
        device: "cuda" (torch's name for ROCm GPUs as well), "cpu", or "none" if torch is not used.
        size: How much of each tier runs.
        root: The folder that the doctor reads as the machine's root, with /proc, /sys and /etc.
        weights: Size of a model's weights in bytes. The doctor prints vLLM's memory flags for a
            model of this size.
        vllm: A source folder of vLLM to use instead of the installed one.
        url: The URL of a running vLLM server.
        model: The server's name for its model; without url, a model's folder to serve.
        plain_url: The URL of a second server, with the model of the server at url, but without
            speculative decoding.
        questions: How many of 50 questions the model must answer correctly; 0 asks none.
        seed: The seed of random inputs.
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


#: The function of a check. It returns the measured values, or a complete result; see
#: tiers.run_each.
Body = Callable[[RunOptions], dict | Result]


class CannotRun(Exception):
    """A check cannot be run here; the message is the reason for the skip."""


class CheckFailed(Exception):
    """A check fails; the message says what is wrong."""


def need_gpu(options: RunOptions, reason: str) -> None:
    """Raise CannotRun with the reason if the run uses no GPU."""
    if options.device != "cuda":
        raise CannotRun(reason)


def is_emulated(options: RunOptions) -> bool:
    """Return whether the GPU is strix-emulate's device."""
    if options.device != "cuda":
        return False
    import torch

    return "(emulated)" in torch.cuda.get_device_name()


def derive_seed(name: str) -> int:
    """Return a seed for the inputs with this name. Only the name and --seed determine it."""
    return zlib.crc32(name.encode(), int(os.environ.get(SEED, "0")))


def require(condition: object, message: str) -> None:
    """Raise CheckFailed with the message if the condition is false.

    Checks do not use ``assert``, because ``python -O`` and PYTHONOPTIMIZE remove assertions.
    """
    if not condition:
        raise CheckFailed(message)


def make_result(check: Check, faults: Sequence[str], measured: dict) -> Result:
    """Return the result of a check: failed if there are faults, with all of them as its reason."""
    state = State.FAILED if faults else State.PASSED
    return Result(check, state, "; ".join(faults), measured)


def is_named(id_: str, names: Iterable[str]) -> bool:
    """Return whether one of the names matches an id.

    A name is an id, a prefix of ids up to a slash, or a shell pattern. For example, the id
    "sdpa/flash/full-float16" is matched by itself, "sdpa/flash", "sdpa" and "sdpa/*/full-*".
    """
    return any(fnmatchcase(id_, name) or fnmatchcase(id_, f"{name}/*") for name in names)


def exit_code(states: Iterable[State]) -> int:
    """Return 0 if every check that ran passed, 1 if a check failed, 3 if no check could run."""
    distinct = set(states)
    if State.FAILED in distinct:
        return 1
    return 0 if State.PASSED in distinct else 3


def read_purpose(body: Callable) -> str:
    """Return the docstring of a check's function in one line; it says what the check catches."""
    return " ".join((body.__doc__ or "").split())


def index_by_name(*bodies: Callable) -> dict[str, Callable]:
    """Return the functions by their names in ids, which have hyphens instead of underscores."""
    return {body.__name__.replace("_", "-"): body for body in bodies}


def make_checks(group: str, bodies: Mapping[str, Callable]) -> dict[Check, Callable]:
    """Return the functions by check. The check of each function has the id GROUP/NAME.

    The title of a check is the first sentence of its function's docstring.

    Args:
        group: The part of the ids before the slash.
        bodies: Functions by name.
    """
    checks: dict[Check, Callable] = {}
    for name, body in bodies.items():
        purpose = read_purpose(body)
        title = purpose.split(". ")[0]
        checks[Check(f"{group}/{name}", title, purpose)] = body
    return checks
