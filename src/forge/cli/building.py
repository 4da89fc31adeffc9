# SPDX-License-Identifier: BSD-3-Clause
"""The commands that plan, build and test packages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from forge.build import rebuild as reproduce
from forge.build import runner as build
from forge.build.runner import FAILED, NOT_ATTEMPTED, Result
from forge.channel.local import Record
from forge.cli.context import LOCAL_FORMAT, err, out, say, session
from forge.files import sha256_file
from forge.provenance.records import RECORD, SBOM
from forge.recipes.plan import SKIPPED, Step
from forge.recipes.recipe import sources_of

app = typer.Typer()

Packages = Annotated[list[str], typer.Argument(help="Recipe names.")]
Maybe = Annotated[list[str] | None, typer.Argument(help="Recipe names (default: all).")]
KeepGoing = Annotated[bool, typer.Option("--continue-on-failure", help="Go on with the rest.")]
Format = Annotated[
    str, typer.Option("--package-format", help="conda:LEVEL; use conda:19 for a release.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def run_build(
    wanted: set[str] | None, rebuild: set[str], keep_going: bool, package_format: str
) -> int:
    """Build `wanted` (None: all) and what they need, print the table; returns the exit code.

    With None on the host base, what that base cannot reach does not count as wanted.
    """
    with session.project.lock():
        builder = session.builder(package_format)
        session.channel.reconcile()
        session.channel.require_base(session.base.build_prefix)
        steps = session.recipes.plan(session.channel, frozenset(rebuild))
        if wanted is not None:
            needed = session.recipes.dependencies(wanted)
            steps = [step for step in steps if step.recipe.name in needed]
        with builder.display:
            results = builder.run(session.recipes, steps, keep_going)
    return report(results, wanted, lenient=wanted is None and session.base.folder is not None)


def report(results: list[Result], wanted: set[str] | None, lenient: bool) -> int:
    """Print the closing table and what was not attempted; returns the exit code."""
    out.print(build.table(results), soft_wrap=False, crop=False)
    say(f"logs: {session.project.logs}")
    missed = [r for r in results if r.state == NOT_ATTEMPTED]
    for result in missed:
        text = f"not attempted: {result.step.recipe.name}: {result.detail}"
        err.print(text, highlight=False, markup=False)
    if any(r.state == FAILED for r in results):
        return 1
    missed = [r for r in missed if wanted is None or r.step.recipe.name in wanted]
    return 3 if missed and not lenient else 0


@app.command("build-all")
def build_all(
    keep_going: KeepGoing = False,
    package_format: Format = LOCAL_FORMAT,
    strict: Annotated[bool, typer.Option(help="Exit 3 for what the base cannot reach.")] = False,
) -> None:
    """Build every package that is not current. Interrupt it when you like: the next run goes on.

    On the host base, a package whose source needs a host other than PyPI's is reported as not
    attempted without failing the run, unless --strict.
    """
    everything = session.known(None) if strict else None
    raise typer.Exit(run_build(everything, set(), keep_going, package_format))


@app.command("build")
def build_some(
    packages: Packages,
    with_dependents: Annotated[bool, typer.Option(help="And what is built on them.")] = False,
    keep_going: KeepGoing = False,
    package_format: Format = LOCAL_FORMAT,
) -> None:
    """Build the named packages, and those they need, where they are not current."""
    wanted = session.known(packages)
    wanted = session.recipes.dependents(wanted) if with_dependents else wanted
    raise typer.Exit(run_build(wanted, set(), keep_going, package_format))


@app.command()
def rebuild(
    packages: Packages,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with what is there; the channel stays.")
    ] = False,
    keep_going: KeepGoing = False,
    package_format: Format = LOCAL_FORMAT,
) -> None:
    """Build the named packages again although they are current, under the next build number.

    With --check the same packages are built again beside the channel and compared byte for byte:
    exit 1 when one differs, 3 when it cannot be rebuilt here.
    """
    wanted = session.known(packages)
    if not check:
        raise typer.Exit(run_build(wanted, wanted, keep_going, package_format))
    with session.project.lock():
        builder = session.builder(package_format)
        steps = [s for s in session.recipes.plan(session.channel) if s.recipe.name in wanted]
        with builder.display:
            results = reproduce.check(builder, steps)
    raise typer.Exit(report(results, wanted, lenient=False))


@app.command()
def plan(
    as_json: Json = False,
    matrix: Annotated[bool, typer.Option("--matrix", help="A job matrix for each level.")] = False,
) -> None:
    """The build order, and why each package would be built, or is up to date or skipped.

    Skipped is what the last run could not attempt, or what needs something that the base does not
    provide; the next run tries again.
    """
    session.quiet = as_json or matrix
    steps = session.recipes.plan(session.channel)
    levels = session.recipes.levels()
    if matrix:
        for line in matrix_lines(steps, levels):
            print(line)
        return
    rows: list[dict[str, Any]] = []
    skipped = build.skipped(session.project, session.recipes, steps)
    for step in steps:
        name, reason = step.recipe.name, skipped.get(step.recipe.name)
        action = SKIPPED if reason else step.action
        row: dict[str, Any] = {"recipe": name, "action": action, "reason": reason or step.reason}
        row |= {"version": step.recipe.version, "outputs": [o.dist for o in step.outputs]}
        needs = sorted(session.recipes.direct_needs(step.recipe.name))
        row |= {"level": levels[step.recipe.name], "needs": needs}
        row |= {"requirements": step.recipe.requirements}
        row["sources"] = [
            {"origin": s.origin, "commit" if s.commit else "sha256": s.digest}
            for s in sources_of(step.recipe)
        ]
        rows.append(row)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if session.hostbase and not session.hostbase.is_current():
        say("host base: would be made first")
    for number, row in enumerate(rows, 1):
        for dist in row["outputs"]:
            say(f"{number:2} {row['action']:10} {dist}: {row['reason']}")
    for name in session.recipes.provided:
        say(f"   provided   {name}: by the {session.base.name} base")


def matrix_lines(steps: list[Step], levels: dict[str, int]) -> Iterator[str]:
    """`levelN=JSON` for GITHUB_OUTPUT: what to build side by side, once the levels before are.

    An entry has the recipe, the files that it is going to yield, below channel/, and a key that
    is equal for equal content.
    """
    for level in sorted(set(levels.values())):
        entries = []
        for step in (step for step in steps if levels[step.recipe.name] == level):
            files = [f"channel/{out.subdir}/{out.file_name}" for out in step.outputs]
            notes = (".json", RECORD, SBOM)
            files += [f"channel/forge/{out.dist}{n}" for out in step.outputs for n in notes]
            entry = {"recipe": step.recipe.name, "key": step.digest_value}
            entries.append(entry | {"files": "\n".join(files)})
        yield f"level{level}={json.dumps(entries)}"


@app.command()
def status(as_json: Json = False) -> None:
    """Every recipe: version, build string, state on this base, package file, sha256, size."""
    session.quiet = as_json
    rows = [row for step in session.recipes.plan(session.channel) for row in status_rows(step)]
    if as_json:
        print(json.dumps({"base": session.base.name, "packages": rows}, indent=2))
        return
    for row in rows:
        details = f", {row['size']} bytes, sha256 {row['sha256']}" if row["sha256"] else ""
        say(f"{row['name']} {row['version']} {row['build']}: {row['state']}{details}")


def status_rows(step: Step) -> Iterator[dict[str, Any]]:
    """One row per output. `state`: built, outdated, not built, or damaged (differs from index)."""
    for output in step.outputs:
        row = {"recipe": step.recipe.name, "name": output.name, "version": output.version}
        row |= {"build": output.build, "reason": step.reason}
        row |= {"state": "outdated" if step.superseded else "not built"}
        row |= {"file": None, "sha256": None, "size": None}
        if isinstance(output, Record):
            file = session.channel.path(output)
            row["file"] = f"{output.subdir}/{output.file_name}"
            row["state"] = "damaged"
            if file.exists():
                row |= {"sha256": sha256_file(file), "size": file.stat().st_size}
                row["state"] = "built" if row["sha256"] == output.sha256 else "damaged"
        yield row


@app.command("test-packages")
def test_packages(packages: Maybe = None) -> None:
    """Run the tests inside the built packages again, against the channel as it is."""
    wanted = session.known(packages)
    with session.project.lock():
        builder = session.builder()
        steps = [s for s in session.recipes.plan(session.channel) if s.recipe.name in wanted]
        with builder.display:
            results = builder.test_packages(steps)
    lenient = packages is None and session.base.folder is not None
    raise typer.Exit(report(results, wanted, lenient))
