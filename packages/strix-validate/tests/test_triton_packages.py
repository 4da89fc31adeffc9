# SPDX-License-Identifier: BSD-3-Clause
"""The checks of Triton packages: correct results pass, and each kind of fault is caught."""

import importlib.util
import os
import shutil
from fnmatch import fnmatchcase
from types import SimpleNamespace

import coverage_faults
import pytest
import torch
from calls import CHECK, answer, make
from strix_validate.checks import Check, RunOptions, Size, State
from strix_validate.numerics import reference
from strix_validate.runner import run
from strix_validate.tiers import attention, emulated
from strix_validate.triton import call as triton_call
from strix_validate.triton import modes as triton_modes
from strix_validate.triton_packages import conch, fla, gguf, liger, package_checks, sage
from strix_validate.triton_packages.package_checks import PACKAGES
from strix_validate.vllm import vllm_checks
from triton_faults import FAULTS as PACKAGE_FAULTS

FAULTS = PACKAGE_FAULTS | coverage_faults.PACKAGES
CONCH_FAULTS = {
    "scales of another group used": ("w8a16", {"scales": lambda x: x.roll(1, 0)}),
    "bytes of a word in the wrong order": ("w8a16", {"codes": lambda x: x << 8 | (x >> 24 & 255)}),
    "zero points left out": ("w8a16-zeros", {"zeros": lambda x: x * 0}),
}


@pytest.mark.parametrize("name", CONCH_FAULTS)
def test_a_layer_with_8_bit_weights_is_unpacked_as_conch_does(name):
    """The expected result is the product that this test computes from the packed tensors."""
    case, spoil = CONCH_FAULTS[name]
    call, expected = make(conch.COMPUTED[case])

    def product(tensors):
        bytes_ = torch.stack([tensors["codes"].long() >> 8 * i & 255 for i in range(4)], 1)
        centre = tensors["zeros"].repeat_interleave(128, 0) if "zeros" in tensors else 128
        scales = tensors["scales"].repeat_interleave(128, 0)
        weights = (bytes_.flatten(0, 1) - centre).half() * scales
        return {"out": (tensors["x"].float() @ weights.float()).half()}

    spoilt = call.tensors | {key: change(call.tensors[key]) for key, change in spoil.items()}
    for tensors, state in ((call.tensors, State.PASSED), (spoilt, State.FAILED)):
        for judge in (attention.judge_kernels, emulated.judge):
            assert judge(CHECK, call, expected, answer(product(tensors))).state is state


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.MODULE)
def test_without_a_package_its_checks_are_skipped(package, monkeypatch):
    """Each skip has its reason in skips.toml. The value "own_reason" keeps the original message."""
    monkeypatch.setattr(triton_call.importlib.util, "find_spec", lambda name: None)
    name = f"{package.__name__.rpartition('.')[2]}-{next(iter(package.COMPILED))}"
    only = [f"kernels/{name.removeprefix('flash_cases-')}"]
    (check,) = run(["kernels"], RunOptions(), only).checks
    message = f"{package.MODULE} is not installed"
    assert check.state is State.SKIPPED
    assert check.measured == {"own_reason": message}
    assert check.reason != message


def _all_rows_but_one(x):
    return torch.cat([x[:1] * 0, x[1:]])


