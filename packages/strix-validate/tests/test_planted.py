# SPDX-License-Identifier: BSD-3-Clause
"""Run checks against a kernel with one fault at a time.

tiled.Kernel replaces the kernels of scaled_dot_product_attention and flash-attn. Without a fault,
tiled.Kernel passes every check. With any fault, at least one check fails. test_faults.py has faults
that tiled.Kernel cannot have. To run all sizes that fit on a CPU: python tests/test_planted.py full
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice

import pytest
import tiled
import torch
from strix_validate.attention import behaviour, flash_cases, sdpa, sdpa_pairs
from strix_validate.attention.sdpa_cases import CASES
from strix_validate.attention.sdpa_problem import Problem
from strix_validate.checks import Check, Result, RunOptions, Size, State
from strix_validate.tiers import attention, run_each
from strix_validate.triton import modes as triton_modes

HALF = torch.float16  # the dtype of sums in kernels that sum in 16 bits
#: By name: fields of tiled.Kernel, and a prefix of the check that was written for the fault, or ""
#: if any check may catch it.
FAULTS: dict[str, tuple[dict, str]] = {
    "scale off by 1 %": ({"scale": 1.01}, ""),
    "causal queries see one key too many": ({"diagonal": 1}, "causal"),
    "causal queries see one key too few": ({"diagonal": -1}, "causal"),
    "causal mask ignored": ({"diagonal": 1 << 20}, ""),
    "causal mask is aligned at the wrong corner": ({"other_corner": True}, "cross-causal"),
    "window is one key too wide": ({"window": 1}, "window"),
    "window is one key too narrow": ({"window": -1}, "window"),
    "window ignored": ({"window": 1 << 20}, "window"),
    "softcap ignored": ({"softcap": False}, "softcap"),
    "query heads read a neighbour's key/value head": ({"neighbour_head": True}, "gqa"),
    "dk and dv come from only one query head of each group": ({"one_head_of_group": True}, "gqa"),
    "last tile of keys left out": ({"skips_partial_tile": True}, "ragged"),
    "last query not written": ({"skips_last_query": True}, "ragged"),
    "padding after the last key counts in the sum of weights": ({"counts_padding": True}, "ragged"),
    "keys after the 512th ignored": ({"max_keys": 512}, "blocks"),
    "queries after the 512th not computed": ({"max_queries": 512}, "blocks"),
    "nothing written": ({"max_queries": 0}, ""),
    "all sequences read the tensors of the first sequence": ({"first_sequence": True}, ""),
    "elements after the end of the head dim used": ({"padded_lanes": True}, "d72"),
    "elements of the head dim after the 256th ignored": ({"max_lanes": 256}, "d512"),
    "strides ignored": ({"contiguous": True}, "strided"),
    "mask applied only to the first tile of keys": ({"mask_of_first_tile": True}, "bool-mask"),
    "mask inverted": ({"inverts_mask": True}, "bool-mask"),
    "logsumexp is in base 2": ({"log_base": 0.6931471805599453}, "lse"),
    "logsumexp is that of the last tile alone": ({"lse_of_last_tile": True}, "lse"),
    "dq without the scale": ({"dq_scale": 8.0}, ""),
    "dk without the scale": ({"dk_scale": 8.0}, ""),
    "gradient of keys is zero": ({"dk_scale": 0.0}, ""),
    "dv off by 2 %": ({"dv_scale": 1.02}, ""),
    "delta, the sum of grad_out * out, left out": ({"no_delta": True}, ""),
    "backward pass reads the output of the previous call": ({"stale_out": True}, ""),
    "weights that dropout keeps are not scaled": ({"keep_scale": False}, "dropout"),
    "backward pass drops other weights than the forward pass": ({"keep_again": True}, "dropout"),
    "NaN does not reach the results": ({"swallows_nan": True}, "nan"),
    "out summed in 16 bits": ({"sums": HALF}, "sink-key"),
    "dk and dv summed in 16 bits": ({"grad_sums": HALF}, "sink-query"),
    "out summed in 16 bits, in tiles of 16 keys": ({"sums": HALF, "tile": 16}, "sink-key"),
    "all numbers truncated instead of rounded": ({"truncates": "all"}, ""),
    **{
        f"{name} truncated": ({"truncates": name}, "")
        for name in ("weights", "out", "dq", "dk", "dv")
    },
    "packed keys read at the queries' offsets": ({"queries_for_keys": True}, "varlen"),
    "sequence without keys is left out, and later sequences move up": (
        {"empty_shifts": True},
        "varlen-no-keys",
    ),
    "scale argument ignored": ({"ignores_scale": True}, "scale-"),
    "scale argument multiplied by the default scale": ({"scale_twice": True}, "scale-"),
    "first sequence's mask used for all sequences": ({"first_mask": True}, "padding-mask"),
    "first head's mask used for all heads": ({"one_mask_for_heads": True}, "learned-mask"),
    "smallest number of a mask overflows in base 2": ({"mask_in_base_2": True}, "least-mask"),
    "gradient of the mask multiplied by a scale": ({"dmask_scale": 0.18}, "learned-mask"),
    "values read with the keys' head dim": ({"v_lanes_of_keys": True}, "value-dim-72"),
    "values shifted by one element if keys have another head dim": (
        {"v_lanes_shared": True},
        "value-dim",
    ),
    "dq lacks delta if dq is the only gradient": ({"alone": "dq"}, "gradient-q"),
    "dk lacks delta if dk is the only gradient": ({"alone": "dk"}, "gradient-k"),
    "dv off by 5 % if dv is the only gradient": ({"alone": "dv"}, "gradient-v"),
    "stride of 0 replaced by the size of a head": ({"stride_of_size": True}, "expanded"),
    "number of query heads per group rounded up to a power of two": (
        {"group_rounded": True},
        "layer-Llama-3.2-3B",
    ),
    "heads after the 32nd not computed": ({"max_heads": 32}, "heads-40"),
    "heads after the 65535th, counted over the batch, not computed": (
        {"max_planes": 65535},
        "heads-65568",
    ),
    "packed tokens after the 65536th not computed": ({"max_tokens": 65536}, "varlen-65600"),
    "sequences after the fourth not computed": ({"max_sequences": 4}, "batch-9"),
    "keys after the 2048th ignored": ({"max_keys": 2048}, "decode-4100"),
    "causal queries after the last key not computed": (
        {"skips_queries_past_keys": True},
        "cross-causal-long",
    ),
    "NaN does not reach the results of causal calls": ({"swallows_nan_causal": True}, "nan"),
    "backward pass computes exp without subtracting the maximum": (
        {"no_maximum_backward": True},
        "peaked",
    ),
    "dropout pattern repeats after 64 queries": ({"dropout_tile": (64, 0)}, "dropout"),
    "dropout pattern repeats after 128 keys": ({"dropout_tile": (0, 128)}, "dropout"),
    "ALiBi ignored": ({"ignores_alibi": True}, "alibi-heads"),
    "first sequence's ALiBi slopes used for all sequences": (
        {"alibi_of_first": True},
        "alibi-batch",
    ),
    "ALiBi slopes have the wrong sign": ({"alibi_sign": -1.0}, "alibi-heads"),
    "rotary angles begin at 0, not at the cache's length": (
        {"rotary_offset": False},
        "cache-rotary",
    ),
    "rotary embedding pairs neighbours instead of halves, and vice versa": (
        {"rotary_pairs": False},
        "cache-rotary-halves",
    ),
    "new keys not rotated": ({"rotary_keys": False}, "cache-rotary"),
    "elements after the rotated ones are zero": ({"keeps_unrotated_lanes": False}, "cache-rotary"),
    "keys and values of a packed tensor swapped": ({"swapped_pack": "kv"}, "packed-kv"),
    "queries and keys of a packed tensor swapped": ({"swapped_pack": "qk"}, "packed-qkv"),
    "window limited to 128 keys on each side": ({"max_window": 128}, "window-blocks"),
    "single key after the last whole block left out": ({"drops_one_behind": 128}, "length-129"),
    "causal queries see one key too many above head dim 128": ({"wide_diagonal": 1}, "d256-causal"),
    "values read with the keys' strides": ({"values_as_keys": True}, "strided-values"),
    "slice of a cache read as a contiguous tensor": ({"slice_as_whole": True}, "cache"),
    "gradient of a sum applied to the first query only": ({"first_of_sum": True}, "summed"),
    "masks ignored at head dim 128": ({"masks_below": 128}, "bool-mask-d128"),
    "decoding: query heads read a neighbour's key/value head": (
        {"neighbour_of_one": True},
        "layer-Llama-3.1-8B-decode",
    ),
    "scale off by 2 % at head dim 128 without a mask": ({"full_128": 1.02}, "d128-full"),
    "decoding: keys after the 256th ignored": ({"max_keys_of_one": 256}, "cache-Llama-3.1-8B"),
    "flash-attn's decoding: number of query heads per group rounded up to a power of two": (
        {"group_rounded": True},
        "cache-Granite-3.1-3B",
    ),
    "flash-attn's decoding: query heads read a neighbour's key/value head": (
        {"neighbour_of_one": True},
        "cache-Llama-3.1-8B",
    ),
    "flash-attn's decoding: elements of the head dim after the 64th ignored": (
        {"max_lanes_of_one": 64},
        "cache-Llama-3.1-8B",
    ),
    "flash-attn's decoding: heads after the fourth not computed": (
        {"max_heads": 4},
        "cache-gpt-oss-20b",
    ),
    "padding after the last key makes dq NaN": ({"padding_backward": True}, "low"),
    "running maximum starts at -100": ({"first_maximum": -100.0}, "low"),
    "masked keys get the score -500": ({"shut_out": -500.0}, "low"),
    "weights that dropout keeps are not scaled in causal calls": (
        {"causal_keep": False},
        "dropout",
    ),
    # These faults need two arguments together, which only the combined shapes have.
    "masks ignored in calls with dropout": ({"mask_without_dropout": True}, "pairs"),
    "mask indexed by key/value head, not by query head": ({"mask_by_key_head": True}, "pairs"),
    "slice of a mask read as a contiguous tensor": ({"mask_contiguous": True}, "pairs"),
    "only the first query gets an additive mask that all queries share": (
        {"mask_of_first_query": True},
        "pairs",
    ),
    "additive mask ignored if its dtype is not that of the queries": (
        {"mask_of_own_dtype": True},
        "pairs",
    ),
    "running maximum starts at -100 if there is an additive mask": (
        {"first_maximum_added": -100.0},
        "pairs",
    ),
    "values shifted by one element if heads share them and keys have a larger head dim": (
        {"narrow_in_groups": True},
        "pairs",
    ),
    "second backward pass adds its dq to that of the first pass": ({"accumulates": True}, "pairs"),
    "gradient of a mask that sequences share comes from the first sequence only": (
        {"dmask_of_first": True},
        "pairs",
    ),
    # These faults need large batches, a second block, or arguments that no other check passes.
    "sequences after the 32nd not computed": ({"max_sequences": 32}, "batch-33"),
    "heads after the 64th not computed": ({"max_heads": 64}, "heads-72"),
    "above head dim 128, keys after the 256th get no gradient": (
        {"wide_gradient_keys": 256},
        "d256-keys",
    ),
    "above head dim 128, keys after the 128th get no gradient": (
        {"wide_gradient_keys": 128},
        "d256-keys-float16",
    ),
    "flash-attn: sequences after the 16th not computed": ({"max_sequences": 16}, "batch-17"),
    "packed sequences after the 16th not computed": ({"max_sequences": 16}, "varlen-20"),
    "flash-attn's decoding: keys after the 4096th ignored": (
        {"max_keys_of_one": 4096},
        "cache-4200",
    ),
    "ALiBi favours later keys": ({"alibi_signed": True}, "alibi-full"),
    "flash-attn's decoding: ALiBi ignored": ({"ignores_alibi": True}, "cache-alibi-heads"),
    "flash-attn's decoding: first sequence's ALiBi slopes used for all sequences": (
        {"alibi_of_first": True},
        "cache-alibi-batch",
    ),
    "window ignored if it has no left bound": ({"open_window": False}, "window-right"),
    "query that precedes all keys sees the first key in spite of its window": (
        {"window_from_first": True},
        "window-short-k",
    ),
    "in a call that is not causal, queries are rotated at different positions": (
        {"rotary_one_by_one": True},
        "cache-full-rotary",
    ),
    "cache length for all sequences applied only to the first sequence": (
        {"first_length": True},
        "cache-integer",
    ),
    "logsumexp is in base 2 if a call has a KV cache": (
        {"log_base": 0.6931471805599453},
        "cache-integer",
    ),
    "packed sequences: number of query heads per group rounded up to a power of two": (
        {"group_rounded_packed": True},
        "layer-Llama-3.2-3B-varlen",
    ),
}
#: Faults that are also planted in a kernel that is wrong only in inference, without gradients.
INFERENCE = (
    "scale off by 1 %",
    "causal queries see one key too many",
    "last tile of keys left out",
    "out truncated",
    "out summed in 16 bits",
    "scale argument ignored",
    "mask applied only to the first tile of keys",
)
FAULTS |= {
    f"inference: {name}": ({"inference": tuple(FAULTS[name][0].items())}, FAULTS[name][1])
    for name in INFERENCE
}
#: Faults that only full checks catch.
AT_FULL = (
    "heads after the 65535th, counted over the batch, not computed",
    "packed tokens after the 65536th not computed",
)


class Attention(torch.autograd.Function):
    """torch's interface to a kernel. It keeps the previous output for the fault `stale_out`."""

    last: torch.Tensor | None = None

    @staticmethod
    def forward(ctx, kernel, options, q, k, v, mask):
        ctx.kernel = kernel
        ctx.options = options | {"mask": mask}
        ctx.save_for_backward(q, k, v)
        ctx.rounds = 0
        out = kernel(q, k, v, **ctx.options)["out"]
        ctx.stale = Attention.last
        Attention.last = out.float()
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v = ctx.saved_tensors
        size = grad_out.shape
        stale = ctx.stale if ctx.stale is not None and ctx.stale.shape == size else None
        stale = torch.zeros(size) if stale is None else stale
        needs = "".join(n for n, x in zip("qkv", ctx.needs_input_grad[2:5], strict=True) if x)
        gradients = ctx.kernel(q, k, v, grad_out, stale=stale, needs=needs, **ctx.options)
        ctx.rounds += 1
        if ctx.kernel.accumulates:
            gradients["dq"] *= ctx.rounds
        dmask = None
        if ctx.needs_input_grad[5]:
            dmask = gradients["dmask"]
            size = ctx.options["mask"].shape
            if ctx.kernel.dmask_of_first and size[0] == 1:
                dmask[1:] = 0
            dmask = dmask.sum_to_size(size)
        return None, None, gradients["dq"], gradients["dk"], gradients["dv"], dmask


