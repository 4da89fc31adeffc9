# SPDX-License-Identifier: BSD-3-Clause
"""Single checks against broken implementations, with faults that test_planted's kernel cannot have.

Each fault is planted where a kernel would have it: in scaled_dot_product_attention, or in the
results of flash-attn.
"""

import itertools
from functools import partial

import pytest
import torch
from strix_validate.attention import behaviour, flash_cases, sdpa, sdpa_pairs
from strix_validate.attention.sdpa_cases import CASES
from strix_validate.attention.sdpa_problem import Problem
from strix_validate.checks import Check, RunOptions, Size, State
from strix_validate.numerics import comparison, reference
from strix_validate.tiers import attention, run_each
from strix_validate.triton import modes as triton_modes

attend = torch.nn.functional.scaled_dot_product_attention


def scores(q, k, v):
    """Return the scores and the values in float32."""
    return q.float() @ k.float().transpose(-2, -1) * q.shape[-1] ** -0.5, v.float()


def noisy(q, k, v, **options):
    return attend(q, k, v, **options) + torch.randn(()) * 1e-3


calls = itertools.count()


def rare_nan(q, k, v, **options):
    return attend(q, k, v, **options) * (float("nan") if next(calls) == 70 else 1)


def fp16_scores(q, k, v, **options):
    weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
    return weights @ v


def nan_for_masked(q, k, v, attn_mask=None, **options):
    s, v = scores(q, k, v)
    return (s.masked_fill(~attn_mask, float("-inf")).softmax(-1) @ v).to(q.dtype)


def dropped(q, k, v, dropout_p, is_causal=False, seed=None, shared=False):
    s, v = scores(q, k, v)
    if is_causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    weights = s.softmax(-1)
    generator = torch.Generator().manual_seed(seed) if seed is not None else None
    shape = (1, *weights.shape[1:]) if shared else weights.shape
    keep = torch.rand(shape, generator=generator) >= dropout_p
    return ((weights * keep / (1 - dropout_p)) @ v).to(q.dtype)


def all_dropped(*args, **options):
    return attend(*args, **options) * 0


BEHAVIOUR = {
    "scores overflow in fp16": (fp16_scores, "large"),
    "results of repeated calls differ": (noisy, "deterministic"),
    "NaN in one of a hundred calls": (rare_nan, "finite"),
    "NaN for a query without keys": (nan_for_masked, "masked-row"),
    "dropout with a constant seed": (lambda *a, **o: dropped(*a, seed=1, **o), "dropout"),
    "dropout ignored": (lambda *a, dropout_p, **o: attend(*a, **o), "dropout"),
    "dropout drops the same weights in each sequence": (
        lambda *a, **o: dropped(*a, shared=True, **o),
        "dropout",
    ),
}


@pytest.mark.parametrize("name", BEHAVIOUR)
def test_wrong_behaviour_is_caught(name, monkeypatch):
    broken, body = BEHAVIOUR[name]
    monkeypatch.setitem(sdpa.ROUTES, "default", broken)
    check = Check(f"sdpa/default/{body}", "", "")
    (result,) = run_each([check], RunOptions(), behaviour.checks())
    assert result.state is State.FAILED


def kept_result():
    """Return a function that repeats its first result, as a wrongly captured graph does."""
    results = []

    def route(*args, **options):
        if not results:
            results.append(attend(*args, **options))
        return results[0]

    return route


def by_sequence(q, k, v, **options):
    """Return attention of nested tensors, computed one sequence at a time.

    torch has fused attention of nested tensors only on a GPU.
    """
    sequences = zip(*(x.unbind() for x in (q, k, v)), strict=True)
    rows = torch.cat([attend(*tensors, **options).transpose(0, 1) for tensors in sequences])
    return torch.nested.nested_tensor_from_jagged(rows, v.transpose(1, 2).offsets()).transpose(1, 2)


def neighbours_values(q, k, v, function=attend, **options):
    """Return attention with the values of the previous token, also across sequences."""
    rows = v.transpose(1, 2)
    moved = rows.values().roll(1, 0).contiguous()
    moved = torch.nested.nested_tensor_from_jagged(moved, rows.offsets())
    return function(q, k, moved.transpose(1, 2), **options)


def test_values_of_a_neighbour_in_a_nested_tensor_are_caught(monkeypatch):
    monkeypatch.setattr(behaviour, "need_gpu", lambda *_: None)
    broken = partial(neighbours_values, function=by_sequence)
    for route, state in ((by_sequence, State.PASSED), (broken, State.FAILED)):
        monkeypatch.setitem(sdpa.ROUTES, "default", route)
        check = Check("sdpa/default/nested", "", "")
        (result,) = run_each([check], RunOptions(), behaviour.checks())
        assert result.state is state, result.reason


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU to capture graphs")
@pytest.mark.parametrize(
    ("broken", "body"), [(kept_result(), "captured"), (neighbours_values, "nested")]
)
def test_wrong_behaviour_on_a_gpu_is_caught(broken, body, monkeypatch):
    check = Check(f"sdpa/default/{body}", "", "")
    options = RunOptions(device="cuda")
    (result,) = run_each([check], options, behaviour.checks())
    assert result.state is State.PASSED, result.reason
    monkeypatch.setitem(sdpa.ROUTES, "default", broken)
    (result,) = run_each([check], options, behaviour.checks())
    assert result.state is State.FAILED and result.reason == "wrong: out", result.reason


