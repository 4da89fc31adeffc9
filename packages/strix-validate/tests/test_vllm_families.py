# SPDX-License-Identifier: BSD-3-Clause
"""The checks of vLLM's kernels can fail.

Most tests spoil results, and need no kernels. If VLLM_SOURCE is a folder of vLLM's source, other
tests plant faults in vLLM's kernels and run them in Triton's interpreter.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import coverage_faults
import pytest
import torch
from calls import CHECK, make
from strix_validate.checks import Check, RunOptions, Size, State
from strix_validate.numerics import reference
from strix_validate.numerics.comparison import compare
from strix_validate.runner import run
from strix_validate.tiers import attention
from strix_validate.triton.cases import Case
from strix_validate.vllm import attention_modes, sampling, vllm_checks
from vllm_faults import ATTENTION, FAULTS, GENERATED, LAYOUT, TIERS

SOURCE = Path(os.environ.get("VLLM_SOURCE", ""))
needs_vllm = pytest.mark.skipif(
    not os.environ.get("VLLM_SOURCE") or importlib.util.find_spec("triton") is None,
    reason="VLLM_SOURCE is not set, or triton is not installed",
)
#: Cases of all modules in FAMILIES, such as sampling, MLA, linear attention and LoRA.
CASES: dict[str, Case] = {}
for family in vllm_checks.FAMILIES:
    CASES |= family.COMPUTED


@cache
def build_call(name: str, seed: str):
    return make(vllm_checks.COMPUTED[name], seed)


def judge(name: str, tensor: str = "", spoil=None, seed: str = "a"):
    """Return a check's verdict on the results of its own reference.

    `spoil` changes the result `tensor`, so that the check must fail.
    """
    call, expected = build_call(name, seed)
    results = dict(expected(call.dtype))
    if spoil:
        results[tensor] = spoil(results[tensor].clone())
    return compare(CHECK, results, expected, call.dtype).state


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", ["a", "b", "c"])
def test_what_is_right_passes(name, seed):
    assert judge(name, seed=seed) is State.PASSED


@pytest.mark.parametrize("name", CASES)
def test_no_output_is_larger_than_its_terms(name):
    _, expected = build_call(name, "a")
    exact = expected(torch.float64)
    terms = expected(reference.TERMS)
    # Results other than "out", such as states, need not be sums of terms.
    if "out" in exact:
        assert (exact["out"].abs() <= terms["out"] * (1 + 1e-9)).all()


def _put(index, value):
    def put(x):
        x.view(-1)[index] = value
        return x

    return put


def _fill(axis, index, value):
    return lambda x: x.index_fill(axis, torch.as_tensor(index), value)


def _without_the_fourth(x):
    """Replace the result of the fourth head by that of the third."""
    return x[:, [0, 1, 2, 2, 4, 5]]


#: For each fault: the check, the result that is spoilt, and the function that spoils it.
SPOILT = {
    "NaN of an unused slot reaches prefill's result": (
        "prefill",
        "out",
        lambda x: x * float("nan"),
    ),
    "one row of the output is 0.5": ("layer-Qwen2.5-7B-decode-fp8", "out", _fill(0, 0, 0.5)),
    "keys of another group of heads used": (
        "layer-Qwen2.5-0.5B-prefill",
        "out",
        lambda x: x.roll(7, 1),
    ),
    "each token has the log probabilities of the previous one": (
        "model",
        "logprobs",
        lambda x: x.roll(1, 0),
    ),
    "log probabilities of the last token are wrong": (
        "model-experts",
        "logprobs",
        _fill(0, 23, -4.5),
    ),
    "keys and values written to the next slot": (
        "reshape-and-cache",
        "cache",
        lambda x: x.roll(1, 2),
    ),
    "rows of a graph's padding overwritten": ("decode", "rest", lambda x: x * 0),
    "NaN of a key outside the window reaches the result": (
        "decode-window",
        "out",
        lambda x: x * torch.nan,
    ),
    "result of another expert": ("moe", "out", lambda x: x.roll(1, 1)),
    "norm of another token": ("rms-norm", "out", lambda x: x.roll(1, 0)),
    "keys after the 2048th left out": ("decode-2100", "out", lambda x: x * 1.01),
    "fourth head has the result of the third": (
        "layer-Phi-4-mini-window-prefill",
        "out",
        _without_the_fourth,
    ),
    "fourth head has the result of the third in decoding": (
        "layer-Granite-3.1-3B-A800M-decode-fp8",
        "out",
        _without_the_fourth,
    ),
    "fifth sequence has the result of the fourth": (
        "decode-batch6",
        "out",
        lambda x: x[[0, 1, 2, 3, 3, 5]],
    ),
    "blocks of queries assigned to the wrong sequence": (
        "prefill-batch6",
        "out",
        lambda x: x.roll(3, 0),
    ),
    "elements after the 128th in the place of the first 128": (
        "layer-Gemma-3-1B-window-prefill",
        "out",
        lambda x: x.roll(128, -1),
    ),
    "second half of head dim 512 is zero": (
        "layer-Gemma-4-31B-decode-fp8",
        "out",
        _fill(-1, range(256, 512), 0),
    ),
    "cache block of another sequence read": ("prefill-block-33000", "out", lambda x: x.roll(1, 0)),
    "whole head rotated": ("rope-partial", "q", lambda x: x.roll(64, -1)),
    "large scores give NaN": ("prefill-softcap-large", "out", lambda x: x / 0 * 0),
    "last tile of columns computed as if it was full": (
        "moe-ragged",
        "out",
        lambda x: x * 104 / 128,
    ),
    "bias of an expert left out": ("moe-bias", "out", lambda x: x - 0.1),
    "zero points of an expert left out": ("moe-int4-zeros", "out", lambda x: x + x.mean()),
    "experts in FP8: scale of another block used": ("moe-fp8", "out", lambda x: x * 1.02),
    "experts in 4 bits: scale of another group used": ("moe-int4", "out", lambda x: x * 1.02),
    "one token too many kept": ("top-k-top-p", "kept", _put(4, 1.0)),
    "one token too many kept if logits are far below zero": (
        "top-k-top-p-low",
        "kept",
        _put(4, 1.0),
    ),
    "result of the neighbouring head if scores are far below zero": (
        "mla-decode-low",
        "out",
        lambda x: x.roll(1, 1),
    ),
    "logsumexp is 0": ("merge-states-low", "lse", lambda x: x * 0),
    "no token kept": ("top-p", "kept", lambda x: x * 0),
    "logit of the neighbouring token": ("top-k-top-p", "logits", lambda x: x.roll(1, 1)),
    "penalty of the neighbouring row": ("penalties", "logits", lambda x: x.roll(1, 0)),
    "min-p keeps the neighbouring token": ("temperature-min-p", "kept", lambda x: x.roll(1, 1)),
    "temperature is 0.61, not 0.6": ("temperature-min-p", "logits", lambda x: x * 0.6 / 0.61),
    "greedy choice is not the best token": ("gumbel", "greedy", lambda x: x.roll(1, 1)),
    "one token is drawn too often": ("gumbel", "beyond", _put(5, 1.0)),
    "same token drawn at each position": ("gumbel", "alike", _put(0, 1.0)),
    "draft refused that must be accepted": ("rejection", "agreed", _put(0, -1.0)),
    "impossible token returned": ("rejection", "wrong", lambda x: x + 1),
    "too many drafts accepted": ("rejection", "accepted", lambda x: x + 1),
    "token after accepted drafts drawn too often": ("rejection", "drawn", lambda x: x + 1),
    "result of the neighbouring head": ("mla-decode", "out", lambda x: x.roll(1, 1)),
    "NaN of an unused slot reaches the result": (
        "mla-decode-512",
        "out",
        lambda x: x * float("nan"),
    ),
    "scale of an fp8 cache is 1": ("mla-decode-fp8", "out", lambda x: x * 2),
    "logsumexp lacks the maximum": ("mla-decode", "logsumexp", lambda x: x - 0.1),
    "cached part of another token merged": ("merge-states", "out", lambda x: x.roll(1, 0)),
    "logsumexp is NaN if nothing is cached": ("merge-states", "lse", _put(0, float("nan"))),
    "one token too many kept among equal logits": ("top-k-ties", "kept", _put(4, 1.0)),
    "forbidden token kept": ("top-k-top-p-masked", "kept", _put(0, 1.0)),
    "log probability of the neighbouring token": ("logprobs", "logprobs", lambda x: x.roll(1, 1)),
    "log probabilities whose sum is not one": ("logprobs-low", "logprobs", lambda x: x + 0.01),
    "bias of another channel used": ("conv1d-bias", "out", lambda x: x.roll(1, 1)),
    "wrong state after a chunk shorter than the state": (
        "conv1d-short",
        "states",
        lambda x: x.roll(1, 1),
    ),
    "wrong state after a refused draft": ("conv1d-drafts", "states", lambda x: x.roll(1, 1)),
    "wrong output after a refused draft": ("gdn-drafts", "out", lambda x: x.roll(1, 0)),
    **{
        f"the next token in {name}": (name, "out", lambda x: x.roll(1, 0))
        for name in attention_modes.COMPUTED
    },
    "another token kept in a batch of 45 rows": ("top-k-batch", "kept", lambda x: x.roll(1, 1)),
    "no token kept in two rows": ("top-p-alone", "kept", lambda x: x * 0),
    "log probabilities of the second block not written": (
        "logprobs-many",
        "logprobs",
        _put(1050, 0.0),
    ),
    "silu used instead of sigmoid": ("gated-norm-sigmoid", "out", lambda x: x * 1.02),
    "wrong adapter used for a prompt": ("lora-prompt", "shrunk", lambda x: x.roll(1, 1)),
    "output of the convolution is one token late": ("conv1d", "out", lambda x: x.roll(1, 0)),
    "state of the convolution not updated": ("conv1d", "states", lambda x: x.roll(1, 1)),
    "result of another head": ("gdn-prefill", "out", lambda x: x.roll(1, 1)),
    "state of another sequence": ("gdn-prefill", "states", lambda x: x.roll(1, 0)),
    "length of normalized keys is 1.01": ("gdn-prefill", "k", lambda x: x * 1.01),
    "state is transposed": ("gdn-decode", "states", lambda x: x.mT),
    "state is 0.1 % too large": ("gdn-decode", "states", lambda x: x * 1.001),
    "result of another token": ("gdn-mixed", "out", lambda x: x.roll(1, 0)),
    "gated norm is 2 % too large": ("gated-norm", "out", lambda x: x * 1.02),
    "weight of the neighbouring column": ("awq", "weights", lambda x: x.roll(1, 1)),
    "AWQ: scale of another group used": ("awq", "out", lambda x: x * 1.02),
    "W4A16: zero points off by one": ("w4a16-zeros", "out", lambda x: x + x.mean()),
    "W4A16: codes off by one": ("w4a16-packed", "out", lambda x: x + x.mean()),
    "W4A16: last element not written": ("w4a16", "out", _put(-1, 0.0)),
    "FP8: scale of another block used": ("fp8-blocks", "out", lambda x: x * 1.02),
    "LoRA: another adapter used": ("lora", "shrunk", lambda x: x.roll(1, 1)),
    "LoRA: result of the neighbouring slice": ("lora", "out", lambda x: x.roll(32, 1)),
    "LoRA: adapter applied to tokens without one": ("lora-one-slice", "out", _put(50, 9.0)),
}


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_results_are_caught(name):
    check, *change = SPOILT[name]
    assert judge(check) is State.PASSED
    assert judge(check, *change) is State.FAILED


def test_each_check_of_a_family_has_a_spoilt_result_and_a_fault():
    assert set(CASES) <= {check for check, *_ in SPOILT.values()}
    # These slow checks have no planted fault. Faults in most of their kernels are planted for other
    # checks.
    untested = {"gdn-mixed", "lora", "mla-decode-512", "top-p"}
    planted = {check for *_, check in (FAULTS | LAYOUT | coverage_faults.VLLM).values()}
    assert untested == set(CASES) - planted


def test_nan_in_the_place_of_a_token_that_is_left_out_is_caught():
    call, expected = build_call("temperature-min-p", "a")
    correct = expected(call.dtype)
    logits = correct["logits"].masked_fill(correct["kept"] == 0, float("-inf"))
    for left_out, state in ((float("-inf"), State.PASSED), (float("nan"), State.FAILED)):
        changed = logits.masked_fill(logits == float("-inf"), left_out)
        results = sampling.describe_kept(changed)
        assert compare(CHECK, results, expected, call.dtype).state is state


def test_min_p_keeps_tokens_above_a_share_of_the_largest_probability():
    call, expected = build_call("temperature-min-p", "a")
    rows = call.tensors["rows"].long()
    temperature = call.tensors["temperature"][rows].double()
    logits = call.tensors["logits"].double() / temperature.where(temperature > 0, 1.0)[:, None]
    probabilities = logits.softmax(-1)
    min_p = call.tensors["min_p"][rows].double()[:, None]
    is_kept = probabilities >= min_p * probabilities.amax(-1, keepdim=True)
    torch.testing.assert_close(expected(torch.float64)["kept"], is_kept.double())
    assert is_kept.sum(1)[:3].tolist() == [40, logits.shape[1], 3]


def test_draws_that_follow_another_distribution_are_beyond():
    logits = torch.tensor([0.5, 0.0, -1.0, 1.0])
    generator = torch.Generator().manual_seed(5)
    for shift, beyond in ((0.0, False), (1.5, True)):
        shares = (logits + shift * torch.tensor([1.0, 0, 0, 0])).softmax(-1)
        tokens = torch.multinomial(shares, 200, replacement=True, generator=generator)
        assert bool(sampling.find_outliers(tokens, logits).any()) is beyond


@pytest.mark.parametrize(
    ("accepted_shares", "overrated", "outliers"),
    [
        (0.5, 0.3, set()),
        (0.3, 0.3, {"accepted"}),
        (0.8, 0.3, {"accepted"}),
        (0.5, 0.9, {"drawn"}),
    ],
)
def test_wrong_shares_of_accepted_and_drawn_tokens_are_outliers(
    accepted_shares, overrated, outliers
):
    generator = torch.Generator().manual_seed(5)
    is_accepted = torch.rand(200, 2, generator=generator) < accepted_shares
    accepted = is_accepted.long().cumprod(1).sum(1)
    tokens = torch.where(torch.arange(3) < accepted[:, None], 1, -1)
    is_overrated = (torch.rand(200, generator=generator) < overrated) & (accepted == 2)
    tokens[torch.arange(200), accepted] = torch.where(is_overrated, 1, 4)
    judged = sampling.judge_rejections(tokens, accepted + 1)
    assert {name for name, value in judged.items() if value} == outliers


@pytest.mark.parametrize(
    "row",
    [
        pytest.param([4, 4, -1], id="a token accepted that was not proposed"),
        pytest.param([1, 1, -1], id="rejected token returned"),
        pytest.param([1, 1, 2], id="unlikely token drawn"),
    ],
)
def test_impossible_tokens_of_a_rejection_are_counted(row):
    tokens = torch.tensor([[4, -1, -1], row])
    lengths = (tokens >= 0).sum(1)
    assert sampling.judge_rejections(tokens, lengths)["wrong"].item() == 1


def test_slow_checks_are_left_to_full():
    slow = Check("attention/vllm-gumbel", "", "")
    assert not attention.applies(slow, RunOptions(size=Size.QUICK))
    assert attention.applies(slow, RunOptions(size=Size.FULL))
    assert attention.applies(Check("attention/vllm-penalties", "", ""), RunOptions(size=Size.QUICK))


PLANTED = FAULTS | ATTENTION | LAYOUT | GENERATED | coverage_faults.VLLM | TIERS


@needs_vllm
@pytest.mark.parametrize("fault", PLANTED)
def test_faults_in_the_source_are_caught(fault, tmp_path):
    """The check that the fault names catches the fault."""
    file, old, new, check = PLANTED[fault]
    tier, _, name = check.rpartition("/")
    tier = tier or "attention"
    shutil.copytree(SOURCE / "vllm", tmp_path / "vllm", ignore=shutil.ignore_patterns("*.json"))
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new))
    options = RunOptions(vllm=tmp_path, size=Size.FULL)
    (result,) = run([tier], options, [f"{tier}/vllm-{name}"]).checks
    message = "bytes of LDS" if tier == "kernels" else "wrong:"
    assert result.state is State.FAILED, result.reason
    assert message in result.reason


@needs_vllm
def test_the_source_is_right():
    faults = FAULTS | ATTENTION | LAYOUT | GENERATED | coverage_faults.VLLM
    names = {check for *_, check in faults.values()} | set(CASES)
    ids = [f"attention/vllm-{name}" for name in names]
    options = RunOptions(vllm=SOURCE, size=Size.FULL)
    results = run(["attention"], options, ids).checks
    assert {result.id for result in results} == set(ids)
    assert not [result for result in results if result.state is not State.PASSED]


_UNEQUAL_HEAD_DIMS = """
import sys
from pathlib import Path

