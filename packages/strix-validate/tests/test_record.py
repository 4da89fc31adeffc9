# SPDX-License-Identifier: BSD-3-Clause
"""Tests of records, of the table of skips, and of the list of tiers."""

import importlib.util
import json
import os
import subprocess
import sys
import typing
from dataclasses import replace
from datetime import date
from itertools import chain
from pathlib import Path

import program
import pytest
import typer
from records import FAILED, make
from strix_validate import cli, runner, skips, terminal, tiers
from strix_validate.checks import Check, Result, RunOptions, Severity, State, is_named
from strix_validate.doctor import host
from strix_validate.precompiled import warm
from strix_validate.reporting import record
from strix_validate.reporting.page import render
from strix_validate.reporting.record import Package
from strix_validate.runner import NoSuchCheck, run, select
from strix_validate.tiers import attention, bench, doctor
from strix_validate.triton import modes
from typer.testing import CliRunner


def test_record_survives_its_own_json(tmp_path):
    file = tmp_path / "r.json"
    original = make(FAILED)
    file.write_text(original.dump())
    assert record.load(file) == original
    assert original.summary == {"passed": 0, "failed": 1, "skipped": 0, "comparisons": 2}
    assert json.loads(original.dump())["schema"] == record.SCHEMA


def test_an_older_record_is_named_as_such(tmp_path):
    """In records of schema 2, `purpose` is called `why`."""
    file = tmp_path / "old.json"
    old = json.loads(make(FAILED).dump()) | {"schema": 2}
    for check in old["checks"]:
        check["why"] = check.pop("purpose")
    file.write_text(json.dumps(old))
    with pytest.raises(record.BadRecord, match="not a record of schema 3: schema .* be 3"):
        record.load(file)


@pytest.mark.parametrize(
    ("comparison", "reason"),
    [
        ({"error": float("nan"), "bound": 0.1}, "not finite"),
        ({"error": None, "bound": 0.1}, "not finite"),
        ({"error": "0.01", "bound": 0.1}, "not finite"),
        ({"error": 0.01, "bound": 1e9}, "too large"),
        ({"error": 0.01, "bound": 0.1, "dtype": "float32", "size": 2.0}, "too large"),
        ({"error": 0.01, "bound": 0.1, "dtype": ["float16"], "size": 99.0}, "too large"),
        ({"error": 0.2, "bound": 0.1}, "beyond its own bound"),
    ],
)
def test_a_pass_by_what_proves_nothing_is_a_failure(comparison, reason):
    """A pass whose numbers prove nothing is recorded as failed, and refused in a written record."""
    passed = Result(Check("x/y", "t", "w"), State.PASSED, "", {"out": comparison})
    written = record.make_check_record("x", passed)
    assert written.state is State.FAILED
    assert reason in written.reason
    correct = {"error": 0.01, "bound": 0.1, "dtype": "float16", "size": 99.0}
    valid = make(Result(passed.check, State.PASSED, "", {"out": correct, "logprob": 3}))
    assert valid.checks[0].state is State.PASSED
    forged = json.loads(valid.dump())
    forged["checks"][0]["measured"]["out"] = comparison
    with pytest.raises(ValueError, match=reason):
        record.Record.model_validate(forged)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"schema": 1}, "schema"),
        ({"checks": [{"id": "x"}]}, "checks.0"),
        ({"hostname": "mine"}, "hostname"),
    ],
)
def test_bad_record_is_told(change, message, tmp_path):
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(json.loads(make().dump()) | change))
    with pytest.raises(record.BadRecord, match=rf"bad.json.*{message}"):
        record.load(file)
    done = CliRunner().invoke(cli.app, ["report", str(file)])
    assert done.exit_code == 2
    assert "Traceback" not in done.output
    with pytest.raises(record.BadRecord):
        record.load(tmp_path / "missing.json")


