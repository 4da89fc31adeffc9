# SPDX-License-Identifier: BSD-3-Clause
"""The verdicts of `strix-validate soak` on a GPU that hangs, throttles, drifts, leaks or is wrong.

The GPU and the clock are mocks. test_soak_worker.py tests the real loads, and test_soak_program.py
the real processes.
"""

import json

import numpy as np
import pytest
from fake_gpu import GPU, Clock, FakeGpu, soak
from records import make
from strix_validate.checks import State
from strix_validate.doctor.tree import Tree
from strix_validate.reporting import plots, record
from strix_validate.reporting.record import Device
from strix_validate.soak import command, telemetry, verdicts
from strix_validate.soak.recorder import Table
from strix_validate.soak.story import StepRecord

LATE = 20 * 60


def judge(story):
    """Return the results by the last part of the check's id."""
    return {result.check.id.removeprefix("soak/"): result for result in verdicts.judge(story)}


def failed(story):
    return {name for name, result in judge(story).items() if result.state is State.FAILED}


def run(**options):
    names = ("minutes", "faults", "tree")
    soak_options = {name: options.pop(name) for name in names if name in options}
    return soak(FakeGpu(Clock(), **options), **soak_options)


def test_an_hour_without_a_fault_passes():
    rows = []
    gpu = FakeGpu(Clock())
    results = judge(soak(gpu, keep=rows.append))
    assert {result.state for name, result in results.items() if name != "server"} == {State.PASSED}
    assert results["server"].state is State.SKIPPED
    assert [row["seconds"] for row in rows] == list(range(3601))
    assert rows[30]["load"] == "attention"
    assert rows[36]["load"] == "product"
    assert rows[30]["clock_mhz"] == 2700
    assert rows[30]["power_w"] == 110
    assert rows[-1]["steps"] == 2 * (3600 - 20)
    assert results["product"].measured["median_tflops"] == 30.0
    assert results["product"].measured["largest_error_of_bound"] == 0.2
    assert results["whole"].measured["minutes"] == 60.0


def test_a_hang_ends_it_with_what_was_running():
    story = run(hang_at=37 * 60 + 2.0)  # at this time, the load is copies
    assert failed(story) == {"whole"}
    reason = judge(story)["whole"].reason
    steps = len(story.steps["copy"])
    assert f"in copy, its step {steps + 1}: copy of size" in reason
    assert "no progress for 121 s, since minute 37.0, in copy" in reason
    assert "state D in amdgpu_fence_wait" in reason
    assert story.samples[-1]["seconds"] == 37 * 60 + 2 + 121
    assert "no progress" in story.samples[-1]["event"]


def test_a_hang_in_the_last_seconds_is_one():
    story = run(hang_at=3590.0)
    assert failed(story) == {"whole"}
    assert not story.is_whole
    assert story.samples[-1]["seconds"] > 3600


def test_a_long_preparation_is_no_hang_and_an_endless_one_is():
    assert not failed(run(prepared_at=500))
    reason = judge(run(prepared_at=10**9))["whole"].reason
    assert "no progress for 601 s" in reason
    assert "the preparation of copy" in reason


def test_a_worker_that_is_killed_leaves_its_story():
    story = run(die_at=LATE)
    assert failed(story) == {"whole"}
    reason = judge(story)["whole"].reason
    assert "failed after 20.0 minutes in" in reason
    assert "by signal 9 (killed" in reason
    assert story.number_of_steps == 2 * (LATE - 20)


@pytest.mark.parametrize(
    "status, words", [(1, "with status 1"), (-6, "signal 6 (abort)"), (-31, "by signal 31")]
)
def test_a_worker_that_ends_is_told_how(status, words):
    assert words in judge(run(die_at=LATE, status=status))["whole"].reason


def test_a_worker_says_itself_what_failed():
    line = json.dumps({"failed": "RuntimeError: HIP error: unspecified launch failure"})
    reason = judge(run(die_at=LATE, status=0, last_line=line))["whole"].reason
    assert reason.endswith("HIP error: unspecified launch failure")


def test_a_line_that_a_kill_cut_off_is_left_out():
    assert failed(run(die_at=LATE, last_line='{"step": 12, "load": "prod')) == {"whole"}


@pytest.mark.parametrize(
    "fault, words",
    [
        ({"error": 40.0}, "an error is 40 times its bound"),
        ({"error": None}, "a result is not a number"),
        ({"changed": 1}, "1 of 40 results differ in some bits"),
        ({"fault": "a request got the answer to another request's prompt"}, "another request's"),
    ],
)
def test_one_wrong_result_after_many_right_ones_fails(fault, words):
    def step(seconds, load, number):
        return fault if (load, number) == ("product", 500) else {}

    story = run(step=step)
    assert failed(story) == {"product"}
    result = judge(story)["product"]
    assert words in result.reason
    assert "1 of 2391 steps, the first of them step 500" in result.reason
    assert [row["event"] for row in story.samples if row["event"]] == ["wrong results of product"]


