# SPDX-License-Identifier: BSD-3-Clause
"""What a check of the doctor finds, as a result."""

from strix_validate.checks import ANY, CannotRun, Result, Severity, State
from strix_validate.doctor.tree import Tree


def fine(**measured) -> Result:
    """Return a pass."""
    return Result(ANY, State.PASSED, "", measured)


def error(what: str, fix: str, **measured) -> Result:
    """Return a failure, with the command that fixes it."""
    return Result(ANY, State.FAILED, what, measured, Severity.ERROR, fix)


def warning(what: str, fix: str, **measured) -> Result:
    """Return a pass that costs speed or memory, with the command that fixes it."""
    return Result(ANY, State.PASSED, what, measured, Severity.WARNING, fix)


def remark(what: str, fix: str = "", **measured) -> Result:
    """Return a pass with something worth knowing that is no fault."""
    return Result(ANY, State.PASSED, what, measured, Severity.INFO, fix)


def known(value, name: str):
    """Return the value. Raise CannotRun if it is None."""
    if value is None:
        raise CannotRun(f"{name} cannot be read")
    return value


def need_gpu(tree: Tree) -> None:
    """Raise CannotRun if the machine has no AMD GPU."""
    if not tree.gpus and not tree.has_ours:
        raise CannotRun("there is no AMD GPU")
