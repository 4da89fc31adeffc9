# SPDX-License-Identifier: BSD-3-Clause
"""The commands for sources, patches and versions, and those that test and lint this repository."""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from forge import generated
from forge.building.display import Display
from forge.cli.context import Context, Maybe, command, err, gravest, out
from forge.conda.package import scratch
from forge.errors import ForgeError, NotAttempted
from forge.files import git, write_text
from forge.processes import max_jobs
from forge.recipes.plan import RecipeSet, load_all_sources
from forge.recipes.recipe import find_patched_source, list_patches, prepare, parse_source, sources_of
from forge.sources.cache import Progress, Source, SourceCache

app = typer.Typer()
sources_app = typer.Typer(help="The source files that recipes name.", no_args_is_help=True)
patches_app = typer.Typer(help="The patches that recipes name.", no_args_is_help=True)
app.add_typer(sources_app, name="sources")
app.add_typer(patches_app, name="patches")

Every = Annotated[bool, Option("--every", help="Files for every Python and base.")]
Words = Annotated[list[str] | None, Argument(metavar="ARGS...")]
Strict = Annotated[bool, Option("--strict", help="Exit 3 for an unreachable source.")]
# a file's tests share a worker, because they share what their fixtures made
PYTEST = ["pytest", "--dist", "loadgroup", "--no-loadscope-reorder"]
LINTERS = [
    "ruff format --check .",
    "ruff check .",
    "mypy",
    # without the programs that it would call where they are installed: the same findings everywhere
    "actionlint -shellcheck= -pyflakes=",
    "zizmor --offline --no-progress --persona pedantic .github",
    "shellcheck forge .ci/run .github/*.sh recipes/**/*.sh",
    "clang-format --dry-run --Werror packages/**/*.[ch]",
    "codespell",
]


def named(
    ctx: Context, packages: Iterable[str] | None = None, every: bool = False
) -> list[tuple[str, Source]]:
    """List recipe name and source, for each source of the named recipes (default: all)."""
    recipes = load_all_sources(ctx.project) if every else ctx.all_recipes
    wanted, found = ctx.select(packages, recipes), recipes.recipes.items()
    return [(name, source) for name, r in found if name in wanted for source in sources_of(r)]


@command(sources_app)
def fetch(ctx: Context, packages: Maybe = None, every: Every = False) -> None:
    """Download the sources of recipes into the cache, so that they can be built offline.

    Of a file with another sha256 than the recipe's it says whether to write that one there.
    """
    cache, codes = SourceCache(ctx.project), []
    with Display(out) as display:
        for name, source in named(ctx, packages, every):
            try:
                display.say(f"{name}: {cache.fetch(source, display.download)}", always=True)
            except ForgeError as error:
                err.print(f"{name}: {error}")
                codes.append(error.exit_code)
    raise gravest(codes)


@command(sources_app)
def add(ctx: Context, files: Annotated[list[Path], Argument(exists=True)]) -> None:
    """Take files, git repositories and copies of a folder build/sources into the cache.

    A file is recognized by its sha256, a repository by its commit; others are refused.
    """
    cache, known, codes = SourceCache(ctx.project), [source for _, source in named(ctx)], []
    for given in files:
        repository = (given / ".git").exists() or (given / "HEAD").exists()
        for file in (not repository and sorted(given.glob("*/[!.]*"))) or [given]:
            try:
                out.print(f"{file} is {cache.add(file, known).origin}")
            except ForgeError as error:
                err.print(f"refused: {error}")
                codes.append(error.exit_code)
    raise gravest(codes)


@command(sources_app)
def verify(ctx: Context, packages: Maybe = None) -> None:
    """List every source and hash what is cached. Exit 1 for a changed file, 3 for an absent one."""
    cache, codes = SourceCache(ctx.project), []
    for name, source in named(ctx, packages):
        state = cache.state(source)
        codes.append({"whole": 0, "changed": 1}.get(state, 3))
        out.print(f"{name}: {state}: {source.origin} {source.kind} {source.digest}")
    raise gravest(codes)


@command(app)
def outdated(ctx: Context, packages: Maybe = None) -> None:
    """List the newest release of every package, where upstream publishes a list.

    Then what upstream builds the newest releases with, and what became of what patches name. Exit 1
    if something is newer or merged, 3 if nothing is but some upstreams were unreachable.
    """
    from forge import versions  # imports what downloads, which takes a fifth of a command's start

    recipes = load_all_sources(ctx.project)
    wanted = ctx.select(packages, recipes)
    rows = list(versions.outdated([r for r in recipes.recipes.values() if r.name in wanted]))
    for r in rows:
        out.print(f"{r.recipe.name:34} {r.recipe.version:14} {r.newest:14} {r.state:11} {r.note}")
    with Display(out) as display:
        for line in versions.next_set(recipes, rows, display.download):
            display.say(line, always=True)
    codes = [{"newer": 1, "unreachable": 3}.get(row.state, 0) for row in rows]
    if not packages and (links := ctx.project.root / "tools/upstream_links.py").exists():
        codes.append(subprocess.run([sys.executable, links], check=False).returncode)
    raise gravest(codes)


