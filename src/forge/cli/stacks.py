# SPDX-License-Identifier: BSD-3-Clause
"""The commands for stacks: lock, install, run.

They work on a copy of the stack in build/stacks, which names the channels in use. Where pixi is on
PATH they are pixi's own commands there; without it the driver does what builds and CI need.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rattler import Version, VersionSpec
from typer import Argument, Option
from typer.core import TyperCommand

from forge.bases import CONDA_FORGE, PUBLISHED
from forge.cli.context import Context, command, err, gravest, out
from forge.conda.location import Location
from forge.conda.package import cache_folder, scratch
from forge.envs.manifest import Manifest
from forge.envs.workspace import LockedInPart, Workspace
from forge.errors import ForgeError
from forge.files import hold, move_whole, write_text
from forge.recipes.recipe import package_name

app = typer.Typer()

Name = Annotated[str, Argument(help="A folder of stacks/.")]
Names = Annotated[
    list[str] | None, Argument(metavar="[STACK]...", help="Folders of stacks/ (default: all).")
]
Environment = Annotated[str, Option("--environment", "-e", metavar="NAME", help="Of the stack.")]
Served = Annotated[str | None, Option("--channel", metavar="URL", envvar="FORGE_CHANNEL",
                                      help="Our packages' channel, if not channel/.")]  # fmt: skip
Words = Annotated[list[str], Argument(metavar="COMMAND...", help="Best after --.")]


class Stack:
    """stacks/NAME, and its copy for this machine. Raises ForgeError for one that is not there."""

    def __init__(self, ctx: Context, name: str) -> None:
        stacks = {path.parent.name: path for path in ctx.project.root.glob("stacks/*/pixi.toml")}
        if name not in stacks:
            raise ForgeError(f"no stack {name!r}; there are: {', '.join(sorted(stacks))}")
        self.ctx, self.manifest = ctx, Manifest.load(stacks[name])
        self.copy = Workspace(name, ctx.project.build / "stacks" / name, err.print)

    def write(self, channel: str | None) -> None:
        """Write the copy's manifest, with ours from `channel`, without what the host base lacks."""
        ctx, unbuilt = self.ctx, set[str]()
        if ctx.hostbase and not (ctx.hostbase.folder / "noarch" / "repodata.json").exists():
            raise ForgeError("the host base is not made yet: run forge build-all --base host")
        ours = Location(channel).url if channel else ctx.project.channel.as_uri()
        theirs = ctx.base.channel if ctx.hostbase else CONDA_FORGE
        if ctx.hostbase and not channel:
            named = {package_name(s) for many in self.manifest.environments.values() for s in many}
            unbuilt = named & ctx.recipes.owner.keys() - {r.name for r in ctx.channel.records()}
        instead = {PUBLISHED: ours, "conda-forge": theirs, CONDA_FORGE: theirs}
        text = self.manifest.localized(instead, unbuilt, ctx.base.overrides.get("python", [""])[0])
        text = text.replace("gfx1151", ctx.base.overrides.get("gpu_arch", ["gfx1151"])[0])
        write_text(self.copy.folder / "pixi.toml", text)
        self.say_left_out()

    def say_left_out(self) -> None:
        """Print what the stack names and its copy, locked without it, does not."""
        named, kept = ({s for specs in m.environments.values() for s in map(package_name, specs)}
                       for m in (self.manifest, self.copy.manifest))  # fmt: skip
        for name in sorted(named - kept):
            out.print(f"left out {name}: the channel lacks it (forge build {name} says why)")

    @contextmanager
    def locking(self) -> Iterator[Path]:
        """Yield where to lock: that becomes the lock, and a killed command leaves the old one."""
        file = self.copy.lock_file
        with scratch(cache_folder()) as folder:
            new = Path(folder, file.name)
            for path in (file, file.with_name("pixi.toml")):
                if path.exists():
                    shutil.copy(path, folder)
            yield new
            move_whole(new, file)

    def pixi(self, command: str, *options: str, at: Path | None = None) -> list[str]:
        """Return `pixi COMMAND` on the copy, or `at`; nothing without pixi, or FORGE_NO_PIXI.

        Raises ForgeError for a pixi of another version than the stack requires.
        """
        if os.environ.get("FORGE_NO_PIXI") or not (pixi := shutil.which("pixi")):
            return []
        version, required = find_version(pixi), self.manifest.requires_pixi
        if version and not VersionSpec(required).matches(Version(version)):
            raise ForgeError(
                f"pixi {version} is not {required}, which {self.manifest.path} requires: update it "
                "(pixi self-update), or set FORGE_NO_PIXI=1, which goes on without pixi"
            )
        return [pixi, command, "--manifest-path", f"{at or self.copy.folder}/pixi.toml", *options]


