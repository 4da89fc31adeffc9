# SPDX-License-Identifier: BSD-3-Clause
"""The commands that plan, build and test packages."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from forge import bases
from forge.building import runner
from forge.building.environments import find_unsolvable
from forge.building.preflight import preflight
from forge.building.runner import FAILED, NOT_ATTEMPTED, Result
from forge.channel import PublishedChannel
from forge.cli.context import (
    LOCAL_FORMAT,
    Context,
    ForgeCommand,
    Json,
    OptionalPackages,
    Packages,
    err,
    out,
    require_package_format,
)
from forge.cli.time_box import StopAfter, time_box
from forge.conda.local import Output, Record
from forge.conda.scratch import cache_folder, remove_cache_leftovers
from forge.envs.workspace import Workspace
from forge.errors import ForgeError, NotAttempted, redact
from forge.files import remove_if_unlocked, sha256_file
from forge.project import SUBDIRS
from forge.recipes.cost import read_costs
from forge.recipes.plan import BUILD, SKIPPED, UP_TO_DATE, Step
from forge.recipes.recipe import list_sources

app = typer.Typer()

KeepGoing = Annotated[
    bool,
    Option("--continue-on-failure", help="After a failure, build the independent packages."),
]
EvenSo = Annotated[
    bool,
    Option("--even-so", help="Build even if disk, memory or packages are lacking."),
]
Format = Annotated[
    str,
    Option("--package-format", metavar="conda:LEVEL", help="zstd level; 19 for a release."),
]
Yes = Annotated[
    bool,
    Option("--yes", help="Do not ask before a build on conda-forge."),
]
Strict = Annotated[
    bool,
    Option("--strict", help="Exit 3 if a package is skipped or not attempted."),
]
Dependents = Annotated[
    bool,
    Option("--with-dependents", help="Build the dependents of these packages as well."),
]
Only = Annotated[
    bool,
    Option("--only", help="Build only the named packages. Exit 3 if another one has to be built."),
]


@dataclass(frozen=True)
class Request:
    """The arguments of a command that builds.

    Attributes:
        packages: The named recipes; None for all.
        package_format: The format in rattler-build's notation, conda:LEVEL.
        keep_going: Continue after a failure.
        even_so: Start even if conda-forge lacks a requirement, or the machine lacks disk or memory.
        rebuild: Build the named recipes even if they are up to date.
        with_dependents: Build the recipes that depend on the named ones as well.
        only: Build only the named recipes.
        lenient: Exit with 0, not 3, if recipes were not attempted because their environments cannot
            be solved. On the host base, this holds for any reason why they were not attempted.
        asks: Ask on a terminal before a build on conda-forge.
    """

    packages: list[str] | None
    package_format: str
    keep_going: bool
    even_so: bool
    rebuild: bool = False
    with_dependents: bool = False
    only: bool = False
    lenient: bool = False
    asks: bool = False


def run_build(ctx: Context, request: Request) -> None:
    """Build the requested recipes and the recipes they need, and exit as `report` does.

    If conda-forge cannot satisfy a recipe's requirements, the recipe is skipped, and so are the
    recipes that depend on it, except with `even_so`.

    Raises:
        ForgeError: The package format has another form.
        NotAttempted: Nothing was fetched or built, because none of the recipes can be built, a
            named recipe needs one that cannot or must not be built, disk or memory is lacking, or
            the user answered no.
    """
    require_package_format(request.package_format)
    ctx = replace(ctx, keep_going=request.keep_going)
    requested = ctx.select(request.packages)
    if request.with_dependents:
        requested = ctx.recipes.dependents(requested)
    with ctx.project.lock():
        ctx.channel.reconcile()
        ctx.channel.require_base(ctx.base.base_tag)
        steps = _plan_requested(ctx, requested, request.rebuild)
        _require_named(ctx, request, steps, requested)
        unsolved: dict[str, str] = {}
        if not request.even_so:
            unsolved = find_unsolved(ctx, steps)
        for name, reason in unsolved.items():
            out.print(f"skipped: {name}: {reason}")
        if requested <= unsolved.keys():
            reason = _choose_reason(unsolved, request.packages)
            reason = f"not started: {reason}"
            raise NotAttempted(f"{reason}. Name other packages, or try to build with --even-so")
        needed = ctx.recipes.dependencies(requested - unsolved.keys())
        steps = _select_steps(steps, needed | unsolved.keys())
        skipped = runner.predict_skipped(ctx.recipes, steps, unsolved)
        lacks = print_costs(ctx, steps, skipped)
        if lacks and not request.even_so:
            advice = "Make room, name fewer packages, or start with --even-so"
            raise NotAttempted(f"not started: needs {lacks}. {advice}")
        if request.asks:
            _confirm(ctx, steps)
        builder = ctx.builder(request.package_format)
        with builder.display:
            results = builder.run(
                ctx.recipes,
                steps,
                request.keep_going,
                unsolved,
            )
    required = requested
    if request.lenient:
        required = set() if ctx.hostbase else requested - unsolved.keys()
    report(ctx, results, required)


def _plan_requested(ctx: Context, requested: set[str], rebuild: bool) -> list[Step]:
    """Return the steps of the requested recipes and of the recipes they need."""
    rebuilt = requested if rebuild else set()
    steps = ctx.recipes.plan(ctx.channel, frozenset(rebuilt))
    needed = ctx.recipes.dependencies(requested)
    return _select_steps(steps, needed)


def _select_steps(steps: list[Step], names: set[str]) -> list[Step]:
    return [step for step in steps if step.recipe.name in names]


def _is_anything_built(steps: list[Step]) -> bool:
    return any(step.action == BUILD for step in steps)


def _require_named(
    ctx: Context,
    request: Request,
    steps: list[Step],
    requested: set[str],
) -> None:
    """Raise NotAttempted if a named recipe needs a recipe that cannot or must not be built."""
    excluded = {}
    if request.only:
        for step in steps:
            name = step.recipe.name
            if step.action == BUILD and name not in requested:
                excluded[name] = "not named"
    skipped = runner.predict_skipped(ctx.recipes, steps, excluded)
    for name in sorted(request.packages or []):
        if name not in skipped:
            continue
        message = f"not started: {name}: {skipped[name]}"
        if excluded:
            message += ", and --only builds only the named packages"
        raise NotAttempted(message)


def _choose_reason(unsolved: Mapping[str, str], named: list[str] | None) -> str:
    """Return the reason for the first named recipe whose environments cannot be solved.

    If no recipe is named, all recipes count as named.
    """
    name = next(name for name in unsolved if not named or name in named)
    return f"{name}: {unsolved[name]}"


def _confirm(ctx: Context, steps: list[Step]) -> None:
    """Ask on a terminal whether to build on conda-forge. Raise NotAttempted if the answer is no."""
    if ctx.hostbase or not _is_anything_built(steps) or not sys.stdin.isatty():
        return
    if not typer.confirm("Build all of this?"):
        advice = "`./forge build NAME` builds a single package; --yes skips this question"
        raise NotAttempted(f"not started. {advice}")


def print_costs(
    ctx: Context,
    steps: list[Step],
    skipped: Mapping[str, str],
) -> str:
    """Print the cost of building the steps.

    Args:
        ctx: The context.
        steps: The plan, or a part of it.
        skipped: Recipes that are not built, with the reasons.

    Returns:
        A description of the disk or memory that this machine lacks, or "".
    """
    recipes = []
    for step in steps:
        if step.action == BUILD and step.recipe.name not in skipped:
            recipes.append(step.recipe)
    costs = read_costs(recipes, ctx.base)
    if recipes and ctx.hostbase and not ctx.hostbase.is_current():
        out.print("host base: would be made first")
        costs = {"host base": ctx.hostbase.cost, **costs}
    lines, lacks = preflight(ctx.project, costs)
    for line in lines:
        out.print(line)
    return lacks


def find_unsolved(ctx: Context, steps: list[Step]) -> dict[str, str]:
    """Find the recipes whose requirements conda-forge cannot satisfy.

    The result is empty on the host base, if nothing has to be built, and if conda-forge does not
    answer. Otherwise every environment of the recipes that have to be built is solved, which takes
    a minute or two.

    Returns:
        The name of each such recipe, with the reason.
    """
    if ctx.hostbase or not _is_anything_built(steps):
        return {}
    try:
        reason = bases.find_outage()
        if not reason:
            with ctx.display(err) as display:
                display.phase("solving every environment with conda-forge's packages")
                return find_unsolvable(
                    ctx.recipes,
                    steps,
                    ctx.channel,
                    display.line,
                )
    except Exception as error:
        # The bindings raise many types of exceptions.
        reason = redact(error)
    reason = " ".join(reason.split())
    err.print(f"could not check whether conda-forge has all requirements: {reason}")
    return {}


def report(ctx: Context, results: list[Result], required: set[str]) -> None:
    """Print the table of results, and exit.

    The exit code is 1 if a recipe failed or cannot be read, else 3 if a required recipe was not
    attempted, else 0.

    Args:
        ctx: The context.
        results: The results of the run.
        required: The names of the recipes that must have been attempted.

    Raises:
        typer.Exit: Always.
    """
    out.print("\n".join(runner.format_table(results)))
    if ctx.project.logs.is_dir():
        out.print(f"logs: {ctx.project.logs}")
    not_attempted = set()
    has_failed = bool(ctx.recipes.broken)
    for result in results:
        name = result.step.recipe.name
        if result.state == NOT_ATTEMPTED:
            not_attempted.add(name)
            err.print(f"not attempted: {name}: {result.detail}")
        if result.state == FAILED:
            has_failed = True
    for name, reason in ctx.recipes.broken.items():
        err.print(f"failed: {name}: {reason}")
    if has_failed:
        raise typer.Exit(1)
    if not_attempted & required:
        raise typer.Exit(NotAttempted.exit_code)
    raise typer.Exit(0)


@app.command(cls=ForgeCommand)
def build_all(
    context: typer.Context,
    keep_going: KeepGoing = False,
    even_so: EvenSo = False,
    package_format: Format = LOCAL_FORMAT,
    strict: Strict = False,
    yes: Yes = False,
    stop_after: StopAfter = None,
) -> None:
    """Build every package that is not up to date. Interrupt it at any time: the next run resumes.

    Packages are reported as not attempted if conda-forge cannot satisfy their requirements. On the
    host base, this also happens if the base lacks a requirement or a source cannot be fetched. Such
    packages do not fail the run, except with --strict.
    """
    request = Request(
        None,
        package_format,
        keep_going,
        even_so,
        lenient=not strict,
        asks=not yes,
    )
    with time_box(stop_after):
        run_build(context.obj, request)


@app.command(cls=ForgeCommand)
def build(
    context: typer.Context,
    packages: Packages,
    with_dependents: Dependents = False,
    keep_going: KeepGoing = False,
    even_so: EvenSo = False,
    package_format: Format = LOCAL_FORMAT,
    stop_after: StopAfter = None,
    only: Only = False,
) -> None:
    """Build the named packages and their dependencies, unless they are up to date."""
    request = Request(
        packages,
        package_format,
        keep_going,
        even_so,
        with_dependents=with_dependents,
        only=only,
    )
    with time_box(stop_after):
        run_build(context.obj, request)


@app.command(cls=ForgeCommand)
def rebuild(
    context: typer.Context,
    packages: Packages,
    keep_going: KeepGoing = False,
    even_so: EvenSo = False,
    package_format: Format = LOCAL_FORMAT,
) -> None:
    """Build the named packages again, even if they are up to date, with the next build number."""
    request = Request(
        packages,
        package_format,
        keep_going,
        even_so,
        rebuild=True,
    )
    run_build(context.obj, request)


@app.command(cls=ForgeCommand)
def test_packages(context: typer.Context, packages: OptionalPackages = None) -> None:
    """Run the tests inside the built packages again.

    The packages that they need are installed from the channel and the base.
    """
    ctx: Context = context.obj
    requested = ctx.select(packages)
    with ctx.project.lock():
        steps = _select_steps(ctx.recipes.plan(ctx.channel), requested)
        has_packages = any(step.action == UP_TO_DATE for step in steps)
        builder = ctx.builder(needs_base=has_packages)
        with builder.display:
            results = builder.test_packages(steps)
    required = requested
    if packages is None and ctx.hostbase:
        required = set()
    report(ctx, results, required)


@app.command(cls=ForgeCommand)
def plan(context: typer.Context, as_json: Json = False, strict: Strict = False) -> None:
    """Print the build order, with the reason why each package is built, up to date or skipped.

    A package is skipped if the last run could not fetch its sources, if the base lacks a
    requirement, if conda-forge cannot satisfy a requirement today, or if it needs a skipped
    package. With --json, conda-forge is not checked. The next run tries to build skipped packages
    again.
    """
    ctx: Context = context.obj
    steps = ctx.recipes.plan(ctx.channel)
    unsolved: dict[str, str] = {}
    if not as_json:
        unsolved = find_unsolved(ctx, steps)
    unfetched = runner.read_unfetched(ctx.project, steps)
    skipped = runner.predict_skipped(ctx.recipes, steps, {**unsolved, **unfetched})
    rows = list(plan_rows(ctx, steps, skipped))
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for number, row in enumerate(rows, 1):
        for dist in row["outputs"]:
            out.print(f"{number:2} {row['action']:10} {dist}: {row['reason']}")
    notes = dict(ctx.recipes.absent)
    for row in rows:
        if row["lacks"]:
            notes[row["recipe"]] = f"lacks {row['lacks']}"
    for name, note in notes.items():
        out.print(f"   {name}: {note}")
    # The costs include recipes whose sources could not be fetched, because the next run tries
    # again to fetch them.
    unbuildable = runner.predict_skipped(ctx.recipes, steps, unsolved)
    lacks = print_costs(ctx, steps, unbuildable)
    if lacks:
        out.print(f"a build would not start: it needs {lacks}")
    if strict and any(row["action"] == SKIPPED for row in rows):
        raise typer.Exit(NotAttempted.exit_code)


def plan_rows(
    ctx: Context,
    steps: list[Step],
    skipped: Mapping[str, str],
) -> Iterator[dict[str, Any]]:
    """Yield the row that `plan` prints for each recipe, in build order.

    Args:
        ctx: The context.
        steps: The plan.
        skipped: Recipes that are skipped, with the reasons.
    """
    for step in steps:
        recipe = step.recipe
        action = step.action
        reason = step.reason
        if recipe.name in skipped:
            action = SKIPPED
            reason = skipped[recipe.name]
        sources = []
        for source in list_sources(recipe):
            sources.append({"origin": source.origin, source.kind: source.digest})
        yield {
            "recipe": recipe.name,
            "action": action,
            "reason": reason,
            "version": recipe.version,
            "lacks": recipe.extra.get("lacks", ""),
            "outputs": [output.dist for output in step.outputs],
            "needs": sorted(ctx.recipes.direct_needs(recipe.name)),
            "requirements": recipe.requirements,
            "sources": sources,
        }


@app.command(cls=ForgeCommand)
def status(context: typer.Context, as_json: Json = False) -> None:
    """List every package with its version, build string, state on this base, size and sha256."""
    ctx: Context = context.obj
    rows = []
    for step in ctx.recipes.plan(ctx.channel):
        for output in step.outputs:
            rows.append(status_row(ctx, step, output))
    if as_json:
        print(json.dumps({"base": ctx.base.name, "packages": rows}, indent=2))
        return
    for row in rows:
        line = f"{row['name']} {row['version']} {row['build']}: {row['state']}"
        if row["sha256"]:
            line += f", {row['size']} bytes, sha256 {row['sha256']}"
        out.print(line)


def status_row(ctx: Context, step: Step, output: Output) -> dict[str, Any]:
    """Return the row that `status` prints for an output.

    Its `state` is built, outdated, not built or damaged. Damaged means that the file is missing or
    differs from the index.
    """
    row: dict[str, Any] = {
        "name": output.name,
        "version": output.version,
        "build": output.build,
        "recipe": step.recipe.name,
        "reason": step.reason,
        "file": None,
        "sha256": None,
        "state": "outdated" if step.has_older_builds else "not built",
        "size": None,
    }
    if not isinstance(output, Record):
        return row
    row["file"] = f"{output.subdir}/{output.file_name}"
    file = ctx.channel.path(output)
    if file.exists():
        row["sha256"] = sha256_file(file)
        row["size"] = file.stat().st_size
    row["state"] = "built" if row["sha256"] == output.sha256 else "damaged"
    return row


@app.command(cls=ForgeCommand)
def clean(context: typer.Context) -> None:
    """Remove the leftovers of killed commands here, in published folders and in rattler's cache."""
    for path in remove_leftovers(context.obj):
        out.print(f"removed {path}")


