# SPDX-License-Identifier: BSD-3-Clause
"""The checks of vLLM's kernels can fail.

Most tests spoil results, and need no kernels. If VLLM_SOURCE is a folder of vLLM's source, other
tests plant faults in vLLM's kernels and run them in Triton's interpreter.
"""

import importlib.util
import os
import shutil
from functools import cache
from pathlib import Path

import coverage_faults
import pytest
import torch
from calls import CHECK, make
from strix_validate.checks import Check, RunOptions, Size, State
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
#: Cases of sampling, MLA, linear attention, quantized products and LoRA.
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
    "one row": ("layer-Qwen2.5-7B-decode-fp8", "out", _fill(0, 0, 0.5)),
    "another group's keys": ("layer-Qwen2.5-0.5B-prefill", "out", lambda x: x.roll(7, 1)),
    "every token the one before": ("model", "logprobs", lambda x: x.roll(1, 0)),
    "the last of 24 tokens": ("model-experts", "logprobs", _fill(0, 23, -4.5)),
    "the next slot": ("reshape-and-cache", "cache", lambda x: x.roll(1, 2)),
    "a row of a graph's padding": ("decode", "rest", lambda x: x * 0),
    "NaN of a key outside the window reaches the result": (
        "decode-window",
        "out",
        lambda x: x * torch.nan,
    ),
    "another expert": ("moe", "out", lambda x: x.roll(1, 1)),
    "another token's norm": ("rms-norm", "out", lambda x: x.roll(1, 0)),
    "keys after the 2048th": ("decode-2100", "out", lambda x: x * 1.01),
    "the group of four": ("layer-Phi-4-mini-window-prefill", "out", _without_the_fourth),
    "the group of four in decoding": (
        "layer-Granite-3.1-3B-A800M-decode-fp8",
        "out",
        _without_the_fourth,
    ),
    "the fifth sequence": ("decode-batch6", "out", lambda x: x[[0, 1, 2, 3, 3, 5]]),
    "a block's sequence": ("prefill-batch6", "out", lambda x: x.roll(3, 0)),
    "lanes after the 128th": (
        "layer-Gemma-3-1B-window-prefill",
        "out",
        lambda x: x.roll(128, -1),
    ),
    "a tile of the widest head": (
        "layer-Gemma-4-31B-decode-fp8",
        "out",
        _fill(-1, range(256, 512), 0),
    ),
    "a block of another sequence": ("prefill-block-33000", "out", lambda x: x.roll(1, 0)),
    "all lanes turned": ("rope-partial", "q", lambda x: x.roll(64, -1)),
    "NaN of large scores": ("prefill-softcap-large", "out", lambda x: x / 0 * 0),
    "the last tile of columns": ("moe-ragged", "out", lambda x: x * 104 / 128),
    "an expert's bias": ("moe-bias", "out", lambda x: x - 0.1),
    "an expert's zero points": ("moe-int4-zeros", "out", lambda x: x + x.mean()),
    "a block's scale of an expert": ("moe-fp8", "out", lambda x: x * 1.02),
    "a group's scale of an expert": ("moe-int4", "out", lambda x: x * 1.02),
    "one token too many": ("top-k-top-p", "kept", _put(4, 1.0)),
    "one token too many kept, logits far below zero": ("top-k-top-p-low", "kept", _put(4, 1.0)),
    "the neighbouring head's result, scores far below zero": (
        "mla-decode-low",
        "out",
        lambda x: x.roll(1, 1),
    ),
    "a logsumexp of 0": ("merge-states-low", "lse", lambda x: x * 0),
    "no token left": ("top-p", "kept", lambda x: x * 0),
    "the neighbouring token's logit": ("top-k-top-p", "logits", lambda x: x.roll(1, 1)),
    "the neighbouring row's penalty": ("penalties", "logits", lambda x: x.roll(1, 0)),
    "a threshold without a token": ("temperature-min-p", "kept", lambda x: x.roll(1, 1)),
    "a temperature of 0.61": ("temperature-min-p", "logits", lambda x: x * 0.6 / 0.61),
    "greedy, and not the best": ("gumbel", "greedy", lambda x: x.roll(1, 1)),
    "drawn too often": ("gumbel", "beyond", _put(5, 1.0)),
    "drawn alike at each position": ("gumbel", "alike", _put(0, 1.0)),
    "a draft that is refused": ("rejection", "agreed", _put(0, -1.0)),
    "a token that cannot be": ("rejection", "wrong", lambda x: x + 1),
    "accepted each time": ("rejection", "alike", lambda x: x + 1),
    "the neighbouring head's result": ("mla-decode", "out", lambda x: x.roll(1, 1)),
    "NaN of an unused slot": ("mla-decode-512", "out", lambda x: x * float("nan")),
    "a scale of 1": ("mla-decode-fp8", "out", lambda x: x * 2),
    "a logsumexp without its maximum": ("mla-decode", "logsumexp", lambda x: x - 0.1),
    "a token's cached part": ("merge-states", "out", lambda x: x.roll(1, 0)),
    "NaN where nothing is cached": ("merge-states", "lse", _put(0, float("nan"))),
    "one equal logit too many kept": ("top-k-ties", "kept", _put(4, 1.0)),
    "a forbidden token": ("top-k-top-p-masked", "kept", _put(0, 1.0)),
    "the neighbouring token's log probability": ("logprobs", "logprobs", lambda x: x.roll(1, 1)),
    "log probabilities whose sum is not one": ("logprobs-low", "logprobs", lambda x: x + 0.01),
    "a channel without its bias": ("conv1d-bias", "out", lambda x: x.roll(1, 1)),
    "a state of a short chunk": ("conv1d-short", "states", lambda x: x.roll(1, 1)),
    "a state of a refused draft": ("conv1d-drafts", "states", lambda x: x.roll(1, 1)),
    "an answer to a refused draft": ("gdn-drafts", "out", lambda x: x.roll(1, 0)),
    **{
        f"the next token in {name}": (name, "out", lambda x: x.roll(1, 0))
        for name in attention_modes.COMPUTED
    },
    "another token kept in a batch of 45 rows": ("top-k-batch", "kept", lambda x: x.roll(1, 1)),
    "no token kept in two rows": ("top-p-alone", "kept", lambda x: x * 0),
    "log probabilities of the second part": ("logprobs-many", "logprobs", _put(1050, 0.0)),
    "silu for sigmoid": ("gated-norm-sigmoid", "out", lambda x: x * 1.02),
    "an adapter of a prompt": ("lora-prompt", "shrunk", lambda x: x.roll(1, 1)),
    "a token late": ("conv1d", "out", lambda x: x.roll(1, 0)),
    "a state that stays": ("conv1d", "states", lambda x: x.roll(1, 1)),
    "the next head": ("gdn-prefill", "out", lambda x: x.roll(1, 1)),
    "a state of the next sequence": ("gdn-prefill", "states", lambda x: x.roll(1, 0)),
    "keys of another length": ("gdn-prefill", "k", lambda x: x * 1.01),
    "a state transposed": ("gdn-decode", "states", lambda x: x.mT),
    "0.1 % of a state": ("gdn-decode", "states", lambda x: x * 1.001),
    "a token of another sequence": ("gdn-mixed", "out", lambda x: x.roll(1, 0)),
    "a norm of the gate": ("gated-norm", "out", lambda x: x * 1.02),
    "the neighbouring column's weight": ("awq", "weights", lambda x: x.roll(1, 1)),
    "a group's scale": ("awq", "out", lambda x: x * 1.02),
    "zero points off by one": ("w4a16-zeros", "out", lambda x: x + x.mean()),
    "a code off by one": ("w4a16-packed", "out", lambda x: x + x.mean()),
    "rows past the last tile": ("w4a16", "out", _put(-1, 0.0)),
    "a block's scale": ("fp8-blocks", "out", lambda x: x * 1.02),
    "another adapter": ("lora", "shrunk", lambda x: x.roll(1, 1)),
    "the neighbouring slice's result": ("lora", "out", lambda x: x.roll(32, 1)),
    "tokens of no adapter": ("lora-one-slice", "out", _put(50, 9.0)),
}


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_results_are_caught(name):
    check, *change = SPOILT[name]
    assert judge(check) is State.PASSED
    assert judge(check, *change) is State.FAILED


def test_each_check_of_a_family_has_a_spoilt_result_and_a_fault():
    assert set(CASES) <= {check for check, *_ in SPOILT.values()}
    # These checks have no planted fault: they are slow, or planted faults of other checks are in
    # the same kernels.
    slow = {"gdn-prefill", "rejection", "top-p"}
    untested = slow | {"gdn-mixed", "lora", "mla-decode-512"}
    planted = {check for *_, check in (FAULTS | LAYOUT | coverage_faults.VLLM).values()}
    planted &= set(CASES)
    assert set(CASES) == planted | untested


def test_draws_that_follow_another_distribution_are_beyond():
    logits = torch.tensor([0.5, 0.0, -1.0, 1.0])
    generator = torch.Generator().manual_seed(5)
    for shift, beyond in ((0.0, False), (1.5, True)):
        shares = (logits + shift * torch.tensor([1.0, 0, 0, 0])).softmax(-1)
        tokens = torch.multinomial(shares, 200, replacement=True, generator=generator)
        assert bool(sampling.find_outliers(tokens, logits).any()) is beyond


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
