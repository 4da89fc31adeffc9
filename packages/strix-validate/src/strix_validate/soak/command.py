# SPDX-License-Identifier: BSD-3-Clause
"""The command `strix-validate soak`: a recorder that neither imports torch nor opens the GPU."""

import contextlib
import json
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from strix_validate import TARGET
from strix_validate.checks import CannotRun, CheckFailed
from strix_validate.doctor import host
from strix_validate.doctor.tree import Tree
from strix_validate.installing import suggest_installation
from strix_validate.reporting import record
from strix_validate.reporting.record import Record
from strix_validate.reporting.terminal_table import show
from strix_validate.serving.tiny_llama import SHARE
from strix_validate.serving.vllm_server import ServerSession
from strix_validate.soak.advice import advise
from strix_validate.soak.kernel_log import KernelLog
from strix_validate.soak.processes import LineProcess
from strix_validate.soak.recorder import PREPARE_LIMIT, Clock, Recorder, Table, describe_status
from strix_validate.soak.story import Story
from strix_validate.soak.verdicts import judge
from strix_validate.terminal import (
    SECONDS_BETWEEN_WRITES,
    DeviceName,
    JsonOption,
    exit_with_status,
    refuse_nan,
)

WORKER = "strix_validate.soak.worker"
SENSORS = "strix_validate.soak.telemetry"
#: Seconds of a turn. In a short soak, turns are shorter, so that each load has time for _MIN_TURNS
#: turns, unless the preparation takes up this time.
TURN = 15.0
_MIN_TURNS = 3
#: Seconds between two lines on the terminal.
_LINE = 60.0
#: The flags of the tiny model's server. Its number of sequences equals the number of requests.
SERVER_FLAGS = (
    "--dtype",
    "float16",
    "--max-model-len",
    "256",
    "--max-num-seqs",
    "32",
    "--kv-cache-memory-bytes",
    str(256 << 20),
    "--gpu-memory-utilization",
    str(SHARE),
)

#: Prints a line on the terminal.
_PrintLine = Callable[[str], None]


class SoakRecord:
    """The files of a soak: a record and a table, updated while it runs; a log; a plot at the end.

    Args:
        folder: The folder to which the files are written.
        story: The course of the soak.

    Attributes:
        log: The file of the log.
        file: The file of the record.
    """

    def __init__(self, folder: Path, story: Story) -> None:
        self._story = story
        self._created = datetime.now(UTC)
        self._begin = time.monotonic()
        self._stem = folder / f"soak-{self._created:%Y-%m-%d-%H%M%S}"
        self.log = self._make_path("log")
        self.file = self._make_path("json")
        self._table = Table(self._make_path("csv"))
        self._versions = host.read_versions()
        self._packages = host.list_packages()
        self._host = host.describe_host()
        self._last_write = float("-inf")

    def _make_path(self, suffix: str) -> Path:
        return self._stem.with_name(f"{self._stem.name}.{suffix}")

    def make_record(self) -> Record:
        """Return the record so far. Until the soak has ended, it lacks the check WHOLE."""
        checks = []
        for result in judge(self._story):
            check = record.make_check_record("soak", result)
            check.reason = host.shorten(check.reason)
            check.fix = host.shorten(check.fix)
            checks.append(check)
        device = self._story.device
        is_target = device.build == "rocm" and device.architecture.split(":")[0] == TARGET
        subject: Literal["packages", "harness"] = "packages" if is_target else "harness"
        return Record(
            created=self._created,
            command=["soak"],
            seed=0,
            subject=subject,
            versions=self._versions,
            packages=self._packages,
            host=self._host,
            device=device,
            checks=checks,
            summary=record.summarise(checks),
            seconds=round(time.monotonic() - self._begin, 1),
            unfinished=int(not self._story.is_over),
        )

    def add_row(self, row: dict) -> None:
        """Write one second's row, and every few seconds the record."""
        self._table.add(row)
        if time.monotonic() - self._last_write > SECONDS_BETWEEN_WRITES:
            self.make_record().write(self.file)
            self._last_write = time.monotonic()

    def close(self, print_line: _PrintLine) -> Record:
        """Write the record and, with matplotlib, its plot; print their names; return the record."""
        self._table.close()
        report = self.make_record()
        report.write(self.file)
        print_line(f"wrote {self.file} and {self._make_path('csv')}")
        if self.log.exists() and not self.log.stat().st_size:
            self.log.unlink()
        if not find_spec("matplotlib"):
            command = suggest_installation("matplotlib")
            print_line(f"no plot is drawn, because matplotlib is not installed: {command}")
            return report
        from strix_validate.reporting.plots import write

        for file in write(report, self._stem.parent, self._stem.name):
            print_line(f"wrote {file}")
        return report


