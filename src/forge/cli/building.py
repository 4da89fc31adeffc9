# SPDX-License-Identifier: BSD-3-Clause
"""The commands that plan, build and test packages."""

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer import Option

from forge.build import runner
from forge.build.runner import FAILED, NOT_ATTEMPTED, Result
from forge.channel.local import Record
from forge.cli.context import LOCAL_FORMAT, Context, Json, Maybe, Packages, command, err, out
from forge.files import sha256_file
from forge.recipes.plan import SKIPPED, Step
from forge.recipes.recipe import sources_of

app = typer.Typer()

KeepGoing = Annotated[
    bool, Option("--continue-on-failure", help="Skip only dependents of failures.")
]
Format = Annotated[str, Option("--package-format", help="conda:LEVEL; use conda:19 for a release.")]
Strict = Annotated[bool, Option("--strict", help="Exit 3 if something was not attempted.")]
Dependents = Annotated[bool, Option("--with-dependents", help="Build their dependents as well.")]


def run_build(
    forge: Context, wanted: set[str], keep_going: bool, form: str, rebuild: bool, lenient: bool
) -> None:
    """Build `wanted` and what they need; all of `wanted` again with `rebuild`. Ends as `report`."""
    with forge.project.lock():
        builder = forge.builder(form)
        forge.channel.reconcile()
        forge.channel.require_base(forge.base.build_prefix)
        needed = forge.recipes.dependencies(wanted)
        steps = forge.recipes.plan(forge.channel, frozenset(wanted if rebuild else ()))
        steps = [step for step in steps if step.recipe.name in needed]
        with builder.display:
            results = builder.run(forge.recipes, steps, keep_going)
    report(forge, results, wanted, lenient)


def report(forge: Context, results: list[Result], wanted: set[str], lenient: bool) -> None:
    """Print the closing table and what was not attempted, and exit.

    With 1 if one failed, and 3 if a wanted one was not attempted, unless `lenient`.
    """
    out.print(runner.table(results), soft_wrap=False, crop=False)
    out.print(f"logs: {forge.project.logs}")
    skipped = {r.step.recipe.name: r.detail for r in results if r.state == NOT_ATTEMPTED}
    for name, detail in skipped.items():
        err.print(f"not attempted: {name}: {detail}")
    if any(result.state == FAILED for result in results):
        raise typer.Exit(1)
    raise typer.Exit(3 if skipped.keys() & wanted and not lenient else 0)


@command(app)
def build_all(
    forge: Context,
    keep_going: KeepGoing = False,
    form: Format = LOCAL_FORMAT,
    strict: Strict = False,
) -> None:
    """Build every package that is not up to date. Interrupt it at any time: the next run resumes.

    On the host base, packages whose sources only other hosts than PyPI have are reported as not
    attempted without failing the run, unless --strict.
    """
    lenient = bool(forge.hostbase) and not strict
    run_build(forge, forge.select(None), keep_going, form, rebuild=False, lenient=lenient)


@command(app)
def build(
    forge: Context,
    packages: Packages,
    with_dependents: Dependents = False,
    keep_going: KeepGoing = False,
    form: Format = LOCAL_FORMAT,
) -> None:
    """Build the named packages and their dependencies, where they are not up to date."""
    wanted = forge.select(packages)
    wanted = forge.recipes.dependents(wanted) if with_dependents else wanted
    run_build(forge, wanted, keep_going, form, rebuild=False, lenient=False)


@command(app)
def rebuild(
    forge: Context,
    packages: Packages,
    keep_going: KeepGoing = False,
    form: Format = LOCAL_FORMAT,
) -> None:
    """Build the named packages again, up to date or not, under the next build number."""
    run_build(forge, forge.select(packages), keep_going, form, rebuild=True, lenient=False)


@command(app)
def test_packages(forge: Context, packages: Maybe = None) -> None:
    """Run the tests inside the built packages again, against the channel as it is."""
    wanted = forge.select(packages)
    with forge.project.lock():
        builder = forge.builder()
        steps = [s for s in forge.recipes.plan(forge.channel) if s.recipe.name in wanted]
        with builder.display:
            results = builder.test_packages(steps)
    report(forge, results, wanted, lenient=packages is None and bool(forge.hostbase))


@command(app)
def plan(forge: Context, as_json: Json = False) -> None:
    """Print the build order, and why each package would be built, or is up to date or skipped.

    Skipped is what the last run could not attempt, or what needs something that the base does not
    provide; the next run tries again.
    """
    rows = list(plan_rows(forge))
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if forge.hostbase and not forge.hostbase.is_current():
        out.print("host base: would be made first")
    for number, row in enumerate(rows, 1):
        for dist in row["outputs"]:
            out.print(f"{number:2} {row['action']:10} {dist}: {row['reason']}")
    for name in forge.recipes.provided:
        out.print(f"   provided   {name}: by the {forge.base.name} base")


def plan_rows(forge: Context) -> Iterator[dict[str, Any]]:
    """One row per recipe, in build order."""
    steps = forge.recipes.plan(forge.channel)
    skipped = runner.skipped(forge.project, forge.recipes, steps)
    for step in steps:
        name = step.recipe.name
        yield {
            "recipe": name,
            "action": SKIPPED if name in skipped else step.action,
            "reason": skipped.get(name, step.reason),
            "version": step.recipe.version,
            "outputs": [output.dist for output in step.outputs],
            "needs": sorted(forge.recipes.direct_needs(name)),
            "requirements": step.recipe.requirements,
            "sources": [{"origin": s.origin, s.kind: s.digest} for s in sources_of(step.recipe)],
        }


@command(app)
def status(forge: Context, as_json: Json = False) -> None:
    """List every package: version, build string, state on this base, file, sha256, size."""
    rows = [row for step in forge.recipes.plan(forge.channel) for row in status_rows(forge, step)]
    if as_json:
        print(json.dumps({"base": forge.base.name, "packages": rows}, indent=2))
        return
    for row in rows:
        details = f", {row['size']} bytes, sha256 {row['sha256']}" if row["sha256"] else ""
        out.print(f"{row['name']} {row['version']} {row['build']}: {row['state']}{details}")


def status_rows(forge: Context, step: Step) -> Iterator[dict[str, Any]]:
    """One row per output. `state`: built, outdated, not built, or damaged (differs from index)."""
    for output in step.outputs:
        row: dict[str, Any] = {"recipe": step.recipe.name, "name": output.name}
        row |= {"version": output.version, "build": output.build, "reason": step.reason}
        row |= {"state": "outdated" if step.superseded else "not built"}
        row |= dict.fromkeys(("file", "sha256", "size"))
        if isinstance(output, Record):
            file = forge.channel.path(output)
            if file.exists():
                row |= {"sha256": sha256_file(file), "size": file.stat().st_size}
            row["state"] = "built" if row["sha256"] == output.sha256 else "damaged"
            row["file"] = f"{output.subdir}/{output.file_name}"
        yield row
