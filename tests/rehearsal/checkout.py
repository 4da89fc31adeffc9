# SPDX-License-Identifier: BSD-3-Clause
"""The folder of a rehearsal: its copy of the checkout, and the programs that run in the copy.

An overlay changes the copy so that its recipes use the stand-ins.
"""

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
# PyPI's wheels of programs that Debian has too. They are needed because the metadata of other
# wheels requires them, and because AOTriton refuses CMake 4.
PYPI = ["cmake<4", "ninja"]
# Files that the overlay changes.
RECIPE = "recipes/rocm-sdk/recipe.yaml"
VARIANTS = "recipes/bases/conda-forge/variants.yaml"
BASES = "src/forge/bases.py"
GATE = "src/forge/channel/gate.py"
TORCH = "recipes/pytorch/recipe.yaml"
# A rehearsal makes this file in its own folders, and deletes files only in folders that have it.
MARK = ".rehearsal"
MARK_TEXT = "Made by tests/rehearsal, which deletes and overwrites what is in this folder.\n"


def measure_cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    usages = [
        resource.getrusage(resource.RUSAGE_SELF),
        resource.getrusage(resource.RUSAGE_CHILDREN),
    ]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Refused(SystemExit):
    """The rehearsal refuses a command. The message gives the reason."""


def mark(folder: Path) -> None:
    """Mark a folder as the rehearsal's own, and create it if it does not exist.

    Raises:
        Refused: The folder has files and no mark, so the files may belong to somebody.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(path.name for path in folder.iterdir())
    if names and MARK not in names:
        raise Refused(
            f"{folder} contains {names[0]} and was not made by a rehearsal: it has no {MARK}. "
            "Nothing in it was changed. Name a new folder"
        )
    (folder / MARK).write_text(MARK_TEXT)


@dataclass(frozen=True)
class Place:
    """The folder of a rehearsal. A rehearsal changes no other folder."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Self:
        """Return the folder of a rehearsal, new or made by an earlier one.

        Raises:
            Refused: The folder is in the checkout, has files that no rehearsal made, or has a link.
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
            Refused: The folder has no mark, or there is a link directly in it.
        """
        place = cls(folder.resolve())
        if not (place.folder / MARK).is_file():
            raise Refused(
                f"{place.folder} is not the folder of a rehearsal: it has no {MARK}. Make one "
                f"first: python tests/rehearsal make {folder}"
            )
        for path in place.folder.iterdir():
            if path.is_symlink():
                raise Refused(f"{path} is a link, and a rehearsal writes only into its own folder")
        return place

    @property
    def conda_forge(self) -> Path:
        """The channel that replaces conda-forge."""
        return self.folder / "conda-forge"

    @property
    def work(self) -> Path:
        """The folder in which the stand-ins are made."""
        return self.folder / "work"

    @property
    def root(self) -> Path:
        """The copy of the checkout."""
        return self.folder / "checkout"

    @property
    def archive_file(self) -> Path:
        """The archive that replaces AMD's."""
        return self.folder / ARCHIVE

    def make_archive(self) -> None:
        """Make the archive, if it does not exist. This needs 5 GB of free disk."""
        if self.archive_file.exists():
            return
        tree = self.work / "therock"
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True)
        therock.make(tree, COMMIT, VERSION)
        therock.pack(tree, self.archive_file)
        shutil.rmtree(tree)

    def copy_checkout(self) -> Path:
        """Copy the files that git tracks, as they are in the checkout now, and return the copy.

        Files that were built or fetched in an earlier copy stay.

        Raises:
            Refused: The folder of the copy exists, and no rehearsal made it.
        """
        mark(self.root)
        command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
        names = subprocess.check_output(command, cwd=CHECKOUT, text=True).split("\0")
        # Files that the checkout no longer has must not stay in these folders.
        for folder in ("recipes", "patches", "src"):
            shutil.rmtree(self.root / folder, ignore_errors=True)
        for name in filter(None, names):
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, target, follow_symlinks=False)
        return self.root

    def apply_overlay(self, *thin_modules: ModuleType) -> str:
        """Apply the overlay to a fresh copy, and return the changes as a unified diff.

        Args:
            thin_modules: The modules of packages that are made cheaper to build: `thin_torch`,
                `thin_vllm`.

        Raises:
            Refused: A text that the overlay replaces does not occur exactly once in its file.
        """
        sha256 = sha256_file(self.archive_file)
        tag = f"cp{PYTHON.replace('.', '')}"
        (rocm,) = re.findall(r"^[\d.]+", debian.read_version("hipcc"))
        edits = [
            # The recipe gets the hash of the stand-in for AMD's archive.
            (RECIPE, r'(?<=\n)( +sha256: )[^\n]*"4feabd9f[^\n]*', rf"\g<1>{sha256}"),
            # Build strings begin with REHEARSED, so that packages of a rehearsal can be recognized.
            (BASES, r'(tag = HOST_BOUND if is_host else) ""', rf'\1 "{REHEARSED}"'),
            # The copy publishes only packages with this prefix. The real driver refuses to publish
            # packages with it.
            (GATE, r"if build\.startswith\(REHEARSED\)", "if not build.startswith(REHEARSED)"),
            # Packages are built only for Debian's version of Python, and sources come from PyPI.
            (VARIANTS, r"(?<=\npython:\n)(  - [^\n]*\n)+", f'  - "{PYTHON}.* *_{tag}"\n'),
            (VARIANTS, r"(?<=\npython_min:\n)  - [^\n]*", f'  - "{PYTHON}"'),
            (VARIANTS, r"(?<=\nsources_from:\n)  - upstream", "  - pypi"),
            # torch's test expects the version of Debian's ROCm.
            (TORCH, r"(?<=test_without_gpu\.py )\$\{\{ rocm_sdk \}\}", rocm),
        ]
        for module in thin_modules:
            edits += module.EDITS
        changed_names = []
        for name, old, new in edits:
            file = self.root / name
            text, count = re.subn(old, new, file.read_text())
            if count != 1:
                raise Refused(
                    f"the overlay replaces a text that must occur once in {name}, but occurs "
                    f"{count} times: {old}"
                )
            file.write_text(text)
            changed_names.append(name)
        changed_names += self._allow_mark_in_requirements()
        printed = "".join(map(self._diff, dict.fromkeys(changed_names)))
        return printed + "".join(map(self._write_launcher, thin_modules))

    def _write_launcher(self, module: ModuleType) -> str:
        """Write the compiler launcher of a thin package, and the files that the launcher reads.

        Args:
            module: thin_torch or thin_vllm.

        Returns:
            A line about the package for the printed overlay.
        """
        folder = self.root / module.FOLDER
        names = module.DEVICE_CODE.split()
        (folder / "device_code.txt").write_text("".join(f"{name}\n" for name in names))
        for name, text in module.FILES.items():
            (folder / name).write_text(text)
        (folder / "thin.sh").chmod(0o755)
        note = f"only {len(names)} HIP files get device code (device_code.txt)"
        return f"overlay/{module.FOLDER}: {note}\n"

    def _allow_mark_in_requirements(self) -> list[str]:
        """Replace `rocm*` by `*rocm*` in requirements of torch, so that they accept REHEARSED.

        Returns:
            The names of the changed files.
        """
        names = []
        for file in (self.root / VARIANTS, *sorted(self.root.glob("recipes/*/recipe.yaml"))):
            text = file.read_text()
            if "rocm*" in text:
                file.write_text(text.replace("rocm*", "*rocm*"))
                names.append(file.relative_to(self.root).as_posix())
        return names

    def _diff(self, name: str) -> str:
        """Return the changes of a file of the copy as a unified diff."""
        old = (CHECKOUT / name).read_text().splitlines(True)
        new = (self.root / name).read_text().splitlines(True)
        return "".join(difflib.unified_diff(old, new, name, f"overlay/{name}"))

    def run_forge(self, words: list[str]) -> int:
        """Run the copy's driver on the stand-ins, and return its exit code."""
        if "publish" in words:
            self.require_own_target(words)
        return self._run([str(self.root / "src" / "forge"), *words], words)

    def run_night(self) -> int:
        """Run the copy's tools/night.py on the stand-ins, and return its exit code."""
        target = str(self.folder / "night")
        program = [str(self.root / "tools" / "night.py"), "--without-gpu", "--to", target]
        return self._run(program, ["night"])

    def run_as_user(self, words: list[str]) -> int:
        """Run a command as a user who installs the published packages, and return its exit code.

        The user has a home folder of their own. The URLs of the public channels lead to the
        channels of this rehearsal. An override makes the machine look as if it had the GPU. The
        command `forge` runs the copy's driver on the stacks in the home folder.

        Raises:
            Refused: The command would publish, or nothing is published yet.
        """
        if "publish" in words:
            raise Refused(
                "a rehearsal's user cannot publish. To publish the packages of the rehearsal, run: "
                f"python tests/rehearsal forge {self.folder} publish --to {self.folder}/published"
            )
        home = self.folder / "user"
        published = self.folder / "published"
        if not published.is_dir():
            raise Refused(f"{published} does not exist: publish first, with --to {published}")
        home.mkdir(exist_ok=True)
        if not (home / "stacks").exists():
            shutil.copytree(self.root / "stacks", home / "stacks", symlinks=True)
            (home / "recipes").mkdir(exist_ok=True)
            for name in ("recipes/bases", "variants.yaml"):
                # The link already exists if a user has removed the folder of stacks.
                (home / name).unlink(missing_ok=True)
                (home / name).symlink_to(self.root / name)
        command = words
        if words[0] == "forge":
            command = [sys.executable, str(self.root / "src" / "forge"), *words[1:]]
        with served(self.conda_forge, Revalidating) as conda_forge, served(published) as channel:
            write_mirrors(home, {CONDA_FORGE: conda_forge, PUBLISHED: channel})
            environment = clean_environment(home) | GPU
            environment |= {
                "FORGE_ROOT": str(home),
                "FORGE_BASE": "conda-forge",
                "FORGE_NO_PIXI": "1",
                "FORGE_CHANNEL": PUBLISHED,
            }
            with self.record_cost(f"user {' '.join(words)}") as notes:
                code = subprocess.run(command, cwd=home, env=environment, check=False).returncode
                notes.append(f"exit {code}")
        return code

    def build_untested(self, recipe: str, variants: list[str]) -> int:
        """Build one recipe without its tests, in the folder `untested`. Return the exit code."""
        script = self.root / "tests" / "rehearsal" / "untested.py"
        target = self.folder / "untested" / recipe
        return self._run([str(script), recipe, str(target), *variants], ["untested", recipe])

    def _run(self, program: list[str], words: list[str]) -> int:
        """Run a program of the copy with this Python, and record its cost under `words`.

        Returns:
            The exit code.
        """
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
            with self.record_cost(" ".join(words)) as notes:
                command = [sys.executable, *program]
                code = subprocess.run(command, env=environment, check=False).returncode
                notes.append(f"exit {code}")
        return code

    @contextlib.contextmanager
    def record_cost(self, name: str) -> Iterator[list[str]]:
        """Print the time and the memory that the block used, and append them to costs.txt.

        Args:
            name: The beginning of the line.

        Yields:
            A list of notes for the line, to which the block may append.
        """
        notes: list[str] = []
        start = time.monotonic()
        cpu_start = measure_cpu_seconds()
        yield notes
        cpu_seconds = measure_cpu_seconds() - cpu_start
        notes.append(f"{time.monotonic() - start:.0f} s, {cpu_seconds:.0f} CPU-s")
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1048576
        line = f"{name}: {', '.join(notes)}, at most {peak:.1f} GiB in one process"
        print(line)
        with (self.folder / "costs.txt").open("a") as costs:
            costs.write(f"{line}\n")

    def require_own_target(self, words: list[str]) -> None:
        """Raise Refused unless a command has --to, and each --to is in this rehearsal's folder."""
        targets = [word.removeprefix("--to=") for word in words if word.startswith("--to=")]
        targets += [value for option, value in itertools.pairwise(words) if option == "--to"]
        is_inside = [Path(target).resolve().is_relative_to(self.folder) for target in targets]
        if not targets or not all(is_inside) or any("://" in target for target in targets):
            raise Refused(
                f"a rehearsal publishes only into its own folder: --to {self.folder}/published"
            )
