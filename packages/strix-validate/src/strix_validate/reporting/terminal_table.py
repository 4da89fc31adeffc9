# SPDX-License-Identifier: BSD-3-Clause
"""Print a record on the terminal."""

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
#: Units by the last part of a measured value's name.
_UNITS = {
    "ms": "ms",
    "gbps": "GB/s",
    "tflops": "TFLOP/s",
    "mib": "MiB",
    "gib": "GiB",
    "gb": "GB",
    "mhz": "MHz",
}


def show(record: Record, console: Console) -> None:
    """Print a row for each check that ran, then speeds, distinct reasons, fixes and the totals."""
    timed = [check for check in record.checks if "forward_ms" in check.measured]
    table = Table("check", "state", "measured", box=None)
    for check in record.checks:
        if check.state is not State.SKIPPED and check not in timed:
            verdict = _colour(_find_verdict(check))
            table.add_row(check.id, verdict, escape(describe_measured(check.measured)))
    if table.row_count:
        console.print(table)
    if timed:
        console.print(_make_speed_table(timed))
    _show_expected(record, console)
    _show_reasons(record, console)
    _show_fixes(record, console)
    totals = [f"{number} {name}" for name, number in record.summary.items()]
    console.print(", ".join(totals))
    if record.unfinished:
        console.print(f"[red]interrupted[/]: {record.unfinished} checks did not run")


def _show_expected(record: Record, console: Console) -> None:
    """Print measured and expected speeds, and the usual cause of each speed outside its range.

    If speeds.toml cannot be read, print why instead.
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


def _show_reasons(record: Record, console: Console) -> None:
    """Print each reason once, with the number of its checks."""
    reasons: dict[tuple[State | Severity, str], list[str]] = {}
    for check in record.checks:
        if check.reason:
            key = (_find_verdict(check), check.reason)
            reasons.setdefault(key, []).append(check.id)
    for (verdict, reason), ids in reasons.items():
        names = ""
        if verdict is State.SKIPPED:
            # The table of checks has no skipped checks, so their ids are listed here.
            listed = textwrap.shorten(", ".join(ids), 240, placeholder=" …")
            names = f" ({listed})"
        label = _colour(verdict, len(ids))
        console.print(f"{label}{escape(names)}: {escape(reason)}")


def _show_fixes(record: Record, console: Console) -> None:
    for check in record.checks:
        if check.fix:
            after = "then reboot" if check.needs_reboot else "no reboot"
            line = f"{escape(check.id)}: [bold]{escape(check.fix)}[/]   # {after}"
            console.print(line, soft_wrap=True)


def _find_verdict(check: CheckRecord) -> State | Severity:
    """Return a check's state; if it passed with a finding, the finding's severity."""
    if check.state is State.PASSED and check.severity:
        return check.severity
    return check.state


def _colour(verdict: State | Severity, number: int | None = None) -> str:
    """Return a verdict in its colour, such as "failed" or, with a number, "3 failed"."""
    words = verdict.value
    if number is not None:
        words = f"{number} {words}"
    return f"[{_COLOUR[verdict]}]{words}[/]"


def _make_speed_table(checks: list[CheckRecord]) -> Table:
    """Return the table of benchmarks. Cells of passes that were not measured are empty."""
    columns = [
        "benchmark",
        "forward ms",
        "TFLOP/s",
        "backward ms",
        "TFLOP/s",
        "of peak",
        "MiB",
    ]
    has_cache_rate = any("cache_gbps" in check.measured for check in checks)
    if has_cache_rate:
        columns.append("GB/s")
    table = Table(*columns, box=None)
    for check in checks:
        measured = check.measured
        peak = measured.get("forward_of_peak")
        cells = [
            check.id.removeprefix("bench/"),
            *_format_times(measured, "forward"),
            *_format_times(measured, "backward"),
            f"{peak:.0%}" if peak else "",
            f"{measured.get('memory_mib', 0):.0f}",
        ]
        if "cache_gbps" in measured:
            cells.append(f"{measured['cache_gbps']:.0f}")
        table.add_row(*cells)
    return table


def _format_times(measured: dict, direction: str) -> tuple[str, str]:
    """Return a pass's times in milliseconds (median, 10th and 90th percentile), and its rate."""
    if f"{direction}_ms" not in measured:
        return "", ""
    median = measured[f"{direction}_ms"]
    low = measured[f"{direction}_low_ms"]
    high = measured[f"{direction}_high_ms"]
    rate = measured[f"{direction}_tflops"]
    return f"{median:.4g} ({low:.4g} to {high:.4g})", f"{rate:.3g}"


def describe_measured(measured: dict) -> str:
    """Return the largest error as a fraction of its bound; the values if nothing was compared."""
    comparisons = [value for value in measured.values() if _is_comparison(value)]
    if any(comparison["error"] is None for comparison in comparisons):
        return "not finite"
    if comparisons:
        return f"error {find_worst_share(measured):.2f} of the bound"
    words = []
    for name, value in measured.items():
        # The spread of repeats is shown in the table of benchmarks only.
        is_spread = re.search("_(low|high|repeats)", name)
        if isinstance(value, int | float | str) and not is_spread:
            words.append(_format_value(name, value))
    return textwrap.shorten(", ".join(words), 160, placeholder=" …")


def find_worst_share(measured: dict) -> float | None:
    """Return the largest error or root mean square error as a fraction of its bound.

    The result is None if nothing was compared, or if an error is not finite.
    """
    comparisons = [value for value in measured.values() if _is_comparison(value)]
    if not comparisons:
        return None
    fractions = []
    for comparison in comparisons:
        if comparison["error"] is None:
            return None
        fractions.append(_divide(comparison["error"], comparison["bound"]))
        if "rms" in comparison:
            fractions.append(_divide(comparison["rms"], comparison["rms_bound"]))
    return max(fractions)


def _divide(error: float, bound: float) -> float:
    """Return an error as a fraction of its bound; for a bound of 0, 1 if the error is not 0."""
    return error / bound if bound else float(error > 0)


def _is_comparison(value: object) -> bool:
    return isinstance(value, dict) and {"error", "bound"} <= value.keys()


def _format_value(name: str, value: int | float | str) -> str:
    """Return a value after its name, with its unit: "forward 1.2 ms" for "forward_ms"."""
    if not isinstance(value, float):
        number = str(value)
    elif name.endswith("_of_peak"):
        number = f"{value:.1%}"
    else:
        number = f"{value:.4g}"
    # Only the name loses its underscores; a value such as x86_64 keeps them.
    label, _, suffix = name.rpartition("_")
    if label and suffix in _UNITS:
        return f"{label.replace('_', ' ')} {number} {_UNITS[suffix]}"
    return f"{name.replace('_', ' ')} {number}"
