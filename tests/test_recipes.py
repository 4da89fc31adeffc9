# SPDX-License-Identifier: BSD-3-Clause
"""Every recipe of this repository on both bases, and every patch on the real source."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from conftest import CHECKOUT

from forge_store import bases
from forge_store.channel import CONTENT_HASH
from forge_store.project import NotAttempted, Project
from forge_store.sources import PYPI_SOURCES, PYPI_URL, SourceCache, unpack
from strix_forge.recipes import RecipeSet, sources_of

os.environ[PYPI_SOURCES] = PYPI_URL
PROJECT = Project.at(CHECKOUT)
RECIPES = sorted(path.parent.name for path in CHECKOUT.glob("recipes/*/recipe.yaml"))
PATCHES = sorted(CHECKOUT.glob("patches/*/*.patch"))
STATUSES = ("Pending", "Submitted", "Backport", "Inappropriate", "Denied")
TRAILERS = ("Upstream-Status", "Applies-To", "Remove-When", "Verified", "Last-Update")


@pytest.fixture(scope="module", params=["conda-forge", "embedded"])
def recipes(request: pytest.FixtureRequest) -> RecipeSet:
    return RecipeSet(PROJECT, bases.load(PROJECT, request.param))


@pytest.mark.parametrize("name", RECIPES)
def test_renders(recipes: RecipeSet, name: str) -> None:
    """Build strings follow conda-forge's grammar, sources are pinned, a licence file is named."""
    recipe = recipes.recipes[name]
    rendered = recipes.render(recipe.path, "x")
    assert rendered
    for data in (output["recipe"] for output in rendered):
        assert data["about"]["license"] and data["about"]["license_file"]
        assert data["tests"], "a package without a test"
        assert CONTENT_HASH.search(data["build"]["string"])
        assert data["build"]["string"].startswith(recipes.base.build_prefix)
    for source in sources_of(recipe):
        assert re.fullmatch("[0-9a-f]{64}", source.sha256)


def test_no_recipe_knows_its_base() -> None:
    for path in CHECKOUT.glob("recipes/*/*"):
        if path.is_file():
            assert not re.search("embedded|hostgcc|hostgxx|hostbound", path.read_text()), path


def test_order_puts_dependencies_first(recipes: RecipeSet) -> None:
    order = list(recipes.recipes)
    for name, recipe in recipes.recipes.items():
        for needed in recipe.needs | recipe.tests_need:
            if needed in recipes.owner:
                assert order.index(recipes.owner[needed]) < order.index(name)


def test_variants_have_reasons() -> None:
    """One key per pin, a comment above each."""
    lines = (CHECKOUT / "variants.yaml").read_text().splitlines()
    keys = [index for index, line in enumerate(lines) if re.match(r"\w+:", line)]
    assert keys
    for index in keys:
        assert lines[index - 1].startswith("# "), f"{lines[index]} has no reason above it"


def test_versions_agree(recipes: RecipeSet) -> None:
    """What a reader and a stack are told is what the recipes and variants.yaml say."""
    readme = (CHECKOUT / "README.md").read_text()
    for name, recipe in recipes.recipes.items():
        assert f"| {name} | {recipe.version} |" in readme
    pins = {key: recipes.base.variants[key][0] for key in ("pytorch", "triton", "amd_aiter_min")}
    assert recipes.recipes["triton"].version == pins["triton"]
    stack = tomllib.loads((CHECKOUT / "stacks/attention/pixi.toml").read_text())["dependencies"]
    assert pins["pytorch"].startswith(stack["pytorch"].removesuffix("*"))
    assert stack["triton"] == f"{pins['triton']}.*"
    assert stack["amd-aiter"] == f">={pins['amd_aiter_min']}"
    assert stack["flash-attn"] == f"{recipes.recipes['flash-attn'].version}.*"


def lint(path: Path, text: str) -> list[str]:
    """What is wrong with the head of a patch file."""
    head, _, diff = text.partition("\n---\n")
    found = dict(re.findall(r"^([A-Z][\w-]+): (.+)$", head, re.M))
    wrong = [f"no {name}" for name in ("From", "Date", "Subject", *TRAILERS) if name not in found]
    if not re.match(r"From [0-9a-f]{40} Mon Sep 17 00:00:00 2001\n", text):
        wrong.append("not in git format-patch form")
    if not found.get("Subject", "").startswith("[PATCH] "):
        wrong.append("the subject does not start with [PATCH]")
    if found.get("Upstream-Status", "").split(" ")[0] not in STATUSES:
        wrong.append(f"Upstream-Status is not one of {STATUSES}")
    if not found.get("Applies-To", "").startswith(f"{path.parent.name} "):
        wrong.append("Applies-To is not PACKAGE VERSION")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", found.get("Last-Update", "")):
        wrong.append("Last-Update is no date")
    if not re.match(r"\d{4}-[a-z0-9-]+\.patch$", path.name):
        wrong.append("the file name is not NNNN-subject.patch")
    body = head.partition("\n\n")[2].partition("Upstream-Status")[0]
    if len(body.split()) < 15:
        wrong.append("the body does not say why")
    if not diff.strip():
        wrong.append("no diff")
    return wrong


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_patch_head(path: Path) -> None:
    assert lint(path, path.read_text()) == []


@pytest.mark.parametrize("trailer", [*TRAILERS, "Subject", "Date"])
def test_lint_sees_a_missing_line(trailer: str) -> None:
    text = re.sub(rf"^{trailer}: .*\n", "", PATCHES[0].read_text(), flags=re.M)
    assert f"no {trailer}" in lint(PATCHES[0], text)


def test_lint_sees_a_bad_value() -> None:
    text = PATCHES[0].read_text().replace("Upstream-Status: ", "Upstream-Status: Maybe ")
    assert any("Upstream-Status" in line for line in lint(PATCHES[0], text))
    assert any("NNNN" in line for line in lint(PATCHES[0].with_name("x.patch"), text))


@pytest.mark.parametrize("package", sorted({path.parent.name for path in PATCHES}))
def test_patches_are_used_and_numbered(package: str) -> None:
    recipe = RecipeSet(PROJECT, bases.load(PROJECT, "conda-forge")).recipes[package]
    named = [p for source in recipe.sources for p in source.get("patches", [])]
    files = [path for path in PATCHES if path.parent.name == package]
    assert [Path(p).name for p in named] == [path.name for path in files]
    assert [path.name[:4] for path in files] == [f"{n:04}" for n in range(1, len(files) + 1)]
    version = f"Applies-To: {package} {recipe.version}\n"
    assert all(version in path.read_text() for path in files)


@pytest.mark.parametrize("package", sorted({path.parent.name for path in PATCHES}))
def test_patches_apply_without_fuzz(package: str, tmp_path: Path) -> None:
    """rattler-build takes fuzz 2 in silence; `git apply` takes none."""
    recipe = RecipeSet(PROJECT, bases.load(PROJECT, "conda-forge")).recipes[package]
    (source,) = sources_of(recipe)
    try:
        archive = SourceCache(PROJECT).fetch(source, lambda *_: None)
    except NotAttempted as error:
        pytest.skip(f"not attempted: {error}")
    tree = tmp_path / "tree"
    unpack(archive, tree)
    subprocess.run(["git", "init", "-q", tree], check=True)
    for path in (path for path in PATCHES if path.parent.name == package):
        done = subprocess.run(
            ["git", "-C", tree, "apply", "-p1", path], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{path.name}: {done.stderr}"
