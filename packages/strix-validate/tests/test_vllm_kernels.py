# SPDX-License-Identifier: BSD-3-Clause
"""The checks of vLLM's kernels: correct results pass, and each kind of fault is caught.

A mock of vLLM's source has one kernel, which is compiled, interpreted and executed under
emulation. test_vllm_families.py plants faults in vLLM's real kernels.
"""

import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from calls import CHECK, answer, make, need_disassembler, skip_without
from strix_validate import VLLM_DEVICE_NAME
from strix_validate.checks import CannotRun, Check, RunOptions, State
from strix_validate.numerics import comparison, reference
from strix_validate.runner import run
from strix_validate.tiers import attention, emulated, kernels
from strix_validate.triton import modes as triton_modes
from strix_validate.triton.cases import Case
from strix_validate.triton_packages import package_checks
from strix_validate.vllm import attention as vllm_attention
from strix_validate.vllm import mxfp4 as vllm_mxfp4
from strix_validate.vllm import source as vllm_source
from strix_validate.vllm import vllm_checks

needs_triton = skip_without("triton")
MOCK = Path(__file__).parent / "fake_vllm_source"
NORM = "vllm/model_executor/determinism/batch_invariant.py"


#: By name: the check that must fail, and the arguments of its case that the fault changes.
FAULTS = {
    "window ignored": ("prefill-window", {"window": 0}),
    "window off by one": ("decode-window", {"window": 17}),
    "softcap ignored": ("prefill-softcap", {"softcap": 0.0}),
    "sinks ignored": ("decode-sinks", {"sinks": False}),
    "scales of an fp8 cache ignored": ("prefill-fp8-kv", {"fp8": False}),
    "neighbouring elements rotated instead of halves": ("rope", {"neox": False}),
    "softmax_scale ignored": ("prefill-scale", {"scale": None}),
    "softmax_scale ignored in decoding": ("decode-scale", {"scale": None}),
    "ALiBi ignored": ("prefill-alibi", {"alibi": False}),
    "ALiBi ignored in decoding": ("decode-alibi", {"alibi": False}),
    "scales of an fp8 cache ignored in decoding": ("decode-fp8-kv", {"fp8": False}),
    "window limited to 512 keys": ("prefill-window-600", {"window": 512}),
    "softcap left out for large scores": ("prefill-softcap-large", {"softcap": 0.0}),
    "another eps used": ("rms-norm-eps", {"eps": 1e-6}),
    "interleaved rotary sections read as contiguous": ("rope-interleaved", {"interleaved": False}),
    "causal mask in a call that is not causal": ("prefill-not-causal", {"causal": True}),
    "scales ignored when keys and values are written to an fp8 cache": (
        "reshape-and-cache-fp8",
        {"fp8": False},
    ),
    "a model's window ignored": ("model-window", {"window": 0}),
    "router's weights applied although they must not be": ("moe-unrouted", {"routed": True}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_wrong_numbers_are_caught(name):
    case_name, change = FAULTS[name]
    case = vllm_checks.COMPUTED[case_name]
    broken = replace(case, build=partial(case.build, **change))
    call, expected = make(case)
    _, broken_results = make(broken)
    for judge in (attention.judge_kernels, emulated.judge):
        assert judge(CHECK, call, expected, answer(expected(torch.float16))).state is State.PASSED
        assert (
            judge(CHECK, call, expected, answer(broken_results(torch.float16))).state
            is State.FAILED
        )


def test_scales_of_keys_and_values_are_not_alike(monkeypatch):
    """A kernel that swaps the two scales is caught, in prefill and decoding."""
    for name in ("prefill-fp8-kv", "decode-fp8-kv"):
        case = vllm_checks.COMPUTED[name]
        call, expected = make(case)
        with monkeypatch.context() as patch:
            swapped = dict(zip("vk", vllm_attention.FP8_SCALES.values(), strict=True))
            patch.setattr(vllm_attention, "FP8_SCALES", {n: swapped[n] for n in "kv"})
            _, swapped_results = make(case)
        result = attention.judge_kernels(
            CHECK, call, expected, answer(swapped_results(torch.float16))
        )
        assert result.state is State.FAILED


def test_sinks_are_one_more_key():
    q, k, v = (torch.randn(1, 2, n, 16, dtype=torch.float64) for n in (3, 5, 5))
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64)
    results = reference.attention(q, k, v, q, sinks=sinks)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].transpose(-2, -1) / 4
    scores = torch.cat([scores, sinks[:, None, None].expand(1, 2, 3, 1)], -1)
    out = scores.softmax(-1)[..., :-1] @ leaves[2]
    grads = torch.autograd.grad(out, leaves, q)
    for name, expected in zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True):
        torch.testing.assert_close(results[name], expected)


