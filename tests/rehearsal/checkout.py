# SPDX-License-Identifier: BSD-3-Clause
"""A copy of the checkout whose pins name the stand-ins, and the driver run in it."""

import contextlib
import difflib
import itertools
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Self

from rehearsal import debian, therock
from support.project import CHECKOUT
from support.servers import Revalidating, served
from support.stand_in import GPU, clean_environment, write_mirrors

from forge.bases import CONDA_FORGE, PUBLISHED
from forge.conda.local import REHEARSED
from forge.files import sha256_file
from forge.hostbase.wheels import PYTHON

VERSION = "10.0.0"
ARCHIVE = f"therock-dist-linux-gfx1151-{VERSION}.tar.gz"
COMMIT = "16adc4d875fd4f65ea23c7c84e1c66706fde3047"
# What is Debian's too, and required of PyPI by metadata or by AOTriton, which takes no CMake 4.
PYPI = ["cmake<4", "ninja"]
RECIPE, VARIANTS = "recipes/rocm-sdk/recipe.yaml", "recipes/bases/conda-forge/variants.yaml"
BASES, GATE = "src/forge/bases.py", "src/forge/channel/gate.py"
TORCH = "recipes/pytorch/recipe.yaml"
# The file by which a rehearsal knows the folders that it made, and alone may delete from.
MARK = ".rehearsal"
OWN = "Made by tests/rehearsal, which deletes and overwrites what is in this folder.\n"


def cpu_seconds() -> float:
    """What this process has cost so far, with the children that have ended."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


class Refused(SystemExit):
    """What was asked for would leave the rehearsal's folder, or the overlay does not fit."""


