# SPDX-License-Identifier: BSD-3-Clause
"""The commands for sources, patches and pins, and those that test and lint this repository."""

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from forge.building.display import Display
from forge.cli.context import Context, Json, Maybe, closing, command, err, out
from forge.errors import ForgeError
from forge.processes import max_jobs
from forge.recipes.recipe import sources_of
from forge.sources.cache import Source, SourceCache
from forge.upkeep import bump as bumping
from forge.upkeep import outdated as newer
from forge.upkeep import patches

app = typer.Typer()
sources_app = typer.Typer(help="The source files that recipes name.", no_args_is_help=True)
patches_app = typer.Typer(help="The patches that recipes name.", no_args_is_help=True)
app.add_typer(sources_app, name="sources")
app.add_typer(patches_app, name="patches")

Files = Annotated[list[Path], Argument(exists=True)]
Package = Annotated[str, Argument(help="Recipe name.")]
Version = Annotated[str | None, Argument(help="Default: the newest release.")]
With = Annotated[
    list[str] | None, Option("--with", metavar="PKG=VERSION", help="To move at the same time.")
]
Words = Annotated[list[str] | None, Argument(metavar="ARGS...")]
Strict = Annotated[bool, Option("--strict", help="Exit 3 for an unreachable source.")]
PASS_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}
# a file's tests share a worker, because they share what their fixtures made
PYTEST = ["pytest", "--dist", "loadgroup", "--no-loadscope-reorder"]
LINTERS = [
    "ruff format --check .",
    "ruff check .",
    "mypy",
    # without the programs that it would call where they are installed: the same findings everywhere
    "actionlint -shellcheck= -pyflakes=",
    "zizmor --offline --no-progress --persona pedantic .github",
    "shellcheck forge .ci/run bases/**/*.sh recipes/**/*.sh",
    "clang-format --dry-run --Werror packages/**/*.[ch]",
    "codespell",
]


def named(ctx: Context, packages: Iterable[str] | None = None) -> list[tuple[str, Source]]:
    """Recipe name and source, for each source of the named recipes (default: all)."""
    wanted, recipes = ctx.select(packages, ctx.all_recipes), ctx.all_recipes.recipes
    return [(n, source) for n, r in recipes.items() if n in wanted for source in sources_of(r)]


@command(sources_app)
def fetch(ctx: Context, packages: Maybe = None) -> None:
    """Download the sources of recipes into the cache, so that they can be built offline."""
    cache, code = SourceCache(ctx.project), 0
    with Display(out) as display:
        for name, source in named(ctx, packages):
            try:
                display.say(f"{name}: {cache.fetch(source, display.download)}")
            except ForgeError as error:
                err.print(f"{name}: {error}")
                code = error.exit_code
    raise typer.Exit(code)


@command(sources_app)
def add(ctx: Context, files: Files) -> None:
    """Take files, git repositories and copies of a folder build/sources into the cache.

    A file is recognized by its sha256, a repository by its commit; others are refused.
    """
    cache, known, code = SourceCache(ctx.project), [source for _, source in named(ctx)], 0
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
def verify(ctx: Context, packages: Maybe = None) -> None:
    """List every source and hash what is cached. Exit 1 for a changed file, 3 for an absent one."""
    cache, codes = SourceCache(ctx.project), []
    for name, source in named(ctx, packages):
        state = cache.state(source)
        codes.append({"whole": 0, "changed": 1}.get(state, 3))
        out.print(f"{name}: {state}: {source.origin} {source.kind} {source.digest}")
    raise closing(codes)