def test_a_load_that_does_not_repeat_itself_may_differ_within_its_bound():
    assert not failed(run(step=lambda seconds, load, number: {"changed": None}))


@pytest.mark.parametrize("share, expected", [(0.6, {"throttling"}), (0.8, set())])
def test_a_clock_that_falls_under_load_is_throttling(share, expected):
    story = run(
        reading=lambda seconds, load: {"clock_mhz": 2700 * (share if seconds > LATE else 1)}
    )
    assert failed(story) == expected
    result = judge(story)["throttling"]
    assert result.measured["product_lowest_mhz"] == pytest.approx(2700 * share)
    if expected:
        assert "product_mhz: 2700 in the first turn, 1620 after 20" in result.reason
        assert "platform_profile" in result.fix


def test_a_clock_that_is_low_for_some_seconds_or_in_copies_is_not():
    def reading(seconds, load):
        return {"clock_mhz": 900 if load == "copy" or seconds % 15 < 4 else 2700}

    assert not failed(run(reading=reading))


def test_a_speed_that_falls_is_throttling_without_sensors():
    def step(seconds, load, number):
        return {"rate": 15.0} if seconds > LATE and load == "attention" else {}

    story = run(step=step, reading=lambda seconds, load: {"clock_mhz": None})
    assert failed(story) == {"throttling"}
    reason = judge(story)["throttling"].reason
    assert "attention_tflops: 30 in the first turn, 15 after 20" in reason
    assert "copy" not in reason


def test_a_server_that_is_slower_is_no_throttling():
    """A server's speed depends on the CPU and the scheduler, too."""
    story = run()
    story.units["server"] = "requests_per_s"
    rates = [100.0] * 10 + [20.0] * 10
    story.steps["server"] = [
        StepRecord(10.0 * i, 60 * i, rate, 32, None, 0.1) for i, rate in enumerate(rates)
    ]
    assert failed(story) == set()


def test_what_limits_the_clock_is_named():
    story = run(
        reading=lambda seconds, load: {"limited_by": "GPU temperature"} if seconds > LATE else {}
    )
    assert judge(story)["throttling"].measured["limited_by"] == "GPU temperature"


def test_a_cpu_is_not_judged_by_its_clock():
    cpu = Device(type="cpu", architecture="x86_64")
    story = soak(
        FakeGpu(Clock(), step=lambda seconds, load, number: {"rate": 3e4 / seconds}), device=cpu
    )
    assert judge(story)["throttling"].state is State.SKIPPED


@pytest.mark.parametrize("last, expected", [(0.45, {"drift"}), (0.21, set())])
def test_errors_that_grow_within_their_bound_are_a_drift(last, expected):
    def step(seconds, load, number):
        return {"error": 0.2 + (last - 0.2) * seconds / 3600} if load == "attention" else {}

    story = run(step=step)
    assert failed(story) == expected
    assert (
        not expected
        or "the error of attention grows from 0.23 to 0.42" in judge(story)["drift"].reason
    )


@pytest.mark.parametrize(
    "growth, expected",
    [
        (lambda seconds: seconds / 5, {"memory"}),
        (lambda seconds: seconds / 50, set()),  # a growth of 70 MiB in an hour is allowed
        (
            lambda seconds: 5000 * (seconds > 1800),
            set(),
        ),  # a single jump is allowed, too: another program begins
    ],
)
def test_memory_of_the_gpu_that_grows_is_a_leak(growth, expected):
    story = run(reading=lambda seconds, load: {"gpu_memory_mib": 4000 + growth(seconds)})
    assert failed(story) == expected
    assert not expected or "the memory of the gpu grows" in judge(story)["memory"].reason


def test_memory_of_the_process_that_grows_is_a_leak(tmp_path):
    clock = Clock()
    gpu = FakeGpu(clock)
    status = tmp_path / "proc" / str(gpu.pid) / "status"
    status.parent.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemAvailable:    1048576 kB\n")
    status.write_text("VmRSS:\t  1024 kB\n")

    def keep(row):
        status.write_text(f"Name:\tpython\nVmRSS:\t {1024 * (500 + int(clock.seconds))} kB\n")

    story = soak(gpu, minutes=6, tree=Tree(tmp_path), keep=keep)
    assert failed(story) == {"memory"}
    assert (
        "the memory of the process grows from quarter to quarter" in judge(story)["memory"].reason
    )
    assert story.samples[-1]["available_mib"] == 1024


def test_what_was_too_short_is_not_judged():
    results = judge(run(minutes=1, prepared_at=50))
    skipped = {name for name, result in results.items() if result.state is State.SKIPPED}
    assert skipped == {"product", "copy", "server", "throttling", "memory"}
    assert results["product"].reason == "the load completed no step"
    assert failed(run(minutes=1, prepared_at=50)) == set()


