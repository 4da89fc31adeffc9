# SPDX-License-Identifier: BSD-3-Clause
"""Before a build fetches anything, conda-forge is asked whether it has what all recipes need.

The stand-in has one package without content for each requirement, in a version that satisfies it.
"""

import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from support import stand_in
from support.project import copy_checkout, drive
from support.servers import QuietHandler, served

from forge.bases import CONDA_FORGE
from forge.building.environments import find_unsolvable
from forge.conda.local import LocalChannel
from forge.recipes.plan import RecipeSet, Step
from forge.recipes.recipe import parse_package_name

Packages = dict[str, dict[str, Any]]


def package(name: str, version: str, build: str = "0", depends: tuple[str, ...] = ()) -> Packages:
    file = f"{name}-{version}-{build}.conda"
    record = {"name": name, "version": version, "build": build, "build_number": 0}
    return {file: record | {"subdir": "linux-64", "depends": [*depends], "sha256": "0" * 64}}


@pytest.fixture
def steps(recipes: RecipeSet, tmp_path: Path) -> list[Step]:
    return recipes.plan(LocalChannel(tmp_path / "empty"))


@pytest.fixture
def complete(recipes: RecipeSet, steps: list[Step]) -> Packages:
    """The index of a conda-forge that lacks nothing."""
    found: Packages = {}
    for python in recipes.base.variants["python"]:
        version, build = (part.replace("*", "0") for part in python.split())
        found |= package("python", version, build)
    variants: dict[str, str] = {}
    for step in steps:
        for output in step.rendered:
            variants |= output["build_configuration"]["variant"]
    rendered = [output["recipe"] for step in steps for output in step.rendered]
    tests = [
        test.get("requirements", {}) for output in rendered for test in output.get("tests", [])
    ]
    sections = [step.recipe.requirements for step in steps] + tests
    for spec in {"pip", *chain.from_iterable(chain(*map(dict.values, sections)))}:
        name = parse_package_name(spec)
        if name in recipes.owner or name.startswith("__") or name == "python":
            continue
        spec = f"{spec} {variants.get(spec.replace('-', '_'), '')}"  # what rattler-build asks for
        version = re.search(r"(?<![!<\w.])=*([\d][\w.]*)", spec.removeprefix(name))
        _, *parts = spec.split()
        build = parts[1].replace("*", "0") if len(parts) > 1 else "0"
        found |= package(name, version[1].rstrip(".") if version else "0", build)
    return found


def index(folder: Path, packages: Packages) -> Path:
    stand_in.write_repodata(folder, "linux-64", packages)
    stand_in.write_repodata(folder, "noarch", {})
    return folder


@pytest.fixture
def asked(
    recipes: RecipeSet, steps: list[Step], tmp_path: Path
) -> Callable[[Packages], dict[str, str]]:
    def ask(packages: Packages) -> dict[str, str]:
        (tmp_path / "theirs").mkdir()
        folder = index(tmp_path / "theirs", packages)
        return find_unsolvable(
            recipes, steps, LocalChannel(tmp_path / "empty"), conda_forge=folder.as_uri()
        )

    return ask


def without(packages: Packages, name: str) -> Packages:
    left = {file: record for file, record in packages.items() if record["name"] != name}
    assert len(left) < len(packages)
    return left


def test_a_complete_conda_forge_has_all(complete: Packages, asked: Callable) -> None:
    assert asked(complete) == {}


def test_what_is_missing_is_named(complete: Packages, asked: Callable) -> None:
    """It costs vLLM and nothing else: no other recipe needs vLLM."""
    reasons = asked(without(without(complete, "xgrammar"), "setproctitle"))
    assert reasons == {
        "vllm": "conda-forge has no setproctitle; xgrammar >=0.2.6,<0.3"
        " (run environment, Python 3.12 and 3.13)"
    }


def test_what_does_not_solve_together_is_said(complete: Packages, asked: Callable) -> None:
    """Every package is there, and one wants another than ours: strict priority forbids it."""
    timm = package("timm", "1.0.26", depends=("pytorch <2",))
    reasons = asked(without(complete, "timm") | timm)
    assert list(reasons) == ["vllm"]
    assert reasons["vllm"].startswith("timm >=1.0.17 cannot be installed with the others: ")
    assert "pytorch <2" in reasons["vllm"] and "\n" not in reasons["vllm"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    requests: list[str] = []

    class Noting(QuietHandler):
        def log_request(self, *_: object) -> None:
            requests.append(self.path)

    (tmp_path / "web").mkdir()
    with served(tmp_path / "web", Noting) as url:
        yield url, requests


@pytest.mark.parametrize(
    ("command", "code"), [("plan", 0), ("plan --strict", 3), ("build vllm", 3)]
)
def test_a_channel_that_lacks_one(
    tmp_path: Path, server: tuple[str, list[str]], complete: Packages, command: str, code: int
) -> None:
    """The command names it, and has fetched nothing but the index."""
    url, requests = server
    index(tmp_path / "web", without(complete, "mcp") | package("mcp", "1.28.1"))
    root, home = tmp_path / "checkout", tmp_path / "home"
    copy_checkout(root, packages=False)
    (root / "build/sources").unlink()
    stand_in.write_mirrors(home, {CONDA_FORGE: url})
    own = {"HOME": str(home), "PIXI_HOME": str(home / ".pixi")}
    done = drive(root, *command.split(), "--base", "conda-forge", **own)
    printed = done.stdout + done.stderr
    assert done.returncode == code, printed
    newest = r"\(the newest is 1\.28\.1\)"
    reason = rf"conda-forge has no mcp \S+ {newest} \(run environment, Python 3.12 and 3.13\)"
    if command == "build vllm":
        assert re.search(f"not started: vllm: {reason}", printed), printed
    else:
        lost = set(re.findall(r"(?m)^ *(\d+) skipped .*", printed))
        assert re.search(rf"(?m)^ *\d+ skipped +vllm-0\S+: {reason}$", printed), printed
        assert len(lost) == 1 and len(re.findall(r"(?m)^ *\d+ build ", printed)) > 24
    indexes = re.compile(r"/(repodata|run_exports)[^/]*$")
    assert requests and all(indexes.search(path) for path in requests)
    assert not (root / "build/sources").exists() and not (root / "build/staging").exists()
