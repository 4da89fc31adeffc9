# SPDX-License-Identifier: BSD-3-Clause
"""The commands that carry a stack to a machine without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forge_store.project import sha256_file
from pixi_workspace import bundle as bundles
from strix_forge.commands.stacks import Environment, Served
from strix_forge.session import say, session

app = typer.Typer()

ONE_MACHINE = "made for the machine that built it: {} host-bound packages, such as {}"


@app.command()
def bundle(
    stack: str,
    output: Annotated[Path, typer.Option("--to", "-o", help="The bundle to write.")],
    environment: Environment = "default",
    channel: Served = None,
) -> None:
    """Write a locked environment as one file that installs without a network.

    The file has pixi-pack's layout. forge unbundle installs it; pixi-unpack should, too.
    """
    made = bundles.write(session.stack(stack, channel), environment, output)
    say(f"{made.packages} packages of {made.stack}, {made.environment}, in {output}")
    say(f"{output.stat().st_size} bytes, sha256 {sha256_file(output)}")
    if made.host_bound:
        say(ONE_MACHINE.format(len(made.host_bound), made.host_bound[0]))


@app.command()
def unbundle(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False)],
    folder: Annotated[Path, typer.Argument(help="Gets env/ and activate.sh.")],
) -> None:
    """Install a bundle, without a network, with every file checked."""
    found = bundles.install(file, folder)
    say(f"{found.packages} packages of {found.stack}, {found.environment}, in {folder}/env")
    if found.host_bound:
        say(ONE_MACHINE.format(len(found.host_bound), found.host_bound[0]))
    say(f"source {folder}/activate.sh")
