# SPDX-License-Identifier: BSD-3-Clause
"""Command line: strix-validate TIER | run | list | report. See EXIT_STATUS."""

import json
import re
import sys
from collections.abc import Callable
from enum import StrEnum
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from strix_validate import host, record, tiers
from strix_validate.checks import CannotRun, Options, Size, exit_code
from strix_validate.record import Record
from strix_validate.run import NoSuchCheck, refuse_misspelt, run
from strix_validate.table import show

EXIT_STATUS = (
    "Exit status: 0 every check that ran passed, 1 a check failed, 2 usage error, 3 nothing could "
    "be checked, 130 interrupted."
)
#: A record has megabytes, and a killed run loses no more than this.
SECONDS_BETWEEN_WRITES = 5.0
app = typer.Typer(
    help="Validate the attention of the installed PyTorch, flash-attn and vLLM, and the host.",
    epilog=EXIT_STATUS,
    no_args_is_help=True,
    add_completion=False,
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
    pass


class DeviceName(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


Json = Annotated[bool, typer.Option("--json", help="Write only the record, as JSON.")]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="ID",
        help="Run only these checks: a tier, an id, its prefix or a pattern, such as libraries, "
        "sdpa/flash or 'kernels/vllm-*'. Repeatable.",
    ),
]
Skip = Annotated[
    list[str] | None,
    typer.Option("--skip", metavar="ID", help="Skip these checks, named likewise."),
]
DeviceOption = Annotated[
    DeviceName, typer.Option(help="Where checks run. As in torch, cuda includes ROCm GPUs.")
]
VllmOption = Annotated[
    Path | None,
    typer.Option(
        "--vllm-source",
        metavar="DIR",
        help="Take vLLM's kernels from this source folder, not from the installed vLLM.",
    ),
]
SizeOption = Annotated[Size, typer.Option(help="How much to check; quick suits a CPU.")]


@app.command()
def backend(
    as_json: Json = False,
    only: Only = None,
    skip: Skip = None,
    device: DeviceOption = DeviceName.AUTO,
) -> None:
    """Report which attention backends this torch has, and execute each one alone."""
    _run(["backend"], as_json, only, skip, device)


@app.command()
def libraries(
    as_json: Json = False,
    only: Only = None,
    skip: Skip = None,
    device: DeviceOption = DeviceName.AUTO,
) -> None:
    """Check matrix products, convolutions, host memory and torch.compile on the GPU.

    On a CPU, this checks only the checks themselves.
    """
    _run(["libraries"], as_json, only, skip, device)


@app.command()
def attention(
    as_json: Json = False,
    only: Only = None,
    skip: Skip = None,
    device: DeviceOption = DeviceName.AUTO,
    size: SizeOption = Size.QUICK,
    vllm_source: VllmOption = None,
) -> None:
    """Compare torch's SDPA backends, flash-attn and vLLM's kernels with attention in float64.

    Without a GPU, the kernels of flash-attn and vLLM run in Triton's interpreter.
    """
    _run(["attention"], as_json, only, skip, device, size, vllm=vllm_source)


@app.command()
def kernels(
    as_json: Json = False, only: Only = None, skip: Skip = None, vllm_source: VllmOption = None
) -> None:
    """Compile the kernels of flash-attn and vLLM for gfx1151, without a GPU, and inspect them."""
    _run(["kernels"], as_json, only, skip, DeviceName.CPU, vllm=vllm_source)


@app.command()
def emulated(
    as_json: Json = False, only: Only = None, skip: Skip = None, vllm_source: VllmOption = None
) -> None:
    """Execute gfx1151 code objects of flash-attn and vLLM under emulation; compare with float64.

    Needs libLLVM 22 or newer; without it, exits with status 3.
    """
    _run(["emulated"], as_json, only, skip, DeviceName.CPU, vllm=vllm_source)


@app.command()
def bench(
    as_json: Json = False,
    only: Only = None,
    skip: Skip = None,
    device: DeviceOption = DeviceName.AUTO,
    size: SizeOption = Size.FULL,
    plots: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Draw plots into this folder, as PNG and SVG; needs matplotlib."
        ),
    ] = None,
    vllm_source: VllmOption = None,
) -> None:
    """Time torch's backends, flash-attn and vLLM's attention, forward and backward."""
    _run(["bench"], as_json, only, skip, device, size, plots=plots, vllm=vllm_source)