#: By package and case, and then by fault: the result that the fault changes, and a change of
#: about the fault's size.
SPOILT = {
    (liger, "rms-norm"): {
        "mean divides by the size of the padded block": ("out", lambda x: x * (512 / 300) ** 0.5),
        "projection left out of dx": ("dx", lambda x: x * 1.2),
        "gradient of the weight comes from one row": ("dweight", lambda x: x / 5),
    },
    (liger, "rms-norm-eps"): {"another eps used": ("out", lambda x: x * 1.2)},
    (liger, "rms-norm-gemma"): {"offset left out": ("out", lambda x: x / 2)},
    (liger, "rope"): {
        "gradient not rotated back": ("dq", lambda x: x.roll(32, -1)),
        "keys not rotated": ("k_out", lambda x: x.roll(1, -1)),
    },
    (liger, "rope-partial"): {"whole head rotated": ("q_out", lambda x: x.roll(16, -1))},
    (liger, "swiglu"): {
        "derivative of silu left out": ("dgate", lambda x: x * 0.9),
        "gate used instead of up": ("dup", lambda x: x.flip(0)),
    },
    (liger, "loss"): {
        "ignored labels counted": ("loss", lambda x: x * 7 / 9),
        "gradient of the loss ignored": ("dx", lambda x: x / 2),
    },
    (fla, "gla"): {
        "last chunk wrong": (
            "out",
            lambda x: torch.cat([x[:, :64], x[:, 64:] * 0.9], 1),
        ),
        "state does not decay": ("last", lambda x: x * 1.1),
        "gradient of the gate wrong": ("dg", lambda x: x * 0.8),
        "gradient of keys in the wrong order": ("dk", lambda x: x.flip(1)),
        "scale left out of dq": ("dq", lambda x: x * 8),
    },
    (fla, "gdn-decode"): {
        "state of another sequence": ("last", lambda x: x.flip(0)),
        "keys not normalized": ("out", lambda x: x * 1.02),
    },
    (fla, "gdn-packed"): {
        "two sequences treated as one": (
            "out",
            lambda x: torch.cat([x[:, :70], x[:, 70:] + 0.05], 1),
        ),
        "gradient of beta wrong": ("dbeta", lambda x: x * 0.7),
        "gradient of values shifted by one token": ("dv", lambda x: x.roll(1, 1)),
    },
    (sage, "edge"): {
        "keys past the end get a share of the weights": ("out", lambda x: x * 100 / 128),
        "call changes the caller's keys": ("keys", lambda x: x - x.mean(2, keepdim=True)),
    },
    (sage, "causal"): {
        "last block wrong": (
            "out",
            lambda x: torch.cat([x[..., :192, :], x[..., 192:, :] * 1.01], -2),
        ),
        "first row not written": (
            "out",
            lambda x: torch.cat([x[..., :1, :] * 0, x[..., 1:, :]], -2),
        ),
    },
    (sage, "full"): {
        "keys of another group of heads used": ("out", lambda x: x[:, [1, 2, 3, 0]]),
        "scale of another block used": ("out", lambda x: x * 1.01),
        "result of another sequence of the batch": ("out", lambda x: x.flip(0)),
        "elements of the head dim shifted by one": ("out", lambda x: x.roll(1, -1)),
    },
    (gguf, "q8_1"): {  # this case does not need the package gguf
        "scales of another group used": ("out", lambda x: x * 1.02),
        "result of another expert": ("experts", lambda x: x.roll(1, 0)),
        "one row not written": ("weights", _all_rows_but_one),
    },
    (sage, "packed"): {
        "two sequences treated as one": ("out", lambda x: x.roll(1, 0)),
        "one row not written": ("out", _all_rows_but_one),
    },
}


@pytest.mark.parametrize("case", SPOILT, ids=lambda case: f"{case[0].MODULE}-{case[1]}")
def test_spoilt_answers_of_a_package_are_caught(case):
    package, name = case
    call, expected = make(package.COMPUTED[name])
    correct = expected(call.dtype)
    for judge in (attention.judge_kernels, emulated.judge):
        assert judge(CHECK, call, expected, answer(correct)).state is State.PASSED
        for fault, (tensor, spoil) in SPOILT[case].items():
            spoilt = correct | {tensor: spoil(correct[tensor])}
            assert judge(CHECK, call, expected, answer(spoilt)).state is State.FAILED, fault


@pytest.mark.parametrize("library", (vllm_checks, *PACKAGES), ids=lambda library: library.MODULE)
def test_a_gpu_computes_each_case_in_bfloat16_too(library):
    """Cases without bfloat16 are in the list FLOAT16_OR_32 of their library, with a reason."""
    names = {name.removesuffix("-bfloat16") for name in package_checks.in_bfloat16(library)}
    exceptions = getattr(library, "FLOAT16_OR_32", ())
    without_bfloat16 = library.COMPUTED.keys() - names
    for name in without_bfloat16:
        assert any(fnmatchcase(name, pattern) for pattern in exceptions), name
    prefix = getattr(library, "PREFIX", f"{library.__name__.rpartition('.')[2]}-")
    for name in names:
        check = Check(f"attention/{prefix}{name}-bfloat16", "", "")
        assert not attention.applies(check, RunOptions(device="cpu", size=Size.FULL))
        is_for_cpu = library is vllm_checks and not vllm_checks.is_for_device(name, "cuda")
        applies = attention.applies(check, RunOptions(device="cuda", size=Size.FULL))
        assert applies is not is_for_cpu


