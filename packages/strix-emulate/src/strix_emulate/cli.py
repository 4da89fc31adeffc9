# SPDX-License-Identifier: BSD-3-Clause
"""Command line: strix-emulate run | stats | disassemble | device. See EXIT_STATUS."""

import json
import math
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
from strix_emulate.memory.findings import CHECKS, add_default_value, parse
from strix_emulate.native import library as native
from strix_emulate.run.options import Options
from strix_emulate.run.program import decode_kernel

EXIT_STATUS = (
    "Exit status: 0 done, 1 the kernel trapped, 2 bad input or usage, 3 no disassembler. If "
    "device starts a program, the exit status is the program's."
)
app = typer.Typer(
    epilog=EXIT_STATUS,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # The help of rich would show a flag as an option with a <bool> value.
    rich_markup_mode=None,
)
console = Console()


def _refuse_nan(value: float | None) -> float | None:
    """Return the value of an option. Before version 0.29, typer takes nan as within all bounds."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is not a number")
    return value


File = Annotated[
    Path,
    typer.Argument(
        help="Code object, offload bundle, AOTriton pack, zip archive, or Triton cache folder."
    ),
]
Cores = Annotated[
    int | None,
    typer.Option(min=1, help="Processor cores for the workgroups of a launch. Default: all."),
]
Seconds = Annotated[
    float | None,
    typer.Option(
        min=1,
        max=604800,
        callback=_refuse_nan,
        help="Seconds after which a launch counts as hung. Default: 1800.",
    ),
]
Off = Annotated[
    str,
    typer.Option(
        metavar="[CHECKS]",
        help=f"Turn off checks: {', '.join(CHECKS)}, separated by commas. Without names: all.",
    ),
]
Name = Annotated[str | None, typer.Option("--name", help="Select one of the file's kernels.")]


def _print_version(is_requested: bool) -> None:
    if not is_requested:
        return
    print(f"strix-emulate {version('strix-emulate')}")
    print(f"executes with {native.describe()}")
    raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version.",
    ),
]


@app.callback()
def main_options(version_: Version = False) -> None:
    """Execute AMD gfx1151 code objects on a CPU, with checks for races and missing waits.

    It also executes code objects of gfx1150, gfx1152, gfx1153 and gfx1100.
    """


@app.command()
def run(
    file: File,
    grid: Annotated[str, typer.Option(help="Workgroups, such as 4 or 4,2,1.")],
    arg: Annotated[
        list[str] | None,
        typer.Option(
            help="Each argument, in order: in=F.npy, inout=F.npy (overwritten), "
            "out=F.npy:TYPE:SHAPE (created), a number, or null."
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(help="Threads of a workgroup. Default: the kernel's maximum."),
    ] = None,
    lds: Annotated[int | None, typer.Option(help="Bytes of LDS to allocate at launch.")] = None,
    name: Name = None,
    no_checks: Off = "",
    cores: Cores = None,
) -> None:
    """Execute a kernel on .npy arrays. Print its instruction counts and memory traffic, as JSON."""
    kernel = _pick(file, name)
    try:
        size = tuple(int(x) for x in grid.split(","))
    except ValueError:
        raise EmulatorError(f"--grid {grid}: expected one to three integers") from None
    arrays: dict[Path, np.ndarray] = {}
    arguments = [_parse_argument(text, arrays) for text in arg or []]
    disabled_checks = parse(no_checks)
    options = Options(
        checks=disabled_checks != set(CHECKS),
        disabled_checks=disabled_checks,
        cores=cores or _all_cores(),
    )
    outcome = launch(
        kernel,
        size,
        arguments,
        threads=threads,
        lds=lds,
        options=options,
    )
    for path, array in arrays.items():
        # numpy.save adds .npy to a name without it, but not to an open file.
        with path.open("wb") as output:
            np.save(output, array)
    console.print_json(json.dumps(statistics.describe_launch(outcome)))


@app.command()
def stats(file: File, name: Name = None) -> None:
    """Print instructions by class, registers, LDS, spills and occupancy, as JSON."""
    kernels = [_pick(file, name)] if name else loader.load(file)
    facts = [statistics.describe_kernel(kernel, decode_kernel(kernel)) for kernel in kernels]
    console.print_json(json.dumps(facts))


@app.command()
def disassemble(file: File, name: Name = None) -> None:
    """Print a kernel's instructions with their addresses, as traps state them."""
    for ins in decode_kernel(_pick(file, name)):
        print(f"{ins.address:#8x}  {ins.text}")


