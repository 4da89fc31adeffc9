# SPDX-License-Identifier: BSD-3-Clause
"""The engine builds a recipe with a staging output, such as pytorch's, for each Python in turn.

The Pythons of these tests are packages of one file.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from rattler_build import Package
from support.faults import DRIVER
from support.project import CHECKOUT
from support.static_channel import Source

from forge.bases import BaseName
from forge.cli.context import Context
from forge.conda.local import LocalChannel
from forge.recipes.plan import Step
from forge.recipes.render import render

RECIPE = """\
schema_version: 1
recipe: {name: staged, version: "1.0"}
outputs:
  - staging: {name: whole}
    build:
      script:
        - test -z "$(find "${PREFIX%/bld/*}" -name object.o)"
        - mkdir -p "$PREFIX/share/${{ python }}"
        - touch "$PREFIX/share/${{ python }}/file" object.o
    requirements: {host: [python]}
  - package: {name: lib}
    inherit: whole
    build: {string: "py${{ python | version_to_buildstring }}_0", files: ["share/**"]}
  - package: {name: top}
    inherit: whole
    build: {string: "py${{ python | version_to_buildstring }}_0", files: ["share/**"]}
about: {license: MIT}
"""


def test_each_python_has_its_own_files(tmp_path: Path) -> None:
    """The packages of each Python have the files of that Python only.

    Before the second Python's packages are built, the prefix and the build tree of the first one
    are removed, except for the log.
    """
    channel = Source(tmp_path / "channel")
    for version in ("3.12", "3.13"):
        channel.make("python", version, file="share/python")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    output = tmp_path / "output"
    job = {
        "action": "build",
        "recipes": [str(tmp_path / "recipe.yaml")],
        "output_dir": str(output),
        "channel": [channel.folder.as_uri()],
        "package_format": "conda:1",
        "variant_overrides": {"python": ["3.12", "3.13"]},
        "pythons": ["3.12", "3.13"],
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "forge.building.engine", str(tmp_path / "job.json")]
    environment = os.environ | {"PYTHONPATH": str(DRIVER), "RATTLER_CACHE_DIR": f"{tmp_path}/cache"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    packages = [Package.from_file(str(path)) for path in output.glob("*/*.conda")]
    files = {(package.name, package.build_string): package.files for package in packages}
    assert files == {
        ("lib", "py312_0"): ["share/3.12/file"],
        ("lib", "py313_0"): ["share/3.13/file"],
        ("top", "py312_0"): ["share/3.12/file"],
        ("top", "py313_0"): ["share/3.13/file"],
    }
    assert list(output.glob("bld/*/work/conda_build.log")), (
        "the log must stay, because the driver reads it"
    )
    assert list(output.rglob("object.o")) == []
    assert list(output.glob("bld/*/host_env*")) == []


def test_what_is_built_for_each_python_is_what_was_planned(tmp_path: Path) -> None:
    """A recipe that is rendered for each Python separately has the outputs that were planned."""
    ctx = Context(base_name=BaseName.CONDA_FORGE, root=CHECKOUT)
    steps = ctx.recipes.plan(LocalChannel(tmp_path / "channel", ctx.project.recipes))
    steps_by_name = {step.recipe.name: step for step in steps if len(step.pythons()) > 1}
    assert {"pytorch", "vllm", "torchvision"} <= steps_by_name.keys()
    assert "flash-attn" not in steps_by_name
    for step in steps_by_name.values():
        planned = {output.dist.rpartition("/")[2] for output in step.outputs}
        built = set()
        for python in step.pythons():
            base = replace(ctx.base, overrides=ctx.base.overrides | {"python": [python]})
            for output in render(step.recipe.path, base, step.digest_value):
                package = output["recipe"]["package"]
                build_string = output["recipe"]["build"]["string"]
                built.add(f"{package['name']}-{package['version']}-{build_string}")
        assert built == planned


def test_an_output_for_several_pythons_is_built_once() -> None:
    """A recipe is built once for all Pythons if one of its outputs does not depend on Python."""
    for_python = {"build_configuration": {"variant": {"python": "3.12"}}}
    for_all = {"build_configuration": {"variant": {}}}
    assert Step(None, {}, rendered=[for_python, for_python]).pythons() == ["3.12"]
    assert Step(None, {}, rendered=[for_python, for_all]).pythons() == []
