# SPDX-License-Identifier: BSD-3-Clause
"""The commands for sources, patches and versions, for the demo, and for work on this repository."""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from forge import generated
from forge.cli.context import Context, ForgeCommand, OptionalPackages, err, make_exit, out
from forge.conda.scratch import scratch
from forge.errors import Failed, ForgeError, NotAttempted
from forge.files import git, write_text
from forge.processes import max_jobs
from forge.recipes.plan import RecipeSet, load_all_sources
from forge.recipes.recipe import (
    Recipe,
    find_patched_source,
    list_patches,
    list_sources,
    parse_source,
    prepare,
)
from forge.sources.cache import Progress, Source, SourceCache

app = typer.Typer()
sources_app = typer.Typer(
    help="Manage the source files that recipes name.",
    no_args_is_help=True,
)
patches_app = typer.Typer(
    help="Check the patches that recipes name.",
    no_args_is_help=True,
)
app.add_typer(sources_app, name="sources")
app.add_typer(patches_app, name="patches")

ForAllVariants = Annotated[
    bool,
    Option("--every", help="Include the files for every Python and base."),
]
Arguments = Annotated[
    list[str] | None,
    Argument(metavar="ARGS..."),
]
SourcePaths = Annotated[
    list[Path],
    Argument(exists=True),
]
Strict = Annotated[
    bool,
    Option("--strict", help="Exit 3 for an unreachable source."),
]
Check = Annotated[
    bool,
    Option("--check", help="Write nothing."),
]
# All tests of a group run in the same worker, because they share the results of fixtures. Most
# groups are files; tests/conftest.py makes the groups.
PYTEST = ["pytest", "--dist", "loadgroup", "--no-loadscope-reorder"]
LINTERS = [
    "ruff format --check .",
    "ruff check .",
    "mypy",
    # actionlint would run shellcheck and pyflakes if they are installed. They are turned off, so
    # that the findings are the same on every machine.
    "actionlint -shellcheck= -pyflakes=",
    "zizmor --offline --no-progress --persona pedantic .github",
    "shellcheck forge .ci/run .github/*.sh recipes/**/*.sh",
    "clang-format --dry-run --Werror packages/**/*.[ch]",
    "codespell",
]
# Results of a linter by exit code.
LINT_RESULTS = {
    0: "clean",
    Failed.exit_code: "findings",
    NotAttempted.exit_code: "not run: not installed",
}


def select_sources(
    ctx: Context,
    packages: Iterable[str] | None = None,
    for_all_variants: bool = False,
) -> list[tuple[str, Source]]:
    """List the sources of recipes, each with its recipe's name.

    Args:
        ctx: The context.
        packages: Recipe names; none for all.
        for_all_variants: Include the sources for every Python and base.
    """
    recipe_set = load_all_sources(ctx.project) if for_all_variants else ctx.all_recipes
    selected = ctx.select(packages, recipe_set)
    sources = []
    for name, recipe in recipe_set.recipes.items():
        if name in selected:
            for source in list_sources(recipe):
                sources.append((name, source))
    return sources


@sources_app.command(cls=ForgeCommand)
def fetch(
    context: typer.Context,
    packages: OptionalPackages = None,
    for_all_variants: ForAllVariants = False,
) -> None:
    """Download the sources of recipes into the cache, so that they can be built offline.

    If the sha256 of a file differs from the recipe's, the message tells whether you can write the
    new one into the recipe.
    """
    ctx: Context = context.obj
    cache = SourceCache(ctx.project)
    codes = []
    with ctx.display(out) as display:
        for name, source in select_sources(ctx, packages, for_all_variants):
            try:
                path = cache.fetch(source, display.download)
            except ForgeError as error:
                err.print(f"{name}: {error}")
                codes.append(error.exit_code)
                continue
            display.say(f"{name}: {path}", always=True)
    raise make_exit(codes)


@sources_app.command(cls=ForgeCommand)
def add(context: typer.Context, files: SourcePaths) -> None:
    """Add files, git repositories or copies of a folder build/sources to the cache.

    A file is recognized by its sha256, and a repository by its commit. The sources for every Python
    and base are accepted, and everything else is refused.
    """
    ctx: Context = context.obj
    cache = SourceCache(ctx.project)
    sources = [source for _, source in select_sources(ctx, for_all_variants=True)]
    codes = []
    for path in files:
        for file in _list_source_files(path):
            try:
                source = cache.add(file, sources)
            except ForgeError as error:
                err.print(f"refused: {error}")
                codes.append(error.exit_code)
                continue
            out.print(f"{file} is {source.origin}")
    raise make_exit(codes)


