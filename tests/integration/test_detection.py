# SPDX-License-Identifier: BSD-3-Clause
"""What py-rattler detects on recorded machines is what the validator's doctor says that pixi sees.

A machine is a small /sys/class, bound over the real one in a mount namespace.
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

DETECT = """\
import json
from rattler import VirtualPackage, VirtualPackageOverrides
found = VirtualPackage.detect(VirtualPackageOverrides.from_env())
pairs = ((p.name.normalized, str(p.version)) for p in (each.into_generic() for each in found))
print(json.dumps({name: version for name, version in pairs if "amdgpu" in name}))
"""


def namespace(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A shell command in a mount namespace of its own, as root of a user namespace."""
    clean = {k: v for k, v in os.environ.items() if k not in VARIABLES.values()}
    return subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-ec", command],
        env=clean | variables,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module", autouse=True)
def able() -> None:
    if Version(version("py-rattler")) < Version("0.28"):
        pytest.skip("this py-rattler detects no AMD GPU: 0.28 is the first")
    try:
        probe = namespace("mount --bind /tmp /sys/class")
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if probe.returncode:
        pytest.skip(f"no mount namespace here: {probe.stderr.strip()}")


def rattler_sees(root: Path, **variables: str) -> dict[str, str]:
    """What py-rattler detects on the machine below root."""
    code = f"mount --bind '{root}/sys/class' /sys/class; exec '{sys.executable}' -c '{DETECT}'"
    done = namespace(code, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("machine", hosts.MACHINES)
def test_recorded_machines(machine: str, tmp_path: Path) -> None:
    files, expected = hosts.MACHINES[machine]
    root = hosts.make(tmp_path, files)
    assert rattler_sees(root) == expected
    assert detect(Tree(root)) == expected


@pytest.mark.parametrize(("variable", "value"), hosts.REFUSED)
def test_what_rattler_refuses(variable: str, value: str) -> None:
    done = namespace(f"exec '{sys.executable}' -c '{DETECT}'", **{variable: value})
    assert done.returncode and f"'{value}'" in done.stderr


@pytest.mark.parametrize("machine", ["beside-discrete", "without-gpu", "kernel-without-kfd"])
def test_the_line_that_fixes(machine: str, tmp_path: Path) -> None:
    """What doctor prints, given to py-rattler, makes a Strix Halo machine of it."""
    from strix_validate.doctor.hardware import pixi

    root = hosts.make(tmp_path, hosts.MACHINES[machine][0])
    fix = pixi(Tree(root)).fix
    assert fix.startswith("export ")
    variables = dict(word.split("=", 1) for word in fix.removeprefix("export ").split())
    assert rattler_sees(root, **variables) == hosts.MACHINES["alone"][1]
