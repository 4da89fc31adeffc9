# SPDX-License-Identifier: BSD-3-Clause
"""The checks of a soak, and their results so far."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from strix_validate.checks import Check, Result, State, make_result
from strix_validate.soak.story import LOADS, StepRecord, Story
from strix_validate.soak.telemetry import COLUMNS

#: The GPU counts as throttled if a load's median clock or rate in a turn is below this share of the
#: median in the load's first turn.
CLOCK_SHARE = 0.7
#: Loads whose speed depends on the GPU alone. The server's speed depends on its scheduler too.
_GPU_LOADS = ("attention", "product", "copy")
#: GPU loads whose speed is limited by the clock. The speed of copies is limited by memory.
_CLOCKED_LOADS = ("attention", "product")
#: More growth of memory than this, in MiB, counts as a leak if the median grows from each quarter
#: to the next. The growth is that from the first to the last quarter of the samples after the loads
#: are prepared.
_LEAK_MIB = 128.0
#: The growth of a load's median error, from the first quarter of its steps to the last, counts as a
#: drift if it exceeds both a factor, and a difference that is a share of the bound.
_DRIFT_FACTOR = 1.5
_DRIFT_FLOOR = 0.02
#: Minimum numbers of samples and of steps for a comparison of quarters.
_MIN_SAMPLES = 120
_MIN_STEPS = 8
#: Maximum number of points of each line in the plot.
POINTS = 600
#: Maximum number of the kernel's messages in a record, and maximum characters of each message.
_MESSAGES = 20
_MESSAGE_LENGTH = 200

_HUNG = "https://github.com/ROCm/legacy-rocm-build/issues/6165"
_CRASHED = "https://github.com/ROCm/legacy-rocm-build/issues/6598"
_SLOW = "https://github.com/ROCm/legacy-rocm-build/issues/5750"
_RACE = "https://github.com/ROCm/rocm-libraries/pull/12266"


def _check(name: str, title: str, catches: str) -> Check:
    return Check(f"soak/{name}", title, f"{title}. Catches {catches}")


WHOLE = _check(
    "whole",
    "The loads run for the whole time",
    f"a hang ({_HUNG}) or a crash ({_CRASHED}) that occurs only after minutes or an hour",
)
RESULTS = {
    name: _check(
        name,
        f"Each result of the load {name} is right",
        f"a result that is wrong once in thousands of times, or only when the GPU is hot: {_RACE}",
    )
    for name in LOADS
}
DRIFT = _check(
    "drift",
    "The errors of results do not grow",
    f"errors that grow with time but stay within their bound: {_RACE}",
)
THROTTLING = _check(
    "throttling",
    "Clock and speed stay near those of the first turn",
    f"cooling or a power limit that costs speed after minutes: {_SLOW}",
)
MEMORY = _check(
    "memory",
    "The memory of the process and of the GPU does not grow",
    "a leak, such as that of copies in ROCm 7.1.1: "
    "https://github.com/blakeblackshear/frigate/issues/23985",
)
KERNEL = _check(
    "kernel",
    "The kernel reports no fault of the GPU or of the memory",
    f"a reset or a page fault after which the loads continue: {_CRASHED}",
)
SENSORS = _check(
    "sensors",
    "Temperature, clocks, power and memory are recorded",
    f"nothing: the check is skipped without sensors. The readings explain other faults: {_SLOW}",
)
CHECKS = [WHOLE, *RESULTS.values(), DRIFT, THROTTLING, MEMORY, KERNEL, SENSORS]


def judge(story: Story) -> list[Result]:
    """Return the results so far.

    WHOLE has no result while the soak runs, or if it was interrupted.
    """
    if story.unable:
        return [Result(check, State.SKIPPED, story.unable) for check in CHECKS]
    results = [_judge_results(story, name, check) for name, check in RESULTS.items()]
    results.append(_judge_drift(story))
    results.append(_judge_throttling(story))
    results.append(_judge_memory(story))
    results.append(_judge_kernel(story))
    results.append(_judge_sensors(story))
    measured = {"minutes": _count_minutes(story)}
    if story.ending:
        whole = Result(WHOLE, State.FAILED, story.ending, measured, fix=story.advice)
        return [whole, *results]
    if story.is_whole:
        return [Result(WHOLE, State.PASSED, "", measured), *results]
    return results


def _count_minutes(story: Story) -> float:
    if not story.samples:
        return 0.0
    return round(story.samples[-1]["seconds"] / 60, 1)


def _judge_results(story: Story, name: str, check: Check) -> Result:
    """Judge the results of a load."""
    steps = story.steps.get(name)
    if not steps:
        return Result(check, State.SKIPPED, story.absent.get(name, "the load completed no step"))
    unit = story.units[name]
    rates = [step.rate for step in steps]
    errors = [step.error for step in steps if step.error is not None]
    faulty = [step for step in steps if step.is_faulty]
    measured = {
        "steps": len(steps),
        "results": sum(step.results for step in steps),
        "wrong_steps": len(faulty),
        "largest_error_of_bound": max(errors) if len(errors) == len(steps) else None,
        f"median_{unit}": statistics.median(rates),
        f"lowest_{unit}": min(rates),
    }
    faults = []
    if faulty:
        first = faulty[0]
        number = steps.index(first) + 1
        faults.append(
            f"faults in {len(faulty)} of {len(steps)} steps, the first of them step {number} after "
            f"{first.at / 60:.1f} minutes: {_describe_fault(first)}"
        )
    return make_result(check, faults, measured)


def _describe_fault(step: StepRecord) -> str:
    if step.fault:
        return step.fault
    if step.error is None:
        return "a result is not a number"
    if step.error > 1:
        return f"an error is {step.error:.3g} times its bound"
    return (
        f"{step.changed} of {step.results} results differ in some bits from what they must equal: "
        "the first result or, in a copy, the source"
    )


def find_quarter_medians(values: Sequence[float]) -> list[float]:
    """Return the medians of the four quarters of a series of at least four values."""
    size = len(values) / 4
    medians = []
    for number in range(4):
        part = values[round(number * size) : round((number + 1) * size)]
        medians.append(statistics.median(part))
    return medians


def _judge_drift(story: Story) -> Result:
    """Judge whether errors grow from the first to the last quarter."""
    measured: dict = {}
    faults = []
    for name, steps in story.steps.items():
        errors = [step.error for step in steps if step.error is not None]
        if len(errors) < _MIN_STEPS:
            continue
        first, _, _, last = find_quarter_medians(errors)
        measured[f"{name}_first"] = first
        measured[f"{name}_last"] = last
        if last > max(_DRIFT_FACTOR * first, first + _DRIFT_FLOOR):
            faults.append(f"the error of {name} grows from {first:.2f} to {last:.2f} of its bound")
    if not measured:
        return Result(DRIFT, State.SKIPPED, f"no load made {_MIN_STEPS} steps")
    return make_result(DRIFT, faults, measured)


def _judge_throttling(story: Story) -> Result:
    """Judge whether clock and speed fall from the first turn to a later one."""
    if story.device.type != "gpu":
        return Result(THROTTLING, State.SKIPPED, "a CPU's clock also depends on other programs")
    measured: dict = {}
    faults = []
    for series in _list_series(story):
        if len(series.turns) < 2:
            continue
        first, *later = series.turns
        lowest = min(later, key=lambda turn: turn.median)
        measured[f"{series.load}_first_{series.unit}"] = first.median
        measured[f"{series.load}_lowest_{series.unit}"] = lowest.median
        if lowest.median < CLOCK_SHARE * first.median:
            faults.append(
                f"{series.load}_{series.unit}: {first.median:.4g} in the first turn, "
                f"{lowest.median:.4g} after {lowest.at / 60:.1f} minutes"
            )
    if not measured:
        return Result(THROTTLING, State.SKIPPED, "no load had a second turn")
    limits = _collect_limits(story)
    if limits:
        measured["limited_by"] = ", ".join(limits)
    result = make_result(THROTTLING, faults, measured)
    if faults:
        fix = (
            "clean the fans and let air through; check the power limit in the BIOS, and the output "
            "of cat /sys/firmware/acpi/platform_profile; another program on the GPU slows it too"
        )
        result = replace(result, fix=fix)
    return result


def _collect_limits(story: Story) -> list[str]:
    """Return the names of the limits that slowed the GPU, sorted."""
    limits: set[str] = set()
    for row in story.samples:
        if row.get("limited_by"):
            limits.update(row["limited_by"].split(", "))
    return sorted(limits)


@dataclass(frozen=True)
class _Turn:
    """A turn of a load.

    Attributes:
        at: The second of the turn's first value.
        median: The median of the turn's values.
    """

    at: float
    median: float


@dataclass(frozen=True)
class _Series:
    """The rate or the clock of a load, by its turns.

    Attributes:
        load: The load.
        unit: The unit of the values.
        turns: The load's turns, in order.
    """

    load: str
    unit: str
    turns: list[_Turn]


def _list_series(story: Story) -> Iterator[_Series]:
    """Yield the rate of each load in _GPU_LOADS, and the clock if it limits the load.

    A load that completed no step is left out.
    """
    for name in _GPU_LOADS:
        steps = story.steps.get(name)
        if not steps:
            continue
        rates = [(step.turn, step.at, step.rate) for step in steps]
        yield _Series(name, story.units[name], _group_by_turn(rates))
        if name in _CLOCKED_LOADS:
            rows = [row for row in story.samples if row["load"] == name]
            clocks = [(row["turn"], row["seconds"], row.get("clock_mhz")) for row in rows]
            yield _Series(name, "mhz", _group_by_turn(clocks))


def _group_by_turn(values: Iterable[tuple[int, float, float | None]]) -> list[_Turn]:
    """Return the turns of a series. A turn without values is left out.

    Args:
        values: For each sample, the number of the turn, the second, and the value or None.
    """
    begins: dict[int, float] = {}
    by_turn: dict[int, list[float]] = {}
    for turn, at, value in values:
        if value is not None:
            begins.setdefault(turn, at)
            by_turn.setdefault(turn, []).append(value)
    return [_Turn(begins[turn], statistics.median(by_turn[turn])) for turn in by_turn]


def _judge_memory(story: Story) -> Result:
    """Judge whether memory grows from quarter to quarter after the loads are prepared."""
    samples = []
    if story.prepared_at is not None:
        samples = [row for row in story.samples if row["seconds"] >= story.prepared_at]
    measured: dict = {}
    faults = []
    for label in ("process", "gpu_memory"):
        values = _list_numbers(samples, f"{label}_mib")
        if len(values) < _MIN_SAMPLES:
            continue
        medians = find_quarter_medians(values)
        measured[f"{label}_first_mib"] = medians[0]
        measured[f"{label}_last_mib"] = medians[-1]
        grows = medians == sorted(set(medians))
        if grows and medians[-1] - medians[0] > _LEAK_MIB:
            listed = ", ".join(f"{median:.0f}" for median in medians)
            name = label.removesuffix("_memory")
            faults.append(f"the memory of the {name} grows from quarter to quarter: {listed} MiB")
    if not measured:
        return Result(
            MEMORY,
            State.SKIPPED,
            f"fewer than {_MIN_SAMPLES} seconds were recorded after the loads were prepared",
        )
    return make_result(MEMORY, faults, measured)


def _list_numbers(rows: list[dict], name: str) -> list[float]:
    """Return a column of rows, without missing values."""
    values = [row.get(name) for row in rows]
    return [value for value in values if value is not None]


def _judge_kernel(story: Story) -> Result:
    """Judge the kernel's messages, each of which is a fault."""
    if story.kernel_absent:
        return Result(KERNEL, State.SKIPPED, story.kernel_absent)
    faults = []
    if story.kernel:
        at, message = story.kernel[0]
        faults.append(f"after {at / 60:.1f} minutes: {message[:_MESSAGE_LENGTH]}")
    if len(story.kernel) > 1:
        faults.append(f"{len(story.kernel) - 1} more messages")
    messages = []
    for at, message in story.kernel[:_MESSAGES]:
        messages.append(f"{at:.0f} s: {message[:_MESSAGE_LENGTH]}")
    return make_result(KERNEL, faults, {"faults": len(story.kernel), "messages": messages})


