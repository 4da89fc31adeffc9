# SPDX-License-Identifier: BSD-3-Clause
"""Records, the table of skips, benchmarks' arithmetic, the report, and the registry of tiers."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, date, datetime

import pytest
from rich.console import Console
from strix_validate import cli, host, record, skips, tiers
from strix_validate.checks import (
    Check,
    CheckFailed,
    Options,
    Result,
    Severity,
    State,
    is_named,
)
from strix_validate.record import CheckRecord, Device, Host, Package, Record
from strix_validate.report import plots, render
from strix_validate.run import NoSuchCheck, run, select
from strix_validate.skips import Machine
from strix_validate.table import show, summary
from strix_validate.tiers import bench, run_each
from typer.testing import CliRunner


def make(*results, subject="harness", tier="bench", **device):
    checks = [record.of_result(tier, result) for result in results]
    return Record(
        created=datetime(2026, 11, 21, 12, tzinfo=UTC),
        command=[tier],
        size="full",
        subject=subject,
        versions={"torch": "2.13.0", "vllm": None},
        packages=[Package(name="torch", version="2.13.0", build="h1_0", sha256="ab" * 32)],
        host=Host(
            kernel="6.18.9",
            distribution="Fedora",
            glibc="2.42",
            cpu="a <processor>",
            cores=32,
            memory_gib=125,
            python="3.12.1",
        ),
        device=Device(**{"type": "gpu", "architecture": "gfx1151", "build": "rocm"} | device),
        checks=checks,
        summary=record.summarise(checks),
        seconds=12.5,
    )


def timing(route, size, mask, rate):
    measured = {
        f"{direction}_{name}": value
        for direction in ("forward", "backward")
        for name, value in (("ms", 1.0), ("low_ms", 0.9), ("high_ms", 1.1), ("tflops", rate))
    }
    return Result(Check(f"bench/{route}/{size}-{mask}", "t", "w"), State.PASSED, "", measured)


PAIR = {"out": {"error": 0.5, "bound": 2.0}, "dq": {"error": None, "bound": 1.0}}
FAILED = Result(Check("sdpa/flash/x", "a title", "why https://example.org/1"), State.FAILED,
                "wrong: <dq>", PAIR)  # fmt: skip


def test_record_survives_its_own_json(tmp_path):
    file = tmp_path / "r.json"
    made = make(FAILED)
    file.write_text(made.dump())
    assert record.load(file) == made
    assert made.summary == {"passed": 0, "failed": 1, "skipped": 0, "comparisons": 2}
    assert json.loads(made.dump())["schema"] == record.SCHEMA


@pytest.mark.parametrize(
    "change, said",
    [
        ({"schema": 1}, "schema"),
        ({"checks": [{"id": "x"}]}, "checks.0"),
        ({"hostname": "mine"}, "hostname"),
    ],
)
def test_bad_record_is_told(change, said, tmp_path):
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(json.loads(make().dump()) | change))
    with pytest.raises(record.BadRecord, match=rf"bad.json.*{said}"):
        record.load(file)
    done = CliRunner().invoke(cli.app, ["report", str(file)])
    assert done.exit_code == 2 and "Traceback" not in done.output


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_no_json_is_told(text, tmp_path):
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(record.BadRecord):
        record.load(file)
    with pytest.raises(record.BadRecord):
        record.load(tmp_path / "missing.json")


def test_packages_come_from_conda_meta_without_paths(tmp_path):
    meta = tmp_path / "conda-meta"
    meta.mkdir()
    entry = {"name": "torch", "version": "2", "build": "h_0", "sha256": "ab", "url": "file:///x/y"}
    (meta / "torch.json").write_text(json.dumps(entry))
    assert host.packages(tmp_path) == [Package(name="torch", version="2", build="h_0", sha256="ab")]
    assert host.packages(tmp_path / "none") == []


@pytest.mark.parametrize(
    "release, kept",
    [
        ("6.17.0-19-generic", "6.17.0-19-generic"),
        ("6.18.9-200.fc43.x86_64", "6.18.9-200.fc43.x86_64"),
        ("6.18.44-my-own-machine", "6.18.44"),
        ("?", "unknown"),
    ],
)
def test_a_kernel_of_ones_own_is_not_named(release, kept):
    assert host.kernel_version(release) == kept


def all_ids():
    return [check.id for name in tiers.TIERS for check in tiers.load(name).checks()]


def test_every_check_has_id_title_and_reason():
    checks = [check for name in tiers.TIERS for check in tiers.load(name).checks()]
    assert len(checks) == len({check.id for check in checks}) >= 60
    for check in checks:
        assert check.title and len(check.why) > 12, check
    linked = [check for check in checks if "https://" in check.why or "patches/" in check.why]
    assert len({check.why for check in linked}) >= 40


def test_table_of_skips_is_sound():
    """Each entry names checks that exist, says why with a link, and has a date in the past."""
    ids = all_ids()
    assert len(skips.table()) >= 10
    for skip in skips.table():
        for pattern in skip.ids:
            assert any(is_named(id_, [pattern]) for id_ in ids), f"{pattern} names no check"
        assert skip.link.startswith("https://") and len(skip.reason) >= 20
        assert date(2026, 1, 1) <= skip.date <= date.today()


@pytest.mark.parametrize(
    "change", [{"link": "none"}, {"reason": "short"}, {"ids": []}, {"when": {"gpu": "x"}}]
)
def test_bad_entry_of_the_table_is_refused(change):
    good = skips.table()[0].model_dump()
    skips.Skip.model_validate(good)
    with pytest.raises(ValueError):
        skips.Skip.model_validate(good | change)


def test_a_skip_that_is_not_expected_fails():
    refused = Result(Check("sdpa/flash/full-float16", "", ""), State.SKIPPED, "No available kernel")
    strix = Machine("rocm", "gpu", "gfx1151")
    judged = skips.judge(refused, strix)
    assert judged.state is State.FAILED and "not expected to be skipped" in judged.reason
    efficient = Result(Check("sdpa/efficient/full-float16", "", ""), State.SKIPPED,
                       "No viable backend")  # fmt: skip
    assert skips.judge(efficient, Machine("cpu", "cpu")).state is State.SKIPPED
    assert skips.judge(efficient, strix).state is State.FAILED


def test_select_and_misspelt_names():
    known = {"x": [Check("a/b", "", ""), Check("a/bc", "", "")], "y": [Check("d", "", "")]}

    def ids(*arguments):
        return [check.id for checks in select(known, *arguments).values() for check in checks]

    assert ids(["a/b"]) == ["a/b"]
    assert ids(["a"], ["a/b"]) == ["a/bc"]
    assert ids(["*/b*"], []) == ["a/b", "a/bc"]
    assert ids(["x"]) == ["a/b", "a/bc"] and ids([], ["x"]) == ["d"]
    for wrong in ("a/", "z", "a/b/c"):
        with pytest.raises(NoSuchCheck, match="no check of x, y is called"):
            select(known, [wrong])


def test_only_means_the_same_in_every_tier():
    """A tier's name is all of it, although it begins no id of libraries and few of attention."""
    known = {name: tiers.load(name).checks() for name in tiers.TIERS}
    for name, checks in known.items():
        for some in ({name: checks}, known):
            assert select(some, [name])[name] == checks
            first = checks[0].id
            assert [c.id for c in select(some, [first])[name]] == [first]
            prefix = first.split("/")[0]
            group = [c for c in checks if c.id == prefix or c.id.startswith(f"{prefix}/")]
            if prefix not in known:
                assert select(some, [prefix])[name] == select(some, [f"{prefix}/*", first])[name]
                assert select(some, [prefix])[name] == group
    assert len(select(known, ["attention"])["attention"]) > len(
        select(known, ["attention/*"])["attention"]
    )