def _list_source_files(path: Path) -> list[Path]:
    """Return the files in a copy of build/sources; for any other path, only the path itself."""
    is_repository = (path / ".git").exists() or (path / "HEAD").exists()
    if is_repository:
        return [path]
    cached = sorted(path.glob("*/[!.]*"))
    return cached or [path]


@sources_app.command(cls=ForgeCommand)
def verify(context: typer.Context, packages: OptionalPackages = None) -> None:
    """List every source, and check the hashes of cached files.

    Exit 1 if a file has changed, 3 if a file is absent.
    """
    ctx: Context = context.obj
    cache = SourceCache(ctx.project)
    code_by_state = {"whole": 0, "changed": Failed.exit_code}
    codes = []
    for name, source in select_sources(ctx, packages):
        state = cache.state(source)
        codes.append(code_by_state.get(state, NotAttempted.exit_code))
        out.print(f"{name}: {state}: {source.origin} {source.kind} {source.digest}")
    raise make_exit(codes)


@app.command(cls=ForgeCommand)
def outdated(context: typer.Context, packages: OptionalPackages = None) -> None:
    """List every package with the newest release, if its upstream publishes a list of releases.

    Then list the versions with which upstream builds the newest releases and, without PACKAGES, the
    state of the issues and pull requests that patches name. Exit 1 if there is a newer release, or
    if an issue or pull request was closed or merged and its patch does not mention that; otherwise
    3 if an upstream was unreachable.
    """
    # Imported only here, because its imports take a fifth of the start time of every command.
    from forge import versions

    ctx: Context = context.obj
    recipe_set = load_all_sources(ctx.project)
    selected = ctx.select(packages, recipe_set)
    recipes = [recipe for name, recipe in recipe_set.recipes.items() if name in selected]
    rows = list(versions.outdated(recipes))
    codes = []
    code_by_state = {"newer": 1, "unreachable": NotAttempted.exit_code}
    for row in rows:
        codes.append(code_by_state.get(row.state, 0))
        out.print(
            f"{row.recipe.name:34} {row.recipe.version:14} "
            f"{row.newest:14} {row.state:11} {row.note}"
        )
    with ctx.display(out) as display:
        for line in versions.next_set(recipe_set, rows, display.download):
            display.say(line, always=True)
    links = ctx.project.root / "tools/upstream_links.py"
    if not packages and links.exists():
        result = subprocess.run([sys.executable, links], check=False)
        codes.append(result.returncode)
    raise make_exit(codes)


@dataclass(frozen=True)
class PatchResult:
    """The result of applying the patches of a source.

    Attributes:
        state: One of applies, fails and not attempted.
        line: The line that is printed.
    """

    state: str
    line: str


@patches_app.command(cls=ForgeCommand)
def check(context: typer.Context, strict: Strict = False) -> None:
    """Apply every patch to its source, without fuzz. Report sources that cannot be fetched."""
    ctx: Context = context.obj
    code_by_state = {"fails": Failed.exit_code}
    if strict:
        code_by_state["not attempted"] = NotAttempted.exit_code
    codes = []
    with ctx.display(out) as display:
        for result in apply_patches(ctx.all_recipes, display.download):
            codes.append(code_by_state.get(result.state, 0))
            display.say(result.line, always=True)
    raise make_exit(codes)


def apply_patches(recipes: RecipeSet, progress: Progress) -> Iterator[PatchResult]:
    """Fetch the sources of each recipe that has patches, and apply the patches as a build does."""
    cache = SourceCache(recipes.project)
    for recipe in recipes.recipes.values():
        for source in recipe.sources:
            if list_patches(recipe, source):
                yield _apply_to(recipe, source, cache, progress)


def _apply_to(
    recipe: Recipe,
    source: dict[str, Any],
    cache: SourceCache,
    progress: Progress,
) -> PatchResult:
    """Apply the patches of one rendered source."""
    state = "fails"
    try:
        patched_source = find_patched_source(recipe, source)
        if "path" not in patched_source:
            cache.fetch(parse_source(recipe, patched_source), progress)
        with scratch(cache.folder) as folder:
            detail = prepare(recipe, source, cache, Path(folder), unpack_all=False)
        if not detail:
            state = "applies"
    except NotAttempted as error:
        state = "not attempted"
        detail = str(error)
    except (ForgeError, OSError) as error:
        detail = str(error)
    count = len(list_patches(recipe, source))
    line = f"{recipe.name}: {count} patches: {state}"
    if detail:
        line += f": {detail}"
    return PatchResult(state, line)


