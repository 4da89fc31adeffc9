# SPDX-License-Identifier: BSD-3-Clause
"""Run the recipes without conda-forge, AMD's server and GitHub (see docs/rehearsal.md)."""

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
# Settings with which click passes on all words of a command, including `--`, which click otherwise
# removes.
PASS_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}
Folder = Annotated[Path, typer.Argument(help="The rehearsal's own folder, outside the checkout.")]


@app.command()
def packages() -> None:
    """Print the Debian packages that a rehearsal needs."""
    names = {"g++-14", "gcc-14", "gfortran-14", "binutils", "patchelf", "python3-venv"}
    names |= {"e2fsprogs", "python3-dev", "git", *therock.PACKAGES}
    for part in conda_forge.PARTS.values():
        names.update(part.debs)
    print(*sorted(names), sep="\n")


@app.command()
def make(
    folder: Folder,
    host: Annotated[
        compilers.Host, typer.Option(help="The host compiler. It cannot be changed later.")
    ] = compilers.Host.GXX,
    is_torch_thin: Annotated[
        bool, typer.Option("--thin-torch", help="Do not compile most of torch's kernels.")
    ] = False,
    is_vllm_thin: Annotated[
        bool, typer.Option("--thin-vllm", help="Do not compile most of vLLM's kernels.")
    ] = False,
) -> None:
    """Make missing stand-ins for conda-forge and for AMD's archive, and copy the checkout."""
    debian.require_sid()
    place = checkout.Place.make(folder)
    with place.record_cost("archive"):
        place.make_archive()
    copy = place.copy_checkout()
    with place.record_cost("channel"):
        conda_forge.make(
            place.conda_forge,
            place.work,
            host,
            copy / "recipes/bases/host" / "copy_interpreter.py",
            [*checkout.PYPI, *conda_forge.list_wheel_specs(copy)],
        )
    thin_modules = []
    if is_torch_thin:
        thin_modules.append(thin_torch)
    if is_vllm_thin:
        thin_modules.append(thin_vllm)
    print(place.apply_overlay(*thin_modules))


@app.command(context_settings=PASS_ON)
def forge(context: typer.Context, folder: Folder) -> None:
    """Run the driver on the copy, for example with `forge DIR build rocm-sdk`."""
    raise typer.Exit(checkout.Place.at(folder).run_forge(context.args))


@app.command()
def night(folder: Folder) -> None:
    """Run the copy's tools/night.py without a GPU, into DIR/night (see docs/owner.md)."""
    raise typer.Exit(checkout.Place.at(folder).run_night())


@app.command()
def channel(
    folder: Folder,
    recipes: Annotated[
        list[str], typer.Argument(help="Recipes. Name those that they require, too.")
    ] = (workflow.RECIPES),
) -> None:
    """Run channel.yml on the copy as GitHub would, by default for the recipes up to aotriton."""
    raise typer.Exit(workflow.run_channel(checkout.Place.at(folder), recipes))


@app.command(context_settings=PASS_ON)
def user(context: typer.Context, folder: Folder) -> None:
    """Run a command as a user of the published packages: `user DIR forge lock attention`."""
    raise typer.Exit(checkout.Place.at(folder).run_as_user(context.args))


@app.command()
def untested(
    folder: Folder,
    recipe: str,
    variant: Annotated[list[str], typer.Option(metavar="KEY=VALUE", help="Repeatable.")] = [],  # noqa: B006
) -> None:
    """Build one recipe without its tests. The channel does not get the package."""
    raise typer.Exit(checkout.Place.at(folder).build_untested(recipe, variant))


if __name__ == "__main__":
    app()
