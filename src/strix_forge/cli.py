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
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from strix_forge import bases, build
from strix_forge.bases import Base, BaseName
from strix_forge.build import BUILT, CURRENT, FAILED, LEFT, Builder, Display, Result
from strix_forge.channel import Channel
from strix_forge.embedded import EmbeddedBase
from strix_forge.project import ForgeError, NotAttempted, Project, sha256_file
from strix_forge.recipes import RecipeSet, Step
from strix_forge.sources import PYPI_SOURCES, PYPI_URL, SourceCache, sources_of
from strix_forge.stacks import Stack

LOW, HIGH = 3, 19  # zstd levels: local work, release
INTERRUPTED = 130

app = typer.Typer(
    help="Build, lock, install and check the strix-forge packages.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
sources_app = typer.Typer(help="The source files that recipes name.", no_args_is_help=True)
app.add_typer(sources_app, name="sources")
out, err = Console(), Console(stderr=True)

BaseOption = Annotated[BaseName, typer.Option(envvar="FORGE_BASE", help="What to build on.")]
OutputOption = Annotated[
    Path | None, typer.Option(help="Channel folder to build into (default: channel/).")
]
RootOption = Annotated[Path, typer.Option(envvar="FORGE_ROOT", hidden=True)]
KeepGoing = Annotated[bool, typer.Option("--continue-on-failure", help="Go on with the rest.")]
Release = Annotated[bool, typer.Option(help="Compress as for a release: smaller, much slower.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Environment = Annotated[str, typer.Option("--environment", "-e", help="Environment of the stack.")]
Recipes = Annotated[list[str], typer.Argument(help="Recipe names.")]


@dataclass
class Session:
    """What a command works on. Rendering waits until it is asked for."""

    project: Project
    base: Base
    quiet: bool = False

    @classmethod
    def start(
        cls, root: Path, base: BaseName, output: Path | None = None, quiet: bool = False
    ) -> Session:
        os.environ[PYPI_SOURCES] = PYPI_URL
        project = Project.at(root, output)
        name, line = bases.choose(base)
        if not quiet:
            out.print(line, highlight=False, soft_wrap=True)
        return cls(project, bases.load(project, name), quiet)

    @cached_property
    def recipes(self) -> RecipeSet:
        return RecipeSet(self.project, self.base)

    @cached_property
    def channel(self) -> Channel:
        return Channel(self.project.channel)

    def known(self, names: list[str]) -> set[str]:
        """`names`, checked. Raises ForgeError for an unknown recipe."""
        unknown = sorted(set(names) - set(self.recipes.recipes))
        if unknown:
            raise ForgeError(
                f"no recipe {', '.join(unknown)}; there are: {', '.join(self.recipes.recipes)}"
            )
        return set(names)

    def make_base(self, builder_display: Display) -> None:
        """Make the embedded base if that is the base and it is not current."""
        if self.base.folder is not None:
            builder = Builder(self.project, self.base, None, builder_display, LOW)
            builder_display.phase("embedded base")
            EmbeddedBase(self.project, self.base).make(
                builder_display.say, builder_display.download, builder.run_job
            )

    def build(
        self, wanted: set[str] | None, rebuild: set[str], keep_going: bool, release: bool
    ) -> list[Result]:
        """Build `wanted` (None: all) and whatever of their dependencies is not current."""
        with self.project.lock(), Display(out) as display:
            self.make_base(display)
            self.channel.reconcile()
            self.refuse_other_base()
            steps = self.recipes.plan(self.channel, frozenset(rebuild))
            if wanted is not None:
                needed = self.recipes.dependencies(wanted)
                steps = [step for step in steps if step.recipe.name in needed]
            level = HIGH if release else LOW
            builder = Builder(self.project, self.base, self.recipes, display, level)
            results = builder.run(steps, keep_going)
        out.print(build.table(results))
        out.print(f"logs: {self.project.logs}", highlight=False, soft_wrap=True)
        return results

    def refuse_other_base(self) -> None:
        """Packages of both bases in one channel would be mixed by the solver."""
        for record in self.channel.records():
            if record.build.startswith(bases.HOST_BOUND) != (self.base.folder is not None):
                raise ForgeError(
                    f"{self.project.channel} holds packages of the other base, such as "
                    f"{record.file_name}. Name that base with --base, use another folder with "
                    "--output, or delete the folder"
                )


def finish(results: list[Result], wanted: set[str] | None, lenient: bool) -> None:
    """Report what was not attempted and exit with the worst state of what was wanted.

    `lenient`: packages that need a host out of this base's reach do not count as wanted.
    """
    considered = [r for r in results if wanted is None or r.step.recipe.name in wanted]
    left = [r for r in results if r.state == LEFT]
    for result in left:
        text = f"not attempted: {result.step.recipe.name}: {result.detail}"
        err.print(text, highlight=False, soft_wrap=True, markup=False)
    if any(r.state == FAILED for r in results):
        raise typer.Exit(1)
    if any(r.state == LEFT for r in considered) and not lenient:
        raise typer.Exit(3)


@app.command("build-all")
def build_all(
    base: BaseOption = BaseName.AUTO,
    output: OutputOption = None,
    root: RootOption = Path(),
    keep_going: KeepGoing = False,
    release: Release = False,
    strict: Annotated[bool, typer.Option(help="Exit 3 for what the base cannot reach.")] = False,
) -> None:
    """Build every package that is not current. Interrupt it when you like: the next run goes on.

    On the embedded base, a package whose source needs a host other than PyPI's is reported as not
    attempted without failing the run, unless --strict.
    """
    session = Session.start(root, base, output)
    results = session.build(None, set(), keep_going, release)
    finish(results, None, lenient=session.base.folder is not None and not strict)


@app.command("build")
def build_some(
    packages: Recipes,
    with_dependents: Annotated[bool, typer.Option(help="And what is built on them.")] = False,
    base: BaseOption = BaseName.AUTO,
    output: OutputOption = None,
    root: RootOption = Path(),
    keep_going: KeepGoing = False,
    release: Release = False,
) -> None:
    """Build the named packages, and those they need, where they are not current."""
    session = Session.start(root, base, output)
    wanted = session.known(packages)
    wanted = session.recipes.dependents(wanted) if with_dependents else wanted
    finish(session.build(wanted, set(), keep_going, release), wanted, lenient=False)


@app.command()
def rebuild(
    packages: Recipes,
    base: BaseOption = BaseName.AUTO,
    output: OutputOption = None,
    root: RootOption = Path(),
    keep_going: KeepGoing = False,
    release: Release = False,
) -> None:
    """Build the named packages again although they are current, under the next build number."""
    session = Session.start(root, base, output)
    wanted = session.known(packages)
    finish(session.build(wanted, wanted, keep_going, release), wanted, lenient=False)


@app.command()
def plan(
    base: BaseOption = BaseName.AUTO,
    output: OutputOption = None,
    root: RootOption = Path(),
    as_json: Json = False,
) -> None:
    """The build order, and why each package would be built or skipped."""
    session = Session.start(root, base, output, quiet=as_json)
    steps = session.recipes.plan(session.channel)
    if as_json:
        _print_json([
            {"recipe": s.recipe.name, "build": s.wanted, "reason": s.reason,
             "outputs": [o.dist for o in s.outputs]}
            for s in steps
        ])  # fmt: skip
        return
    if session.base.folder and not EmbeddedBase(session.project, session.base).is_current():
        out.print("embedded base: would be made first")
    for number, step in enumerate(steps, 1):
        verb = "build" if step.wanted else "skip "
        for output_ in step.outputs:
            out.print(
                f"{number:2} {verb} {output_.dist}: {step.reason}", highlight=False, soft_wrap=True
            )


@app.command()
def status(
    base: BaseOption = BaseName.AUTO,
    output: OutputOption = None,
    root: RootOption = Path(),
    as_json: Json = False,
) -> None:
    """Every recipe: version, build string, state on this base, package file, sha256, size."""
    session = Session.start(root, base, output, quiet=as_json)
    rows = [row for step in session.recipes.plan(session.channel) for row in _status(session, step)]
    if as_json:
        _print_json({"base": session.base.name, "packages": rows})
        return
    for row in rows:
        out.print(
            f"{row['name']} {row['version']} {row['build']}: {row['state']}"
            + (f", {row['size']} bytes, sha256 {row['sha256']}" if row["sha256"] else ""),
            highlight=False, soft_wrap=True,
        )  # fmt: skip


def _status(session: Session, step: Step) -> list[dict[str, Any]]:
    rows = []
    for index, output in enumerate(step.outputs):
        row = {
            "recipe": step.recipe.name, "name": output.name, "version": output.version,
            "build": output.build, "state": "not built", "reason": step.reason,
            "file": None, "sha256": None, "size": None,
        }  # fmt: skip
        if step.wanted and step.reason != "not in the channel":
            row["state"] = "outdated"
        if not step.wanted:
            record = step.records[index]
            file = session.channel.path(record)
            found = sha256_file(file) if file.exists() else None
            row["state"] = "built" if found == record.sha256 else "damaged"
            row |= {"file": f"{record.subdir}/{record.file_name}", "sha256": found}
            row["size"] = file.stat().st_size if found else None
        rows.append(row)
    return rows


@app.command("test-packages")
def test_packages(
    packages: Annotated[list[str] | None, typer.Argument(help="Recipe names.")] = None,
    base: BaseOption = BaseName.AUTO,
    output: OutputOption = None,
    root: RootOption = Path(),
) -> None:
    """Run the tests inside the built packages again, against the channel as it is."""
    session = Session.start(root, base, output)
    wanted = session.known(packages or list(session.recipes.recipes))
    with session.project.lock(), Display(out) as display:
        session.make_base(display)
        steps = [s for s in session.recipes.plan(session.channel) if s.recipe.name in wanted]
        builder = Builder(session.project, session.base, session.recipes, display, LOW)
        results = builder.test_packages(steps)
    out.print(build.table(results))
    finish(results, wanted, lenient=packages is None and session.base.folder is not None)


@sources_app.command("fetch")
def sources_fetch(
    packages: Annotated[list[str] | None, typer.Argument(help="Recipe names.")] = None,
    base: BaseOption = BaseName.AUTO,
    root: RootOption = Path(),
) -> None:
    """Bring the sources of recipes into the cache, so that they can be built offline."""
    session = Session.start(root, base)
    wanted = session.known(packages or list(session.recipes.recipes))
    cache = SourceCache(session.project)
    unreachable = 0
    with Display(out) as display:
        for name in wanted:
            for source in sources_of(session.recipes.recipes[name]):
                try:
                    display.say(f"{name}: {cache.fetch(source, display.download)}")
                except NotAttempted as error:
                    unreachable += 1
                    err.print(f"{name}: {error}", highlight=False, soft_wrap=True, markup=False)
    if unreachable:
        raise typer.Exit(3)


@sources_app.command("add")
def sources_add(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False)],
    base: BaseOption = BaseName.AUTO,
    root: RootOption = Path(),
) -> None:
    """Take files that were downloaded elsewhere into the cache; their sha256 says what they are."""
    session = Session.start(root, base)
    known = [s for recipe in session.recipes.recipes.values() for s in sources_of(recipe)]
    for file in files:
        source = SourceCache(session.project).add(file, known)
        out.print(f"{file} is {source.origin}", highlight=False, soft_wrap=True)


@app.command()
def lock(
    stack: str,
    base: BaseOption = BaseName.AUTO,
    output: OutputOption = None,
    root: RootOption = Path(),
) -> None:
    """Solve a stack's environments and write its lock file."""
    session = Session.start(root, base, output)
    chosen = Stack.load(session.project, session.base, stack)
    session.channel.reconcile()
    solved, left_out = chosen.lock(session.recipes)
    for name in left_out:
        out.print(
            f"left out {name}: it was not built here (forge build {name} says why)",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    for environment, records in solved.items():
        out.print(f"{environment}: {len(records)} packages", highlight=False)
    out.print(f"wrote {chosen.lock_file}", highlight=False, soft_wrap=True)


@app.command()
def install(
    stack: str,
    environment: Environment = "default",
    base: BaseOption = BaseName.AUTO,
    output: OutputOption = None,
    root: RootOption = Path(),
) -> None:
    """Install an environment of a stack exactly as its lock file says."""
    session = Session.start(root, base, output)
    chosen = Stack.load(session.project, session.base, stack)
    count = chosen.install(environment)
    prefix = chosen.prefix(environment)
    out.print(f"{count} packages in {prefix}", highlight=False, soft_wrap=True)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    stack: str,
    command: Annotated[list[str], typer.Argument(help="Command and arguments, after --.")],
    environment: Environment = "default",
    base: BaseOption = BaseName.AUTO,
    root: RootOption = Path(),
) -> None:
    """Run a command in an installed environment, activated."""
    session = Session.start(root, base, quiet=True)
    chosen = Stack.load(session.project, session.base, stack)
    raise typer.Exit(chosen.run(environment, command))


@app.command()
def publish(
    to: Annotated[Path, typer.Option(help="Channel folder to publish to.")],
    output: OutputOption = None,
    root: RootOption = Path(),
) -> None:
    """Copy the channel's packages to another channel folder. Host-bound packages are refused."""
    project = Project.at(root, output)
    with project.lock():
        records = Channel(project.channel).publish(to.resolve())
    out.print(f"{len(records)} packages in {to}", highlight=False, soft_wrap=True)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def test(context: typer.Context, root: RootOption = Path()) -> None:
    """Run the tests of this repository; arguments go to pytest."""
    folder = Project.at(root).root
    command = [sys.executable, "-m", "pytest", *(context.args or ["tests"])]
    raise typer.Exit(subprocess.run(command, cwd=folder, check=False).returncode)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2))


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM. Not KeyboardInterrupt, which typer would turn into exit code 1."""


def _interrupt(*_: object) -> None:
    raise Interrupted


def main() -> None:
    """Run the command line; every foreseen error is one message and an exit code."""
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    status = 0
    try:
        app(prog_name="forge")
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 0
    except Interrupted:
        err.print("interrupted; run the same command again to go on")
        status = INTERRUPTED
    except ForgeError as error:
        err.print(f"error: {error}", highlight=False, soft_wrap=True, markup=False)
        status = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    # py-rattler sometimes aborts while Python shuts down, after the work is done
    os._exit(status)
