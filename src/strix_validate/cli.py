# SPDX-License-Identifier: BSD-3-Clause
"""Command line: strix-validate attention | kernels | list.

Exit status: 0 all checks that ran passed, 1 a check failed, 2 wrong usage, 3 nothing could be
checked.
"""

import contextlib
import json
import platform
import sys
from collections.abc import Callable
from enum import Enum
from typing import Annotated

import torch
import typer
from rich.console import Console

from strix_validate import attention, kernels, report
from strix_validate.report import Result

app = typer.Typer(
    help="Checks attention results and GPU kernels of the installed PyTorch and flash-attn.",
    epilog="Exit status: 0 passed, 1 a check failed, 2 wrong usage, 3 nothing could be checked.",
    no_args_is_help=True,
    add_completion=False,
)


class Device(str, Enum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


Json = Annotated[bool, typer.Option("--json", help="Write a JSON report, and nothing else.")]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="ID", help="Run these only: an id, or what it starts with."),
]
Skip = Annotated[
    list[str] | None, typer.Option("--skip", metavar="ID", help="Leave these out, likewise.")
]
DeviceOption = Annotated[
    Device, typer.Option(help="Where attention runs. ROCm GPUs are called cuda, as in torch.")
]


@app.command(name="attention")
def check_attention(
    as_json: Json = False,
    only: Only = None,
    skip: Skip = None,
    device: DeviceOption = Device.AUTO,
) -> None:
    """Compare torch SDPA, each backend alone, and flash-attn with plain attention in float64.

    Without a GPU flash-attn's kernels run in Triton's interpreter.
    """
    ids = [check.id for check, _ in attention.checks()]
    where = device.value
    if device is Device.AUTO:
        where = "cuda" if torch.cuda.is_available() else "cpu"
    _report(lambda wanted: attention.run(where, wanted), ids, only, skip, _describe(where), as_json)


@app.command(name="kernels")
def check_kernels(as_json: Json = False, only: Only = None, skip: Skip = None) -> None:
    """Compile flash-attn's kernels for gfx1151, without a GPU, and read the compiled files."""
    ids = [check.id for check in kernels.checks()]
    _report(kernels.run, ids, only, skip, {"type": "none"}, as_json)


@app.command(name="list")
def list_checks() -> None:
    """List every check and the bug that it would catch."""
    for check in [*(check for check, _ in attention.checks()), *kernels.checks()]:
        typer.echo(f"{check.id}\n    {check.title}\n    catches: {check.why}")


def _report(
    run: Callable[[Callable[[str], bool]], list[Result]],
    ids: list[str],
    only: list[str] | None,
    skip: list[str] | None,
    device: dict,
    as_json: bool,
) -> None:
    for name in [*(only or []), *(skip or [])]:
        # A misspelt id would else run nothing, or everything, and look fine.
        if not any(_is_named(id_, [name]) for id_ in ids):
            raise typer.BadParameter(f"no check is called {name}")

    def wanted(id_: str) -> bool:
        return (not only or _is_named(id_, only)) and not _is_named(id_, skip or [])

    # Libraries print; the report has stdout for itself.
    with contextlib.redirect_stdout(sys.stderr):
        results = run(wanted)
    if as_json:
        typer.echo(json.dumps(report.as_json(results, device), indent=1, allow_nan=False))
    else:
        report.print_table(results, Console())
    raise typer.Exit(report.exit_code(results))


def _is_named(id_: str, names: list[str]) -> bool:
    """True for "sdpa/flash/full-float16" if names has it, "sdpa/flash" or "sdpa"."""
    return any(f"{id_}/".startswith(f"{name}/") for name in names)


def _describe(device: str) -> dict:
    if device == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        architecture = getattr(properties, "gcnArchName", "unknown")
        return {"type": device, "name": properties.name, "architecture": architecture}
    return {"type": device, "architecture": platform.machine()}


def main() -> None:
    app()


if __name__ == "__main__":
    main()
