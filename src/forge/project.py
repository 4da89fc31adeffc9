# SPDX-License-Identifier: BSD-3-Clause
"""The folders of one checkout."""

import contextlib
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final

from forge.errors import ForgeError
from forge.files import hold, removed
from forge.processes import kill_leftovers

CHECKOUT = Path(__file__).resolve().parents[2]
SUBDIRS: Final = ("linux-64", "noarch")
MADE = ("bld", "build_cache", "src_cache")  # of a build, with the staged files, twice and more
LONGEST = 128  # of 255 characters; the rest is build/staging/NAME/bld/rattler-build_NAME/...
# Recipes read it with env.get: a folder for compiler caches that outlives the build folder, so
# that a killed build of hours goes on. Empty where there is none.
FORGE_CACHE = "FORGE_CACHE"
FAILED = "failed.json"  # a job's file where it failed: its folder is for a person to look at
DONE = "done-"  # and the number of a Python: lists the packages when it is built
STOPPED = "stopped.json"  # where it was stopped: the next run of the same job goes on in its folder


class Project:
    """The folders of one checkout. `channel` is what users get; `build` can always be deleted."""

    def __init__(self, root: Path, channel: Path, build: Path) -> None:
        self.root, self.channel, self.build = root, channel, build
        self.logs, self.sources = build / "logs", build / "sources"
        self.staging, self.cache = build / "staging", build / "cache"
        self.recipes = root / "recipes"

    @staticmethod
    def default_root() -> Path:
        """Return the checkout of this driver, or FORGE_ROOT."""
        return Path(os.environ.get("FORGE_ROOT", CHECKOUT))

    @classmethod
    def at(cls, root: Path, output: Path | None = None) -> "Project":
        """Open the project at `root`, packages in `output` or ROOT/channel. Raises ForgeError."""
        root = root.resolve()
        if not (root / "variants.yaml").is_file():
            raise ForgeError(f"{root} is not a strix-forge checkout: it has no variants.yaml")
        if strange := set(str(root)) & set(':`$"\\\n'):
            why = f"its path has a {min(strange)!a}, which shells or PATH take for something else"
            raise ForgeError(f"{root}: {why}: move the checkout")
        if len(str(root)) > LONGEST:
            why = f"its path has more than {LONGEST} characters, and conda's prefixes end at 255"
            raise ForgeError(f"{root}: {why}: move the checkout")
        return cls(root, output.resolve() if output else root / "channel", root / "build")

    @contextlib.contextmanager
    def lock(self) -> Iterator[list[Path]]:
        """Be the only builder of the output folder, and of this checkout's build folder.

        Yields what killed builds had left, which is gone. The kernel drops both locks with their
        holder. Raises ForgeError when another process holds one, or a folder cannot be written.
        """
        with contextlib.ExitStack() as stack:
            for folder in (self.channel, self.build):
                stack.enter_context(hold(folder, "building into"))
            kill_leftovers(self.staging)
            yield removed([*self.left()])

    def left(self) -> Iterator[Path]:
        """List what killed builds left: not what failed, was stopped, or has yet to be tested."""
        for folder in self.staging.glob("*/"):
            made = (p.relative_to(folder) for p in folder.glob("*/*.conda"))
            new = [name for name in made if not (self.channel / name).exists()]
            if new and any(folder.glob("whole-*")):
                yield from filter(Path.exists, map(folder.joinpath, MADE))
            elif not any((folder / name).exists() for name in (FAILED, STOPPED)):
                yield folder
        yield from chain(*map(self.channel.glob, ("*/.partial-*", ".tmp/*")))
        yield from self.build.glob("not-attempted/.partial-*")
