# SPDX-License-Identifier: BSD-3-Clause
"""The context of a command (project, base, recipes and channel) and the options of all commands."""

import functools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from forge import bases
from forge.bases import BaseName
from forge.building.display import Display
from forge.building.runner import Builder
from forge.conda.local import LocalChannel
from forge.errors import ForgeError
from forge.hostbase.base import HostBaseMaker
from forge.project import Project
from forge.recipes.plan import RecipeSet

# A low zstd level, for fast local builds. Releases use a high level.
LOCAL_FORMAT = "conda:3"
# The levels of zstd: -7 to 22, except 0.
PACKAGE_FORMAT = re.compile(r"conda:(-?[1-7]|[89]|1\d|2[0-2])")

_console = functools.partial(
    Console,
    soft_wrap=True,
    highlight=False,
    markup=False,
)
out = _console()
err = _console(stderr=True)

Base = Annotated[
    BaseName | None,
    Option(help="Base to build on."),
]
Output = Annotated[
    Path | None,
    Option(metavar="DIR", help="Channel folder (default: channel/)."),
]
Variants = Annotated[
    list[str] | None,
    Option(metavar="KEY=VALUE", help="Override variants.yaml; repeatable."),
]
Packages = Annotated[
    list[str],
    Argument(help="Recipe names."),
]
OptionalPackages = Annotated[
    list[str] | None,
    Argument(help="Recipe names (default: all)."),
]
Json = Annotated[
    bool,
    Option("--json", help="Print JSON."),
]


def _base_from_environment() -> BaseName:
    return BaseName(os.getenv("FORGE_BASE") or "auto")


@dataclass
class Context:
    """The project, base, recipes and channel that a command works on. Each is made when needed.

    Attributes:
        base_name: The base to build on; AUTO chooses one.
        output: The channel's folder; None for channel/.
        variants: KEY=VALUE words that override variants.yaml.
        keep_going: Leave out recipes that cannot be read.
        root: The checkout.
        verbosity: The verbosity of the Display.
    """

    base_name: BaseName = field(default_factory=_base_from_environment)
    output: Path | None = None
    variants: list[str] = field(default_factory=list)
    keep_going: bool = False
    root: Path = field(default_factory=Project.default_root)
    verbosity: int = 0

    @cached_property
    def project(self) -> Project:
        """The checkout, with the folder of the local channel."""
        return Project.at(self.root, self.output)

    @cached_property
    def base(self) -> bases.Base:
        """The base to build on. Its name and the reason of the choice are printed."""
        name, line = bases.choose(self.base_name, self.channel.is_host_bound())
        err.print(line)
        overrides = bases.parse_overrides(self.variants)
        return bases.load(self.project, name, overrides)

    @cached_property
    def recipes(self) -> RecipeSet:
        """The recipes that are built on this base."""
        if not self.hostbase:
            return RecipeSet(self.project, self.base, keep_going=self.keep_going)
        return RecipeSet(
            self.project,
            self.base,
            self.hostbase.names(),
            self.hostbase.key,
            self.keep_going,
        )

    @cached_property
    def all_recipes(self) -> RecipeSet:
        """All recipes, including those of packages that the base provides."""
        return RecipeSet(self.project, self.base)

    @cached_property
    def channel(self) -> LocalChannel:
        """The local channel."""
        return LocalChannel(self.project.output_folder, self.project.recipes)

    @cached_property
    def hostbase(self) -> HostBaseMaker | None:
        """The maker of the host base; None if another base is used."""
        if not self.base.folder:
            return None
        return HostBaseMaker(self.project, self.base)

    def display(self, console: Console) -> Display:
        """Make a display of progress with the verbosity of the command line."""
        return Display(console, self.verbosity)

    def select(
        self,
        names: Iterable[str] | None,
        recipe_set: RecipeSet | None = None,
    ) -> set[str]:
        """Check recipe names and return them; without names, return those of all recipes.

        Args:
            names: Recipe names; none for all.
            recipe_set: The recipes to select from; `recipes` by default.

        Raises:
            ForgeError: A recipe does not exist, or is not built on this base.
        """
        recipe_set = recipe_set or self.recipes
        existing = recipe_set.recipes
        selected = set(names or existing)
        unknown = selected - existing.keys() - recipe_set.broken.keys()
        for name in sorted(unknown & recipe_set.absent.keys()):
            raise ForgeError(f"{name} is not built here: {recipe_set.absent[name]}")
        if unknown:
            hint = ""
            for name in get_close_matches(min(unknown), list(existing), n=1):
                hint = f"did you mean {name}? "
            wrong = ", ".join(sorted(unknown))
            raise ForgeError(f"no recipe {wrong}; {hint}there are: {', '.join(existing)}")
        return selected

    def builder(
        self,
        package_format: str = LOCAL_FORMAT,
        needs_base: bool = True,
    ) -> Builder:
        """Make a Builder for this project and base.

        Args:
            package_format: The format in rattler-build's notation, conda:LEVEL.
            needs_base: On the host base, make the base first unless it is current.
        """
        builder = Builder(
            self.project,
            self.base,
            self.display(out),
            package_format,
        )
        if self.hostbase and needs_base:
            with builder.display as display:
                self.hostbase.make(display.say, builder.run_job)
        return builder


def require_package_format(text: str) -> None:
    """Raise ForgeError unless the value of --package-format is conda:LEVEL."""
    if not PACKAGE_FORMAT.fullmatch(text):
        reason = f"--package-format {text!r} is not conda:LEVEL"
        raise ForgeError(f"{reason} with a level from -7 to 22, except 0")


_shared_options = typer.Typer(add_completion=False)


@_shared_options.command()
def _apply_shared_options(
    context: typer.Context,
    base: Base = None,
    output: Output = None,
    variant: Variants = None,
) -> None:
    """Write the values of the shared options into `context.obj`, the Context."""
    ctx = context.obj or Context()
    context.obj = replace(
        ctx,
        base_name=base or ctx.base_name,
        output=output or ctx.output,
        variants=[*ctx.variants, *(variant or ())],
    )


# click accepts the options of a group only before the name of the command. The shared options are
# added to the group and to each command, so that they are accepted in both places.
SHARED_OPTIONS = get_command(_shared_options)


def _take_shared_options(context: Any) -> None:
    """Remove the values of the shared options from a command's parameters, and apply them."""
    values = {}
    for option in SHARED_OPTIONS.params:
        values[option.name] = context.params.pop(option.name)
    SHARED_OPTIONS.callback(**values)  # type: ignore[misc]


class ForgeCommand(TyperCommand):
    """A command with the shared options. They set `context.obj`, the Context."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.params = [*self.params, *SHARED_OPTIONS.params]

    def invoke(self, ctx: Any) -> Any:
        """Apply the shared options and run the command."""
        _take_shared_options(ctx)
        return super().invoke(ctx)


class ForgeGroup(TyperGroup):
    """A group of commands that accepts the shared options before the name of a command."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.params = [*self.params, *SHARED_OPTIONS.params]

    def invoke(self, ctx: Any) -> Any:
        """Apply the shared options and run the command that follows."""
        _take_shared_options(ctx)
        return super().invoke(ctx)


def make_exit(codes: Iterable[int]) -> typer.Exit:
    """Return the exit to raise at the end of a command: the smallest code except 0, else 0."""
    failures = [code for code in codes if code]
    return typer.Exit(min(failures, default=0))
