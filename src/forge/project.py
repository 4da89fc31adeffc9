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
# Folders that rattler-build uses in its output folder. With the staged files in them, they take
# more than twice the disk of the packages.
WORK_FOLDERS = ("bld", "build_cache", "src_cache")
# Maximum number of characters in a checkout's path. The path of a conda prefix may have 255
# characters. The difference is needed for build/staging/NAME/bld/rattler-build_NAME/...
LONGEST_PATH = 128
# Characters with a special meaning in shells or in PATH.
UNUSABLE_CHARACTERS = set(':`$"\\\n')
# An environment variable that recipes read with env.get: the folder for compiler caches. It is
# outside the job's output folder, so that after a killed build of hours, the next build can use
# what was compiled. Without the driver, recipes read an empty value.
FORGE_CACHE = "FORGE_CACHE"
# Files in a job's output folder:
# FAILED: The job failed. The folder is kept so that a person can look at it.
# DONE: The first part of a file name. The number of a Python variant follows, counted from 0. The
#     file lists the packages that were built for this Python and the earlier ones.
# STOPPED: The job was stopped. The next run of the same job continues in the folder.
FAILED = "failed.json"
DONE = "done-"
STOPPED = "stopped.json"


def is_set(variable: str) -> bool:
    """Return whether an environment variable is set, and neither empty nor 0."""
    return os.environ.get(variable, "") not in ("", "0")


class Project:
    """The folders of one checkout.

    Attributes:
        root: The checkout.
        output_folder: A channel with all packages that were built and passed their tests.
        build: The folder for other files of the driver: logs, caches, the host base, and copies of
            stacks with their environments. It can be deleted while no command runs.
        logs: The folder of the logs. Each recipe has a log.
        sources: The cache of sources.
        staging: The folder in which each recipe that is being built has a folder.
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
            output: The folder of the local channel. None means ROOT/channel.

        Raises:
            ForgeError: The folder is not a checkout, packages cannot be built at its path, or
                `output` is not a folder.
        """
        root = root.resolve()
        if not (root / "variants.yaml").is_file():
            raise ForgeError(f"{root} is not a strix-forge checkout: it has no variants.yaml")
        unusable = UNUSABLE_CHARACTERS & set(str(root))
        if unusable:
            character = ascii(min(unusable))
            reason = f"its path has a {character}, which is special in shells or in PATH"
            raise ForgeError(f"{root}: {reason}: move the checkout")
        if len(str(root)) > LONGEST_PATH:
            reason = f"its path has more than {LONGEST_PATH} characters"
            advice = "move the checkout, because a conda prefix is limited to 255 characters"
            raise ForgeError(f"{root}: {reason}: {advice}")
        folder = output.resolve() if output else root / "channel"
        if folder.exists() and not folder.is_dir():
            raise ForgeError(f"{folder} is not a folder: name another one with --output")
        return cls(root, folder, root / "build")

    @contextlib.contextmanager
    def lock(self) -> Iterator[list[Path]]:
        """Hold the locks of the output folder and of this checkout's build folder.

        So only one process builds at a time. The operating system releases the locks when the
        process ends.

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
        """Yield the files and folders that killed builds left and that nothing uses any more.

        If a build is complete, but one of its packages is not in the output folder, only the
        build's WORK_FOLDERS are yielded. Otherwise the build's folder is yielded, unless the build
        failed or was stopped.
        """
        for folder in self.staging.glob("*/"):
            packages = [path.relative_to(folder) for path in folder.glob("*/*.conda")]
            is_new = any(not (self.output_folder / package).exists() for package in packages)
            is_complete = any(folder.glob("whole-*"))
            if is_new and is_complete:
                yield from (folder / name for name in WORK_FOLDERS if (folder / name).exists())
            elif not any((folder / name).exists() for name in (FAILED, STOPPED)):
                yield folder
        # `--output` may name a folder that has other files, too.
        for name in (*SUBDIRS, "forge"):
            yield from self.output_folder.glob(f"{name}/.partial-*")
        yield from self.output_folder.glob(".tmp/repodata*")
        yield from self.build.glob("not-attempted/.partial-*")
