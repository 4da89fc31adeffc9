# SPDX-License-Identifier: BSD-3-Clause
"""Run the program `strix-validate soak` on the CPU, and hang, kill or interrupt its processes."""

import errno
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import program
import pytest
import torch
from records import make
from strix_validate import cli
from strix_validate.checks import State
from strix_validate.reporting import record
from strix_validate.soak import command
from strix_validate.soak.processes import LineProcess
from strix_validate.soak.recorder import Clock
from typer.testing import CliRunner

FAULTY = Path(__file__).with_name("faulty_worker.py")


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    monkeypatch.setattr(command, "TURN", 0.2)


def soak_with(fault, folder, clock=None):
    """Run the recorder with a faulty worker until it ends; return the record's checks by id."""
    story = command.Story(make().device)
    files = command.SoakRecord(folder, story)
    worker = (str(FAULTY), fault)
    command.run(story, files, "cpu", 10**6, 3600, lambda line: None, worker, clock)
    return {check.id: check for check in files.close(lambda line: None).checks}


@pytest.mark.parametrize(
    "fault, words",
    [
        (
            "crash",
            "in product, its step 4: product of 64 by 64 matrices in float16: it ended by "
            "signal 6 (abort)",
        ),
        ("error", "its step 4: product of 64 by 64 matrices in float16: RuntimeError: HIP error"),
    ],
)
def test_a_worker_that_fails_is_told_with_what_it_ran(fault, words, tmp_path):
    checks = soak_with(fault, tmp_path)
    assert checks["soak/whole"].state is State.FAILED
    assert words in checks["soak/whole"].reason
    assert "sudo dmesg" in checks["soak/whole"].fix
    assert checks["soak/attention"].state is State.PASSED


class LeapingClock(Clock):
    """The machine's clock. Once a file exists, each wait takes two additional hours."""

    def __init__(self, file):
        self.file = file
        self.leaps = 0

    def now(self):
        return super().now() + 7200 * self.leaps

    def wait_until(self, moment):
        super().wait_until(moment)
        self.leaps += self.file.exists()


def test_a_real_hang_ends_with_what_ran_and_leaves_no_process(tmp_path, monkeypatch):
    """The clock leaps by hours when the worker hangs, so that the test does not depend on time."""
    hangs = tmp_path / "hangs"
    monkeypatch.setenv("HANGS", str(hangs))
    clock = LeapingClock(hangs)
    started = []
    init = LineProcess.__init__

    def start(self, *arguments):
        init(self, *arguments)
        started.append(self.pid)

    monkeypatch.setattr(LineProcess, "__init__", start)
    reason = soak_with("hang", tmp_path, clock)["soak/whole"].reason
    assert "in product, its step 4" in reason
    # A leap of 7200 seconds exceeds the limit of 3600 seconds. The wait adds a few seconds.
    assert "no progress for 72" in reason
    assert len(started) == 2
    assert not any(Path("/proc", str(pid)).exists() for pid in started)


def test_a_wrong_number_is_found_by_the_whole_program(tmp_path, monkeypatch):
    """The worker reports a wrong product, the recorder reads it, and the product check fails."""
    folder = tmp_path / "records"

    add_row = command.SoakRecord.add_row

    def add_and_interrupt(self, row):
        add_row(self, row)
        if "wrong results" in row["event"]:
            raise KeyboardInterrupt

    monkeypatch.setattr(command.SoakRecord, "add_row", add_and_interrupt)
    run = command.run
    monkeypatch.setattr(command, "run", lambda *args: run(*args, worker=(str(FAULTY), "wrong")))
    done = CliRunner().invoke(
        cli.app, ["soak", "--device", "cpu", "--evidence", str(folder), "--json"]
    )
    assert done.exit_code == 130, done.output
    printed = json.loads(done.stdout)
    (file,) = folder.glob("*.json")
    assert json.loads(file.read_text()) == printed
    states = {check["id"]: check["state"] for check in printed["checks"]}
    assert states["soak/product"] == "failed"
    assert states["soak/copy"] != "failed"
    (product,) = [check for check in printed["checks"] if check["id"] == "soak/product"]
    assert "the first of them step 4" in product["reason"]


