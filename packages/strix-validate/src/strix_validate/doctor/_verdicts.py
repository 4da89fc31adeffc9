# SPDX-License-Identifier: BSD-3-Clause
"""The results that the doctor's checks return."""

from dataclasses import dataclass, replace
from typing import TypeVar

from strix_validate.checks import PLACEHOLDER, CannotRun, Result, Severity, State
from strix_validate.doctor.tree import Tree

_Value = TypeVar("_Value")
#: Severities, the most severe first.
_SEVERITIES: tuple[Severity | None, ...] = (Severity.ERROR, Severity.WARNING, Severity.INFO)


@dataclass(frozen=True)
class Fix:
    """What to do about a finding.

    Attributes:
        text: A command, or an instruction if no command exists.
        needs_reboot: Whether the fix takes effect only at the next start of the machine.
    """

    text: str
    needs_reboot: bool = False


def fine(**measured) -> Result:
    """Return a pass without a remark."""
    return Result(PLACEHOLDER, State.PASSED, "", measured)


def error(message: str, fix: Fix | str, source: str = "", /, **measured) -> Result:
    """Return a failure.

    Args:
        message: What is wrong.
        fix: What to do about it.
        source: Links that replace the one in the check's docstring.
        measured: The values from which the verdict follows, by name.
    """
    result = Result(PLACEHOLDER, State.FAILED, message, measured, Severity.ERROR)
    return _add_fix(result, fix, source)


def warning(message: str, fix: Fix | str, source: str = "", /, **measured) -> Result:
    """Return a passed result that reports a fault. The fault costs speed, memory or stability.

    The arguments are those of :func:`error`.
    """
    result = Result(PLACEHOLDER, State.PASSED, message, measured, Severity.WARNING)
    return _add_fix(result, fix, source)


def remark(message: str, fix: Fix | str = "", source: str = "", /, **measured) -> Result:
    """Return a passed result with information about something that is not a fault.

    The arguments are those of :func:`error`.
    """
    result = Result(PLACEHOLDER, State.PASSED, message, measured, Severity.INFO)
    return _add_fix(result, fix, source)


def _add_fix(result: Result, fix: Fix | str, source: str) -> Result:
    if isinstance(fix, str):
        fix = Fix(fix)
    return replace(
        result,
        fix=fix.text,
        needs_reboot=fix.needs_reboot,
        source=source,
    )


def combine(results: list[Result], **measured) -> Result:
    """Combine results into one.

    The combined result has the state and severity of the most severe result. It has the messages,
    fixes and sources of all results with a severity, the most severe first. If no result has a
    severity, the combined result is a pass without a remark.

    Args:
        results: The results. The measured values of each are kept.
        measured: Further measured values, by name.
    """
    for result in results:
        measured = result.measured | measured
    findings = [result for result in results if result.severity in _SEVERITIES]
    findings.sort(key=lambda result: _SEVERITIES.index(result.severity))
    if not findings:
        return fine(**measured)
    fixes = [result.fix for result in findings if result.fix]
    sources = [result.source for result in findings if result.source]
    return replace(
        findings[0],
        reason="; ".join(result.reason for result in findings),
        measured=measured,
        fix="; ".join(dict.fromkeys(fixes)),
        needs_reboot=any(result.needs_reboot for result in findings),
        source=" ".join(dict.fromkeys(sources)),
    )


def need_value(value: _Value | None, name: str) -> _Value:
    """Return the value.

    Raises:
        CannotRun: The value is None, because it could not be read.
    """
    if value is None:
        raise CannotRun(f"{name} cannot be read")
    return value


def need_gpu(tree: Tree) -> None:
    """Raise CannotRun if KFD lists no GPU, and the target GPU is not on the PCI bus either."""
    if not tree.gpus and not tree.has_target_gpu:
        raise CannotRun("there is no AMD GPU")
