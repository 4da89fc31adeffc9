# SPDX-License-Identifier: BSD-3-Clause
"""The serving tier's logic, with a stand-in for vLLM and each fault of it."""

import json
import math
import sys
from pathlib import Path

import pytest
from strix_validate import skips, tiny_llama, tiny_models
from strix_validate.checks import Options, State
from strix_validate.skips import Machine
from strix_validate.tiers import run_each, serve

ALL_MODELS = {f"model-{name}" for name in tiny_models.MODELS}
FAKE = Path(__file__).resolve().parent / "fake_vllm"


@pytest.fixture
def examine(monkeypatch, tmp_path):
    """Runs every check against the stand-in with a fault; results by name."""
    program = tmp_path / "vllm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE / "vllm.py"} "$@"\n')
    program.chmod(0o755)
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.setattr(serve.shutil, "which", lambda name, path: str(program))
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: True)
    generate = serve._child

    def child(task, folder, *model):
        if task == "generate":
            return generate(task, folder, *model)
        folder.mkdir()
        logprobs = [math.log(0.5 / 511)] * 512
        logprobs[sum(tiny_llama.PROMPT) % 512] = math.log(0.5)
        return {"logprobs": logprobs}

    monkeypatch.setattr(serve, "_child", child)

    def run(fault):
        monkeypatch.setenv("FAKE_VLLM", fault)
        with serve.Session("cuda", start_limit=5, stop_limit=1) as session:
            bodies = {
                f"serve/{name}": lambda options, body=body: body(session)
                for name, body in serve.BODIES.items()
            }
            results = list(run_each(serve.checks(), Options(device="cuda"), bodies))
        return {result.check.id.removeprefix("serve/"): result for result in results}

    return run


def test_a_right_server_passes(examine):
    found = examine("")
    assert {r.state for r in found.values()} == {State.PASSED}, found
    assert found["attention-backend"].measured == {"backend": "TRITON_ATTN"}
    assert found["start"].measured["seconds"] > 0


@pytest.mark.parametrize(
    "fault, failing, said",
    [
        ("repeats", {"offline-repeats"} | ALL_MODELS, "different tokens"),
        ("logits", {"offline-logits"}, "off by 0.2"),
        ("tokens", {"completion", "streaming"}, "offline"),
        ("http", {"completion", "streaming"}, "HTTP 500"),
        ("lost", {"streaming"}, "offline"),
        ("one-part", {"streaming"}, "one part"),
        ("no-done", {"streaming"}, r"without [DONE]"),
        ("slow-backend", {"attention-backend"}, "ROCM_ATTN"),
        ("silent", {"attention-backend"}, "names no attention backend"),
        ("stays", {"stop"}, "after SIGTERM"),
        ("orphan", {"stop"}, "left a process behind"),
        *((name, {f"model-{name}"}, "off by 0.4") for name in tiny_models.MODELS),
        ("no-graphs", {"graphs"}, "without graphs"),
        ("dies", {"start", "graphs", "attention-backend", "completion", "streaming", "stop"},
         "Engine core initialization failed"),
        ("crash", {"offline-repeats", "offline-logits", "completion", "streaming"} | ALL_MODELS,
         "Failed to infer device type"),
    ],
)  # fmt: skip
def test_each_fault_is_caught(fault, failing, said, examine):
    found = examine(fault)
    assert {name for name, r in found.items() if r.state is not State.PASSED} == failing, found
    assert all(found[name].state is State.FAILED for name in failing)
    assert all(said in found[name].reason for name in failing), found


def test_a_start_that_hangs_is_waited_for_once(examine):
    found = examine("hangs")
    assert "no answer within 5 s" in found["start"].reason
    assert found["stop"].seconds < 1


@pytest.mark.parametrize("device, missing", [("cuda", "vllm"), ("cpu", None)])
def test_without_vllm_or_gpu_it_is_skipped_with_the_reason(device, missing, monkeypatch):
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: name != missing or None)
    results = list(serve.run(serve.checks(), Options(device=device)))
    assert {result.state for result in results} == {State.SKIPPED}
    for result in results:
        assert result.reason in ("vllm is not installed",
                                 "vLLM serves only on a GPU here, and torch sees none")  # fmt: skip
        assert skips.judge(result, Machine()).state is State.SKIPPED


def test_the_server_captures_graphs(examine, monkeypatch):
    """So that "completion" compares graphs with the eager decoding of "offline"."""
    started = []
    popen = serve.subprocess.Popen
    monkeypatch.setattr(
        serve.subprocess, "Popen", lambda *a, **o: started.append(a[0]) or popen(*a, **o)
    )
    examine("")
    (command,) = [words for words in started if "serve" in words]
    assert "--enforce-eager" not in command
    captured = json.loads(command[command.index("--compilation-config") + 1])
    assert captured["cudagraph_mode"] == "FULL_DECODE_ONLY"