@pytest.fixture
def running(tmp_path):
    """A running program whose loads have begun, its worker's id, and the folder of its record."""
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}
    arguments = ["soak", "--device", "cpu", "--minutes", "600", "--evidence", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", program.CODE, *arguments],
        env=os.environ | path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    (worker,) = (pid for pid in wait_for_rows(tmp_path, process) if pid)
    yield process, worker, tmp_path
    process.kill()
    process.wait()
    process.stdout.close()


def wait_for_rows(folder, process):
    """Wait until the recorded table has a row of a load; yield the worker's process id."""
    while process.poll() is None:
        text = "".join(file.read_text() for file in folder.glob("*.csv"))
        if ",attention,0," in text:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            for pid in map(int, children.split()):
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
                yield pid if b"soak.worker" in arguments else None
            return
    raise AssertionError(process.stdout.read())


def test_a_worker_killed_from_outside_ends_the_program_with_status_1(running):
    process, worker, folder = running
    os.kill(worker, signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == 1
    assert "by signal 9" in output
    (file,) = folder.glob("*.json")
    assert record.load(file).summary["failed"] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_program_writes_its_record(number, running):
    process, worker, folder = running
    process.send_signal(number)
    output, _ = process.communicate()
    assert process.returncode == 130
    assert "interrupted" in output
    (file,) = folder.glob("*.json")
    assert record.load(file).unfinished == 1
    assert not Path("/proc", str(worker)).exists()


def test_a_killed_program_leaves_its_record_and_no_worker(running):
    process, worker, folder = running
    pidfd = os.pidfd_open(worker)
    process.kill()
    process.wait()
    select.select([pidfd], [], [])  # the file descriptor is readable when the worker has ended
    os.close(pidfd)
    (file,) = folder.glob("*.json")
    assert record.load(file).unfinished == 1
    (table,) = folder.glob("*.csv")
    assert table.read_text().count("\n") > 2


def test_a_short_soak_passes_and_can_be_reported(tmp_path):
    done = program.run("soak", "--device", "cpu", "--minutes", "0.1", "--evidence", tmp_path)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*.json")
    written = record.load(file)
    assert written.command == ["soak"]
    assert written.subject == "harness"
    assert not written.unfinished
    assert not written.proves("torch")
    assert "vllm is not installed" in done.stdout
    page = tmp_path / "page.html"
    done = program.run("report", file, "-o", page)
    assert done.returncode == 0
    assert "soak/whole" in page.read_text()


def test_what_cannot_be_loaded_is_told(tmp_path):
    done = program.run("soak", "--evidence", tmp_path / "x", without="torch")
    assert done.returncode == 3
    assert "torch is not installed" in done.stderr
    assert not (tmp_path / "x").exists()
    file = tmp_path / "file"
    file.touch()
    done = program.run("soak", "--evidence", file)
    assert done.returncode == 2
    assert "--evidence" in done.stderr
    done = program.run("soak", "--device", "cuda", "--evidence", tmp_path)
    if not torch.cuda.is_available():
        assert done.returncode == 3
        assert "torch sees no GPU" in " ".join(done.stdout.split())


def test_a_device_that_does_not_open_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "WORKER", "no_such_module")
    with pytest.raises(command.CheckFailed, match="ended with status 1: [^\\[].*no_such_module"):
        command.open_device("cpu")
    (tmp_path / "silent.py").write_text("import time; time.sleep(10**6)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(command, "WORKER", "silent")
    with pytest.raises(command.CheckFailed, match="no answer in 0 s"):
        command.open_device("cpu", 0.1)


def test_the_checks_are_listed():
    listed = json.loads(CliRunner().invoke(cli.app, ["list", "--json", "--only", "soak"]).stdout)
    assert {"soak/whole", "soak/server", "soak/drift"} <= {check["id"] for check in listed}
    assert all("https://" in check["purpose"] for check in listed)


def test_a_disk_that_is_full_ends_it_with_the_results_so_far(tmp_path, monkeypatch):
    def refuse(self, row):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command.SoakRecord, "add_row", refuse)
    done = CliRunner().invoke(cli.app, ["soak", "--device", "cpu", "--evidence", str(tmp_path)])
    assert done.exit_code == 1
    assert "No space left on device" in done.output
    assert "nothing more is recorded" in done.output
    assert "soak/kernel" in done.output
