# SPDX-License-Identifier: BSD-3-Clause
"""Command line: strix-validate TIER | run | list | report. See EXIT_STATUS."""

import json
from importlib.metadata import version
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated

import typer

from strix_validate import GPUS, TARGET, cluster, kernel_commands, tiers
from strix_validate.checks import Size
from strix_validate.models import command as models_command
from strix_validate.reporting import record
from strix_validate.runner import NoSuchCheck, select
from strix_validate.terminal import (
    DeviceName,
    DeviceOption,
    EvidenceOption,
    JsonOption,
    ModelOption,
    OnlyOption,
    PlotsOption,
    QuestionsOption,
    SeedOption,
    SizeOption,
    SkipOption,
    UrlOption,
    VllmOption,
    run_and_exit,
)

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


#: Options of the commands that run one tier, by the names of run_and_exit's parameters.
_OPTIONS = {
    "as_json": (JsonOption, False), "only": (OnlyOption, None), "skip": (SkipOption, None),
    "device": (DeviceOption, DeviceName.AUTO), "size": (SizeOption, Size.QUICK),
    "url": (UrlOption, ""), "model": (ModelOption, ""), "questions": (QuestionsOption, 0),
    "evidence": (EvidenceOption, None), "plots": (PlotsOption, None),
    "vllm": (VllmOption, None), "seed": (SeedOption, 0),
}  # fmt: skip


def _tier(name: str, options: str, words: str, size: Size = Size.QUICK) -> None:
    """Add the command that runs a tier with these options; size: by default.

    One without a device has the CPU, and serve, which only a GPU can, the GPU.
    """

    def run_tier(**given) -> None:
        given.setdefault("device", DeviceName.AUTO if name == "serve" else DeviceName.CPU)
        run_and_exit([name], **given)

    run_tier.__name__, run_tier.__doc__ = name, words
    parameters = [
        Parameter(
            each, Parameter.KEYWORD_ONLY, annotation=kind,
            default=size if each == "size" else default,
        )
        for each, (kind, default) in _OPTIONS.items()
        if each in f"as_json only skip {options}".split()
    ]  # fmt: skip
    run_tier.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    app.command()(run_tier)


_tier(
    "backend", "device",
    "Report which attention backends this torch has, and execute each one alone.",
)  # fmt: skip
_tier(
    "libraries", "device seed",
    """Check products, factors, gradients, convolutions, host memory and torch.compile on the GPU.

    On a CPU, this checks only the checks themselves.
    """,
)  # fmt: skip
_tier(
    "attention", "device size vllm seed",
    """Compare torch's SDPA backends, flash-attn and vLLM's kernels with attention in float64.

    Without a GPU, the kernels of flash-attn and vLLM run in Triton's interpreter.
    """,
)  # fmt: skip
_tier(
    "kernels", "vllm",
    "Compile the kernels of flash-attn and vLLM for gfx1151, without a GPU, and inspect them.",
)  # fmt: skip
_tier(
    "emulated", "vllm",
    """Execute gfx1151 code objects of flash-attn and vLLM under emulation; compare with float64.

    Needs libLLVM 22 or newer; without it, exits with status 3.
    """,
)  # fmt: skip
_tier(
    "bench", "device size plots vllm",
    "Time torch's backends, flash-attn and vLLM's attention, forward and backward.", Size.FULL,
)  # fmt: skip
_tier(
    "serve", "url model questions evidence plots",
    """Generate and serve with vLLM and a small random model, made on the spot.

    With --model: whether that server, or one started for that folder, agrees with itself, finds
    numbers in long prompts, and how fast it is.
    """,
)  # fmt: skip


@app.command()
def doctor(
    as_json: JsonOption = False,
    only: OnlyOption = None,
    skip: SkipOption = None,
    root: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Examine a machine whose /proc, /sys and /etc are here."),
    ] = Path("/"),
    model_gib: Annotated[
        float,
        typer.Option(min=0, help="Weights of a model in GiB: print vLLM's flags for it."),
    ] = 0,
) -> None:
    """Find out what keeps this machine from running on the GPU, with the command that fixes it.

    Needs no torch. The GPU is gfx1151, or what the variable gpu_arch names.
    """
    if not root.is_dir():
        raise typer.BadParameter(f"{root} is not a folder")
    run_and_exit(["doctor"], as_json, only, skip, root=root, weights=int(model_gib * 2**30))


@app.command(name="run")
def run_all(
    as_json: JsonOption = False,
    only: OnlyOption = None,
    skip: SkipOption = None,
    device: DeviceOption = DeviceName.AUTO,
    size: SizeOption = Size.FULL,
    tier: Annotated[
        list[str] | None, typer.Option(help=f"Any of {', '.join(tiers.TIERS)}. Default: all.")
    ] = None,
    evidence: EvidenceOption = None,
    vllm_source: VllmOption = None,
    url: UrlOption = "",
    model: ModelOption = "",
    questions: QuestionsOption = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="What ten minutes of a GPU say of this machine.")
    ] = False,
    seed: SeedOption = 0,
) -> None:
    """Run every tier and write a record of evidence.

    With --quick: the tiers that need this machine, at their quickest, and a table of its speeds.
    """
    unknown = [name for name in tier or [] if name not in tiers.TIERS]
    if unknown:
        raise typer.BadParameter(f"unknown tier {unknown[0]}; tiers: {', '.join(tiers.TIERS)}")
    if quick:
        tier, size = tier or list(tiers.QUICK), Size.QUICK
        skip = [*(skip or []), *(tiers.SLOW if "libraries" in tier else ())]
    run_and_exit(
        tier or list(tiers.TIERS), as_json, only, skip, device, size=size, evidence=evidence,
        vllm=vllm_source, url=url, model=model, questions=questions, seed=seed,
    )  # fmt: skip


app.command()(models_command.models)
app.add_typer(cluster.app, name="cluster")
app.command()(kernel_commands.warm)
app.command()(kernel_commands.compilations)


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
        kernel_commands.list_kernels(as_json)

    known, absent = {}, []
    for name in tiers.TIERS:
        try:
            known[name] = tiers.load(name).checks()
        except ModuleNotFoundError as error:
            absent.append(f"tier {name} is not listed: {error.name} is not installed")
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
