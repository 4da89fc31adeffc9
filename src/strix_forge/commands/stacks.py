# SPDX-License-Identifier: BSD-3-Clause
"""The commands for stacks: lock, install, run, validate."""

from __future__ import annotations

from typing import Annotated

import typer

from strix_forge.session import say, session

app = typer.Typer()

Environment = Annotated[str, typer.Option("--environment", "-e", help="Environment of the stack.")]


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
