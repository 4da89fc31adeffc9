# SPDX-License-Identifier: BSD-3-Clause
"""The folders of one checkout."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from forge.errors import ForgeError
from forge.files import hold, remove_all
from forge.processes import kill_leftovers

CHECKOUT = Path(__file__).resolve().parents[2]
SUBDIRS: Final = ("linux-64", "noarch")
# Folders that rattler-build makes in its output folder. With the staged files, they take more than
# twice the size of the packages.
WORK_FOLDERS = ("bld", "build_cache", "src_cache")
# The most characters in a checkout's path. A prefix of conda may have 255, and the rest of them is
# build/staging/NAME/bld/rattler-build_NAME/...
LONGEST_PATH = 128
# Characters that shells or PATH take for something else.
UNUSABLE_CHARACTERS = set(':`$"\\\n')
# An environment variable that recipes read with env.get: a folder for compiler caches that outlives
# the build folder, so that a killed build of hours goes on. Empty where there is none.
FORGE_CACHE = "FORGE_CACHE"
# Files in a job's output folder. FAILED: the job failed, and the folder is for a person to look at.
# DONE: followed by a Python version, it lists the packages that are built for it. STOPPED: the
# job was stopped, and the next run of the same job goes on in the folder.
FAILED = "failed.json"
DONE = "done-"
STOPPED = "stopped.json"


class Project:
    """The folders of one checkout.

    Attributes:
        root: The checkout.
        output_folder: A channel with all packages that were built and passed their tests.
        build: Everything else that the driver writes. It can be deleted at any time.
        logs: A log for each recipe.
        sources: The cache of sources.
        staging: A folder for each recipe that is being built.
        cache: Caches of compilers.
        recipes: The recipes.
    """

    def __init__(self, root: Path, output_folder: Path, build: Path) -> None:
        self.root = root
        self.output_folder = output_folder
        self.build = build
        self.logs = build / "logs"
        self.sources = build / "sources"
        self.staging = build / "staging"
        self.cache = build / "cache"
        self.recipes = root / "recipes"

    @staticmethod
    def default_root() -> Path:
        """Return the folder that FORGE_ROOT names, or the checkout of this driver."""
        return Path(os.environ.get("FORGE_ROOT", CHECKOUT))

    @classmethod
    def at(cls, root: Path, output: Path | None = None) -> "Project":
        """Open the project at `root`.

        Args:
            root: The checkout.
            output: The folder for packages, if that is not ROOT/channel.

        Raises:
            ForgeError: The folder is no checkout, or no package can be built at its path.
        """
        root = root.resolve()
        if not (root / "variants.yaml").is_file():
            raise ForgeError(f"{root} is not a strix-forge checkout: it has no variants.yaml")
        unusable = UNUSABLE_CHARACTERS & set(str(root))
        if unusable:
            character = ascii(min(unusable))
            reason = f"its path has a {character}, which shells or PATH take for something else"
            raise ForgeError(f"{root}: {reason}: move the checkout")
        if len(str(root)) > LONGEST_PATH:
            reason = (
                f"its path has more than {LONGEST_PATH} characters, and conda's prefixes end at 255"
            )
            raise ForgeError(f"{root}: {reason}: move the checkout")
        folder = output.resolve() if output else root / "channel"
        return cls(root, folder, root / "build")

    @contextlib.contextmanager
    def lock(self) -> Iterator[list[Path]]:
        """Be the only builder in the output folder and in this checkout's build folder.

        The kernel releases both locks when their holder ends.

        Yields:
            The leftovers of killed builds that were removed.

        Raises:
            ForgeError: Another process holds a lock, or a folder cannot be written.
        """
        with contextlib.ExitStack() as stack:
            for folder in (self.output_folder, self.build):
                stack.enter_context(hold(folder, "building into"))
            kill_leftovers(self.staging)
            yield remove_all(self.find_leftovers())

    def find_leftovers(self) -> Iterator[Path]:
        """Yield what killed builds left behind and nothing uses any more.

        Builds that failed, were stopped, or have yet to be tested stay.
        """
        for folder in self.staging.glob("*/"):
            packages = [path.relative_to(folder) for path in folder.glob("*/*.conda")]
            is_new = any(not (self.output_folder / package).exists() for package in packages)
            is_whole = any(folder.glob("whole-*"))
            if is_new and is_whole:
                yield from (folder / name for name in WORK_FOLDERS if (folder / name).exists())
            elif not any((folder / name).exists() for name in (FAILED, STOPPED)):
                yield folder
        yield from self.output_folder.glob("*/.partial-*")
        yield from self.output_folder.glob(".tmp/*")
        yield from self.build.glob("not-attempted/.partial-*")