@app.command(context_settings={"ignore_unknown_options": True})
def device(  # noqa: PLR0913 (a command's options)
    command: Annotated[list[str], typer.Argument(help="The program and its arguments, after --.")],
    no_checks: Off = "",
    memory: Annotated[
        float | None,
        typer.Option(help="GiB of device memory. Default: 8, but at most half of the host's."),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Wave-instructions before a launch counts as hung. Default: {Options.budget:,}.",
        ),
    ] = None,
    seconds: Seconds = None,
    devices: Annotated[
        int,
        typer.Option(
            min=1,
            max=16,
            help="Number of devices that the program sees. The devices share one memory.",
        ),
    ] = 1,
    target: Annotated[
        str,
        typer.Option(help=f"The GPU to emulate: {', '.join(TARGETS)}."),
    ] = DEFAULT.name,
    cores: Cores = None,
    log: Annotated[bool, typer.Option(help="Print a line for each launch.")] = False,
    strict: Annotated[
        bool,
        typer.Option(help="Let every finding end a launch. By default, some are only printed."),
    ] = False,
) -> None:
    """Run a program that uses HIP. The emulator executes its kernels."""
    options = launcher.DeviceOptions(
        disabled_checks=parse(no_checks),
        memory=_convert_memory(memory),
        budget=budget,
        seconds=seconds,
        cores=cores or _all_cores(),
        log=log,
        strict=strict,
        devices=devices,
        target=target,
    )
    launcher.execute(command, options)


def _convert_memory(gib: float | None) -> int | None:
    """Return the value of --memory in bytes.

    Raises:
        EmulatorError: The value is out of range.
    """
    if gib is None:
        return None
    if not 0.01 <= gib <= 4096:
        raise EmulatorError(f"--memory {gib}: expected 0.01 to 4096 GiB")
    return int(gib * 2**30)


def _all_cores() -> int:
    """Return the number of cores that this process may use, or 1 if the system cannot tell."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return 1


def _pick(file: Path, name: str | None) -> Kernel:
    kernels = loader.load(file)
    matching = [kernel for kernel in kernels if name in (None, kernel.name)]
    if len(matching) != 1:
        listed = ", ".join(sorted({kernel.name for kernel in kernels})[:10])
        raise EmulatorError(
            f"{file}: {len(matching)} kernels match; select one with --name, such as: {listed}"
        )
    return matching[0]


def _parse_argument(text: str, arrays: dict[Path, np.ndarray]) -> Buffer | int | float | None:
    """Return the kernel argument that the value of one --arg option describes.

    Args:
        text: Value of the option.
        arrays: Arrays to save after the launch, by file. An out or inout array is added here.

    Raises:
        EmulatorError: The value cannot be parsed, or its file cannot be read or created.
    """
    if text == "null":
        return None
    mode, equals, value = text.partition("=")
    try:
        if not equals:
            return _parse_number(text)
        path, array = _read_array(mode, value)
    except Exception as error:  # For damaged files, numpy raises many types of exceptions.
        raise EmulatorError(f"--arg {text}: {error!s:.200}") from error
    if mode != "in":
        arrays[path] = array
    return Buffer(array, mode)


def _parse_number(text: str) -> int | float:
    """Parse a number. It is a float if it has a point or an exponent, or is inf or nan."""
    lower = text.lower()
    if not lower.lstrip("+-").startswith("0x") and set(lower) & set(".en"):
        return float(text)
    return int(text, 0)


def _read_array(mode: str, value: str) -> tuple[Path, np.ndarray]:
    """Read or create the array of an --arg option. Return its file and the array."""
    if mode == "out":
        name, dtype, shape = value.rsplit(":", 2)
        path = Path(name)
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError("the file cannot be created: no such folder, or the path is a folder")
        array = np.zeros([int(x) for x in shape.split("x")], dtype)
    elif mode in ("in", "inout"):
        path = Path(value)
        if not path.is_file():
            raise ValueError("no such regular file")
        limits.require_modest_array(path)
        array = np.load(value, allow_pickle=False)
    else:
        raise ValueError(f"unknown mode {mode}; use in, inout or out")
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        raise ValueError("the file is not one array of numbers, as numpy.save writes it")
    return path, array


def main() -> None:
    """Run the command line; turn expected errors into one message and an exit status."""
    sys.argv[1:] = add_default_value(sys.argv[1:])
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
