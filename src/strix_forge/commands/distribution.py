# SPDX-License-Identifier: BSD-3-Clause
"""The commands that bring packages to users."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strix_forge.session import say, session

app = typer.Typer()


@app.command()
def publish(to: Annotated[Path, typer.Option(help="Channel folder to publish to.")]) -> None:
    """Copy the channel's packages to another channel folder. Host-bound packages are refused."""
    with session.project.lock():
        count = session.channel.publish(to.resolve())
    say(f"{count} packages in {to}")
