# SPDX-License-Identifier: BSD-3-Clause
"""Draw a record's benchmarks, soaks and server loads with matplotlib."""

import io
import math
import re
from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("svg")

from matplotlib.figure import Figure

from strix_validate.reporting.record import Record

#: A placeholder that a page replaces by its text colour, so that plots are readable on a light and
#: on a dark background.
_INK = "#010203"
COLOURS = {
    "flash": "#2a7de1",
    "efficient": "#1a9c6b",
    "math": "#d9822b",
    "flash-attn": "#8a5cd6",
    "vllm": "#c23b5e",
}
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "strix-validate",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.edgecolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
#: The panels of a soak's plot: the column of the soak's series, and the label of the axis.
_PANELS = {
    "temperature_c": "°C",
    "clock_mhz": "MHz",
    "power_w": "W",
    "gpu_memory_mib": "GPU, MiB",
    "process_mib": "process, MiB",
    "speed": "speed",
}


def figures(record: Record) -> Iterator[Figure]:
    """Draw the measured values of a record.

    Yields:
        A figure for each soak, one for a server under load, one each for forward and backward rates
        by size and backend, and one for speed-ups if there are rates. If the record has no values
        for a figure, the figure is left out.
    """
    rates = {}
    speedups = {}
    servers = []
    soaks = []
    for check in record.checks:
        parts = check.id.split("/")
        measured = check.measured
        if "forward_tflops" in measured and measured.get("forward_ms"):
            rates[tuple(parts[1:])] = measured
        if check.id.startswith("bench/speedup/") and "forward" in measured:
            speedups[parts[2]] = measured
        if "tokens_per_second" in measured:
            servers.append(measured)
        if "series" in measured:
            soaks.append(measured["series"])
    with matplotlib.rc_context(_STYLE):
        for series in soaks:
            columns = _list_columns(series)
            if columns:
                yield _draw_soak(series, columns)
        if servers:
            yield _draw_server(servers)
        yield from _draw_directions(rates)
        if rates and speedups:
            yield _draw_speedups(speedups)


def svg(figure: Figure) -> str:
    """Return the figure as an SVG element for an HTML page."""
    stream = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    tag, _, body = text[text.index("<svg") :].partition(">")
    # The page sets the figure's size, so the figure's own size is removed.
    tag = re.sub(r' (width|height)="[^"]*"', "", tag)
    label = f'<svg role="img" aria-label="{figure.get_label()}" '
    tag = tag.replace("<svg ", label)
    return f"{tag}>{body}".replace(_INK, "currentColor")


def write(record: Record, folder: Path, stem: str = "bench") -> list[Path]:
    """Write the figures as PNG and SVG on a white background, and return the paths.

    The files are STEM-1.svg, STEM-1.png, STEM-2.svg and so on.
    """
    files = []
    with matplotlib.rc_context(_STYLE):
        for number, figure in enumerate(figures(record), 1):
            for suffix in ("svg", "png"):
                file = folder / f"{stem}-{number}.{suffix}"
                figure.savefig(file, dpi=150, facecolor="white", metadata={})
                files.append(file)
    return files


def _list_columns(series: dict[str, list]) -> list[str]:
    """Return the columns of a soak's series that have values to draw."""
    return [name for name in _PANELS if any(value is not None for value in series[name])]


def _draw_soak(series: dict[str, list], columns: list[str]) -> Figure:
    """Draw a soak over time, with a panel for each of the columns, of which there is at least one.

    The colour of a point shows which load ran. A dashed line is an event, such as a wrong result.
    """
    number = len(columns)
    figure = Figure(
        figsize=(8, 0.6 + 1.1 * number),
        layout="constrained",
        label="a soak",
    )
    panels = figure.subplots(number, 1, sharex=True, squeeze=False)[:, 0]
    for name, axes in zip(columns, panels, strict=True):
        _draw_panel(axes, name, series)
    panels[0].legend(
        frameon=False,
        labelcolor=_INK,
        ncols=5,
        fontsize=8,
        loc="lower right",
    )
    panels[-1].set_xlabel("minutes")
    return figure


