# SPDX-License-Identifier: BSD-3-Clause
"""The doctor on machines from public issue threads, and on other machines that owners may have."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import hosts
import pytest
from distributions import DISTRIBUTIONS
from later_threads import LATER_THREADS
from other_environments import ENVIRONMENTS, MOVED
from other_machines import OTHERS
from strix_validate.checks import Result, Severity, State
from strix_validate.doctor import environment
from strix_validate.doctor.tree import find_first_version
from strix_validate.tiers import doctor
from test_doctor import examine
from threads import THREADS, Machine

MACHINES = THREADS | OTHERS | ENVIRONMENTS | MOVED | LATER_THREADS | DISTRIBUTIONS


@pytest.fixture(autouse=True)
def enough_disk(monkeypatch):
    monkeypatch.setattr(environment, "disk_usage", lambda place: SimpleNamespace(free=10**12))


def refuse_with(number: int) -> Callable[[Path], None]:
    def refuse(path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(path)
        if number:
            raise OSError(number, os.strerror(number))

    return refuse


def examine_machine(machine: Machine, root: Path) -> dict[str, Result]:
    hosts.make(root, machine.files)
    for file in root.glob("opt/rocm*/.info/version"):
        # ROCm is newer than the caches.
        os.utime(file, (hosts.NOW, hosts.NOW))
    return examine(
        root,
        open_device=refuse_with(machine.refusal),
        read_device=lambda path: machine.device,
        measure_copies=lambda library: {"read_only": 9e9, "writable": machine.rate},
    )


@pytest.mark.parametrize("name", MACHINES)
def test_what_is_said_of_a_machine(name, tmp_path):
    machine = MACHINES[name]
    results = examine_machine(machine, tmp_path)
    for check, expected in machine.expected.items():
        result = results[check]
        assert (result.severity or "") == expected.severity, result
        assert expected.message in result.reason and expected.fix in result.fix, result
        assert expected.never not in result.fix, result
        assert expected.reboot in (None, result.needs_reboot), result
    loud = (Severity.WARNING, Severity.ERROR)
    other_results = {check: r for check, r in results.items() if check not in machine.expected}
    assert not [r for r in other_results.values() if r.severity in loud], other_results


@pytest.mark.parametrize("name", MACHINES)
def test_advice_names_no_command_of_a_reboot(name, tmp_path):
    """A pasted fix must not restart the machine. The field needs_reboot asks for the restart."""
    for result in examine_machine(MACHINES[name], tmp_path).values():
        assert not re.search(r"\b(sudo )?(systemctl )?reboot\b(?! ID)", result.fix), result


def test_each_check_has_a_link():
    for check in doctor.checks():
        assert re.search(r"https://\S+|docs/\w+\.md", check.purpose), check


def test_an_iommu_that_the_bios_turned_off(tmp_path):
    hosts.make(tmp_path, {"proc/cmdline": "quiet\n"})
    assert examine(tmp_path)["iommu"].severity is Severity.INFO
    (tmp_path / "sys/class/iommu").mkdir(parents=True)
    assert examine(tmp_path)["iommu"].severity is None


@pytest.mark.parametrize(
    "file", ["var/lib/dpkg/info/rocm-core.list", "var/lib/pacman/local/comgr-7.2.1-1/desc"]
)
def test_caches_of_a_systems_packages(file, tmp_path):
    """The time of the package manager's file about ROCm counts: ROCm's own files keep old times."""
    variables = hosts.environ(CONDA_PREFIX="", PATH="/usr/bin")
    hosts.make(tmp_path, variables | {file: "/opt/rocm\n"})
    for days, severity in ((2, None), (0, Severity.WARNING)):
        os.utime(tmp_path / file, (hosts.NOW - days * 86400,) * 2)
        assert examine(tmp_path)["caches"].severity is severity, days


def test_caches_of_a_virtual_environment(tmp_path):
    """Wheels have no record in conda-meta. Their dist-info has the time of installation."""
    machine = MACHINES["a torch in the user's folder that a virtual environment hides"]
    hosts.make(tmp_path, machine.files)
    wheels = list(tmp_path.glob("home/user/venv/lib/python3.12/site-packages/*.dist-info"))
    assert wheels
    for days, severity in ((2, None), (0, Severity.WARNING)):
        for wheel in wheels:
            os.utime(wheel, (hosts.NOW - days * 86400,) * 2)
        result = examine(tmp_path)["caches"]
        assert result.state is State.PASSED and result.severity is severity, days


@pytest.mark.parametrize(
    ("output", "version"),
    [
        # The first four outputs are of Fedora after `dnf downgrade amd-gpu-firmware`, of openSUSE,
        # of RHEL, and of a distribution without any of these packages.
        (
            "20251111\npackage kernel-firmware-amdgpu is not installed\n20251125\n",
            "20251111",
        ),
        (
            "package amd-gpu-firmware is not installed\n20251203\n"
            "package linux-firmware is not installed\n",
            "20251203",
        ),
        ("package a is not installed\npackage b is not installed\n20260110\n", "20260110"),
        ("package a is not installed\n", None),
        ("", None),
    ],
)
def test_the_firmware_of_rpms_distributions(output, version):
    """The version of the package with the GPU's firmware counts.

    The version of the package with all other firmware does not count:
    https://github.com/ROCm/legacy-rocm-build/issues/5724
    """
    assert find_first_version(output) == version
