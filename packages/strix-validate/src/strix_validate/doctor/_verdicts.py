# SPDX-License-Identifier: BSD-3-Clause
"""What a check of the doctor finds, as a result."""

from dataclasses import dataclass

from strix_validate.checks import ANY, CannotRun, Result, Severity, State
from strix_validate.doctor.tree import Tree


@dataclass(frozen=True)
class Fix:
    """What to do about a finding.

    Attributes:
        text: A command where there is one, otherwise an instruction.
        needs_reboot: Whether it takes effect at the next start of the machine only.
    """

    text: str
    needs_reboot: bool = False


def fine(**measured) -> Result:
    """Return a pass."""
    return Result(ANY, State.PASSED, "", measured)


def error(message: str, fix: Fix | str, source: str = "", /, **measured) -> Result:
    """Return a failure and what fixes it; source replaces the link of the check's docstring."""
    return _result(State.FAILED, Severity.ERROR, message, fix, source, measured)


def warning(message: str, fix: Fix | str, source: str = "", /, **measured) -> Result:
    """Return a pass that costs speed, memory or stability, and what fixes it."""
    return _result(State.PASSED, Severity.WARNING, message, fix, source, measured)


def remark(message: str, fix: Fix | str = "", source: str = "", /, **measured) -> Result:
    """Return a pass with something worth knowing that is no fault."""
    return _result(State.PASSED, Severity.INFO, message, fix, source, measured)


def _result(
    state: State, severity: Severity, message: str, fix: Fix | str, source: str, measured: dict
) -> Result:
    mend = fix if isinstance(fix, Fix) else Fix(fix)
    return Result(
        ANY,
        state,
        message,
        measured,
        severity,
        mend.text,
        needs_reboot=mend.needs_reboot,
        source=source,
    )


def worst(results: list[Result], **measured) -> Result:
    """Return one result for several: the worst first, with the messages and fixes of all."""
    for result in results:
        measured = result.measured | measured
    order = [Severity.ERROR, Severity.WARNING, Severity.INFO]
    bad = [result for severity in order for result in results if result.severity is severity]
    if not bad:
        return fine(**measured)
    first = bad[0]
    return Result(
        ANY,
        first.state,
        "; ".join(result.reason for result in bad),
        measured,
        first.severity,
        "; ".join(dict.fromkeys(result.fix for result in bad if result.fix)),
        needs_reboot=any(result.needs_reboot for result in bad),
        source=" ".join(dict.fromkeys(result.source for result in bad if result.source)),
    )


def known(value, name: str):
    """Return the value. Raise CannotRun if it is None."""
    if value is None:
        raise CannotRun(f"{name} cannot be read")
    return value


def need_gpu(tree: Tree) -> None:
    """Raise CannotRun if the machine has no AMD GPU."""
    if not tree.gpus and not tree.has_ours:
        raise CannotRun("there is no AMD GPU")
