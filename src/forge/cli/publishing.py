# SPDX-License-Identifier: BSD-3-Clause
"""The commands that bring packages to users."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from forge.channel import revisions, verify
from forge.channel.location import Location
from forge.channel.publish import StaticChannel
from forge.channel.uploads import FORMS, ServerChannel, destination
from forge.cli.context import Context, Json, command, out
from forge.errors import ForgeError

app = typer.Typer()
channel_app = typer.Typer(help="Published channels.", no_args_is_help=True)
app.add_typer(channel_app, name="channel")

Where = Annotated[str, Argument(help="Folder or URL of the channel.")]
Builds = Annotated[list[str] | None, Option(help="NAME-VERSION-BUILD, repeatable.")]


@command(app)
def publish(
    forge: Context,
    to: Annotated[str, Option(help=f"{FORMS}.")],
    yank: Builds = None,
    restore: Builds = None,
) -> None:
    """Publish the channel's packages. Nothing goes if one of them is not fit to go.

    A yanked build stays, so that locks which name it install; no new solve takes it.
    """
    target = destination(to)
    if isinstance(target, ServerChannel) and (yank or restore):
        raise ForgeError("only a folder's builds can be yanked here; use the server's own way")
    with forge.project.lock():
        if isinstance(target, ServerChannel):
            sent, count = target.publish(forge.channel)
            out.print(f"{sent} packages uploaded, {count} in {to}")
            return
        revision = StaticChannel(target).publish(forge.channel, yank or (), restore or ())
    out.print(f"{target}: {revision or 'nothing new'}")


@command(channel_app, "yank")
def yank_builds(
    forge: Context,
    folder: Annotated[Path, Argument(help="Folder of the channel.", file_okay=False)],
    builds: Annotated[list[str], Argument(help="NAME-VERSION-BUILD.")],
    restore: Annotated[bool, Option("--restore", help="Take the mark off again.")] = False,
) -> None:
    """Mark builds so that no new solve takes them. Their files stay, and so do locks."""
    channel = StaticChannel(folder.resolve())
    revision = channel.publish(None, *((), builds) if restore else (builds,))
    out.print(f"{folder}: {revision or 'nothing new'}")


@command(channel_app, "log")
def log(forge: Context, channel: Where, as_json: Json = False) -> None:
    """Print the revisions of a published channel, newest first."""
    entries = revisions.read(Location(channel))
    if as_json:
        print(json.dumps([asdict(entry) for entry in entries], indent=1))
        return
    if not entries:
        raise ForgeError(f"{channel} has no revisions: it is not a channel that forge publish made")
    for entry in reversed(entries):
        out.print(f"{entry.time} {entry}")
        for sign, files in (("+", entry.added), ("-", entry.yanked), ("^", entry.restored)):
            for file in files:
                out.print(f"  {sign} {file}")


@command(channel_app, "verify")
def verify_channel(
    forge: Context,
    channel: Where,
    lock: Annotated[
        list[Path] | None, Option(exists=True, dir_okay=False, help="A stack's pixi.lock.")
    ] = None,
    url: Annotated[str | None, Option(help="What the locks call the channel.")] = None,
) -> None:
    """Hold every file against its record, and every form of the index against the others.

    Exit 1 with each finding on a line. Over HTTP every package is downloaded and none is kept.
    """
    location = Location(channel)
    index, findings = verify.channel(location, lock or [], url)
    for finding in findings:
        out.print(finding)
    orphans = "" if location.folder else "; a web server does not list files that are not indexed"
    out.print(f"{location}: {len(index.records)} packages, {len(findings)} findings{orphans}")
    raise typer.Exit(1 if findings else 0)
