# SPDX-License-Identifier: BSD-3-Clause
"""The logic of the serving tier, with a mock of vLLM that is correct or has faults.

test_serve_url.py tests the functions that judge answers.
"""

import importlib
import json
import math
import subprocess
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from strix_validate import skips
from strix_validate.checks import Check, CheckFailed, RunOptions, State
from strix_validate.reporting.record import Device
from strix_validate.serving import endpoint, speed, tiny_llama, tiny_models, vllm_server
from strix_validate.tiers import run_each, serve

ALL_MODELS = {f"model-{name}" for name in tiny_models.MODELS}
#: Seconds to wait for an event that comes, and for an event that never comes. No verdict depends on
#: these times.
LONG, SHORT = 600, 0.1
#: Checks that need no server, and checks that need one.
OFFLINE = {"offline-repeats", "offline-logits"} | ALL_MODELS
SERVED = set(serve.SESSION_CHECKS) - OFFLINE
FAKE = Path(__file__).resolve().parent / "fake_vllm"


@pytest.fixture
def started(monkeypatch):
    """A list of the server processes that were started."""
    servers = []
    popen = vllm_server.subprocess.Popen

    def start(command, **options):
        process = popen(command, **options)
        if "serve" in command:
            servers.append(process)
        return process

    monkeypatch.setattr(vllm_server.subprocess, "Popen", start)
    return servers


@pytest.fixture
def examine(monkeypatch, tmp_path, started):
    """A function that runs checks against the mock with faults, and returns results by name."""
    program = tmp_path / "vllm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE / "vllm.py"} "$@"\n')
    program.chmod(0o755)
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.setattr(vllm_server.shutil, "which", lambda name, path: str(program))
    monkeypatch.setattr(vllm_server.importlib.util, "find_spec", lambda name: True)
    # monkeypatch restores sys.modules after the test, because later tests must not import the mock.
    monkeypatch.setitem(sys.modules, "vllm", None)
    del sys.modules["vllm"]
    vllm = importlib.import_module("vllm")
    generate = vllm_server.in_child

    def child(task, folder, *model):
        if task == "generate":
            return generate(task, folder, *model)
        if task == "score":
            tokens = json.loads(model[0])
            likeliest = vllm.generate_tokens(tiny_llama.PROMPT, len(tokens))
            pairs = zip(tokens, likeliest, strict=True)
            logprobs = [vllm.RIGHT if token == likely else vllm.OTHER for token, likely in pairs]
            return {"logprobs": logprobs, "best": [math.log(0.5)] * len(logprobs)}
        folder.mkdir()
        logprobs = [math.log(0.5 / 511)] * 512
        logprobs[vllm.likeliest(tiny_llama.PROMPT)] = math.log(0.5)
        return {"logprobs": logprobs}

    monkeypatch.setattr(vllm_server, "in_child", child)

    def run(faults, names=tuple(serve.SESSION_CHECKS)):
        monkeypatch.setenv("FAKE_VLLM", faults)
        monkeypatch.setattr(serve, "FIRST_TOKEN_LIMIT", SHORT if "latency" in faults else LONG)
        start_limit = 2 if faults == "hangs" else LONG
        stop_limit = LONG
        if "stays" in faults:
            stop_limit = SHORT
        elif "orphan" in faults:
            stop_limit = 10
        with vllm_server.ServerSession("cuda", start_limit, stop_limit) as session:
            bodies = {
                Check(f"serve/{name}"): serve.bind_session(body, session)
                for name, body in serve.SESSION_CHECKS.items()
            }
            checks = [c for c in serve.checks() if c.id.removeprefix("serve/") in names]
            results = list(run_each(checks, RunOptions(device="cuda"), bodies))
        assert all(server.returncode is not None for server in started)
        return {result.check.id.removeprefix("serve/"): result for result in results}

    return run


def test_a_right_server_passes(examine, started):
    """The server captures graphs. The check `completion` compares them with eager decoding."""
    results = examine("")
    assert {r.state for r in results.values()} == {State.PASSED}, results
    assert results["attention-backend"].measured == {"backend": "TRITON_ATTN"}
    assert "seconds" in results["start"].measured
    (server,) = started
    command = server.args
    assert "--enforce-eager" not in command
    assert f"--gpu-memory-utilization={tiny_llama.SHARE}" in command
    captured = json.loads(command[command.index("--compilation-config") + 1])
    assert captured["cudagraph_mode"] == "FULL_DECODE_ONLY"