#: By package and case: the result that is changed only in bfloat16, and the change.
IN_BFLOAT16 = {
    (conch, "w8a16"): ("out", lambda x: x * 1.02),
    (fla, "gdn-decode"): ("out", lambda x: x.roll(1, 2)),
    (gguf, "q8_1"): ("out", lambda x: x * 1.03),
    (liger, "rope"): ("dq", lambda x: x.roll(32, -1)),
    (sage, "edge"): ("out", lambda x: x * 100 / 128),
}


@pytest.mark.parametrize("case", IN_BFLOAT16, ids=lambda case: f"{case[0].MODULE}-{case[1]}")
def test_what_is_wrong_in_bfloat16_alone_is_caught(case):
    package, name = case
    tensor, spoil = IN_BFLOAT16[case]
    call, expected = make(package_checks.in_bfloat16(package)[f"{name}-bfloat16"])
    assert call.dtype is torch.bfloat16
    correct = expected(call.dtype)
    spoilt = correct | {tensor: spoil(correct[tensor])}
    for tensors, state in ((correct, State.PASSED), (spoilt, State.FAILED)):
        assert attention.judge_kernels(CHECK, call, expected, answer(tensors)).state is state


def test_a_gate_whose_errors_have_one_sign_passes():
    """With these seeds, all errors of a correct kernel's gradient of the gate have one sign."""
    for seed in ("a", "c", "h", "i"):
        call, expected = make(fla.COMPUTED["gdn"], seed)
        correct = answer(expected(call.dtype))
        result = attention.judge_kernels(CHECK, call, expected, correct)
        assert result.state is State.PASSED, (seed, result.reason)


def test_a_correct_geglu_in_bfloat16_passes():
    """With each of these seeds, a random gate is so low that 1 + tanh cancels in float32."""
    for seed in ("11", "17", "47"):
        case = package_checks.in_bfloat16(liger)["geglu-Gemma-2-9B-bfloat16"]
        call, expected = make(case, seed)
        correct = answer(expected(call.dtype))
        result = attention.judge_kernels(CHECK, call, expected, correct)
        assert result.state is State.PASSED, (seed, result.reason)


def test_gemmas_shipped_activation_is_geglu():
    columns = {"geglu": set(), "swiglu": set()}
    for build, _ in liger.SHIPPED["full"]:
        if build.func.__name__ in columns:
            columns[build.func.__name__].add(build.keywords["columns"])
    assert columns["geglu"] == {10240, 14336, 15360}  # Gemma 3 4B, Gemma 2 9B, Gemma 3 12B
    assert 15360 not in columns["swiglu"]


def test_the_offset_of_gemmas_norm_is_not_rounded():
    call, expected = make(liger.COMPUTED["rms-norm-gemma"])
    x = call.tensors["x"].double()
    rows = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    out = rows * (1 + call.tensors["weight"].double())
    torch.testing.assert_close(expected(torch.float64)["out"], out, rtol=1e-6, atol=0)


def test_a_loss_of_logits_in_16_bits_passes():
    """The bound allows the rounding of logits, which changes weights in a large vocabulary."""
    for name, case in package_checks.in_bfloat16(liger).items():
        if name.startswith("loss-") and case.size is Size.QUICK:
            call, expected = make(case)
            correct = answer(expected(torch.bfloat16))
            result = attention.judge_kernels(CHECK, call, expected, correct)
            assert result.state is State.PASSED, (name, result.measured["dweight"])


