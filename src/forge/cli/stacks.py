# SPDX-License-Identifier: BSD-3-Clause
"""The commands for stacks: lock, install, run, validate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forge.bases import PUBLISHED
from forge.cli.context import say, session
from forge.errors import ForgeError

app = typer.Typer()

Environment = Annotated[str, typer.Option("--environment", "-e", help="Environment of the stack.")]
Served = Annotated[
    str | None,
    typer.Option(
        "--channel",
        metavar="URL",
        envvar="FORGE_CHANNEL",
        help="Where our packages are served, if not in channel/.",
    ),
]


@app.command()
def lock(
    stack: Annotated[str | None, typer.Argument(help="One of stacks/.")] = None,
    root: Annotated[bool, typer.Option("--root", help="The build tools, pixi.toml.")] = False,
    channel: Served = None,
    revision: Annotated[
        int | None, typer.Option(help="The channel as it was at this revision.")
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Take conda-forge's records from DIR/SUBDIR/repodata.json."
        ),
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="With --root: the newest of all, not what is locked.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail if the lock is not up to date.")
    ] = False,
) -> None:
    """Solve the environments of a stack, or the build tools', and write the lock file.

    With --channel the lock is for every machine and is written beside the stack's manifest.
    Without, or on the host base, it is for this machine and lies in build/stacks. On the
    host base a package of ours that the channel lacks is left out, and named.
    """
    if root == bool(stack):
        raise ForgeError("name one: a stack, or --root")
    if update and not root:
        raise ForgeError("--update is for --root: a stack is solved anew each time")
    if root and revision is not None:
        raise ForgeError("--revision is one of the channel that a stack is locked against")
    if stack:
        chosen = session.stack(stack, channel, revision, records)
    else:
        chosen = session.build_tools(None if check else records or session.known_records())
    unbuilt: set[str] = set()
    if stack and not channel and not session.channel.is_indexed():
        with session.project.lock():
            session.channel.reconcile()
    if stack and session.hostbase:
        unbuilt = set(session.recipes.owner) - chosen.package_names(PUBLISHED)
    if check:
        problems = chosen.outdated(unbuilt)
        for problem in problems:
            say(problem)
        say(f"{chosen.lock_file} {'is outdated' if problems else 'is up to date'}")
        raise typer.Exit(1 if problems else 0)
    before = chosen.lock_file.read_bytes() if chosen.lock_file.exists() else None
    counts = chosen.lock(unbuilt, keep=root and not update)
    for name in sorted(unbuilt & chosen.manifest.names()):
        say(f"left out {name}: the channel lacks it (forge build {name} says why)")
    for environment, count in counts.items():
        say(f"{environment}: {count} packages")
    same = chosen.lock_file.read_bytes() == before
    say(f"{chosen.lock_file} {'stays as it was' if same else 'is written'}")


@app.command()
def install(stack: str, environment: Environment = "default", channel: Served = None) -> None:
    """Install an environment of a stack exactly as its lock file says.

    With --channel that is the lock beside its manifest; without, the one in build/stacks.
    """
    chosen = session.stack(stack, channel)
    say(f"{chosen.install(environment)} packages in {chosen.prefix(environment)}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    stack: str,
    command: Annotated[list[str], typer.Argument(help="Command and arguments, after --.")],
    environment: Environment = "default",
    channel: Served = None,
) -> None:
    """Run a command in an installed environment, activated."""
    session.quiet = True
    raise typer.Exit(session.stack(stack, channel).run(environment, command))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def validate(context: typer.Context, channel: Served = None) -> None:
    """Check attention in the installed attention stack; arguments go to strix-validate."""
    session.quiet = True
    command = ["strix-validate", *(context.args or ["attention"])]
    raise typer.Exit(session.stack("attention", channel).run("default", command))