@contextlib.contextmanager
def _interrupted_by(*numbers: signal.Signals) -> Iterator[None]:
    """Make these signals interrupt as Ctrl-C does, so that the record is written."""
    handlers = {}
    for number in numbers:
        # A signal that is ignored stays ignored. nohup starts the soak with SIGHUP ignored, so that
        # the soak outlives its terminal.
        if signal.getsignal(number) is not signal.SIG_IGN:
            handlers[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def open_device(device: str, limit: float = PREPARE_LIMIT) -> str:
    """Open a device in a process of its own, and return torch's name for it.

    Args:
        device: auto, cpu or cuda.
        limit: Seconds within which the device must open.

    Raises:
        CheckFailed: The device does not open within the limit, or the process ends.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        process = LineProcess(["-m", WORKER, json.dumps({"device": device})], log)
        try:
            lines = process.wait_for_lines(limit)
        except TimeoutError as error:
            raise CheckFailed(f"torch does not open the device {device}: {error}") from error
        finally:
            process.stop(5)
        if not lines:
            lines = log.read_text(errors="replace").strip().splitlines()
            last_line = lines[-1] if lines else "it printed nothing"
            status = describe_status(process.status() or 0)
            raise CheckFailed(
                f"torch does not open the device {device}: its process ended {status}: {last_line}"
            )
    return json.loads(lines[0])["name"]


@contextlib.contextmanager
def serve_tiny_model(device: str, print_line: _PrintLine) -> Iterator[tuple[str, str, str]]:
    """Start a server of a tiny model.

    Yields:
        The server's URL, the name of its model, and ""; or, if the server does not run, "", "" and
        the reason.
    """
    with ServerSession("cuda", flags=SERVER_FLAGS) as session:
        url = ""
        model = ""
        reason = ""
        try:
            session.need_vllm()
            session.device = open_device(device)
            session.need_vllm()
            print_line("vllm serve starts with a tiny model; this may take minutes")
            endpoint = session.server.endpoint
            url = endpoint.url
            model = endpoint.model
        except (CannotRun, CheckFailed) as error:
            reason = str(error)
        yield url, model, reason


def run(
    story: Story,
    files: SoakRecord,
    device: str,
    seconds: float,
    hang_after: float,
    print_line: _PrintLine,
    worker: Sequence[str] = ("-m", WORKER),
    clock: Clock | None = None,
) -> None:
    """Load the GPU and record it.

    After Ctrl-C, SIGTERM or SIGHUP, the story has all that happened so far.

    Args:
        story: The story, to which all events are added.
        files: The files of the soak.
        device: auto, cpu or cuda.
        seconds: How long the loads prepare and run.
        hang_after: Seconds without progress after which the worker counts as hung.
        print_line: Prints a line on the terminal.
        worker: Arguments of Python that start the loads.
        clock: The clock.
    """
    with (
        serve_tiny_model(device, print_line) as (url, model, reason),
        contextlib.ExitStack() as stack,
    ):
        if reason:
            story.absent["server"] = reason
            print_line(f"the load 'server' does not run: {reason}")
        number_of_loads = 4 if url else 3
        options = {
            "device": device,
            "turn_seconds": min(TURN, seconds / number_of_loads / _MIN_TURNS),
            "url": url,
            "model": model,
        }
        story.advice = advise(Tree())
        kernel_log = KernelLog()
        stack.callback(kernel_log.close)
        story.kernel_absent = kernel_log.absent
        sensors = LineProcess(["-m", SENSORS], files.log)
        stack.callback(sensors.stop, 0)
        child = LineProcess([*worker, json.dumps(options)], files.log)
        stack.callback(child.stop)
        recorder = Recorder(
            story,
            child,
            sensors,
            kernel_log.faults,
            _make_row_handler(story, files, print_line),
            clock,
        )
        recorder.run(seconds, hang_after)


def _make_row_handler(
    story: Story, files: SoakRecord, print_line: _PrintLine
) -> Callable[[dict], None]:
    """Return a function that writes a row, and prints events and a line each minute."""
    last_line = float("-inf")

    def handle_row(row: dict) -> None:
        nonlocal last_line
        files.add_row(row)
        if row["event"] or row["seconds"] - last_line >= _LINE:
            last_line = row["seconds"]
            print_line(f"{story.summary()} {row['event']}".rstrip())

    return handle_row


def _open_files(folder: Path, story: Story) -> SoakRecord:
    """Return the files of a soak; a folder that cannot be written is a usage error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return SoakRecord(folder, story)
    except OSError as error:
        raise typer.BadParameter(f"--evidence {folder}: {error.strerror}") from error


def soak(
    minutes: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=1440,
            callback=refuse_nan,
            help="How long the loads prepare and run.",
        ),
    ] = 60,
    evidence: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Write record, table and plot to this folder."),
    ] = Path("records"),
    device: Annotated[
        DeviceName,
        typer.Option(help="As in torch, cuda includes ROCm GPUs."),
    ] = DeviceName.AUTO,
    hang_after: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=5,
            max=86400,
            callback=refuse_nan,
            help="A load hangs if it makes no progress for this long; before the first turn, at "
            "least 600 seconds are allowed.",
        ),
    ] = 120,
    as_json: JsonOption = False,
) -> None:
    """Load the GPU for an hour, compare every result, and record the machine each second.

    The loads take turns: attention, matrix products, copies and, if vLLM is installed, a server. A
    hang or a crash ends the soak, and the record names the load that was running.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def print_line(line: str) -> None:
        console.print(line, markup=False)

    if not find_spec("torch"):
        advice = suggest_installation("torch")
        print_line(f"torch is not installed here, so no load can run: {advice}")
        raise typer.Exit(3)
    story = Story(host.describe_device("none"))
    files = _open_files(evidence, story)
    write_error = None
    try:
        with contextlib.suppress(KeyboardInterrupt), _interrupted_by(signal.SIGTERM, signal.SIGHUP):
            run(story, files, device.value, minutes * 60, hang_after, print_line)
        report = files.close(print_line)
    except OSError as error:
        write_error = error
        print_line(f"{evidence}: {error}: nothing more is recorded")
        report = files.make_record()
    if as_json:
        typer.echo(report.dump())
    else:
        show(report, Console())
    if write_error:
        raise typer.Exit(1)
    exit_with_status(report)