ODD = list(tiny_models.MODELS)[1::2]
EVEN = list(tiny_models.MODELS)[::2]
#: For each group of faults that are planted together, a part of each failing check's reason.
FAULTS = {
    "prefix no-stop template slow-backend no-graphs stays": {
        "prefix": "less likely than another",
        "finish-reason": "expected 'stop'",
        "chat": "prompt [5, 7, 4, 11, 4]",
        "attention-backend": "ROCM_ATTN",
        "graphs": "without graphs",
        "stop": "after SIGTERM",
    },
    "finish silent latency orphan": {
        "finish-reason": "expected 'length'",
        "attention-backend": "names no attention backend",
        "latency": "s to the first token",
        "stop": "left a process behind",
    },
    "decode-logprobs": dict.fromkeys(("decode", "prefill", "prefix", "together", "abort"), "0.20")
    | {"probabilities": "sum to"},
    "garbage": dict.fromkeys(
        (
            "completion",
            "decode",
            "prefill",
            "prefix",
            "together",
            "abort",
            "finish-reason",
            "probabilities",
        ),
        "",
    ),
    "http": dict.fromkeys(SERVED - {"start", "graphs", "attention-backend", "stop"}, "HTTP 500"),
    "dies": dict.fromkeys(SERVED, "Engine core initialization failed"),
    "crash": dict.fromkeys({"completion"} | OFFLINE, "Failed to infer device type"),
    "repeats": dict.fromkeys(OFFLINE - {"offline-logits"}, "different tokens"),
    f"logits {' '.join(ODD)}": {"offline-logits": "off by 0.2"}
    | {f"model-{name}": "off by 0.4" for name in ODD},
    " ".join(EVEN): {f"model-{name}": "off by 0.4" for name in EVEN},
}


@pytest.mark.parametrize("faults", FAULTS)
def test_each_fault_is_caught(faults, examine):
    failing = FAULTS[faults]
    # If all failing checks need a server, only such checks run. Otherwise only the offline checks
    # and the failing checks run.
    results = examine(faults, SERVED if failing.keys() <= SERVED else OFFLINE | failing.keys())
    assert {n for n, r in results.items() if r.state is not State.PASSED} == failing.keys(), results
    assert all(results[name].state is State.FAILED for name in failing)
    assert all(reason in results[name].reason for name, reason in failing.items()), results


def test_a_start_that_hangs_is_waited_for_once(examine, started):
    results = examine("hangs", SERVED)
    assert {r.reason for r in results.values()} == {results["start"].reason}
    assert "no answer within 2 s" in results["start"].reason
    assert len(started) == 1


def test_without_the_plugin_for_gguf_its_model_is_skipped(examine, monkeypatch):
    def find_spec(name):
        return None if name == "vllm_gguf_plugin" else True

    monkeypatch.setattr(vllm_server.importlib.util, "find_spec", find_spec)
    results = examine("", {"model-gguf", "model-bf16"})
    assert results["model-bf16"].state is State.PASSED
    skipped = skips.judge(results["model-gguf"], Device(type="gpu", architecture="gfx1151"))
    assert skipped.state is State.SKIPPED
    assert results["model-gguf"].reason == "vllm_gguf_plugin is not installed"


@pytest.mark.parametrize("device, missing", [("cuda", "vllm"), ("cpu", None)])
def test_without_vllm_or_gpu_it_is_skipped_with_the_reason(device, missing, monkeypatch):
    def find_spec(name):
        return None if name == missing else True

    monkeypatch.setattr(vllm_server.importlib.util, "find_spec", find_spec)
    options = RunOptions(device=device)
    results = list(serve.run([c for c in serve.checks() if serve.applies(c, options)], options))
    assert {result.state for result in results} == {State.SKIPPED}
    for result in results:
        assert result.reason in (
            "vllm is not installed",
            "strix-validate starts vLLM only on a GPU, and this run uses no GPU",
        )
        assert skips.judge(result, Device(type="cpu", architecture="x86_64")).state is State.SKIPPED


def test_a_folder_of_the_users_is_served(examine, started, tmp_path):
    """vLLM chooses the model's length and dtype. The server is judged like a user's own server."""
    checks = [check for check in serve.checks() if check.id == "serve/url-usage"]
    (result,) = serve.run(checks, RunOptions(device="cuda", model=str(tmp_path)))
    assert result.state is State.PASSED
    (server,) = started
    assert server.args[2] == str(tmp_path)
    assert "--max-model-len" not in server.args


def test_a_key_of_another_server_is_not_required(monkeypatch, tmp_path):
    """VLLM_API_KEY is not passed on: `vllm serve` would refuse requests without this key."""
    monkeypatch.setenv("VLLM_API_KEY", "of another server")
    variables = {}

    def start(command, env, **options):
        del command, options
        variables.update(env)
        return SimpleNamespace(poll=lambda: 1)

    monkeypatch.setattr(vllm_server.subprocess, "Popen", start)
    server = vllm_server.VllmServer(tmp_path, tmp_path / "log", [])
    with pytest.raises(CheckFailed, match="ended with status 1"):
        server.start(1)
    assert "PATH" in variables
    assert "VLLM_API_KEY" not in variables


@pytest.mark.parametrize("is_beside_python", [True, False])
def test_the_vllm_of_this_environment_is_started(is_beside_python, monkeypatch, tmp_path):
    """It is the program beside this Python or, if there is none, that of PATH."""
    program = tmp_path / "vllm"
    if is_beside_python:
        program.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    commands = []

    def start(command, **options):
        del options
        commands.append(command)
        return SimpleNamespace(poll=lambda: 1)

    monkeypatch.setattr(vllm_server.subprocess, "Popen", start)
    server = vllm_server.VllmServer(tmp_path, tmp_path / "log", [])
    with pytest.raises(CheckFailed, match="ended with status 1"):
        server.start(1)
    assert commands[0][0] == (str(program) if is_beside_python else "vllm")


