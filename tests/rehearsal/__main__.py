# SPDX-License-Identifier: BSD-3-Clause
"""The recipes themselves, run without conda-forge, AMD and GitHub: docs/rehearsal.md."""

import sys
from pathlib import Path
from typing import Annotated

TESTS = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(TESTS), str(TESTS.parent / "src")]

import typer  # noqa: E402
from rehearsal import (  # noqa: E402
    checkout,
    compilers,
    conda_forge,
    debian,
    therock,
    thin_torch,
    thin_vllm,
    workflow,
)

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
# a command's own words, `--` among them, which else click takes for its own
WORDS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
Folder = Annotated[Path, typer.Argument(help="The rehearsal's own folder, outside the checkout.")]


@app.command()
def packages() -> None:
    """Print the Debian packages that a rehearsal needs."""
    parts = {name for part in conda_forge.PARTS.values() for name in part.debs}
    tools = {"g++-14", "gcc-14", "gfortran-14", "binutils", "patchelf", "python3-venv", "e2fsprogs"}
    print(*sorted({*therock.PACKAGES, *parts, *tools, "python3-dev", "git"}), sep="\n")


@app.command()
def make(
    folder: Folder,
    host: Annotated[
        compilers.Host, typer.Option(help="The host compiler, for good.")
    ] = compilers.Host.GXX,
    torch: Annotated[
        bool, typer.Option("--thin-torch", help="Most of torch's kernels are not compiled.")
    ] = False,
    vllm: Annotated[
        bool, typer.Option("--thin-vllm", help="Most of vLLM's kernels are not compiled.")
    ] = False,
) -> None:
    """Make both stand-ins and the copy of the checkout; what is there already stays."""
    debian.require_sid()
    place = checkout.Place.make(folder)
    with place.noted("archive"):
        place.archive()
    copy = place.copy()
    with place.noted("channel"):
        conda_forge.make(
            place.conda_forge,
            place.work,
            host,
            copy / "recipes/bases/host" / "copy_interpreter.py",
            [*checkout.PYPI, *conda_forge.asked(copy)],
        )
    asked = ((torch, thin_torch), (vllm, thin_vllm))
    print(place.overlay(*(module for wanted, module in asked if wanted)))


@app.command(context_settings=WORDS)
def forge(context: typer.Context, folder: Folder) -> None:
    """Run ./forge on the copy: `forge DIR build rocm-sdk`."""
    raise typer.Exit(checkout.Place.at(folder).forge(context.args))


@app.command()
def night(folder: Folder) -> None:
    """Run the owner's night on the copy, without a GPU, into DIR/night: docs/owner.md."""
    raise typer.Exit(checkout.Place.at(folder).night())


@app.command()
def channel(
    folder: Folder,
    recipes: Annotated[list[str], typer.Argument(help="All that they need with them.")] = (
        workflow.RECIPES
    ),
) -> None:
    """Run channel.yml on the copy as GitHub would, by default for what aotriton needs."""
    raise typer.Exit(workflow.run_channel(checkout.Place.at(folder), recipes))


@app.command(context_settings=WORDS)
def user(context: typer.Context, folder: Folder) -> None:
    """Run a command as a user of what is published: `user DIR forge lock attention`, or pixi."""
    raise typer.Exit(checkout.Place.at(folder).user(context.args))


@app.command()
def untested(
    folder: Folder,
    recipe: str,
    variant: Annotated[list[str], typer.Option(metavar="KEY=VALUE", help="Repeatable.")] = [],  # noqa: B006
) -> None:
    """Build one recipe alone and skip its tests; the package stays out of the channel."""
    raise typer.Exit(checkout.Place.at(folder).untested(recipe, variant))


if __name__ == "__main__":
    app()
