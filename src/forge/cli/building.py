# SPDX-License-Identifier: BSD-3-Clause
"""The commands that plan, build and test packages."""

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from forge import bases
from forge.building import runner
from forge.building.display import Display
from forge.building.environments import find_unsolvable
from forge.building.preflight import preflight
from forge.building.runner import FAILED, NOT_ATTEMPTED, Result
from forge.channel import StaticChannel
from forge.cli.context import LOCAL_FORMAT, Context, Json, Maybe, Packages, command, err, out
from forge.cli.time_box import StopAfter, time_box
from forge.conda.local import Record
from forge.conda.package import cache_folder, swept_cache
from forge.envs.workspace import Workspace
from forge.errors import ForgeError, NotAttempted, redacted
from forge.files import sha256_file, swept
from forge.project import SUBDIRS
from forge.recipes.cost import read_costs
from forge.recipes.plan import BUILD, SKIPPED, UP_TO_DATE, Step
from forge.recipes.recipe import sources_of

app = typer.Typer()

KeepGoing = Annotated[bool, Option("--continue-on-failure", help="Skip dependents of failures.")]
EvenSo = Annotated[bool, Option("--even-so", help="Build where disk, memory or conda-forge lack.")]
Format = Annotated[str, Option("--package-format", metavar="conda:LEVEL", help="19 for a release.")]
Yes = Annotated[bool, Option("--yes", help="Do not ask before a build on conda-forge.")]
Strict = Annotated[bool, Option("--strict", help="Exit 3 if something was not attempted.")]
Dependents = Annotated[bool, Option("--with-dependents", help="Build their dependents as well.")]
Only = Annotated[bool, Option("--only", help="Exit 3 if something that they need is not built.")]


def run_build(  # noqa: PLR0913 (the options of four commands)
    ctx: Context, packages: list[str] | None, keep_going: bool, even_so: bool, form: str,
    rebuild: bool = False, with_dependents: bool = False, lenient: bool = False, asks: bool = False,
    only: bool = False,
) -> None:  # fmt: skip
    """Build the named packages and what they need, or all. Ends as `report` does.

    With `only`, raises NotAttempted if what they need is not built.

    A recipe is skipped with its dependents if conda-forge cannot satisfy its requirements, unless
    `even_so`. Before anything is fetched, raises NotAttempted if nothing else was named; if the
    machine is too small, unless `even_so`; or if it asks a terminal, for conda-forge, and is told
    no.
    """
    ctx = replace(ctx, keep_going=keep_going)
    wanted = ctx.select(packages)
    wanted = ctx.recipes.dependents(wanted) if with_dependents else wanted
    with ctx.project.lock():
        ctx.channel.reconcile()
        ctx.channel.require_base(ctx.base.base_tag)
        needed = ctx.recipes.dependencies(wanted)
        steps = ctx.recipes.plan(ctx.channel, frozenset(wanted if rebuild else ()))
        steps = [step for step in steps if step.recipe.name in needed]
        unnamed = {s.recipe.name for s in steps if s.action == BUILD} - wanted if only else set()
        absent = dict.fromkeys(unnamed, "not named")
        lost = runner.skipped(ctx.project, ctx.recipes, steps, last_run=False, unsolvable=absent)
        for name in sorted(lost.keys() & set(packages or ())):
            advice = ", and --only builds no package that is not named" if absent else ""
            raise NotAttempted(f"not started: {name}: {lost[name]}{advice}")
        unsolved = {} if even_so else unsolved_of(ctx, steps)
        for name, reason in unsolved.items():
            out.print(f"skipped: {name}: {reason}")
        if wanted <= unsolved.keys():
            advice = "Name other packages, or try it --even-so"
            raise NotAttempted(f"not started: {_one_of(unsolved, packages)}. {advice}")
        needed = ctx.recipes.dependencies(wanted - unsolved.keys()) | unsolved.keys()
        steps = [step for step in steps if step.recipe.name in needed]
        if (lacks := print_costs(ctx, steps, unsolved)) and not even_so:
            raise NotAttempted(f"not started: needs {lacks}. Make room, build less, or --even-so")
        asks &= not ctx.hostbase and any(step.action == BUILD for step in steps)
        if asks and sys.stdin.isatty() and not typer.confirm("Build all of this?"):
            raise NotAttempted("not started. `./forge build NAME` builds one; --yes does not ask")
        builder = ctx.builder(form)
        with builder.display:
            results = builder.run(ctx.recipes, steps, keep_going, unsolved)
    wanted -= unsolved.keys() if lenient else set()
    report(ctx, results, wanted, lenient and ctx.hostbase is not None)