def _judge_sensors(story: Story) -> Result:
    """Judge whether the sensors were read, and record the series of their values."""
    measured: dict = {}
    for name in COLUMNS:
        values = _list_numbers(story.samples, name)
        if values:
            # The unit comes last, as in clock_least_mhz.
            label, _, unit = name.rpartition("_")
            measured[f"{label}_least_{unit}"] = min(values)
            measured[f"{label}_most_{unit}"] = max(values)
    is_read = bool(measured)
    measured["series"] = thin_samples(story)
    if not is_read:
        reason = story.sensors_absent or "the sensors gave no reading"
        return Result(SENSORS, State.SKIPPED, reason, measured)
    return Result(SENSORS, State.PASSED, "", measured)


def thin_samples(story: Story, points: int = POINTS) -> dict[str, list]:
    """Return the samples as columns for a plot.

    Args:
        story: The course of the soak.
        points: The maximum number of points; each stands for a span of consecutive samples.

    Returns:
        Columns by name. The sensors' columns and process_mib have the mean of each span. minutes is
        the beginning of each span, and load is the load that runs then. speed is the median rate of
        the turn in which the span ends, as a share of the median rate in the first turn of the same
        load. A missing value is None.
        events has the times of events in minutes, at most as many as points.
    """
    span = max(1, math.ceil(len(story.samples) / points))
    groups = [story.samples[i : i + span] for i in range(0, len(story.samples), span)]
    speeds = _find_speeds(story)
    series: dict[str, list] = {}
    for name in (*COLUMNS, "process_mib"):
        series[name] = [_find_mean(group, name) for group in groups]
    series["minutes"] = [round(group[0]["seconds"] / 60, 3) for group in groups]
    series["load"] = [group[0]["load"] for group in groups]
    series["speed"] = [speeds.get(group[-1]["turn"]) for group in groups]
    events = [row["seconds"] for row in story.samples if row.get("event")]
    series["events"] = [round(at / 60, 3) for at in events[:points]]
    return series


def _find_mean(rows: list[dict], name: str) -> float | None:
    values = _list_numbers(rows, name)
    return round(statistics.fmean(values), 1) if values else None


def _find_speeds(story: Story) -> dict[int, float]:
    """Return the median rate of each turn as a share of the rate of the load's first turn."""
    shares: dict[int, float] = {}
    for steps in story.steps.values():
        by_turn: dict[int, list[float]] = {}
        for step in steps:
            by_turn.setdefault(step.turn, []).append(step.rate)
        medians = {turn: statistics.median(rates) for turn, rates in by_turn.items()}
        first = next(iter(medians.values()), 0.0)
        if not first:
            continue
        for turn, median in medians.items():
            shares[turn] = round(median / first, 3)
    return shares
