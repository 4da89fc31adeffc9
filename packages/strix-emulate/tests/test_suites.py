# SPDX-License-Identifier: BSD-3-Clause
"""The runner of other projects' test suites counts each case once, with a single outcome."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITES = Path(__file__).resolve().parents[1] / "suites"
if not SUITES.is_dir():
    pytest.skip("the folder suites is only in a checkout", allow_module_level=True)
sys.path.insert(0, str(SUITES))

import programs  # noqa: E402
import suites  # noqa: E402

CASES = """
import os, signal, time
import numpy as np
import pytest

def test_a_right_number(): assert 1 + 1 == 2
def test_a_wrong_number(): assert 1 + 1 == 3
def test_a_wrong_array(): np.testing.assert_allclose(np.ones(2), np.zeros(2))
def test_nothing(): pytest.skip("not here")
def test_what_is_refused(): raise NotImplementedError("not for this GPU")
def test_a_type_that_is_refused(): raise ValueError("fp8e4b8 not supported in this architecture")
KEPT = []
def test_an_error():
    KEPT.append("a tensor")
    {}["missing"]
def test_a_failed_case_keeps_nothing(): assert not KEPT
@pytest.mark.parametrize("n", [1, 2])
def test_a_process_that_ends(n): os.abort() if n == 1 else None
def test_one_that_takes_too_long(): time.sleep(60)
def test_the_last(): pass
"""


@pytest.fixture
def runner(tmp_path: Path) -> suites.Runner:
    """A runner of CASES that uses no emulated device."""
    (tmp_path / "test_cases.py").write_text(CASES)
    variables = {k: v for k, v in os.environ.items() if k != "STRIX_EMULATE_PYTHON"}
    variables["PYTHONPATH"] = str(SUITES)
    return suites.Runner([], tmp_path, variables, tmp_path / "log", 5)


def test_every_case_has_one_outcome(runner: suites.Runner) -> None:
    cases = runner.collect(["test_cases.py"], "")
    outcomes = {name.partition("::")[2]: outcome for name, outcome in runner.run(cases)}
    assert len(cases) == len(outcomes)
    assert outcomes == {
        "test_a_right_number": "passed",
        "test_a_wrong_number": "wrong",
        "test_a_wrong_array": "wrong",
        "test_nothing": "skipped",
        "test_what_is_refused": "refused",
        "test_a_type_that_is_refused": "refused",
        "test_an_error": "error",
        "test_a_failed_case_keeps_nothing": "passed",
        "test_a_process_that_ends[1]": "ended",
        "test_a_process_that_ends[2]": "passed",
        "test_one_that_takes_too_long": "slow",
        "test_the_last": "passed",
    }


def test_a_process_runs_one_batch(runner: suites.Runner, monkeypatch) -> None:
    monkeypatch.setattr(suites, "BATCH", 1)
    names = ["test_cases.py::test_a_right_number", "test_cases.py::test_the_last"]
    assert list(runner.run(names)) == [(name, "passed") for name in names]
    assert runner.log.read_text().count("1 passed") == 2


def test_a_repository_is_cloned_at_the_tag_of_the_version(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", "-C", repository]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "A"], ["tag", "v1.2"]):
        subprocess.run([*git, *command], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "B"], check=True)
    source = suites.clone(repository.as_uri(), "1.2", tmp_path)
    log = subprocess.run(["git", "log", "--format=%s"], cwd=source, capture_output=True, check=True)
    assert log.stdout == b"A\n"


def test_a_keyword_chooses_cases(runner: suites.Runner) -> None:
    assert runner.collect(["test_cases.py"], "wrong and not array") == [
        "test_cases.py::test_a_wrong_number"
    ]


def test_cases_that_cannot_be_run_are_no_success(runner: suites.Runner) -> None:
    with pytest.raises(SystemExit, match="pytest ran none of 1 cases"):
        list(runner.run(["test_cases.py::test_that_is_not_there"]))


def test_files_without_cases_are_no_success(runner: suites.Runner) -> None:
    with pytest.raises(SystemExit, match="pytest found no case"):
        runner.collect(["test_absent.py"], "")


def test_a_file_that_cannot_be_imported_is_no_success(runner: suites.Runner) -> None:
    (runner.source / "test_broken.py").write_text("import absent_module")
    with pytest.raises(SystemExit, match="could not import a file"):
        runner.collect(["test_cases.py", "test_broken.py"], "")


def test_so_many_cases_are_chosen_from_all_of_them() -> None:
    cases = [str(i) for i in range(10)]
    assert suites.choose(cases, 5) == ["0", "2", "4", "6", "8"]
    assert suites.choose(cases, 20) == cases


def test_torch_and_triton_are_those_of_the_channel() -> None:
    names = [name.partition("==") for name in suites.requirements({"requires": ["einops"]})]
    assert [name for name, _, version in names[:2] if version[0].isdigit()] == ["torch", "triton"]
    assert names[-1][0] == "einops"


def test_pip_installs_the_emulator_with_its_plugin_for_vllm() -> None:
    assert str(SUITES.parent) in suites.requirements({})


def test_no_launch_ends_because_of_its_size() -> None:
    """Within a case's ten minutes, each of two cores executes at most 97 million instructions/s."""
    budget = int(suites.DEVICE[suites.DEVICE.index("--budget") + 1])
    assert budget > 2 * 600 * 97_000_000


