# SPDX-License-Identifier: BSD-3-Clause
"""The tier `libraries` can fail: each kind of check catches planted faults and crashes."""

import subprocess
import time
from pathlib import Path

import pytest
import torch
from broken_process import CHECKS
from strix_validate.checks import Result, RunOptions, State
from strix_validate.libraries import convolution, gemm, host_memory, inductor, races
from strix_validate.runner import run
from strix_validate.tiers import isolated, libraries, run_each

#: On a machine with a GPU, the faults are planted in the GPU's results.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
multiply = gemm.multiply
convolve = convolution.convolve
factorise = races.factorise
gradient = races.gradient


def judge(module, id_) -> Result:
    (check,) = [check for check in module.checks() if check.id == id_]
    (result,) = run_each([check], RunOptions(device=DEVICE), module.checks())
    return result


def wrong_tile(x, weight, out):
    multiply(x, weight, out)
    out[-1:, -16:] = out[-1:, :16].clone()


def unwritten(x, weight, out):
    multiply(x[:-1], weight, out[:-1])


def short_sum(x, weight, out):
    multiply(x[:, :-1], weight[:-1], out)


def narrow_sum(x, weight, out):
    """Round the sum to the dtype after each step."""
    out.zero_()
    for i in range(x.shape[1]):
        out += x[:, i : i + 1] * weight[i : i + 1]


def tf32(shape, x, weight, bias):
    """Cut off the last 13 bits of float32, as NVIDIA's TF32 does."""
    x, weight = ((t.view(torch.int32) & ~0x1FFF).view(torch.float32) for t in (x, weight))
    return convolve(shape, x, weight, bias)


def unpadded(shape, x, weight, bias):
    out = convolve(shape, x, weight, bias)
    return torch.cat([out[..., :-1], out[..., -1:] * 0], -1)


def detached(shape, x, weight, bias):
    return convolve(shape, x, weight * 0 + weight.detach(), bias)


def lagging(kind, a):
    """Scale part of one factor's column wrongly, as a wave did in rocSOLVER's potf2."""
    first, *factors = factorise(kind, a)
    first = first.clone()
    first[-1, -4:, 3] *= 1.01
    return first, *factors


def without_pivots(kind, a):
    _, *factors = factorise(kind, a)
    return torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a), *factors


def lost_summand(tokens, incoming):
    """Return the gradient of an embedding, without the terms of two tokens in one column."""
    incoming[-1, 5] = 0
    incoming[0, 5] = 0
    return gradient(tokens, incoming)


def neighbour(tokens, incoming):
    return gradient(tokens.roll(1), incoming)


def stale(view, copies={}):  # noqa: B006 the fault is that it remembers the first call's data
    return torch.bitwise_not(copies.setdefault(view.numel(), view.clone()))


def one_word(view):
    inverted = torch.bitwise_not(view)
    inverted[-1] ^= 1
    return inverted


#: By name: a module, its function, the broken function, and the check that must fail.
FAULTS = {
    "a tile in the wrong place": (gemm, "multiply", wrong_tile, "gemm/blaslt/qkv-bfloat16"),
    "rows that are never written": (gemm, "multiply", unwritten, "gemm/blaslt/head-float32"),
    "the last term of a sum left out": (gemm, "multiply", short_sum, "gemm/blaslt/square-float32"),
    "a sum rounded to the dtype after each step": (
        gemm,
        "multiply",
        narrow_sum,
        "gemm/blaslt/down-float16",
    ),
    "nothing computed": (
        gemm,
        "multiply",
        lambda x, weight, out: None,
        "gemm/blaslt/thin-k64-widened-bfloat16",
    ),
    "TF32 used instead of float32": (convolution, "convolve", tf32, "conv/native/2d-same-float32"),
    "the last column of the output is zero": (
        convolution,
        "convolve",
        unpadded,
        "conv/native/1d-speech-float16",
    ),
    "no gradient for weights": (convolution, "convolve", detached, "conv/native/3d-same-bfloat16"),
    "a wrong part of one column of one factor": (
        races,
        "factorise",
        lagging,
        "factors/cholesky-float32",
    ),
    "a wrong eigenvector": (races, "factorise", lagging, "factors/eigh-float64"),
    "a wrong singular vector": (races, "factorise", lagging, "factors/svd-float32"),
    "row exchanges left out": (
        races,
        "factorise",
        without_pivots,
        "factors/lu-float64",
    ),
    "factors of another matrix": (
        races,
        "factorise",
        lambda k, a: factorise(k, a.roll(1, -1)),
        "factors/qr-float32",
    ),
    **{
        f"{name} in {kind}": (races, "gradient", broken, f"gradients/embedding-{kind}")
        for name, broken in (("a lost summand", lost_summand), ("a neighbour's sum", neighbour))
        for kind in ("float32", "bfloat16")
    },
    "data of the first call read again": (host_memory, "read", stale, "host-memory/pinned-read"),
    "one bit read wrongly": (host_memory, "read", one_word, "host-memory/managed-read"),
    "a store that is lost": (
        host_memory,
        "write",
        lambda view, values: None,
        "host-memory/pinned-write",
    ),
    "weights multiplied in the wrong order of rows": (
        host_memory,
        "multiply",
        lambda x, w: x @ w.flip(0).T,
        "host-memory/managed-weights",
    ),
}
#: Part of a failed check's reason, by the group in the check's id.
REASONS = {"factors": "rows: a product of factors differs", "gradients": "sums of whole numbers"}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_caught(name, monkeypatch):
    module, function, broken, check = FAULTS[name]
    assert judge(module, check).state is State.PASSED
    monkeypatch.setattr(module, function, broken)
    failed = judge(module, check)
    assert failed.state is State.FAILED
    assert REASONS.get(check.split("/")[0], "") in failed.reason


