# SPDX-License-Identifier: BSD-3-Clause
"""Command line: strix-validate TIER | run | list | report. See EXIT_STATUS."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from strix_validate import GPUS, TARGET, tiers
from strix_validate.checks import CannotRun, Size
from strix_validate.doctor import findings
from strix_validate.doctor.kernel_lists import describe, installed
from strix_validate.models import command as models_command
from strix_validate.reporting import record
from strix_validate.runner import NoSuchCheck, select
from strix_validate.soak import command as soak_command
from strix_validate.soak.verdicts import CHECKS as SOAK_CHECKS
from strix_validate.terminal import (
    OPTIONS,
    DeviceName,
    JsonOption,
    OnlyOption,
    VllmOption,
    run_and_exit,
)
from strix_validate.tuning import command as tune_command

EXIT_STATUS = (
    "Exit status: 0 every check that ran passed, 1 a check failed, 2 usage error, 3 nothing could "
    "be checked, 130 interrupted."
)
app = typer.Typer(
    epilog=EXIT_STATUS,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich's help gives a flag the type <bool>
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"strix-validate {version('strix-validate')}")
        raise typer.Exit


@app.callback()
def main_options(
    version_: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Validate the attention of the installed PyTorch, flash-attn and vLLM, and the machine."""
    if TARGET not in GPUS:
        raise typer.BadParameter(f"the variable gpu_arch is {TARGET!a:.40}, not {', '.join(GPUS)}")


def _command(
    name: str, options: str, words: str, size: Size = Size.QUICK, run: Callable | None = None
) -> None:
    """Add a command that runs checks with these options; size: by default.

    run: instead of the tier of that name. One without a device has the CPU, and serve, which only a
    GPU can, the GPU.
    """

    def run_checks(**given) -> None:
        if run:
            return run(**given)
        given.setdefault("device", DeviceName.AUTO if name == "serve" else DeviceName.CPU)
        return run_and_exit([name], **given)

    run_checks.__doc__ = words
    parameters = [
        Parameter(
            each, Parameter.KEYWORD_ONLY, annotation=kind,
            default=size if each == "size" else default,
        )
        for each, (kind, default) in OPTIONS.items()
        if each in f"as_json only skip {options}".split()
    ]  # fmt: skip
    run_checks.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    app.command(name)(run_checks)


def _doctor(root: Path, model_gib: float, **given) -> None:
    if not root.is_dir():
        raise typer.BadParameter(f"{root} is not a folder")
    weights = int(model_gib * 2**30)
    run_and_exit(["doctor"], root=root, weights=weights, dump=findings.dump, **given)


def _run(tier: list[str] | None, skip: list[str] | None, quick: bool, size: Size, **given) -> None:
    unknown = [name for name in tier or [] if name not in tiers.TIERS]
    if unknown:
        raise typer.BadParameter(f"unknown tier {unknown[0]}; tiers: {', '.join(tiers.TIERS)}")
    if quick:
        tier, size = tier or list(tiers.QUICK), Size.QUICK
        skip = [*(skip or []), *(tiers.SLOW if "libraries" in tier else ())]
    run_and_exit(tier or list(tiers.TIERS), skip=skip, size=size, **given)


_command(
    "backend", "device",
    "Report which attention backends this torch has, and execute each one alone.",
)  # fmt: skip
_command(
    "libraries", "device seed",
    """Check products, factors, gradients, convolutions, host memory and torch.compile on the GPU.

    On a CPU, this checks only the checks themselves.
    """,
)  # fmt: skip
_command(
    "attention", "device size vllm seed",
    """Compare torch's SDPA backends, flash-attn and vLLM's kernels with attention in float64.

    Without a GPU, the kernels of flash-attn and vLLM run in Triton's interpreter.
    """,
)  # fmt: skip
_command(
    "kernels", "vllm",
    "Compile the kernels of flash-attn and vLLM for gfx1151, without a GPU, and inspect them.",
)  # fmt: skip
_command(
    "emulated", "vllm",
    """Execute gfx1151 code objects of flash-attn and vLLM under emulation; compare with float64.

    Needs libLLVM 22 or newer; without it, exits with status 3.
    """,
)  # fmt: skip
_command(
    "bench", "device size plots vllm",
    "Time torch's backends, flash-attn and vLLM's attention, forward and backward.", Size.FULL,
)  # fmt: skip
_command(
    "serve", "url model plain_url questions evidence plots",
    """Generate and serve with vLLM and a small random model, made on the spot.

    With --model: whether that server, or one started for that folder, agrees with itself, applies
    templates, tools and sampling parameters, is right up to the end of its context, and how fast it
    is. It prints first how many tokens that takes.
    """,
)  # fmt: skip
_command(
    "doctor", "root model_gib",
    """Find out what keeps this machine from running on the GPU, with the command that fixes it.

    Needs no torch. The GPU is gfx1151, or what the variable gpu_arch names.
    """, run=_doctor,
)  # fmt: skip
_command(
    "run", "device size tier evidence vllm url model plain_url questions quick seed",
    """Run every tier and write a record of evidence.

    With --quick: the tiers that need this machine, at their quickest, and a table of its speeds.
    """, Size.FULL, _run,
)  # fmt: skip
app.command()(models_command.models)
app.command()(soak_command.soak)
app.command()(tune_command.tune)


