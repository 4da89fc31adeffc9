# SPDX-License-Identifier: BSD-3-Clause
"""`forge bump` and `forge outdated` on the command line, with a web page and with PyPI."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.project import CHECKOUT, MiniProject
from support.servers import served

from forge.errors import NotAttempted
from forge.project import Project
from forge.sources.cache import PYPI_SOURCES, PYPI_URL
from forge.sources.download import Downloader
from forge.upkeep import bump, upstream

PAGE = '<a href="../">up</a><a href="x-1.0.tar.gz?y=1">a</a><a href="x-2.0.tar.gz">b</a>'


def test_commands(tmp_path: Path) -> None:
    """Exit codes and words, on a recipe whose releases a web page lists."""
    project, hosts = MiniProject(tmp_path / "project"), tmp_path / "hosts"
    hosts.mkdir()
    with served(hosts) as url:
        source = f"[{{url: '{url}/x-1.0.tar.gz', sha256: {'0' * 64}}}]"
        file = project.recipe("x", source=source) / "recipe.yaml"
        text = file.read_text().replace('version: "1.0"}', 'version: "${{ version }}"}')
        text = text.replace("package:", 'context:\n  version: "1.0"\npackage:')
        file.write_text(text.replace("x-1.0.tar", "x-${{ version }}.tar"))
        done = project.forge("outdated", code=3)
        assert f"{url}/ lists no files" in done.stderr
        (hosts / "index.html").write_text(PAGE)
        (row,) = json.loads(project.forge("outdated", "--json", code=1).stdout)
        assert (row["newest"], row["outdated"], row["asked"]) == ("2.0", True, f"{url}/")
        assert "x@" not in project.forge("bump", "x", code=3).stderr, "x-2.0.tar.gz is not there"
        assert 'version: "1.0"' in file.read_text()
        shutil.make_archive(str(hosts / "x-2.0"), "gztar", CHECKOUT / "stacks")
        assert "not PKG=VERSION" in project.forge("bump", "x", "--with", "y", code=2).stderr
        done = project.forge("bump", "x")
        assert "x 1.0 -> 2.0" in done.stdout and "wrote recipes/x/recipe.yaml" in done.stdout
        assert "to do: README.md" in done.stderr
        project.forge("outdated")


def test_flash_attn_there_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real recipes and PyPI, in a copy of this repository."""
    monkeypatch.setenv(PYPI_SOURCES, PYPI_URL)
    root = tmp_path / "copy"
    leave = shutil.ignore_patterns("build", "channel", ".git", ".pixi", "__pycache__")
    shutil.copytree(CHECKOUT, root, ignore=leave)
    project = Project(root, root / "channel", tmp_path / "build")
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    recipes = bump.every_source(project)
    recipe = recipes.recipes["flash-attn"]
    try:
        found = upstream.releases(Downloader(), recipe)
    except NotAttempted as error:
        pytest.skip(f"not attempted: {error}")
    versions = [r.version for r in found if not (r.yanked or r.key.is_prerelease)]
    older = versions[versions.index(recipe.version) - 1]
    done = bump.bump(project, recipes, {"flash-attn": older}, lambda *_: None)
    assert done.moves == [f"flash-attn {recipe.version} -> {older}"]
    assert any("stacks/attention requires flash-attn" in line for line in done.to_do)
    recipes = bump.every_source(project)
    done = bump.bump(project, recipes, {"flash-attn": recipe.version}, lambda *_: None)
    assert not any("patches" in line for line in done.to_do)
    assert {path: path.read_bytes() for path in before} == before