@pytest.mark.parametrize("kind", ["cholesky", "eigh", "svd", "lu", "qr"])
def test_a_factorisation_is_that_of_its_name(kind, monkeypatch):
    original = getattr(torch.linalg, kind)
    calls = []

    def record(a):
        calls.append(kind)
        return original(a)

    monkeypatch.setattr(races, kind, record)
    factorise(kind, torch.eye(2))
    assert calls == [kind]


def test_wrong_or_missing_kernels_of_inductor_are_caught(monkeypatch):
    monkeypatch.setattr(inductor.shutil, "which", lambda name: "g++")
    monkeypatch.setattr(torch, "compile", lambda function: function)
    missing = judge(inductor, "compile/inductor-float32")
    assert missing.state is State.FAILED
    assert "no kernel" in missing.reason

    def compiled(function):
        def scaled(*inputs):
            from torch._inductor import metrics

            metrics.generated_kernel_count += 1
            return function(*inputs) * 1.01

        return scaled

    monkeypatch.setattr(torch, "compile", compiled)
    failed = judge(inductor, "compile/inductor-float16")
    assert failed.state is State.FAILED
    assert "wrong: out" in failed.reason


def test_failing_convolution_names_the_issue_and_the_remedy(monkeypatch):
    (check,) = [c for c in convolution.checks() if c.id == "conv/normal/2d-same-float16"]
    failed = Result(check, State.FAILED, "RuntimeError: miopenStatusUnknownError")
    monkeypatch.setattr(torch.version, "hip", "10.0")
    result = convolution.add_remedy(failed)
    assert result.state is State.FAILED
    assert "MIOpen/issues/3964" in result.reason
    assert "MIOPEN_FIND_MODE=FAST" in result.fix
    assert "torch.backends.cudnn.enabled" in result.fix
    # MIOPEN_FIND_MODE is no remedy if the environment's activation has set it already.
    (default,) = [c for c in convolution.checks() if c.id == "conv/default/2d-same-float16"]
    for mode in ("FAST", "fast", "2"):
        monkeypatch.setenv("MIOPEN_FIND_MODE", mode)
        result = convolution.add_remedy(Result(default, State.FAILED, failed.reason))
        assert result.fix == "torch.backends.cudnn.enabled = False"
    passed = Result(check, State.PASSED)
    assert convolution.add_remedy(passed) == passed
    monkeypatch.setattr(torch.version, "hip", None)
    assert convolution.add_remedy(failed) == failed


def test_titles_name_only_find_modes_that_miopen_has():
    titles = {check.id: check.title for check in convolution.checks()}
    case = "1d-speech-float32"
    assert titles[f"conv/native/{case}"] == f"convolution, torch's own kernels: {case}"
    assert titles[f"conv/default/{case}"] == f"convolution, MIOpen's own settings: {case}"
    assert titles[f"conv/fast/{case}"] == f"convolution, MIOpen's find mode fast: {case}"


def test_modes_of_miopen_reach_its_process(monkeypatch):
    calls = []

    def mock(module, checks, options, environment=None):
        calls.append((module.rsplit(".", 1)[1], environment))
        return iter([Result(check, State.PASSED) for check in checks])

    monkeypatch.setattr(isolated, "run", mock)
    results = list(libraries.run(libraries.checks(), RunOptions()))
    assert len(results) == len(libraries.checks())
    modes = [environment for module, environment in calls if module == "convolution"]
    assert {"MIOPEN_FIND_MODE": "FAST"} in modes
    assert len(modes) == len(convolution.MODES)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("crash", "status -11"), ("hang", "no answer within"), ("slow", ""), ("fail", "wrong")],
)
def test_a_broken_process_fails_one_check_only(fault, reason, monkeypatch, tmp_path):
    mark = tmp_path / "waits"

    class Impatient(subprocess.Popen):
        """A process whose timeout expires when it hangs or is slow, on a machine of any speed."""

        def wait(self, timeout=None):
            while timeout and self.poll() is None:
                if mark.exists():
                    if fault == "slow":
                        mark.unlink()
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(0.05)
            mark.unlink(missing_ok=True)
            return super().wait()

    monkeypatch.setattr(isolated.subprocess, "Popen", Impatient)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    environment = {"FAULT": fault, "MARK": str(mark)}
    results = list(isolated.run("broken_process", CHECKS, RunOptions(), environment))
    assert [r.check for r in results] == CHECKS
    # A slow child may continue, because it has sent an answer since the last timeout.
    second_state = State.PASSED if fault == "slow" else State.FAILED
    assert [r.state for r in results] == [State.PASSED, second_state, State.PASSED, State.PASSED]
    assert reason in results[1].reason


@pytest.mark.parametrize(
    ("device", "name", "rounds"),
    [("cuda", "Radeon 8060S Graphics", 50), ("cuda", "gfx1151 (emulated)", 2), ("cpu", "", 2)],
)
def test_a_gpu_is_asked_in_many_rounds(device, name, rounds, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    # Do not move tensors to the GPU, so that the test also runs on a machine without one.
    monkeypatch.setattr(torch.Tensor, "to", lambda t, device, dtype=None: t.type(dtype or t.dtype))
    (check,) = [c for c in races.checks() if c.id == "gradients/embedding-float32"]
    measured = races.checks()[check](RunOptions(device=device))
    assert measured == {"rounds": rounds}


def test_on_a_cpu_it_says_what_it_checks():
    (check,) = run(["libraries"], RunOptions(), ["conv/native/2d-same-float16"]).checks
    assert check.state is State.PASSED
    assert "this checks the harness" in check.reason
