# SPDX-License-Identifier: BSD-3-Clause
"""`forge patches`: every patch of the repository, and what lint and check must refuse."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest
from support.project import CHECKOUT, MiniProject

from forge.errors import ForgeError
from forge.files import sha256_file
from forge.project import Project
from forge.upkeep import patches

PATCHES = patches.all_patches(Project.at(CHECKOUT))
TEXT = "one\ntwo\nthree\n"
GOOD = """\
From 0123456789abcdef0123456789abcdef01234567 Mon Sep 17 00:00:00 2001
From: strix-forge <strix-forge@users.noreply.github.com>
Date: Sat, 21 Nov 2026 12:00:00 +0000
Subject: [PATCH] Change a word

The word was wrong, which made the reader stop; it was wrong since it was written, so another
one stands there now.

Upstream-Status: Inappropriate (a test)
Applies-To: alpha 1.0
Remove-When: never
Verified: applied by the tests
Last-Update: 2026-11-21
---
--- a/text
+++ b/text
@@ -1,3 +1,3 @@
 one
-two
+zwei
 three
"""


@pytest.fixture
def patched(project: MiniProject, tmp_path: Path) -> MiniProject:
    """A recipe `alpha` with one good patch, its source already in the cache."""
    (project.root / "build" / "sources").unlink()
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "text").write_text(TEXT)
    archive = tmp_path / "demo-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "demo", "demo")
    named = (
        f"[{{url: 'http://upstream.invalid/{archive.name}', sha256: {sha256_file(archive)},"
        " patches: [../../patches/alpha/0001-word.patch]}]"
    )
    folder = project.root / "patches" / "alpha"
    folder.mkdir(parents=True)
    (folder / "0001-word.patch").write_text(GOOD)
    project.recipe("alpha", source=named)
    project.forge("sources", "add", str(archive))
    return project


def patch_file(project: MiniProject) -> Path:
    return project.root / "patches" / "alpha" / "0001-word.patch"


def test_ours_are_clean(project: MiniProject) -> None:
    done = project.forge("patches", "lint", FORGE_ROOT=str(CHECKOUT))
    assert f"{len(PATCHES)} patches, 0 findings" in done.stdout and PATCHES


def test_ours_apply(project: MiniProject) -> None:
    """Those that PyPI serves must apply; of the others it is said that they were not tried."""
    done = project.forge("patches", "check", FORGE_ROOT=str(CHECKOUT))
    assert re.search(r"^flash-attn: \d+ patches: applies$", done.stdout, re.M)
    for line in done.stdout.splitlines():
        assert " patches: " not in line or re.search(r": (applies$|not attempted: )", line)


def test_a_good_patch(patched: MiniProject) -> None:
    assert "1 patches, 0 findings" in patched.forge("patches", "lint").stdout
    assert "alpha: 1 patches: applies" in patched.forge("patches", "check").stdout


@pytest.mark.parametrize("trailer", [*patches.TRAILERS, "Subject", "Date"])
def test_missing_line(trailer: str) -> None:
    path = Path("patches/alpha/0001-word.patch")
    assert patches.lint_file(path, GOOD) == []
    text = re.sub(rf"^{trailer}: .*\n", "", GOOD, flags=re.M)
    assert f"no {trailer}" in patches.lint_file(path, text)


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("Upstream-Status: Inapp", "Upstream-Status: Maybe", "Upstream-Status is not one of"),
        ("Applies-To: alpha 1.0", "Applies-To: alpha 2.0", "Applies-To is not alpha 1.0"),
        ("Last-Update: 2026-11-21", "Last-Update: today", "Last-Update is no date"),
        ("[PATCH] ", "", "does not start with [PATCH]"),
        ("From 0123", "From x", "not in git format-patch form"),
        ("The word was wrong, which made the reader stop; it was wrong since it was", "It", "why"),
    ],
)
def test_bad_value(patched: MiniProject, old: str, new: str, finding: str) -> None:
    assert old in GOOD
    patch_file(patched).write_text(GOOD.replace(old, new))
    done = patched.forge("patches", "lint", code=1)
    assert finding in done.stderr and "0001-word.patch" in done.stderr


def test_named_by_none_or_twice(patched: MiniProject) -> None:
    extra = patch_file(patched).with_name("0002-more.patch")
    extra.write_text(GOOD)
    assert "0002-more.patch: no recipe names it" in patched.forge("patches", "lint", code=1).stderr
    extra.unlink()
    recipe = patched.root / "recipes" / "alpha" / "recipe.yaml"
    name = "../../patches/alpha/0001-word.patch"
    recipe.write_text(recipe.read_text().replace(name, f"{name}, {name}"))
    assert "named more than once" in patched.forge("patches", "lint", code=1).stderr
    patch_file(patched).rename(patch_file(patched).with_name("word.patch"))
    recipe.write_text(recipe.read_text().replace("0001-word", "word"))
    assert "numbers are not 0001" in patched.forge("patches", "lint", code=1).stderr


def test_fuzz_is_refused(patched: MiniProject) -> None:
    """rattler-build would take this hunk, whose context is not quite the source's."""
    patch_file(patched).write_text(GOOD.replace(" one\n", " ones\n"))
    done = patched.forge("patches", "check", code=1)
    assert "alpha: 1 patches: fails: 0001-word.patch" in done.stdout


def test_source_out_of_reach(patched: MiniProject) -> None:
    """Not counted as passed, and what was compared by hand is told."""
    for archive in (patched.root / "build" / "sources").rglob("*.tar.gz"):
        archive.unlink()
    done = patched.forge("patches", "check")
    assert "alpha: 1 patches: not attempted" in done.stdout and "None of its hunks" in done.stdout
    patched.forge("patches", "check", "--strict", code=3)
    record = patch_file(patched).with_name(patches.VERIFIED)
    entry = f"files:\n  text: {{blob: {'a' * 40}, commit: {'b' * 40}}}\n"
    record.write_text(entry)
    assert "By hand: all hunks" in patched.forge("patches", "check").stdout
    record.write_text(entry.replace("text:", "other:"))
    assert "all hunks but those of text" in patched.forge("patches", "check").stdout
    record.write_text(entry.replace("a" * 40, "main"))
    assert "names no blob" in patched.forge("patches", "check", code=2).stderr


@pytest.mark.parametrize("record", sorted(CHECKOUT.glob(f"patches/*/{patches.VERIFIED}")), ids=str)
def test_our_records(record: Path) -> None:
    """Each names blob and commit of every file that a patch beside it changes."""
    known = patches.verified(record)
    for path in record.parent.glob("*.patch"):
        assert set(patches.touched_files(path.read_text())) <= set(known), path.name


@pytest.mark.parametrize(
    "text", [f"files:\n  text: {{blob: {'a' * 40}}}\n", "files: 3", "[", "", "files: {text: [1]}"]
)
def test_record_without_commit(tmp_path: Path, text: str) -> None:
    record = tmp_path / patches.VERIFIED
    record.write_text(text)
    with pytest.raises(ForgeError, match=f"{patches.VERIFIED}.* commit"):
        patches.verified(record)


def test_patch_that_is_no_text(patched: MiniProject) -> None:
    patch_file(patched).write_bytes(b"\xff")
    assert "0001-word.patch is not UTF-8" in patched.forge("patches", "lint", code=2).stderr
