# SPDX-License-Identifier: BSD-3-Clause
"""The engine builds a staged recipe, as pytorch's is, for two Pythons, one after the other.

The Pythons are packages of one file, in a channel of their own.
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
    """And neither prefix nor build tree of the first one lies there while the second is built."""
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
    packages = map(Package.from_file, map(str, output.glob("*/*.conda")))
    files = {(package.name, package.build_string): package.files for package in packages}
    assert files == {
        (name, f"py{number}_0"): [f"share/{version}/file"]
        for name in ("lib", "top")
        for number, version in (("312", "3.12"), ("313", "3.13"))
    }
    assert [*output.glob("bld/*/work/conda_build.log")], "the driver reads it"
    assert not [*output.rglob("object.o"), *output.glob("bld/*/host_env*")]


def test_what_is_built_for_each_python_is_what_was_planned(tmp_path: Path) -> None:
    """Every recipe of ours: rendered for one Python after the other it has the same outputs."""
    ctx = Context(base_name=BaseName.CONDA_FORGE, root=CHECKOUT)
    steps = ctx.recipes.plan(LocalChannel(tmp_path / "channel", ctx.project.recipes))
    several = {step.recipe.name: step for step in steps if len(step.pythons()) > 1}
    assert {"pytorch", "vllm", "torchvision"} <= several.keys() and "flash-attn" not in several
    for step in several.values():
        planned = {output.dist.rpartition("/")[2] for output in step.outputs}
        built = set()
        for python in step.pythons():
            base = replace(ctx.base, overrides=ctx.base.overrides | {"python": [python]})
            for rendered in render(step.recipe.path, base, step.digest_value):
                package, build = rendered["recipe"]["package"], rendered["recipe"]["build"]
                built.add(f"{package['name']}-{package['version']}-{build['string']}")
        assert built == planned


def test_an_output_for_several_pythons_is_built_once() -> None:
    rendered = [
        {"build_configuration": {"variant": variant}} for variant in ({"python": "3.12"}, {})
    ]
    assert Step(None, {}, rendered=rendered[:1] * 2).pythons() == ["3.12"]
    assert Step(None, {}, rendered=rendered).pythons() == []
