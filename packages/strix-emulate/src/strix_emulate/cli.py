# SPDX-License-Identifier: BSD-3-Clause
"""Command line: strix-emulate run | stats | disassemble | device. See EXIT_STATUS."""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from strix_emulate import statistics
from strix_emulate.code import limits, loader
from strix_emulate.code.kernel import Kernel
from strix_emulate.code.target import DEFAULT, TARGETS
from strix_emulate.device import launcher
from strix_emulate.errors import DisassemblerError, EmulatorError, Trap
from strix_emulate.launches import Buffer, launch
from strix_emulate.memory.findings import CHECKS, parse, with_value
from strix_emulate.native import library as native
from strix_emulate.run.machine import Options
from strix_emulate.run.program import decode_kernel

EXIT_STATUS = "Exit status: 0 done, 1 the kernel trapped, 2 bad input or usage, 3 no disassembler."
app = typer.Typer(
    epilog=EXIT_STATUS,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's help gives a flag the type <bool>
)
console = Console()
File = Annotated[
    Path, typer.Argument(help="Code object, AOTriton pack, zip archive, or Triton cache folder.")
]
Cores = Annotated[
    int | None, typer.Option(min=1, help="For the workgroups of a launch. Default: all.")
]
Off = Annotated[
    str,
    typer.Option(
        metavar="[CHECKS]",
        help=f"Leave out {', '.join(CHECKS)} (some of them, with commas between); alone, all.",
    ),
]
Name = Annotated[str | None, typer.Option("--name", help="Select one of the file's kernels.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"strix-emulate {version('strix-emulate')}")
        print(f"executes with {native.describe()}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
]


@app.callback()
def main_options(version_: Version = False) -> None:
    """Execute AMD gfx1151 code objects on a CPU, with checks for races and missing waits.

    Those of gfx1150, gfx1152, gfx1153 and gfx1100 as well.
    """


@app.command()
def run(
    file: File,
    grid: Annotated[str, typer.Option(help="Workgroups, such as 4 or 4,2,1.")],
    arg: Annotated[
        list[str] | None,
        typer.Option(
            help="Each argument, in order: in=F.npy, inout=F.npy (changed), out=F.npy:TYPE:SHAPE "
            "(created), a number, or null."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Per workgroup. Default: the kernel's maximum.")
    ] = None,
    lds: Annotated[int | None, typer.Option(help="Bytes of LDS to allocate at launch.")] = None,
    name: Name = None,
    no_checks: Off = "",
    cores: Cores = None,
) -> None:
    """Execute a kernel on .npy arrays and print what it executed, as JSON."""
    kernel = _pick(file, name)
    try:
        size = tuple(int(x) for x in grid.split(","))
    except ValueError:
        raise EmulatorError(f"--grid {grid}: expected one to three integers") from None
    arrays: dict[Path, np.ndarray] = {}
    arguments = [_argument(text, arrays) for text in arg or []]
    off = parse(no_checks)
    options = Options(checks=off != set(CHECKS), off=off, cores=cores or _all_cores())
    done = launch(kernel, size, arguments, threads=threads, lds=lds, options=options)
    for path, array in arrays.items():
        np.save(path, array)
    console.print_json(json.dumps(statistics.executed(done)))


@app.command()
def stats(file: File, name: Name = None) -> None:
    """Print instructions by class, registers, LDS, spills and occupancy, as JSON."""
    kernels = [_pick(file, name)] if name else loader.load(file)
    facts = [statistics.describe_kernel(kernel, decode_kernel(kernel)) for kernel in kernels]
    console.print_json(json.dumps(facts))


@app.command()
def disassemble(file: File, name: Name = None) -> None:
    """Print a kernel's instructions with their addresses, those that traps name."""
    for ins in decode_kernel(_pick(file, name)):
        print(f"{ins.address:#8x}  {ins.text}")


@app.command(context_settings={"ignore_unknown_options": True})
def device(  # noqa: PLR0913 (a command's options)
    command: Annotated[list[str], typer.Argument(help="The program and its arguments, after --.")],
    no_checks: Off = "",
    memory: Annotated[
        float | None,
        typer.Option(help="GiB of device memory. Default: 8, or half of this machine's."),
    ] = None,
    budget: Annotated[
        int | None, typer.Option(help="Wave-instructions before a launch counts as hung.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Seconds before a launch counts as hung. Default: 1800.")
    ] = None,
    devices: Annotated[
        int, typer.Option(min=1, max=16, help="Devices that the program sees, with one memory.")
    ] = 1,
    target: Annotated[
        str,
        typer.Option(help=f"The GPU that the device is: {', '.join(TARGETS)}."),
    ] = DEFAULT.name,
    cores: Cores = None,
    log: Annotated[bool, typer.Option(help="Print a line for each launch.")] = False,
    strict: Annotated[
        bool,
        typer.Option(help="What checks find in ROCm's and torch's libraries ends a launch too."),
    ] = False,
) -> None:
    """Run a program that uses HIP; its launches are executed by the emulator."""
    size = None if memory is None else int(memory * 2**30)
    launcher.execute(
        command, off=parse(no_checks), memory=size, budget=budget, cores=cores or _all_cores(),
        log=log, strict=strict, devices=devices, seconds=seconds, target=target,
    )  # fmt: skip


def _all_cores() -> int:
    """Count the cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return 1


def _pick(file: Path, name: str | None) -> Kernel:
    kernels = loader.load(file)
    found = [kernel for kernel in kernels if name in (None, kernel.name)]
    if len(found) != 1:
        listed = ", ".join(sorted({kernel.name for kernel in kernels})[:10])
        raise EmulatorError(f"{file}: {len(found)} kernels match; select one with --name: {listed}")
    return found[0]


def _argument(text: str, arrays: dict[Path, np.ndarray]) -> Buffer | int | float | None:
    if text == "null":
        return None
    mode, equals, rest = text.partition("=")
    try:
        if not equals:
            return int(text, 0) if "." not in text else float(text)
        if mode == "out":
            path, kind, shape = rest.rsplit(":", 2)
            array = np.zeros([int(x) for x in shape.split("x")], kind)
        elif mode in ("in", "inout"):
            if not Path(rest).is_file():
                raise ValueError("there is no such regular file")
            limits.require_modest_array(Path(rest))
            path, array = rest, np.load(rest, allow_pickle=False)
        else:
            raise ValueError(f"unknown mode {mode}; use in, inout or out")
        if not isinstance(array, np.ndarray) or array.dtype.hasobject:
            raise ValueError("it is not one array of numbers, as numpy.save writes it")
    except Exception as error:  # numpy raises a dozen kinds for damaged files
        raise EmulatorError(f"--arg {text}: {error!s:.200}") from error
    if mode != "in":
        arrays[Path(path)] = array
    return Buffer(array, mode)


def main() -> None:
    """Run the command line; turn expected errors into one message and an exit status."""
    sys.argv[1:] = with_value(sys.argv[1:])
    try:
        app()
    except DisassemblerError as error:
        print(f"strix-emulate: {error}", file=sys.stderr)
        sys.exit(3)
    except Trap as trap:
        print(f"strix-emulate: trap in {trap}", file=sys.stderr)
        sys.exit(1)
    except EmulatorError as error:
        print(f"strix-emulate: {error}", file=sys.stderr)
        sys.exit(2)
