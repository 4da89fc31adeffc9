# SPDX-License-Identifier: BSD-3-Clause
"""The short list, measurements, refusals, resumed runs and files of `strix-validate tune`.

The tests run the real worker on the CPU. The worker imports the mock in fake_flash_attn.
"""

import contextlib
import errno
import json
import os
import pickle
import shlex
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from calls import skip_without
from models import CONFIGS, FORMATS
from strix_validate import cli
from strix_validate.attention import flash
from strix_validate.layers.table import layers_in_table
from strix_validate.precompiled.costs import KernelCost
from strix_validate.reporting.record import Device
from strix_validate.soak.processes import LineProcess
from strix_validate.triton import modes
from strix_validate.triton.modes import CallAnswer, CallAnswers
from strix_validate.triton.stand_in import Lookup
from strix_validate.tuning import candidates, command, record, session
from strix_validate.tuning.candidates import Problem
from strix_validate.tuning.record import VARIABLES, Binding, Store, Trial, Tuned, TuneRecord
from strix_validate.tuning.worker import Request
from typer.testing import CliRunner

GPU = Device(type="gpu", name="AMD Radeon 8060S", architecture="gfx1151", build="rocm")
FAKE = Path(__file__).parent / "fake_flash_attn"
COST = KernelCost(200, 40, 0, 0, 0, 8192, 6, 64)
KEY = "forward-64-float16-causal"
SMALL = partial(
    flash.fixed, seqlen_q=40, seqlen_k=40, heads=4, kv_heads=2, head_dim=64, causal=True
)
BINDING = Binding(triton="3.7.1", gpu="AMD gfx1151", sources={"flash-attn": "1", "vllm": "2"})


def tile(m: int, n: int = 32) -> dict:
    """Return a configuration of fake_flash_attn."""
    return {"BLOCK_M": m, "BLOCK_N": n}


def problem(*configurations: dict) -> Problem:
    """Return a problem of fake_flash_attn, with small calls."""
    return Problem("flash-attn", KEY, "attn_fwd", (SMALL,), (SMALL,), torch.float16, configurations)


def store_in(folder: Path, *trials: dict) -> Store:
    """Return a store whose record has one problem, with these configurations on its short list."""
    store = Store(folder)
    store.record = TuneRecord(models=["M"], binding=BINDING, versions={"triton": "3.7.1"})
    all_trials = [Trial(configuration=x, cost=asdict(COST)) for x in ({}, *trials)]
    name = problem().name
    store.record.tuned[name] = Tuned(library="flash-attn", key=KEY, trials=all_trials)
    return store


def open_session(store: Store, sensors=None, rounds: int = 3, **options) -> session.Session:
    """Return a session on the CPU."""
    return session.Session(store, "cpu", store.folder, 1, print, sensors, rounds=rounds, **options)


class FakeSensors:
    """Sensors that return the given readings one after the other, and then repeat the last one."""

    def __init__(self, *readings: dict) -> None:
        self._readings = list(readings)

    def read(self) -> dict:
        return self._readings.pop(0) if len(self._readings) > 1 else self._readings[0]

    def readings(self, number: int) -> list[dict]:
        return [self.read() for _ in range(number)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FAKE))


@pytest.mark.parametrize(
    ("change", "packaged", "reason"),
    [
        ({}, {}, ""),
        ({"scratch": 4}, {}, "4 bytes of scratch, 0 registers spilled"),
        ({"scratch": 4}, {"scratch": 8}, ""),
        ({"vgpr_spills": 3}, {}, "0 bytes of scratch, 3 registers spilled"),
        ({"lds": 65536}, {}, ""),
        ({"lds": 73728}, {}, "73728 bytes of LDS"),
        ({"wmma": 0}, {}, "no matrix instructions"),
        ({"wmma": 0}, {"wmma": 0}, ""),
        ({"waves": 3}, {}, ""),
        ({"waves": 2}, {}, "2 waves; the packaged configuration has 6"),
    ],
)
def test_what_counts_reject(change: dict, packaged: dict, reason: str) -> None:
    assert candidates.reject(replace(COST, **change), replace(COST, **packaged)) == reason