@contextlib.contextmanager
def _unless_missing(what: str) -> Iterator[Console]:
    """End a command with status 3 where a library is not installed, or has nothing for it."""
    console = Console(stderr=True, highlight=False)
    try:
        yield console
    except (CannotRun, ModuleNotFoundError) as reason:
        console.print(f"{escape(str(reason))}: nothing to {what}")
        raise typer.Exit(3) from reason


@app.command()
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
    with _unless_missing("compile") as console:
        from strix_validate.precompiled.warm import calls, fill, foretell

        try:
            wanted = calls(model, vllm_source)
            if model and "vLLM" in wanted:
                console.print(foretell(model, vllm_source, jobs))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        failed = fill(wanted, jobs, console)
    raise typer.Exit(int(failed))


@app.command()
def compilations(
    as_json: JsonOption = False,
    only: OnlyOption = None,
    most: Annotated[
        int | None, typer.Option(min=0, help="Fail if more kernels than this are compiled.")
    ] = None,
    vllm_source: VllmOption = None,
) -> None:
    """Count what calls of 40 lengths compile when the user's cache is empty. Needs no GPU."""
    with _unless_missing("count") as console:
        from strix_validate.precompiled.workload import count

        found = count(Path(sys.base_prefix), only or [], vllm_source, console.print)
    total = sum(origins["compiled"] for origins in found.values())
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        for group, origins in found.items():
            typer.echo(f"{origins['compiled']:5} compiled {origins['packages']:5} shipped  {group}")
        typer.echo(f"{total:5} compiled")
    raise typer.Exit(int(most is not None and total > most))


def _list_kernels(as_json: bool) -> None:
    """List the kernels that packages installed into this environment."""
    lists = installed(Path(sys.base_prefix))
    if as_json:
        typer.echo(json.dumps(lists, indent=1))
    else:
        for package, kernels in lists.items():
            typer.echo(f"{package}: {len(kernels)} kernels")
            typer.echo("\n".join(sorted(f"    {describe(each)}" for each in kernels.values())))
    raise typer.Exit(0 if lists else 3)


@app.command(name="list")
def list_checks(
    as_json: JsonOption = False,
    only: OnlyOption = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="List the kernels that packages installed instead.")
    ] = False,
) -> None:
    """List every check with the bug that it would catch."""
    if kernels:
        _list_kernels(as_json)

    known, absent = {}, []
    for name in tiers.TIERS:
        try:
            known[name] = tiers.load(name).checks()
        except ModuleNotFoundError as error:
            absent.append(f"tier {name} is not listed: {error.name} is not installed")
    known["soak"] = SOAK_CHECKS
    try:
        found = [check for checks in select(known, only or []).values() for check in checks]
    except NoSuchCheck as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        typer.echo(json.dumps([vars(check) for check in found], indent=1))
    else:
        for check in found:
            told = check.why.startswith(check.title)  # the first sentence of the same text
            catches = check.why if told else f"{check.title}\n    catches: {check.why}"
            typer.echo(f"{check.id}\n    {catches}")
    for line in absent:
        typer.echo(line, err=True)


@app.command()
def report(
    records: Annotated[list[Path], typer.Argument(help="Records that --json or run wrote.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Write the page to this file.")
    ] = Path("report.html"),
) -> None:
    """Make one self-contained HTML page from records."""
    from strix_validate.reporting.page import render

    try:
        page = render([record.load(file) for file in records], [file.stem for file in records])
    except record.BadRecord as error:
        raise typer.BadParameter(str(error)) from error
    except Exception as error:  # the schema leaves open what a check measures
        says = f"measured values that no check writes ({error!r:.200})"
        raise typer.BadParameter(f"{', '.join(map(str, records))}: {says}") from error
    output.write_text(page, errors="backslashreplace")
    typer.echo(f"wrote {output}", err=True)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