@pytest.mark.parametrize(
    ("tier", "name"),
    [
        ("attention", "sdpa/flash/length-64-float16"),
        ("attention", "flash-attn/gpu"),
        ("libraries", "conv/fast"),
        ("bench", "bench/flash/xlarge-causal"),
    ],
)
def test_a_name_of_another_size_or_device_is_an_error(tier, name):
    """Beside a name that fits it would go unnoticed."""
    fits = next(c.id for c in tiers.load(tier).checks() if tiers.load(tier).applies(c, Options()))
    with pytest.raises(NoSuchCheck, match=f"{name} needs another size or kind of device"):
        run([tier], Options(), [fits, name])


def test_a_tier_that_forgets_a_check_fails_it(monkeypatch):
    module = tiers.load("doctor")
    monkeypatch.setattr(module, "run", lambda wanted, options: iter(()))
    found = run(["doctor"], Options(), ["doctor/disk"])
    assert found.summary["failed"] == 1 and "no result" in found.checks[0].reason


def test_an_exception_of_a_check_is_a_failure():
    def body(options):
        raise ZeroDivisionError("oh")

    (result,) = run_each([Check("x", "", "")], Options(), {"x": body})
    assert (result.state, result.reason) == (State.FAILED, "ZeroDivisionError: oh")