def route(kernel: tiled.Kernel):
    def call(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **ignored):
        options = {"causal": "top-left" if is_causal else "", "scale": scale}
        if dropout_p:
            chances = torch.rand(2, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
            for axis, tile in zip((3, 4), kernel.dropout_tile, strict=True):
                if tile:
                    places = torch.arange(chances.shape[axis]) % tile
                    chances = chances.index_select(axis, places)
            scaled = kernel.keep_scale and (kernel.causal_keep or not is_causal)
            keep = (chances >= dropout_p) / (1 - dropout_p if scaled else 1)
            options["keep"] = (keep[0], keep[int(kernel.keep_again)])
        chosen = kernel if torch.is_grad_enabled() else replace(kernel, **dict(kernel.inference))
        return Attention.apply(chosen, options, q, k, v, attn_mask)

    return call


def run_dense(kernel: tiled.Kernel, q, k, v, grad_out, options: dict, alibi=None) -> dict:
    """Run the kernel for tensors in flash-attn's layout."""
    named = {
        "scale": options.get("softmax_scale"),
        "alibi": None if alibi is None else alibi.expand(q.shape[0], -1),
        "causal": "bottom-right" if options["causal"] else "",
        "window": options.get("window_size", (-1, -1)),
        "softcap": options.get("softcap", 0.0),
    }
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if grad_out is not None:
        grad_out = grad_out.transpose(1, 2)
    results = kernel(q, k, v, grad_out, stale=torch.zeros(q.shape), **named)
    results.pop("dmask", None)
    for name in results.keys() - {"lse"}:
        results[name] = results[name].transpose(1, 2)
    return results


def unpack(kernel: tiled.Kernel, tensors: dict, axis: int) -> dict:
    """Return the tensors, with q, k and v as separate tensors if they are packed in one."""
    separate = dict(tensors)
    for name in ("kv", "qkv"):
        if name in separate:
            separate |= dict(zip(name, separate.pop(name).unbind(axis), strict=True))
            if kernel.swapped_pack:
                first, second = kernel.swapped_pack
                separate[first], separate[second] = separate[second], separate[first]
    return separate


def pack_gradients(results: dict, tensors: dict, axis: int) -> dict:
    """Return the results with the gradients of packed tensors."""
    names = [name for name in ("kv", "qkv") if name in tensors]
    return results | {f"d{n}": torch.stack([results[f"d{x}"] for x in n], axis) for n in names}


def run_varlen(kernel: tiled.Kernel, tensors: dict, grad_out, options: dict) -> dict:
    if kernel.group_rounded_packed:
        kernel = replace(kernel, group_rounded=True)
    packed_tensors = tensors
    tensors = unpack(kernel, tensors, 1)
    q, k, v = (tensors[name] for name in "qkv")
    shared_starts = tensors.get("cu_seqlens")
    starts_q = tensors.get("cu_seqlens_q", shared_starts).tolist()
    starts_k = tensors.get("cu_seqlens_k", shared_starts).tolist()
    sequences = [*zip(starts_q, starts_k, starts_q[1:], starts_k[1:], strict=False)]
    results = {"out": torch.zeros_like(q), "lse": torch.zeros(q.shape[1], len(q))}
    results |= {f"d{name}": torch.zeros_like(tensors[name]) for name in "qkv"}
    moved = 0
    for q0, k0, q1, k1 in sequences[: kernel.max_sequences]:
        rows = slice(q0, q1)
        keys = slice(k0, k1)
        if kernel.queries_for_keys:
            keys = slice(q0, min(q0 + k1 - k0, len(k)))
        if kernel.empty_shifts and q1 > q0 and k1 == k0:
            moved += q1 - q0
        if q1 == q0 or keys.stop <= keys.start:
            continue
        parts = (x[None] for x in (q[rows], k[keys], v[keys], grad_out[rows]))
        sequence = run_dense(kernel, *parts, options)
        rows = slice(q0 - moved, q1 - moved)
        for name in ("out", "dq"):
            results[name][rows] = sequence[name][0]
        results["lse"][:, rows] = sequence["lse"][0]
        results["dk"][keys], results["dv"][keys] = sequence["dk"][0], sequence["dv"][0]
    results["out"][kernel.max_tokens :] = 0
    return pack_gradients(results, packed_tensors, 1)


def run_cached(kernel: tiled.Kernel, tensors: dict, options: dict) -> dict:
    if {"block_table", "cache_leftpad"} & tensors.keys():
        raise NotImplementedError
    results = {name: x.clone() for name, x in tensors.items()}
    count = len(tensors["q"])
    rows = tensors.get("cache_batch_idx", torch.arange(count)).tolist()
    lengths = tensors.get("cache_seqlens", torch.full((count,), options.get("cache_seqlens", 0)))
    if kernel.first_length and "cache_seqlens" in options:
        lengths[1:] = 1
    parts = []
    for i, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=True)):
        end = length + (tensors["k"].shape[1] if "k" in tensors else 0)
        row_tensors = dict(tensors)
        if "rotary_cos" in tensors:
            start = length if kernel.rotary_offset else 0
            for name in ("q", "k") if kernel.rotary_keys else ("q",):
                turned = turn(kernel, tensors[name][i].float(), tensors, start, options, name)
                row_tensors[name] = turned.to(tensors[name].dtype)[None].expand(count, -1, -1, -1)
        for name in ("k", "v") if "k" in tensors else ():
            results[f"{name}_cache"][row, length:end] = row_tensors[name][i]
        keys, values = (results[f"{name}_cache"][row, None, :end] for name in "kv")
        slopes = tensors.get("alibi_slopes")
        if slopes is not None:
            sequence = 0 if kernel.alibi_of_first else i
            slopes = slopes.expand(count, -1)[sequence, None]
        parts.append(
            run_dense(kernel, row_tensors["q"][i, None], keys, values, None, options, slopes)
        )
    names = ("out", "lse") if options.get("return_softmax_lse") else ("out",)
    return results | {name: torch.cat([part[name] for part in parts]) for name in names}