import torch
from strix_validate.vllm import source

source.install(Path(sys.argv[1]))
from vllm.v1.attention.ops.triton_unified_attention_diffkv import unified_attention_diffkv

torch.manual_seed(0)
window = int(sys.argv[2])
q, k, v = torch.randn(20, 2, 64), torch.randn(2, 16, 1, 64), torch.randn(2, 16, 1, 32)
out = torch.full((20, 2, 32), torch.nan)
unified_attention_diffkv(
    q=q, k=k, v=v, out=out, cu_seqlens_q=torch.tensor([0, 20], dtype=torch.int32), max_seqlen_q=20,
    seqused_k=torch.tensor([30], dtype=torch.int32), softmax_scale=0.125, causal=True,
    window_size=(window - 1, 0), softcap=0, block_table=torch.tensor([[1, 0]], dtype=torch.int32),
)
keys, values = (x[[1, 0]].reshape(32, -1)[:30] for x in (k, v))
distance = torch.arange(10, 30)[:, None] - torch.arange(30)
visible = (distance >= 0) & (distance < (window or 30))
scores = torch.einsum("qhd,kd->hqk", q, keys) * 0.125
weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
torch.testing.assert_close(out, torch.einsum("hqk,kd->qhd", weights, values), atol=1e-4, rtol=1e-4)
"""


@needs_vllm
@pytest.mark.parametrize("window", [0, 7])
def test_values_may_have_another_head_dimension_than_keys(window: int) -> None:
    """The kernel for unequal head dims has its own launcher, but calls functions that we patch."""
    done = subprocess.run(
        [sys.executable, "-c", _UNEQUAL_HEAD_DIMS, SOURCE, str(window)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
