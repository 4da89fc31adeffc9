# SPDX-License-Identifier: BSD-3-Clause
"""Patches: each says why it is there, is named by its recipe, and applies without fuzz."""

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forge.errors import ForgeError, NotAttempted
from forge.files import read_text
from forge.project import Project
from forge.recipes.plan import RecipeSet
from forge.recipes.recipe import patched, patches_of, prepare, source_of
from forge.sources.cache import SourceCache
from forge.sources.download import Progress

STATUSES = ("Pending", "Submitted", "Backport", "Inappropriate", "Denied")
TRAILERS = ("Upstream-Status", "Applies-To", "Remove-When", "Verified", "Last-Update")
NAME, DATE = r"\d{4}-[a-z0-9-]+\.patch", r"\d{4}-\d\d-\d\d"
FORM = r"From [0-9a-f]{40} Mon Sep 17 00:00:00 2001\n"
WORDS_OF_WHY = 15


@dataclass(frozen=True)
class Applied:
    """The outcome for one recipe's patches: `state` is applies, fails or not attempted."""

    package: str
    count: int
    state: str
    detail: str


def all_patches(project: Project) -> list[Path]:
    """List every patch file of the repository."""
    return sorted((project.root / "patches").glob("*/*.patch"))


def lint_file(path: Path, text: str) -> list[str]:
    """List what is wrong with one patch: its name, its git head, its trailers."""
    head, _, diff = text.partition("\n---\n")
    found = dict(re.findall(r"^([A-Z][\w-]+): (.+)$", head, re.M))
    body = head.partition("\n\n")[2].partition("Upstream-Status")[0]
    status = found.get("Upstream-Status", "").split(" ")[0]
    correct = {
        "not in git format-patch form": re.match(FORM, text),
        "the subject does not start with [PATCH]": found.get("Subject", "").startswith("[PATCH] "),
        f"Upstream-Status is not one of {', '.join(STATUSES)}": status in STATUSES,
        "Last-Update is not a date": re.fullmatch(DATE, found.get("Last-Update", "")),
        "the file name is not NNNN-subject.patch": re.fullmatch(NAME, path.name),
        "the body does not say why": len(body.split()) >= WORDS_OF_WHY,
        "no diff": diff.strip(),
    } | {f"no {name}": name in found for name in ("From", "Date", "Subject", *TRAILERS)}
    return [what for what, holds in correct.items() if not holds]


def lint(recipes: RecipeSet) -> list[str]:
    """Check every patch file: its head, number and version, and that its recipe names it.

    Another recipe may name it too: a package of compiled kernels reads the same source.
    """
    findings: list[str] = []
    for path in all_patches(recipes.project):
        text, package = read_text(path), path.parent.name
        recipe, wrong = recipes.recipes.get(package), lint_file(path, text)
        named = recipe.local_files().count(path) if recipe else 0
        if named != 1:
            wrong.append("named more than once" if named else f"recipe {package} does not name it")
        elif recipe and f"Applies-To: {package} {recipe.version}\n" not in text:
            wrong.append(f"Applies-To is not {package} {recipe.version}")
        number = 1 + sorted(path.parent.glob("*.patch")).index(path)
        if not path.name.startswith(f"{number:04}-"):
            wrong.append(f"the numbers are not 0001, 0002, ...: this is patch {number}")
        findings += [f"{path.relative_to(recipes.project.root)}: {what}" for what in wrong]
    return findings


def check(recipes: RecipeSet, progress: Progress) -> Iterator[Applied]:
    """Apply each recipe's patches to its fetched source, by the code that a build runs first."""
    cache = SourceCache(recipes.project)
    for name, recipe in recipes.recipes.items():
        for data in (data for data in recipe.sources if patches_of(recipe, data)):
            state, detail = "fails", ""
            try:
                if "path" not in (changed := patched(recipe, data)):
                    cache.fetch(source_of(recipe, changed), progress)
                with tempfile.TemporaryDirectory(dir=cache.folder) as folder:
                    detail = prepare(recipe, data, cache, Path(folder), whole=False)
            except NotAttempted as error:
                state, detail = "not attempted", str(error)
            except (ForgeError, OSError) as error:
                detail = str(error)
            count = len(patches_of(recipe, data))
            yield Applied(name, count, state if detail else "applies", detail)