def test_a_task_that_hangs_fails_with_the_end_of_its_log(monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho first kernel >&2\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(vllm_server, "_START_LIMIT", 1)
    with pytest.raises(CheckFailed, match="make did not end within 1 s: first kernel"):
        vllm_server.in_child("make", tmp_path)


#: The result of `vllm bench serve` in vLLM 0.33.
BENCH = {
    "completed": 32,
    "failed": 0,
    "request_throughput": 2.5,
    "output_throughput": 160.0,
    "mean_ttft_ms": 80.5,
    "median_ttft_ms": 75.0,
    "p99_ttft_ms": 200.0,
    "mean_tpot_ms": 21.0,
    "model_id": "any",
    "ttfts": [0.08],
}
#: A mock of the command vllm: it checks its arguments, writes a text and exits with a status.
BENCH_MOCK = """#!{python}
import pathlib, sys
arguments = sys.argv[1:]
option = lambda name: arguments[arguments.index(name) + 1]
assert arguments[:2] == ["bench", "serve"] and "--save-result" in arguments
assert option("--base-url").startswith("http://127.0.0.1") and option("--model") == "any"
if {text!r}:
    pathlib.Path(option("--result-dir"), option("--result-filename")).write_text({text!r})
sys.exit({status!r})
"""


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """A function that installs the mock command."""

    def install(text, status=0):
        program = tmp_path / "bin" / "vllm"
        program.parent.mkdir(exist_ok=True)
        program.write_text(BENCH_MOCK.format(python=sys.executable, text=text, status=status))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent))

    return install


SERVER = endpoint.Endpoint("http://127.0.0.1:9", "any")


def test_the_numbers_of_vllm_bench_serve_are_read(bench):
    bench(json.dumps(BENCH))
    measured = speed.bench_serve(SERVER)
    assert measured["output_throughput"] == 160.0
    assert measured["median_ttft_ms"] == 75.0
    assert "ttfts" not in measured
    assert "model_id" not in measured


def test_the_tokenizer_of_a_served_folder_is_in_the_folder(monkeypatch, tmp_path):
    """The tokenizer of `vllm bench serve` is the folder, because the model has another name."""
    calls = []

    def execute(command, **options):
        del options
        option = dict(pairwise(command))
        calls.append((option["--model"], option["--tokenizer"]))
        Path(option["--result-dir"], option["--result-filename"]).write_text(json.dumps(BENCH))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(speed, "subprocess", SimpleNamespace(run=execute))
    monkeypatch.setattr(speed, "shutil", SimpleNamespace(which=lambda name, path=None: name))
    server = SimpleNamespace(endpoint=endpoint.Endpoint("http://127.0.0.1:9", "tiny"))
    session = SimpleNamespace(need_vllm=lambda: None, server=server)
    folder = str(tmp_path)
    monkeypatch.setattr(serve, "ServerSession", lambda *_, **__: nullcontext(session))
    for options in (
        RunOptions(device="cuda", model=folder),
        RunOptions(url="http://127.0.0.1:9", model="Qwen/Qwen3-8B"),
    ):
        (result,) = serve.run([Check("serve/url-bench")], options)
        assert result.state is State.PASSED, result.reason
    assert calls == [("tiny", folder), ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B")]


def test_an_environment_that_is_not_active_has_its_own_vllm(bench, monkeypatch, tmp_path):
    bench(json.dumps(BENCH))
    monkeypatch.setenv("PATH", "")
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    assert speed.bench_serve(SERVER)["output_throughput"] == 160.0


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1/"])
def test_vllm_bench_serve_adds_v1_itself(url, monkeypatch):
    commands = []

    def execute(command, **options):
        del options
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="")

    monkeypatch.setattr(speed, "subprocess", SimpleNamespace(run=execute))
    monkeypatch.setattr(speed, "shutil", SimpleNamespace(which=lambda name, path=None: name))
    with pytest.raises(CheckFailed, match="ended with status 1"):
        speed.bench_serve(endpoint.Endpoint(url, "any"))
    (command,) = commands
    assert command[command.index("--base-url") + 1] == "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (json.dumps(BENCH | {"completed": 31, "failed": 1}), 0, "31 of 32 requests"),
        ("", 0, "wrote no result"),
        ("[1", 0, "wrote no result"),
        ('{"completed": "many"}', 0, "wrote no result"),
        ("", "no tokenizer of that name", "ended with status 1: no tokenizer of that name"),
    ],
)
def test_what_vllm_bench_serve_cannot_measure_fails(text, status, reason, bench):
    bench(text, status)
    with pytest.raises(CheckFailed, match=reason):
        speed.bench_serve(SERVER)


def test_a_server_that_is_not_there_fails_with_its_address():
    options = RunOptions(url="http://127.0.0.1:9", model="any")
    (result, *_) = serve.run([c for c in serve.checks() if serve.applies(c, options)], options)
    assert result.state is State.FAILED
    assert "http://127.0.0.1:9 does not answer" in result.reason
