# SPDX-License-Identifier: BSD-3-Clause
"""Launches of vLLM's Triton kernels through vLLM's own functions, and what they must return."""

import importlib
import sys
from itertools import accumulate

import torch
from torch import Tensor

from strix_validate.numerics import reference
from strix_validate.numerics.reference import Precision
from strix_validate.triton.cases import Expected, Randn
from strix_validate.vllm import mxfp4 as vllm_mxfp4
from strix_validate.vllm import source as vllm_source
from strix_validate.vllm.vllm_call import VllmCall

_ATTENTION, _CACHE, _MOE, _ROPE, _NORM, _ = vllm_source.KERNELS
#: Segments into which vLLM splits the keys of a decode (3d) launch.
SEGMENTS = 16
FP8 = torch.float8_e4m3fn
_BLOCK = 128  # of FP8 weights that share a scale, both ways
#: Of keys and of values: one for both would hide that they are swapped.
FP8_SCALES = {"k": 0.5, "v": 0.125}


def paged_attention(
    randn: Randn,
    *,
    lengths: tuple[tuple[int, int], ...],
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 128,
    block: int = 16,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    fp8: bool = False,
    scale: float | None = None,
    alibi: bool = False,
    gain: float = 1.0,
    first_block: int = 2,
    causal: bool = True,
) -> tuple[VllmCall, Expected]:
    """Build a call of unified_attention: attention over a paged cache.

    Everything in the cache that belongs to no sequence is NaN, as are the scratch tensors.

    Args:
        lengths: (queries, keys) of each sequence. With one query each, keys are split: 3d.
        window: keys that a query sees, its own included; 0 is all.
        fp8: keys and values are stored as fp8 e4m3 with a scale each.
        scale: None is 1 / sqrt(head_dim). gain: q times this. first_block: the least in use.
    """
    queries, keys = zip(*lengths, strict=True)
    q = randn(sum(queries), heads, head_dim) * gain
    blocks = [-(-n // block) for n in keys]
    k, v = (
        torch.full((sum(blocks) + first_block, block, kv_heads, head_dim), float("nan"))
        for _ in "kv"
    )
    k, v = k.to(q.dtype), v.to(q.dtype)
    # vLLM's tables are wider than needed, and 0 there
    table = torch.zeros(len(lengths), max(blocks) + 2, dtype=torch.int32)
    order = iter(range(sum(blocks) + first_block - 1, first_block - 1, -1))  # not in sequence
    kept = []
    for i, n in enumerate(keys):
        own = torch.tensor([next(order) for _ in range(blocks[i])], dtype=torch.int32)
        table[i, : blocks[i]] = own
        kept.append((randn(n, kv_heads, head_dim), randn(n, kv_heads, head_dim)))
        for cache, values in zip((k, v), kept[-1], strict=True):
            padded = torch.full((blocks[i] * block, *cache.shape[2:]), float("nan")).to(cache.dtype)
            padded[:n] = values
            cache[own.long()] = padded.view(blocks[i], block, *cache.shape[2:])
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": torch.tensor([0, *accumulate(queries)], dtype=torch.int32),
        "seqused_k": torch.tensor(keys, dtype=torch.int32),
        "block_table": table,
    }
    if sinks:
        tensors["sinks"] = randn(heads).float()
    if alibi:
        tensors["alibi_slopes"] = torch.exp2(-torch.arange(1.0, heads + 1))
    if fp8:
        scales = FP8_SCALES.values()
        kept = [
            tuple(x.to(FP8).to(q.dtype) * s for x, s in zip(pair, scales, strict=True))
            for pair in kept
        ]
    options = {
        "max_seqlen_q": max(queries),
        "max_seqlen_k": max(keys),
        "window_size": (window - 1, 0) if window else (-1, -1),
        "softcap": softcap,
        "fp8": fp8,
        "softmax_scale": head_dim**-0.5 if scale is None else scale,
        "causal": causal,
    }

    def expected(dtype: Precision) -> dict[str, Tensor]:
        parts = []
        for part, pair in zip(q.split(queries), kept, strict=True):
            # (tokens, heads, head_dim) to (1, heads, tokens, head_dim)
            rows = [x.transpose(0, 1)[None] for x in (part, *pair, part)]
            bias = None
            if alibi:
                own = torch.arange(len(part))[:, None] + len(pair[0]) - len(part)
                behind = own - torch.arange(len(pair[0]))
                bias = -tensors["alibi_slopes"][:, None, None].double() * behind
            found = reference.attention(
                *rows,
                causal="bottom-right" if causal else None,
                attn_mask=bias,
                scale=scale,
                window=(window - 1, 0) if window else (-1, -1),
                softcap=softcap,
                sinks=tensors.get("sinks"),
                dtype=dtype,
            )
            parts.append(found["out"][0].transpose(0, 1))
        return {"out": torch.cat(parts)}

    return VllmCall(_unified_attention, tensors, options, products=1), expected


def _unified_attention(tensors: dict[str, Tensor], fp8: bool, **options) -> dict[str, Tensor]:
    module = importlib.import_module(_ATTENTION)
    modes = sys.modules["vllm.v1.kv_cache_interface"].KVQuantMode
    q, scales = tensors["q"], dict.fromkeys("kv")
    if fp8:  # only here: tensors of fp8 cannot be pickled
        tensors |= {name: tensors[name].to(FP8) for name in "kv"}
        scales = {n: torch.tensor([value], device=q.device) for n, value in FP8_SCALES.items()}
    out = torch.full_like(q, float("nan"))
    if options["max_seqlen_q"] == 1:
        shape = (*q.shape[:2], SEGMENTS)
        padded = 1 << (q.shape[2] - 1).bit_length()
        # the launcher's condition for 3d is met by any threshold of this size
        options |= {"seq_threshold_3D": 128, "num_par_softmax_segments": SEGMENTS}
        for name, size in (("output", (*shape, padded)), ("max", shape), ("expsum", shape)):
            options[f"softmax_segm_{name}"] = q.new_full(size, float("nan"), dtype=torch.float32)
    module.unified_attention(
        **tensors,
        out=out,
        q_descale=None,
        k_descale=scales["k"],
        v_descale=scales["v"],
        kv_quant_mode=modes.FP8_PER_TENSOR if fp8 else modes.NONE,
        **options,
    )
    return {"out": out}


def store_keys(
    randn: Randn, *, tokens=7, heads=2, head_dim=128, block=16, fp8=False, exact=False
) -> tuple[VllmCall, Expected]:
    """Build a call of triton_reshape_and_cache_flash: new keys and values go to their slots,
    padding to none.

    fp8: divided by a scale each, and stored as e4m3. exact: of values that this does not round, as
    Triton's interpreter loses the carry into the exponent: 7.9 becomes 4.
    """
    new = {name: randn(tokens, heads, head_dim) for name in ("key", "value")}
    if exact:
        new = {n: (x.to(FP8).float() * FP8_SCALES[n[0]]).to(x.dtype) for n, x in new.items()}
    caches = {f"{name}_cache": randn(4, block, heads, head_dim) for name in new}
    slots = torch.arange(tokens) * 5 % (4 * block)
    slots[tokens // 2] = -1
    if fp8:
        caches = {name: cache.to(FP8).to(cache.dtype) for name, cache in caches.items()}
    call = VllmCall(_reshape_and_cache, new | caches | {"slot_mapping": slots}, {"fp8": fp8})

    def expected(dtype: Precision) -> dict[str, Tensor]:
        found = {}
        for name, cache in caches.items():
            after, rows = cache.clone(), new[name[:-6]][slots >= 0]
            if fp8:
                rows = (rows.float() / FP8_SCALES[name[0]]).to(FP8).to(rows.dtype)
            after.view(-1, heads, head_dim)[slots[slots >= 0]] = rows
            found[name] = after.double()
        return found

    return call, expected


def _reshape_and_cache(tensors: dict[str, Tensor], fp8: bool) -> dict[str, Tensor]:
    kind, scales, names = (
        tensors["key"].dtype,
        dict.fromkeys("kv", 1.0),
        ("key_cache", "value_cache"),
    )
    if fp8:  # only here: tensors of fp8 cannot be pickled
        tensors |= {name: tensors[name].to(FP8) for name in names}
        scales = FP8_SCALES
    places = {
        f"{n}_scale": torch.tensor([x], device=tensors["key"].device) for n, x in scales.items()
    }
    importlib.import_module(_CACHE).triton_reshape_and_cache_flash(
        **tensors, kv_cache_dtype="fp8" if fp8 else "auto", **places
    )
    return {name: tensors[name].to(kind) for name in names}


def rms_norm(randn: Randn, *, rows=3, columns=1500, eps=1e-6) -> tuple[VllmCall, Expected]:
    """Build a call of rms_norm_batch_invariant, with a last block that is not full."""
    x, weight = randn(rows, columns), randn(columns)

    def expected(dtype: Precision) -> dict[str, Tensor]:
        work = reference.working(dtype)
        a, w = x.to(work), weight.to(work)
        out = a * (a.square().mean(-1, keepdim=True) + eps).rsqrt() * w
        return {"out": reference.stored(out.abs() if dtype == reference.TERMS else out, dtype)}

    return VllmCall(_rms_norm, {"input": x, "weight": weight}, {"eps": eps}), expected


def _rms_norm(tensors: dict[str, Tensor], eps: float) -> dict[str, Tensor]:
    return {"out": importlib.import_module(_NORM).rms_norm_batch_invariant(**tensors, eps=eps)}


def rope(
    randn: Randn, *, tokens=3, heads=6, kv_heads=2, head_dim=128, neox=True, rotary=0,
    interleaved=False,
) -> tuple[VllmCall, Expected]:  # fmt: skip
    """Build a call of triton_mrope: positions in time, height and width, each for its section of
    the angles.

    rotary: lanes that are turned, 0 is all. interleaved: the sections take turns.
    """
    lanes = rotary or head_dim
    sections = (lanes // 8, lanes // 16 * 3, lanes // 16 * 3)
    sections = (lanes // 2 - 2 * sections[1], *sections[1:])
    q, k = randn(tokens, heads * head_dim), randn(tokens, kv_heads * head_dim)
    angle = randn(3, tokens, lanes // 2).float() * 3
    cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)
    call = VllmCall(
        _rope,
        {"q": q, "k": k, "cos": cos, "sin": sin},
        {
            "mrope_section": list(sections),
            "head_size": head_dim,
            "rotary_dim": lanes,
            "mrope_interleaved": interleaved,
            "is_neox_style": neox,
        },
    )
    # which of the three positions each angle is of; interleaved as Qwen3-VL has it
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
    if interleaved:
        place = torch.arange(lanes // 2)
        owner = torch.zeros(lanes // 2, dtype=torch.long)
        owner[(place % 3 == 1) & (place < 3 * sections[1])] = 1
        owner[(place % 3 == 2) & (place < 3 * sections[2])] = 2

    def expected(dtype: Precision) -> dict[str, Tensor]:
        work = reference.working(dtype)
        index = owner.expand(1, tokens, -1)
        c, s = (x.to(work).gather(0, index)[0][:, None] for x in (cos, sin))
        found = {}
        for name, x in (("q", q), ("k", k)):
            turned, rest = (
                x.to(work).view(tokens, -1, head_dim).split([lanes, head_dim - lanes], -1)
            )
            first, second = turned.chunk(2, -1) if neox else (turned[..., ::2], turned[..., 1::2])
            if dtype == reference.TERMS:
                first, second, c, s, rest = (t.abs() for t in (first, second, c, s, rest))
            sign = 1.0 if dtype == reference.TERMS else -1.0
            turned = (first * c + sign * second * s, second * c + first * s)
            both = torch.cat(turned, -1) if neox else torch.stack(turned, -1).flatten(-2)
            found[name] = reference.stored(torch.cat([both, rest], -1).flatten(1), dtype)
        return found

    return call, expected


def _rope(tensors: dict[str, Tensor], **options) -> dict[str, Tensor]:
    q, k = importlib.import_module(_ROPE).triton_mrope(**tensors, **options)
    return {"q": q, "k": k}


def moe(
    randn: Randn, *, tokens=9, experts=4, top_k=2, rows=96, columns=128, bits=16, zeros=False,
    bias=False, routed=True,
) -> tuple[VllmCall, Expected]:  # fmt: skip
    """Build a call of invoke_fused_moe_triton_kernel with the default tiles: each token times its
    experts.

    bits: 16, 8 for FP8 in blocks as :func:`quantized.fp8_blocks`, or 4 for int4 weights in groups
    of 32 with a scale each, and with zeros a zero point.
    bias: of each expert's rows, in 16 bits. routed: the router's weights are applied.
    """
    x = randn(tokens, columns)
    weights = randn(experts, rows, columns) / columns**0.5
    chosen = torch.stack([torch.arange(tokens) % experts, (torch.arange(tokens) + 1) % experts], 1)
    tensors = {"x": x, "experts": chosen[:, :top_k], "routed": randn(tokens, top_k).float()}
    if bits == 4:
        codes = ((weights * 16).round().clamp(-8, 7) + 8).to(torch.uint8)
        scales = (randn(experts, rows, columns // 32).abs() + 0.5).to(x.dtype)
        points = torch.full(scales.shape, 8, dtype=torch.uint8)
        if zeros:
            points = (randn(*scales.shape).abs() * 4).clamp(max=15).to(torch.uint8)
            # two rows to a byte
            tensors["zeros"] = points[:, ::2] | points[:, 1::2] << 4
        shifted = codes.to(x.dtype) - points.repeat_interleave(32, -1).to(x.dtype)
        weights = shifted * scales.repeat_interleave(32, -1)
        tensors |= {"codes": codes[..., ::2] | codes[..., 1::2] << 4, "scales": scales}
    else:
        if bits == 8:
            x, weights = (both.to(FP8).to(x.dtype) for both in (x, weights))
            tensors |= {"x": x, "x_scales": randn(tokens, columns // _BLOCK).float().abs() + 0.1}
            blocks = experts, -(-rows // _BLOCK), columns // _BLOCK
            tensors["scales"] = randn(*blocks).float().abs() + 0.1
        tensors["weights"] = weights
    if bias:
        tensors["bias"] = randn(experts, rows)

    def scaled(work: torch.dtype) -> tuple[Tensor, Tensor]:
        if bits != 8:
            return x, weights
        mine, theirs = (
            tensors[name].to(work).repeat_interleave(_BLOCK, -1) for name in ("x_scales", "scales")
        )
        return x.to(work) * mine, weights.to(work) * theirs.repeat_interleave(_BLOCK, 1)[:, :rows]

    def expected(dtype: Precision) -> dict[str, Tensor]:
        left, right = scaled(reference.working(dtype))
        parts = [
            reference.product(left[i : i + 1], right[int(chosen[i, j])], dtype)
            for i in range(tokens)
            for j in range(top_k)
        ]
        out = torch.cat(parts).view(tokens, top_k, rows)
        shares = tensors["routed"] if routed else torch.ones(tokens, top_k)
        more = tensors["bias"][chosen[:, :top_k].long()] if bias else torch.zeros(1)
        shares, more = (x.to(reference.working(dtype)) for x in (shares, more))
        if dtype == reference.TERMS:
            shares, more = shares.abs(), more.abs()
        return {"out": reference.stored((out + more) * shares[..., None], dtype)}

    return VllmCall(_moe, tensors, {"bits": bits, "routed": routed}, products=1), expected


def _moe(tensors: dict[str, Tensor], bits: int, routed: bool = True) -> dict[str, Tensor]:
    module = importlib.import_module(_MOE)
    x, chosen = tensors["x"], tensors["experts"]
    weights = tensors["codes" if bits == 4 else "weights"]
    (tokens, top_k), (experts, rows) = chosen.shape, weights.shape[:2]
    kind = {4: "int4_w4a16", 8: "fp8_w8a8"}.get(bits)
    block = {4: [0, 32], 8: [_BLOCK, _BLOCK]}.get(bits)
    config = module.get_default_config(tokens, experts, rows, x.shape[1], top_k, kind, block)
    if bits == 8:  # only here: tensors of fp8 cannot be pickled
        x, weights = x.to(FP8), weights.to(FP8)
    # as moe_align_block_size, which is HIP code: sorted by expert, each filled to whole blocks
    size = config["BLOCK_SIZE_M"]
    ids, owners = [], []
    for expert in range(experts):
        own = (chosen.flatten() == expert).nonzero().flatten().tolist()
        own += [chosen.numel()] * (-len(own) % size)
        ids += own
        owners += [expert] * (len(own) // size)
    place = {"dtype": torch.int32, "device": x.device}
    dtype = tensors["x"].dtype
    out = torch.full((tokens, top_k, rows), float("nan"), dtype=dtype, device=x.device)
    common = {
        "A": x, "B": weights, "C": out, "topk_weights": tensors["routed"],
        "sorted_token_ids": torch.tensor(ids, **place), "expert_ids": torch.tensor(owners, **place),
        "num_tokens_post_padded": torch.tensor([len(ids)], **place), "mul_routed_weight": routed,
        "top_k": top_k, "config": config, "use_int8_w8a16": False, "use_int4_w4a16": bits == 4,
        "compute_type": getattr(module.tl, str(dtype).removeprefix("torch.")),
        "B_scale": tensors.get("scales"), "block_shape": block,
    }  # fmt: skip
    if bits == 4:
        module.invoke_fused_moe_wna16_triton_kernel(**common, B_zp=tensors.get("zeros"))
    else:
        module.invoke_fused_moe_triton_kernel(
            **common, A_scale=tensors.get("x_scales"), use_fp8_w8a8=bits == 8, use_int8_w8a8=False,
            per_channel_quant=False, B_bias=tensors.get("bias"),
        )  # fmt: skip
    return {"out": out}


def mxfp4(
    randn: Randn, *, tokens=5, experts=4, top_k=2, size=128, inner=64
) -> tuple[VllmCall, Expected]:
    """Build a call of all of gpt-oss's experts; see mxfp4."""
    tensors, expected = vllm_mxfp4.problem(randn, tokens, experts, top_k, size, inner)
    return VllmCall(vllm_mxfp4.launch, tensors, {"top_k": top_k}, products=2), expected
