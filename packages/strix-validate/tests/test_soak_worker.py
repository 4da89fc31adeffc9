# SPDX-License-Identifier: BSD-3-Clause
"""The loads of a soak on the CPU, with faults planted in torch, and its processes."""

import errno
import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import program
import pytest
import torch
from records import make
from strix_validate import cli
from strix_validate.checks import State
from strix_validate.reporting import record
from strix_validate.soak import command, loads
from strix_validate.soak.processes import LineProcess
from strix_validate.soak.recorder import Clock
from trained_server import Server
from typer.testing import CliRunner

FAULTY = Path(__file__).with_name("faulty_worker.py")


@pytest.fixture(autouse=True)
def short_steps(monkeypatch):
    monkeypatch.setattr(loads, "STEP_SECONDS", 0.01)
    monkeypatch.setattr(command, "TURN", 0.2)


@pytest.fixture(params=[loads.AttentionLoad, loads.ProductLoad], ids=["attention", "product"])
def load(request):
    prepared = request.param("cpu")
    prepared.prepare()
    return prepared


def test_right_results_are_right(load):
    step = load.step()
    assert step.changed == 0 and 0 < step.error < 1 and not step.fault
    assert step.results > 1 and step.work == load._work * step.results


def spoil(load, monkeypatch, change, call=2):
    """Change the results of one call."""
    right, calls = load.call, []

    def wrong():
        calls.append(0)
        results = right()
        return change(results) if len(calls) == call else results

    monkeypatch.setattr(load, "call", wrong)
    load._repeats = 5
    return load.step()


def test_one_changed_bit_in_one_result_of_many_is_seen(load, monkeypatch):
    def change(results):
        results["out"].view(torch.int16).flatten()[5] ^= 1
        return results

    step = spoil(load, monkeypatch, change)
    assert step.changed == 1 and step.error < 1


@pytest.mark.parametrize("value", [100.0, float("nan"), float("inf")])
def test_a_wrong_last_result_is_seen_by_its_error(value, load, monkeypatch):
    def change(results):
        results["out"].flatten()[5] = value
        return results

    step = spoil(load, monkeypatch, change, call=6)
    assert step.error > 1 if value == 100 else step.error is None


def test_a_wrong_gradient_is_seen(monkeypatch):
    attention = loads.AttentionLoad("cpu")
    attention.prepare()
    step = spoil(attention, monkeypatch, lambda results: results | {"dk": results["dk"] * 1.5}, 6)
    assert step.error > 1


def test_a_call_that_writes_nothing_is_seen(load, monkeypatch):
    """It returns the memory of the call before, which held right numbers."""
    right, kept = load.call, []

    def stale():
        kept.append(right() if len(kept) < 2 else kept[-1])
        return kept[-1]

    monkeypatch.setattr(load, "call", stale)
    load._repeats = 5
    assert load.step().changed == 3


def test_a_load_whose_first_results_differ_is_compared_with_float64_alone(monkeypatch):
    product = loads.ProductLoad("cpu")
    right, calls = product.call, []

    def noisy():
        calls.append(0)
        results = right()
        results["out"].flatten()[5] *= 1 + 2.0**-10 * (len(calls) % 2)  # the last bit
        return results

    monkeypatch.setattr(product, "call", noisy)
    product.prepare()
    step = product.step()
    assert step.changed is None and step.error < 1
    wrong = spoil(product, monkeypatch, lambda results: {"out": results["out"] + 1}, call=2)
    assert wrong.changed is None and wrong.error > 1


def test_a_tensor_that_does_not_repeat_itself_does_not_excuse_the_others(monkeypatch):
    """On an NVIDIA GPU dq is summed in any order."""
    attention = loads.AttentionLoad("cpu")
    right, calls = attention.call, []

    def noisy():
        calls.append(0)
        results = right()
        results["dq"][0, 0, -1, -1] *= 1 + 2.0**-10 * (len(calls) % 2)
        return results

    monkeypatch.setattr(attention, "call", noisy)
    attention.prepare()
    assert attention._fixed == ["out", "dk", "dv"]
    right_step = attention.step()
    assert right_step.changed == 0 and right_step.error < 1

    def change(results):
        results["dv"].view(torch.int16)[0, 0, 5, 5] ^= 1
        return results

    assert spoil(attention, monkeypatch, change).changed == 1
    wrong = spoil(attention, monkeypatch, lambda results: results | {"dq": results["dq"] + 1})
    assert wrong.error > 1


