# SPDX-License-Identifier: BSD-3-Clause
"""What a command works on: project, base, recipes and channel; and the options of every command."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from typer import Argument, Option

from forge import bases
from forge.bases import CONDA_FORGE, PUBLISHED, BaseName
from forge.build.display import Display
from forge.build.runner import Builder
from forge.channel.local import Channel
from forge.channel.location import Location
from forge.envs.manifest import Manifest
from forge.envs.records import Records
from forge.envs.workspace import Workspace
from forge.errors import ForgeError
from forge.hostbase.base import HostBase
from forge.project import Project
from forge.recipes.plan import RecipeSet

CHECKOUT = Path(__file__).resolve().parents[3]
# a low zstd level for local work; a release pays the time for a high one
LOCAL_FORMAT = "conda:3"


_terminal = functools.partial(Console, soft_wrap=True, highlight=False, markup=False)
out, err = _terminal(), _terminal(stderr=True)


def base_name(word: str | None) -> BaseName:
    """The value of --base, aliases included."""
    try:
        return BaseName(word or BaseName.AUTO)
    except ValueError:
        raise typer.BadParameter(f"{word!r} is not one of {', '.join(BaseName)}") from None


def _shared(*names: str, **settings: Any) -> Any:
    return Option(*names, rich_help_panel="Options before or after any command", **settings)


NAMES = "auto|conda-forge|host"
BASE = _shared("--base", metavar=NAMES, parser=base_name, help="Base to build on.")
OUTPUT = _shared("--output", help="Channel folder, if not channel/.")
VARIANT = _shared("--variant", metavar="KEY=VALUE", help="Override variants.yaml; repeatable.")
# the fields of Context that options set
SHARED: dict[str, Any] = {
    "base_name": Annotated[BaseName | None, BASE],
    "output": Annotated[Path | None, OUTPUT],
    "variants": Annotated[list[str] | None, VARIANT],
}
Packages = Annotated[list[str], Argument(help="Recipe names.")]
Maybe = Annotated[list[str] | None, Argument(help="Recipe names (default: all).")]
Json = Annotated[bool, Option("--json", help="Print JSON.")]


@dataclass
class Context:
    """The project, base and channel that a command works on, each made when first asked for."""

    base_name: BaseName = field(default_factory=lambda: base_name(os.environ.get("FORGE_BASE")))
    output: Path | None = None
    variants: list[str] = field(default_factory=list)
    root: Path = field(default_factory=lambda: Path(os.environ.get("FORGE_ROOT", CHECKOUT)))

    def override(self, given: dict[str, Any]) -> Context:
        """This context with the options that are given; variants add up."""
        given["variants"] = [*self.variants, *(given["variants"] or ())]
        return replace(self, **{name: value for name, value in given.items() if value})

    @cached_property
    def project(self) -> Project:
        return Project.at(self.root, self.output)

    @cached_property
    def base(self) -> bases.Base:
        project = self.project
        name, line = bases.choose(self.base_name)
        err.print(line)
        return bases.load(project, name, bases.parse_overrides(self.variants))

    @cached_property
    def recipes(self) -> RecipeSet:
        """The recipes that are built on this base."""
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

    def select(self, names: Iterable[str] | None, among: RecipeSet | None = None) -> set[str]:
        """The named recipes, or all. Raises ForgeError for an unknown name."""
        among = among or self.recipes
        wanted = set(names or among.recipes)
        unknown = sorted(wanted - set(among.recipes))
        if provided := [name for name in unknown if name in among.provided]:
            raise ForgeError(f"{', '.join(provided)} is not built here: provided by the base")
        if unknown:
            there = ", ".join(among.recipes)
            raise ForgeError(f"no recipe {', '.join(unknown)}; there are: {there}")
        return wanted

    def stack(
        self, name: str, channel: str | None = None, records: Path | None = None
    ) -> Workspace:
        """stacks/NAME, with our packages from `channel` (URL or folder), or from this checkout's.

        With a channel and conda-forge its lock is for every machine, and lies beside the manifest.
        Any other names what is on this machine, and lies in build/. `records` is a folder of
        repodata instead of conda-forge's own.
        """
        manifest = self.project.root / "stacks" / name / "pixi.toml"
        if not manifest.is_file():
            stacks = self.project.root.glob("stacks/*/pixi.toml")
            there = ", ".join(sorted(stack.parent.name for stack in stacks))
            raise ForgeError(f"no stack {name!r}; there are: {there}")
        ours = Location(channel).url if channel else self.project.channel.as_uri()
        theirs = self.base.channel
        substitutes = {PUBLISHED: ours, "conda-forge": theirs, CONDA_FORGE: theirs}
        known: dict[str, Records] = {}
        if records:
            known[CONDA_FORGE] = Records.on_disk(CONDA_FORGE, records)
        served = channel and not self.hostbase
        folder = manifest.parent if served else self.project.build / "stacks" / name
        return Workspace(name, Manifest.load(manifest), folder, substitutes, known)

    def build_tools(self, records: Path | None = None) -> Workspace:
        """The root pixi.toml, with a folder of repodata instead of conda-forge's own, if given."""
        root = self.project.root
        known = {CONDA_FORGE: Records.on_disk(CONDA_FORGE, records)} if records else {}
        substitutes = {"conda-forge": CONDA_FORGE}
        return Workspace("--root", Manifest.load(root / "pixi.toml"), root, substitutes, known)

    def builder(self, package_format: str = LOCAL_FORMAT) -> Builder:
        """A builder whose base exists: the host base is made now if it is not current."""
        if not re.fullmatch(r"conda:(-?[1-7]|[89]|1\d|2[0-2])", package_format):
            raise ForgeError(f"--package-format {package_format!r} is not conda:LEVEL, -7 to 22")
        builder = Builder(self.project, self.base, Display(out), package_format)
        if self.hostbase:
            with builder.display as display:
                self.hostbase.make(display.say, display.download, builder.run_job)
        return builder


def takes_context(function: Callable[..., None]) -> Callable[..., None]:
    """A command, or a group's callback, whose first parameter is the Context.

    Adds the shared options, because click takes those of a group only before a command's name.
    """
    hints = get_type_hints(function, include_extras=True)
    _, *own = inspect.signature(function).parameters.values()

    @functools.wraps(function)
    def run(typer_context: typer.Context, **values: Any) -> None:
        given = {name: values.pop(name) for name in SHARED}
        typer_context.obj = (typer_context.obj or Context()).override(given)
        function(typer_context.obj, **values)

    keyword = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    parameters = [keyword("typer_context", annotation=typer.Context)]
    parameters += [keyword(p.name, annotation=hints[p.name], default=p.default) for p in own]
    parameters += [keyword(name, annotation=SHARED[name], default=None) for name in SHARED]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def command(app: typer.Typer, name: str | None = None, **settings: Any) -> Callable[..., Any]:
    """Register a function whose first parameter is the Context as a command of `app`."""
    return lambda function: app.command(name, **settings)(takes_context(function))
