# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's norm, rope and experts through vLLM's own functions, and what they must return."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strix_validate.numerics import reference
from strix_validate.numerics.reference import Precision
from strix_validate.triton.cases import Expected, Randn
from strix_validate.vllm import source as vllm_source
from strix_validate.vllm.attention import FP8
from strix_validate.vllm.experts import assign
from strix_validate.vllm.source import VllmCall

_, _, MOE, _ROPE, _NORM, _ = vllm_source.KERNELS
_BLOCK = 128  # of FP8 weights that share a scale, both ways
#: By kind of scales, the shapes that those of tokens and of experts have.
_SCALES: dict[str, Callable[[int, int, int, int], tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "blocks": lambda tokens, experts, rows, columns: (
        (tokens, columns // _BLOCK),
        (experts, -(-rows // _BLOCK), columns // _BLOCK),
    ),
    "channels": lambda tokens, experts, rows, columns: ((tokens, 1), (experts, rows, 1)),
    "tensor": lambda tokens, experts, rows, columns: ((1,), (experts,)),
}


def rms_norm(randn: Randn, *, rows=3, columns=1500, eps=1e-6) -> tuple[VllmCall, Expected]:
    """Build a call of rms_norm_batch_invariant, with a last block that is not full."""
    x, weight = randn(rows, columns), randn(columns)

    def expected(dtype: Precision) -> dict[str, Tensor]:
        work = reference.working(dtype)
        a, w = x.to(work), weight.to(work)
        out = a * (a.square().mean(-1, keepdim=True) + eps).rsqrt() * w
        return {"out": reference.stored(out.abs() if dtype == reference.TERMS else out, dtype)}

    return VllmCall(run_rms_norm, {"x": x, "weight": weight}, {"eps": eps}), expected


def run_rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> dict[str, Tensor]:
    """Run rms_norm_batch_invariant."""
    return {"out": importlib.import_module(_NORM).rms_norm_batch_invariant(x, weight, eps=eps)}


def rope(  # noqa: PLR0913 (a case's options)
    randn: Randn, *, tokens=3, heads=6, kv_heads=2, head_dim=128, neox=True, rotary=0,
    interleaved=False, sections=(), whole=False,
) -> tuple[VllmCall, Expected]:  # fmt: skip
    """Build a call of triton_mrope: positions in time, height and width, each for its section of
    the angles.

    rotary: lanes that are turned, 0 is all. interleaved: the sections take turns. sections: angles
    of each position, by default the shares that Qwen2.5-VL has. whole: q and k are slices of one
    tensor, in which the values are behind them.
    """
    lanes = rotary or head_dim
    share = lanes // 16 * 3
    sections = sections or (lanes // 2 - 2 * share, share, share)
    q, k = randn(tokens, heads * head_dim), randn(tokens, kv_heads * head_dim)
    given = {"q": q, "k": k}
    if whole:
        v = randn(*k.shape)
        given = {"qkv": torch.cat([q, k, v], -1)}
    angle = randn(3, tokens, lanes // 2).float() * 3
    cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)
    call = VllmCall(
        run_rope,
        given | {"cos": cos, "sin": sin},
        ({"widths": (q.shape[1], k.shape[1])} if whole else {})
        | {
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
        c, s = (x.gather(0, owner.expand(1, tokens, -1))[0][:, None] for x in (cos, sin))
        found = {}
        for name, x in (("q", q), ("k", k)):
            heads = x.view(tokens, -1, head_dim)
            turned = reference.rotated(heads, c, s, dtype, neighbours=not neox)
            found[name] = reference.stored(turned.flatten(1), dtype)
        return found | ({"v": v.double()} if whole else {})

    return call, expected


def run_rope(
    *, qkv: Tensor | None = None, widths: tuple[int, int] = (0, 0), **given
) -> dict[str, Tensor]:
    """Run triton_mrope with these arguments; widths: of q and k in qkv, which then holds them."""
    more = {}
    if qkv is not None:
        given["q"], given["k"], values = qkv.split([*widths, qkv.shape[1] - sum(widths)], -1)
        more = {"v": values}
    q, k = importlib.import_module(_ROPE).triton_mrope(**given)
    return {"q": q, "k": k, **more}


def moe(  # noqa: PLR0913 (a case's options)
    randn: Randn, *, tokens=9, experts=4, top_k=2, rows=96, columns=128, bits=16, group=32,
    zeros=False, bias=False, routed=True, swizzle=0, absent=0, padding=0, scales="blocks",
) -> tuple[VllmCall, Expected]:  # fmt: skip
    """Build a call of invoke_fused_moe_triton_kernel with the default tiles: each token times its
    experts.

    bits: 16, 8 for FP8, or 4 for int4 weights in groups with a scale each, and with zeros a zero
    point. group: weights of a group. scales: of FP8, in blocks as :func:`quantized.fp8_blocks`, in
    "channels" for each token and each row of an expert, or one of a whole "tensor".
    bias: of each expert's rows, in 16 bits. routed: the router's weights are applied. swizzle:
    tiles of tokens that share a tile of weights, 0 is what vLLM chooses. absent: the first experts,
    which are another GPU's: their answers are 0. padding: numbers behind a row of weights, which
    vLLM adds on ROCm. Where experts are many for the tokens, as they are for one, these are not
    sorted.
    """
    x = randn(tokens, columns)
    weights = randn(experts, rows, columns) / columns**0.5
    own = torch.arange(tokens)
    chosen = ((own[:, None] + torch.arange(top_k)) % experts).int()
    tensors = {"x": x, "experts": chosen, "shares": randn(tokens, top_k).float()}
    if bits == 4:
        codes = ((weights * 16).round().clamp(-8, 7) + 8).to(torch.uint8)
        steps = (randn(experts, rows, columns // group).abs() + 0.5).to(x.dtype)
        points = torch.full(steps.shape, 8, dtype=torch.uint8)
        if zeros:
            points = (randn(*steps.shape).abs() * 4).clamp(max=15).to(torch.uint8)
            # two rows to a byte
            tensors["zeros"] = points[:, ::2] | points[:, 1::2] << 4
        shifted = codes.to(x.dtype) - points.repeat_interleave(group, -1).to(x.dtype)
        weights = shifted * steps.repeat_interleave(group, -1)
        tensors |= {"weights": codes[..., ::2] | codes[..., 1::2] << 4, "scales": steps}
    else:
        if bits == 8:
            x, weights = (both.to(FP8).to(x.dtype) for both in (x, weights))
            shapes = _SCALES[scales](tokens, experts, rows, columns)
            own, theirs = (randn(*shape).float().abs() + 0.1 for shape in shapes)
            tensors |= {"x": x, "x_scales": own, "scales": theirs}
        tensors["weights"] = torch.nn.functional.pad(weights, (0, padding), value=float("nan"))
    if bias:
        tensors["bias"] = randn(experts, rows)

    def scaled(work: torch.dtype) -> tuple[Tensor, Tensor]:
        if bits != 8:
            return x, weights
        mine, theirs = tensors["x_scales"].to(work), tensors["scales"].to(work)
        if scales == "blocks":
            mine, theirs = (one.repeat_interleave(_BLOCK, -1) for one in (mine, theirs))
            theirs = theirs.repeat_interleave(_BLOCK, 1)[:, :rows]
        return x.to(work) * mine, weights.to(work) * theirs.view(
            experts, *theirs.shape[1:] or (1, 1)
        )

    def expected(dtype: Precision) -> dict[str, Tensor]:
        left, right = scaled(reference.working(dtype))
        parts = [
            reference.product(left[i : i + 1], right[int(chosen[i, j])], dtype)
            for i in range(tokens)
            for j in range(top_k)
        ]
        out = torch.cat(parts).view(tokens, top_k, rows)
        out[chosen < absent] = 0
        shares = tensors["shares"] if routed else torch.ones(tokens, top_k)
        more = tensors["bias"][chosen.long()] if bias else torch.zeros(1)
        shares, more = (x.to(reference.working(dtype)) for x in (shares, more))
        if dtype == reference.TERMS:
            shares, more = shares.abs(), more.abs()
        return {"out": reference.stored((out + more) * shares[..., None], dtype)}

    options = {"bits": bits, "group": group, "routed": routed, "swizzle": swizzle}
    options |= {"absent": absent, "columns": columns * (bits != 4), "kind": scales}
    return VllmCall(run_moe, tensors, options, products=1), expected


def run_moe(*args: Any, **options: Any) -> dict[str, Tensor]:
    """Run a product of experts; arguments: see :func:`bind_moe`."""
    launch, out = bind_moe(*args, **options)
    launch()
    return {"out": out}


def bind_moe(  # noqa: PLR0913 (what the kernels take)
    x: Tensor, experts: Tensor, shares: Tensor, weights: Tensor, *, scales: Tensor | None = None,
    zeros: Tensor | None = None, x_scales: Tensor | None = None, bias: Tensor | None = None,
    bits: int = 16, group: int = 32, routed: bool = True, swizzle: int = 0, absent: int = 0,
    columns: int = 0, kind: str = "blocks",
) -> tuple[Callable[[], None], Tensor]:  # fmt: skip
    """Return what launches a product of experts, and the tensor that it writes.

    experts and shares: (tokens, top_k), of each token. columns: of the weights, behind which lies
    padding; 0 is all. kind: see scales of moe.
    """
    module, dtype = importlib.import_module(MOE), x.dtype
    (tokens, top_k), (count, rows) = experts.shape, weights.shape[:2]
    quantized = {4: "int4_w4a16", 8: "fp8_w8a8"}.get(bits)
    block = {4: [0, group], 8: [_BLOCK, _BLOCK] if kind == "blocks" else None}.get(bits)
    config = module.get_default_config(tokens, count, rows, x.shape[1], top_k, quantized, block)
    if bits == 8:  # only here: tensors of fp8 cannot be pickled
        x, weights = x.to(FP8), weights.to(FP8)
    weights = weights[..., : columns or None]
    config |= {"GROUP_SIZE_M": swizzle} if swizzle else {}
    ids, owners, filled = assign(module, experts, config, count, quantized, block)
    owners = owners.masked_fill(owners < absent, -1)
    out = torch.full((tokens, top_k, rows), float("nan"), dtype=dtype, device=x.device)
    common = {
        "A": x, "B": weights, "C": out, "topk_weights": shares,
        "sorted_token_ids": ids, "expert_ids": owners, "num_tokens_post_padded": filled,
        "mul_routed_weight": routed, "top_k": top_k, "config": config, "use_int8_w8a16": False,
        "use_int4_w4a16": bits == 4, "B_scale": scales, "block_shape": block,
        "compute_type": getattr(module.tl, str(dtype).removeprefix("torch.")),
    }  # fmt: skip
    if bits == 4:
        return partial(module.invoke_fused_moe_wna16_triton_kernel, **common, B_zp=zeros), out
    launch = partial(
        module.invoke_fused_moe_triton_kernel, **common, A_scale=x_scales, use_fp8_w8a8=bits == 8,
        use_int8_w8a8=False, per_channel_quant=kind == "channels", B_bias=bias,
    )  # fmt: skip
    return launch, out