def remove_leftovers(ctx: Context) -> list[Path]:
    """Remove the leftovers of killed commands, and return their paths.

    Each folder is cleaned while its lock is held. If a running command holds the lock, the folder
    is skipped.
    """
    build = ctx.project.build
    removed = remove_cache_leftovers(cache_folder())
    if (build / ".lock").exists():
        with suppress(ForgeError), ctx.project.lock() as leftovers:
            removed += leftovers
            ctx.channel.reconcile()
    published = _find_published(build)
    for folder in (build, build / "host-base", ctx.project.sources, *published):
        withdrawn = published.get(folder, folder)
        partial = _list_partial(folder, withdrawn)
        removed += remove_if_unlocked(folder / ".lock", partial)
        removed += remove_cache_leftovers(folder)
    for stack in build.glob("stacks/*"):
        workspace = Workspace(stack.name, stack)
        # Pass an iterator, so that the files are listed only after the lock has been acquired.
        removed += remove_if_unlocked(stack / ".pixi/.lock", workspace.find_leftovers())
    return removed


def _find_published(build: Path) -> dict[Path, Path]:
    """Return the folders that `publish` has written, with the folders of withdrawn packages.

    A folder that is not a published channel is left out. Either publish refused it, or it was
    replaced later.
    """
    published = {}
    for link in build.glob("published/*"):
        channel = PublishedChannel(link.resolve())
        if channel.is_ours():
            published[channel.folder] = channel.withdrawn_folder
    return published


def _list_partial(folder: Path, withdrawn: Path) -> list[Path]:
    """List the partial files of a channel or of a folder of downloads.

    Args:
        folder: The channel or the folder of downloads.
        withdrawn: The folder of a channel's withdrawn packages; `folder` itself if there is none.
    """
    partial = [
        *folder.glob(".index.html.partial"),
        *folder.glob(".partial-*"),
    ]
    for place in {folder, withdrawn}:
        for subdir in SUBDIRS:
            partial += place.glob(f"{subdir}/.partial-*")
    return partial