@app.command()
def serve(
    as_json: Json = False,
    only: Only = None,
    skip: Skip = None,
    url: Annotated[
        str,
        typer.Option(metavar="URL", help="Look at this server of vLLM instead; needs no torch."),
    ] = "",
    model: Annotated[
        str, typer.Option(metavar="NAME", help="What the server at --url calls its model.")
    ] = "",
    evidence: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the record to this folder.")
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Draw plots into this folder, as PNG and SVG; needs matplotlib."
        ),
    ] = None,
) -> None:
    """Generate and serve with vLLM and a small random model, made on the spot.

    With --url and --model: whether that server agrees with itself, and how fast it is.
    """
    if bool(url) is not bool(model):
        raise typer.BadParameter("--url and --model belong together")
    device = DeviceName.CPU if url else DeviceName.AUTO
    more = {"url": url, "model": model, "evidence": evidence, "plots": plots}
    _run(["serve"], as_json, only, skip, device, **more)


@app.command()
def doctor(
    as_json: Json = False,
    only: Only = None,
    skip: Skip = None,
    root: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Examine the host whose /proc, /sys and /etc are here."),
    ] = Path("/"),
    model_gib: Annotated[
        float,
        typer.Option(min=0, help="Weights of a model in GiB: print vLLM's flags for it."),
    ] = 0,
) -> None:
    """Find out what keeps this host from running on gfx1151, with the command that fixes it.

    Needs no torch.
    """
    if not root.is_dir():
        raise typer.BadParameter(f"{root} is not a folder")
    _run(["doctor"], as_json, only, skip, root=root, weights=int(model_gib * 2**30))


@app.command(name="run")
def run_all(
    as_json: Json = False,
    only: Only = None,
    skip: Skip = None,
    device: DeviceOption = DeviceName.AUTO,
    size: SizeOption = Size.FULL,
    tier: Annotated[
        list[str] | None, typer.Option(help=f"Any of {', '.join(tiers.TIERS)}. Default: all.")
    ] = None,
    evidence: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the record to this folder.")
    ] = None,
    vllm_source: VllmOption = None,
) -> None:
    """Run every tier and write a record of evidence."""
    unknown = [name for name in tier or [] if name not in tiers.TIERS]
    if unknown:
        raise typer.BadParameter(f"unknown tier {unknown[0]}; tiers: {', '.join(tiers.TIERS)}")
    _run(
        tier or list(tiers.TIERS),
        as_json,
        only,
        skip,
        device,
        size,
        evidence=evidence,
        vllm=vllm_source,
    )


@app.command()
def warm(
    model: Annotated[
        Path | None,
        typer.Option(metavar="CONFIG.json", help="Compile what this model needs, not common ones."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default: the cores.")] = None,
    vllm_source: VllmOption = None,
) -> None:
    """Compile the attention kernels that no package brought, before the first request.

    Fills Triton's cache of this user for gfx1151, and needs no GPU.
    """
    console = Console(stderr=True, highlight=False)
    try:
        from strix_validate.warm import NoModel, calls, fill

        try:
            wanted = calls(model, vllm_source)
        except (NoModel, ValueError) as error:
            raise typer.BadParameter(str(error)) from error
        failed = fill(wanted, jobs, console)
    except (CannotRun, ModuleNotFoundError) as reason:
        console.print(f"{escape(str(reason))}: nothing to compile")
        raise typer.Exit(3) from reason
    raise typer.Exit(int(failed))


@app.command()
def compilations(
    as_json: Json = False,
    only: Only = None,
    most: Annotated[
        int | None, typer.Option(min=0, help="Fail if more kernels than this are compiled.")
    ] = None,
    vllm_source: VllmOption = None,
) -> None:
    """Count what calls of 40 lengths compile when the user's cache is empty. Needs no GPU."""
    console = Console(stderr=True, highlight=False)
    try:
        from strix_validate.warm import count

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


@app.command(name="list")
def list_checks(
    as_json: Json = False,
    only: Only = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="List the kernels that packages brought instead.")
    ] = False,
) -> None:
    """List every check with the bug that it would catch."""
    from strix_validate.run import select

    if kernels:
        from strix_validate.kernel_lists import describe, installed

        lists = installed(Path(sys.base_prefix))
        if as_json:
            typer.echo(json.dumps(lists, indent=1))
        else:
            for package, brought in lists.items():
                typer.echo(f"{package}: {len(brought)} kernels")
                typer.echo("\n".join(sorted(f"    {describe(each)}" for each in brought.values())))
        raise typer.Exit(0 if lists else 3)

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
            typer.echo(f"{check.id}\n    {check.title}\n    catches: {check.why}")
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
    from strix_validate.report import render

    try:
        loaded = [record.load(file) for file in records]
    except record.BadRecord as error:
        raise typer.BadParameter(str(error)) from error
    output.write_text(render(loaded, [file.stem for file in records]))
    typer.echo(f"wrote {output}", err=True)


