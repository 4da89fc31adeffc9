# SPDX-License-Identifier: BSD-3-Clause
"""The files that a bump edits, first in a copy, as text: comments and layout stay."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

from forge import bases
from forge.errors import ForgeError, Refused
from forge.files import read_text, write_text
from forge.project import Project
from forge.recipes.plan import RecipeSet
from forge.recipes.recipe import Recipe, sources_of

VARIANTS = "variants.yaml"
COPIED = ("README.md", "CHANGELOG.md", "stacks", "recipes", "patches", VARIANTS)
# A recipe may name another file for each Python that it is built for.
PYTHONS = ["3.11.* *_cpython", "3.12.* *_cpython"]
# a version that variants.yaml holds; `version: ${{ version }}` of the package section is none
KEY = re.compile(r"^  version: \$\{\{ (?!version )(\w+) \}\}$", re.M)


class Draft:
    """A copy, in `folder`, of what a bump may edit; the rest of the project is seen through links.

    `write` takes it over, file by file, each by a rename.
    """

    def __init__(self, project: Project, folder: Path) -> None:
        self.original = project
        for path in project.root.iterdir():
            if path.name not in COPIED and path.name not in ("build", "channel", ".git"):
                (folder / path.name).symlink_to(path)
            elif path.is_dir() and path.name in COPIED:
                # an installed stack has its environments, gigabytes, beside its manifest
                shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns(".pixi"))
            elif path.name in COPIED:
                (folder / path.name).write_text(read_text(path))
        self.project = Project(folder.resolve(), project.channel, project.build)
        self.began = {name: (folder / name).read_bytes() for name in self._names()}

    def recipes(self) -> RecipeSet:
        return every_source(self.project)

    def edit(self, name: str, pattern: str, new: str | Callable[[re.Match[str]], str]) -> int:
        """Replace in the lines of one file, if it is there, as re.sub does; returns how often."""
        path = self.project.root / name
        if not path.exists():
            return 0
        text, count = re.subn(pattern, new, read_text(path), flags=re.M)
        path.write_text(text)
        return count

    def set_variant(self, key: str, value: str) -> None:
        """Give a key of variants.yaml another value. Raises ForgeError if it has not just one."""
        if not self.edit(VARIANTS, rf'^({key}:\n  - "?)[^"\s]+("?)$', rf"\g<1>{value}\g<2>"):
            raise ForgeError(f"{VARIANTS} has no {key} with one value")

    def set_version(self, recipe: Recipe, new: str) -> None:
        """Put a version where a recipe has it, and its build number to 0.

        That is its context, or the key of variants.yaml that it names there; a key of the recipe's
        own name (triton) follows. Conditions on the old version become conditions on the new one,
        but where the recipe has some for it already (rocm-sdk has a release to go back to).
        """
        old, file = recipe.version, f"recipes/{recipe.name}/recipe.yaml"
        quoted, text = re.escape(old), recipe.path.read_text()
        if key := version_key(recipe):
            self.set_variant(key, new)
            if f'== "{new}"' not in text:
                self.edit(file, rf'([=!]= )"{quoted}"', rf'\g<1>"{new}"')
        else:
            self.edit(file, rf'^(  version: )"{quoted}"', rf'\g<1>"{new}"')
            shared = recipe.name.replace("-", "_")
            self.edit(VARIANTS, rf'^({shared}:\n  - "?){quoted}("?)$', rf"\g<1>{new}\g<2>")
        if old != new:
            self.edit(file, r"^(  build_number: )\d+", r"\g<1>0")
        for purl in recipe.extra.get("purls", []):
            if f"@{old}?" in purl:
                self.edit(file, re.escape(purl), purl.replace(old, new))

    def tell(self, old: Recipe, new: Recipe) -> None:
        """README's row and pins, the stacks' pins, and CHANGELOG's line for one that moved."""
        row = rf"^(\| {re.escape(new.name)} \| )[^|]+( \|)"
        self.edit("README.md", row, rf"\g<1>{new.version}\g<2>")
        manifests = self.project.root.glob("stacks/*/pixi.toml")
        for file in ["README.md", *(str(m.relative_to(self.project.root)) for m in manifests)]:
            for name in new.output_names:
                pin = rf'^({re.escape(name)} = ")([^"]+)'
                self.edit(file, pin, lambda m: m[1] + pin_like(m[2], old.version, new.version))
        log = self.project.root / "CHANGELOG.md"
        if log.exists() and old.version != new.version:
            log.write_text(changelog(read_text(log), new.name, old.version, new.version))

    def _names(self) -> list[Path]:
        """The files that a bump may write, below the root, in the order of writing.

        What holds a version comes last. So a bump that ends before it finds the old version, and
        does everything again.
        """
        mine = self.project.root
        globs = ("README.md", "CHANGELOG.md", "stacks/*/pixi.toml")
        recipes = sorted(mine.glob("recipes/*/recipe.yaml"))
        holders = [path for path in recipes if not KEY.search(path.read_text())]
        files = [path for glob in globs for path in sorted(mine.glob(glob))]
        files += [path for path in recipes if path not in holders]
        files += [mine / VARIANTS, *holders]
        return [path.relative_to(mine) for path in files if path.exists()]

    def changed(self) -> list[Path]:
        """The originals that are to be written, in that order."""
        new = [n for n in self._names() if (self.project.root / n).read_bytes() != self.began[n]]
        return [self.original.root / name for name in new]

    def write(self) -> None:
        """Take the draft over. Raises Refused where somebody edited a file since it was copied."""
        names = [path.relative_to(self.original.root) for path in self.changed()]
        for name in names:
            if (self.original.root / name).read_bytes() != self.began[name]:
                raise Refused(
                    f"{self.original.root / name} was edited meanwhile. Nothing was written: run "
                    "the same command again"
                )
        for name in names:
            write_text(self.original.root / name, (self.project.root / name).read_text())


