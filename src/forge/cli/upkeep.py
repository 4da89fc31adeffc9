# SPDX-License-Identifier: BSD-3-Clause
"""The commands that move recipes to other releases: bump, outdated."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from typer import Argument, Option

from forge.build.display import Display
from forge.cli.context import Context, Json, Maybe, command, err, out
from forge.errors import ForgeError
from forge.upkeep import bump as bumping

app = typer.Typer()


Package = Annotated[str, Argument(help="Recipe name.")]
Version = Annotated[str | None, Argument(help="Default: the newest release.")]
With = Annotated[list[str] | None, Option("--with", help="PKG=VERSION to move at the same time.")]


def package_version(word: str) -> tuple[str, str]:
    """A `PKG=VERSION` word. Raises ForgeError for another form."""
    package, _, version = word.partition("=")
    if not (package and version):
        raise ForgeError(f"--with {word!r} is not PKG=VERSION")
    return package, version


@command(app)
def bump(forge: Context, package: Package, version: Version = None, together: With = None) -> None:
    """Move a recipe to another release: version, hashes, package URLs, build number.

    Refuses a file that upstream replaced. Lists what is left to do.
    """
    wanted = {package: version} | dict(map(package_version, together or []))
    recipes = bumping.every_source(forge.project)
    forge.select(wanted, recipes)
    with forge.project.lock(), Display(out) as display:
        done = bumping.bump(forge.project, recipes, wanted, display.download)
    for line in done.moves:
        out.print(line)
    for line in done.to_do:
        err.print(f"to do: {line}")
    for path in done.changed:
        out.print(f"wrote {path.relative_to(forge.project.root)}")


@command(app)
def outdated(forge: Context, packages: Maybe = None, as_json: Json = False) -> None:
    """List the newest release of every package, where upstream publishes a list.

    Exit 1 if something is newer, 3 if nothing is but some upstreams were unreachable.
    """
    recipes = bumping.every_source(forge.project)
    wanted = forge.select(packages, recipes)
    rows = list(bumping.outdated(recipes, [name for name in recipes.recipes if name in wanted]))
    if as_json:
        print(json.dumps([asdict(row) | {"outdated": row.outdated} for row in rows], indent=2))
    else:
        for row in rows:
            mark = "newer" if row.outdated else ""
            out.print(
                f"{row.name:34} {row.version:14} {row.newest:14} {mark:6} {row.asked or row.note}"
            )
        for row in rows:
            if row.asked and row.note:
                err.print(f"{row.name}: {row.note}")
    missed = any(row.asked and not row.newest for row in rows)
    raise typer.Exit(1 if any(row.outdated for row in rows) else 3 if missed else 0)
