# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's norm, rope and experts through vLLM's own functions, and what they must return."""

import importlib
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from strix_validate.numerics import reference
from strix_validate.numerics.reference import Precision
from strix_validate.triton.cases import Expected, Randn
from strix_validate.vllm import mxfp4 as vllm_mxfp4
from strix_validate.vllm import source as vllm_source
from strix_validate.vllm.attention import FP8
from strix_validate.vllm.experts import by_expert
from strix_validate.vllm.vllm_call import VllmCall

_, _, _MOE, _ROPE, _NORM, _ = vllm_source.KERNELS
_BLOCK = 128  # of FP8 weights that share a scale, both ways


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
    bias=False, routed=True, swizzle=0,
) -> tuple[VllmCall, Expected]:  # fmt: skip
    """Build a call of invoke_fused_moe_triton_kernel with the default tiles: each token times its
    experts.

    bits: 16, 8 for FP8 in blocks as :func:`quantized.fp8_blocks`, or 4 for int4 weights in groups
    of 32 with a scale each, and with zeros a zero point.
    bias: of each expert's rows, in 16 bits. routed: the router's weights are applied. swizzle:
    tiles of tokens that share a tile of weights, 0 is what vLLM chooses. Where experts are many for
    the tokens, as they are for one, these are not sorted.
    """
    x = randn(tokens, columns)
    weights = randn(experts, rows, columns) / columns**0.5
    own = torch.arange(tokens)
    chosen = torch.stack([own % experts, (own + 1) % experts], 1).int()
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

    options = {"bits": bits, "routed": routed, "swizzle": swizzle}
    return VllmCall(_moe, tensors, options, products=1), expected


def _moe(
    tensors: dict[str, Tensor], bits: int, routed: bool = True, swizzle: int = 0
) -> dict[str, Tensor]:
    module = importlib.import_module(_MOE)
    x, chosen = tensors["x"], tensors["experts"]
    weights = tensors["codes" if bits == 4 else "weights"]
    (tokens, top_k), (experts, rows) = chosen.shape, weights.shape[:2]
    kind = {4: "int4_w4a16", 8: "fp8_w8a8"}.get(bits)
    block = {4: [0, 32], 8: [_BLOCK, _BLOCK]}.get(bits)
    config = module.get_default_config(tokens, experts, rows, x.shape[1], top_k, kind, block)
    if bits == 8:  # only here: tensors of fp8 cannot be pickled
        x, weights = x.to(FP8), weights.to(FP8)
    config |= {"GROUP_SIZE_M": swizzle} if swizzle else {}
    ids, owners, filled = _assigned(module, chosen, config, experts, kind, block)
    dtype = tensors["x"].dtype
    out = torch.full((tokens, top_k, rows), float("nan"), dtype=dtype, device=x.device)
    common = {
        "A": x, "B": weights, "C": out, "topk_weights": tensors["routed"],
        "sorted_token_ids": ids, "expert_ids": owners, "num_tokens_post_padded": filled,
        "mul_routed_weight": routed,
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


def _assigned(
    module: Any, chosen: Tensor, config: dict, experts: int, kind: str | None, block: list | None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return whose rows of tokens each tile has, and its expert: vLLM's choice, sorted here."""

    def align(chosen: Tensor, size: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
        return by_expert(chosen, experts, size)

    with patch.object(module, "moe_align_block_size", align):
        return module._prepare_expert_assignment(
            chosen.contiguous(), config, *chosen.shape, experts, None, block_shape=block,
            use_int4_w4a16=kind == "int4_w4a16",
        )  # fmt: skip


def mxfp4(
    randn: Randn, *, tokens=5, experts=4, top_k=2, size=128, inner=64
) -> tuple[VllmCall, Expected]:
    """Build a call of all of gpt-oss's experts; see mxfp4."""
    tensors, expected = vllm_mxfp4.problem(randn, tokens, experts, top_k, size, inner)
    return VllmCall(vllm_mxfp4.launch, tensors, {"top_k": top_k}, products=2), expected