def turn(kernel: tiled.Kernel, x, tensors: dict, start: int, options: dict, name: str):
    """Apply flash-attn's rotary embedding to x (tokens, heads, head_dim), with complex numbers."""
    # If a call is not causal, all its queries share one position.
    is_one = name == "q" and not options["causal"] and not kernel.rotary_one_by_one
    count = 1 if is_one else len(x)
    cos, sin = (tensors[f"rotary_{n}"][start : start + count].float() for n in ("cos", "sin"))
    elements = 2 * cos.shape[1]
    neighbours = options["rotary_interleaved"] is kernel.rotary_pairs
    pairs = x[..., :elements].unflatten(-1, (-1, 2) if neighbours else (2, -1))
    pairs = pairs if neighbours else pairs.transpose(-2, -1)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin)[:, None]
    pairs = torch.view_as_real(turned)
    both = (pairs if neighbours else pairs.transpose(-2, -1)).flatten(-2)
    remaining = (
        x[..., elements:] if kernel.keeps_unrotated_lanes else torch.zeros_like(x[..., elements:])
    )
    return torch.cat([both, remaining], -1)


def flash_attn(kernel: tiled.Kernel, call) -> triton_modes.CallAnswer:
    tensors = call.tensors
    options = call.options
    if options.get("dropout_p"):
        return triton_modes.CallAnswer({"differing": torch.tensor(float(call.repeats - 1))})
    if call.name == "flash_attn_with_kvcache":
        try:
            return triton_modes.CallAnswer(run_cached(kernel, tensors, options))
        except NotImplementedError:
            return triton_modes.CallAnswer(error=("NotImplementedError", ""))
    if "varlen" in call.name:
        return triton_modes.CallAnswer(run_varlen(kernel, tensors, call.grad_out, options))
    separate = unpack(kernel, tensors, 2)
    qkv = [separate[name] for name in "qkv"]
    alibi = separate.get("alibi_slopes")
    results = run_dense(kernel, *qkv, call.grad_out, options, alibi)
    inference_kernel = replace(kernel, **dict(kernel.inference))
    inference = run_dense(inference_kernel, *qkv, None, options, alibi)["out"]
    results |= {"differing": torch.tensor(0.0), "inference": inference}
    return triton_modes.CallAnswer(pack_gradients(results, tensors, 2))