def _run(
    names: list[str],
    as_json: bool,
    only: list[str] | None,
    skip: list[str] | None,
    device: DeviceName = DeviceName.AUTO,
    size: Size = Size.QUICK,
    root: Path = Path("/"),
    weights: int = 0,
    evidence: Path | None = None,
    plots: Path | None = None,
    vllm: Path | None = None,
    url: str = "",
    model: str = "",
) -> None:
    """Runs tiers, writes the record where requested, and exits with its status."""
    console = Console(stderr=True, highlight=False)
    if plots and not find_spec("matplotlib"):
        raise typer.BadParameter("--plots needs matplotlib: pixi add matplotlib-base")
    for folder in filter(None, (evidence, plots)):
        folder.mkdir(parents=True, exist_ok=True)  # now, not after an hour of checks
    try:
        refuse_misspelt(names, [*(only or []), *(skip or [])])
        where = "none" if names == ["doctor"] or url else host.device_for(device.value)
        options = Options(where, size, root, weights, vllm, url, model)
        with _progress(console) as bar:
            keep = _keep(bar, evidence)
            found = run(names, options, only or [], skip or [], bar.console.print, keep)
    except NoSuchCheck as error:
        raise typer.BadParameter(str(error)) from error
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0].replace("_", "-")
        fix = f"pixi add {'pytorch' if name == 'torch' else name}"
        console.print(f"{escape(str(error))}: nothing could be checked; {fix}")
        raise typer.Exit(3) from error
    if evidence:
        file = evidence / evidence_name(found)
        found.write(file)
        console.print(f"wrote {file}")
    if plots:
        from strix_validate.report.plots import write

        for file in write(found, plots):
            console.print(f"wrote {file}")
    if as_json:
        typer.echo(found.dump())
    else:
        show(found, Console())
    if found.unfinished:
        raise typer.Exit(130)
    raise typer.Exit(exit_code(check.state for check in found.checks))


def _progress(console: Console) -> Progress:
    """How many checks are done; nothing where nobody looks."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    )  # fmt: skip


def _keep(bar: Progress, evidence: Path | None) -> Callable[[Record], None]:
    """Shows how far the run is, and writes the record as it grows, every few seconds at most."""
    task, written = bar.add_task("checks", total=None), monotonic()

    def keep(found: Record) -> None:
        nonlocal written
        done = len(found.checks)
        last = found.checks[-1].id if done else "checks"
        bar.update(task, description=last, completed=done, total=done + found.unfinished)
        if evidence and (not done or monotonic() - written > SECONDS_BETWEEN_WRITES):
            found.write(evidence / evidence_name(found))
            written = monotonic()

    return keep


def evidence_name(found: Record) -> str:
    """DATE-ARCHITECTURE-SUBJECT.json"""
    arch = re.sub(r"[^\w]", "-", found.device.architecture.split(":")[0])
    return f"{found.created:%Y-%m-%d}-{arch}-{found.subject}.json"


def main() -> None:
    app()


if __name__ == "__main__":
    main()
