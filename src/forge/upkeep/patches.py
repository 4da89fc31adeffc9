# SPDX-License-Identifier: BSD-3-Clause
"""Patches: each says why it is there, is named by one recipe, and applies without fuzz.

Where a source cannot be had, `patches/PKG/verified.yaml` records which files of upstream's
repository each patch was held against by hand.
"""

from __future__ import annotations

import re
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from forge.errors import ForgeError, NotAttempted
from forge.files import read_text
from forge.project import Project
from forge.recipes.recipe import Recipe, source_of
from forge.sources.cache import Progress, SourceCache, unpack

STATUSES = ("Pending", "Submitted", "Backport", "Inappropriate", "Denied")
TRAILERS = ("Upstream-Status", "Applies-To", "Remove-When", "Verified", "Last-Update")
WORDS_OF_WHY = 15
VERIFIED = "verified.yaml"


@dataclass(frozen=True)
class Applied:
    """What became of one recipe's patches: `state` is applies, fails or not attempted."""

    package: str
    count: int
    state: str
    detail: str


def all_patches(project: Project) -> list[Path]:
    """Every patch file of the repository."""
    return sorted((project.root / "patches").glob("*/*.patch"))


def lint_file(path: Path, text: str) -> list[str]:
    """What is wrong with one patch: its name, its git head, its trailers."""
    head, _, diff = text.partition("\n---\n")
    found = dict(re.findall(r"^([A-Z][\w-]+): (.+)$", head, re.M))
    wrong = [f"no {name}" for name in ("From", "Date", "Subject", *TRAILERS) if name not in found]
    if not re.match(r"From [0-9a-f]{40} Mon Sep 17 00:00:00 2001\n", text):
        wrong.append("not in git format-patch form")
    if not found.get("Subject", "").startswith("[PATCH] "):
        wrong.append("the subject does not start with [PATCH]")
    if found.get("Upstream-Status", "").split(" ")[0] not in STATUSES:
        wrong.append(f"Upstream-Status is not one of {', '.join(STATUSES)}")
    if not found.get("Applies-To", "").startswith(f"{path.parent.name} "):
        wrong.append("Applies-To is not PACKAGE VERSION")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", found.get("Last-Update", "")):
        wrong.append("Last-Update is no date")
    if not re.match(r"\d{4}-[a-z0-9-]+\.patch$", path.name):
        wrong.append("the file name is not NNNN-subject.patch")
    body = head.partition("\n\n")[2].partition("Upstream-Status")[0]
    if len(body.split()) < WORDS_OF_WHY:
        wrong.append("the body does not say why")
    if not diff.strip():
        wrong.append("no diff")
    return wrong


def lint(project: Project, recipes: dict[str, Recipe]) -> list[str]:
    """Findings about every patch file: its head, who names it, its number and version."""
    findings, named = [], {}
    for recipe in recipes.values():
        for path in patches_of(recipe):
            named.setdefault(path, []).append(recipe)
    for path in all_patches(project):
        text, owners = read_text(path), named.get(path, [])
        wrong = lint_file(path, text)
        if len(owners) != 1:
            wrong.append("no recipe names it" if not owners else "named more than once")
        for recipe in owners:
            if f"Applies-To: {path.parent.name} {recipe.version}\n" not in text:
                wrong.append(f"Applies-To is not {path.parent.name} {recipe.version}")
        findings += [f"{path.relative_to(project.root)}: {what}" for what in wrong]
    for folder in sorted({path.parent for path in all_patches(project)}):
        files = sorted(folder.glob("*.patch"))
        if [path.name[:4] for path in files] != [f"{n:04}" for n in range(1, len(files) + 1)]:
            findings.append(f"{folder.relative_to(project.root)}: numbers are not 0001, 0002, ...")
    return findings


def patches_of(recipe: Recipe) -> list[Path]:
    """The patch files that a recipe names, in order, once for each time that it names them."""
    return [
        (recipe.path.parent / name).resolve()
        for data in recipe.sources
        for name in data.get("patches", [])
    ]


def check(project: Project, recipes: dict[str, Recipe], progress: Progress) -> Iterator[Applied]:
    """Apply each recipe's patches to its fetched source by `git apply`, which takes no fuzz.

    rattler-build's own patcher takes fuzz 2 in silence.
    """
    cache = SourceCache(project)
    for name, recipe in recipes.items():
        for data in recipe.sources:
            files = [(recipe.path.parent / p).resolve() for p in data.get("patches", [])]
            if not files:
                continue
            try:
                archive = cache.fetch(source_of(recipe, data), progress)
            except NotAttempted as error:
                detail = f"{error}. {held_against(files)}"
                yield Applied(name, len(files), "not attempted", detail)
                continue
            wrong = _apply(archive, files)
            yield Applied(name, len(files), "fails" if wrong else "applies", wrong)


def _apply(archive: Path, files: list[Path]) -> str:
    """What git says against the first patch that does not apply, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        _unpack_patched(archive, tree, files)
        subprocess.run(["git", "init", "-q", tree], check=True)
        for path in files:
            done = subprocess.run(
                ["git", "-C", tree, "apply", "-p1", path],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                return f"{path.name}: {done.stderr.strip()}"
    return ""


def _unpack_patched(archive: Path, tree: Path, files: list[Path]) -> None:
    """Unpack what patches touch, where `unpack` would put it.

    flash-attn's archive has 7,000 files, pytorch's 100,000, and a patch touches a few.
    """
    if not tarfile.is_tarfile(archive):
        unpack(archive, tree)
        return
    sides = re.compile(r"^(?:---|\+\+\+) [ab]/(.+)$", re.M)
    names = {name for path in files for name in sides.findall(path.read_text())}
    found, tops = {}, set()
    with tarfile.open(archive) as tar:
        for member in tar:
            path = member.name.removeprefix("./")
            top, slash, below = path.partition("/")
            tops.add(top if slash or member.isdir() else "no folder")
            if member.isfile() and names & {path, below} and (stream := tar.extractfile(member)):
                found[path] = (stream.read(), member.mode)
    for path, (data, mode) in found.items():
        file = tree / (path.partition("/")[2] if len(tops) == 1 else path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        file.chmod(mode & 0o777)


def held_against(files: list[Path]) -> str:
    """Which of the patched files were compared by hand with upstream's, per verified.yaml."""
    record = files[0].parent / VERIFIED
    if not record.exists():
        return "None of its hunks was held against upstream's files"
    known = verified(record)
    touched = sorted({name for path in files for name in touched_files(path.read_text())})
    missing = [name for name in touched if name not in known]
    if missing:
        return f"By hand: all hunks but those of {', '.join(missing)}"
    return f"By hand: all hunks, against {len(touched)} files ({VERIFIED})"


def touched_files(text: str) -> list[str]:
    """The files that a patch changes."""
    return re.findall(r"^--- a/(.+)$", text, re.M)


def verified(record: Path) -> dict[str, dict[str, Any]]:
    """File -> what it was held against. Raises ForgeError for an entry without blob or commit."""
    try:
        entries = yaml.safe_load(read_text(record))["files"]
        items = [(name, dict(entry)) for name, entry in entries.items()]
    except (yaml.YAMLError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise ForgeError(f"{record} is no map of files to blob and commit: {error!r}") from None
    for name, entry in items:
        for key in ("blob", "commit"):
            if not re.fullmatch("[0-9a-f]{40}", str(entry.get(key, ""))):
                raise ForgeError(f"{record}: {name} names no {key} of 40 hex digits")
    return entries
