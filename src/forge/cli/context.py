# SPDX-License-Identifier: BSD-3-Clause
"""What a command works on: project, base, recipes and channel; and the options of every command."""

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option

from forge import bases
from forge.bases import BaseName
from forge.building.display import Display
from forge.building.runner import Builder
from forge.conda.local import Channel
from forge.errors import ForgeError
from forge.hostbase.base import HostBase
from forge.project import Project
from forge.recipes.plan import RecipeSet

# a low zstd level for local work; a release pays the time for a high one
LOCAL_FORMAT = "conda:3"

_terminal = functools.partial(Console, soft_wrap=True, highlight=False, markup=False)
out, err = _terminal(), _terminal(stderr=True)

Base = Annotated[BaseName | None, Option(help="Base to build on.")]
Output = Annotated[Path | None, Option(metavar="DIR", help="Channel folder, if not channel/.")]
Variants = Annotated[
    list[str] | None, Option(metavar="KEY=VALUE", help="Override variants.yaml; repeatable.")
]
Packages = Annotated[list[str], Argument(help="Recipe names.")]
Maybe = Annotated[list[str] | None, Argument(help="Recipe names (default: all).")]
Json = Annotated[bool, Option("--json", help="Print JSON.")]


@dataclass
class Context:
    """The project, base and channel that a command works on, each made when first asked for."""

    base_name: BaseName = field(default_factory=lambda: BaseName(os.getenv("FORGE_BASE") or "auto"))
    output: Path | None = None
    variants: list[str] = field(default_factory=list)
    keep_going: bool = False  # past recipes that cannot be read
    root: Path = field(default_factory=Project.default_root)

    @cached_property
    def project(self) -> Project:
        """The checkout, and where packages go."""
        return Project.at(self.root, self.output)

    @cached_property
    def base(self) -> bases.Base:
        """The base to build on, chosen when it is first needed."""
        name, line = bases.choose(self.base_name, self.channel.is_host_bound())
        err.print(line)
        return bases.load(self.project, name, bases.parse_overrides(self.variants))

    @cached_property
    def recipes(self) -> RecipeSet:
        """The recipes that are built on this base."""
        host = self.hostbase
        provided = (host.names(), host.key) if host else (frozenset(), "")
        return RecipeSet(self.project, self.base, *provided, self.keep_going)

    @cached_property
    def all_recipes(self) -> RecipeSet:
        """All recipes, including those of packages that the base provides."""
        return RecipeSet(self.project, self.base)

    @cached_property
    def channel(self) -> Channel:
        """The local channel."""
        return Channel(self.project.channel, self.project.recipes)

    @cached_property
    def hostbase(self) -> HostBase | None:
        """The host base, if that is the base."""
        return HostBase(self.project, self.base) if self.base.folder else None

    def select(self, names: Iterable[str] | None, among: RecipeSet | None = None) -> set[str]:
        """Select the named recipes, or all. Raises ForgeError for an unknown name."""
        among = among or self.recipes
        wanted = set(names or among.recipes)
        unknown = wanted - among.recipes.keys() - among.broken.keys()
        for name in sorted(unknown & among.absent.keys()):
            raise ForgeError(f"{name} is not built here: {among.absent[name]}")
        if unknown:
            names, asked = list(among.recipes), ", ".join(sorted(unknown))
            close = [f"did you mean {n}? " for n in get_close_matches(min(unknown), names, 1)]
            raise ForgeError(f"no recipe {asked}; {''.join(close)}there are: {', '.join(names)}")
        return wanted

    def builder(self, package_format: str = LOCAL_FORMAT, on_base: bool = True) -> Builder:
        """Make a builder; `on_base` makes the host base now if it is not current."""
        if not re.fullmatch(r"conda:(-?[1-7]|[89]|1\d|2[0-2])", package_format):
            raise ForgeError(f"--package-format {package_format!r} is not conda:LEVEL, -7 to 22")
        builder = Builder(self.project, self.base, Display(out), package_format)
        if self.hostbase and on_base:
            with builder.display as display:
                self.hostbase.make(display.say, builder.run_job)
        return builder


def takes_context(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command, or a group's callback, whose first parameter is the Context.

    Adds the shared options, because click takes those of a group only before a command's name.
    """

    def run(
        context: typer.Context, base: Base, output: Output, variant: Variants, **own: Any
    ) -> None:
        ctx = context.obj or Context()
        variants = [*ctx.variants, *(variant or ())]
        base, output = base or ctx.base_name, output or ctx.output
        context.obj = replace(ctx, base_name=base, output=output, variants=variants)
        function(context.obj, **own)

    *shared, _ = inspect.signature(run, eval_str=True).parameters.values()
    _, *own = inspect.signature(function, eval_str=True).parameters.values()
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in own]
    parameters += [p.replace(kind=p.KEYWORD_ONLY, default=None) for p in shared]
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def command(app: typer.Typer, name: str | None = None, **settings: Any) -> Callable[..., Any]:
    """Register a function whose first parameter is the Context as a command of `app`."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        app.command(name, **settings)(takes_context(function))
        return function

    return register


def gravest(codes: Iterable[int]) -> typer.Exit:
    """Choose the gravest exit, to raise when all is done: 1 if anything failed, then 2, then 3."""
    return typer.Exit(min(filter(None, codes), default=0))