def test_gradients_are_those_of_the_inputs():
    def product(x, y):
        return {"out": x * y, "sum": (x + y).sum()}

    x = torch.tensor([2.0, 3.0])
    y = torch.tensor([5.0, 7.0])
    grads = {"out": torch.tensor([1.0, 10.0]), "sum": torch.tensor(100.0)}
    results = triton_call.differentiate(product, {"x": x, "y": y}, grads)
    assert results["out"].tolist() == [10, 21]
    assert not results["out"].requires_grad
    assert results["dx"].tolist() == [105, 170]
    assert results["dy"].tolist() == [102, 130]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_no_element_of_sageattentions_inputs_lies_between_two_codes():
    x = torch.zeros(4, 1, 64)
    x[:, 0, 0] = 127
    x[1, 0, 1] = 40.5
    x[2, 0, 2] = -3.5
    sage.settle(x, (4,), 4, torch.zeros_like)
    assert torch.equal(x[:, 0, 0], torch.full((4,), 127.0))
    assert x[1, 0, 1] == 40.5 * (1 + 2**-7)
    assert x[2, 0, 2] == -3.5 * (1 + 2**-7)


def test_the_interpreter_knows_what_a_compiled_kernel_knows():
    """Floats and loop counters have a tensor's methods. Masks and libdevice's functions work.

    Without interpreter.complete, Triton 3.9 refuses a mask that combines a scalar's condition with
    a block's.
    """
    from interpreted import Interpreted

    (outcome,) = triton_modes.run([Interpreted()], "interpret").calls
    assert outcome.error is None
    x = torch.arange(4.0)
    expected = (x * 0.5).tanh() + (1 + x).rsqrt() + x.log1p() + 3
    expected[3] = 7
    assert torch.allclose(outcome.tensors["out"], expected, atol=1e-6)


def test_a_package_that_checks_the_device_gets_tensors_of_a_gpu(monkeypatch):
    devices = []

    def kernel(x, *_):
        devices.append(x.is_cuda)
        return x

    names = ("ggml_dequantize_triton", "ggml_mul_mat_a8_triton", "ggml_moe_a8_triton")
    module = SimpleNamespace(get_triton_moe_block_m=lambda _: 4, **dict.fromkeys(names, kernel))
    monkeypatch.setattr(gguf, "_kernels", lambda _: module)
    call, _ = gguf.product(torch.randn, "q8_1")
    results = call.execute("cpu").values()
    assert devices == [True] * 3
    assert not any(x.is_cuda for x in results)


def test_a_token_goes_to_experts_that_differ():
    call, _ = gguf.product(torch.randn, "q8_1")
    assert all(len({*row}) == gguf.EACH for row in call.tensors["chosen"].tolist())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_what_8_bits_cost(causal, head_dim):
    """Attention in 8 bits has an error of 1.2 %, and attention in float16 one of 0.03 %.

    The errors are relative to the root mean square. docs/validate.md states them.
    """
    generator = torch.Generator().manual_seed(1)
    call, expected = sage.attention(
        lambda *shape: torch.randn(shape, generator=generator).half(),
        lengths=(200,),
        kv_heads=4,
        head_dim=head_dim,
        causal=causal,
    )
    q, k, v = (call.tensors[name] for name in ("q", "k", "v"))
    corner = "bottom-right" if causal else None

    def attend(dtype):
        return reference.attention(q, k, v, q, causal=corner, dtype=dtype)["out"].double()

    exact = attend(torch.float64)

    def compute_error(x):
        return ((x - exact).square().mean() / exact.square().mean()).sqrt().item()

    assert 0.010 < compute_error(expected(torch.float64)["out"]) < 0.0125
    assert 0.0002 < compute_error(attend(torch.float16)) < 0.0004


@pytest.mark.skipif(not os.environ.get("TRITON_FAULTS"), reason="TRITON_FAULTS is not set")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_package_is_found(fault, tmp_path, monkeypatch):
    """The check that a fault names catches it. TRITON_FAULTS=1 enables this slow test."""
    file, text, replacement, case = FAULTS[fault]
    package = file.partition("/")[0]
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    for folder in spec.submodule_search_locations:  # two distributions share fla
        shutil.copytree(folder, tmp_path / package, dirs_exist_ok=True)
    source = (tmp_path / file).read_text()
    assert text in source
    (tmp_path / file).write_text(source.replace(text, replacement))
    monkeypatch.syspath_prepend(tmp_path)
    options = RunOptions(device="cpu", size=Size.FULL)
    name = case if case.startswith("flash-attn/") else f"attention/{case}"
    (check,) = run(["attention"], options, [name]).checks
    assert check.state is State.FAILED, check
    assert "wrong: " in check.reason
