# SPDX-License-Identifier: BSD-3-Clause
"""Results of checks, as JSON and as a table."""

import importlib.metadata
from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import Enum

from rich.console import Console
from rich.markup import escape
from rich.table import Table

#: Raised when a key of the JSON report changes its meaning or goes away.
SCHEMA = 1
PACKAGES = ("strix-validate", "torch", "triton", "flash-attn", "amd-aiter")


class State(str, Enum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"  # could not run; counts neither as passed nor as failed


@dataclass(frozen=True)
class Check:
    """What is checked, and why: the bug that it would catch."""

    id: str
    title: str
    why: str


@dataclass(frozen=True)
class Result:
    """Outcome of a check.

    reason says why it was skipped or failed, or how a pass is meant if that needs words; measured
    holds the numbers behind the state, error and bound or facts; an error of None is not finite.
    """

    check: Check
    state: State
    reason: str = ""
    measured: dict = field(default_factory=dict)


def versions() -> dict[str, str | None]:
    """Version of each package that matters, None if it is not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def exit_code(results: list[Result]) -> int:
    """0 all that ran passed, 1 a check failed, 3 nothing could be checked."""
    states = {result.state for result in results}
    if State.FAILED in states:
        return 1
    return 0 if State.PASSED in states else 3


def as_json(results: list[Result], device: dict) -> dict:
    """The report: {schema, versions, device, checks: [...], summary}."""
    count = Counter(result.state for result in results)
    checks = [
        {
            **asdict(result.check),
            "state": result.state.value,
            "reason": result.reason,
            "measured": result.measured,
        }
        for result in results
    ]
    return {
        "schema": SCHEMA,
        "versions": versions(),
        "device": device,
        "checks": checks,
        "summary": {state.value: count[state] for state in State},
    }


def print_table(results: list[Result], console: Console) -> None:
    """One row for each check that ran, then what else there is to say, each reason once."""
    colour = {State.PASSED: "green", State.FAILED: "red", State.SKIPPED: "yellow"}
    table = Table("check", "state", "error / bound", box=None)
    for result in results:
        if result.state is not State.SKIPPED:
            state = f"[{colour[result.state]}]{result.state.value}[/]"
            table.add_row(result.check.id, state, _worst(result.measured))
    console.print(table)
    reasons = Counter((result.state, result.reason) for result in results if result.reason)
    for (state, reason), number in reasons.items():
        console.print(f"[{colour[state]}]{number} {state.value}[/]: {escape(reason)}")
    counts = Counter(result.state for result in results)
    console.print(", ".join(f"{counts[state]} {state.value}" for state in State))


def _worst(measured: dict) -> str:
    pairs = [(m["error"], m["bound"]) for m in measured.values() if "bound" in m]
    if any(error is None for error, _ in pairs):
        return "not finite"
    return f"{max(error / bound for error, bound in pairs):.2f}" if pairs else ""