@pytest.mark.parametrize("name", ["prefill-d128", "decode-d128", "moe-decode", "mla-decode", "awq"])
def test_a_product_that_left_the_matrix_unit_is_caught(name):
    call, expected = make(vllm_checks.COMPILED[name])
    assert call.products
    result = kernels.judge_products(CHECK, call, expected, triton_modes.CallAnswer())
    assert result.state is State.FAILED
    assert "0 of 0 kernels have WMMA, expected at least 1" in result.reason


def test_the_error_of_a_call_is_the_only_reason():
    call, expected = make(vllm_checks.COMPILED["prefill-d128"])
    failed = triton_modes.CallAnswer(error=("ValueError", "no tile fits"))
    for result in (
        kernels.judge_products(CHECK, call, expected, failed),
        kernels.judge(CHECK, failed),
    ):
        assert result.state is State.FAILED
        assert result.reason == "ValueError: no tile fits"


@pytest.mark.parametrize("name", ["prefill", "decode", "mixed"])
def test_a_gpu_computes_paged_attention_in_bfloat16_too(name):
    check = Check(f"attention/vllm-{name}-bfloat16", "", "")
    assert attention.applies(check, RunOptions(device="cuda"))
    assert not attention.applies(check, RunOptions(device="cpu"))
    call, expected = make(package_checks.in_bfloat16(vllm_checks)[f"{name}-bfloat16"])
    assert call.dtype is torch.bfloat16
    correct = expected(call.dtype)
    assert attention.judge_kernels(check, call, expected, answer(correct)).state is State.PASSED
    spoilt = answer(correct | {"out": correct["out"] * 1.02})
    assert attention.judge_kernels(check, call, expected, spoilt).state is State.FAILED


def test_what_is_no_source_is_reported(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="not a source tree of vLLM"):
        vllm_source.find(tmp_path)
    (check,) = run(["kernels"], RunOptions(vllm=tmp_path), ["kernels/vllm-rms-norm"]).checks
    assert check.state is State.FAILED
    assert "not a source tree" in check.reason
    monkeypatch.setattr(vllm_source.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CannotRun, match="not installed"):
        vllm_source.find(None)
    (check,) = run(["kernels"], RunOptions(), ["kernels/vllm-rms-norm"]).checks
    assert check.state is State.SKIPPED


def test_the_platform_is_gfx1151():
    platform = vllm_source.mock("vllm.platforms").current_platform
    assert platform.is_rocm()
    assert not platform.is_cuda()
    assert not platform.is_fp8_fnuz()
    assert platform.has_device_capability((11, 5))
    assert not platform.has_device_capability(116)
    rocm = vllm_source.mock("vllm.platforms.rocm")
    names = ("gfx11", "gfx1x", "gfx115x", "gfx1151", "rdna")
    assert all(getattr(rocm, f"on_{name}")() for name in names)
    assert not rocm.on_gfx9()
    assert not rocm.on_gfx12x()