def test_packages_come_from_conda_meta_without_paths(tmp_path):
    meta = tmp_path / "conda-meta"
    meta.mkdir()
    entry = {"name": "torch", "version": "2", "build": "h_0", "sha256": "ab", "url": "file:///x/y"}
    (meta / "torch.json").write_text(json.dumps(entry))
    assert host.list_packages(tmp_path) == [
        Package(name="torch", version="2", build="h_0", sha256="ab")
    ]
    assert host.list_packages(tmp_path / "none") == []


@pytest.mark.parametrize(
    "release, short_release",
    [
        ("6.17.0-19-generic", "6.17.0-19-generic"),
        ("6.18.9-200.fc43.x86_64", "6.18.9-200.fc43.x86_64"),
        ("6.18.44-my-own-machine", "6.18.44"),
        ("?", "unknown"),
    ],
)
def test_a_kernel_of_ones_own_is_not_named(release, short_release):
    assert host.shorten_release(release) == short_release


@pytest.mark.parametrize(("home", "text"), [("/home/me", "~/a, /b"), ("/", "/home/me/a, /b")])
def test_the_users_folder_is_shortened(home, text, monkeypatch):
    monkeypatch.setenv("HOME", home)
    assert host.shorten("/home/me/a, /b") == text


def test_every_check_has_id_title_and_purpose():
    checks = [check for name in tiers.TIERS for check in tiers.load(name).checks()]
    assert len(checks) == len({check.id for check in checks}) >= 60
    for check in checks:
        assert check.title and len(check.purpose) > 12, check
    purposes = {check.purpose for check in checks}
    assert sum("https://" in purpose or "patches/" in purpose for purpose in purposes) >= 40


def test_table_of_skips_is_sound():
    """Each entry names existing checks, gives a reason and a link, and has a date in the past."""
    ids = [check.id for name in tiers.TIERS for check in tiers.load(name).checks()]
    assert len(skips.table()) >= 10
    for skip in skips.table():
        for pattern in skip.ids:
            assert any(is_named(id_, [pattern]) for id_ in ids), f"{pattern} names no check"
        assert skip.link.startswith("https://")
        assert len(skip.reason) >= 20
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
    cpu = record.Device(type="cpu", architecture="x86_64", build="cpu")
    strix = record.Device(type="gpu", architecture="gfx1151", build="rocm")
    judged = skips.judge(refused, strix)
    assert judged.state is State.FAILED
    assert "not expected to be skipped" in judged.reason
    efficient = Result(
        Check("sdpa/efficient/full-float16", "", ""), State.SKIPPED, "No viable backend"
    )
    assert skips.judge(efficient, cpu).state is State.SKIPPED
    assert skips.judge(efficient, strix).state is State.FAILED


