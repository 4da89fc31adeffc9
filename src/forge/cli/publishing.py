# SPDX-License-Identifier: BSD-3-Clause
"""The commands that bring packages to users."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from forge.channel import revisions, verify
from forge.channel.location import Location
from forge.channel.publish import StaticChannel
from forge.channel.uploads import FORMS, ServerChannel, destination
from forge.cli.context import say, session
from forge.errors import ForgeError

app = typer.Typer()
channel_app = typer.Typer(help="A channel that is published.", no_args_is_help=True)
app.add_typer(channel_app, name="channel")

Where = Annotated[str, typer.Argument(help="Folder or URL of the channel.")]
Builds = Annotated[list[str] | None, typer.Option(help="NAME-VERSION-BUILD, repeatable.")]


@app.command()
def publish(
    to: Annotated[str, typer.Option(help=f"{FORMS}.")],
    yank: Builds = None,
    restore: Builds = None,
) -> None:
    """Publish the channel's packages. Nothing goes if one of them is not fit to go.

    A yanked build stays, so that locks which name it install; no new solve takes it.
    """
    target = destination(to)
    if isinstance(target, ServerChannel) and (yank or restore):
        raise ForgeError("only a folder's builds can be yanked here; use the server's own way")
    with session.project.lock():
        if isinstance(target, ServerChannel):
            sent, count = target.publish(session.channel)
            say(f"{sent} packages uploaded, {count} in {to}")
            return
        revision = StaticChannel(target).publish(session.channel, yank or (), restore or ())
    say(f"{target}: {revision or 'nothing new'}")


@channel_app.command("yank")
def yank_builds(
    folder: Annotated[Path, typer.Argument(help="Folder of the channel.", file_okay=False)],
    builds: Annotated[list[str], typer.Argument(help="NAME-VERSION-BUILD.")],
    restore: Annotated[bool, typer.Option("--restore", help="Take the mark off again.")] = False,
) -> None:
    """Mark builds so that no new solve takes them. Their files stay, and so do locks."""
    channel = StaticChannel(folder.resolve())
    revision = channel.publish(None, *((), builds) if restore else (builds,))
    say(f"{folder}: {revision or 'nothing new'}")


@channel_app.command("log")
def log(
    channel: Where,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Print the revisions of a published channel, newest first."""
    entries = revisions.read(Location(channel))
    if as_json:
        say(json.dumps([asdict(entry) for entry in entries], indent=1))
        return
    if not entries:
        raise ForgeError(f"{channel} has no revisions: it is not a channel that forge publish made")
    for entry in reversed(entries):
        say(f"{entry.time} {entry}")
        for sign, files in (("+", entry.added), ("-", entry.yanked), ("^", entry.restored)):
            for file in files:
                say(f"  {sign} {file}")


@channel_app.command("verify")
def verify_channel(
    channel: Where,
    lock: Annotated[
        list[Path] | None, typer.Option(exists=True, dir_okay=False, help="A stack's pixi.lock.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="What the locks call the channel.")] = None,
) -> None:
    """Hold every file against its record, and every form of the index against the others.

    Exit 1 with each finding on a line. Over HTTP every package is downloaded and none is kept.
    """
    location = Location(channel)
    index, findings = verify.channel(location, lock or [], url)
    for finding in findings:
        say(finding)
    orphans = "" if location.folder else "; a web server does not list files that are not indexed"
    say(f"{location}: {len(index.records)} packages, {len(findings)} findings{orphans}")
    raise typer.Exit(1 if findings else 0)
