# SPDX-License-Identifier: BSD-3-Clause
"""The commands that move recipes: feedstock, bump, outdated."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from forge.bases import BaseName
from forge.build.runner import Display
from forge.cli.context import Context, Json, Maybe, command, err, out
from forge.errors import ForgeError
from forge.upkeep import feedstock as feedstocks
from forge.upkeep import pins, relations
from forge.upkeep.draft import every_source

app = typer.Typer()


Target = Annotated[Path, Option("--folder", "-o", help="Target.", file_okay=False)]
Package = Annotated[str, Argument(help="Recipe name.")]
MaybeOne = Annotated[str | None, Argument(help="Recipe name.")]
Every = Annotated[bool, Option("--all", help="Every recipe, into FOLDER/NAME-feedstock.")]
Maintainers = Annotated[list[str] | None, Option(help="GitHub name, in place of ours.")]
Version = Annotated[str | None, Argument(help="Default: the newest release.")]
With = Annotated[list[str] | None, Option("--with", help="PKG=VERSION to move at the same time.")]
Force = Annotated[bool, Option("--force", help="Even if packages would not fit together.")]


@command(app)
def feedstock(
    forge: Context,
    folder: Target,
    package: MaybeOne = None,
    every: Every = False,
    maintainer: Maintainers = None,
) -> None:
    """Write a recipe as a feedstock for `conda-smithy rerender`, or update one's recipe/.

    --all leaves out what conda-forge would refuse; a named recipe is written regardless.
    """
    if bool(package) == every:
        raise ForgeError("name one recipe, or --all")
    recipes = replace(forge, base_name=BaseName.CONDA_FORGE).all_recipes
    for name in sorted(forge.select([package] if package else None, recipes)):
        target = folder / f"{name}-feedstock" if every else folder
        recipe = recipes.recipes[name]
        if why := feedstocks.refusal(recipe):
            err.print(f"{name}: {why}{'; left out' if every else ''}")
        if not (why and every):
            feedstocks.write(recipes, recipe, target, maintainer or ())
            out.print(f"{name}: {target}")


def package_version(word: str) -> tuple[str, str]:
    """A `PKG=VERSION` word. Raises ForgeError for another form."""
    package, _, version = word.partition("=")
    if not (package and version):
        raise ForgeError(f"--with {word!r} is not PKG=VERSION")
    return package, version


@command(app)
def bump(
    forge: Context,
    package: Package,
    version: Version = None,
    together: With = None,
    force: Force = False,
) -> None:
    """Move a package to another release: recipe, hashes, shared pins, README, stacks, CHANGELOG.

    Refuses what upstream's own metadata rules out, and a file that upstream replaced.
    """
    wanted = {package: version} | dict(map(package_version, together or []))
    forge.select(wanted, every_source(forge.project))
    with forge.project.lock(), Display(out) as display:
        done = pins.bump(forge.project, wanted, display.download, force)
    for line in done.moves:
        out.print(line)
    for relation in done.relations:
        console = out if relation.state == relations.HOLDS else err
        console.print(f"{relation.state}: {relation.text}")
    for line in done.to_do:
        err.print(f"to do: {line}")
    for path in done.changed:
        out.print(f"wrote {path.relative_to(forge.project.root)}")


@command(app)
def outdated(forge: Context, packages: Maybe = None, as_json: Json = False) -> None:
    """List the newest release of every package, where upstream publishes a list.

    Exit 1 if something is newer, 3 if nothing is but some upstreams were unreachable.
    """
    recipes = every_source(forge.project)
    wanted = forge.select(packages, recipes)
    rows = list(pins.outdated(recipes, [name for name in recipes.recipes if name in wanted]))
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
