# SPDX-License-Identifier: BSD-3-Clause
"""What a soak has shown: its checks, judged as far as it has come."""

import statistics
from collections.abc import Iterable, Iterator, Sequence

from strix_validate.checks import Check, Result, State, judged
from strix_validate.soak.story import LOADS, StepRecord, Story
from strix_validate.soak.telemetry import COLUMNS

#: Clock and rate of a turn as a share of the first turn's, below which the GPU throttles.
CLOCK_SHARE = 0.7
#: Loads whose speed is the GPU's, and those of them that its clock limits: copies wait for memory,
#: and the server for its scheduler, too.
_OF_GPU, _OF_CLOCK = ("attention", "product", "copy"), ("attention", "product")
#: Growth from the first to the last quarter, in MiB and as a factor, that is a leak or a drift.
_LEAK_MIB, _DRIFT_FACTOR, _DRIFT_FLOOR = 128.0, 1.5, 0.02
#: Samples and steps below which quarters say nothing.
_FEW_SAMPLES, _FEW_STEPS = 120, 8
#: Points of each line of the plot.
POINTS = 600

_HUNG = "https://github.com/ROCm/legacy-rocm-build/issues/6165"
_CRASHED = "https://github.com/ROCm/legacy-rocm-build/issues/6598"
_SLOW = "https://github.com/ROCm/legacy-rocm-build/issues/5750"
_RACE = "https://github.com/ROCm/rocm-libraries/pull/12266"


def _check(name: str, title: str, catches: str) -> Check:
    return Check(f"soak/{name}", title, f"{title}. Catches {catches}")


WHOLE = _check(
    "whole",
    "The loads run for the whole time",
    f"a hang ({_HUNG}) or a crash ({_CRASHED}) that comes after minutes or an hour",
)
RESULTS = {
    name: _check(
        name,
        f"Each result of the load {name} is the right one",
        f"a result that is wrong once in thousands, or only when the GPU is hot: {_RACE}",
    )
    for name in LOADS
}
DRIFT = _check(
    "drift",
    "The errors of results do not grow",
    f"numbers that get worse with time and stay within their bound: {_RACE}",
)
THROTTLING = _check(
    "throttling",
    "Clock and speed stay near those of the first turn",
    f"cooling or a power limit that costs speed after minutes: {_SLOW}",
)
MEMORY = _check(
    "memory",
    "The memory of the process and of the GPU does not grow",
    "a leak, as copies of ROCm 7.1.1 had: https://github.com/blakeblackshear/frigate/issues/23985",
)
KERNEL = _check(
    "kernel",
    "The kernel reports no fault of the GPU or of the memory",
    f"a reset or a page fault that the loads outlive: {_CRASHED}",
)
SENSORS = _check(
    "sensors",
    "Temperature, clocks, power and memory are recorded",
    f"sensors that cannot be read: {_SLOW}",
)
CHECKS = [WHOLE, *RESULTS.values(), DRIFT, THROTTLING, MEMORY, KERNEL, SENSORS]


def judge(story: Story) -> list[Result]:
    """Return the results so far; WHOLE has none before the end, nor after an interruption."""
    if story.unable:
        return [Result(check, State.SKIPPED, story.unable) for check in CHECKS]
    results = [_judge_results(story, name, check) for name, check in RESULTS.items()]
    judges = (_judge_drift, _judge_throttling, _judge_memory, _judge_kernel, _judge_sensors)
    results += [each(story) for each in judges]
    if story.ending:
        measured = {"minutes": _minutes(story)}
        whole = Result(WHOLE, State.FAILED, story.ending, measured, fix=story.advice)
    elif story.is_whole:
        whole = Result(WHOLE, State.PASSED, "", {"minutes": _minutes(story)})
    else:
        return results
    return [whole, *results]


def _minutes(story: Story) -> float:
    return round(story.samples[-1]["seconds"] / 60, 1) if story.samples else 0.0