def test_a_fault_in_the_kernels_log_fails():
    story = run(faults={300: "amdgpu: ring comp_1.1.0 timeout", 301: "amdgpu: GPU reset begin!"})
    assert failed(story) == {"kernel"}
    result = judge(story)["kernel"]
    assert result.reason == "after 5.0 minutes: amdgpu: ring comp_1.1.0 timeout; 1 more messages"
    assert "kernel: amdgpu: ring" in story.samples[300]["event"]


def test_what_cannot_be_read_is_skipped_with_its_reason():
    story = run(reading=lambda seconds, load: {"absent": "nvidia-smi ended with status 9"})
    story.kernel_absent = "/dev/kmsg: Operation not permitted"
    for row in story.samples:
        row.update(dict.fromkeys(telemetry.COLUMNS))
    results = judge(story)
    assert results["sensors"].reason == "nvidia-smi ended with status 9"
    assert results["kernel"].reason == "/dev/kmsg: Operation not permitted"
    assert results["sensors"].state is results["kernel"].state is State.SKIPPED


def test_old_readings_do_not_stand_for_the_present():
    """If sensors hang with the GPU, their columns stay empty."""
    gpu = FakeGpu(Clock())
    read = gpu.sensors.lines
    gpu.sensors.lines = lambda: read() if gpu.clock.seconds < 100 else []
    samples = soak(gpu, minutes=5).samples
    assert samples[104]["clock_mhz"] == 2700
    assert samples[105]["clock_mhz"] is None


def test_the_record_is_written_as_it_goes_and_survives_an_interruption(tmp_path, monkeypatch):
    """The mock clock is also the clock by which the record is written every few seconds."""
    clock = Clock(interrupt_at=5 * 60 + 1)
    monkeypatch.setattr(command.time, "monotonic", clock.now)
    story = command.Story(GPU)
    files = command.SoakRecord(tmp_path, story)
    gpu = FakeGpu(clock)
    ages = []

    def keep(row):
        files.add_row(row)
        text = files.file.read_text()
        ages.append(row["seconds"] - json.loads(text)["seconds"])
        assert record.load(files.file).unfinished == 1

    recorder = command.Recorder(story, gpu, gpu.sensors, list, keep, clock)
    with pytest.raises(KeyboardInterrupt):
        recorder.run(3600, 120)
    assert max(ages) <= 6
    (table,) = tmp_path.glob("*.csv")
    assert len(table.read_text().splitlines()) == 1 + 301
    lines = []
    written = files.close(lines.append)
    assert written.unfinished == 1
    assert written.subject == "packages"
    assert record.load(files.file) == written
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".csv", ".svg", ".png"}


def test_a_row_of_the_table_is_on_the_disk_at_once_and_no_table_is_overwritten(tmp_path):
    file = tmp_path / "soak.csv"
    table = Table(file)
    table.add({"seconds": 1.0, "load": "copy", "event": "a, b", "unknown": 1})
    assert file.read_text().splitlines()[1].startswith("1.0,copy,")
    assert file.read_text().splitlines()[1].endswith(',"a, b"')
    with pytest.raises(FileExistsError):
        Table(file)


def test_the_plot_has_a_panel_for_each_quantity_that_was_read(tmp_path):
    def step(seconds, load, number):
        return {"error": 40.0} if (load, number) == ("copy", 50) else {}

    story = run(step=step, reading=lambda seconds, load: {"power_w": None})
    checks = [record.make_check_record("soak", result) for result in verdicts.judge(story)]
    (sensors,) = [check for check in checks if check.id == "soak/sensors"]
    assert len(sensors.measured["series"]["minutes"]) == 515  # an hour in spans of 7 seconds
    (figure,) = plots.figures(make(*verdicts.judge(story), tier="soak"))
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == ["°C", "MHz", "GPU, MiB", "speed"]
    assert all(
        len(axes.lines) == 2 for axes in figure.axes
    )  # one line is the curve, the other an event
    for axes in figure.axes:
        # The curve goes through the points of all loads.
        points = np.concatenate([np.asarray(dots.get_offsets()) for dots in axes.collections])
        points = points[points[:, 0].argsort()]
        np.testing.assert_array_equal(points, axes.lines[0].get_xydata())
    assert len(plots.write(make(*verdicts.judge(story)), tmp_path, "soak")) == 2


def test_a_soak_without_a_reading_has_no_plot():
    results = verdicts.judge(command.Story(GPU))
    assert "series" in {name for result in results for name in result.measured}
    assert list(plots.figures(make(*results, tier="soak"))) == []


def test_a_series_is_thinned_by_means():
    story = run(minutes=20, reading=lambda seconds, load: {"temperature_c": seconds})
    series = verdicts.thin_samples(story, 100)
    assert len(series["minutes"]) == len(series["load"]) == 93
    assert series["temperature_c"][1] == pytest.approx(sum(range(13, 26)) / 13)
    assert verdicts.thin_samples(command.Story(GPU))["minutes"] == []


def test_advice_stands_beside_a_hang():
    story = run(hang_at=100.0)
    story.advice = "do something"
    assert judge(story)["whole"].fix == "do something"
