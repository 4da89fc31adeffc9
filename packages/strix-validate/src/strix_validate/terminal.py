# SPDX-License-Identifier: BSD-3-Clause
"""A run on the terminal: its options, its progress, the record as it grows, the exit status."""

import re
from collections.abc import Callable
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from strix_validate import TARGET
from strix_validate.checks import RunOptions, Size, exit_code
from strix_validate.doctor import host
from strix_validate.doctor.tree import DEVICES
from strix_validate.installing import install_advice
from strix_validate.reporting.record import Record
from strix_validate.reporting.terminal_table import show
from strix_validate.runner import NoSuchCheck, refuse_misspelt, run
from strix_validate.tiers import TIERS

#: A record has megabytes, and a killed run loses no more than this.
SECONDS_BETWEEN_WRITES = 5.0


class DeviceName(StrEnum):
    """The values of --device."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


JsonOption = Annotated[bool, typer.Option("--json", help="Write only the record, as JSON.")]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="ID",
        help="Run only these checks: a tier, an id, its prefix or a pattern, such as libraries, "
        "sdpa/flash or 'kernels/vllm-*'. Repeatable.",
    ),
]
VllmOption = Annotated[
    Path | None,
    typer.Option(
        "--vllm-source",
        metavar="DIR",
        help="Take vLLM's kernels from this source folder, not from the installed vLLM.",
    ),
]


def _option(kind: Any, default: object, words: str, *flags: str, **more) -> tuple[Any, object]:
    return Annotated[kind, typer.Option(*flags, help=words, **more)], default


#: Options of commands that run checks, each with its default, by the names of parameters.
OPTIONS: dict[str, tuple[Any, object]] = {
    "as_json": (JsonOption, False),
    "only": (OnlyOption, None),
    "skip": _option(list[str] | None, None, "Skip these checks, named likewise.", metavar="ID"),
    "device": _option(
        DeviceName, DeviceName.AUTO, "Where checks run. As in torch, cuda includes ROCm GPUs."
    ),
    "size": _option(Size, Size.QUICK, "How much to check; quick suits a CPU."),
    "tier": _option(list[str] | None, None, f"Any of {', '.join(TIERS)}. Default: all."),
    "evidence": _option(Path | None, None, "Write the record to this folder.", metavar="DIR"),
    "plots": _option(
        Path | None, None, "Draw plots here, as PNG and SVG; needs matplotlib.", metavar="DIR"
    ),
    "vllm": (VllmOption, None),
    "url": _option(str, "", "Look at this server of vLLM; needs no torch.", metavar="URL"),
    "model": _option(
        str, "", "What the server at --url calls its model; without --url, a model's folder to "
        "serve.", metavar="NAME",
    ),
    "plain_url": _option(
        str, "", "A server of the same model, under the same name, without speculation: compare "
        "drafted tokens with it.", metavar="URL",
    ),
    "questions": _option(
        int, 0, "Ask the model 50 questions in words; fewer than N right answers fail.",
        metavar="N", min=0, max=50,
    ),
    "quick": _option(bool, False, "What ten minutes of a GPU say of this machine.", "--quick"),
    "seed": _option(int, 0, "Draw other random inputs.", min=0, max=2**32 - 1),
    "root": _option(
        Path, Path("/"), "Examine a machine whose /proc, /sys and /etc are here.", metavar="DIR"
    ),
    "model_gib": _option(
        float, 0, "Weights of a model in GiB: print vLLM's flags for it.", min=0
    ),
}  # fmt: skip


def run_and_exit(  # noqa: C901 (usage, run, results)
    names: list[str],
    *,
    as_json: bool,
    only: list[str] | None,
    skip: list[str] | None,
    device: DeviceName = DeviceName.AUTO,
    evidence: Path | None = None,
    plots: Path | None = None,
    dump: Callable[[Record], str] = Record.dump,
    **options,
) -> None:
    """Run tiers, write the record where requested, and exit with its status.

    dump: what --json prints of the record. options: of RunOptions.
    """
    url, model = options.get("url"), options.get("model")
    if url and not model:
        raise typer.BadParameter("--url needs --model: what the server calls its model")
    if model and not url and not Path(model, "config.json").is_file():
        raise typer.BadParameter(f"{model} has no config.json, and no --url is given")
    if options.get("plain_url") and not url:
        raise typer.BadParameter("--plain-url needs --url: the server that drafts tokens")
    if options.get("questions") and not model:
        raise typer.BadParameter("--questions needs --model: the tiny models know no words")
    if "doctor" in names and TARGET not in DEVICES:
        raise typer.BadParameter(f"gpu_arch is {TARGET}; doctor knows {', '.join(DEVICES)}")
    console = Console(stderr=True, highlight=False)
    if plots and not find_spec("matplotlib"):
        raise typer.BadParameter(f"--plots needs matplotlib: {install_advice('matplotlib')}")
    for folder in filter(None, (evidence, plots)):
        folder.mkdir(parents=True, exist_ok=True)  # now, not after an hour of checks
    try:
        refuse_misspelt(names, [*(only or []), *(skip or [])])
        torchless = names == ["doctor"] or (url and names == ["serve"])
        where = "none" if torchless else host.device_for(device.value)
        with _progress(console) as bar:
            keep = _keep(bar, evidence)
            wanted = (RunOptions(where, **options), only or [], skip or [])
            found = run(names, *wanted, bar.console.print, keep)
    except NoSuchCheck as error:
        raise typer.BadParameter(str(error)) from error
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0].replace("_", "-")
        what = f"{name} is not installed here: nothing could be checked"
        console.print(f"{what}: {install_advice(name)}", markup=False, soft_wrap=True)
        raise typer.Exit(3) from error
    if evidence:
        file = evidence / evidence_name(found)
        found.write(file)
        console.print(f"wrote {file}")
    if plots:
        from strix_validate.reporting.plots import write

        for file in write(found, plots):
            console.print(f"wrote {file}")
    if as_json:
        typer.echo(dump(found))
    else:
        show(found, Console())
    if found.unfinished:
        raise typer.Exit(130)
    raise typer.Exit(exit_code(check.state for check in found.checks))


def _progress(console: Console) -> Progress:
    """Make a bar that shows how many checks are done, and nothing where nobody looks."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    )  # fmt: skip


def _keep(bar: Progress, evidence: Path | None) -> Callable[[Record], None]:
    """Return what shows progress and writes the growing record, every few seconds at most."""
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
    """Return DATE-ARCHITECTURE-SUBJECT.json."""
    arch = re.sub(r"[^\w]", "-", found.device.architecture.split(":")[0])
    return f"{found.created:%Y-%m-%d}-{arch}-{found.subject}.json"