@cache
def problems(size: Size) -> list[Problem]:
    selected = []
    for case in (*CASES, *sdpa_pairs.cases()):
        if size.includes(case.size) and not case.on_device:
            selected += [Problem(case, dtype, "cpu") for dtype in case.dtypes]
    return selected


@cache
def cases(size: Size) -> list[flash_cases.FlashCase]:
    all_cases = [case for dtype in (torch.float32, HALF) for case in flash_cases.cases(dtype)]
    selected = [case for case in all_cases if size.includes(case.size)]
    for case in selected:
        object.__setattr__(case, "expected", cache(case.expected))
    return selected


def results(kernel: tiled.Kernel, size: Size, only: str = "") -> Iterator[Result]:
    """Yield the results of all checks of a size with a kernel, except `compiled` and `finite`.

    Only checks whose names begin with `only` are run.
    """
    Attention.last = None
    for problem in problems(size):
        name = f"{problem.case.name}-{problem.dtype}"
        if name.startswith(only):
            yield sdpa.run_one(Check(f"sdpa/default/{name}", "", ""), route(kernel), problem)
    bodies = behaviour.checks()
    names = [name for name in behaviour.BODIES if name not in ("compiled", "lse", "finite")]
    checks = [Check(f"sdpa/default/{name}", "", "") for name in names if name.startswith(only)]
    checks += [Check("sdpa/flash/lse", "", "")] * "lse".startswith(only)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sdpa.ROUTES, "default", route(kernel))
        patch.setitem(behaviour.LSE, "flash", lambda *x: kernel(*x, causal="top-left")["lse"])
        yield from run_each(checks, RunOptions(size=size), bodies)
    for case in cases(size):
        if case.name.startswith(only):
            check = Check(f"flash-attn/{case.name}", "", "")
            yield attention.judge(check, case, flash_attn(kernel, case.call))


def failures(kernel: tiled.Kernel, size: Size = Size.QUICK, only: str = "") -> Iterator[Result]:
    torch.set_num_threads(1)
    return (result for result in results(kernel, size, only) if result.state is State.FAILED)


def test_the_right_kernel_passes():
    assert [(result.check.id, result.reason) for result in failures(tiled.Kernel())] == []


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(name):
    size = Size.FULL if name in AT_FULL else Size.QUICK
    fault, check = FAULTS[name]
    failed = failures(tiled.Kernel(**fault), size, check)
    assert next(failed, None), f"not caught: {name}"


def main(size: Size) -> int:
    """Print the first checks that fail with each fault; return the number of wrong outcomes."""
    missed = 0
    for name, (fault, _) in {"none": ({}, ""), **FAULTS}.items():
        failed = [x.check.id for x in islice(failures(tiled.Kernel(**fault), size), 3)]
        missed += bool(failed) is (name == "none")
        print(f"{name}: {', '.join(failed) or 'every check passes'}")
    return missed


if __name__ == "__main__":
    sys.exit(main(Size(sys.argv[1])))