def _draw_panel(axes, name: str, series: dict[str, list]) -> None:
    """Draw one measured quantity of a soak over time.

    Args:
        axes: matplotlib's axes.
        name: A column of the series.
        series: The columns.
    """
    minutes = series["minutes"]
    values = [_replace_none(value) for value in series[name]]
    axes.plot(minutes, values, color=_INK, linewidth=0.8)
    loads = dict.fromkeys(series["load"])
    for load, colour in zip(loads, COLOURS.values(), strict=False):
        rows = [row for row, running in enumerate(series["load"]) if running == load]
        axes.scatter(
            [minutes[row] for row in rows],
            [values[row] for row in rows],
            s=5,
            color=colour,
            label=load or "start",
        )
    for minute in series["events"]:
        axes.axvline(minute, color=COLOURS["vllm"], linestyle="--", linewidth=0.8)
    axes.set_ylabel(_PANELS[name], fontsize=9)


def _replace_none(value: float | None) -> float:
    """Return the value, or a NaN for None, which leaves a gap in a line."""
    return math.nan if value is None else value


def _draw_server(loads: list[dict]) -> Figure:
    """Draw tokens per second and time to the first token, by number of concurrent requests."""
    figure = Figure(figsize=(8, 3), layout="constrained", label="a server under load")
    requests = [str(load["requests"]) for load in loads]
    labels = {
        "tokens_per_second": "tokens / s",
        "first_token_ms": "ms to the first token",
    }
    for column, (name, label) in enumerate(labels.items(), 1):
        axes = figure.add_subplot(1, 2, column)
        heights = [load[name] for load in loads]
        axes.bar(requests, heights, 0.6, color=COLOURS["vllm"])
        axes.set_xlabel("requests at a time")
        axes.set_ylabel(label)
    return figure


def _draw_directions(rates: dict[tuple[str, ...], dict]) -> Iterator[Figure]:
    """Draw the rates of each direction, forward and backward, that was measured."""
    for direction in ("forward", "backward"):
        if any(f"{direction}_tflops" in measured for measured in rates.values()):
            yield _draw_rates(rates, direction)


def _draw_rates(rates: dict[tuple[str, ...], dict], direction: str) -> Figure:
    """Draw the rates of backends by size.

    Args:
        rates: Measured values by backend and case; a case is SIZE-MASK.
        direction: "forward" or "backward".
    """
    cases = [case for _, case in rates]
    sizes = list(dict.fromkeys(case.rsplit("-", 1)[0] for case in cases))
    measured_routes = {route for route, _ in rates}
    routes = [route for route in COLOURS if route in measured_routes]
    width = 0.8 / len(routes)
    first_offset = (1 - len(routes)) / 2
    figure = Figure(figsize=(8, 3.4), layout="constrained", label=f"{direction} rates")
    axes = None
    for column, mask in enumerate(("causal", "full"), 1):
        axes = figure.add_subplot(1, 2, column, sharey=axes)
        for number, route in enumerate(routes):
            offset = (first_offset + number) * width
            places = [place + offset for place in range(len(sizes))]
            heights = []
            for size in sizes:
                measured = rates.get((route, f"{size}-{mask}"), {})
                heights.append(measured.get(f"{direction}_tflops", 0))
            axes.bar(places, heights, 0.9 * width, color=COLOURS[route], label=route)
        axes.set_xticks(range(len(sizes)), sizes)
        axes.set_title(f"{direction}, {mask}", fontsize=11)
        if column == 1:
            axes.set_ylabel("TFLOP/s")
            axes.legend(frameon=False, labelcolor=_INK)
    return figure


def _draw_speedups(speedups: dict[str, dict]) -> Figure:
    """Draw the speed-up of flash over math by case, forward and backward."""
    cases = list(speedups)
    title = "speed-up of flash over math"
    figure = Figure(figsize=(8, 3), layout="constrained", label=title)
    axes = figure.add_subplot()
    for offset, direction, alpha in (
        (-0.2, "forward", 1.0),
        (0.2, "backward", 0.5),
    ):
        places = [place + offset for place in range(len(cases))]
        heights = [speedups[case].get(direction, 0) for case in cases]
        axes.bar(
            places,
            heights,
            0.38,
            color=COLOURS["flash"],
            alpha=alpha,
            label=direction,
        )
    axes.axhline(1, color=_INK, linewidth=0.8)
    labels = [case.replace("-", "\n") for case in cases]
    axes.set_xticks(range(len(cases)), labels)
    axes.set_ylabel("times math")
    axes.set_title(title, fontsize=11)
    axes.legend(frameon=False, labelcolor=_INK)
    return figure
