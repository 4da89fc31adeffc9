# SPDX-License-Identifier: BSD-3-Clause
"""`strix-validate soak`: the recorder, which neither imports torch nor opens the GPU."""

import contextlib
import json
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from strix_validate import TARGET
from strix_validate.checks import CannotRun, CheckFailed, exit_code
from strix_validate.doctor import host
from strix_validate.doctor.tree import Tree
from strix_validate.installing import install_advice
from strix_validate.reporting import record
from strix_validate.reporting.record import Record
from strix_validate.reporting.terminal_table import show
from strix_validate.serving.vllm_server import ServerSession
from strix_validate.soak.advice import advise
from strix_validate.soak.kernel_log import KernelLog
from strix_validate.soak.processes import LineProcess
from strix_validate.soak.recorder import PREPARE_LIMIT, Clock, Recorder, Table, describe_status
from strix_validate.soak.story import Story
from strix_validate.soak.verdicts import judge
from strix_validate.terminal import SECONDS_BETWEEN_WRITES, DeviceName, JsonOption

WORKER, SENSORS = "strix_validate.soak.worker", "strix_validate.soak.telemetry"
#: Seconds of a turn, and how often each load is to have one at least.
TURN, _LEAST_TURNS = 15.0, 3
#: Lines on the terminal come so many seconds apart.
_LINE = 60.0
#: Of the tiny model's server, as many sequences as requests; see vllm_server._TINY.
_SERVER_FLAGS = (
    "--dtype",
    "float16",
    "--max-model-len",
    "256",
    "--max-num-seqs",
    "32",
    "--kv-cache-memory-bytes",
    str(256 << 20),
)


class SoakRecord:
    """The files of a soak: a record and a table, written as it goes, a log, and a plot at the end.

    Args:
        folder: Where they are written.
        story: What is recorded.
    """

    def __init__(self, folder: Path, story: Story) -> None:
        self._story, self._began, self._begin = story, datetime.now(UTC), time.monotonic()
        self._stem = folder / f"soak-{self._began:%Y-%m-%d-%H%M%S}"
        self.log, self.file = self._name("log"), self._name("json")
        self._table = Table(self._name("csv"))
        self._described = {
            "versions": host.versions(),
            "packages": host.packages(),
            "host": host.describe_host(),
        }
        self._written = float("-inf")

    def _name(self, suffix: str) -> Path:
        return self._stem.with_name(f"{self._stem.name}.{suffix}")

    def make(self) -> Record:
        """Make the record of what the story has so far; without its end, one check is missing."""
        results = judge(self._story)
        checks = [record.of_result("soak", result) for result in results]
        for check in checks:
            check.reason = host.shorten(check.reason)
        device = self._story.device
        is_ours = device.build == "rocm" and device.architecture.split(":")[0] == TARGET
        return Record(
            created=self._began,
            command=["soak"],
            seed=0,
            subject="packages" if is_ours else "harness",
            device=device,
            checks=checks,
            summary=record.summarise(checks),
            seconds=round(time.monotonic() - self._begin, 1),
            unfinished=int(not self._story.is_over),
            **self._described,
        )

    def keep(self, row: dict) -> None:
        """Write a second's row, and every few seconds the record."""
        self._table.add(row)
        if time.monotonic() - self._written > SECONDS_BETWEEN_WRITES:
            self.make().write(self.file)
            self._written = time.monotonic()

    def close(self, say: Callable[[str], None]) -> Record:
        """Write the record and its plot, name the files, and return the record."""
        self._table.close()
        whole = self.make()
        whole.write(self.file)
        say(f"wrote {self.file} and {self._name('csv')}")
        if self.log.exists() and not self.log.stat().st_size:
            self.log.unlink()
        if not find_spec("matplotlib"):
            say(f"no plot, since matplotlib is not installed: {install_advice('matplotlib')}")
            return whole
        from strix_validate.reporting.plots import write

        for file in write(whole, self._stem.parent, self._stem.name):
            say(f"wrote {file}")
        return whole