@command(app)
def bump(ctx: Context, package: Package, version: Version = None, together: With = None) -> None:
    """Move a recipe to another release: version, hashes, package URLs, build number.

    Refuses a file that upstream replaced. Lists what is left to do.
    """
    wanted = {package: version}
    for word in together or []:
        name, _, release = word.partition("=")
        if not release:
            raise ForgeError(f"--with {word!r} is not PKG=VERSION")
        wanted[name] = release
    recipes = bumping.every_source(ctx.project)
    ctx.select(wanted, recipes)
    with ctx.project.lock(), Display(out) as display:
        done = bumping.bump(ctx.project, recipes, wanted, display.download)
    for line in done.moves:
        out.print(line)
    for line in done.to_do:
        err.print(f"to do: {line}")
    for path in done.changed:
        out.print(f"wrote {path.relative_to(ctx.project.root)}")


@command(app)
def outdated(ctx: Context, packages: Maybe = None, as_json: Json = False) -> None:
    """List the newest release of every package, where upstream publishes a list.

    Then what upstream builds the newest releases with, and which patches wait for one. Exit 1 if
    something is newer, 3 if nothing is but some upstreams were unreachable.
    """
    recipes = bumping.every_source(ctx.project)
    wanted = ctx.select(packages, recipes)
    rows = list(newer.outdated([r for r in recipes.recipes.values() if r.name in wanted]))
    if as_json:
        print(json.dumps([asdict(row) | {"outdated": row.outdated} for row in rows], indent=2))
    for row in () if as_json else rows:
        columns = f"{row.name:34} {row.version:14} {row.newest:14}"
        out.print(f"{columns} {'newer' if row.outdated else '':6} {row.asked or row.note}")
        if row.asked and row.note:
            err.print(f"{row.name}: {row.note}")
    if not as_json:
        with Display(out) as display:
            for line in newer.next_set(ctx.project, recipes, rows, display.download):
                display.say(line)
    raise closing(1 if row.outdated else 3 if row.asked and not row.newest else 0 for row in rows)


@command(patches_app, "lint")
def lint_patches(ctx: Context) -> None:
    """Check the form, trailers and numbers of every patch, and that one recipe names it."""
    raise typer.Exit(patch_findings(ctx))


def patch_findings(ctx: Context) -> int:
    """Print the findings on every patch; returns the exit code."""
    findings = patches.lint(ctx.project, ctx.all_recipes.recipes)
    for finding in findings:
        err.print(finding)
    out.print(f"{len(patches.all_patches(ctx.project))} patches, {len(findings)} findings")
    return 1 if findings else 0


@command(patches_app)
def check(ctx: Context, strict: Strict = False) -> None:
    """Apply every patch to its source, without fuzz. Unfetchable sources are reported."""
    codes, worth = [], {"fails": 1, "not attempted": 3 if strict else 0}
    with Display(out) as display:
        for result in patches.check(ctx.project, ctx.all_recipes.recipes, display.download):
            codes.append(worth.get(result.state, 0))
            detail = f": {result.detail}" if result.detail else ""
            display.say(f"{result.package}: {result.count} patches: {result.state}{detail}")
    raise closing(codes)


@command(app, context_settings=PASS_ON)
def test(ctx: Context, words: Words = None) -> None:
    """Run the tests of this repository; ARGS go to pytest."""
    # one more than there are cores: some tests wait, for servers that stay silent
    tests = [sys.executable, "-m", *PYTEST, "-n", f"{max_jobs() + 1}", *(words or [])]
    raise typer.Exit(subprocess.run(tests, cwd=ctx.project.root, check=False).returncode)


@command(app)
def lint(ctx: Context) -> None:
    """Lint code, types, workflows and patches. Exit 1 for findings, 3 for a missing linter."""
    says, codes, root = ["clean", "findings", "", "not run: not installed"], [], ctx.project.root
    for line in LINTERS:
        found = (root.glob(word) if "*" in word else [word] for word in line.split())
        words = [str(path) for paths in found for path in paths]
        try:
            codes.append(int(subprocess.run(words, cwd=root, check=False).returncode != 0))
        except FileNotFoundError:
            codes.append(3)
        out.print(f"{line}: {says[codes[-1]]}")
    raise closing([*codes, patch_findings(ctx)])