@pytest.mark.parametrize(
    ("hip", "has_gpu", "name"),
    [
        ("7.2", True, VLLM_DEVICE_NAME),
        (None, False, VLLM_DEVICE_NAME),
        (None, True, "NVIDIA_H100_80GB_HBM3"),
    ],
)
def test_tables_are_those_of_gfx1151_unless_the_gpu_is_nvidias(hip, has_gpu, name, monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert vllm_source.device_name() == name


def test_a_mock_copies_lists_to_tensors():
    copy = vllm_source.mock("vllm.utils.torch_utils").async_tensor_h2d
    tensor = copy([3, 5], dtype=torch.int32, device="cpu")
    assert tensor.dtype is torch.int32
    assert tensor.tolist() == [3, 5]


#: By name: a text of the mock's kernel, the text that replaces it, and the tier that must fail.
SOURCE_FAULTS = {
    "weight of the norm left out": ("x * scale * w", "x * scale", "emulated"),
    "mean divides by the size of the padded block": ("/ n_cols", "/ BLOCK_SIZE", "attention"),
    "mask lets a block go past the end of a row": (
        "mask=inside)",
        "mask=column < BLOCK_SIZE)",
        "emulated",
    ),
    "kernel does not compile": ("tl.sum(x * x)", "tl.dot(x, x)", "kernels"),
    "function has another name": ("def rms_norm_batch", "def rms_norm", "attention"),
}
TIERS = {"kernels": kernels, "attention": attention, "emulated": emulated}


def run_check(name: str, source: Path, check: str = "rms-norm"):
    if name == "emulated":
        need_disassembler()
    return run([name], RunOptions(vllm=source), [f"{name}/vllm-{check}"]).checks[0]


@needs_triton
@pytest.mark.parametrize("name", TIERS)
def test_a_source_without_an_installation_is_enough(name):
    result = run_check(name, MOCK)
    assert result.state is State.PASSED, result.reason
    assert "vLLM's kernels: 9.9" in result.reason


@needs_triton
@pytest.mark.parametrize("fault", SOURCE_FAULTS)
def test_faults_in_the_source_are_caught(fault, tmp_path):
    old, new, name = SOURCE_FAULTS[fault]
    shutil.copytree(MOCK, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / NORM).read_text()
    assert old in text
    (tmp_path / NORM).write_text(text.replace(old, new))
    assert run_check(name, tmp_path).state is State.FAILED


def test_mxfp4_without_triton_kernels_is_skipped():
    result = run_check("kernels", MOCK, "mxfp4-decode")
    assert result.state is State.SKIPPED
    assert "lacks these kernels" in result.reason


@needs_triton
def test_triton_kernels_that_do_not_import_fail(tmp_path):
    """vLLM itself only logs the error, and gpt-oss does not start."""
    shutil.copytree(MOCK, tmp_path, dirs_exist_ok=True)
    triton_kernels = vllm_source.third_party(tmp_path) / "triton_kernels"
    triton_kernels.mkdir(parents=True)
    (triton_kernels / "matmul_ogs.py").write_text(
        "from triton.language.target_info import is_hip_gfx9999"
    )
    result = run_check("kernels", tmp_path, "mxfp4-decode")
    assert result.state is State.FAILED
    assert "is_hip_gfx9999" in result.reason


def test_the_interface_of_triton_kernels(monkeypatch):
    tensor = ModuleType("triton_kernels.tensor")
    for module in (ModuleType("triton_kernels"), ModuleType("triton_kernels.matmul_ogs"), tensor):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert vllm_source.generation() == "3.5.1"
    tensor.SparseMatrix = object
    assert vllm_source.generation() == "3.6"
    monkeypatch.setitem(sys.modules, "triton_kernels.matmul_ogs", None)
    assert vllm_source.generation() == "3.8"


def test_experts_in_mxfp4_by_another_formula():
    """An independent formula is within the bounds, and with a likely fault it is outside."""
    build = partial(vllm_mxfp4.mixture, tokens=3, size=64, inner=32)
    case = Case(build, "", torch.bfloat16)
    call, expected = make(case)
    tensors = call.tensors
    weights = {}
    for name in ("w1", "w2"):
        codes = torch.stack([tensors[name] & 15, tensors[name] >> 4], -1).flatten(-2).long()
        scales = torch.exp2(tensors[f"{name}_scale"].double() - 127)
        weights[name] = vllm_mxfp4.FP4[codes] * scales.repeat_interleave(32, -1)

    def answer_with(order=(0, 1), limit=7.0, bias=1.0):
        outs = []
        for x, logits in zip(tensors["x"].double(), tensors["logits"].double(), strict=True):
            shares, chosen = logits.topk(2)
            total = 0
            for share, e in zip(shares.softmax(0), chosen, strict=True):
                both = weights["w1"][e] @ x + bias * tensors["w1_bias"][e]
                gate, up = (both.view(-1, 2)[:, i] for i in order)
                gate = gate.clamp(max=limit)
                up = up.clamp(-limit, limit)
                inner = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
                total += share * (weights["w2"][e] @ inner + tensors["w2_bias"][e])
            outs.append(total)
        return {"out": torch.stack(outs)}

    torch.testing.assert_close(answer_with(), expected(torch.float64))
    compared = partial(comparison.compare, CHECK, expected=expected, dtype=torch.bfloat16)
    assert compared(answer_with()).state is State.PASSED
    for results in (answer_with(order=(1, 0)), answer_with(bias=0.0), answer_with(limit=0.5)):
        assert compared(results).state is State.FAILED
