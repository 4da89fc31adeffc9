# SPDX-License-Identifier: BSD-3-Clause
"""Command line: strix-validate TIER | run | list | report.

Exit status: 0 all checks that ran passed, 1 a check failed, 2 wrong usage, 3 nothing could be
checked.
"""

import json
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from strix_validate import host, record, tiers
from strix_validate.checks import Options, Size, exit_code
from strix_validate.record import Record
from strix_validate.run import NoSuchCheck, run
from strix_validate.table import show

app = typer.Typer(
    help="Checks the attention of the installed PyTorch, flash-attn and vLLM, and the host.",
    epilog="Exit status: 0 passed, 1 a check failed, 2 wrong usage, 3 nothing could be checked.",
    no_args_is_help=True,
    add_completion=False,
)


class DeviceName(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


Json = Annotated[bool, typer.Option("--json", help="Write the record as JSON, and nothing else.")]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="ID", help="Run these only: an id, or what it starts with."),
]
Skip = Annotated[
    list[str] | None, typer.Option("--skip", metavar="ID", help="Leave these out, likewise.")
]
DeviceOption = Annotated[
    DeviceName, typer.Option(help="Where checks run. ROCm GPUs are called cuda, as in torch.")
]
SizeOption = Annotated[Size, typer.Option(help="How much: quick is made for a CPU.")]


@app.command()
def backend(
    as_json: Json = False,
    only: Only = None,
    skip: Skip = None,
    device: DeviceOption = DeviceName.AUTO,
) -> None:
    """Say which attention this torch has, and execute each backend alone."""
    _run(["backend"], as_json, only, skip, device)


@app.command()
def attention(
    as_json: Json = False,
    only: Only = None,
    skip: Skip = None,
    device: DeviceOption = DeviceName.AUTO,
    size: SizeOption = Size.QUICK,
) -> None:
    """Compare torch SDPA, each backend alone, and flash-attn with plain attention in float64.

    Without a GPU flash-attn's kernels run in Triton's interpreter.
    """
    _run(["attention"], as_json, only, skip, device, size)


@app.command()
def kernels(as_json: Json = False, only: Only = None, skip: Skip = None) -> None:
    """Compile flash-attn's kernels for gfx1151, without a GPU, and read the compiled files."""
    _run(["kernels"], as_json, only, skip, DeviceName.CPU)


@app.command()
def emulated(as_json: Json = False, only: Only = None, skip: Skip = None) -> None:
    """Execute flash-attn's gfx1151 code objects under emulation. Needs strix-emulate and LLVM."""
    _run(["emulated"], as_json, only, skip, DeviceName.CPU)


@app.command()
def bench(
    as_json: Json = False,
    only: Only = None,
    skip: Skip = None,
    device: DeviceOption = DeviceName.AUTO,
    size: SizeOption = Size.FULL,
    plots: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draw PNG and SVG files into this folder.")
    ] = None,
) -> None:
    """Time each backend forward and backward, with the operations counted right."""
    _run(["bench"], as_json, only, skip, device, size, plots=plots)


@app.command()
def serve(as_json: Json = False, only: Only = None, skip: Skip = None) -> None:
    """Let vLLM generate and serve, with a small random model made on the spot."""
    _run(["serve"], as_json, only, skip)


@app.command()
def doctor(
    as_json: Json = False,
    only: Only = None,
    skip: Skip = None,
    root: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Look at the /proc, /sys, /etc and the like in here."),
    ] = Path("/"),
) -> None:
    """Say what the host lacks to run on gfx1151, and the command that mends it. Needs no torch."""
    if not root.is_dir():
        raise typer.BadParameter(f"{root} is no folder")
    _run(["doctor"], as_json, only, skip, root=root)


@app.command(name="run")
def run_all(
    as_json: Json = False,
    only: Only = None,
    skip: Skip = None,
    device: DeviceOption = DeviceName.AUTO,
    size: SizeOption = Size.FULL,
    tier: Annotated[
        list[str] | None, typer.Option(help=f"Any of {', '.join(tiers.TIERS)}; all if not given.")
    ] = None,
    evidence: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the record into this folder.")
    ] = None,
) -> None:
    """Run every tier, for a record of evidence."""
    unknown = [name for name in tier or [] if name not in tiers.TIERS]
    if unknown:
        raise typer.BadParameter(f"no tier is called {unknown[0]}: {', '.join(tiers.TIERS)}")
    _run(tier or list(tiers.TIERS), as_json, only, skip, device, size, evidence=evidence)


@app.command(name="list")
def list_checks(as_json: Json = False, only: Only = None) -> None:
    """List every check and the bug that it would catch."""
    from strix_validate.run import select

    found, absent = [], []
    for name in tiers.TIERS:
        try:
            found += tiers.load(name).checks()
        except ModuleNotFoundError as error:
            absent.append(f"tier {name} is left out: {error.name} is not installed")
    try:
        found = select(found, only or [])
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
    records: Annotated[list[Path], typer.Argument(help="Records, as --json or run wrote them.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Make one page of HTML from records: opens from disk, needs no network."""
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
    evidence: Path | None = None,
    plots: Path | None = None,
) -> None:
    """Runs tiers, writes the record where it was asked for, and exits with its status."""
    console = Console(stderr=True, highlight=False)
    for folder in filter(None, (evidence, plots)):
        folder.mkdir(parents=True, exist_ok=True)  # before an hour of checks, not after
    try:
        where = "none" if names == ["doctor"] else host.device_for(device.value)
        options = Options(device=where, size=size, root=root)
        found = run(names, options, only or [], skip or [], say=lambda line: console.print(line))
    except NoSuchCheck as error:
        raise typer.BadParameter(str(error)) from error
    except ModuleNotFoundError as error:
        console.print(f"{escape(str(error))}: nothing could be checked")
        raise typer.Exit(3) from error
    if evidence:
        file = evidence / evidence_name(found)
        file.write_text(found.dump() + "\n")
        console.print(f"wrote {file}")
    if plots:
        from strix_validate.report.plots import write

        for file in write(found, plots):
            console.print(f"wrote {file}")
    if as_json:
        typer.echo(found.dump())
    else:
        show(found, Console())
    raise typer.Exit(exit_code(check.state for check in found.checks))


def evidence_name(found: Record) -> str:
    """DATE-ARCHITECTURE-SUBJECT.json"""
    arch = re.sub(r"[^\w]", "-", found.device.architecture.split(":")[0])
    return f"{found.created:%Y-%m-%d}-{arch}-{found.subject}.json"


def main() -> None:
    app()


if __name__ == "__main__":
    main()