def test_each_tensor_has_its_turn_on_the_cpu(monkeypatch):
    """A GPU that compares wrong, and finds no error, does not hide one."""
    attention = loads.AttentionLoad("cpu")
    attention.prepare()
    monkeypatch.setattr(attention, "_error", lambda results, names: torch.zeros(()))
    right = attention.call
    monkeypatch.setattr(attention, "call", lambda: right() | {"dk": right()["dk"] + 1})
    errors = [attention.step().error for _ in range(4)]
    assert [error > 1 for error in errors] == [False, False, True, False]


def test_copies_are_compared_bit_for_bit(monkeypatch):
    copy = loads.CopyLoad("cpu")
    copy.prepare()
    right = copy.step()
    assert right.changed == 0 and right.error == 0
    copies = torch.Tensor.copy_

    def lossy(self, source):
        copies(self, source)
        if self is copy._target:
            self[-1] ^= 1
        return self

    monkeypatch.setattr(torch.Tensor, "copy_", lossy)
    assert copy.step().changed == copy._repeats + 1
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source: self)
    assert copy.step().changed == 1  # all are zeros, but for the origin


@pytest.mark.parametrize("fault", ["", "logprobs", "usage"])
def test_a_server_is_judged_with_all_requests_at_a_time(fault):
    with Server(fault=fault) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        load = loads.ServerLoad(f"http://127.0.0.1:{server.server_port}", "any")
        load.prepare()
        step = load.step()
        server.shutdown()
    assert step.results == 32
    assert (step.fault == "" and step.error < 1) if not fault else step.fault


def test_prompts_of_the_server_differ_and_fit_the_tiny_model():
    prompts = loads.server_prompts()
    assert len({tuple(prompt) for prompt in prompts}) == loads.REQUESTS == len(prompts)
    assert max(map(len, prompts)) + 24 <= 256 and max(map(max, prompts)) < 512


def soak_with(fault, folder, clock=None):
    """Run the recorder with a faulty worker until it ends; return the record."""
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
    assert checks["soak/whole"].state is State.FAILED and words in checks["soak/whole"].reason
    assert "sudo dmesg" in checks["soak/whole"].fix
    assert checks["soak/attention"].state is State.PASSED


class LeapingClock(Clock):
    """The machine's clock; each wait takes two hours more once a file is there."""

    def __init__(self, file):
        self.file, self.leaps = file, 0

    def now(self):
        return super().now() + 7200 * self.leaps

    def wait_until(self, moment):
        super().wait_until(moment)
        self.leaps += self.file.exists()


def test_a_real_hang_ends_with_what_ran_and_leaves_no_process(tmp_path, monkeypatch):
    """No clock of the machine's decides when: hours pass at once when the worker hangs."""
    hangs = tmp_path / "hangs"
    monkeypatch.setenv("HANGS", str(hangs))
    clock = LeapingClock(hangs)
    started, init = [], LineProcess.__init__

    def start(self, *arguments):
        init(self, *arguments)
        started.append(self.pid)

    monkeypatch.setattr(LineProcess, "__init__", start)
    reason = soak_with("hang", tmp_path, clock)["soak/whole"].reason
    assert "in product, its step 4" in reason and "no progress for 72" in reason  # 7200 s and a few
    assert len(started) == 2 and not any(Path("/proc", str(pid)).exists() for pid in started)


def test_a_wrong_number_is_found_by_the_whole_program(tmp_path, monkeypatch):
    """The worker writes, the recorder reads, and the check of that load alone fails."""
    folder = tmp_path / "records"

    def interrupt(row):
        if "wrong results" in row["event"]:
            raise KeyboardInterrupt

    keep = command.SoakRecord.keep
    monkeypatch.setattr(
        command.SoakRecord, "keep", lambda self, row: (keep(self, row), interrupt(row))
    )
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
    assert states["soak/product"] == "failed" and states["soak/copy"] != "failed"
    (product,) = [check for check in printed["checks"] if check["id"] == "soak/product"]
    assert "the first of them step 4" in product["reason"]


@pytest.fixture
def running(tmp_path):
    """The program itself, on the CPU, once its loads have begun; and the folder of its record."""
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
    """Wait until the table has a row of a load; yield the worker's number."""
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
    assert process.returncode == 1 and "by signal 9" in output
    (file,) = folder.glob("*.json")
    assert record.load(file).summary["failed"] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_program_writes_its_record(number, running):
    process, worker, folder = running
    process.send_signal(number)
    output, _ = process.communicate()
    assert process.returncode == 130 and "interrupted" in output
    (file,) = folder.glob("*.json")
    assert record.load(file).unfinished == 1
    assert not Path("/proc", str(worker)).exists()


