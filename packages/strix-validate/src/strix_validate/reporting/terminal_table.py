# SPDX-License-Identifier: BSD-3-Clause
"""A record on the terminal."""

import re
import textwrap

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from strix_validate.checks import Severity, State
from strix_validate.reporting import speeds
from strix_validate.reporting.record import CheckRecord, Record

_COLOUR = {
    State.PASSED: "green",
    State.FAILED: "red",
    State.SKIPPED: "yellow",
    Severity.WARNING: "yellow",
    Severity.INFO: "cyan",
}


def show(record: Record, console: Console) -> None:  # noqa: C901 (its parts in order)
    """Print a row for each check that ran, then the reasons, each once, fixes and totals."""
    table = Table("check", "state", "measured", box=None)
    timed = [check for check in record.checks if "forward_ms" in check.measured]
    for check in record.checks:
        if check.state is not State.SKIPPED and check not in timed:
            table.add_row(check.id, _coloured(_verdict(check)), escape(summary(check.measured)))
    if table.row_count:
        console.print(table)
    if timed:
        console.print(_speed_table(timed))
    _show_expected(record, console)
    reasons: dict[tuple[State | Severity, str], list[str]] = {}
    for check in record.checks:
        if check.reason:
            reasons.setdefault((_verdict(check), check.reason), []).append(check.id)
    for (verdict, reason), ids in reasons.items():
        # the table has the others
        skipped = verdict is State.SKIPPED
        names = f" ({textwrap.shorten(', '.join(ids), 240, placeholder=' …')})" if skipped else ""
        console.print(f"{_coloured(verdict, len(ids))}{escape(names)}: {escape(reason)}")
    for check in record.checks:
        if check.fix:
            after = "then reboot" if check.needs_reboot else "no reboot"
            line = f"{escape(check.id)}: [bold]{escape(check.fix)}[/]   # {after}"
            console.print(line, soft_wrap=True)
    console.print(", ".join(f"{number} {name}" for name, number in record.summary.items()))
    if record.unfinished:
        console.print(f"[red]interrupted[/]: {record.unfinished} checks did not run")


def _show_expected(record: Record, console: Console) -> None:
    """Print speeds beside what is expected of gfx1151, and the usual cause of each one that is off.

    A table of expectations that cannot be read costs these lines and no others.
    """
    try:
        table, explanations = speeds.table(record)
    except speeds.BadSpeeds as error:
        console.print(f"no speeds are compared: {escape(str(error))}")
        return
    if table.row_count:
        console.print(table)
    for line in explanations:
        console.print(f"[yellow]off[/]: {escape(line)}", soft_wrap=True)


def _verdict(check: CheckRecord) -> State | Severity:
    """Return a check's state; if it passed with a finding, the finding's severity."""
    return check.severity if check.state is State.PASSED and check.severity else check.state


def _coloured(verdict: State | Severity, number: int | None = None) -> str:
    words = verdict.value if number is None else f"{number} {verdict.value}"
    return f"[{_COLOUR[verdict]}]{words}[/]"


def _speed_table(checks: list[CheckRecord]) -> Table:
    """Tabulate milliseconds: median, 10th and 90th percentile; decoding has no backward pass."""
    head = ["forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "of peak", "MiB"]
    decodes = any("cache_gbps" in check.measured for check in checks)
    table = Table("benchmark", *head, *["GB/s"] * decodes, box=None)
    for check in checks:
        found = check.measured
        cells = []
        for direction in ("forward", "backward"):
            if f"{direction}_ms" not in found:
                cells += ["", ""]
                continue
            low, median, high = (found[f"{direction}_{part}ms"] for part in ("low_", "", "high_"))
            cells += [
                f"{median:.4g} ({low:.4g} to {high:.4g})",
                f"{found[f'{direction}_tflops']:.3g}",
            ]
        peak = found.get("forward_of_peak")
        cells += [f"{peak:.0%}" if peak else "", f"{found.get('memory_mib', 0):.0f}"]
        cells.append(f"{found['cache_gbps']:.0f}" if "cache_gbps" in found else "")
        table.add_row(check.id.removeprefix("bench/"), *cells[: len(table.columns) - 1])
    return table


#: By the last part of what a measured value is called.
_UNITS = {
    "ms": "ms",
    "gbps": "GB/s",
    "tflops": "TFLOP/s",
    "mib": "MiB",
    "gib": "GiB",
    "gb": "GB",
    "mhz": "MHz",
}


def summary(measured: dict) -> str:
    """Return the largest error as a fraction of its bound; without errors, the plain values."""
    pairs = [value for value in measured.values() if _is_pair(value)]
    if any(pair["error"] is None for pair in pairs):
        return "not finite"
    if pairs:
        return f"error {worst(measured):.2f} of the bound"
    plain = {
        name: value
        for name, value in measured.items()
        # the spread of repeats is the benchmarks' own table's
        if isinstance(value, int | float | str) and not re.search("_(low|high|repeats)", name)
    }
    return textwrap.shorten(", ".join(map(_worded, plain, plain.values())), 160, placeholder=" …")


def worst(measured: dict) -> float | None:
    """Return the largest error as a fraction of its bound; None if nothing finite was compared."""
    pairs = [(m["error"], m["bound"]) for m in measured.values() if _is_pair(m)]
    if not pairs or any(error is None for error, _ in pairs):
        return None
    pairs += [(m["rms"], m["rms_bound"]) for m in measured.values() if _is_pair(m) and "rms" in m]
    return max(e / b if b else float(e > 0) for e, b in pairs)


def _is_pair(value: object) -> bool:
    return isinstance(value, dict) and {"error", "bound"} <= value.keys()


def _worded(name: str, value: int | float | str) -> str:
    """Put a value after its name, and add its unit: "forward 1.2 ms" for "forward_ms"."""
    number = f"{value:.4g}" if isinstance(value, float) else str(value)
    if isinstance(value, float) and name.endswith("_of_peak"):
        number = f"{value:.1%}"
    rest, _, unit = name.rpartition("_")
    has_unit = rest and unit in _UNITS
    words = (rest if has_unit else name).replace("_", " ")  # not the value: x86_64
    return f"{words} {number} {_UNITS[unit]}" if has_unit else f"{words} {number}"