def test_right_dropout_passes(monkeypatch):
    monkeypatch.setitem(sdpa.ROUTES, "default", dropped)
    check = Check("sdpa/default/dropout", "", "")
    (result,) = run_each([check], RunOptions(), behaviour.checks())
    assert result.state is State.PASSED, result.reason


def test_the_logsumexp_of_a_backend_that_torch_lacks_is_skipped(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("No available kernel. Aborting execution.")

    def fail(*_):
        raise RuntimeError("USE_FLASH_ATTENTION was not enabled for build.")

    monkeypatch.setitem(sdpa.ROUTES, "flash", refuse)
    monkeypatch.setitem(behaviour.LSE, "flash", fail)
    (result,) = run_each([Check("sdpa/flash/lse")], RunOptions(), behaviour.checks())
    assert result.state is State.SKIPPED, result.reason


def test_a_kernel_that_drops_every_weight_is_caught():
    case = next(case for case in sdpa_pairs.cases() if case.dropout and case.needs == "qkv")
    problem = Problem(case, torch.float16, "cpu")
    check = Check(f"sdpa/default/{case.name}-float16", "", "")
    for route, state in ((attend, State.PASSED), (all_dropped, State.FAILED)):
        result = sdpa.run_one(check, route, problem)
        assert result.state is state, result.reason


def test_silent_fall_back_to_math_is_caught():
    problem = Problem(CASES[0], torch.bfloat16, "cpu")
    check = Check("sdpa/flash/full-bfloat16", "", "")
    result = sdpa.run_one(check, sdpa.ROUTES["math"], problem)
    assert result.state is State.FAILED
    assert "flash was requested, and math ran" in result.reason
    assert sdpa.run_one(check, sdpa.ROUTES["flash"], problem).state is State.PASSED


def flash_case(name):
    return next(case for case in flash_cases.cases(torch.float32) if case.name == f"{name}-float32")


def neighbours_seen(_):
    """Return the results of a kernel in which each sequence also sees the keys of the others."""
    call = flash_case("varlen").call
    q, k, v = (call.tensors[name].transpose(0, 1)[None] for name in ("q", "k", "v"))
    grad_out = call.grad_out.transpose(0, 1)[None]
    results = reference.attention(q, k, v, grad_out, causal="bottom-right")
    return {name: tensor[0].transpose(0, 1) for name, tensor in results.items()}


#: By name: the case, and a function that makes wrong results from the case's correct results.
FLASH = {
    "a sequence sees the keys of its neighbours": ("varlen", neighbours_seen),
    "call changes cache_seqlens": (
        "cache",
        lambda results: {"cache_seqlens": results["cache_seqlens"] + 4},
    ),
    "keys written to the wrong row of the cache": (
        "cache-rows",
        lambda results: {"k_cache": results["k_cache"].flip(0)},
    ),
    "dropout with a constant seed": ("dropout", lambda _: {"differing": torch.tensor(0.0)}),
    "results of repeated calls differ": (
        "deterministic",
        lambda _: {"differing": torch.tensor(1.0)},
    ),
}


@pytest.mark.parametrize("name", FLASH)
def test_wrong_flash_attn_is_caught(name):
    case_name, spoil = FLASH[name]
    case = flash_case(case_name)
    correct = case.expected(torch.float32)
    for results, state in ((correct, State.PASSED), (correct | spoil(correct), State.FAILED)):
        answer = triton_modes.CallAnswer(results)
        assert attention.judge(Check("flash-attn", "", ""), case, answer).state is state


def test_cases_are_listed_without_their_tensors(monkeypatch):
    """Each run lists all cases. Making their tensors would take half the time of three checks."""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn", None)
        listed = list(flash_cases.cases(torch.float16))
        with pytest.raises(TypeError):
            _ = listed[0].call
    for case in (case for case in listed if case.size is Size.QUICK):
        assert case.title.split()[0] == case.call.name


def test_refusal_is_right_only_where_allowed_and_only_as_such():
    refused, too_large, crashed = (
        triton_modes.CallAnswer(error=(kind, "why"))
        for kind in ("NotImplementedError", "OutOfResources", "RuntimeError")
    )
    check = Check("flash-attn", "", "")
    for name, allowed in (
        ("window", [refused]),
        ("d512", [refused, too_large]),
        ("full", []),
    ):
        case = flash_case(name)
        for answer in (refused, too_large, crashed):
            expected = State.PASSED if answer in allowed else State.FAILED
            assert attention.judge(check, case, answer).state is expected


def test_a_yardstick_that_is_not_finite_is_an_error():
    """If the results from which a bound is computed have a NaN, the comparison raises an error.

    Without the error, the bound would be infinite, and every result would pass.
    """
    exact = {"out": torch.zeros(3, dtype=torch.float64)}
    with pytest.raises(ValueError, match="not finite"):
        comparison.bounds(exact, {"out": torch.full((3,), float("nan"))}, exact, torch.float16)


def test_a_gradient_of_zeros_may_have_the_rounding_of_its_terms():
    """With one key, dk cancels to zero. If only dk is needed, no other gradient gives a bound."""
    exact = {"dk": torch.zeros(3).double()}
    terms = {"dk": torch.full((3,), 8.0).double()}
    bound = comparison.bounds(exact, exact, terms, torch.float16)["dk"]
    assert 8 * 2**-23 < bound < 8 * 2**-20


def test_sizes_hold_the_smaller_ones():
    assert Size.STRESS.includes(Size.QUICK)
    assert Size.FULL.includes(Size.FULL)
    assert not Size.QUICK.includes(Size.FULL)
