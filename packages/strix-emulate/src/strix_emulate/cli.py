# SPDX-License-Identifier: BSD-3-Clause
"""Command line: strix-emulate run, stats, attention, selftest.

Exit codes: 0 all is well, 1 a kernel or a check failed, 2 bad input, 3 nothing could be checked.
"""

import contextlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from strix_emulate import attention, llvm, loader, selftest, statistics
from strix_emulate.api import Buffer, launch
from strix_emulate.errors import DisassemblerError, EmulatorError, Trap
from strix_emulate.machine import Options
from strix_emulate.program import decode_kernel, supported

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
console = Console()
File = Annotated[
    Path, typer.Argument(help="code object, AOTriton pack, zip, or Triton cache folder")
]
Json = Annotated[bool, typer.Option("--json", help="machine-readable")]
Name = Annotated[str | None, typer.Option("--name", help="which kernel of the file")]


@app.command()
def run(
    file: File,
    grid: Annotated[str, typer.Option(help="workgroups, such as 4 or 4,2,1")],
    arg: Annotated[list[str] | None, typer.Option(help="one for each argument, in order: in=F.npy, "
        "inout=F.npy (changed), out=F.npy:TYPE:SHAPE (made), a number, or null")] = None,
    threads: Annotated[int | None, typer.Option(help="per workgroup; else the file's most")] = None,
    lds: Annotated[int | None, typer.Option(help="bytes of LDS asked for at launch")] = None,
    name: Name = None,
    checks: Annotated[bool, typer.Option(help="races, missing waits, unwritten memory")] = True,
) -> None:  # fmt: skip
    """Execute a kernel; arrays are .npy files."""
    kernel = _pick(file, name)
    try:
        size = tuple(int(x) for x in grid.split(","))
    except ValueError:
        raise EmulatorError(f"--grid {grid}: not one to three whole numbers") from None
    arrays: dict[Path, np.ndarray] = {}
    arguments = [_argument(text, arrays) for text in arg or []]
    done = launch(kernel, size, arguments, threads=threads, lds=lds, options=Options(checks=checks))
    for path, array in arrays.items():
        np.save(path, array)
    console.print_json(json.dumps(statistics.executed(done)))


@app.command()
def stats(file: File, name: Name = None) -> None:
    """What kernels are made of: instructions by class, registers, LDS, spills, occupancy (JSON)."""
    kernels = [_pick(file, name)] if name else loader.load(file)
    facts = [statistics.describe(kernel, decode_kernel(kernel)) for kernel in kernels]
    console.print_json(json.dumps(facts))


@app.command("attention")
def run_attention(
    only: Annotated[
        str, typer.Option(help="cases whose name contains one of these, by comma")
    ] = "",
    json_: Json = False,
) -> None:
    """flash-attn's functions with every kernel executed under emulation, against float64."""
    if not sys.flags.optimize:
        # aiter asserts that tensors lie on a GPU
        os.execv(sys.executable, [sys.executable, "-O", "-m", "strix_emulate", *sys.argv[1:]])
    words = only.split(",") if only else [""]
    wanted = [case for case in attention.cases() if any(word in case.name for word in words)]
    if not wanted:
        raise EmulatorError(
            f"--only {only}: no such case; there are {', '.join(c.name for c in attention.cases())}"
        )
    table = Table("case", "tensor: error / bound", "kernels", "wave-instr.", "CPU s", "")
    results = []
    # libraries print; the report has stdout for itself
    with contextlib.redirect_stdout(sys.stderr):
        results += attention.run(wanted)
    for result in results:
        errors = "  ".join(f"{k} {e:.2e}/{b:.2e}" for k, (e, b) in result.errors.items())
        table.add_row(
            result.case.name, errors or result.fault, str(len(result.kernels)),
            f"{sum(k[2] for k in result.kernels):,}", f"{sum(k[3] for k in result.kernels):.1f}",
            "passed" if result.passed else "FAILED",
        )  # fmt: skip
    objects = {digest for result in results for _, digest, _, _ in result.kernels}
    failed = sum(not result.passed for result in results)
    if json_:
        console.print_json(json.dumps([asdict(r) | {"passed": r.passed} for r in results]))
    else:
        console.print(table)
        console.print(
            f"backend {attention.backend()}: {len(objects)} distinct gfx1151 code objects executed "
            f"under emulation, {len(results) - failed} cases passed, {failed} failed"
        )
    raise typer.Exit(1 if failed else 0)


@app.command("selftest")
def run_selftest(
    programs: Annotated[int, typer.Option(help="random programs of 40 instructions")] = 60,
    seed: int = 1,
    json_: Json = False,
) -> None:
    """The machine against an independent scalar oracle."""
    report = selftest.run(programs, seed=seed)
    facts = {
        "disassembler": llvm.version(),
        "mnemonics_supported": len(selftest.real_mnemonics(supported())),
        "mnemonics_compared": len(report.covered),
        "instructions_compared": report.compared,
        "disagreements": len(report.disagreements),
        "examples": report.disagreements,
    }
    if json_:
        console.print_json(json.dumps(facts))
    else:
        for line in report.disagreements:
            console.print(line, style="red", highlight=False)
        console.print(
            f"{facts['disassembler']}\n{facts['mnemonics_supported']} mnemonics supported, "
            f"{facts['mnemonics_compared']} compared with the oracle in {report.compared} "
            f"instructions of 32 lanes: {len(report.disagreements)} disagreements",
            highlight=False,
        )
    raise typer.Exit(1 if report.disagreements else 0)


def _pick(file: Path, name: str | None) -> loader.Kernel:
    kernels = loader.load(file)
    found = [kernel for kernel in kernels if name in (None, kernel.name)]
    if len(found) != 1:
        listed = ", ".join(sorted({kernel.name for kernel in kernels})[:10])
        raise EmulatorError(f"{file}: {len(found)} kernels fit; name one with --name: {listed}")
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
            path, array = rest, np.load(rest, allow_pickle=False)
        else:
            raise ValueError(f"{mode} is not in, inout or out")
    except (ValueError, TypeError, OSError) as error:
        raise EmulatorError(f"--arg {text}: {error}") from error
    if mode != "in":
        arrays[Path(path)] = array
    return Buffer(array, mode)


def main() -> None:
    """Runs the command line; every foreseen error is one message and an exit code."""
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
