# SPDX-License-Identifier: BSD-3-Clause
"""Run checks from the command line: options, progress, the record's file and the exit status."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from strix_validate import TARGET
from strix_validate.checks import RunOptions, Size, exit_code
from strix_validate.doctor import host
from strix_validate.doctor.tree import DEVICES
from strix_validate.installing import suggest_installation
from strix_validate.reporting.record import Record
from strix_validate.reporting.terminal_table import show
from strix_validate.runner import NoSuchCheck, refuse_misspelt, run
from strix_validate.tiers import TIERS

#: Minimum seconds between two writes of the record during a run. A record can have megabytes, so it
#: is not written after each check. A killed run loses the results since the last write.
SECONDS_BETWEEN_WRITES = 5.0


class DeviceName(StrEnum):
    """The values of --device."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def refuse_nan(value: float) -> float:
    """Return the value of an option. Before version 0.29, typer takes nan as within all bounds."""
    if math.isnan(value):
        raise typer.BadParameter("nan is not a number")
    return value


# The options of commands that run checks; each command has its own defaults.

JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print JSON instead of a table."),
]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="ID",
        help="Run only these checks: a tier, an id, its prefix or a pattern, such as libraries, "
        "sdpa/flash or 'kernels/vllm-*'. Repeatable.",
    ),
]
SkipOption = Annotated[
    list[str] | None,
    typer.Option(metavar="ID", help="Skip these checks; ID is as for --only. Repeatable."),
]
DeviceOption = Annotated[
    DeviceName,
    typer.Option(help="Where checks run. As in torch, cuda includes ROCm GPUs."),
]
SizeOption = Annotated[
    Size,
    typer.Option(help="How much to check; quick suits a CPU."),
]
TierOption = Annotated[
    list[str] | None,
    typer.Option(help=f"Any of {', '.join(TIERS)}. Default: all, or those of --quick."),
]
EvidenceOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Write the record to this folder."),
]
PlotsOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Write plots to DIR, as PNG and SVG; needs matplotlib."),
]
VllmOption = Annotated[
    Path | None,
    typer.Option(
        "--vllm-source",
        metavar="DIR",
        help="Use vLLM's kernels from this source folder, not from the installed vLLM.",
    ),
]
UrlOption = Annotated[
    str,
    typer.Option(
        "--url",
        metavar="URL",
        help="Check this running vLLM server; serve then needs no torch.",
    ),
]
ModelOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="The model's name on the server at --url; without --url, the folder of a model to "
        "serve.",
    ),
]
PlainUrlOption = Annotated[
    str,
    typer.Option(
        metavar="URL",
        help="A server that has the same model under the same name but no speculative decoding. "
        "Its prefill also judges the tokens of the server at --url.",
    ),
]
QuestionsOption = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        max=50,
        help="Ask the model 50 questions in words; fewer than N right answers are a failure.",
    ),
]
QuickOption = Annotated[
    bool,
    typer.Option(
        "--quick", help="Run the tiers that test this machine, at size quick: about ten minutes."
    ),
]
SeedOption = Annotated[
    int,
    typer.Option(min=0, max=2**32 - 1, help="Seed of the random inputs."),
]
RootOption = Annotated[
    Path,
    typer.Option(metavar="DIR", help="Examine the machine whose /proc, /sys and /etc are in DIR."),
]
ModelGibOption = Annotated[
    float,
    typer.Option(
        min=0,
        max=4096,
        callback=refuse_nan,
        help="Print vLLM's flags for a model whose weights have this size in GiB.",
    ),
]


def run_and_exit(
    names: list[str],
    *,
    as_json: bool,
    only: list[str] | None,
    skip: list[str] | None,
    device: DeviceName = DeviceName.AUTO,
    evidence: Path | None = None,
    plots: Path | None = None,
    dump: Callable[[Record], str] = Record.dump,
    **options: Any,
) -> None:
    """Run tiers, write the record if this is requested, and exit with the record's status.

    Args:
        names: The tiers.
        as_json: Whether to print the record instead of its table.
        only: The checks to run, see runner.select.
        skip: The checks to leave out.
        device: The device of the checks.
        evidence: The folder to which the record is written.
        plots: The folder to which plots are written.
        dump: Returns what --json prints of the record.
        options: Fields of RunOptions.
    """
    _check_options(names, plots, options)
    console = Console(stderr=True, highlight=False)
    for folder in (evidence, plots):
        if folder:
            # If the folder cannot be created, the run fails now and not after an hour of checks.
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise typer.BadParameter(f"{folder}: {error.strerror}") from error
    with _report_errors(console):
        refuse_misspelt(names, [*(only or []), *(skip or [])])
        run_options = RunOptions(_find_device(names, device, options), **options)
        with _make_progress(console) as progress:
            on_progress = _make_progress_handler(progress, evidence)
            print_line = progress.console.print
            record = run(names, run_options, only or [], skip or [], print_line, on_progress)
    if evidence:
        file = evidence / evidence_name(record)
        record.write(file)
        console.print(f"wrote {file}")
    if plots:
        _write_plots(record, plots, console)
    if as_json:
        typer.echo(dump(record))
    else:
        show(record, Console())
    exit_with_status(record)


