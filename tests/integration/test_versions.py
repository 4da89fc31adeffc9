# SPDX-License-Identifier: BSD-3-Clause
"""Real recipes with what PyPI serves: patches apply, and a recipe is moved to another release."""

import re
from pathlib import Path

import pytest
from packaging.version import Version
from support.patches import lint
from support.project import MiniProject, copy_checkout, forge

from forge import versions
from forge.errors import NotAttempted
from forge.project import Project
from forge.recipes.plan import every_source
from forge.sources.download import Downloader


def test_our_patches_apply() -> None:
    """Those that PyPI serves must apply; the others are reported as not attempted."""
    said = forge("patches", "check")
    assert re.search(r"^flash-attn: \d+ patches: applies$", said, re.M)
    for line in said.splitlines():
        assert " patches: " not in line or re.search(r": (applies$|not attempted: )", line)


def test_flash_attn_moves(tmp_path: Path) -> None:
    """To the release before, in a copy of this repository."""
    copy_checkout(tmp_path / "copy", packages=False)
    project = MiniProject(tmp_path / "copy")
    (project.root / "build" / "sources").unlink()  # the checkout's
    recipe = every_source(Project.at(project.root)).recipes["flash-attn"]
    try:
        found = versions.releases(Downloader(), recipe)
    except NotAttempted as error:
        pytest.skip(f"not attempted: {error}")
    ours = Version(recipe.version)
    older = str(max(v for v, why in found.items() if v < ours and not (why or v.is_prerelease)))
    text = recipe.path.read_text().replace(recipe.version, older)
    recipe.path.write_text(text)
    done = project.forge("sources", "fetch", "flash-attn", code=1)
    (says,) = re.findall(
        "has sha256 (\\w+), the recipe says (\\w+); pip's index states the same", done.stderr
    )
    recipe.path.write_text(text.replace(says[1], says[0]))
    project.forge("sources", "fetch", "flash-attn")
    moved = every_source(Project.at(project.root))
    assert moved.recipes["flash-attn"].version == older
    assert any("stacks/attention requires flash-attn" in line for line in versions.conflicts(moved))
    assert any(f"Applies-To is not flash-attn {older}" in line for line in lint(moved))
