# SPDX-License-Identifier: BSD-3-Clause
"""A move to another release by hand, as CONTRIBUTING has it: on the command line, and with PyPI."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

import pytest
from packaging.version import Version
from support.patches import lint
from support.project import CHECKOUT, MiniProject, copy_checkout
from support.servers import served

from forge import versions
from forge.errors import NotAttempted
from forge.project import Project
from forge.recipes.plan import every_source
from forge.sources.download import Downloader

LINK = '<a href="../../{0}#sha256={1}">{0}</a>'


def test_commands(tmp_path: Path) -> None:
    """Exit codes and words, from an index that first does not answer."""
    project, hosts = MiniProject(tmp_path / "project"), tmp_path / "hosts"
    (project.root / "build" / "sources").unlink()  # the checkout's
    hosts.mkdir()
    shutil.make_archive(str(hosts / "x-2.0"), "gztar", CHECKOUT / "stacks")
    digest = hashlib.sha256((hosts / "x-2.0.tar.gz").read_bytes()).hexdigest()
    source = "[{url: '${{ env.get(\"PYPI_SOURCES\") }}/x-1.0.tar.gz', sha256: %s}]" % ("0" * 64)
    recipe = project.recipe("x", source=source) / "recipe.yaml"
    recipe.write_text(
        f"{recipe.read_text()}extra:\n  purls: [pkg:pypi/x@1.0?file_name=x-1.0.tar.gz]\n"
    )
    with served(hosts) as url:
        pip = {"PIP_INDEX_URL": f"{url}/simple", "PIP_CONFIG_FILE": "/dev/null"}
        done = project.forge("outdated", code=3, **pip)
        assert re.search("x .* unreachable pip's index offers no x", done.stdout)
        page = hosts / "simple" / "x" / "index.html"
        page.parent.mkdir(parents=True)
        page.write_text("".join(LINK.format(f"x-{v}.tar.gz", digest) for v in ("1.0", "2.0")))
        assert re.search(
            "x +1.0 +2.0 +newer +PyPI", project.forge("outdated", code=1, **pip).stdout
        )
        recipe.write_text(recipe.read_text().replace("1.0", "2.0"))
        done = project.forge("sources", "fetch", "x", code=1, **pip)
        assert (
            f"has sha256 {digest}" in done.stderr and "pip's index states the same" in done.stderr
        )
        recipe.write_text(recipe.read_text().replace("0" * 64, digest))
        project.forge("sources", "fetch", "x", **pip)
        project.forge("outdated", **pip)


def test_flash_attn_moves(tmp_path: Path) -> None:
    """The real recipe and PyPI, to the release before, in a copy of this repository."""
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
