# SPDX-License-Identifier: BSD-3-Clause
"""The commands for stacks: lock, install, run."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperCommand

from forge import bases
from forge.bases import PUBLISHED, BaseName
from forge.cli.context import Context, command, out
from forge.errors import ForgeError

app = typer.Typer()

Name = Annotated[str | None, Argument(help="A folder of stacks/.")]
Environment = Annotated[str, Option("--environment", "-e", metavar="NAME", help="Of the stack.")]
CHANNEL = "Our packages' channel, if not channel/."
URL = Option("--channel", metavar="URL", envvar="FORGE_CHANNEL", help=CHANNEL)
Served = Annotated[str | None, URL]
Older = Annotated[bool, Option("--accept-older", help="Take a channel that was reset.")]
Repodata = Annotated[Path | None, Option(metavar="DIR", help="conda-forge's repodata, DIR/SUBDIR.")]
Root = Annotated[bool, Option("--root", help="Lock this repository's build tools.")]
Update = Annotated[bool, Option("--update", help="With --root: move to the newest versions.")]
Check = Annotated[bool, Option("--check", help="Write nothing; fail if the lock is outdated.")]
Words = Annotated[list[str], Argument(metavar="COMMAND...", help="Best after --.")]


@command(app)
def lock(
    ctx: Context,
    stack: Name = None,
    root: Root = False,
    channel: Served = None,
    records: Repodata = None,
    update: Update = False,
    check: Check = False,
    older: Older = False,
) -> None:
    """Solve the environments of a stack, or of the build tools, and write the lock file.

    With --channel the lock is for every machine and is written beside the stack's manifest.
    Without it, or on the host base, the lock is for this machine and lies in build/stacks. On the
    host base, packages of ours that the channel lacks are left out and named. --variant python=3.13
    locks for that Python.
    """
    if root == bool(stack):
        raise ForgeError("name either a stack or --root")
    if update and not root:
        raise ForgeError("--update is for --root: a stack is solved anew each time")
    left_out: set[str] = set()
    if stack:
        ctx = replace(ctx, base_name=BaseName.CONDA_FORGE) if records else ctx
        chosen = ctx.stack(stack, channel, records)
        ctx.remember(channel, older)
        if not channel and not ctx.channel.is_indexed():
            with ctx.project.lock():
                ctx.channel.reconcile()
        if ctx.hostbase:
            unbuilt = set(ctx.recipes.owner) - chosen.package_names(PUBLISHED)
            for wanted in chosen.manifest.environments().values():
                left_out |= unbuilt.intersection(spec.split()[0] for spec in wanted.specs)
            chosen = replace(chosen, manifest=replace(chosen.manifest, without=left_out))
    else:
        chosen = ctx.build_tools(None if check else records or known_records(ctx))
    if check:
        problems = chosen.outdated()
        for problem in problems:
            out.print(problem)
        out.print(f"{chosen.lock_file} is {'outdated' if problems else 'up to date'}")
        raise typer.Exit(1 if problems else 0)
    before = chosen.lock_file.read_bytes() if chosen.lock_file.exists() else None
    counts = chosen.lock(keep=root and not update)
    for name in sorted(left_out):
        out.print(f"left out {name}: the channel lacks it (forge build {name} says why)")
    for environment, count in counts.items():
        out.print(f"{environment}: {count} packages")
    same = chosen.lock_file.read_bytes() == before
    out.print(f"{chosen.lock_file}: {'unchanged' if same else 'written'}")


def known_records(ctx: Context) -> Path | None:
    """The checkout's own conda-forge records; None where conda-forge itself can be asked."""
    if bases.choose(ctx.base_name)[0] == BaseName.CONDA_FORGE:
        return None
    folder = ctx.project.root / "tests" / "data" / "conda-forge"
    out.print(f"conda-forge is unreachable or not requested: solving from the records in {folder}")
    return folder


@command(app)
def install(
    ctx: Context,
    stack: str,
    environment: Environment = "default",
    channel: Served = None,
    older: Older = False,
) -> None:
    """Install an environment of a stack exactly as its lock file says.

    With --channel that is the lock beside its manifest; without, the one in build/stacks.
    """
    chosen = ctx.stack(stack, channel)
    ctx.remember(channel, older)
    out.print(f"{chosen.install(environment)} packages in {chosen.prefix(environment)}")


class Run(TyperCommand):
    """Takes options of ours up to `--`, or without it up to the first word of the command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split the words of ours from the command's."""
        ctx.allow_interspersed_args = "--" in args
        return super().parse_args(ctx, args)


@command(app, cls=Run)
def run(
    ctx: Context,
    stack: str,
    words: Words,
    environment: Environment = "default",
    channel: Served = None,
) -> None:
    """Run a command in an installed environment, activated."""
    ctx.stack(stack, channel).run(environment, words)