GOOGLETEST = """[ RUN      ] A.first
[       OK ] A.first (3 ms)
[ RUN      ] A.second
[  FAILED  ] A.second (1 ms)
[  SKIPPED ] A.third (0 ms)
[  FAILED  ] 1 test, listed below:
[  FAILED  ] A.second
"""
BACKEND_OPS = """  ADD(type=f32,ne=[1,1]): \x1b[1;32mOK\x1b[0m
  ADD(type=f16,ne=[1,1]): not supported [ROCm0]
[ADD] NMSE = 1.0 > 0.1   ADD(type=f16,ne=[2,1]): \x1b[1;31mFAIL\x1b[0m
  1/2 tests passed
"""


@pytest.mark.parametrize("output", [GOOGLETEST, BACKEND_OPS])
def test_reports_of_programs_are_counted(output: str) -> None:
    assert programs.count(output, 1) == {"passed": 1, "wrong": 1, "skipped": 1}


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        ("strix-emulate: trap in add at 0x8", "trapped"),
        # test_device_features.py tests that the device prints these.
        ("strix-emulate: hipX is not supported; all later calls fail", "refused"),
        ("strix-emulate: add: does not round to nearest even; all later calls fail", "refused"),
        ("strix-emulate: internal error (KeyError: 'x')", "error"),
        ("strix-emulate: the emulator is out of memory", "error"),
    ],
)
def test_what_fails_by_the_device_is_not_wrong(line: str, outcome: str) -> None:
    output = f"[       OK ] A.first (3 ms)\n{line}\n"
    assert programs.count(output, -6) == {"passed": 1, outcome: 1}
    output += "[  FAILED  ] A.second (1 ms)\n[  FAILED  ] A.third (1 ms)\n"
    assert programs.count(output, 1) == {"passed": 1, outcome: 2}


def test_an_error_that_the_device_survives_is_no_refusal() -> None:
    output = "hipX: hipErrorNotSupported\n[  FAILED  ] A.first (1 ms)\n"
    assert programs.count(output, 1) == {"wrong": 1}


def test_a_program_that_a_signal_ends_is_counted() -> None:
    assert programs.count("[       OK ] A.first (3 ms)\n", -11) == {"passed": 1, "ended": 1}


def test_every_suite_names_files_and_a_count() -> None:
    listed = suites.tomllib.loads((SUITES / "suites.toml").read_text())
    for suite in listed.values():
        assert suite["files"]
        assert suite["count"] > 0
        assert (SUITES.parents[2] / "recipes" / suite["recipe"] / "recipe.yaml").is_file()
