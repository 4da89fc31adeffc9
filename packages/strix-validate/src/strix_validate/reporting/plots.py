# SPDX-License-Identifier: BSD-3-Clause
"""Plots of a record's benchmarks, by matplotlib."""

import io
import re
from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("svg")

from matplotlib.figure import Figure

from strix_validate.reporting.record import Record

#: Replaced by the page's own text colour, so that the plot can be read on dark and light.
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
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), _INK
    ),
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def figures(record: Record) -> Iterator[Figure]:
    """Draw a soak; a server under load; rates by size and backend, both directions; speed-up.

    None of what was not measured.
    """
    rates = {
        tuple(check.id.split("/")[1:]): check.measured
        for check in record.checks
        if "forward_tflops" in check.measured and check.measured.get("forward_ms")
    }
    loads = [check.measured for check in record.checks if "tokens_per_second" in check.measured]
    speedups = {
        check.id.split("/")[2]: check.measured
        for check in record.checks
        if check.id.startswith("bench/speedup/") and "forward" in check.measured
    }
    soaks = [check.measured["series"] for check in record.checks if "series" in check.measured]
    with matplotlib.rc_context(_STYLE):
        for series in soaks:
            yield _soak(series)
        if loads:
            yield _loads(loads)
        for direction in ("forward", "backward") if rates else ():
            yield _rates(rates, direction)
        if rates and speedups:
            yield _speedups(speedups)


def svg(figure: Figure) -> str:
    """Return the figure as an SVG element to stand in a page."""
    stream = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    tag, _, rest = text[text.index("<svg") :].partition(">")
    tag = re.sub(r' (width|height)="[^"]*"', "", tag)  # the page sets the size
    label = f'<svg role="img" aria-label="{figure.get_label()}" '
    return f"{tag.replace('<svg ', label)}>{rest}".replace(_INK, "currentColor")


def write(record: Record, folder: Path, stem: str = "bench") -> list[Path]:
    """Write PNG and SVG files of the figures, for use elsewhere, on white; return their paths.

    They are called STEM-1.svg and so on.
    """
    files = []
    with matplotlib.rc_context(_STYLE):
        for number, figure in enumerate(figures(record), 1):
            for suffix in ("svg", "png"):
                files.append(folder / f"{stem}-{number}.{suffix}")
                figure.savefig(files[-1], dpi=150, facecolor="white", metadata={})
    return files


#: Panels of a soak: a column of its series, and the words beside its axis.
_PANELS = {
    "temperature_c": "°C",
    "clock_mhz": "MHz",
    "power_w": "W",
    "gpu_memory_mib": "GPU, MiB",
    "process_mib": "process, MiB",
    "speed": "speed",
}


def _soak(series: dict[str, list]) -> Figure:
    """Draw the course of a soak: a panel for each quantity that was read, over minutes.

    A span has the colour of its load; a dashed line is an event, such as a wrong result.
    """
    shown = [name for name in _PANELS if any(value is not None for value in series[name])]
    number = max(1, len(shown))
    figure = Figure(figsize=(8, 0.6 + 1.1 * number), layout="constrained", label="a soak")
    panels = figure.subplots(number, 1, sharex=True, squeeze=False)[:, 0]
    colours = dict(zip(dict.fromkeys(series["load"]), COLOURS.values(), strict=False))
    for name, axes in zip(shown, panels, strict=False):
        values = [float("nan") if value is None else value for value in series[name]]
        axes.plot(series["minutes"], values, color=_INK, linewidth=0.8)
        for load, colour in colours.items():
            points = [
                (minute, value)
                for minute, value, at in zip(series["minutes"], values, series["load"], strict=True)
                if at == load
            ]
            axes.scatter(*zip(*points, strict=True), s=5, color=colour, label=load or "start")
        for minute in series["events"]:
            axes.axvline(minute, color=COLOURS["vllm"], linestyle="--", linewidth=0.8)
        axes.set_ylabel(_PANELS[name], fontsize=9)
    if shown:
        panels[0].legend(frameon=False, labelcolor=_INK, ncols=5, fontsize=8, loc="lower right")
    panels[-1].set_xlabel("minutes")
    return figure


def _loads(loads: list[dict]) -> Figure:
    """Draw a server's tokens a second and time to the first one, by requests at a time."""
    figure = Figure(figsize=(8, 3), layout="constrained", label="a server under load")
    requests = [str(load["requests"]) for load in loads]
    for place, (name, words) in enumerate(
        (("tokens_per_second", "tokens / s"), ("first_token_ms", "ms to the first token")), 1
    ):
        axes = figure.add_subplot(1, 2, place)
        axes.bar(requests, [load[name] for load in loads], 0.6, color=COLOURS["vllm"])
        axes.set_xlabel("requests at a time")
        axes.set_ylabel(words)
    return figure


def _rates(rates: dict, direction: str) -> Figure:
    sizes = list(dict.fromkeys(case.rsplit("-", 1)[0] for _, case in rates))
    figure = Figure(figsize=(8, 3.4), layout="constrained", label=f"{direction} rates")
    left = None
    shown = [route for route in COLOURS if route in {route for route, _ in rates}]
    width = 0.8 / len(shown)
    for number, mask in enumerate(("causal", "full"), 1):
        axes = left = figure.add_subplot(1, 2, number, sharey=left)
        for offset, route in enumerate(shown):
            found = [rates.get((route, f"{size}-{mask}"), {}) for size in sizes]
            heights = [x.get(f"{direction}_tflops", 0) for x in found]
            first = (1 - len(shown)) / 2
            places = [place + (first + offset) * width for place in range(len(sizes))]
            axes.bar(places, heights, 0.9 * width, color=COLOURS[route], label=route)
        axes.set_xticks(range(len(sizes)), sizes)
        axes.set_title(f"{direction}, {mask}", fontsize=11)
        if number == 1:
            axes.set_ylabel("TFLOP/s")
            axes.legend(frameon=False, labelcolor=_INK)
    return figure


def _speedups(speedups: dict) -> Figure:
    cases = list(speedups)
    figure = Figure(figsize=(8, 3), layout="constrained", label="speed-up of flash over math")
    axes = figure.add_subplot()
    for offset, direction, alpha in ((-0.2, "forward", 1.0), (0.2, "backward", 0.5)):
        places = [place + offset for place in range(len(cases))]
        heights = [speedups[case].get(direction, 0) for case in cases]
        axes.bar(places, heights, 0.38, color=COLOURS["flash"], alpha=alpha, label=direction)
    axes.axhline(1, color=_INK, linewidth=0.8)
    axes.set_xticks(range(len(cases)), [case.replace("-", "\n") for case in cases])
    axes.set_ylabel("times math")
    axes.set_title("speed-up of flash over math", fontsize=11)
    axes.legend(frameon=False, labelcolor=_INK)
    return figure