def version_key(recipe: Recipe) -> str:
    """The key of variants.yaml that holds a recipe's version, or nothing for one of its own."""
    found = KEY.search(recipe.path.read_text())
    return found[1] if found else ""


def every_source(project: Project) -> RecipeSet:
    """The recipes with the sources of every Python, whatever base builds them."""
    return RecipeSet(project, bases.load(project, "conda-forge", {"python": PYTHONS}))


def committed_hashes(project: Project, folder: Path) -> dict[str, str]:
    """Origin -> hash of every source in git's last commit, which is unpacked to `folder`.

    Empty where there is no git, or where that commit's recipes cannot be read.
    """
    command = ["git", "-C", project.root, "archive", "--format=tar", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
            # CPython before 3.11.4 has no filters; the archive is our own commit
            tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
            tar.extractall(folder)
        return origins(every_source(Project(folder, project.channel, project.build)))
    except (OSError, tarfile.TarError, ForgeError):
        return {}


def origins(recipes: RecipeSet) -> dict[str, str]:
    """Origin -> hash of every source."""
    return {s.origin: s.digest for r in recipes.recipes.values() for s in sources_of(r)}


def pin_like(spec: str, old: str, new: str) -> str:
    """A pin of the old version as one of the new, as exact as it was: 2.13.* becomes 2.14.*."""
    pin = spec.removesuffix(".*")
    if pin == old:
        return spec.replace(old, new)
    if f"{old}.".startswith(f"{pin}."):
        return ".".join(new.split(".")[: pin.count(".") + 1]) + spec[len(pin) :]
    return spec


def changelog(text: str, name: str, old: str, new: str) -> str:
    """One line for each package that moved since the last revision; none for one that is back."""
    head, title, rest = text.partition("## [Unreleased]\n")
    if not title:
        return text
    start = re.search(r"^## \[", rest, re.M)
    body, tail = (rest[: start.start()], rest[start.start() :]) if start else (rest, "")
    line = re.compile(rf"^- {re.escape(name)} (\S+) -> \S+\n", re.M)
    earlier = line.search(body)
    first = earlier[1] if earlier else old
    now = f"- {name} {first} -> {new}\n" if first != new else ""
    if earlier:
        body = line.sub(now, body)
        body = re.sub(r"\n### Changed\n(?=\n|\Z)", "", body)
    elif "### Changed\n" in body:
        body = body.replace("### Changed\n", f"### Changed\n{now}", 1)
    elif now:
        body = f"{body.rstrip()}\n\n### Changed\n{now}" + ("\n" if tail else "")
    return head + title + body + tail