def _one_of(unsolved: dict[str, str], named: list[str] | None) -> str:
    """Return why one of the named recipes is skipped, or without names the first of all."""
    name = next(name for name in unsolved if not named or name in named)
    return f"{name}: {unsolved[name]}"


def print_costs(ctx: Context, steps: list[Step], unsolved: dict[str, str]) -> str:
    """Print what building the steps costs; returns what this machine lacks, or nothing."""
    skipped = runner.skipped(ctx.project, ctx.recipes, steps, last_run=False, unsolvable=unsolved)
    recipes = [step.recipe for step in steps if step.action == BUILD]
    recipes = [recipe for recipe in recipes if recipe.name not in skipped]
    costs = read_costs(recipes, ctx.base)
    if recipes and ctx.hostbase and not ctx.hostbase.is_current():
        out.print("host base: would be made first")
        costs = {"host base": ctx.hostbase.cost, **costs}
    lines, lacks = preflight(ctx.project, costs)
    for line in lines:
        out.print(line)
    return lacks


def unsolved_of(ctx: Context, steps: list[Step]) -> dict[str, str]:
    """Return the recipes that conda-forge cannot satisfy, and why, if it is the base and answers.

    Every environment is solved, which takes a minute or two.
    """
    if ctx.hostbase or not any(step.action == BUILD for step in steps):
        return {}
    try:
        reason = bases.unanswered()
        if not reason:
            with Display(err) as display:
                display.phase("solving every environment with what conda-forge has")
                return find_unsolvable(ctx.recipes, steps, ctx.channel, display.line)
    except Exception as error:  # the bindings have many
        reason = redacted(error)
    reason = " ".join(reason.split())
    err.print(f"whether conda-forge has all that is needed is not known: {reason}")
    return {}


def report(ctx: Context, results: list[Result], wanted: set[str], lenient: bool) -> None:
    """Print the closing table and exit: 1 if one failed, 3 if a wanted one was not attempted."""
    out.print("\n".join(runner.table(results)))
    if ctx.project.logs.is_dir():
        out.print(f"logs: {ctx.project.logs}")
    skipped = {r.step.recipe.name: r.detail for r in results if r.state == NOT_ATTEMPTED}
    for name, detail in skipped.items():
        err.print(f"not attempted: {name}: {detail}")
    for name, reason in ctx.recipes.broken.items():
        err.print(f"failed: {name}: {reason}")
    if ctx.recipes.broken or any(result.state == FAILED for result in results):
        raise typer.Exit(1)
    raise typer.Exit(3 if skipped.keys() & wanted and not lenient else 0)


@command(app)
def build_all(
    ctx: Context, keep_going: KeepGoing = False, even_so: EvenSo = False,
    form: Format = LOCAL_FORMAT, strict: Strict = False, yes: Yes = False,
    stop_after: StopAfter = None,
) -> None:  # fmt: skip
    """Build every package that is not up to date. Interrupt it at any time: the next run resumes.

    On the host base, packages whose sources only other hosts than PyPI have are reported as not
    attempted without failing the run, unless --strict.
    """
    with time_box(stop_after):
        run_build(ctx, None, keep_going, even_so, form, lenient=not strict, asks=not yes)


@command(app)
def build(
    ctx: Context, packages: Packages, with_dependents: Dependents = False,
    keep_going: KeepGoing = False, even_so: EvenSo = False, form: Format = LOCAL_FORMAT,
    stop_after: StopAfter = None, only: Only = False,
) -> None:  # fmt: skip
    """Build the named packages and their dependencies, where they are not up to date."""
    with time_box(stop_after):
        run_build(
            ctx, packages, keep_going, even_so, form, with_dependents=with_dependents, only=only
        )


@command(app)
def rebuild(
    ctx: Context, packages: Packages, keep_going: KeepGoing = False, even_so: EvenSo = False,
    form: Format = LOCAL_FORMAT,
) -> None:  # fmt: skip
    """Build the named packages again, up to date or not, under the next build number."""
    run_build(ctx, packages, keep_going, even_so, form, rebuild=True)


@command(app)
def test_packages(ctx: Context, packages: Maybe = None) -> None:
    """Run the tests inside the built packages again, against the channel as it is."""
    wanted = ctx.select(packages)
    with ctx.project.lock():
        steps = [s for s in ctx.recipes.plan(ctx.channel) if s.recipe.name in wanted]
        builder = ctx.builder(on_base=any(step.action == UP_TO_DATE for step in steps))
        with builder.display:
            results = builder.test_packages(steps)
    report(ctx, results, wanted, lenient=packages is None and bool(ctx.hostbase))


