# SPDX-License-Identifier: BSD-3-Clause
"""py-rattler and the validator's doctor detect the same virtual packages on recorded machines.

A recorded machine is a small folder /sys/class. The tests mount it over the real /sys/class in a
mount namespace.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version
from support.project import CHECKOUT

sys.path.append(str(CHECKOUT / "packages/strix-validate/tests"))

import hosts
from strix_validate.doctor.tree import Tree
from strix_validate.doctor.virtual_packages import VARIABLES, detect

# This program prints the virtual packages for AMD GPUs that py-rattler detects. Its output is JSON,
# with versions by name.
DETECT = """\
import json
from rattler import VirtualPackage, VirtualPackageOverrides
versions = {}
for package in VirtualPackage.detect(VirtualPackageOverrides.from_env()):
    package = package.into_generic()
    if "amdgpu" in package.name.normalized:
        versions[package.name.normalized] = str(package.version)
print(json.dumps(versions))
"""


def run_in_namespace(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command in a mount namespace of its own, as root of a user namespace."""
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES.values()}
    return subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-ec", command],
        env=environment | variables,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module", autouse=True)
def require_mount_namespaces() -> None:
    """Skip the tests where py-rattler or this machine cannot run them."""
    if Version(version("py-rattler")) < Version("0.28"):
        pytest.skip("py-rattler detects AMD GPUs since 0.28, and this one is older")
    try:
        probe = run_in_namespace("mount --bind /tmp /sys/class")
    except FileNotFoundError:
        pytest.skip("this machine has no program unshare")
    if probe.returncode:
        pytest.skip(f"this machine allows no mount namespaces: {probe.stderr.strip()}")


def detect_with_rattler(root: Path, **variables: str) -> dict[str, str]:
    """Return the virtual packages for AMD GPUs that py-rattler detects on a recorded machine.

    Args:
        root: The folder of the machine.
        variables: Environment variables.
    """
    command = f"mount --bind '{root}/sys/class' /sys/class; exec '{sys.executable}' -c '{DETECT}'"
    done = run_in_namespace(command, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("machine", hosts.MACHINES)
def test_recorded_machines(machine: str, tmp_path: Path) -> None:
    files, expected = hosts.MACHINES[machine]
    root = hosts.make(tmp_path, files)
    assert detect_with_rattler(root) == expected
    assert detect(Tree(root)) == expected


@pytest.mark.parametrize(("variable", "value"), hosts.REFUSED)
def test_what_rattler_refuses(variable: str, value: str) -> None:
    done = run_in_namespace(f"exec '{sys.executable}' -c '{DETECT}'", **{variable: value})
    assert done.returncode and f"'{value}'" in done.stderr


@pytest.mark.parametrize("machine", ["beside-discrete", "without-gpu", "kernel-without-kfd"])
def test_the_line_that_fixes(machine: str, tmp_path: Path) -> None:
    """With the variables that doctor prints, py-rattler detects a Strix Halo machine."""
    from strix_validate.doctor.hardware import pixi

    root = hosts.make(tmp_path, hosts.MACHINES[machine][0])
    fix = pixi(Tree(root)).fix
    assert fix.startswith("export ")
    variables = dict(word.split("=", 1) for word in fix.removeprefix("export ").split())
    assert detect_with_rattler(root, **variables) == hosts.MACHINES["alone"][1]
