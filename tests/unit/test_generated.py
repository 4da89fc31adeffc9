# SPDX-License-Identifier: BSD-3-Clause
"""Generated text in pages and manifests: names on PyPI, and several stacks in one workspace."""

import json
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace
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
from forge.recipes.package_tables import replace_figures

NAMES = pypi.read_names(CHECKOUT / "recipes")
HIDDEN = {name for name in NAMES.values() if name} | {*generated.FOR_CUDA}
COPIES = ["README.md", "docs/pypi.md", "docs/workspaces.md", generated.COMBINED_MANIFEST]
COPIES += [f"stacks/{stack}/pixi.toml" for stack in STACKS]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the files with generated tables of names, and a recipe that states the names."""
    for name in ("variants.yaml", *COPIES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / name, tmp_path / name)
    state_names(tmp_path, NAMES)
    return tmp_path


def state_names(root: Path, names: pypi.Names) -> None:
    """Write a recipe that states only names on PyPI."""
    file = root / "recipes/all/recipe.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"extra": {"pypi": names}}))


def find_stale(project: Path) -> list[str]:
    """Return the files that `forge generate` would change."""
    files = generated.find_outdated(Project.at(project))
    return sorted(str(path.relative_to(project)) for path, _ in files)


def parse_manifests(text: str) -> list[dict[str, Any]]:
    """Return the data of each manifest in a page, or of a text that is itself a manifest."""
    blocks = text.split("```toml\n")[1:] if "```toml" in text else [text]
    parsed = [tomllib.loads(block.split("\n```")[0]) for block in blocks]
    return [data.get("tool", {}).get("pixi", data) for data in parsed]


def test_the_copies_are_up_to_date() -> None:
    assert find_stale(CHECKOUT) == []


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_has_every_name(name: str) -> None:
    """Each copy of the tables hides PyPI's packages that have our names or need CUDA.

    It also maps our packages to their names on PyPI.
    """
    manifests = parse_manifests((CHECKOUT / name).read_text())
    (data,) = (manifest for manifest in manifests if "pypi-exclude-newer" in manifest)
    assert data["pypi-exclude-newer"] == dict.fromkeys(HIDDEN, "1970-01-01")
    ((channel, table),) = data["workspace"]["conda-pypi-map"].items()
    assert channel == PUBLISHED and table["mapping-mode"] == "replace"
    assert table["same-name-heuristic"] is True
    mapping = {conda: conda for conda in NAMES} | table["mapping"]
    for conda, pypi_name in NAMES.items():
        if pypi_name:
            assert mapping[conda] == pypi_name


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
        assert name in find_stale(project)
        done = CliRunner(env={"FORGE_ROOT": str(project)}).invoke(app, ["generate", "--check"])
        assert done.exit_code == 1 and f"{name} is not what forge generate writes" in done.output
        assert file.read_text() == text.replace(old, new), "--check must write nothing"
        for path, new in generated.find_outdated(Project.at(project)):
            path.write_text(new)
        assert file.read_text() == text and find_stale(project) == []


def test_a_new_package_is_written_into_every_copy(project: Path) -> None:
    state_names(project, NAMES | {"new-package": "its.name-there", "renamed-nowhere": None})
    assert find_stale(project) == sorted(COPIES)
    done = CliRunner(env={"FORGE_ROOT": str(project)}).invoke(app, ["generate"])
    assert done.exit_code == 0, done.output
    assert find_stale(project) == []
    for name in COPIES:
        text = (project / name).read_text()
        assert '"its.name-there" = "1970-01-01"\n' in text and "renamed-nowhere" not in text
        assert 'mapping = { new-package = "its.name-there", pytorch = "torch" }' in text


def test_a_change_of_a_stack_changes_the_workspace_of_several(project: Path) -> None:
    file = project / "stacks/vllm/pixi.toml"
    file.write_text(file.read_text().replace('vllm = "0.33.*"', 'vllm = "0.34.*"'))
    assert find_stale(project) == [generated.COMBINED_MANIFEST]
    file.write_text(file.read_text().replace("[feature.vllm.", "[feature.other."))
    with pytest.raises(ForgeError, match=r"stacks/vllm/pixi.toml has no table \[feature.vllm"):
        find_stale(project)


def test_several_stacks_keep_their_tables() -> None:
    """Each stack keeps the feature of its own workspace, and has an environment of its own."""
    several = tomllib.loads((CHECKOUT / generated.COMBINED_MANIFEST).read_text())
    for stack in generated.COMBINED_STACKS:
        own = tomllib.loads((CHECKOUT / f"stacks/{stack}/pixi.toml").read_text())
        assert several["feature"][stack] == own["feature"][stack]
        assert [stack] in several["environments"].values()
        (strix_halo,) = several["workspace"]["platforms"]
        assert own["workspace"]["platforms"] == [strix_halo, "linux-64"]
        own_keys = {key: own["workspace"][key] for key in ("name", "platforms")}
        assert several["workspace"] | own_keys == own["workspace"]


def test_versions_of_our_packages_are_replaced() -> None:
    """In a manifest, the recipe's version replaces the old version of our package.

    The new version is cut to as many parts as the old one has. Lines without a version of our
    package are not changed.
    """
    recipe = SimpleNamespace(output_names=["alpha", "libalpha"], version="2.14.1.post3")
    unchanged = 'beta = "1.2.*"\nalpha = "*"\nalpha = ">=1.2"\nmy-alpha = "1.2.*"\n'
    text = f'alpha = "2.13.*"   # why\nlibalpha = "2.13.0.post2.*"\n{unchanged}'
    expected = f'alpha = "2.14.*"   # why\nlibalpha = "2.14.1.post3.*"\n{unchanged}'
    assert generated.insert_versions(text, {"alpha": recipe}) == expected


def test_figures_of_a_sentence_are_replaced() -> None:
    """The figures in a sentence of a page are replaced, even if a line ends within the sentence."""
    page = "| a | It takes 3 GiB and 0.5\nCPU hours. | 3 GiB |\n"
    figures = {"disk": "4.5", "hours": "12"}
    sentence = "takes {disk} GiB and {hours} CPU hours."
    text = replace_figures(page, sentence, figures, "a.md")
    assert text == "| a | It takes 4.5 GiB and 12\nCPU hours. | 3 GiB |\n"
    for changed in (page + page, page.replace("takes", "needs")):
        with pytest.raises(ForgeError, match=r"a.md: [02] sentences have .*; expected one"):
            replace_figures(changed, sentence, figures, "a.md")


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