def exit_with_status(record: Record) -> NoReturn:
    """Exit with the status of a record; cli.EXIT_STATUS lists the statuses."""
    if record.unfinished:
        raise typer.Exit(130)
    raise typer.Exit(exit_code(check.state for check in record.checks))


def _check_options(names: list[str], plots: Path | None, options: dict[str, Any]) -> None:
    """Raise BadParameter if an option is invalid, or does not fit another or the environment."""
    url = options.get("url")
    model = options.get("model")
    if url and not model:
        raise typer.BadParameter("--url needs --model: the model's name on that server")
    if model and not url and not Path(model, "config.json").is_file():
        raise typer.BadParameter(f"{model} has no config.json, and no --url is given")
    for name in ("url", "plain_url"):
        value = options.get(name)
        if value and not re.match("(?i)https?://.", value):
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(
                f"{option} {value}: the URL must begin with http:// or https://"
            )
    if options.get("plain_url") and not url:
        raise typer.BadParameter("--plain-url needs --url: the server with speculative decoding")
    vllm = options.get("vllm")
    if vllm and not (vllm / "vllm" / "platforms").is_dir():
        raise typer.BadParameter(f"--vllm-source {vllm}: not a source tree of vLLM")
    if options.get("questions") and not model:
        raise typer.BadParameter(
            "--questions needs --model: the default models have random weights"
        )
    if "doctor" in names and TARGET not in DEVICES:
        raise typer.BadParameter(f"gpu_arch is {TARGET}; doctor supports only {', '.join(DEVICES)}")
    if plots and not find_spec("matplotlib"):
        raise typer.BadParameter(f"--plots needs matplotlib: {suggest_installation('matplotlib')}")


def _find_device(names: list[str], device: DeviceName, options: dict[str, Any]) -> str:
    """Return the value of RunOptions.device.

    It is "none" for the tier doctor alone, and for serve alone with --url. These need no torch.
    """
    is_server_elsewhere = names == ["serve"] and options.get("url")
    if names == ["doctor"] or is_server_elsewhere:
        return "none"
    return host.resolve_device(device.value)


@contextmanager
def _report_errors(console: Console) -> Iterator[None]:
    """Turn NoSuchCheck into a usage error, and a missing package into exit status 3."""
    try:
        yield
    except NoSuchCheck as error:
        raise typer.BadParameter(str(error)) from error
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        name = module.replace("_", "-")
        advice = suggest_installation(name)
        message = f"{name} is not installed here, so nothing could be checked: {advice}"
        console.print(message, markup=False, soft_wrap=True)
        raise typer.Exit(3) from error


def _write_plots(record: Record, folder: Path, console: Console) -> None:
    # matplotlib is optional.
    from strix_validate.reporting.plots import write

    # The names of the files begin with the tier's name, so bench and serve can share a folder.
    for file in write(record, folder, record.command[0]):
        console.print(f"wrote {file}")


def _make_progress(console: Console) -> Progress:
    """Return a progress bar that counts finished checks; it is shown only on a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _make_progress_handler(progress: Progress, evidence: Path | None) -> Callable[[Record], None]:
    """Return a function that shows a record's progress, and writes the record every few seconds.

    Args:
        progress: The progress bar.
        evidence: The folder to which the record is written; None to write nothing.
    """
    task = progress.add_task("checks", total=None)
    last_write = monotonic()

    def handle_progress(record: Record) -> None:
        nonlocal last_write
        number = len(record.checks)
        last = record.checks[-1].id if number else "checks"
        progress.update(
            task,
            description=last,
            completed=number,
            total=number + record.unfinished,
        )
        is_due = not number or monotonic() - last_write > SECONDS_BETWEEN_WRITES
        if evidence and is_due:
            record.write(evidence / evidence_name(record))
            last_write = monotonic()

    return handle_progress


def evidence_name(record: Record) -> str:
    """Return the name of a record's file, DATE-ARCHITECTURE-SUBJECT.json."""
    architecture = record.device.architecture.split(":")[0]
    architecture = re.sub(r"[^\w]", "-", architecture)
    return f"{record.created:%Y-%m-%d}-{architecture}-{record.subject}.json"
