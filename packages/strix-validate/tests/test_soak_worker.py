# SPDX-License-Identifier: BSD-3-Clause
"""The loads of a soak on the CPU, with faults planted in torch, and the load of a server."""

import itertools
import json
import threading
from types import SimpleNamespace

import pytest
import torch
from strix_validate.soak import command, loads
from strix_validate.soak.processes import LineProcess
from trained_server import Server


@pytest.fixture(autouse=True)
def short_steps(monkeypatch):
    monkeypatch.setattr(loads, "STEP_SECONDS", 0.01)


@pytest.fixture(params=[loads.AttentionLoad, loads.ProductLoad], ids=["attention", "product"])
def load(request):
    prepared = request.param("cpu")
    prepared.prepare()
    return prepared


def test_right_results_are_right(load):
    step = load.step()
    assert step.changed == 0
    assert 0 < step.error < 1
    assert not step.fault
    assert step.results > 1
    assert step.work == load._work * step.results


def spoil(load, monkeypatch, change, call=2):
    """Run a step of a load, change the results of one call in it, and return the step."""
    correct_call = load.call
    numbers = itertools.count(1)

    def wrong_call():
        results = correct_call()
        return change(results) if next(numbers) == call else results

    monkeypatch.setattr(load, "call", wrong_call)
    load._repeats = 5
    return load.step()


def test_one_changed_bit_in_one_result_of_many_is_seen(load, monkeypatch):
    def change(results):
        results["out"].view(torch.int16).flatten()[5] ^= 1
        return results

    step = spoil(load, monkeypatch, change)
    assert step.changed == 1
    assert step.error < 1


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
    """The faulty call returns the memory of the previous call, whose numbers were correct."""
    correct_call = load.call
    earlier = []

    def stale():
        earlier.append(correct_call() if len(earlier) < 2 else earlier[-1])
        return earlier[-1]

    monkeypatch.setattr(load, "call", stale)
    load._repeats = 5
    assert load.step().changed == 3


def test_a_load_whose_first_results_differ_is_compared_with_float64_alone(monkeypatch):
    product = loads.ProductLoad("cpu")
    correct_call = product.call
    numbers = itertools.count(1)

    def noisy():
        results = correct_call()
        results["out"].flatten()[5] *= 1 + 2.0**-10 * (next(numbers) % 2)  # the last bit
        return results

    monkeypatch.setattr(product, "call", noisy)
    product.prepare()
    step = product.step()
    assert step.changed is None
    assert step.error < 1
    step = spoil(product, monkeypatch, lambda results: {"out": results["out"] + 1}, call=2)
    assert step.changed is None
    assert step.error > 1


def test_a_tensor_that_does_not_repeat_itself_does_not_excuse_the_others(monkeypatch):
    """dq may change from call to call, because an NVIDIA GPU sums it in any order."""
    attention = loads.AttentionLoad("cpu")
    correct_call = attention.call
    numbers = itertools.count(1)

    def noisy():
        results = correct_call()
        results["dq"][0, 0, -1, -1] *= 1 + 2.0**-10 * (next(numbers) % 2)
        return results

    monkeypatch.setattr(attention, "call", noisy)
    attention.prepare()
    assert attention._fixed == ["out", "dk", "dv"]
    step = attention.step()
    assert step.changed == 0
    assert step.error < 1

    def change(results):
        results["dv"].view(torch.int16)[0, 0, 5, 5] ^= 1
        return results

    assert spoil(attention, monkeypatch, change).changed == 1
    step = spoil(attention, monkeypatch, lambda results: results | {"dq": results["dq"] + 1})
    assert step.error > 1


def test_each_tensor_has_its_turn_on_the_cpu(monkeypatch):
    """The CPU finds an error even if the GPU's own comparisons wrongly find none."""
    attention = loads.AttentionLoad("cpu")
    attention.prepare()
    monkeypatch.setattr(attention, "_error", lambda results, names: torch.zeros(()))
    correct_call = attention.call
    monkeypatch.setattr(
        attention, "call", lambda: correct_call() | {"dk": correct_call()["dk"] + 1}
    )
    errors = [attention.step().error for _ in range(4)]
    assert [error > 1 for error in errors] == [False, False, True, False]


def test_copies_are_compared_bit_for_bit(monkeypatch):
    copy = loads.CopyLoad("cpu")
    copy.prepare()
    step = copy.step()
    assert step.changed == 0
    assert step.error == 0
    correct_copy = torch.Tensor.copy_

    def lossy(self, source):
        correct_copy(self, source)
        if self is copy._target:
            self[-1] ^= 1
        return self

    monkeypatch.setattr(torch.Tensor, "copy_", lossy)
    assert copy.step().changed == copy._repeats + 1
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source: self)
    assert copy.step().changed == 1  # without copies, all tensors except the original are zeros


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
    prompts = loads.make_prompts()
    assert len({tuple(prompt) for prompt in prompts}) == loads.REQUESTS == len(prompts)
    assert max(map(len, prompts)) + 24 <= 256
    assert max(map(max, prompts)) < 512


class FakeSession:
    """A mock of ServerSession. A requirement may be missing, or the server may be broken."""

    def __init__(self, device, flags, missing="", broken=""):
        self.device = device
        self.flags = flags
        self.missing = missing
        self.broken = broken

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


def test_the_server_starts_beside_other_programs():
    """vLLM's own default requires 92 % of the memory to be free, even for a small KV cache."""
    flags = dict(zip(command.SERVER_FLAGS[::2], command.SERVER_FLAGS[1::2], strict=True))
    assert float(flags["--gpu-memory-utilization"]) < 0.1


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
    steps = [m for m in messages if m.get("load") == "server" and "step" in m]
    step = steps[0]
    assert step["results"] == 32
    assert step["error"] < 1
    assert step["rate"] > 0
    assert worker.status() == 0