def test_operations_are_counted_once():
    """The published rate of the largest size follows from its time; the script has twice it."""
    assert bench.operations("tiny", False, "forward") == 4 * 128 * 128 * 64
    causal = bench.operations("xlarge", True, "forward")
    assert causal == 4 * 16 * 16 * 64 * (4096 * 4097 // 2)
    assert bench.operations("xlarge", True, "backward") == 2.5 * causal
    assert causal / 68.5042 / 1e9 == pytest.approx(8.03, abs=0.005)
    assert bench.operations("xlarge", True, "backward") / 115.386 / 1e9 == pytest.approx(
        11.91, abs=0.005
    )


def test_what_is_timed_has_the_shape_of_a_server():
    ids = {check.id for check in bench.checks()}
    assert {"bench/flash-attn/gqa-causal", "bench/vllm/decode-full", "bench/flash/decode-full",
            "bench/math/gqa-full", "bench/speedup/gqa-causal"} <= ids  # fmt: skip
    assert not {"bench/vllm/decode-causal", "bench/vllm/gqa-full", "bench/published/gqa"} & ids
    assert bench.operations("decode", False, "forward") == 4 * 16 * 32 * 128 * 4096
    assert bench.SIZES["decode"].cache_bytes == 2 * 2 * 16 * 8 * 4096 * 128
    q, k, v, grad_out = bench.SIZES["gqa"].shapes()
    assert q == grad_out == (4, 32, 2048, 128) and k == v == (4, 8, 2048, 128)


def test_what_only_a_gpu_runs_is_skipped_on_a_cpu():
    only = ["bench/flash-attn/tiny-causal", "bench/vllm/tiny-causal"]
    found = run(["bench"], Options(), only)
    assert [check.state for check in found.checks] == [State.SKIPPED] * 2


def test_decoding_has_a_row_without_a_backward_pass(capsys):
    result = timing("flash", "decode", "full", 1.0)
    measured = {n: v for n, v in result.measured.items() if "backward" not in n}
    page = make(replace(result, measured=measured | {"cache_gbps": 123.0}))
    show(page, Console(width=200))
    assert "123" in capsys.readouterr().out
    assert "<svg" in render([page], ["mine"])


def test_peak_is_computed_from_units_and_clock():
    assert bench.peak_tflops("gfx1151", 40, 2900) == pytest.approx(59.4, abs=0.05)
    assert bench.peak_tflops("gfx9999", 40, 2900) is None
    assert bench.peak_tflops("gfx1151", 40, 0) is None


def test_flash_that_is_no_faster_than_math_fails():
    def measure(route, size, mask):
        return {"forward_ms": {"flash": 1.0, "math": 1.1}[route], "backward_ms": 1.0}

    body = bench._body(Check("bench/speedup/large-causal", "", ""), measure)
    with pytest.raises(CheckFailed, match=r"1.10 times math"):
        body(Options(device="cuda"))


def test_timer_times_what_it_is_given():
    """A call that sleeps 2 ms is not timed as less, nor as twice as much in the median."""
    import time

    found = bench.timed(lambda: time.sleep(0.002), "cpu", budget_ms=40)
    assert 2.0 <= found.low <= found.median <= found.high and found.repeats >= 5


def benchmarks(rate=3.0):
    cases = [(r, s, m) for r in plots.COLOURS for s in ("tiny", "large") for m in bench.MASKS]
    return [timing(*case, rate) for case in cases]


def test_report_is_one_page_with_everything():
    ratio = Result(Check("bench/speedup/tiny-causal", "t", "w"), State.PASSED, "",
                   {"forward": 9.0, "backward": 4.0})  # fmt: skip
    warned = Result(Check("doctor/gtt", "t", "w"), State.PASSED, "half", {}, Severity.WARNING,
                    "echo 1 | sudo tee x")  # fmt: skip
    page = render([make(*benchmarks(), ratio, FAILED, warned)], ["mine"])
    assert page.count("<svg") == 3 and "currentColor" in page
    for text in ("mine", "gfx1151", "a &lt;processor&gt;", "wrong: &lt;dq&gt;", "ab" * 32,
                 "echo 1 | sudo tee x", 'href="https://example.org/1"', "not finite"):  # fmt: skip
        assert text in page, text
    assert "<script" not in page and "proves nothing about the packages" in page
    assert 'src="' not in page, "something is loaded from elsewhere"
    assert 'rel="stylesheet"' not in page and "@import" not in page


def test_report_sets_two_records_side_by_side():
    fast, slow = make(*benchmarks(9.0)), make(*benchmarks(3.0), subject="packages")
    page = render([fast, slow], ["fast", "slow"])
    assert "Side by side" in page and "20 rows" in page
    assert "it says something about the packages" in page
    assert page.count("<h2>Overview") == page.count("<h2>Packages") == page.count("ab" * 32) == 1
    assert 'href="#run-2">slow' in page and 'id="run-2"' in page


def test_report_says_what_a_failed_check_catches_and_gives_units():
    page = render([make(*benchmarks(), FAILED)], ["mine"])
    assert page.count("catches:") == 1 and "catches: why <a href" in page
    assert "forward 1 ms, forward 3 TFLOP/s" in page


def test_plots_are_written(tmp_path):
    files = plots.write(make(*benchmarks()), tmp_path)
    assert {file.name for file in files} == {
        f"bench-{i}.{s}" for i in (1, 2) for s in ("svg", "png")
    }
    assert all(file.stat().st_size > 1000 for file in files)
    assert list(plots.figures(make(FAILED))) == []


def test_a_server_under_load_is_drawn(tmp_path):
    found = [{"first_token_ms": 50.0 * n, "tokens_per_second": 30.0 * n, "requests": n}
             for n in (1, 4)]  # fmt: skip
    check = Check("serve/url-load-1", "t", "w")
    loads = [Result(check, State.PASSED, "", measured) for measured in found]
    (figure,) = plots.figures(make(*loads))
    assert len(figure.axes) == 2 and len(plots.write(make(*loads), tmp_path)) == 2


def test_without_matplotlib(tmp_path, monkeypatch):
    """The page is whole but for the plots; asking for plots is refused before any check."""
    monkeypatch.delitem(sys.modules, "strix_validate.report.plots", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = render([make(*benchmarks(), FAILED)], ["mine"])
    assert "<svg" not in page and "matplotlib is not installed" in page and "<h3>Checks" in page
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    done = CliRunner().invoke(cli.app, ["bench", "--plots", str(tmp_path / "plots")])
    assert done.exit_code == 2 and "pixi add matplotlib-base" in done.output
    assert not (tmp_path / "plots").exists()


def test_summary_of_what_was_measured():
    assert summary(PAIR) == "not finite"
    pair = {"error": 0.5, "bound": 2.0}
    assert summary({"out": pair}) == "error 0.25 of the bound"
    assert summary({"out": pair | {"rms": 0.4, "rms_bound": 0.5}}) == "error 0.80 of the bound"
    assert summary({"seconds": 1.23456, "gone": None}) == "seconds 1.235"
    assert summary({"release_name": "6.18.9-200.x86_64"}) == "release name 6.18.9-200.x86_64"
    measured = {"forward_ms": 1.5, "forward_low_ms": 1.2, "forward_tflops": 9.0, "gtt_gib": 62.5,
                "forward_of_peak": 0.25}  # fmt: skip
    assert summary(measured) == (
        "forward 1.5 ms, forward 9 TFLOP/s, gtt 62.5 GiB, forward of peak 25.0%"
    )


def test_a_warning_does_not_look_like_a_pass(capsys):
    kinds = (Severity.WARNING, Severity.INFO, None)
    found = [Result(Check(f"doctor/{i}", "t", "w"), State.PASSED, f"said {i}" * bool(kind),
                    {}, kind) for i, kind in enumerate(kinds)]  # fmt: skip
    show(make(*found), Console())
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line.split()[1] for line in lines if line.startswith("doctor/")] == [
        "warning", "info", "passed",
    ]  # fmt: skip
    assert "1 warning: said 0" in lines and "1 info: said 1" in lines


def test_evidence_is_written_and_named(tmp_path):
    done = CliRunner().invoke(
        cli.app, ["run", "--tier", "doctor", "--evidence", str(tmp_path / "e"), "--device", "cpu"]
    )
    assert done.exit_code in (0, 1), done.output
    (file,) = (tmp_path / "e").iterdir()
    found = record.load(file)
    assert file.name == cli.evidence_name(found) and found.command == ["doctor"]
    assert CheckRecord.model_validate(found.checks[0].model_dump()) == found.checks[0]


def test_an_interrupted_run_keeps_what_it_measured(tmp_path, monkeypatch):
    """Ctrl-C, of a check or between two; the record says so, and report reads it."""
    module = tiers.load("doctor")
    whole = module.run

    def interrupted(wanted, options):
        yield from list(whole(wanted, options))[:3]
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run", interrupted)
    done = CliRunner().invoke(cli.app, ["run", "--tier", "doctor", "--evidence", str(tmp_path)])
    missing = len(module.checks()) - 3
    assert done.exit_code == 130 and f"interrupted: {missing} checks did not run" in done.output
    (file,) = tmp_path.iterdir()
    found = record.load(file)
    assert (len(found.checks), found.unfinished) == (3, missing)
    assert sum(found.summary[state.value] for state in State) == 3
    assert f"Interrupted: {missing} checks did not run" in render([found], ["mine"])


def test_a_killed_run_leaves_the_record_so_far(tmp_path, monkeypatch):
    """It is written as it grows: no handler runs before SIGKILL."""
    code = """if True:
        import os, signal
        from strix_validate import cli, tiers
        module = tiers.load("doctor")
        whole, cli.SECONDS_BETWEEN_WRITES = module.run, 0
        def killed(wanted, options):
            yield from list(whole(wanted, options))[:3]
            os.kill(os.getpid(), signal.SIGKILL)
        module.run = killed
        cli.app(["run", "--tier", "doctor", "--evidence", os.environ["EVIDENCE"]])
        """
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "EVIDENCE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | environment)
    assert done.returncode == -9
    found = record.load(next(tmp_path.glob("*.json")))
    assert len(found.checks) == 3 and found.unfinished > 10


def test_a_complete_record_says_nothing_of_an_interruption(tmp_path):
    assert "nterrupted" not in render([make(FAILED)], ["mine"])


@pytest.mark.parametrize("command", [["attention"], ["run"], ["bench"], ["doctor"]])
def test_a_misspelt_name_is_told_before_torch_is_imported(command):
    code = "import sys; sys.modules['torch'] = None; from strix_validate.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *command, "--only", "nope"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "is called nope" in " ".join(done.stderr.split()), done.stderr


def test_the_groups_of_ids_are_known_without_the_tiers():
    for name in tiers.TIERS:
        ids = {check.id.split("/")[0] for check in tiers.load(name).checks()}
        assert ids == set(tiers.GROUPS.get(name, (name,))), name


def test_unknown_tier_and_root_are_wrong_usage():
    for arguments in (["run", "--tier", "nope"], ["doctor", "--root", "/no/such"]):
        assert CliRunner().invoke(cli.app, arguments).exit_code == 2