def test_without_vllm_its_experts_are_not_measured(monkeypatch):
    """On a machine without vLLM, a check of experts is skipped and does not fail."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda module: None if module == "vllm" else find_spec(module)
    )
    strix = record.Device(type="gpu", architecture="gfx1151", build="rocm")
    (result,) = bench.run([Check("bench/experts/decode")], RunOptions(device="cuda"))
    assert skips.judge(result, strix).state is State.SKIPPED, result.reason


@pytest.mark.parametrize(
    "build, error, state",
    [
        ("gfx1151_sample_h1_0", "hipErrorInvalidHandle", State.SKIPPED),
        ("gfx1151_sample_h1_0", "hipErrorNotSupported", State.SKIPPED),
        ("gfx1151_core_h1_0", "hipErrorNotSupported", State.SKIPPED),
        # The set explains none of the following errors.
        ("gfx1151_core_h1_0", "hipErrorInvalidHandle", State.FAILED),
        ("gfx1151_h1_0", "hipErrorNotSupported", State.FAILED),
        ("gfx1151_upstream_h1_0", "hipErrorInvalidHandle", State.FAILED),
        ("gfx1151_sample_h1_0", "out: error 2.0 of the bound", State.FAILED),
    ],
)
def test_what_a_smaller_set_of_kernels_lacks_is_a_skip(build, error, state, tmp_path, monkeypatch):
    """An error about a missing kernel is a skip only if the set of kernels is known to lack it.

    A wrong number fails with any set.
    """
    (tmp_path / "conda-meta").mkdir()
    (tmp_path / f"conda-meta/aotriton-images-gfx1151-0.12.0-{build}.json").touch()
    check = Check("sdpa/efficient/full-float32", "", "")
    failed = Result(check, State.FAILED, f"AcceleratorError: CUDA error\nSearch for `{error}'")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(attention.sdpa, "run", lambda *_: iter([failed]))
    (result,) = attention.run([check], RunOptions(device="cuda"))
    strix = record.Device(type="gpu", architecture="gfx1151", build="rocm")
    assert skips.judge(result, strix).state is state


def test_what_nobody_measured_is_0():
    cpu = record.Device(type="cpu", architecture="x86_64")
    assert cpu.units == cpu.clock_mhz == cpu.memory_gib == 0
    skipped = Result(Check("sdpa/flash/full-float16", "", ""), State.SKIPPED)
    assert record.make_check_record("attention", skipped).seconds == 0


def test_select_and_misspelt_names():
    checks_by_tier = {"x": [Check("a/b", "", ""), Check("a/bc", "", "")], "y": [Check("d", "", "")]}

    def ids(*arguments):
        selected = chain.from_iterable(select(checks_by_tier, *arguments).values())
        return [check.id for check in selected]

    assert ids(["a/b"]) == ["a/b"]
    assert ids(["a"], ["a/b"]) == ["a/bc"]
    assert ids(["*/b*"], []) == ["a/b", "a/bc"]
    assert ids(["x"]) == ["a/b", "a/bc"]
    assert ids([], ["x"]) == ["d"]
    for misspelt in ("a/", "z", "a/b/c"):
        with pytest.raises(NoSuchCheck, match="no check of x, y is called"):
            select(checks_by_tier, [misspelt])


def test_only_means_the_same_in_every_tier():
    """The option --only selects the same checks, whether one tier or all tiers run.

    A tier's name selects the whole tier, even if few ids of the tier begin with the name.
    """
    all_tiers = {name: list(tiers.load(name).checks()) for name in tiers.TIERS}
    for name, checks in all_tiers.items():
        for tiers_to_search in ({name: checks}, all_tiers):
            assert select(tiers_to_search, [name])[name] == checks
            first = checks[0].id
            assert [c.id for c in select(tiers_to_search, [first])[name]] == [first]
            prefix = first.split("/")[0]
            group = [c for c in checks if c.id == prefix or c.id.startswith(f"{prefix}/")]
            if prefix not in all_tiers:
                assert (
                    select(tiers_to_search, [prefix])[name]
                    == select(tiers_to_search, [f"{prefix}/*", first])[name]
                )
                assert select(tiers_to_search, [prefix])[name] == group
    assert len(select(all_tiers, ["attention"])["attention"]) > len(
        select(all_tiers, ["attention/*"])["attention"]
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
    """Without an error, nobody would notice that one of two names selects nothing."""
    fits = next(
        c.id for c in tiers.load(tier).checks() if tiers.load(tier).applies(c, RunOptions())
    )
    with pytest.raises(NoSuchCheck, match=f"{name} needs another --size or --device"):
        run([tier], RunOptions(), [fits, name])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("serve/url-text", RunOptions()),
        ("serve/start", RunOptions(url="http://x", model="any")),
        ("serve/url-questions", RunOptions(url="http://x", model="any")),
    ],
)
def test_a_check_of_another_server_is_an_error(name, options):
    with pytest.raises(NoSuchCheck, match=f"{name} is for another kind of server: see --model"):
        run(["serve"], options, [name])


def test_a_tier_that_forgets_a_check_fails_it(monkeypatch):
    tier = replace(doctor.TIER, run=lambda selected, options: iter(()))
    monkeypatch.setattr(doctor, "TIER", tier)
    result = run(["doctor"], RunOptions(), ["doctor/disk"])
    assert result.summary["failed"] == 1
    assert "no result" in result.checks[0].reason


def end_after(number, error, monkeypatch):
    """Make the tier doctor raise an error after a number of results."""

    def run(selected, options):
        yield from list(doctor.run(selected, options))[:number]
        raise error

    monkeypatch.setattr(doctor, "TIER", replace(doctor.TIER, run=run))


def test_a_fault_that_ends_a_tier_fails_what_is_left(monkeypatch):
    """The remaining checks of a tier fail if an error ends it, for example a fault of the GPU."""
    end_after(1, RuntimeError("HIP error: an illegal memory access"), monkeypatch)
    result = run(["doctor"], RunOptions(), ["doctor/disk", "doctor/glibc"])
    assert len(result.checks) == 2
    assert result.unfinished == 0
    assert result.checks[1].state == "failed"
    assert "illegal memory access" in result.checks[1].reason


def test_evidence_is_written_and_named(tmp_path):
    done = CliRunner().invoke(
        cli.app, ["run", "--tier", "doctor", "--evidence", str(tmp_path / "e"), "--device", "cpu"]
    )
    assert done.exit_code in (0, 1), done.output
    (file,) = (tmp_path / "e").iterdir()
    result = record.load(file)
    assert file.name == terminal.evidence_name(result)
    assert result.command == ["doctor"]


def test_an_interrupted_run_keeps_what_it_measured(tmp_path, monkeypatch):
    """After Ctrl-C, the record tells of the interruption, and `report` reads it."""
    end_after(3, KeyboardInterrupt, monkeypatch)
    done = CliRunner().invoke(cli.app, ["run", "--tier", "doctor", "--evidence", str(tmp_path)])
    missing = len(tiers.load("doctor").checks()) - 3
    assert done.exit_code == 130
    assert f"interrupted: {missing} checks did not run" in done.output
    (file,) = tmp_path.iterdir()
    result = record.load(file)
    assert (len(result.checks), result.unfinished) == (3, missing)
    assert sum(result.summary[state.value] for state in State) == 3
    assert f"Interrupted: {missing} checks did not run" in render([result], ["mine"])


def test_a_record_does_not_have_the_users_name(monkeypatch):
    check = tiers.load("doctor").checks()[0]
    path = Path.home() / ".triton"
    result = Result(
        check, State.PASSED, f"{path} is old", severity=Severity.WARNING, fix=f"rm {path}"
    )
    monkeypatch.setattr(doctor, "TIER", replace(doctor.TIER, run=lambda *_: [result]))
    (written,) = run(["doctor"], RunOptions(), only=[check.id]).checks
    assert (written.reason, written.fix) == ("~/.triton is old", "rm ~/.triton")


@pytest.mark.parametrize(
    ("home", "prefix", "text", "short"),
    [
        ("/home/me", "/home/me/env", "rm /home/me/env/bin/x", "rm $PREFIX/bin/x"),
        ("/home/me", "/home/me/env", "/home/me: /home/merlin/x", "~: /home/merlin/x"),
        # A container may run for a user without an entry in /etc/passwd.
        ("/", "/usr", "sudo rm /usr/lib/x /etc/y", "sudo rm /usr/lib/x /etc/y"),
    ],
)
def test_a_shortened_command_stays_a_command(home, prefix, text, short, monkeypatch):
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(sys, "prefix", prefix)
    assert host.shorten(text) == short


def test_a_killed_run_leaves_the_record_so_far(tmp_path, monkeypatch):
    """The record is written during the run, because no handler can run before SIGKILL."""
    code = """if True:
        import os, signal
        from dataclasses import replace
        from strix_validate import cli, terminal
        from strix_validate.tiers import doctor
        terminal.SECONDS_BETWEEN_WRITES = 0
        def killed(selected, options):
            yield from list(doctor.run(selected, options))[:3]
            os.kill(os.getpid(), signal.SIGKILL)
        doctor.TIER = replace(doctor.TIER, run=killed)
        cli.app(["run", "--tier", "doctor", "--evidence", os.environ["EVIDENCE"]])
        """
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "EVIDENCE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | environment)
    assert done.returncode == -9
    result = record.load(next(tmp_path.glob("*.json")))
    assert len(result.checks) == 3
    assert result.unfinished > 10


@pytest.mark.parametrize("command", [["attention"], ["run"], ["bench"], ["doctor"]])
def test_a_misspelt_name_is_told_before_torch_is_imported(command):
    done = program.run(*command, "--only", "nope", without="torch")
    assert done.returncode == 2 and "is called nope" in " ".join(done.stderr.split()), done.stderr


def test_a_pattern_may_match_the_slash_of_an_id():
    runner.refuse_misspelt(["attention"], ["*-float16", "sdpa*-float16"])
    with pytest.raises(NoSuchCheck, match="is called doctor/"):
        runner.refuse_misspelt(["attention"], ["doctor/*"])
    with pytest.raises(NoSuchCheck, match=r"is called gpu\*"):
        run(["doctor"], RunOptions(device="none"), ["gpu*"])


def test_the_groups_of_ids_are_known_without_the_tiers():
    for name in tiers.TIERS:
        ids = {check.id.split("/")[0] for check in tiers.load(name).checks()}
        assert ids == set(tiers.GROUPS.get(name, (name,))), name


def test_every_tier_holds_the_contract():
    for name in tiers.TIERS:
        tier = tiers.load(name)
        assert isinstance(tier, tiers.Tier), name
        check = tier.checks()[0]
        options = RunOptions()
        assert isinstance(tier.applies(check, options), bool), name
        assert list(tier.announce([check], options)) == [], name


def test_unknown_tier_and_root_are_wrong_usage():
    for arguments in (["run", "--tier", "nope"], ["doctor", "--root", "/no/such"]):
        assert CliRunner().invoke(cli.app, arguments).exit_code == 2


def list_float_options():
    """Return each command with each of its options that take a float."""
    options = []
    for command in cli.app.registered_commands:
        hints = typing.get_type_hints(command.callback, include_extras=True)
        for name, hint in hints.items():
            if typing.get_args(hint)[:1] in ((float,), (float | None,)):
                options.append((command.callback.__name__, f"--{name.replace('_', '-')}"))
    return options


@pytest.mark.parametrize(("command", "option"), list_float_options())
def test_a_number_that_is_not_finite_is_wrong_usage(command, option):
    parser = typer.main.get_command(cli.app).commands[command]
    for value in ("inf", "-inf", "nan", "1e300", "1e999"):
        with pytest.raises(typer.BadParameter) as raised:
            parser.make_context(command, [option, value])
        assert option in raised.value.format_message(), value


def test_all_commands_with_float_options_are_tested():
    commands = {command for command, _ in list_float_options()}
    assert {"doctor", "soak", "tune"} <= commands


def test_a_path_that_cannot_be_used_is_wrong_usage(tmp_path):
    file = tmp_path / "record.json"
    make().write(file)
    for arguments in (
        ["run", "--tier", "doctor", "--evidence", file],
        ["report", file, "-o", tmp_path / "missing" / "page.html"],
        ["compilations", "--vllm-source", tmp_path],
        ["kernels", "--vllm-source", tmp_path],
    ):
        done = CliRunner().invoke(cli.app, list(map(str, arguments)))
        assert done.exit_code == 2, (arguments, done.exception)


def test_a_child_that_ends_is_told_by_warm(monkeypatch):
    """`warm` reports a child process that was killed, for example because the memory was full."""

    def fail(*_):
        raise modes.ChildError("the child process ended with status -9")

    monkeypatch.setattr(warm, "calls", lambda *_: {"flash-attn": []})
    monkeypatch.setattr(warm, "fill", fail)
    done = CliRunner().invoke(cli.app, ["warm"])
    assert done.exit_code == 1
    assert "the child process ended with status -9" in done.output
    assert isinstance(done.exception, SystemExit)


def test_a_seed_draws_other_inputs():
    """A seed always draws the same inputs, and the record has the seed."""

    def measured(seed):
        result = run(["attention"], RunOptions(seed=seed), ["sdpa/math/one-query-float32"])
        assert result.seed == seed
        return result.checks[0].measured["out"]

    assert measured(5) == measured(5) != measured(0)