@app.command(cls=ForgeCommand)
def demo(context: typer.Context) -> None:
    """Compile flash-attn's kernels for gfx1151, execute them on the CPU, and compare with float64.

    No package is made. The requirements are those of the host base. Builds use the downloaded files
    again.
    """
    from forge import demo

    ctx: Context = context.obj
    flash_attn = load_all_sources(ctx.project).recipes["flash-attn"]
    with ctx.display(err) as display:
        record = demo.run(
            ctx.project,
            flash_attn,
            display.say,
            display.download,
        )
    for line in demo.describe(record):
        out.print(line)


PASS_ON = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}


@app.command(cls=ForgeCommand, context_settings=PASS_ON)
def test(context: typer.Context, arguments: Arguments = None) -> None:
    """Run the tests of this repository. ARGS go to pytest; paths are relative to your folder."""
    ctx: Context = context.obj
    root = ctx.project.root
    arguments = arguments or []
    # One worker more than jobs, because some tests wait for servers that do not answer.
    workers = max_jobs() + 1
    command = [
        *(sys.executable, "-m", *PYTEST),
        *("-n", str(workers)),
        *("-c", str(root / "pyproject.toml")),
        *("--rootdir", str(root)),
        *arguments,
    ]
    # Without a path argument, pytest uses the configured testpaths only if it starts in the root.
    has_path = any(names_a_path(argument) for argument in arguments)
    folder = Path.cwd() if has_path else root
    result = subprocess.run(command, cwd=folder, check=False)
    raise typer.Exit(result.returncode)


def expand_pattern(word: str, root: Path) -> list[str]:
    """Return the files of the repository that a pattern matches; a word without `*` is returned."""
    if "*" not in word:
        return [word]
    listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = []
    for path in root.glob(word):
        names.append(str(path.relative_to(root)))
    if not listed:
        # This is an unpacked archive without git, so no file is ignored.
        return names
    tracked = set(listed.split("\0"))
    return [name for name in names if name in tracked]


def names_a_path(argument: str) -> bool:
    """Return whether an argument of pytest names an existing path: PATH, PATH::TEST or --x=PATH."""
    path = argument.partition("::")[0]
    if argument.startswith("-"):
        path = argument.partition("=")[2]
    return bool(path) and Path(path).exists()


@app.command(cls=ForgeCommand)
def generate(context: typer.Context, check: Check = False) -> None:
    """Write the generated parts of pages and manifests, such as package names and kernel costs.

    With --check, write nothing, name the files that differ, and exit 1 if there are any.
    """
    ctx: Context = context.obj
    codes = []
    for path, text in list(generated.find_outdated(ctx.project)):
        name = path.relative_to(ctx.project.root)
        if check:
            _print_stale(name)
            codes.append(Failed.exit_code)
        else:
            write_text(path, text)
            out.print(f"{name}: written")
    raise make_exit(codes)


def _print_stale(name: Path) -> None:
    err.print(f"{name} is not what forge generate writes: run ./forge generate")


@app.command(cls=ForgeCommand)
def lint(context: typer.Context) -> None:
    """Lint code, types, workflows, versions and generated text.

    Exit 1 for findings, 3 for a missing linter.
    """
    from forge import versions

    ctx: Context = context.obj
    root = ctx.project.root
    codes = []
    for line in LINTERS:
        code = _run_linter(line, root)
        codes.append(code)
        out.print(f"{line}: {LINT_RESULTS[code]}")

    findings = list(versions.conflicts(load_all_sources(ctx.project)))
    for finding in findings:
        err.print(finding)
    code = Failed.exit_code if findings else 0
    codes.append(code)
    out.print(f"versions: {LINT_RESULTS[code]}")

    stale = list(generated.find_outdated(ctx.project))
    for path, _ in stale:
        _print_stale(path.relative_to(root))
    code = Failed.exit_code if stale else 0
    codes.append(code)
    out.print(f"generated text: {LINT_RESULTS[code]}")
    raise make_exit(codes)


def _run_linter(line: str, root: Path) -> int:
    """Run a linter, and return the exit code for its result; see LINT_RESULTS."""
    command = []
    for word in line.split():
        command += expand_pattern(word, root)
    try:
        result = subprocess.run(command, cwd=root, check=False)
    except FileNotFoundError:
        return NotAttempted.exit_code
    return Failed.exit_code if result.returncode else 0
