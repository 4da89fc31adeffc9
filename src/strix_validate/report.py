# SPDX-License-Identifier: BSD-3-Clause
"""Results of checks, as JSON and as a table."""

import importlib.metadata
from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import Enum

from rich.console import Console
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
    holds the numbers behind the state.
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


def print_table(results: list[Result], device: dict, console: Console) -> None:
    """One row for each check, then the counts; skips and failures with their reason."""
    colour = {State.PASSED: "green", State.FAILED: "red", State.SKIPPED: "yellow"}
    table = Table("check", "state", "worst", "reason", box=None)
    for result in results:
        table.add_row(
            result.check.id,
            f"[{colour[result.state]}]{result.state.value}[/]",
            _worst(result.measured),
            result.reason,
        )
    console.print(table)
    summary = as_json(results, device)["summary"]
    console.print(", ".join(f"{number} {state}" for state, number in summary.items()))


def _worst(measured: dict) -> str:
    ratios = [m["error"] / m["bound"] for m in measured.values() if "bound" in m]
    return f"{max(ratios):.2f} of bound" if ratios else ""
