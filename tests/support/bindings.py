# SPDX-License-Identifier: BSD-3-Clause
"""The bindings to rattler and rattler-build in the versions of pixi.lock."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rattler
import yaml
from support.project import CHECKOUT

# py-rattler 0.26 made build strings a type
BuildString: Any = getattr(rattler, "BuildString", str)

BINDINGS = ("py-rattler", "py-rattler-build")
UNREACHABLE = "Could not find a version|No matching distribution|Connection|Temporary failure"


def locked() -> dict[str, str]:
    """The version of each binding in the environment of pixi.lock that the driver runs in."""
    lock = yaml.load((CHECKOUT / "pixi.lock").read_text(), yaml.CSafeLoader)
    result = {}
    for package in lock["environments"]["default"]["packages"]["linux-64"]:
        name, version, _ = package["conda"].rpartition("/")[2].rsplit("-", 2)
        if name in BINDINGS:
            result[name] = version
    return result


def install() -> Path:
    """A folder with those versions from PyPI, made once; skips the test where PyPI lacks them."""
    words = [f"{name}=={version}" for name, version in locked().items()]
    folder = CHECKOUT / "build" / "-".join(["bindings", *locked().values()])
    if not (folder / ".complete").exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        done = subprocess.run(
            [*pip, "--no-deps", "--only-binary", ":all:", "--upgrade", "--target", folder, *words],
            text=True, capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode and re.search(UNREACHABLE, done.stderr):
            pytest.skip(f"PyPI does not give {' and '.join(words)} here: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        (folder / ".complete").touch()
    return folder


def in_front(folder: Path) -> dict[str, str]:
    """The environment of a process that imports from `folder` first."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return dict(os.environ) | {"PYTHONPATH": path}
