# SPDX-License-Identifier: BSD-3-Clause
"""What one command works on: project, base, recipes and channel, and where it prints."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path

from rich.console import Console

from forge import bases
from forge.bases import CONDA_FORGE, PUBLISHED, BaseName
from forge.build.display import Display
from forge.build.runner import Builder
from forge.channel.local import Channel
from forge.channel.location import Location
from forge.envs.manifest import Manifest
from forge.envs.records import Records, at_revision
from forge.envs.workspace import Workspace
from forge.errors import ForgeError
from forge.hostbase.base import HostBase
from forge.project import Project
from forge.recipes.plan import RecipeSet

# a low zstd level for local work; a release pays the time for a high one
LOCAL_FORMAT = "conda:3"

out, err = Console(soft_wrap=True), Console(soft_wrap=True, stderr=True)


def say(text: str) -> None:
    out.print(text, highlight=False, markup=False)


class Session:
    """The project, base and channel that a command works on, each made when first asked for."""

    root = Path()
    wanted_base = BaseName.AUTO
    output: Path | None = None
    variants: tuple[str, ...] | list[str] = ()
    quiet = False

    @cached_property
    def project(self) -> Project:
        return Project.at(self.root, self.output)

    @cached_property
    def base(self) -> bases.Base:
        project = self.project
        name, line = bases.choose(self.wanted_base)
        if not self.quiet:
            say(line)
        return bases.load(project, name, bases.parse_overrides(self.variants))

    @cached_property
    def recipes(self) -> RecipeSet:
        provided = self.hostbase.names() if self.hostbase else frozenset()
        return RecipeSet(self.project, self.base, provided)

    @cached_property
    def all_recipes(self) -> RecipeSet:
        """All recipes, including those of packages that the base provides."""
        return RecipeSet(self.project, self.base)

    @cached_property
    def channel(self) -> Channel:
        return Channel(self.project.channel)

    @cached_property
    def hostbase(self) -> HostBase | None:
        return HostBase(self.project, self.base) if self.base.folder else None

    def known(self, names: list[str] | None, among: RecipeSet | None = None) -> set[str]:
        """The recipe names asked for; raises ForgeError for an unknown one."""
        among = among or self.recipes
        recipes = among.recipes
        unknown = sorted(set(names or []) - set(recipes))
        if provided := [name for name in unknown if name in among.provided]:
            raise ForgeError(f"{', '.join(provided)} is not built here: provided by the base")
        if unknown:
            known = ", ".join(recipes)
            raise ForgeError(f"no recipe {', '.join(unknown)}; there are: {known}")
        return set(names or recipes)

    def stack(
        self,
        name: str,
        channel: str | None = None,
        revision: int | None = None,
        records: Path | None = None,
    ) -> Workspace:
        """stacks/NAME, with our packages from `channel` (URL or folder), or from this checkout's.

        With a channel and conda-forge its lock is for every machine, and lies beside the manifest.
        Any other names what is on this machine, and lies in build/. `revision` takes the channel
        as it was then, `records` a folder of repodata instead of conda-forge's own.
        """
        manifest = self.project.root / "stacks" / name / "pixi.toml"
        if not manifest.is_file():
            stacks = self.project.root.glob("stacks/*/pixi.toml")
            names = ", ".join(sorted(stack.parent.name for stack in stacks))
            raise ForgeError(f"there is no stack {name!r}; there are: {names}")
        if revision is not None and not channel:
            raise ForgeError("--revision is one of a published channel: name it with --channel")
        if records:
            self.wanted_base = BaseName.CONDA_FORGE
        ours = Location(channel).url if channel else self.project.channel.as_uri()
        theirs = self.base.channel
        replace = {PUBLISHED: ours, "conda-forge": theirs, CONDA_FORGE: theirs}
        known: dict[str, Records] = {}
        until = None
        if records:
            known[CONDA_FORGE] = Records.on_disk(CONDA_FORGE, records)
        if revision is not None:
            known[ours], until = at_revision(ours, revision)
        served = channel and not self.hostbase
        folder = manifest.parent if served else self.project.build / "stacks" / name
        return Workspace(name, Manifest.load(manifest), folder, replace, known, until)

    def build_tools(self, records: Path | None = None) -> Workspace:
        """The root pixi.toml, with a folder of repodata instead of conda-forge's own, if given."""
        root = self.project.root
        known = {CONDA_FORGE: Records.on_disk(CONDA_FORGE, records)} if records else {}
        replace = {"conda-forge": CONDA_FORGE}
        return Workspace("--root", Manifest.load(root / "pixi.toml"), root, replace, known)

    def known_records(self) -> Path | None:
        """Records of conda-forge in this checkout, where it does not answer itself."""
        if bases.choose(self.wanted_base)[0] == BaseName.CONDA_FORGE:
            return None
        known = self.project.root / "tests" / "data" / "conda-forge"
        say(f"conda-forge is not asked, or silent: solving from the records in {known}")
        return known

    def builder(self, package_format: str = LOCAL_FORMAT) -> Builder:
        """A builder whose base exists: the host base is made now if it is not current."""
        if not re.fullmatch(r"conda:(-?[1-7]|[89]|1\d|2[0-2])", package_format):
            raise ForgeError(f"--package-format {package_format!r} is not conda:LEVEL, -7 to 22")
        builder = Builder(self.project, self.base, Display(out), package_format)
        if self.hostbase:
            with builder.display as display:
                self.hostbase.make(display.say, display.download, builder.run_job)
        return builder


session = Session()
