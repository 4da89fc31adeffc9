# SPDX-License-Identifier: BSD-3-Clause
"""The pytorch recipe's outputs divide what its build installs, in a real build of a small tree."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import yaml
from rattler_build import Package
from support.project import MiniProject
from support.pytorch_tree import RECIPE, installed_torch

FAKE_INSTALL = """\
set -e
cp -r fake "$SP_DIR/torch"
touch "$SP_DIR/torch/_C.cpython.so"
mkdir -p "$PREFIX/bin"
touch "$PREFIX/bin/torchrun" "$PREFIX/bin/torchfrtrace"
python "$RECIPE_DIR/lay_out.py" "$SP_DIR/torch" "$PREFIX" "$SRC_DIR"
"""


def test_outputs_divide_what_is_installed(project: MiniProject, tmp_path: Path) -> None:
    """The recipe's own globs: each file is in one package, none in two."""
    torch, _ = installed_torch(tmp_path / "env")
    outputs = yaml.safe_load((RECIPE / "recipe.yaml").read_text())["outputs"]
    files = {o["package"]["name"]: o["build"]["files"] for o in outputs[1:3]}
    folder = project.root / "recipes/mini"
    folder.mkdir()
    shutil.copy(RECIPE / "lay_out.py", folder)
    (folder / "build.sh").write_text(FAKE_INSTALL)
    shutil.copytree(torch, project.root / "fake/fake", symlinks=True)
    digest = {"use_keys": ["content_digest"]}
    staging = {
        "staging": {"name": "made"},
        "source": {"path": "../../fake"},
        "build": {"script": {"file": "build.sh"}},
        "requirements": {"host": ["python"]},
    }
    packages = [
        {
            "package": {"name": f"mini-{name}"},
            "inherit": "made",
            "build": {"files": globs, "variant": digest},
            "about": {"license": "MIT"},
        }
        for name, globs in files.items()
    ]
    recipe = {
        "schema_version": 1,
        "recipe": {"name": "mini", "version": "1.0"},
        "build": {"number": 0, "variant": digest},
        "outputs": [staging, *packages],
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    project.forge("build-all")

    held = {}
    for path in project.channel.glob("linux-64/*.conda"):
        (name,) = [name for name in files if path.name.startswith(f"mini-{name}-")]
        held[name] = {str(entry) for entry in Package.from_file(str(path)).files}
    site = next(name.split("torch/")[0] for name in held["pytorch"] if name.endswith("_init__.py"))
    assert not held["libtorch"] & held["pytorch"]
    assert {name for name in held["libtorch"] if name.startswith("lib/")} == {"lib/libtorch.so"}
    assert {"include/ATen/header.h", "bin/torch_shm_manager"} <= held["libtorch"]
    assert {
        "bin/torchrun", "bin/torchfrtrace", "lib/libtorch_python.so", f"{site}torch/lib",
        f"{site}torch/_C.cpython.so", f"{site}torch/include/ATen",
    } <= held["pytorch"]  # fmt: skip