@command(app)
def plan(ctx: Context, as_json: Json = False, strict: Strict = False) -> None:
    """Print the build order, and why each package would be built, or is up to date or skipped.

    Skipped is what the last run could not attempt, what needs what the base lacks, and what
    conda-forge, which --json does not ask, cannot satisfy today; the next run tries again.
    """
    steps = ctx.recipes.plan(ctx.channel)
    unsolved = {} if as_json else unsolved_of(ctx, steps)
    rows = list(plan_rows(ctx, steps, unsolved))
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for number, row in enumerate(rows, 1):
        for dist in row["outputs"]:
            out.print(f"{number:2} {row['action']:10} {dist}: {row['reason']}")
    lacking = {row["recipe"]: f"lacks {row['lacks']}" for row in rows if row["lacks"]}
    for name, why in (ctx.recipes.absent | lacking).items():
        out.print(f"   {name}: {why}")
    lacks = print_costs(ctx, steps, unsolved)
    if lacks:
        out.print(f"a build would not start: it needs {lacks}")
    if strict and any(row["action"] == SKIPPED for row in rows):
        raise typer.Exit(3)


def plan_rows(
    ctx: Context, steps: list[Step], unsolved: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield one row per recipe, in build order."""
    skipped = runner.skipped(ctx.project, ctx.recipes, steps, unsolvable=unsolved)
    for step in steps:
        name = step.recipe.name
        yield {
            "recipe": name,
            "action": SKIPPED if name in skipped else step.action,
            "reason": skipped.get(name, step.reason),
            "version": step.recipe.version,
            "lacks": step.recipe.extra.get("lacks", ""),
            "outputs": [output.dist for output in step.outputs],
            "needs": sorted(ctx.recipes.direct_needs(name)),
            "requirements": step.recipe.requirements,
            "sources": [{"origin": s.origin, s.kind: s.digest} for s in sources_of(step.recipe)],
        }


@command(app)
def status(ctx: Context, as_json: Json = False) -> None:
    """List every package: version, build string, state on this base, file, sha256, size."""
    rows = [row for step in ctx.recipes.plan(ctx.channel) for row in status_rows(ctx, step)]
    if as_json:
        print(json.dumps({"base": ctx.base.name, "packages": rows}, indent=2))
        return
    for row in rows:
        details = f", {row['size']} bytes, sha256 {row['sha256']}" if row["sha256"] else ""
        out.print(f"{row['name']} {row['version']} {row['build']}: {row['state']}{details}")


@command(app)
def clean(ctx: Context) -> None:
    """Remove what killed commands left: here, where they published, and in rattler's cache."""
    for path in remove_leftovers(ctx):
        out.print(f"removed {path}")


def remove_leftovers(ctx: Context) -> list[Path]:
    """Remove what killed commands left, each under the lock that its users hold; return it."""
    build, gone = ctx.project.build, swept_cache(cache_folder())
    if (build / ".lock").exists():
        with suppress(ForgeError), ctx.project.lock() as left:
            gone += left
            ctx.channel.reconcile()
    named = [StaticChannel(link.resolve()) for link in build.glob("published/*")]
    # publish refused the others, or their folder has become something else
    published = {channel.folder: channel.withdrawn_folder for channel in named if channel.is_ours()}
    for folder in (build, build / "host-base", ctx.project.sources, *published):
        partial = [*folder.glob(".index.html.partial"), *folder.glob(".partial-*")]
        for place in {folder, published.get(folder, folder)}:
            partial += [path for d in SUBDIRS for path in place.glob(f"{d}/.partial-*")]
        gone += [*swept(folder / ".lock", partial), *swept_cache(folder)]
    for stack in build.glob("stacks/*"):
        gone += swept(stack / ".pixi/.lock", Workspace(stack.name, stack).left())
    return gone


def status_rows(ctx: Context, step: Step) -> Iterator[dict[str, Any]]:
    """Yield a row per output. `state`: built, outdated, not built, damaged (differs from index)."""
    for output in step.outputs:
        row: dict[str, Any] = {key: getattr(output, key) for key in ("name", "version", "build")}
        row |= {"recipe": step.recipe.name, "reason": step.reason, "file": None, "sha256": None}
        row |= {"state": "outdated" if step.has_older_builds else "not built", "size": None}
        if isinstance(output, Record):
            file = ctx.channel.path(output)
            if file.exists():
                row |= {"sha256": sha256_file(file), "size": file.stat().st_size}
            row["state"] = "built" if row["sha256"] == output.sha256 else "damaged"
            row["file"] = f"{output.subdir}/{output.file_name}"
        yield row