def find_version(pixi: str) -> str:
    """Return the version of a pixi, or an empty string if it does not say."""
    done = subprocess.run([pixi, "--version"], capture_output=True, text=True, check=False)
    word = re.fullmatch(r"pixi (\d+(?:\.\d+)*)\S*\s*", done.stdout)
    return word[1] if word and done.returncode == 0 else ""


@command(app)
def lock(ctx: Context, stacks: Names = None, channel: Served = None) -> None:
    """Solve the environments of stacks for this machine, into build/stacks/STACK/pixi.lock.

    If an environment does not solve, the requirement is named, the others are locked, and the exit
    code is 1.

    With pixi on PATH that is `pixi lock`. On the host base, packages of ours that the channel lacks
    are left out and named. --variant python=3.13 locks for that Python. A lock for every machine is
    pixi's alone: run `pixi lock` in stacks/STACK.
    """
    names = stacks or sorted(p.parent.name for p in ctx.project.root.glob("stacks/*/pixi.toml"))
    chosen = [Stack(ctx, name) for name in names]
    if not channel and not ctx.channel.is_indexed():
        with ctx.project.lock():
            ctx.channel.reconcile()
    codes = []
    for stack in chosen:
        try:
            lock_one(stack, channel)
        except ForgeError as error:
            if len(chosen) == 1:
                raise
            err.print(f"failed: {stack.copy.name}: {error}")
            codes.append(error.exit_code)
        except typer.Exit as error:  # pixi has named the reason
            codes.append(error.exit_code)
    raise gravest(codes)


def lock_one(chosen: Stack, channel: str | None) -> None:
    """Lock a stack. Raises what Workspace.lock does, and typer.Exit with pixi's exit code."""
    sizes: dict[str, int] = {}
    failure = None
    with hold(chosen.copy.folder / ".pixi", "locking", err.print):
        chosen.write(channel)
        with chosen.locking() as made:
            words = chosen.pixi("lock", at=made.parent)
            try:
                sizes = {} if words else chosen.copy.lock(made)
            except LockedInPart as error:
                failure = error
            if words and (code := subprocess.run(words, check=False).returncode):
                raise typer.Exit(code)
    for environment, count in sizes.items():
        out.print(f"{environment}: {count} packages")
    out.print(f"{chosen.copy.lock_file}: written")
    if failure:
        raise failure


@command(app)
def install(ctx: Context, stack: Name, environment: Environment = "default") -> None:
    """Install an environment of a stack exactly as its lock in build/stacks/STACK says.

    With pixi on PATH that is `pixi install --locked`, with pixi's checks; FORGE_NO_PIXI=1 has ours.
    """
    chosen = Stack(ctx, stack)
    chosen.copy.require_locked()
    chosen.say_left_out()
    if words := chosen.pixi("install", "--locked", "-e", environment):
        with hold(chosen.copy.folder / ".pixi", "installing into", err.print):
            raise typer.Exit(subprocess.run(words, check=False).returncode)
    count = chosen.copy.install(environment)
    out.print(f"{count} packages in {chosen.copy.prefix(environment)}")


class Run(TyperCommand):
    """Takes options of ours up to `--`, or without it up to the first word of the command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split the words of ours from the command's."""
        ctx.allow_interspersed_args = "--" in args
        return super().parse_args(ctx, args)


@command(app, cls=Run)
def run(ctx: Context, stack: Name, words: Words, environment: Environment = "default") -> None:
    """Run a command in an installed environment; with pixi on PATH, a task of the stack too."""
    chosen = Stack(ctx, stack)
    if command := chosen.pixi("run", "--as-is", "-e", environment, "--", *words):
        os.execv(command[0], command)
    chosen.copy.run(environment, words)
