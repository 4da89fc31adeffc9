# SPDX-License-Identifier: BSD-3-Clause
"""Before a build fetches anything, it checks that conda-forge satisfies all requirements.

The conda-forge of these tests is only an index. For each requirement, it has the record of a
version that satisfies the requirement.
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
    """Return a dict with the file name and the record of a package."""
    file = f"{name}-{version}-{build}.conda"
    record = {"name": name, "version": version, "build": build, "build_number": 0}
    return {file: record | {"subdir": "linux-64", "depends": [*depends], "sha256": "0" * 64}}


@pytest.fixture
def steps(recipes: RecipeSet, tmp_path: Path) -> list[Step]:
    return recipes.plan(LocalChannel(tmp_path / "empty"))


def list_requirements(steps: list[Step]) -> set[str]:
    """Return the requirements of all recipes and their tests, and pip, which `pip_check` uses."""
    requirements = {"pip"}
    for step in steps:
        sections = [step.recipe.requirements]
        for output in step.rendered:
            for test in output["recipe"].get("tests", []):
                sections.append(test.get("requirements", {}))
        for section in sections:
            requirements.update(chain(*section.values()))
    return requirements


@pytest.fixture
def complete(recipes: RecipeSet, steps: list[Step]) -> Packages:
    """The records of a conda-forge that satisfies all requirements."""
    packages: Packages = {}
    for python in recipes.base.variants["python"]:
        version, build = python.replace("*", "0").split()
        packages |= package("python", version, build)
    variants: dict[str, str] = {}
    for step in steps:
        for output in step.rendered:
            variants |= output["build_configuration"]["variant"]
    for spec in list_requirements(steps):
        name = parse_package_name(spec)
        if name in recipes.owner or name.startswith("__") or name == "python":
            continue
        # If a variant key has the name of a package, rattler-build adds the key's value as version.
        spec = f"{spec} {variants.get(spec.replace('-', '_'), '')}"
        match = re.search(r"(?<![!<\w.])=*([\d][\w.]*)", spec.removeprefix(name))
        version = match[1].rstrip(".") if match else "0"
        parts = spec.split()
        build = parts[2].replace("*", "0") if len(parts) > 2 else "0"
        packages |= package(name, version, build)
    return packages


def write_index(folder: Path, packages: Packages) -> None:
    stand_in.write_repodata(folder, "linux-64", packages)
    stand_in.write_repodata(folder, "noarch", {})


@pytest.fixture
def find_reasons(
    recipes: RecipeSet, steps: list[Step], tmp_path: Path
) -> Callable[[Packages], dict[str, str]]:
    """A function that returns, by recipe, the reason why conda-forge cannot satisfy requirements.

    Its argument is the packages of conda-forge.
    """

    def find(packages: Packages) -> dict[str, str]:
        folder = tmp_path / "theirs"
        folder.mkdir()
        write_index(folder, packages)
        empty_channel = LocalChannel(tmp_path / "empty")
        return find_unsolvable(recipes, steps, empty_channel, conda_forge=folder.as_uri())

    return find


def without(packages: Packages, name: str) -> Packages:
    """Return all records except those of one package. The package must have a record."""
    others = {file: record for file, record in packages.items() if record["name"] != name}
    assert len(others) < len(packages)
    return others


def test_a_complete_conda_forge_has_all(complete: Packages, find_reasons: Callable) -> None:
    assert find_reasons(complete) == {}


def test_what_is_missing_is_named(complete: Packages, find_reasons: Callable) -> None:
    """If conda-forge lacks two of vLLM's requirements, only vLLM has a reason, which names both."""
    reasons = find_reasons(without(without(complete, "xgrammar"), "setproctitle"))
    assert reasons == {
        "vllm": "conda-forge has no setproctitle; xgrammar >=0.2.6,<0.3"
        " (run environment, Python 3.12 and 3.13)"
    }


def test_what_does_not_solve_together_is_said(complete: Packages, find_reasons: Callable) -> None:
    """All required packages exist, but one of them requires another pytorch than ours.

    Strict channel priority forbids the solver to choose conda-forge's pytorch instead.
    """
    timm = package("timm", "1.0.26", depends=("pytorch <2",))
    reasons = find_reasons(without(complete, "timm") | timm)
    assert list(reasons) == ["vllm"]
    assert reasons["vllm"].startswith("timm >=1.0.17 cannot be installed with the other ")
    assert "pytorch <2" in reasons["vllm"] and "\n" not in reasons["vllm"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """A server of the folder `web`: its URL, and the paths that clients request."""
    requests: list[str] = []

    class RecordingHandler(QuietHandler):
        def log_request(self, *_: object) -> None:
            requests.append(self.path)

    (tmp_path / "web").mkdir()
    with served(tmp_path / "web", RecordingHandler) as url:
        yield url, requests


@pytest.mark.parametrize(
    ("command", "code"), [("plan", 0), ("plan --strict", 3), ("build vllm", 3)]
)
def test_a_channel_that_lacks_one(
    tmp_path: Path, server: tuple[str, list[str]], complete: Packages, command: str, code: int
) -> None:
    """The command names the missing package, and fetches only indexes and run exports."""
    url, requests = server
    write_index(tmp_path / "web", without(complete, "mcp") | package("mcp", "1.28.1"))
    root = tmp_path / "checkout"
    copy_checkout(root, packages=False)
    (root / "build/sources").unlink()
    home = tmp_path / "home"
    stand_in.write_mirrors(home, {CONDA_FORGE: url})
    environment = {"HOME": str(home), "PIXI_HOME": str(home / ".pixi")}
    done = drive(root, *command.split(), "--base", "conda-forge", **environment)
    printed = done.stdout + done.stderr
    assert done.returncode == code, printed
    newest = r"\(the newest is 1\.28\.1\)"
    reason = rf"conda-forge has no mcp \S+ {newest} \(run environment, Python 3.12 and 3.13\)"
    if command == "build vllm":
        assert re.search(f"not started: vllm: {reason}", printed), printed
    else:
        skipped = set(re.findall(r"(?m)^ *(\d+) skipped .*", printed))
        assert re.search(rf"(?m)^ *\d+ skipped +vllm-0\S+: {reason}$", printed), printed
        assert len(skipped) == 1 and len(re.findall(r"(?m)^ *\d+ build ", printed)) > 24
    assert requests
    for path in requests:
        assert re.search(r"/(repodata|run_exports)[^/]*$", path)
    assert not (root / "build/sources").exists() and not (root / "build/staging").exists()