@command(patches_app)
def check(ctx: Context, strict: Strict = False) -> None:
    """Apply every patch to its source, without fuzz. Unfetchable sources are reported."""
    codes, worth = [], {"fails": 1, "not attempted": 3 if strict else 0}
    with Display(out) as display:
        for state, says in applied(ctx.all_recipes, display.download):
            codes.append(worth.get(state, 0))
            display.say(says, always=True)
    raise gravest(codes)


def applied(recipes: RecipeSet, progress: Progress) -> Iterator[tuple[str, str]]:
    """Apply each recipe's patches to its fetched source as a build does; yields state and line."""
    cache = SourceCache(recipes.project)
    for name, recipe in recipes.recipes.items():
        for data in (data for data in recipe.sources if list_patches(recipe, data)):
            state, detail = "fails", ""
            try:
                if "path" not in (changed := find_patched_source(recipe, data)):
                    cache.fetch(parse_source(recipe, changed), progress)
                with scratch(cache.folder) as folder:
                    detail = prepare(recipe, data, cache, Path(folder), whole=False)
                state = state if detail else "applies"
            except NotAttempted as error:
                state, detail = "not attempted", str(error)
            except (ForgeError, OSError) as error:
                detail = str(error)
            says = f"{name}: {len(list_patches(recipe, data))} patches: {state}"
            yield state, f"{says}: {detail}" if detail else says


@command(app)
def demo(ctx: Context) -> None:
    """Compile flash-attn's kernels for gfx1151, execute them on the CPU, and compare with float64.

    Makes no package. Needs what the host base needs; what it downloads, a build does not again.
    """
    from forge import demo

    flash_attn = load_all_sources(ctx.project).recipes["flash-attn"]
    with Display(err) as display:
        record = demo.run(ctx.project, flash_attn, display.say, display.download)
    for line in demo.describe(record):
        out.print(line)


@command(app, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def test(ctx: Context, words: Words = None) -> None:
    """Run the tests of this repository; ARGS go to pytest. Paths are relative to where you are."""
    root, words = ctx.project.root, words or []
    # one more than there are cores: some tests wait, for servers that stay silent
    tests = [sys.executable, "-m", *PYTEST, "-n", f"{max_jobs() + 1}"]
    tests += ["-c", str(root / "pyproject.toml"), "--rootdir", str(root), *words]
    # without a path pytest takes the configuration's, if it is started in the root
    folder = Path.cwd() if any(map(names_a_path, words)) else root
    raise typer.Exit(subprocess.run(tests, cwd=folder, check=False).returncode)


def expanded(word: str, root: Path) -> list[str]:
    """Return the tracked files that a pattern names, or the word itself if it is none."""
    if "*" not in word:
        return [word]
    tracked = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    names = [str(path.relative_to(root)) for path in root.glob(word)]
    return [name for name in names if tracked == [""] or name in tracked]  # "": an archive


def names_a_path(word: str) -> bool:
    """Return whether an argument of pytest names something here: PATH, PATH::TEST, --x=PATH."""
    path = word.partition("=")[2] if word.startswith("-") else word.partition("::")[0]
    return bool(path) and Path(path).exists()


@command(app)
def generate(
    ctx: Context, check: Annotated[bool, Option("--check", help="Write nothing.")] = False
) -> None:
    """Write what pages and manifests repeat from other files: names, stacks, kernel costs.

    With --check, name the files that differ, and exit 1 if any does.
    """
    stale = list(generated.find_outdated(ctx.project))
    for path, text in stale:
        name = path.relative_to(ctx.project.root)
        if check:
            err.print(f"{name} is not what forge generate writes: run it")
        else:
            write_text(path, text)
            out.print(f"{name}: written")
    raise gravest([int(check and bool(stale))])


@command(app)
def lint(ctx: Context) -> None:
    """Lint code, types, workflows, versions and generated text.

    Exit 1 for findings, 3 for a missing linter.
    """
    from forge import versions

    says, codes, root = ["clean", "findings", "", "not run: not installed"], [], ctx.project.root
    for line in LINTERS:
        words = [name for word in line.split() for name in expanded(word, root)]
        try:
            codes.append(int(subprocess.run(words, cwd=root, check=False).returncode != 0))
        except FileNotFoundError:
            codes.append(3)
        out.print(f"{line}: {says[codes[-1]]}")
    for finding in (findings := list(versions.conflicts(load_all_sources(ctx.project)))):
        err.print(finding)
    codes.append(1 if findings else 0)
    out.print(f"versions: {says[codes[-1]]}")
    stale = [path.relative_to(root) for path, _ in generated.find_outdated(ctx.project)]
    for path in stale:
        err.print(f"{path} is not what forge generate writes: run it")
    codes.append(1 if stale else 0)
    out.print(f"generated text: {says[codes[-1]]}")
    raise gravest(codes)
