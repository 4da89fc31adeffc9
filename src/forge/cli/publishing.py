# SPDX-License-Identifier: BSD-3-Clause
"""The commands that bring packages to users, and say what these were made of."""

import subprocess
import sys
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from forge import channel as published
from forge.channel import StaticChannel
from forge.cli.context import Context, command, gravest, out
from forge.conda import provenance
from forge.conda.location import Location
from forge.conda.package import Places, require_confined
from forge.errors import Failed, ForgeError

app = typer.Typer()
channel_app = typer.Typer(help="Published channels.", no_args_is_help=True)
app.add_typer(channel_app, name="channel")

To = Annotated[str, Option(metavar="DIR", help="Folder of the published channel.")]
Folder = Annotated[Path, Argument(help="Folder of the channel.", file_okay=False)]
Builds = Annotated[list[str], Argument(help="NAME-VERSION-BUILD.")]
Restore = Annotated[bool, Option("--restore", help="Undo a yank.")]
Where = Annotated[str, Argument(help="Folder or URL of the channel.")]
Files = Annotated[list[Path], Argument(exists=True, dir_okay=False)]


@command(app)
def publish(ctx: Context, to: To) -> None:
    """Publish all packages of the channel, or none."""
    if not (folder := Location(to).folder):
        raise ForgeError(f"--to {to} is not a directory: publish to one (docs/publishing.md)")
    with ctx.project.lock():
        changed(ctx, folder, ctx.channel)


def changed(ctx: Context, folder: Path, *how: Any) -> None:
    """Change a published channel, say how, and write its page. Raises Failed without one."""
    with suppress(OSError):  # for `status`, if this is killed
        (known := ctx.project.build / "published").mkdir(parents=True, exist_ok=True)
        (known / sha256(bytes(folder)).hexdigest()).symlink_to(folder)
    revision = StaticChannel(folder).publish(*how)
    out.print(f"{folder}: {revision or 'nothing new'}")
    page = ctx.project.root / "docs/channel_page.py"
    if page.exists() and subprocess.run([sys.executable, page, folder], check=False).returncode:
        raise Failed(f"{folder} is published, but its page is not: fix that, and publish again")


@command(channel_app, "yank")
def yank_builds(ctx: Context, folder: Folder, builds: Builds, restore: Restore = False) -> None:
    """Mark builds so that no new solve takes them. Their files stay, and so do locks."""
    changed(ctx, folder.resolve(), None, () if restore else builds, builds if restore else ())


@command(channel_app, "verify")
def verify_channel(ctx: Context, channel: Where) -> None:
    """Hold every file against its record, and every form of the index against the others.

    Exit 1 with each finding on a line. Over HTTP every package is downloaded and none is kept.
    """
    location = Location(channel)
    index, findings = published.verify_channel(location)
    out.print(*findings, sep="\n", end="\n" if findings else "")
    orphans = "" if location.folder else "; a web server does not list files that are not indexed"
    out.print(f"{location}: {len(index.records)} packages, {len(findings)} findings{orphans}")
    raise typer.Exit(1 if findings else 0)


@command(app)
def verify(ctx: Context, files: Files) -> None:
    """Check package files against their provenance, themselves and each other, without a network.

    Exit 1 for any difference, 3 where there is no provenance: then only the files inside a
    package are checked, against its own list.
    """
    places: list[Places] = []
    codes = [verify_one(file, places) for file in files]
    require_confined(places)
    raise gravest(codes)


def verify_one(file: Path, places: list[Places]) -> int:
    """Print what was checked and every difference; returns the exit code."""
    known = provenance.of(file)
    verdict = provenance.verify(file, known)
    places += verdict.places
    for line in verdict.wrong:
        out.print(f"{file.name}: {line}")
    says = "not as stated" if verdict.wrong else "as stated"
    if not known:
        says = f"no provenance at {' or '.join(map(str, provenance.beside(file)))}"
    out.print(f"{file.name}: {says}; checked: {', '.join(verdict.checked) or 'nothing'}")
    if verdict.unchecked:
        out.print(f"{file.name}: by the statement's own word: {', '.join(verdict.unchecked)}")
    return 1 if verdict.wrong else 0 if known else 3