def test_the_worst_of_several_kernels_counts() -> None:
    worse = replace(COST, scratch=8, waves=4, wmma=16, lds=1)
    assert candidates.combine_costs([COST, worse]) == replace(COST, scratch=8, waves=4, wmma=16)


def test_the_short_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list has the largest tiles that spill no more than the packaged tile.

    Each other tile has the reason why it is not on the list.
    """
    costs = {64: COST, 32: COST, 128: replace(COST, scratch=8), 16: COST, 8: COST}

    def look_up(calls, cache, jobs):
        del cache, jobs
        return [answer(call.configuration) for call in calls]

    def answer(configuration: dict) -> CallAnswer:
        size = configuration.get("BLOCK_M", 64)
        keys = configuration.get("BLOCK_N", 32)
        if keys == 0:
            return CallAnswer(error=("OutOfResources", "LDS"))
        file = tmp_path / f"{size}-{keys}.hsaco"
        file.write_bytes(f"code {size}".encode())
        lookup = Lookup("attn_fwd", f"{size}-{keys}", {}, {}, {}, {file.name: str(file)}, True)
        helper = replace(lookup, name="_helper")
        return CallAnswer(lookups=(lookup, helper))

    monkeypatch.setattr(candidates.packages, "look_up", look_up)
    monkeypatch.setattr(
        candidates.packages, "measure_lookup", lambda x: costs[int(x.key.split("-")[0])]
    )
    tiles = (tile(8), tile(16), tile(32), tile(128), tile(64, 64), tile(64, 0))
    trials = candidates.short_list(problem(*tiles), tmp_path, 1, most=2)
    assert [trial.reason for trial in trials] == [
        "",
        "not among the first 2 configurations",
        "",
        "",
        "8 bytes of scratch, 0 registers spilled",
        "compiles to the same code as an earlier configuration",
        "OutOfResources: LDS",
    ]
    assert trials[0].cost == asdict(COST)
    assert trials[-1].cost == {}
    monkeypatch.setattr(
        candidates.packages, "look_up", lambda calls, *_: [answer(tile(64, 0)) for _ in calls]
    )
    with pytest.raises(RuntimeError, match="as packaged: OutOfResources"):
        candidates.short_list(problem(tile(32)), tmp_path, 1, most=2)
    monkeypatch.setattr(
        candidates.packages, "look_up", lambda calls, *_: [answer(tile(64)) for _ in calls]
    )
    with pytest.raises(RuntimeError, match="flash-attn ignores other configurations"):
        candidates.short_list(problem(tile(32)), tmp_path, 1, most=2)


def test_each_tile_has_its_turn() -> None:
    """The largest tile, even with several options, does not take all places of the list."""
    tiles = [tile(64) | {"num_warps": n} for n in (1, 2, 3)] + [tile(32), tile(16)]
    trials = [Trial(configuration=x) for x in ({}, *tiles)]
    candidates.choose(trials, [COST] * len(trials), COST, most=4)
    assert [not trial.reason for trial in trials] == [True, True, True, False, True, True]


def test_what_is_tuned_for_a_model(tmp_path: Path) -> None:
    model = layers_in_table("Qwen3-30B-A3B, AWQ")
    assert model is not None
    assert layers_in_table("Qwen3-30B-A3B, MXFP4") is None
    problems = candidates.list_problems(model, "built-in", tmp_path, steps=(1, 512))
    assert [problem.name for problem in problems] == [
        "flash-attn forward-128-bfloat16-causal",
        "flash-attn decode-128-bfloat16-causal",
        "vllm E=128,N=768 int4_w4a16 1",
        "vllm E=128,N=768 int4_w4a16 512",
        "flash-attn dkdv-128-bfloat16-causal",
        "flash-attn dq-128-bfloat16-causal",
    ]
    shapes = problems[2].shapes
    assert shapes[1] == (128, 2048, 384)
    assert shapes[3:] == ("int4_w4a16", 1, [0, 128])
    (only,) = candidates.list_problems(model, "aiter", None)
    assert only.name == "aiter forward-128-bfloat16-causal"


def test_tiles_divide_each_other() -> None:
    """The backward kernels require tiles of which one side divides the other.

    The matrix unit needs at least 16 rows.
    """
    for kernel in ("dkdv", "dq"):
        for configuration in candidates.SPACES[kernel][1]:
            rows = configuration["BLOCK_M"]
            columns = configuration["BLOCK_N"]
            assert max(rows, columns) % min(rows, columns) == 0
            wide = columns if kernel == "dkdv" else rows
            assert wide == max(rows, columns)
            assert rows >= 16


def test_the_fastest_right_tile_is_taken(tmp_path: Path, fake: None) -> None:
    """Two faster tiles are not measured: one is wrong, and the other cannot be launched."""
    store = store_in(tmp_path, tile(20), tile(90), tile(1, n=1), tile(1, n=0))
    tuned = open_session(store).tune(problem(), 6)
    assert tuned.is_done
    assert tuned.best.configuration == tile(20)
    assert [trial.fault for trial in tuned.trials[:3]] == ["", "", ""]
    assert tuned.trials[3].fault == "wrong: out"
    assert tuned.trials[4].fault.startswith("RuntimeError: out of resource")
    assert [len(x.milliseconds) for x in tuned.trials] == [3, 3, 3, 0, 0]
    assert tuned.trials[1].milliseconds[0] < tuned.trials[0].milliseconds[0]
    store.write_files()
    assert json.loads((tmp_path / "flash-attn.json").read_text())["tiles"] == {KEY: tile(20)}
    reopened = Store(tmp_path)
    assert reopened.load() == store.record
    shared = record.describe_for_upstream(store.record)
    assert "M=20 N=32" in shared
    assert "wrong: out" in shared
    assert str(tmp_path) not in shared


def test_an_interrupted_measurement_goes_on(tmp_path: Path, fake: None) -> None:
    """Finished rounds are in the record and are not measured again."""
    store = store_in(tmp_path, tile(20))
    tuned = open_session(store, rounds=1).tune(problem(), 6)
    first = [list(trial.milliseconds) for trial in tuned.trials]
    reopened = Store(tmp_path)
    reopened.record = reopened.load()
    resumed = reopened.record.tuned[problem().name]
    assert len(resumed.clocks) == 1
    resumed.is_done = False
    open_session(reopened, rounds=2).tune(problem(), 6)
    assert [trial.milliseconds[:1] for trial in resumed.trials] == first
    assert [len(trial.milliseconds) for trial in resumed.trials] == [2, 2]


def test_a_worker_that_ends_is_told(tmp_path: Path, fake: None) -> None:
    store = store_in(tmp_path, tile(20, n=7))
    with pytest.raises(RuntimeError, match="the worker ended"):
        open_session(store).tune(problem(), 6)
    no_other = store_in(tmp_path, tile(1, n=1))
    del no_other.record.tuned[problem().name].trials[0]
    with pytest.raises(RuntimeError, match="no configuration gives a right result"):
        open_session(no_other).tune(problem(), 6)
    assert not store.record.tuned[problem().name].is_done


def test_a_busy_gpu_is_refused(tmp_path: Path) -> None:
    """The refusal comes before any measurement."""
    store = store_in(tmp_path, tile(20))
    sensors = FakeSensors({"busy_percent": 40.0})
    with pytest.raises(session.Refused, match="40 % busy: the desktop"):
        open_session(store, sensors, worker=("-c", "raise SystemExit(9)")).tune(problem(), 6)
    session.refuse_if_busy([{"busy_percent": 90.0}, {"busy_percent": 0.0}, {"busy_percent": 2.0}])
    session.refuse_if_busy([{}, {"absent": "no sensors"}])


def test_a_throttled_gpu_is_refused_and_its_rounds_are_dropped(tmp_path: Path, fake: None) -> None:
    store = store_in(tmp_path, tile(20))
    hot = {"busy_percent": 0.0, "clock_mhz": 2000.0, "limited_by": "GPU temperature"}
    sensors = FakeSensors(*[{"busy_percent": 0.0, "clock_mhz": 2900.0}] * 4, hot)
    with pytest.raises(session.Refused, match="throttled by GPU temperature"):
        open_session(store, sensors).tune(problem(), 6)
    loaded = Store(tmp_path).load()
    assert loaded
    assert all(not x.milliseconds for x in loaded.tuned[problem().name].trials)


@pytest.mark.parametrize(
    ("clocks", "is_refused"),
    [
        ([2900, 2800, 2850, 2700], False),
        ([400, 2900, 2900, 2900, 2900], False),
        ([2900, 2900, 1500, 1400, 1450], True),
        ([0.0] * 6, False),
    ],
)
def test_a_clock_that_falls_is_refused(clocks: list[float], is_refused: bool) -> None:
    """A rise of the clock after idling is no reason to refuse, and neither is a power limit."""
    session.refuse_if_throttled(clocks[:3], "sustained power")
    expected: contextlib.AbstractContextManager = contextlib.nullcontext()
    if is_refused:
        expected = pytest.raises(session.Refused, match="clock fell from 2900 to 1450 MHz")
    with expected:
        session.refuse_if_throttled(clocks, "")


@pytest.mark.parametrize(
    ("packaged", "milliseconds", "is_chosen"),
    [
        ([10, 10, 10, 10, 10], [9, 9, 9, 9, 9], True),
        (
            [10, 10, 10, 10, 10],
            [9.9, 9.9, 9.9, 9.9, 9.9],
            False,
        ),  # 1 % faster: within the noise of a measurement
        ([10, 10, 10, 10, 10], [8, 8, 8, 12, 12], False),
        (
            [10, 20, 10, 20, 10],
            [9, 18, 9, 18, 9],
            True,
        ),  # the clock changed in the same way for both configurations
        # The packaged configuration does not run.
        ([], [9, 9, 9, 9, 9], True),
    ],
)
def test_what_is_clearly_faster(packaged: list, milliseconds: list, is_chosen: bool) -> None:
    trials = [Trial(configuration={}, milliseconds=packaged), Trial(configuration=tile(20))]
    trials[1].milliseconds = milliseconds
    tuned = Tuned(library="flash-attn", key=KEY, trials=trials, clocks=[0] * 5, is_done=True)
    assert bool(tuned.best.configuration) == is_chosen


def measured(library: str, key: str, ms: float, **fields) -> Tuned:
    """Return a problem whose first configuration took 10 ms, and whose second took `ms`."""
    trials = [Trial(configuration={}, milliseconds=[10]), Trial(configuration=tile(7))]
    trials[1].milliseconds = [ms]
    return Tuned(library=library, key=key, trials=trials, clocks=[2900], is_done=True, **fields)


def test_what_each_library_reads(tmp_path: Path) -> None:
    """vLLM's table has a row for each number of tokens, even if the packaged tile is fastest."""
    name = "E=128,N=768,device_name=AMD_Radeon_8060S.json"
    store = store_in(tmp_path / "tuned")
    vllm = partial(measured, "vllm", file=name, packaged={"BLOCK_SIZE_M": 16})
    store.record.tuned = {
        "a": measured("flash-attn", "decode-128-bfloat16-causal", 5),
        "b": measured("flash-attn", KEY, 11),
        "c": vllm("1", 5),
        "d": vllm("8", 11),
        "e": measured("aiter", "forward-128-bfloat16-causal", 5),
    }
    store.write_files()
    tiles = json.loads((store.folder / "flash-attn.json").read_text())["tiles"]
    assert tiles == {f"decode-128-bfloat16-{mask}": tile(7) for mask in ("causal", "full")}
    table = json.loads((store.folder / "vllm" / name).read_text())
    assert table == {"triton_version": "3.7.1", "1": tile(7), "8": {"BLOCK_SIZE_M": 16}}
    assert store.list_variables() == {
        "FLASH_ATTENTION_TRITON_AMD_TILES": str(store.folder / "flash-attn.json"),
        "FLASH_ATTENTION_FWD_TRITON_AMD_CONFIG_JSON": json.dumps(tile(7)),
        "VLLM_TUNED_CONFIG_FOLDER": str(store.folder / "vllm"),
    }
    assert f'{name}\n```json\n{{\n "1"' in record.describe_for_upstream(store.record)
    store.record.tuned = {"b": measured("flash-attn", KEY, 11)}
    store.write_files()
    assert not store.list_variables()
    assert not list(store.folder.rglob("*.json"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mock the machine to which the records of these tests belong (BINDING)."""
    monkeypatch.setattr(command.record, "read_binding", lambda device: BINDING)
    monkeypatch.setattr(command.host, "describe_device", lambda kind: GPU)


def tune(*arguments: str | Path):
    """Run the command `tune`."""
    return CliRunner().invoke(cli.app, ["tune", *map(str, arguments)])


def test_variables_for_a_shell(tmp_path: Path, machine: None) -> None:
    store = store_in(tmp_path / "a folder")
    store.record.tuned = {"a": measured("flash-attn", KEY, 5)}
    store.write()
    # The record is that of a run that was killed before it wrote the files.
    result = tune("--env", "--output", store.folder)
    assert (result.exit_code, result.stdout) == (0, "")
    store.write_files()
    result = tune("--env", "--output", store.folder)
    quoted = shlex.quote(str(store.folder / "flash-attn.json"))
    assert result.exit_code == 0
    assert result.stdout == f"export FLASH_ATTENTION_TRITON_AMD_TILES={quoted}\n"
    result = tune("--share", "--output", store.folder)
    assert result.exit_code == 0
    assert "M=7 N=32" in result.stdout
    assert "fastest" in result.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"triton": "3.8.0"}, "triton is 3.7.1, and was 3.8.0"),
        ({"gpu": "AMD gfx1150"}, "gpu is AMD gfx1151, and was AMD gfx1150"),
        ({"sources": {"flash-attn": "0", "vllm": "2"}}, "the source of flash-attn has changed"),
    ],
)
def test_a_stale_record_sets_no_variable(
    tmp_path: Path, machine: None, change: dict, message: str
) -> None:
    store = store_in(tmp_path)
    store.record.tuned = {"a": measured("flash-attn", KEY, 5)}
    store.record.binding = BINDING.model_copy(update=change)
    store.write()
    for option in ("--env", "--share"):
        result = tune(option, "--output", tmp_path)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert "stale and ignored" in result.stderr
        assert message in " ".join(result.stderr.split())


def test_a_source_that_changes_has_another_digest(tmp_path: Path, fake: None) -> None:
    before = record.read_binding(GPU)
    assert len(before.sources["flash-attn"]) == 64
    assert before.sources["aiter"] == ""
    package = tmp_path / "flash_attn" / "flash_attn_triton_amd"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "utils.py").write_text("TILES = {}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        after = record.read_binding(GPU)
    assert before.describe_differences(after) == ["the source of flash-attn has changed"]


@pytest.mark.parametrize("content", ["", "[]", '{"models": 3}', "\0", '{"models": []'])
def test_an_unreadable_record(tmp_path: Path, content: str) -> None:
    """The command does not overwrite the record, because the record's owner must decide."""
    (tmp_path / "record.json").write_text(content)
    for arguments in (("--env",), ("--share",)):
        result = tune(*arguments, "--output", tmp_path)
        assert result.exit_code == 2
        assert "is not a record of tune" in " ".join(result.output.split())
        assert "Traceback" not in result.output
    assert (tmp_path / "record.json").read_text() == content


@skip_without("triton")
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES])
def test_a_record_that_cannot_be_written(
    tmp_path: Path, machine: None, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a full disk or another user's folder, the command ends before it compiles."""

    def fail(file: Path, text: str) -> None:
        raise OSError(error, os.strerror(error), str(file))

    monkeypatch.setattr(record, "replace_text", fail)
    monkeypatch.setattr(command, "find_problems", lambda *_: (None, [problem()]))
    monkeypatch.setattr(candidates, "short_list", lambda *_: pytest.fail("compiled"))
    result = tune("Qwen3-8B", "--output", tmp_path / "tuned")
    text = " ".join(result.output.split())
    assert result.exit_code == 1
    assert f"{os.strerror(error)}: nothing more is recorded" in text


@skip_without("triton")
@pytest.mark.parametrize("architecture", ["gfx1151", "sm_90"])
@pytest.mark.parametrize("later", [0, 2])
def test_what_the_new_tiles_need_is_compiled(
    architecture: str, later: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code for gfx1151 is compiled without a GPU. If later calls compile more, this is reported."""
    requests: list[str] = []
    kernel = Lookup("attn_fwd", "KEY", {}, {}, {}, {"k.hsaco": "/cache/k.hsaco"}, True)

    def look_up(calls, cache, jobs, variables):
        requests.append(f"look up {variables}")
        return [CallAnswer(lookups=(kernel,)) for _ in calls]

    def run(calls, mode, cache, variables):
        requests.append(f"{mode} {variables}")
        count = later if len(requests) % 2 == 0 else len(calls)
        lookups = [(kernel,)] * count + [()] * (len(calls) - count)
        return CallAnswers("", [CallAnswer(lookups=x) for x in lookups])

    monkeypatch.setattr(candidates.packages, "look_up", look_up)
    monkeypatch.setattr(modes, "run", run)
    model = layers_in_table("Qwen3-30B-A3B")
    problems = candidates.list_problems(model, "built-in", tmp_path, steps=(1, 8))
    lines: list[str] = []
    variables = {"FLASH_ATTENTION_TRITON_AMD_TILES": "f"}
    assert command.fill_cache(
        problems, model, command.Options(), variables, lines.append, architecture
    ) == bool(later)
    first = "look up" if architecture == "gfx1151" else "native"
    assert requests == [f"{kind} {variables}" for kind in (first, "native") * 2]
    assert [line.split(":")[0] for line in lines] == ["vLLM", "flash-attn"]
    assert all(line.endswith(f"compiled, {later} more at the next calls") for line in lines)


@skip_without("triton")
@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (session.Refused("the GPU is 40 % busy"), 3, "40 % busy: nothing more was measured"),
        (KeyboardInterrupt(), 130, "interrupted: run this again to continue"),
        (RuntimeError("flash-attn forward: the worker ended"), 1, "the worker ended"),
        (OSError(errno.ENOSPC, "No space left on device", "F"), 1, "F: No space left on device"),
    ],
)
def test_how_a_run_ends(
    tmp_path: Path,
    machine: None,
    error: BaseException,
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However a run ends, its record is on the disk, and the next run continues."""

    def fail(*_) -> None:
        raise error

    monkeypatch.setattr(session.Session, "tune", fail)
    monkeypatch.setattr(command, "Sensors", lambda log: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(command, "find_problems", lambda *_: (None, [problem()]))
    result = tune("Qwen3-8B", "--output", tmp_path)
    assert result.exit_code == status
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
    loaded = Store(tmp_path).load()
    assert loaded is not None
    assert loaded.models == ["Qwen3-8B"]


@skip_without("triton")
def test_a_second_model_joins_the_record(
    tmp_path: Path, machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results for the first model are kept, and are not measured again."""
    store = store_in(tmp_path)
    store.record.tuned = {problem().name: measured("flash-attn", KEY, 11)}
    store.write()
    monkeypatch.setattr(session.Session, "tune", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(command, "Sensors", lambda log: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(command, "find_problems", lambda *_: (None, [problem()]))
    result = tune("Qwen3-8B", "--output", tmp_path)
    assert result.exit_code == 0
    assert "packaged, kept" in result.stdout
    loaded = Store(tmp_path).load()
    assert loaded is not None
    assert loaded.models == ["M", "Qwen3-8B"]


@skip_without("triton")
def test_the_line_to_use_the_result_can_be_pasted(
    tmp_path: Path, machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The printed line works in any current folder, even if the record's folder has a blank."""
    folder = tmp_path / "a b"
    store = store_in(folder)
    store.record.tuned = {problem().name: measured("flash-attn", KEY, 5)}
    store.write()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "Sensors", lambda log: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(command, "find_problems", lambda *_: (None, [problem()]))
    monkeypatch.setattr(command, "fill_cache", lambda *_: False)
    result = tune("Qwen3-8B", "--output", "a b")
    line = f"--env --output {shlex.quote(str(folder))})"
    assert line in result.output.replace("\n", ""), result.output


def test_an_earlier_tuning_does_not_change_what_is_packaged(
    tmp_path: Path, machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell that ran `tune --env` still has the variables of the earlier tuning."""
    for variable in VARIABLES.values():
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(
        command,
        "find_problems",
        lambda *_: pytest.fail("set") if set(VARIABLES.values()) & set(os.environ) else (None, []),
    )
    monkeypatch.setattr(command, "Sensors", lambda log: SimpleNamespace(close=lambda: None))
    assert tune("Qwen3-8B", "--output", tmp_path).exit_code == 0


def test_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tune().exit_code == 2
    assert tune("no-such-model", "--dry-run").exit_code == 2
    (tmp_path / "config.json").write_text("{}")
    result = tune(tmp_path, "--dry-run")
    assert result.exit_code == 2
    assert "no layers can be read" in " ".join(result.output.split())
    monkeypatch.setattr(candidates.packages, "has", lambda name: False)
    result = tune("Qwen3-8B", "--dry-run")
    assert result.exit_code == 3
    assert "flash_attn is not installed" in " ".join(result.output.split())


def test_a_model_whose_experts_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates.packages, "has", lambda name: False)
    config = CONFIGS["Qwen3-30B-A3B"]
    for form, is_left_out in (("w4a16", False), ("w8a16", True)):
        quantized = config | {"quantization_config": FORMATS[form]}
        (tmp_path / "config.json").write_text(json.dumps(quantized))
        message = " ".join(tune(tmp_path, "--dry-run").output.split())
        assert ("the kernels of its experts are left out" in message) == is_left_out


def test_a_wrong_name_is_not_blamed_on_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "list_problems", lambda *_: [problem()])
    monkeypatch.setattr(candidates.packages, "has", lambda name: False)
    result = tune("Qwen3-8B", "--dry-run", "--only", "no-such-kernel")
    assert result.exit_code == 3
    message = " ".join(result.output.split())
    assert "--only names no kernel of Qwen3-8B" in message
    assert "not installed" not in message


def test_a_worker_ends_with_its_parent(tmp_path: Path, fake: None) -> None:
    """If it did not end, the worker of a killed run would keep the GPU busy in the next run."""
    request = Request(problem(), ({}, tile(20)), "cpu", 0, 10**6)
    file = tmp_path / "request"
    file.write_bytes(pickle.dumps(request))
    process = LineProcess(["-m", "strix_validate.tuning.worker", file], tmp_path / "log")
    assert "fault" in next(process.lines_until_end(300))
    assert process.stop(60)
    assert process.status() == 1
