# SPDX-License-Identifier: BSD-3-Clause
"""The launcher `./forge`, with and without pixi."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.project import CHECKOUT


def test_launcher_refuses_an_old_python(tmp_path: Path) -> None:
    fake = tmp_path / "python3"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    launcher = CHECKOUT / "forge"
    done = subprocess.run(
        [launcher, "plan"], text=True, capture_output=True, check=False,
        env={"PATH": "/usr/bin:/bin", "FORGE_PYTHON_BIN": str(fake), "FORGE_NO_PIXI": "1"},
    )  # fmt: skip
    assert done.returncode == 2 and "CPython 3.11" in done.stderr


def test_launcher_behind_a_link(tmp_path: Path) -> None:
    """It finds its checkout, and makes nothing beside the link."""
    root = CHECKOUT
    (tmp_path / "pixi").write_text('#!/bin/sh\necho "pixi $*"\n')
    (tmp_path / "pixi").chmod(0o755)
    (tmp_path / "linked").symlink_to(root / "forge")
    done = subprocess.run(
        [tmp_path / "linked", "plan"], text=True, capture_output=True, check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    assert f"--manifest-path {root}/pixi.toml plan" in done.stdout


def test_launcher_runs_the_pixi_task(tmp_path: Path) -> None:
    (tmp_path / "pixi").write_text('#!/bin/sh\necho "pixi $*"\n')
    (tmp_path / "pixi").chmod(0o755)
    root = CHECKOUT
    done = subprocess.run(
        [root / "forge", "build", "triton"], text=True, capture_output=True, check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    assert done.stdout == f"pixi run --manifest-path {root}/pixi.toml build triton\n"
