# SPDX-License-Identifier: BSD-3-Clause
"""The commands that look after the source cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from forge.build.display import Display
from forge.cli.context import Context, Maybe, command, err, out
from forge.errors import ForgeError, NotAttempted
from forge.recipes.recipe import sources_of
from forge.sources.cache import Source, SourceCache

app = typer.Typer()
sources_app = typer.Typer(help="The source files that recipes name.", no_args_is_help=True)
app.add_typer(sources_app, name="sources")

Folder = Annotated[Path, Argument(help="Folder of exported sources.")]


def named(forge: Context, packages: list[str] | None = None) -> Iterator[tuple[str, Source]]:
    """Recipe name and source, for each source of the named recipes (default: all)."""
    wanted = forge.select(packages, forge.all_recipes)
    for name, recipe in forge.all_recipes.recipes.items():
        if name in wanted:
            yield from ((name, source) for source in sources_of(recipe))


@command(sources_app)
def fetch(forge: Context, packages: Maybe = None) -> None:
    """Download the sources of recipes into the cache, so that they can be built offline."""
    cache, code = SourceCache(forge.project), 0
    with Display(out) as display:
        for name, source in named(forge, packages):
            try:
                display.say(f"{name}: {cache.fetch(source, display.download)}")
            except NotAttempted as error:
                err.print(f"{name}: {error}")
                code = error.exit_code
    raise typer.Exit(code)


@command(sources_app)
def add(forge: Context, files: Annotated[list[Path], Argument(exists=True)]) -> None:
    """Take files and bare git repositories that were brought by hand into the cache.

    A file is recognized by its sha256, a repository by its name and commit.
    """
    for file in files:
        _add(forge, file)


def _add(forge: Context, file: Path) -> None:
    known = [source for _, source in named(forge)]
    out.print(f"{file} is {SourceCache(forge.project).add(file, known).origin}")


@command(sources_app, "list")
def list_sources(forge: Context, packages: Maybe = None) -> None:
    """List every source with its sha256, and its state in the cache: absent, partial or whole."""
    cache = SourceCache(forge.project)
    for name, source in named(forge, packages):
        kind = "commit" if source.commit else "sha256"
        out.print(f"{name}: {cache.state(source)}: {source.origin} {kind} {source.digest}")


@command(sources_app)
def verify(forge: Context, packages: Maybe = None) -> None:
    """Hash the cached sources again. Exit 1 for a changed file, 3 for an absent one."""
    cache, states = SourceCache(forge.project), set()
    for name, source in named(forge, packages):
        state = cache.state(source)
        states.add(state)
        out.print(f"{name}: {state}: {cache.path(source)}")
    raise typer.Exit(1 if "changed" in states else 3 if states - {"whole"} else 0)


@command(sources_app)
def export(forge: Context, folder: Folder, packages: Maybe = None) -> None:
    """Copy the cached sources to a folder, for a machine without a network.

    `sha256sum -c SHA256SUMS` checks the folder; `forge sources import` reads it.
    """
    sources = [source for _, source in named(forge, packages)]
    count = SourceCache(forge.project).export(sources, folder)
    rest = "; the others are not in the cache" if count < len(sources) else ""
    out.print(f"{count} of {len(sources)} sources in {folder}{rest}")


@command(sources_app, "import")
def import_folder(forge: Context, folder: Folder) -> None:
    """Take an exported folder into the cache. Files with unknown bytes are refused."""
    files = [f for f in sorted(folder.glob("*/*")) if f.is_file() or f.suffix == ".git"]
    if not files:
        raise ForgeError(f"{folder} holds no exported sources")
    code = 0
    for file in files:
        try:
            _add(forge, file)
        except ForgeError as error:
            err.print(f"refused: {error}")
            code = error.exit_code
    raise typer.Exit(code)
