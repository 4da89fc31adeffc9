# SPDX-License-Identifier: BSD-3-Clause
"""Install the bindings (py-rattler and py-rattler-build) and typer in the versions of pixi.lock."""

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

# py-rattler 0.26 introduced a type for build strings.
BuildString: Any = getattr(rattler, "BuildString", str)

PACKAGES = ("py-rattler", "py-rattler-build", "typer")
UNREACHABLE = "Could not find a version|No matching distribution|Connection|Temporary failure"


def locked() -> dict[str, str]:
    """Return the version of each of PACKAGES in pixi.lock's environment for the driver."""
    lock = yaml.load((CHECKOUT / "pixi.lock").read_text(), yaml.CSafeLoader)
    versions = {}
    for package in lock["environments"]["default"]["packages"]["linux-64"]:
        name, version, _ = package["conda"].rpartition("/")[2].rsplit("-", 2)
        if name in PACKAGES:
            versions[name] = version
    return versions


def install() -> Path:
    """Install the locked versions from PyPI into a folder, if necessary, and return the folder.

    If PyPI cannot be reached or lacks a version, the test is skipped.
    """
    versions = locked()
    requirements = [f"{name}=={version}" for name, version in versions.items()]
    folder = CHECKOUT / "build" / "-".join(["locked", *versions.values()])
    if not (folder / ".complete").exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        options = ["--no-deps", "--only-binary", ":all:", "--upgrade"]
        done = subprocess.run(
            [*pip, *options, "--target", folder, *requirements],
            text=True,
            capture_output=True,
            check=False,
        )
        if done.returncode and re.search(UNREACHABLE, done.stderr):
            names = " and ".join(requirements)
            pytest.skip(f"{names} cannot be installed from PyPI: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        (folder / ".complete").touch()
    return folder


def in_front(folder: Path) -> dict[str, str]:
    """Return the environment of a process that imports from `folder` first."""
    folders = [str(folder)]
    if os.environ.get("PYTHONPATH"):
        folders.append(os.environ["PYTHONPATH"])
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(folders)}