def _judge_results(story: Story, name: str, check: Check) -> Result:
    steps = story.steps.get(name)
    if not steps:
        return Result(check, State.SKIPPED, story.absent.get(name, "its turn did not come"))
    faulty = [step for step in steps if step.is_faulty]
    rates, unit = [step.rate for step in steps], story.units[name]
    errors = [step.error for step in steps if step.error is not None]
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
        number = steps.index(faulty[0]) + 1
        faults.append(
            f"{len(faulty)} of {len(steps)} steps, the first of them step {number} after "
            f"{faulty[0].at / 60:.1f} minutes: {_describe_fault(faulty[0])}"
        )
    return judged(check, faults, measured)


def _describe_fault(step: StepRecord) -> str:
    if step.fault:
        return step.fault
    if step.error is None:
        return "a result that is no number"
    if step.error > 1:
        return f"an error of {step.error:.3g} times its bound"
    return (
        f"{step.changed} of {step.results} results differ from the first one bit for bit, as the "
        "first ones did not among themselves"
    )


def quarters(values: Sequence[float]) -> list[float]:
    """Return the medians of the four quarters of a series."""
    size = len(values) / 4
    parts = [values[round(i * size) : round((i + 1) * size)] for i in range(4)]
    return [statistics.median(part) for part in parts]


def _judge_drift(story: Story) -> Result:
    measured: dict = {}
    faults = []
    for name, steps in story.steps.items():
        errors = [step.error for step in steps if step.error is not None]
        if len(errors) < _FEW_STEPS:
            continue
        first, *_, last = quarters(errors)
        measured |= {f"{name}_first": first, f"{name}_last": last}
        if last > max(_DRIFT_FACTOR * first, first + _DRIFT_FLOOR):
            faults.append(f"{name}: from {first:.2f} to {last:.2f} of the bound")
    if not measured:
        return Result(DRIFT, State.SKIPPED, f"no load made {_FEW_STEPS} steps")
    return judged(DRIFT, faults, measured)


def _judge_throttling(story: Story) -> Result:
    if story.device.type != "gpu":
        return Result(THROTTLING, State.SKIPPED, "a CPU's clock is that of all that runs on it")
    measured: dict = {}
    faults = []
    for name, unit, turns in _series_of_turns(story):
        if len(turns) < 2:
            continue
        (_, first), *later = turns
        at, lowest = min(later, key=lambda turn: turn[1])
        label = f"{name}_{unit}"
        measured |= {f"{name}_first_{unit}": first, f"{name}_lowest_{unit}": lowest}
        if lowest < CLOCK_SHARE * first:
            faults.append(
                f"{label}: {first:.4g} in the first turn, {lowest:.4g} after {at / 60:.1f} minutes"
            )
    if not measured:
        return Result(THROTTLING, State.SKIPPED, "no load had a second turn")
    limits = sorted({name for row in story.samples for name in _limits(row)})
    if limits:
        measured["limited_by"] = ", ".join(limits)
    fix = ""
    if faults:
        fix = (
            "clean the fans and let air through, look at the power limit in the BIOS and at "
            "cat /sys/firmware/acpi/platform_profile; another program on the GPU slows it as well"
        )
    result = judged(THROTTLING, faults, measured)
    return Result(result.check, result.state, result.reason, result.measured, fix=fix)


def _limits(row: dict) -> list[str]:
    return (row.get("limited_by") or "").split(", ") if row.get("limited_by") else []


def _series_of_turns(story: Story) -> Iterator[tuple[str, str, list[tuple[float, float]]]]:
    """Yield each load's rate and, where it limits the load, the clock: name, unit, and turns.

    A turn is the second in which it begins, and the median of its values.
    """
    for name in _OF_GPU:
        rates = [(step.turn, step.at, step.rate) for step in story.steps.get(name, [])]
        if not rates:
            continue
        yield name, story.units[name], list(_turns(rates))
        if name in _OF_CLOCK:
            rows = [row for row in story.samples if row["load"] == name]
            clocks = [(row["turn"], row["seconds"], row.get("clock_mhz")) for row in rows]
            yield name, "mhz", list(_turns(clocks))


