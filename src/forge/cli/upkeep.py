# SPDX-License-Identifier: BSD-3-Clause
"""The commands that look after sources, patches and the repository itself."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from forge.build.display import Display
from forge.cli.context import err, out, say, session
from forge.errors import ForgeError, NotAttempted
from forge.recipes.recipe import sources_of
from forge.sources.cache import Source, SourceCache
from forge.upkeep import bump as bumping
from forge.upkeep import patches

app = typer.Typer()
sources_app = typer.Typer(help="The source files that recipes name.", no_args_is_help=True)
patches_app = typer.Typer(help="The patches that recipes name.", no_args_is_help=True)

app.add_typer(sources_app, name="sources")
app.add_typer(patches_app, name="patches")

Maybe = Annotated[list[str] | None, typer.Argument(help="Recipe names (default: all).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Folder = Annotated[Path, typer.Argument(help="Folder of exported sources.")]


def named(packages: list[str] | None) -> dict[str, list[Source]]:
    """The sources of the named recipes (default: all), in build order."""
    wanted = session.known(packages, session.all_recipes)
    found = {name: r for name, r in session.all_recipes.recipes.items() if name in wanted}
    return {name: sources_of(recipe) for name, recipe in found.items()}


def known() -> list[Source]:
    return [source for sources in named(None).values() for source in sources]


def complain(text: object) -> None:
    err.print(str(text), highlight=False, markup=False)


@sources_app.command("fetch")
def fetch(packages: Maybe = None) -> None:
    """Bring the sources of recipes into the cache, so that they can be built offline."""
    cache, code = SourceCache(session.project), 0
    with Display(out) as display:
        for name, sources in named(packages).items():
            for source in sources:
                try:
                    display.say(f"{name}: {cache.fetch(source, display.download)}")
                except NotAttempted as error:
                    complain(f"{name}: {error}")
                    code = error.exit_code
    raise typer.Exit(code)


@sources_app.command("add")
def add(files: Annotated[list[Path], typer.Argument(exists=True)]) -> None:
    """Take files and bare git repositories that were brought by hand into the cache.

    A file's sha256 says what it is, a repository's name and commit.
    """
    for file in files:
        say(f"{file} is {SourceCache(session.project).add(file, known()).origin}")


@sources_app.command("list")
def list_sources(packages: Maybe = None) -> None:
    """Every source with its sha256, and whether the cache holds it: absent, partial or whole."""
    cache = SourceCache(session.project)
    for name, sources in named(packages).items():
        for source in sources:
            kind = "commit" if source.commit else "sha256"
            say(f"{name}: {cache.state(source)}: {source.origin} {kind} {source.digest}")


@sources_app.command("verify")
def verify(packages: Maybe = None) -> None:
    """Hash what the cache holds again. Exit 1 for a changed file, 3 for an absent one."""
    cache, states = SourceCache(session.project), set()
    for name, sources in named(packages).items():
        for source in sources:
            state = cache.state(source)
            states.add(state)
            say(f"{name}: {state}: {cache.path(source)}")
    raise typer.Exit(1 if "changed" in states else 3 if states - {"whole"} else 0)


@sources_app.command("export")
def export(folder: Folder, packages: Maybe = None) -> None:
    """Copy what the cache holds to a folder, for a machine without the network.

    `sha256sum -c SHA256SUMS` checks the folder; `forge sources import` reads it.
    """
    sources = [source for sources in named(packages).values() for source in sources]
    count = SourceCache(session.project).export(sources, folder)
    rest = "; the others are not in the cache" if count < len(sources) else ""
    say(f"{count} of {len(sources)} sources in {folder}{rest}")


@sources_app.command("import")
def import_folder(folder: Folder) -> None:
    """Take an exported folder into the cache. A file of other bytes is refused, the rest taken."""
    files = [f for f in sorted(folder.glob("*/*")) if f.is_file() or f.suffix == ".git"]
    if not files:
        raise ForgeError(f"{folder} holds no exported sources")
    cache, wanted, code = SourceCache(session.project), known(), 0
    for file in files:
        try:
            say(f"{file} is {cache.add(file, wanted).origin}")
        except ForgeError as error:
            complain(f"refused: {error}")
            code = error.exit_code
    raise typer.Exit(code)


@patches_app.command("lint")
def lint() -> None:
    """Read every patch: form, trailers, numbers, and that exactly one recipe names it."""
    findings = patches.lint(session.project, session.all_recipes.recipes)
    for finding in findings:
        complain(finding)
    say(f"{len(patches.all_patches(session.project))} patches, {len(findings)} findings")
    raise typer.Exit(1 if findings else 0)


@patches_app.command("check")
def check(
    strict: Annotated[bool, typer.Option(help="Exit 3 for a source out of reach.")] = False,
) -> None:
    """Apply every patch to its source, without fuzz.

    Unfetchable sources are reported, not counted as passing.
    """
    states = set()
    with Display(out) as display:
        found = patches.check(session.project, session.all_recipes.recipes, display.download)
        for result in found:
            states.add(result.state)
            detail = f": {result.detail}" if result.detail else ""
            display.say(f"{result.package}: {result.count} patches: {result.state}{detail}")
    raise typer.Exit(1 if "fails" in states else 3 if strict and "not attempted" in states else 0)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def test(context: typer.Context) -> None:
    """Run the tests of this repository; arguments go to pytest."""
    if not find_spec("elftools"):
        raise NotAttempted(
            "the tests read ELF files with pyelftools, which pixi.lock lacks: run "
            f"{sys.executable} -m pip install --no-deps pyelftools"
        )
    parallel = ["-n", "auto", "--dist", "loadgroup", "--no-loadscope-reorder"]
    command = [sys.executable, "-m", "pytest", *parallel, *context.args]
    raise typer.Exit(subprocess.run(command, cwd=session.project.root, check=False).returncode)


def package_version(word: str) -> tuple[str, str]:
    """A `PKG=VERSION` word. Raises ForgeError for another form."""
    package, _, version = word.partition("=")
    if not (package and version):
        raise ForgeError(f"--with {word!r} is not PKG=VERSION")
    return package, version


@app.command()
def bump(
    package: Annotated[str, typer.Argument(help="Recipe name.")],
    version: Annotated[str | None, typer.Argument(help="Default: the newest release.")] = None,
    together: Annotated[
        list[str] | None, typer.Option("--with", help="PKG=VERSION to move in the same go.")
    ] = None,
) -> None:
    """Move a recipe to another release: version, hashes, package URLs, build number.

    Refuses a file that upstream replaced. Lists what is left to do.
    """
    wanted = {package: version} | dict(map(package_version, together or []))
    recipes = bumping.every_source(session.project)
    session.known(list(wanted), recipes)
    with session.project.lock(), Display(out) as display:
        done = bumping.bump(session.project, recipes, wanted, display.download)
    for line in done.moves:
        say(line)
    for line in done.to_do:
        complain(f"to do: {line}")
    for path in done.changed:
        say(f"wrote {path.relative_to(session.project.root)}")


@app.command()
def outdated(packages: Maybe = None, as_json: Json = False) -> None:
    """The newest release of every package, where upstream lists it.

    Exit 1 when something is newer, 3 when nothing is but some upstreams were unreachable.
    """
    recipes = bumping.every_source(session.project)
    known = session.known(packages, recipes)
    rows = list(bumping.outdated(recipes, [name for name in recipes.recipes if name in known]))
    if as_json:
        print(json.dumps([asdict(row) | {"outdated": row.outdated} for row in rows], indent=2))
    else:
        for row in rows:
            mark = "newer" if row.outdated else ""
            say(f"{row.name:34} {row.version:14} {row.newest:14} {mark:6} {row.asked or row.note}")
        for row in rows:
            if row.asked and row.note:
                complain(f"{row.name}: {row.note}")
    missed = any(row.asked and not row.newest for row in rows)
    raise typer.Exit(1 if any(row.outdated for row in rows) else 3 if missed else 0)