def test_a_killed_program_leaves_its_record_and_no_worker(running):
    process, worker, folder = running
    pidfd = os.pidfd_open(worker)
    process.kill()
    process.wait()
    select.select([pidfd], [], [])  # readable when the worker has ended
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
    assert written.command == ["soak"] and written.subject == "harness" and not written.unfinished
    assert not written.proves("torch")
    assert "vllm is not installed" in done.stdout
    page = tmp_path / "page.html"
    done = program.run("report", file, "-o", page)
    assert done.returncode == 0 and "soak/whole" in page.read_text()


def test_what_cannot_be_loaded_is_told(tmp_path):
    done = program.run("soak", "--evidence", tmp_path / "x", without="torch")
    assert done.returncode == 3 and "torch is not installed" in done.stderr
    assert not (tmp_path / "x").exists()
    file = tmp_path / "file"
    file.touch()
    done = program.run("soak", "--evidence", file)
    assert done.returncode == 2 and "--evidence" in done.stderr
    done = program.run("soak", "--device", "cuda", "--evidence", tmp_path)
    if not torch.cuda.is_available():
        assert done.returncode == 3 and "torch sees no GPU" in " ".join(done.stdout.split())


def test_a_device_that_does_not_open_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "WORKER", "no_such_module")
    with pytest.raises(command.CheckFailed, match="ended with status 1: .*no_such_module"):
        command.open_device("cpu")
    (tmp_path / "silent.py").write_text("import time; time.sleep(10**6)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(command, "WORKER", "silent")
    with pytest.raises(command.CheckFailed, match="no answer in 0 s"):
        command.open_device("cpu", 0.1)


class FakeSession:
    """A mock of ServerSession: it lacks something, or its server does."""

    def __init__(self, device, flags, missing="", broken=""):
        self.device, self.flags, self.missing, self.broken = device, flags, missing, broken

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def need_vllm(self):
        if self.missing in ("vllm", self.device):
            raise command.CannotRun(f"{self.missing} is missing")

    @property
    def server(self):
        if self.broken:
            raise command.CheckFailed(self.broken)
        return SimpleNamespace(endpoint=SimpleNamespace(url="http://127.0.0.1:1", model="tiny"))


@pytest.mark.parametrize(
    "lack, expected",
    [
        ({"missing": "vllm"}, ("", "", "vllm is missing")),
        ({"missing": "cpu"}, ("", "", "cpu is missing")),
        ({"broken": "no answer within 900 s"}, ("", "", "no answer within 900 s")),
        ({}, ("http://127.0.0.1:1", "tiny", "")),
    ],
)
def test_a_server_that_does_not_start_is_a_load_that_does_not_run(lack, expected, monkeypatch):
    monkeypatch.setattr(
        command, "ServerSession", lambda device, flags: FakeSession(device, flags, **lack)
    )
    monkeypatch.setattr(command, "open_device", lambda device: device)
    with command.serve_tiny_model("cpu", lambda line: None) as answer:
        assert answer == expected


def test_the_worker_takes_turns_with_a_server(tmp_path):
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        options = {"device": "cpu", "turn_seconds": 0.01, "url": url, "model": "any"}
        worker = LineProcess(["-m", command.WORKER, json.dumps(options)], tmp_path / "log")
        messages = []
        while not any(message.get("turn") == 4 for message in messages):
            lines = worker.wait_for_lines(600)
            assert lines, (tmp_path / "log").read_text()
            messages += map(json.loads, lines)
        assert worker.stop(600)
        server.shutdown()
    turns = [message["load"] for message in messages if "turn" in message]
    assert turns[:5] == ["attention", "product", "copy", "server", "attention"]
    (step, *_) = [each for each in messages if each.get("load") == "server" and "step" in each]
    assert step["results"] == 32 and step["error"] < 1 and step["rate"] > 0
    assert worker.status() == 0


def test_the_checks_are_listed():
    listed = json.loads(CliRunner().invoke(cli.app, ["list", "--json", "--only", "soak"]).stdout)
    assert {"soak/whole", "soak/server", "soak/drift"} <= {check["id"] for check in listed}
    assert all("https://" in check["why"] for check in listed)


def test_a_disk_that_is_full_ends_it_with_the_results_so_far(tmp_path, monkeypatch):
    def refuse(self, row):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command.SoakRecord, "keep", refuse)
    done = CliRunner().invoke(cli.app, ["soak", "--device", "cpu", "--evidence", str(tmp_path)])
    assert done.exit_code == 1 and "No space left on device" in done.output
    assert "nothing more is recorded" in done.output and "soak/kernel" in done.output