def _turns(values: Iterable[tuple]) -> Iterator[tuple[float, float]]:
    """Group (turn, second, value) by turn; yield the first second and the median of its values."""
    by_turn: dict[int, list[tuple[float, float]]] = {}
    for turn, at, value in values:
        if value is not None:
            by_turn.setdefault(turn, []).append((at, value))
    for pairs in by_turn.values():
        yield pairs[0][0], statistics.median(value for _, value in pairs)


def _judge_memory(story: Story) -> Result:
    begin = float("inf") if story.prepared_at is None else story.prepared_at
    measured: dict = {}
    faults = []
    for name in ("process_mib", "gpu_memory_mib"):
        values = [row.get(name) for row in story.samples if row["seconds"] >= begin]
        known = [value for value in values if value is not None]
        if len(known) < _FEW_SAMPLES:
            continue
        medians = quarters(known)
        label = name.removesuffix("_mib")
        measured |= {f"{label}_first_mib": medians[0], f"{label}_last_mib": medians[-1]}
        if medians == sorted(set(medians)) and medians[-1] - medians[0] > _LEAK_MIB:
            shown = ", ".join(f"{median:.0f}" for median in medians)
            faults.append(f"{label.replace('_', ' ')} grows from quarter to quarter: {shown} MiB")
    if not measured:
        return Result(MEMORY, State.SKIPPED, f"fewer than {_FEW_SAMPLES} seconds were recorded")
    return judged(MEMORY, faults, measured)


def _judge_kernel(story: Story) -> Result:
    if story.kernel_absent:
        return Result(KERNEL, State.SKIPPED, story.kernel_absent)
    faults = []
    if story.kernel:
        at, message = story.kernel[0]
        faults.append(f"after {at / 60:.1f} minutes: {message[:200]}")
    if len(story.kernel) > 1:
        faults.append(f"{len(story.kernel) - 1} more messages")
    kept = [f"{at:.0f} s: {message[:200]}" for at, message in story.kernel[:20]]
    return judged(KERNEL, faults, {"faults": len(story.kernel), "messages": kept})


def _judge_sensors(story: Story) -> Result:
    columns = {name: [row.get(name) for row in story.samples] for name in COLUMNS}
    known = {
        name: [value for value in column if value is not None] for name, column in columns.items()
    }
    measured: dict = {}
    for name, values in known.items():
        if values:
            # the unit comes last: clock_least_mhz
            label, _, unit = name.rpartition("_")
            measured |= {f"{label}_least_{unit}": min(values), f"{label}_most_{unit}": max(values)}
    measured["series"] = thin(story)
    if not any(known.values()):
        reason = story.sensors_absent or "the sensors gave no reading"
        return Result(SENSORS, State.SKIPPED, reason, measured)
    return Result(SENSORS, State.PASSED, "", measured)


def thin(story: Story, most: int = POINTS) -> dict[str, list]:
    """Return the samples as columns for a plot: means over spans, for at most so many points.

    speed: that of the load in its turn, as a share of its first turn's. events: minutes.
    """
    span = max(1, -(-len(story.samples) // most))
    groups = [story.samples[i : i + span] for i in range(0, len(story.samples), span)]
    series: dict[str, list] = {
        name: [_mean(row.get(name) for row in group) for group in groups]
        for name in (*COLUMNS, "process_mib")
    }
    series["minutes"] = [round(group[0]["seconds"] / 60, 3) for group in groups]
    series["load"] = [group[0]["load"] for group in groups]
    speeds = _speeds(story)
    series["speed"] = [speeds.get(group[-1]["turn"]) for group in groups]
    events = [row["seconds"] for row in story.samples if row.get("event")]
    series["events"] = [round(at / 60, 3) for at in events[:most]]
    return series


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.fmean(known), 1) if known else None


def _speeds(story: Story) -> dict[int, float]:
    """Return the median rate of each turn as a share of that of the load's first turn."""
    shares: dict[int, float] = {}
    for steps in story.steps.values():
        by_turn: dict[int, list[float]] = {}
        for step in steps:
            by_turn.setdefault(step.turn, []).append(step.rate)
        medians = [statistics.median(rates) for rates in by_turn.values()]
        shares |= {
            turn: round(median / medians[0], 3)
            for turn, median in zip(by_turn, medians, strict=True)
            if medians[0]
        }
    return shares
