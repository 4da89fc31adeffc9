# SPDX-License-Identifier: BSD-3-Clause
"""The harness can fail: it is fed broken implementations and must catch them all.

Each fault is planted where a kernel would have it: behind scaled_dot_product_attention, or in what
flash-attn returns. The last test prints the tally.
"""

import itertools

import pytest
import torch
from strix_validate.attention import behaviour, flash_cases, sdpa
from strix_validate.attention.sdpa_problem import Problem
from strix_validate.attention.sdpa_shapes import SHAPES
from strix_validate.checks import Check, RunOptions, Size, State
from strix_validate.numerics import comparison, reference
from strix_validate.tiers import attention, run_each
from strix_validate.triton import modes as triton_modes

right = torch.nn.functional.scaled_dot_product_attention
caught: dict[str, bool] = {}


def scores(q, k, v, factor=1.0):
    """Scores and values by query head, in float32."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
    return q.float() @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 * factor, v


def attend(q, k, v, is_causal=False, attn_mask=None, factor=1.0, mask=None, **ignored):
    """Attention that is right unless told otherwise, written out."""
    s, v = scores(q, k, v, factor)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        s = s.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        s = s + attn_mask
    if is_causal:
        s = s.masked_fill(~(causal(s) if mask is None else mask(s)), float("-inf"))
    return (s.softmax(-1).nan_to_num(0) @ v).to(q.dtype)


def causal(s, shift=0):
    return torch.ones(s.shape[-2:], dtype=torch.bool).tril(shift)


def bottom_right(s):
    return causal(s, s.shape[-1] - s.shape[-2])


def ragged_tail(q, k, v, **options):
    """The last key of a block that is not full is left out."""
    n = k.shape[2]
    n -= n % 16 != 0 and n > 1
    return attend(q, k[:, :, :n], v[:, :, :n], **options | {"mask": lambda s: causal(s)})


def fp16_accumulation(q, k, v, **options):
    """The products with v are summed in the dtype of v."""
    s, _ = scores(q, k, v)
    weights = s.softmax(-1).to(q.dtype)
    v = v.repeat_interleave(q.shape[1] // k.shape[1], 1)
    out = torch.zeros_like(q)
    for i in range(k.shape[2]):
        out = out + weights[..., i : i + 1] * v[:, :, i : i + 1]
    return out


def nan_tile(q, k, v, **options):
    out = right(q, k, v, **options)
    mask = torch.zeros_like(out)
    mask[..., -1:, -1] = float("nan")
    return out + mask


def zeros(q, k, v, **options):
    return right(q, k, v, **options) * 0


def wrong_kv_head(q, k, v, **options):
    return attend(q, k.roll(1, 1), v.roll(1, 1), **options)


def inverted_mask(q, k, v, attn_mask=None, **options):
    return attend(q, k, v, attn_mask=None if attn_mask is None else ~attn_mask, **options)


def no_grad_for_keys(q, k, v, **options):
    return right(q, k.detach() + 0 * k, v, **options)


#: name: (broken route, the shape whose check must fail, dtype)
NUMERICS = {
    "scale 1 % off": (lambda *a, **o: attend(*a, factor=1.01, **o), "full", torch.float16),
    "causal mask dropped": (lambda *a, **o: attend(*a, mask=lambda s: s == s, **o), "causal",
                            torch.bfloat16),
    "causal mask off by one": (lambda *a, **o: attend(*a, mask=lambda s: causal(s, 1), **o),
                               "causal", torch.bfloat16),
    "causal in the other corner": (lambda *a, **o: attend(*a, mask=bottom_right, **o),
                                   "cross-causal", torch.float16),
    "ragged tail off by one": (ragged_tail, "ragged", torch.bfloat16),
    "accumulation in fp16": (fp16_accumulation, "full", torch.float16),
    "NaN in one element": (nan_tile, "full", torch.float32),
    "output all zero": (zeros, "full", torch.bfloat16),
    "wrong key/value head": (wrong_kv_head, "gqa", torch.bfloat16),
    "inverted mask": (inverted_mask, "bool-mask", torch.float16),
    "no gradient for keys": (no_grad_for_keys, "full", torch.bfloat16),
    "wrong above head dim 256": (lambda q, k, v, **o: attend(q[..., :256], k[..., :256], v, **o),
                                 "d512", torch.float16),
}  # fmt: skip


def plant(name, result):
    caught[name] = result.state is State.FAILED
    if not caught[name]:
        pytest.fail(f"{name} was not caught")


@pytest.mark.parametrize("name", NUMERICS)
def test_wrong_numbers_are_caught(name):
    broken, shape_name, dtype = NUMERICS[name]
    shape = next(shape for shape in SHAPES if shape.name == shape_name)
    problem = Problem(shape, dtype, "cpu")
    check = Check("sdpa/default/x", "", "")
    plant(name, sdpa.run_one(check, broken, problem))


@pytest.mark.parametrize("shape", SHAPES[:16], ids=lambda shape: shape.name)
def test_right_numbers_pass(shape):
    """The written-out attention, which the faults are variations of, is right."""
    problem = Problem(shape, torch.bfloat16, "cpu")
    check = Check("sdpa/default/x", "", "")
    assert sdpa.run_one(check, attend, problem).state is State.PASSED


def noisy(q, k, v, **options):
    return right(q, k, v, **options) + torch.randn(()) * 1e-3


calls = itertools.count()


def rare_nan(q, k, v, **options):
    return right(q, k, v, **options) * (float("nan") if next(calls) == 70 else 1)


def fp16_scores(q, k, v, **options):
    weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
    return weights @ v


def nan_for_masked(q, k, v, attn_mask=None, **options):
    s, v = scores(q, k, v)
    return (s.masked_fill(~attn_mask, float("-inf")).softmax(-1) @ v).to(q.dtype)


def dropped(q, k, v, dropout_p, is_causal=False, seed=None, scaled=True, again=True, shared=False):
    s, v = scores(q, k, v)
    if is_causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    weights = s.softmax(-1)
    generator = torch.Generator().manual_seed(seed) if seed is not None else None
    shape = (1, *weights.shape[1:]) if shared else weights.shape
    keep = torch.rand(shape, generator=generator) >= dropout_p
    kept = weights * keep / (1 - dropout_p if scaled else 1)
    out = (kept @ v).to(q.dtype)
    if again:
        return out
    # another choice in the backward pass
    other = weights * (torch.rand(shape) >= dropout_p) / (1 - dropout_p)
    wrong = (other @ v).to(q.dtype)
    return wrong + (out - wrong).detach()


BEHAVIOUR = {
    "scores overflow in fp16": (fp16_scores, "large"),
    "not deterministic": (noisy, "deterministic"),
    "NaN in one call of a hundred": (rare_nan, "finite"),
    "NaN for a query without keys": (nan_for_masked, "masked-row"),
    "dropout with a constant seed": (lambda *a, **o: dropped(*a, seed=1, **o), "dropout"),
    "dropout not scaled": (lambda *a, **o: dropped(*a, scaled=False, **o), "dropout"),
    "dropout ignored": (lambda *a, dropout_p, **o: right(*a, **o), "dropout"),
    "dropout of other weights backward": (lambda *a, **o: dropped(*a, again=False, **o), "dropout"),
    "dropout alike in each sequence": (lambda *a, **o: dropped(*a, shared=True, **o), "dropout"),
}


@pytest.mark.parametrize("name", BEHAVIOUR)
def test_wrong_behaviour_is_caught(name, monkeypatch):
    broken, body = BEHAVIOUR[name]
    monkeypatch.setitem(sdpa.ROUTES, "default", broken)
    check = Check(f"sdpa/default/{body}", "", "")
    (result,) = run_each([check], RunOptions(), behaviour.checks())
    plant(name, result)


def kept_result():
    """Attention of the first call alone, which a captured graph then gives again."""
    found = []

    def route(*args, **options):
        found.append(found[0] if found else right(*args, **options))
        return found[0]

    return route


def neighbours_values(q, k, v, **options):
    """Each token's values are those of the one before it, also across sequences."""
    rows = v.transpose(1, 2)
    moved = rows.values().roll(1, 0).contiguous()
    moved = torch.nested.nested_tensor_from_jagged(moved, rows.offsets())
    return right(q, k, moved.transpose(1, 2), **options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU captures graphs")
@pytest.mark.parametrize(
    ("broken", "body"), [(kept_result(), "captured"), (neighbours_values, "nested")]
)
def test_wrong_behaviour_on_a_gpu_is_caught(broken, body, monkeypatch):
    check, options = Check(f"sdpa/default/{body}", "", ""), RunOptions(device="cuda")
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


def test_silent_fall_back_to_math_is_caught():
    problem = Problem(SHAPES[0], torch.bfloat16, "cpu")
    check = Check("sdpa/flash/full-bfloat16", "", "")
    result = sdpa.run_one(check, sdpa.ROUTES["math"], problem)
    plant("silent fall-back to math", result)
    assert "flash was asked for and math ran" in result.reason
    assert sdpa.run_one(check, sdpa.ROUTES["flash"], problem).state is State.PASSED


def flash_case(name):
    return next(case for case in flash_cases.cases(torch.float32) if case.name == f"{name}-float32")


def window_ignored(case):
    q, k, v = (case.call.tensors[name].transpose(1, 2) for name in ("q", "k", "v"))
    found = reference.attention(q, k, v, case.call.grad_out.transpose(1, 2), causal="bottom-right")
    return {name: tensor.transpose(1, 2) for name, tensor in found.items()}


def neighbours_seen(case):
    """One sequence sees the keys of the others: variable length taken for one long sequence."""
    call = case.call
    q, k, v = (call.tensors[name].transpose(0, 1)[None] for name in ("q", "k", "v"))
    found = reference.attention(q, k, v, call.grad_out.transpose(0, 1)[None], causal="bottom-right")
    return {name: tensor[0].transpose(0, 1) for name, tensor in found.items()}


FLASH = {
    "window ignored": ("window", window_ignored),
    "keys of neighbours seen": ("varlen", neighbours_seen),
    "caller's lengths changed": (
        "cache",
        lambda case: (
            (right := case.expected(torch.float32)) | {"cache_seqlens": right["cache_seqlens"] + 4}
        ),
    ),
    "keys in the wrong row": (
        "cache-rows",
        lambda case: (
            (right := case.expected(torch.float32)) | {"k_cache": right["k_cache"].flip(0)}
        ),
    ),
    "flash-attn dropout with a constant seed": (
        "dropout",
        lambda case: {"differing": torch.tensor(0.0)},
    ),
    "flash-attn not deterministic": (
        "deterministic",
        lambda case: case.expected(torch.float32) | {"differing": torch.tensor(1.0)},
    ),
}


@pytest.mark.parametrize("name", FLASH)
def test_wrong_flash_attn_is_caught(name):
    case_name, broken = FLASH[name]
    case = flash_case(case_name)
    check = Check("flash-attn", "", "")
    plant(name, attention.judge(check, case, triton_modes.CallAnswer(broken(case))))
    answer = triton_modes.CallAnswer(case.expected(torch.float32))
    assert attention.judge(check, case, answer).state is State.PASSED


def test_a_yardstick_that_is_not_finite_is_an_error():
    """NaN in it would make every bound infinite, and every result right."""
    exact = {"out": torch.zeros(3, dtype=torch.float64)}
    with pytest.raises(ValueError, match="not finite"):
        comparison.bounds(exact, {"out": torch.full((3,), float("nan"))}, torch.float16)


def test_sizes_hold_the_smaller_ones():
    assert Size.STRESS.holds(Size.QUICK) and Size.FULL.holds(Size.FULL)
    assert not Size.QUICK.holds(Size.FULL)


def test_tally(capsys):
    """Last: every planted fault was caught."""
    planted = len(NUMERICS) + len(BEHAVIOUR) + len(FLASH) + 1
    with capsys.disabled():
        print(f"\n{planted} planted, {sum(caught.values())} caught")
    if len(caught) == planted:  # the whole file was run
        assert all(caught.values()) and planted >= 12
