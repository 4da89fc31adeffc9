# SPDX-License-Identifier: BSD-3-Clause
"""The commands that look after the source cache."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from forge.build.display import Display
from forge.cli.context import Context, Maybe, closing, command, err, out
from forge.errors import ForgeError
from forge.recipes.recipe import sources_of
from forge.sources.cache import Source, SourceCache

app = typer.Typer()
sources_app = typer.Typer(help="The source files that recipes name.", no_args_is_help=True)
app.add_typer(sources_app, name="sources")

Files = Annotated[list[Path], Argument(exists=True)]


def named(forge: Context, packages: Iterable[str] | None = None) -> list[tuple[str, Source]]:
    """Recipe name and source, for each source of the named recipes (default: all)."""
    wanted, recipes = forge.select(packages, forge.all_recipes), forge.all_recipes.recipes
    return [(n, source) for n, r in recipes.items() if n in wanted for source in sources_of(r)]


@command(sources_app)
def fetch(forge: Context, packages: Maybe = None) -> None:
    """Download the sources of recipes into the cache, so that they can be built offline."""
    cache, code = SourceCache(forge.project), 0
    with Display(out) as display:
        for name, source in named(forge, packages):
            try:
                display.say(f"{name}: {cache.fetch(source, display.download)}")
            except ForgeError as error:
                err.print(f"{name}: {error}")
                code = error.exit_code
    raise typer.Exit(code)


@command(sources_app)
def add(forge: Context, files: Files) -> None:
    """Take files, git repositories and copies of a folder build/sources into the cache.

    A file is recognized by its sha256, a repository by its commit; others are refused.
    """
    cache, known, code = SourceCache(forge.project), [source for _, source in named(forge)], 0
    folders = {
        f for f in files if f.is_dir() and not ((f / ".git").exists() or (f / "HEAD").exists())
    }
    found = [f for folder in folders for f in sorted(folder.glob("*/[!.]*")) or [folder]]
    for file in [*(file for file in files if file not in folders), *found]:
        try:
            out.print(f"{file} is {cache.add(file, known).origin}")
        except ForgeError as error:
            err.print(f"refused: {error}")
            code = error.exit_code
    raise typer.Exit(code)


@command(sources_app)
def verify(forge: Context, packages: Maybe = None) -> None:
    """List every source and hash what is cached. Exit 1 for a changed file, 3 for an absent one."""
    cache, codes = SourceCache(forge.project), []
    for name, source in named(forge, packages):
        state = cache.state(source)
        codes.append({"whole": 0, "changed": 1}.get(state, 3))
        out.print(f"{name}: {state}: {source.origin} {source.kind} {source.digest}")
    raise closing(codes)