@contextlib.contextmanager
def _interrupted_by(*numbers: signal.Signals) -> Iterator[None]:
    """Let these signals interrupt as Ctrl-C does, so that the record is written."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def open_device(device: str, limit: float = PREPARE_LIMIT) -> str:
    """Return torch's name of the device that it opens in a process of its own.

    Raises:
        CheckFailed: it does not within the limit in seconds, or the process ends.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        process = LineProcess(["-m", WORKER, json.dumps({"device": device})], log)
        try:
            lines = process.wait_for_lines(limit)
        except TimeoutError as error:
            raise CheckFailed(f"torch does not open the GPU: {error}") from error
        finally:
            process.stop(5)
        if not lines:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            end = describe_status(process.status() or 0)
            raise CheckFailed(f"torch does not open the GPU: its process ended {end}: {last}")
    return json.loads(lines[0])["name"]


@contextlib.contextmanager
def serve_tiny_model(device: str, say: Callable[[str], None]) -> Iterator[tuple[str, str, str]]:
    """Start a server of a tiny model; yield its URL and model, or "" twice and the reason."""
    with ServerSession("cuda", flags=_SERVER_FLAGS) as session:
        url = model = reason = ""
        try:
            session.need_vllm()
            session.device = open_device(device)
            session.need_vllm()
            say("vllm serve starts with a tiny model; this may take minutes")
            endpoint = session.server.endpoint
            url, model = endpoint.url, endpoint.model
        except (CannotRun, CheckFailed) as error:
            reason = str(error)
        yield url, model, reason


def run(
    story: Story,
    files: SoakRecord,
    device: str,
    seconds: float,
    hang_after: float,
    say: Callable[[str], None],
    worker: Sequence[str] = ("-m", WORKER),
    clock: Clock | None = None,
) -> None:
    """Load the GPU and record it; Ctrl-C and SIGTERM leave the story as far as it has come.

    Args:
        device: auto, cpu or cuda.
        worker: arguments of Python that start the loads.
    """
    with serve_tiny_model(device, say) as (url, model, reason), contextlib.ExitStack() as stack:
        if reason:
            story.absent["server"] = reason
            say(f"the load server does not run: {reason}")
        loads = 4 if url else 3
        options = {
            "device": device,
            "turn_seconds": min(TURN, seconds / loads / _LEAST_TURNS),
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
        shown = float("-inf")

        def keep(row: dict) -> None:
            nonlocal shown
            files.keep(row)
            if row["event"] or row["seconds"] - shown >= _LINE:
                shown = row["seconds"]
                say(f"{story.summary()} {row['event']}".rstrip())

        recorder = Recorder(story, child, sensors, kernel_log.faults, keep, clock)
        recorder.run(seconds, hang_after)


def soak(
    minutes: Annotated[float, typer.Option(min=0.1, max=1440, help="How long the loads run.")] = 60,
    evidence: Annotated[
        Path, typer.Option(metavar="DIR", help="Write record, table and plot to this folder.")
    ] = Path("records"),
    device: Annotated[
        DeviceName, typer.Option(help="As in torch, cuda includes ROCm GPUs.")
    ] = DeviceName.AUTO,
    hang_after: Annotated[
        float, typer.Option(metavar="SECONDS", min=5, help="Without progress, it hangs.")
    ] = 120,
    as_json: JsonOption = False,
) -> None:
    """Load the GPU for an hour, compare every result, and record the machine each second.

    Attention, matrix products, copies and, where vLLM is installed, a server take turns. A hang or
    a crash of the loads ends it with what was running.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def say(line: str) -> None:
        console.print(line, markup=False)

    if not find_spec("torch"):
        what = "torch is not installed here: nothing could be loaded"
        say(f"{what}: {install_advice('torch')}")
        raise typer.Exit(3)
    try:
        evidence.mkdir(parents=True, exist_ok=True)
        story = Story(host.describe_device("none"))
        files = SoakRecord(evidence, story)
    except OSError as error:
        raise typer.BadParameter(f"--evidence {evidence}: {error.strerror}") from error
    error_of_files = None
    try:
        with contextlib.suppress(KeyboardInterrupt), _interrupted_by(signal.SIGTERM):
            run(story, files, device.value, minutes * 60, hang_after, say)
        whole = files.close(say)
    except OSError as error:
        error_of_files = error
        say(f"{evidence}: {error}: nothing more is recorded")
        whole = files.make()
    if as_json:
        typer.echo(whole.dump())
    else:
        show(whole, Console())
    if error_of_files:
        raise typer.Exit(1)
    if whole.unfinished:
        raise typer.Exit(130)
    raise typer.Exit(exit_code(check.state for check in whole.checks))
