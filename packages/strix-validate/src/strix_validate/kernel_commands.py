# SPDX-License-Identifier: BSD-3-Clause
"""Commands about compiled kernels: warm, compilations and list --kernels."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from strix_validate.checks import CannotRun
from strix_validate.doctor.kernel_lists import describe, installed
from strix_validate.terminal import JsonOption, OnlyOption, VllmOption


def warm(
    model: Annotated[
        Path | None,
        typer.Option(metavar="CONFIG.json", help="Compile what this model needs, not common ones."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default: the cores.")] = None,
    vllm_source: VllmOption = None,
) -> None:
    """Compile the attention kernels that no package installed, before the first request.

    Fills Triton's cache of this user for gfx1151, and needs no GPU. With --model it says first how
    many kernels are in no package, and for how long they compile.
    """
    console = Console(stderr=True, highlight=False)
    try:
        from strix_validate.precompiled.warm import NoAttention, calls, fill, foretell

        try:
            wanted = calls(model, vllm_source)
            if model and "vLLM" in wanted:
                console.print(foretell(model, vllm_source, jobs))
        except (NoAttention, ValueError) as error:
            raise typer.BadParameter(str(error)) from error
        failed = fill(wanted, jobs, console)
    except (CannotRun, ModuleNotFoundError) as reason:
        console.print(f"{escape(str(reason))}: nothing to compile")
        raise typer.Exit(3) from reason
    raise typer.Exit(int(failed))


def compilations(
    as_json: JsonOption = False,
    only: OnlyOption = None,
    most: Annotated[
        int | None, typer.Option(min=0, help="Fail if more kernels than this are compiled.")
    ] = None,
    vllm_source: VllmOption = None,
) -> None:
    """Count what calls of 40 lengths compile when the user's cache is empty. Needs no GPU."""
    console = Console(stderr=True, highlight=False)
    try:
        from strix_validate.precompiled.warm import count

        found = count(Path(sys.base_prefix), only or [], vllm_source, console.print)
    except (CannotRun, ModuleNotFoundError) as reason:
        console.print(f"{escape(str(reason))}: nothing to count")
        raise typer.Exit(3) from reason
    total = sum(origins["compiled"] for origins in found.values())
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        for group, origins in found.items():
            typer.echo(f"{origins['compiled']:5} compiled {origins['packages']:5} shipped  {group}")
        typer.echo(f"{total:5} compiled")
    raise typer.Exit(int(most is not None and total > most))


def list_kernels(as_json: bool) -> None:
    """List the kernels that packages installed into this environment."""
    lists = installed(Path(sys.base_prefix))
    if as_json:
        typer.echo(json.dumps(lists, indent=1))
    else:
        for package, kernels in lists.items():
            typer.echo(f"{package}: {len(kernels)} kernels")
            typer.echo("\n".join(sorted(f"    {describe(each)}" for each in kernels.values())))
    raise typer.Exit(0 if lists else 3)
