# SPDX-License-Identifier: BSD-3-Clause
"""The doctor on fake hosts: a healthy one, each fault alone, combinations, garbage."""

import json
import os
import subprocess
import sys

import hosts
import pytest
from strix_validate import skips
from strix_validate.checks import CannotRun, Severity, State
from strix_validate.skips import Machine
from strix_validate.tiers import doctor
from strix_validate.tree import Node, Tree


@pytest.fixture(autouse=True)
def enough_disk(monkeypatch):
    monkeypatch.setattr(doctor, "free_bytes", lambda place: 10**12)


def examine(root, **options):
    tree = Tree(root, **options)
    results = doctor.examine(doctor.checks(), tree)
    judged = (skips.judge(result, Machine()) for result in results)
    return {result.check.id.removeprefix("doctor/"): result for result in judged}


def test_healthy_host_has_no_finding(tmp_path):
    found = examine(hosts.make(tmp_path, {}))
    assert len(found) >= 14
    for name, result in found.items():
        assert (result.state, result.severity) == (State.PASSED, None), (name, result)


@pytest.mark.parametrize("fault", hosts.FAULTS)
def test_each_fault_alone(fault, tmp_path):
    changes, expected = hosts.FAULTS[fault]
    hosts.make(tmp_path, changes)
    found = examine(tmp_path)
    for name, (state, severity, what, fix) in expected.items():
        result = found[name]
        assert (result.state.value, result.severity.value) == (state, severity), result
        assert what in result.reason and fix in result.fix, result
    for name, result in found.items():
        if name not in expected and result.state is not State.SKIPPED:
            assert (result.state, result.severity) == (State.PASSED, None), (name, result)


@pytest.mark.parametrize(
    "release", ["6.17.0-19-generic", "6.17.0-40-generic", "6.14.0-1018-oem", "6.14.0-1020-oem"]
)
def test_ubuntu_24_04_has_the_fixes_in_older_kernels(release, tmp_path):
    changes = {"proc/sys/kernel/osrelease": release, "etc/os-release": hosts.UBUNTU}
    assert examine(hosts.make(tmp_path, changes))["kernel"].severity is None


def test_combination_finds_all(tmp_path):
    faults = ("kernel-old", "firmware-bad", "override", "gtt-default")
    changes = {k: v for fault in faults for k, v in hosts.FAULTS[fault][0].items()}
    found = examine(hosts.make(tmp_path, changes))
    assert {n for n, r in found.items() if r.severity} == {
        "kernel", "firmware", "environment", "gtt",
    }  # fmt: skip


def test_no_permission(tmp_path):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    found = examine(hosts.make(tmp_path, {}), open_device=refuse)
    for name in ("kfd", "render"):
        assert found[name].state is State.FAILED and "permission denied" in found[name].reason
        assert "usermod -aG render,video" in found[name].fix


def test_device_that_is_none(tmp_path):
    hosts.make(tmp_path, {"dev/kfd": None})
    (tmp_path / "dev/kfd").mkdir()
    result = examine(tmp_path)["kfd"]
    assert result.state is State.FAILED and "cannot be opened" in result.reason


def test_stale_caches(tmp_path):
    hosts.make(tmp_path, {"home/user/.triton/cache/entry": ""})
    old = (hosts.NOW - 30 * 86400,) * 2
    for name in (".cache/comgr/entry", ".triton/cache/entry"):
        os.utime(tmp_path / "home/user" / name, old)
    result = examine(tmp_path)["caches"]
    assert result.severity is Severity.WARNING
    assert result.fix == "rm -r ~/.cache/comgr ~/.triton/cache"


def test_little_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "free_bytes", lambda place: 3 * 10**9)
    result = examine(hosts.make(tmp_path, {}))["disk"]
    assert result.severity is Severity.WARNING and "3.0 GB" in result.reason


@pytest.mark.parametrize("missing", sorted(hosts.HEALTHY))
def test_any_file_may_be_missing(missing, tmp_path):
    """No crash, and nothing passes that could not be looked at."""
    found = examine(hosts.make(tmp_path, {missing: None}))
    assert not any("Error:" in result.reason for result in found.values()), found


@pytest.mark.parametrize("garbage", ["", "\x00\xff\udcff", "-1\n", "9" * 400, "a b c\n" * 50])
def test_garbage_is_survived(garbage, tmp_path):
    hosts.make(tmp_path, {})
    for name in hosts.HEALTHY:
        if name != "proc/self/environ":
            data = garbage.encode(errors="surrogateescape")
            (tmp_path / name).write_bytes(data)
    found = examine(tmp_path)
    assert not any("Error:" in result.reason for result in found.values()), found
    assert found["kernel"].state is State.SKIPPED


def test_empty_tree(tmp_path):
    found = examine(tmp_path)
    assert found["gpu"].state is State.FAILED and "no AMD GPU" in found["gpu"].reason
    skipped = {name for name, result in found.items() if result.state is State.SKIPPED}
    assert {"kernel", "kfd", "gtt", "glibc", "caches"} <= skipped


def test_reading_nothing_is_not_passing():
    with pytest.raises(CannotRun, match="the kernel's release cannot be read"):
        doctor.kernel(Tree(hosts.Path("/nonexistent")))


def test_names_of_gpus():
    assert Node(110501, 0).name == "gfx1151" and Node(90010, 0).name == "gfx90a"


def test_command_on_a_host_without_amd_gpu(tmp_path):
    """Exit 1, one finding, no traceback; and no torch is imported."""
    hosts.without_gpu(tmp_path)
    code = "import sys; sys.modules['torch'] = None; from strix_validate.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--root", str(tmp_path), "--json"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    record = json.loads(done.stdout)
    failed = [check for check in record["checks"] if check["state"] == "failed"]
    assert [check["id"] for check in failed] == ["doctor/gpu"]
    assert failed[0]["severity"] == "error" and "lspci" in failed[0]["fix"]
    assert all(check["reason"] for check in record["checks"] if check["state"] == "skipped")


def test_faults_are_enough():
    assert len(hosts.FAULTS) >= 15
