# SPDX-License-Identifier: BSD-3-Clause
"""The command line: `./forge CMD` or `pixi run CMD`.

Exit codes: 0 everything wanted exists, 1 a build, test or installation failed, 2 usage or
configuration, 3 something wanted could not be attempted, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from forge_store.bases import BaseName
from forge_store.channel import Record
from forge_store.project import ForgeError, sha256_file
from forge_store.sources import PYPI_SOURCES, PYPI_URL
from strix_forge import build
from strix_forge.build import FAILED, LEFT, Result
from strix_forge.recipes import Step, sources_of
from strix_forge.session import LOCAL_FORMAT, err, out, say, session
from strix_forge.upkeep import patches_app, sources_app

INTERRUPTED = 130
GLOBAL_OPTIONS = ("--base", "--output", "--variant")

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(sources_app, name="sources")
app.add_typer(patches_app, name="patches")

Packages = Annotated[list[str], typer.Argument(help="Recipe names.")]
Maybe = Annotated[list[str] | None, typer.Argument(help="Recipe names (default: all).")]
KeepGoing = Annotated[bool, typer.Option("--continue-on-failure", help="Go on with the rest.")]
Format = Annotated[
    str, typer.Option("--package-format", help="conda:LEVEL; use conda:19 for a release.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Environment = Annotated[str, typer.Option("--environment", "-e", help="Environment of the stack.")]


@app.callback()
def options(
    base: Annotated[BaseName, typer.Option(envvar="FORGE_BASE", help="Build on.")] = BaseName.AUTO,
    output: Annotated[Path | None, typer.Option(help="Channel folder [channel/].")] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE instead of what variants.yaml says.")
    ] = None,
    root: Annotated[Path, typer.Option(envvar="FORGE_ROOT", hidden=True)] = Path(),
) -> None:
    """Build, lock, install and check the strix-forge packages.

    --base, --output and --variant may stand before or after the command.
    """
    session.root, session.wanted_base, session.output = root, base, output
    session.variants = variant or []


def run_build(
    wanted: set[str] | None, rebuild: set[str], keep_going: bool, package_format: str
) -> int:
    """Build `wanted` (None: all) and what they need, print the table; returns the exit code.

    With None on the embedded base, what that base cannot reach does not count as wanted.
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
    left = [r for r in results if r.state == LEFT]
    for result in left:
        text = f"not attempted: {result.step.recipe.name}: {result.detail}"
        err.print(text, highlight=False, markup=False)
    if any(r.state == FAILED for r in results):
        return 1
    missed = [r for r in left if wanted is None or r.step.recipe.name in wanted]
    return 3 if missed and not lenient else 0


