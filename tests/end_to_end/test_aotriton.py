# SPDX-License-Identifier: BSD-3-Clause
"""The aotriton recipe's own code on small kernels: compiled, killed, resumed, packed, checked."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support import aotriton_tree
from support.recipe_checks import RECIPES, load

from forge.files import sha256_file

pytest.importorskip("elftools", reason="the package checks read ELF files with pyelftools")
RECIPE = RECIPES / "aotriton"
check_images = load("aotriton", "check_images")
build_images = load("aotriton", "build_images")

PYTHON = "build/stacks/attention/.pixi/envs/default/bin/python"
COUNT = aotriton_tree.COUNT


class Build:
    """A source tree, and the command that makes images of it."""

    def __init__(self, root: Path, python: Path) -> None:
        self.python, self.root, self.source = python, root, aotriton_tree.make(root / "source")
        self.cache, self.images, self.number = root / "cache", root / "images", 0

    def start(self, **environment: str) -> subprocess.Popen[str]:
        self.number += 1
        command = [self.python, RECIPE / "build_images.py", self.source, self.images]
        command += ["--build", self.root / f"build{self.number}", "--jobs", "2"]
        return subprocess.Popen(
            [*command, "--commit", "c" * 40, "--tree", "d" * 40],
            env=os.environ | {"TRITON_CACHE_DIR": str(self.cache)} | environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def run(self, code: int = 0, **environment: str) -> str:
        child = self.start(**environment)
        output = child.communicate()[0]
        assert child.returncode == code, output
        return output

    def finished(self) -> list[Path]:
        return list(self.cache.glob("*/*.hsaco"))

    def objects(self) -> dict[str, str]:
        files = (self.root / f"build{self.number}").rglob("*.hsaco")
        return {file.name: sha256_file(file) for file in files}


@pytest.fixture
def build(tmp_path: Path, attention_stack: Path) -> Build:
    return Build(tmp_path, attention_stack / PYTHON)


def test_images_and_upstreams_own_path(build: Build) -> None:
    """The images pass the check, and one process per kernel makes the same code objects."""
    assert f"kernels: {COUNT} compiled" in build.run()
    found = check_images.check(build.images, COUNT)
    assert set(found) == {(n, t) for n in aotriton_tree.NAMES for t in aotriton_tree.TYPES}
    ours = build.objects()
    rules = (build.root / "build1/Bare.compile").read_text().splitlines()
    environment = os.environ | build_images.COMPILE_ENVIRONMENT
    environment["TRITON_CACHE_DIR"] = str(build.root / "other")
    for rule in rules[::3]:
        arguments = build_images.compile_arguments(rule)
        out = build.root / "one" / Path(arguments[4]).name
        out.parent.mkdir(exist_ok=True)
        arguments[4] = str(out)
        compiler = build.source / "v3python/compile.py"
        subprocess.run([build.python, compiler, *arguments], env=environment, check=True)
        assert sha256_file(out) == ours[out.name]


def test_no_path_of_the_build_in_a_kernel(build: Build) -> None:
    build.run()
    for file in (build.root / "build1").rglob("*.hsaco"):
        assert str(build.root).encode() not in file.read_bytes()


def test_killed_build_goes_on(build: Build) -> None:
    """What a killed run had finished comes from the cache, into the same images."""
    child = build.start()
    while len(build.finished()) < COUNT // 2 and child.poll() is None:
        time.sleep(0.02)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    done = len(build.finished())
    assert child.returncode == -signal.SIGKILL and 0 < done < COUNT
    output = build.run()
    compiled, cached = map(int, re.search(r"(\d+) compiled.*, (\d+) from", output).groups())
    assert compiled + cached == COUNT and cached >= done - 1  # one may have been half written
    again = {file.name: sha256_file(file) for file in build.images.rglob("*.aks2")}
    whole = Build(build.root / "whole", build.python)
    whole.run()
    assert again == {file.name: sha256_file(file) for file in whole.images.rglob("*.aks2")}
    assert f"0 compiled, {COUNT} from the cache" in build.run()
    # the environment of the next build has another path
    other = build.root / "environment"
    other.mkdir()
    triton = next(build.python.parents[1].glob("lib/python*/site-packages/triton"))
    (other / "triton").symlink_to(triton)
    assert f"0 compiled, {COUNT} from the cache" in build.run(PYTHONPATH=str(other))


def test_kernel_that_does_not_compile(build: Build) -> None:
    source = build.source / "tritonsrc/flash.py"
    source.write_text(source.read_text().replace("value * 3", "value * nowhere"))
    output = build.run(code=1)
    assert re.search(r"bwd_kernel_dk_dv-[\w-]+\.hsaco does not compile", output)
    assert "Traceback" not in output.partition("does not compile")[0]
    assert not build.images.exists()


def test_process_that_dies(build: Build) -> None:
    output = build.run(code=1, TEST_CRASH="bwd_kernel_dq")
    assert "a process died" in output and str(build.cache) in output