def mark(folder: Path) -> None:
    """Mark a folder as the rehearsal's own, and create it if it is not there.

    Raises:
        Refused: It holds files and has no mark: they are somebody's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(path.name for path in folder.iterdir())
    if names and MARK not in names:
        raise Refused(
            f"{folder} holds {names[0]} and was not made by a rehearsal (it has no {MARK}), so "
            "nothing in it is touched: name a new folder"
        )
    (folder / MARK).write_text(OWN)


@dataclass(frozen=True)
class Place:
    """The folder of a rehearsal: all that it makes is below it."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Self:
        """Return the folder of a rehearsal, new or made by an earlier one.

        Raises:
            Refused: It is in the checkout, or holds what no rehearsal made.
        """
        folder = folder.resolve()
        if folder.is_relative_to(CHECKOUT):
            raise Refused(f"{folder} is in the checkout: name a folder outside of it")
        mark(folder)
        return cls.at(folder)

    @classmethod
    def at(cls, folder: Path) -> Self:
        """Return the folder of a rehearsal that `make` has made.

        Raises:
            Refused: It has no mark, or a link in it leads elsewhere.
        """
        place = cls(folder.resolve())
        if not (place.folder / MARK).is_file():
            raise Refused(
                f"{place.folder} is no rehearsal's folder (it has no {MARK}): make one first, by "
                f"python tests/rehearsal make {folder}"
            )
        for path in place.folder.iterdir():
            if path.is_symlink():
                raise Refused(f"{path} is a link: a rehearsal writes into its own folder alone")
        return place

    @property
    def conda_forge(self) -> Path:
        """The stand-in channel."""
        return self.folder / "conda-forge"

    @property
    def work(self) -> Path:
        """What only making the stand-ins needs."""
        return self.folder / "work"

    @property
    def root(self) -> Path:
        """The copy of the checkout."""
        return self.folder / "checkout"

    @property
    def archive_file(self) -> Path:
        """The stand-in for AMD's archive."""
        return self.folder / ARCHIVE

    def archive(self) -> Path:
        """Make the archive, if it is not there. Needs 5 GB while it is made."""
        if not self.archive_file.exists():
            tree = self.work / "therock"
            shutil.rmtree(tree, ignore_errors=True)
            tree.mkdir(parents=True)
            therock.make(tree, COMMIT, VERSION)
            therock.pack(tree, self.archive_file)
            shutil.rmtree(tree)
        return self.archive_file

    def copy(self) -> Path:
        """Copy the checkout as it is now; what the copy has built and fetched stays.

        Raises:
            Refused: What is there is no copy that a rehearsal made.
        """
        mark(self.root)
        listing = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
        done = subprocess.run(listing, cwd=CHECKOUT, check=True, capture_output=True, text=True)
        for part in ("recipes", "patches", "src"):  # a file that is gone from the checkout
            shutil.rmtree(self.root / part, ignore_errors=True)
        for name in filter(None, done.stdout.split("\0")):
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, target, follow_symlinks=False)
        return self.root

    def overlay(self, *thin: ModuleType) -> str:
        """Write the overlay to a fresh copy; returns it as a unified diff. Raises Refused.

        `thin` are the modules of what makes a package cheap.
        """
        pinned = sha256_file(self.archive_file)
        tag = f"cp{PYTHON.replace('.', '')}"
        (rocm,) = re.findall(r"^[\d.]+", debian.version("hipcc"))
        edits = [
            # the archive's hash, of the release that is built
            (RECIPE, r'(?<=\n)( +sha256: )[^\n]*"4feabd9f[^\n]*', rf"\g<1>{pinned}"),
            # so that no package of a rehearsal can be taken for a real one
            (BASES, r'(tag = HOST_BOUND if is_host else) ""', rf'\1 "{REHEARSED}"'),
            # the copy publishes these and no others; the checkout's own gate refuses them
            (GATE, r"if build\.startswith\(REHEARSED\)", "if not build.startswith(REHEARSED)"),
            # Debian's Python, and sources that PyPI has
            (VARIANTS, r"(?<=\npython:\n)(  - [^\n]*\n)+", f'  - "{PYTHON}.* *_{tag}"\n'),
            (VARIANTS, r"(?<=\npython_min:\n)  - [^\n]*", f'  - "{PYTHON}"'),
            (VARIANTS, r"(?<=\nsources_from:\n)  - upstream", "  - pypi"),
            # and Debian's ROCm, which says its version
            (TORCH, r"(?<=test_without_gpu\.py )\$\{\{ rocm_sdk \}\}", rocm),
        ]
        edits += [edit for one in thin for edit in one.EDITS]
        for name, old, new in edits:
            text, times = re.subn(old, new, (self.root / name).read_text())
            if times != 1:
                raise Refused(f"{name} has {times} times what the overlay changes: {old}")
            (self.root / name).write_text(text)
        changed = dict.fromkeys([*(name for name, _, _ in edits), *self._marked_torch()])
        said = "".join(line for name in changed for line in self._difference(name))
        return said + "".join(map(self._launcher, thin))

    def _launcher(self, thin: ModuleType) -> str:
        """Write the launcher and what it reads; returns what to say."""
        folder, names = self.root / thin.FOLDER, thin.DEVICE_CODE.split()
        texts = thin.FILES | {"device_code.txt": "".join(f"{name}\n" for name in names)}
        for name, text in texts.items():
            (folder / name).write_text(text)
        (folder / "thin.sh").chmod(0o755)
        said = f"device code for {len(names)} HIP files alone (device_code.txt)"
        return f"overlay/{thin.FOLDER}: {said}\n"

    def _marked_torch(self) -> list[str]:
        """Let what requires `rocm*` of torch's build string take the mark before it; the files."""
        files = [self.root / VARIANTS, *sorted(self.root.glob("recipes/*/recipe.yaml"))]
        found = [file for file in files if "rocm*" in file.read_text()]
        for file in found:
            file.write_text(file.read_text().replace("rocm*", "*rocm*"))
        return [file.relative_to(self.root).as_posix() for file in found]

    def _difference(self, name: str) -> list[str]:
        old, new = ((root / name).read_text().splitlines(True) for root in (CHECKOUT, self.root))
        return [*difflib.unified_diff(old, new, name, f"overlay/{name}")]

    def forge(self, words: list[str]) -> int:
        """Run the copy's driver on the stand-ins. Returns its exit code."""
        if "publish" in words:
            self.refuse_elsewhere(words)
        return self._run([str(self.root / "src" / "forge"), *words], words)

    def night(self) -> int:
        """Run the copy's tools/night.py on the stand-ins. Returns its exit code."""
        to = str(self.folder / "night")
        program = [str(self.root / "tools" / "night.py"), "--without-gpu", "--to", to]
        return self._run(program, ["night"])

    def user(self, words: list[str]) -> int:
        """Run a command of somebody with a home of their own, who has what is published.

        The public channels are this rehearsal's, and the machine is said to have the GPU. `forge`
        is the copy's driver, on the stacks in that home. Returns the exit code.

        Raises:
            Refused: The user would publish, or nothing is published.
        """
        if "publish" in words:
            raise Refused(
                "a rehearsal's user publishes nothing; what the rehearsal built is published by "
                f"python tests/rehearsal forge {self.folder} publish --to {self.folder}/published"
            )
        home, published = self.folder / "user", self.folder / "published"
        if not published.is_dir():
            raise Refused(f"{published} is not there: publish first, --to {published}")
        home.mkdir(exist_ok=True)
        if not (home / "stacks").exists():
            shutil.copytree(self.root / "stacks", home / "stacks", symlinks=True)
            (home / "recipes").mkdir(exist_ok=True)
            for name in ("recipes/bases", "variants.yaml"):
                (home / name).unlink(missing_ok=True)  # stays where a person removed stacks/
                (home / name).symlink_to(self.root / name)
        program = [sys.executable, str(self.root / "src" / "forge")]
        with served(self.conda_forge, Revalidating) as theirs, served(published) as own:
            write_mirrors(home, {CONDA_FORGE: theirs, PUBLISHED: own})
            environment = (
                clean_environment(home)
                | GPU
                | {
                    "FORGE_ROOT": str(home),
                    "FORGE_BASE": "conda-forge",
                    "FORGE_NO_PIXI": "1",
                    "FORGE_CHANNEL": PUBLISHED,
                }
            )
            with self.noted(f"user {' '.join(words)}") as said:
                command = [*program, *words[1:]] if words[0] == "forge" else words
                code = subprocess.run(command, cwd=home, env=environment, check=False).returncode
                said.append(f"exit {code}")
        return code

    def untested(self, recipe: str, variants: list[str]) -> int:
        """Build one recipe alone, without its tests, below `untested`. Returns the exit code."""
        script = self.root / "tests" / "rehearsal" / "untested.py"
        target = self.folder / "untested" / recipe
        return self._run([str(script), recipe, str(target), *variants], ["untested", recipe])

    def _run(self, program: list[str], words: list[str]) -> int:
        """Run a program of the copy by this Python, and note what it cost as `words`."""
        home = self.folder / "home"
        with served(self.conda_forge, Revalidating) as url:
            write_mirrors(home, {CONDA_FORGE: url})
            environment = clean_environment(home) | {
                "FORGE_ROOT": str(self.root),
                "FORGE_BASE": "conda-forge",
                "FORGE_NO_PIXI": "1",
                "PYTHONPATH": str(self.root / "src"),
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            }
            with self.noted(" ".join(words)) as said:
                command = [sys.executable, *program]
                code = subprocess.run(command, env=environment, check=False).returncode
                said.append(f"exit {code}")
        return code

    @contextlib.contextmanager
    def noted(self, what: str) -> Iterator[list[str]]:
        """Print and keep in costs.txt what the block cost, and what it adds to the list."""
        said, start, before = list[str](), time.monotonic(), cpu_seconds()
        yield said
        said.append(f"{time.monotonic() - start:.0f} s, {cpu_seconds() - before:.0f} CPU-s")
        most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1048576
        line = f"{what}: {', '.join(said)}, at most {most:.1f} GiB in one process"
        print(line)
        with (self.folder / "costs.txt").open("a") as costs:
            costs.write(f"{line}\n")

    def refuse_elsewhere(self, words: list[str]) -> None:
        """Raises Refused unless `publish` names a folder of this rehearsal."""
        named = [w.removeprefix("--to=") for w in words if w.startswith("--to=")]
        named += [after for word, after in itertools.pairwise(words) if word == "--to"]
        inside = [Path(name).resolve().is_relative_to(self.folder) for name in named]
        if not named or not all(inside) or any("://" in name for name in named):
            raise Refused(
                f"a rehearsal publishes into its own folder: --to {self.folder}/published"
            )
