# SPDX-License-Identifier: BSD-3-Clause
"""What one command works on: project, base, recipes and channel, and where it prints."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path

from rich.console import Console

from embedded_base import EmbeddedBase
from forge_store import bases
from forge_store.bases import CONDA_FORGE, BaseName
from forge_store.channel import Channel
from forge_store.project import ForgeError, Project
from pixi_workspace import Workspace
from strix_forge.build import Builder, Display
from strix_forge.recipes import RecipeSet

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
        given = self.embedded.names() if self.embedded else frozenset()
        return RecipeSet(self.project, self.base, given)

    @cached_property
    def all_recipes(self) -> RecipeSet:
        """Those that the base has by itself, too."""
        return RecipeSet(self.project, self.base)

    @cached_property
    def channel(self) -> Channel:
        return Channel(self.project.channel)

    @cached_property
    def embedded(self) -> EmbeddedBase | None:
        return EmbeddedBase(self.project, self.base) if self.base.folder else None

    def known(self, names: list[str] | None, among: RecipeSet | None = None) -> set[str]:
        """The recipe names asked for; raises ForgeError for an unknown one."""
        recipes = (among or self.recipes).recipes
        unknown = sorted(set(names or []) - set(recipes))
        if unknown:
            known = ", ".join(recipes)
            raise ForgeError(f"no recipe {', '.join(unknown)}; there are: {known}")
        return set(names or recipes)

    def stack(self, name: str) -> Workspace:
        """stacks/NAME. The embedded base takes conda-forge's place and keeps its lock in build/."""
        manifest = self.project.root / "stacks" / name / "pixi.toml"
        if not manifest.is_file():
            known = ", ".join(sorted(p.name for p in self.project.root.glob("stacks/*")))
            raise ForgeError(f"there is no stack {name!r}; there are: {known}")
        host_bound = self.project.build / "stacks" / name
        replace = {
            "conda-forge": self.base.channel,
            CONDA_FORGE: self.base.channel,
            str(self.project.root / "channel"): self.project.channel.as_uri(),
        }
        return Workspace.load(manifest, host_bound if self.embedded else manifest.parent, replace)

    def builder(self, package_format: str = LOCAL_FORMAT) -> Builder:
        """A builder whose base exists: the embedded one is made now if it is not current."""
        if not re.fullmatch(r"conda:(-?[1-7]|[89]|1\d|2[0-2])", package_format):
            raise ForgeError(f"--package-format {package_format!r} is not conda:LEVEL, -7 to 22")
        builder = Builder(self.project, self.base, Display(out), package_format)
        if self.embedded:
            with builder.display as display:
                self.embedded.make(display.say, display.download, builder.run_job)
        return builder


session = Session()