@app.command("build-all")
def build_all(
    keep_going: KeepGoing = False,
    package_format: Format = LOCAL_FORMAT,
    strict: Annotated[bool, typer.Option(help="Exit 3 for what the base cannot reach.")] = False,
) -> None:
    """Build every package that is not current. Interrupt it when you like: the next run goes on.

    On the embedded base, a package whose source needs a host other than PyPI's is reported as not
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
    packages: Packages, keep_going: KeepGoing = False, package_format: Format = LOCAL_FORMAT
) -> None:
    """Build the named packages again although they are current, under the next build number."""
    wanted = session.known(packages)
    raise typer.Exit(run_build(wanted, wanted, keep_going, package_format))


@app.command()
def plan(as_json: Json = False) -> None:
    """The build order, and why each package would be built or skipped.

    `left` is what the last run could not attempt, or what the base cannot give; the next run
    tries it again.
    """
    session.quiet = as_json
    steps = session.recipes.plan(session.channel)
    rows = []
    for step in steps:
        left = build.why_not_attempted(session.project, session.recipes, step)
        verb = "left" if left else "build" if step.wanted else "skip"
        row = {"recipe": step.recipe.name, "action": verb, "reason": left or step.reason}
        row |= {"version": step.recipe.version, "outputs": [o.dist for o in step.outputs]}
        row |= {"requirements": step.recipe.requirements}
        row["sources"] = [
            {"origin": s.origin, "commit" if s.commit else "sha256": s.digest}
            for s in sources_of(step.recipe)
        ]
        rows.append(row)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if session.embedded and not session.embedded.is_current():
        say("embedded base: would be made first")
    for number, row in enumerate(rows, 1):
        for dist in row["outputs"]:
            say(f"{number:2} {row['action']:5} {dist}: {row['reason']}")
    for name in session.recipes.given:
        say(f"   given {name}: the {session.base.name} base has it")


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


@app.command()
def lock(stack: str) -> None:
    """Solve a stack's environments and write its lock file.

    On the embedded base a package of ours that was not built is left out, and named.
    """
    chosen = session.stack(stack)
    if not session.channel.is_indexed():
        with session.project.lock():
            session.channel.reconcile()
    built = {record.name for record in session.channel.records()}
    unbuilt = set(session.recipes.owner) - built if session.embedded else set()
    counts, left_out = chosen.lock(unbuilt.__contains__)
    for name in left_out:
        say(f"left out {name}: it was not built here (forge build {name} says why)")
    for environment, count in counts.items():
        say(f"{environment}: {count} packages")
    say(f"wrote {chosen.lock_file}")


@app.command()
def install(stack: str, environment: Environment = "default") -> None:
    """Install an environment of a stack exactly as its lock file says."""
    chosen = session.stack(stack)
    say(f"{chosen.install(environment)} packages in {chosen.prefix(environment)}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    stack: str,
    command: Annotated[list[str], typer.Argument(help="Command and arguments, after --.")],
    environment: Environment = "default",
) -> None:
    """Run a command in an installed environment, activated."""
    session.quiet = True
    raise typer.Exit(session.stack(stack).run(environment, command))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def validate(context: typer.Context) -> None:
    """Check attention in the installed attention stack; arguments go to strix-validate."""
    session.quiet = True
    command = ["strix-validate", *(context.args or ["attention"])]
    raise typer.Exit(session.stack("attention").run("default", command))


@app.command()
def publish(to: Annotated[Path, typer.Option(help="Channel folder to publish to.")]) -> None:
    """Copy the channel's packages to another channel folder. Host-bound packages are refused."""
    with session.project.lock():
        count = session.channel.publish(to.resolve())
    say(f"{count} packages in {to}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def test(context: typer.Context) -> None:
    """Run the tests of this repository; arguments go to pytest."""
    command = [sys.executable, "-m", "pytest", *context.args]
    raise typer.Exit(subprocess.run(command, cwd=session.project.root, check=False).returncode)


def globals_first(arguments: list[str]) -> list[str]:
    """Options that typer takes before the command only, moved there from anywhere before `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    first, rest, todo = [], [], arguments[:end]
    while todo:
        word = todo.pop(0)
        if word.startswith(tuple(f"{name}=" for name in GLOBAL_OPTIONS)):
            first.append(word)
        elif word in GLOBAL_OPTIONS:
            first += [word, *todo[:1]]
            del todo[:1]
        else:
            rest.append(word)
    return first + rest + arguments[end:]


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM. Not KeyboardInterrupt, which typer would turn into exit code 1."""


def interrupt(*_: object) -> None:
    raise Interrupted


def main() -> None:
    """Run the command line; every foreseen error is one message and an exit code."""
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    os.environ[PYPI_SOURCES] = PYPI_URL
    code = 0
    try:
        app(globals_first(sys.argv[1:]), prog_name="forge")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    except Interrupted:
        err.print("interrupted; run the same command again to go on")
        code = INTERRUPTED
    except ForgeError as error:
        err.print(f"error: {error}", highlight=False, markup=False)
        code = error.exit_code
    except OSError as error:  # a full or failing disk, wherever it shows first
        where = error.filename or session.project.build
        err.print(f"error: {where}: {error.strerror}; mend that and run the same command again")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # py-rattler sometimes aborts while Python shuts down, after the work is done
    os._exit(code)
