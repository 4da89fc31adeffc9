# SPDX-License-Identifier: BSD-3-Clause
"""Text that is generated into pages and manifests: PyPI's names, and stacks in one workspace."""

import json
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.project import CHECKOUT, STACKS, MiniProject
from typer.testing import CliRunner

from forge import generated
from forge.bases import PUBLISHED
from forge.cli.main import app
from forge.conda import pypi
from forge.errors import ForgeError
from forge.project import Project

NAMES = pypi.read_names(CHECKOUT / "recipes")
HIDDEN = {name for name in NAMES.values() if name} | {"xformers", "unsloth"}
COPIES = ["README.md", "docs/pypi.md", "docs/workspaces.md", generated.SEVERAL]
COPIES += [f"stacks/{stack}/pixi.toml" for stack in STACKS]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The files that text is generated from, and those that have it."""
    for name in ("variants.yaml", *COPIES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / name, tmp_path / name)
    state_names(tmp_path, NAMES)
    return tmp_path


def state_names(root: Path, names: pypi.Names) -> None:
    """Write a recipe that states names on PyPI, and nothing else."""
    file = root / "recipes/all/recipe.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"extra": {"pypi": names}}))


def stale(project: Path) -> list[str]:
    """The files that `forge generate` would write."""
    files = generated.find_outdated(Project.at(project))
    return sorted(str(path.relative_to(project)) for path, _ in files)


def tables(text: str) -> list[dict[str, Any]]:
    """The manifests in a page, or the manifest."""
    blocks = text.split("```toml\n")[1:] if "```toml" in text else [text]
    parsed = [tomllib.loads(block.split("\n```")[0]) for block in blocks]
    return [data.get("tool", {}).get("pixi", data) for data in parsed]


def test_the_copies_are_up_to_date() -> None:
    assert stale(CHECKOUT) == []


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_has_every_name(name: str) -> None:
    """Each of ours that PyPI has, under the name that pixi takes it for, and what wants CUDA."""
    (data,) = (d for d in tables((CHECKOUT / name).read_text()) if "pypi-exclude-newer" in d)
    assert data["pypi-exclude-newer"] == dict.fromkeys(HIDDEN, "1970-01-01")
    ((channel, table),) = data["workspace"]["conda-pypi-map"].items()
    assert channel == PUBLISHED and table["mapping-mode"] == "replace"
    assert table["same-name-heuristic"] is True
    known = {conda: conda for conda in NAMES} | table["mapping"]
    assert {conda: known[conda] for conda, name in NAMES.items() if name} == {
        conda: name for conda, name in NAMES.items() if name
    }


@pytest.mark.parametrize("name", COPIES)
def test_a_change_of_one_copy_is_seen(project: Path, name: str) -> None:
    file = project / name
    text = file.read_text()
    for old, new in (
        ('bitsandbytes = "1970-01-01"\n', ""),
        ('torch = "1970-01-01"\n', 'torch = "2026-01-01"\n'),
        ('xformers = "1970-01-01"\n', 'xformers = "1970-01-01"\nnumpy = "1970-01-01"\n'),
        ('mapping = { pytorch = "torch" }', "mapping = {}"),
    ):
        assert old in text
        file.write_text(text.replace(old, new))
        assert name in stale(project)
        done = CliRunner(env={"FORGE_ROOT": str(project)}).invoke(app, ["generate", "--check"])
        assert done.exit_code == 1 and f"{name} is not what forge generate writes" in done.output
        assert file.read_text() == text.replace(old, new), "--check writes nothing"
        for path, new in generated.find_outdated(Project.at(project)):
            path.write_text(new)
        assert file.read_text() == text and stale(project) == []


def test_a_new_package_is_written_into_every_copy(project: Path) -> None:
    state_names(project, NAMES | {"new-package": "its.name-there", "renamed-nowhere": None})
    assert stale(project) == sorted(COPIES)
    done = CliRunner(env={"FORGE_ROOT": str(project)}).invoke(app, ["generate"])
    assert done.exit_code == 0, done.output
    assert stale(project) == []
    for name in COPIES:
        text = (project / name).read_text()
        assert '"its.name-there" = "1970-01-01"\n' in text and "renamed-nowhere" not in text
        assert 'mapping = { new-package = "its.name-there", pytorch = "torch" }' in text


def test_a_change_of_a_stack_changes_the_workspace_of_several(project: Path) -> None:
    file = project / "stacks/vllm/pixi.toml"
    file.write_text(file.read_text().replace('vllm = "0.33.*"', 'vllm = "0.34.*"'))
    assert stale(project) == [generated.SEVERAL]
    file.write_text(file.read_text().replace("[feature.vllm.", "[feature.other."))
    with pytest.raises(ForgeError, match=r"stacks/vllm/pixi.toml has no \[feature.vllm.dep"):
        stale(project)


def test_several_stacks_keep_their_tables() -> None:
    """Each is the feature that its own workspace has, in an environment of its own."""
    several = tomllib.loads((CHECKOUT / generated.SEVERAL).read_text())
    for stack in generated.TOGETHER:
        own = tomllib.loads((CHECKOUT / f"stacks/{stack}/pixi.toml").read_text())
        assert several["feature"][stack] == own["feature"][stack]
        assert [stack] in several["environments"].values()
        (strix_halo,) = several["workspace"]["platforms"]
        assert own["workspace"]["platforms"] == [strix_halo, "linux-64"]
        same = several["workspace"] | {key: own["workspace"][key] for key in ("name", "platforms")}
        assert same == own["workspace"]


def test_lint_names_what_is_stale(
    tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mini = MiniProject(tmp_path / "mini")
    mini.recipe("alpha", extra={"pypi": NAMES})
    page = mini.root / "README.md"
    page.write_text('```toml\n[pypi-exclude-newer]\ntorch = "1970-01-01"\n```\n')
    run = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda words, **options: run(["true"], **options | {"cwd": tmp_path})
    )
    monkeypatch.setenv("FORGE_ROOT", str(mini.root))
    done = CliRunner().invoke(app, ["lint"])
    assert done.exit_code == 1 and "generated text: findings" in done.output
    assert "README.md is not what forge generate writes" in done.output
    assert CliRunner().invoke(app, ["generate"]).exit_code == 0
    assert CliRunner().invoke(app, ["lint"]).exit_code == 0
