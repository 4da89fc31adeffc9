# SPDX-License-Identifier: BSD-3-Clause
"""Calls of vLLM's functions for norm, rope and experts, and their expected results."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strix_validate.numerics import reference
from strix_validate.numerics.reference import Precision
from strix_validate.triton.cases import Expected, Randn
from strix_validate.vllm.attention import FP8
from strix_validate.vllm.experts import assign
from strix_validate.vllm.source import MOE_MODULE, NORM_MODULE, ROPE_MODULE, VllmCall

#: Rows and columns of FP8 weights that share a scale.
_BLOCK = 128


def rms_norm(randn: Randn, *, rows=3, columns=1500, eps=1e-6) -> tuple[VllmCall, Expected]:
    """Build a call of rms_norm_batch_invariant. By default, the last block of a row is not full."""
    x = randn(rows, columns)
    weight = randn(columns)

    def expected(dtype: Precision) -> dict[str, Tensor]:
        work = reference.working_dtype(dtype)
        wide = x.to(work)
        scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        out = wide * scale * weight.to(work)
        if dtype == reference.TERMS:
            out = out.abs()
        return {"out": reference.store(out, dtype)}

    return VllmCall(run_rms_norm, {"x": x, "weight": weight}, {"eps": eps}), expected


def run_rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> dict[str, Tensor]:
    """Run rms_norm_batch_invariant."""
    module = importlib.import_module(NORM_MODULE)
    return {"out": module.rms_norm_batch_invariant(x, weight, eps=eps)}


def rope(  # noqa: PLR0913 (the options of a case)
    randn: Randn,
    *,
    tokens=3,
    heads=6,
    kv_heads=2,
    head_dim=128,
    neox=True,
    rotary=0,
    interleaved=False,
    sections=(),
    packed=False,
) -> tuple[VllmCall, Expected]:
    """Build a call of triton_mrope.

    Each token has three positions, in time, height and width. Each position has a section of the
    angles.

    Args:
        randn: Draws the numbers.
        tokens: Number of tokens in the batch.
        heads: Query heads.
        kv_heads: Key heads.
        head_dim: Size of a head.
        neox: Whether elements i and i + rotary / 2 form a pair; otherwise neighbouring elements do.
        rotary: Number of elements of a head that are rotated; 0 is all.
        interleaved: Whether the sections alternate, as in Qwen3-VL.
        sections: Number of angles of each position; by default in the ratio of Qwen2.5-VL.
        packed: Whether q, k and v are slices of one tensor.
    """
    rotary_dim = rotary or head_dim
    share = rotary_dim // 16 * 3
    sections = sections or (rotary_dim // 2 - 2 * share, share, share)
    q = randn(tokens, heads * head_dim)
    k = randn(tokens, kv_heads * head_dim)
    tensors = {"q": q, "k": k}
    options: dict[str, Any] = {}
    if packed:
        v = randn(*k.shape)
        tensors = {"qkv": torch.cat([q, k, v], -1)}
        options["widths"] = (q.shape[1], k.shape[1])
    angle = randn(3, tokens, rotary_dim // 2).float() * 3
    cos = angle.cos().to(q.dtype)
    sin = angle.sin().to(q.dtype)
    tensors |= {"cos": cos, "sin": sin}
    options |= {
        "mrope_section": list(sections),
        "head_size": head_dim,
        "rotary_dim": rotary_dim,
        "mrope_interleaved": interleaved,
        "is_neox_style": neox,
    }
    positions = _assign_positions(sections, interleaved).expand(1, tokens, -1)

    def expected(dtype: Precision) -> dict[str, Tensor]:
        token_cos = cos.gather(0, positions)[0][:, None]
        token_sin = sin.gather(0, positions)[0][:, None]
        results = {}
        for name, x in (("q", q), ("k", k)):
            rotated = reference.rotate(
                x.view(tokens, -1, head_dim),
                token_cos,
                token_sin,
                dtype,
                neighbours=not neox,
            )
            results[name] = reference.store(rotated.flatten(1), dtype)
        if packed:
            results["v"] = v.double()
        return results

    return VllmCall(run_rope, tensors, options), expected


def _assign_positions(sections: tuple[int, ...], interleaved: bool) -> Tensor:
    """Return for each angle the index of its position: 0 for time, 1 for height, 2 for width."""
    if not interleaved:
        return torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
    angles = torch.arange(sum(sections))
    positions = torch.zeros(len(angles), dtype=torch.long)
    positions[(angles % 3 == 1) & (angles < 3 * sections[1])] = 1
    positions[(angles % 3 == 2) & (angles < 3 * sections[2])] = 2
    return positions


def run_rope(
    *,
    qkv: Tensor | None = None,
    widths: tuple[int, int] = (0, 0),
    **arguments,
) -> dict[str, Tensor]:
    """Run triton_mrope.

    Args:
        qkv: A tensor of which q, k and v are slices; None if they are separate tensors.
        widths: Numbers of columns of q and k in qkv.
        arguments: Arguments of triton_mrope. They include q and k if there is no qkv.
    """
    results = {}
    if qkv is not None:
        q, k, v = qkv.split([*widths, qkv.shape[1] - sum(widths)], -1)
        arguments |= {"q": q, "k": k}
        results["v"] = v
    module = importlib.import_module(ROPE_MODULE)
    q_out, k_out = module.triton_mrope(**arguments)
    return {"q": q_out, "k": k_out, **results}


def moe(  # noqa: PLR0913 (the options of a case)
    randn: Randn,
    *,
    tokens=9,
    experts=4,
    top_k=2,
    rows=96,
    columns=128,
    bits=16,
    group=32,
    zeros=False,
    bias=False,
    routed=True,
    swizzle=0,
    absent=0,
    padding=0,
    scales="blocks",
) -> tuple[VllmCall, Expected]:
    """Build a call of invoke_fused_moe_triton_kernel with the default tiles.

    For int4, it is a call of invoke_fused_moe_wna16_triton_kernel. The kernel multiplies each token
    by the weights of its experts. If there are few tokens for the number of experts, vLLM does not
    sort the tokens by expert, unless the weights are int4.

    Args:
        randn: Draws the numbers.
        tokens: Number of rows of x.
        experts: Number of experts.
        top_k: Number of experts of each token.
        rows: Number of rows of an expert's weights, which are columns of the result.
        columns: Number of columns of an expert's weights.
        bits: 16; 8 for FP8; or 4 for int4 weights in groups that have a scale each.
        group: Number of int4 weights that share a scale.
        zeros: Whether each group has a zero point.
        bias: Whether an expert's rows have a bias; only for weights of 16 bits.
        routed: Whether the router's weights are applied.
        swizzle: Number of tiles of tokens that share a tile of weights; 0 for vLLM's choice.
        absent: How many experts, from the first, are on another GPU. Their results are 0.
        padding: Number of elements that are added to each row of weights, as vLLM does on ROCm.
        scales: Kind of the scales of FP8. "blocks" is as in quantized.fp8_blocks. "channels" has a
            scale for each token and for each row of an expert. "tensor" has a scale for x, and a
            scale for each expert.
    """
    x = randn(tokens, columns)
    weights = randn(experts, rows, columns) / columns**0.5
    chosen = ((torch.arange(tokens)[:, None] + torch.arange(top_k)) % experts).int()
    tensors = {"x": x, "experts": chosen, "shares": randn(tokens, top_k).float()}
    product = _Product(x, weights)
    if bits == 4:
        product = _quantize_int4(randn, tensors, weights, group, zeros)
    elif bits == 8:
        product = _quantize_fp8(randn, tensors, weights, scales)
    if bits != 4:
        padded = torch.nn.functional.pad(product.weights, (0, padding), value=float("nan"))
        tensors["weights"] = padded
    if bias:
        tensors["bias"] = randn(experts, rows)

    def expected(dtype: Precision) -> dict[str, Tensor]:
        work = reference.working_dtype(dtype)
        scaled_x, scaled_weights = product.scale(work)
        parts = []
        for i, token_experts in enumerate(chosen.tolist()):
            for expert in token_experts:
                row = scaled_x[i : i + 1]
                parts.append(reference.product(row, scaled_weights[expert], dtype))
        out = torch.cat(parts).view(tokens, top_k, rows)
        out[chosen < absent] = 0
        shares = tensors["shares"] if routed else torch.ones(tokens, top_k)
        offsets = tensors["bias"][chosen.long()] if bias else torch.zeros(1)
        shares = shares.to(work)
        offsets = offsets.to(work)
        if dtype == reference.TERMS:
            shares = shares.abs()
            offsets = offsets.abs()
        return {"out": reference.store((out + offsets) * shares[..., None], dtype)}

    options = {
        "bits": bits,
        "group": group,
        "routed": routed,
        "swizzle": swizzle,
        "absent": absent,
        "columns": 0 if bits == 4 else columns,
        "kind": scales,
    }
    return VllmCall(run_moe, tensors, options, products=1), expected


@dataclass(frozen=True)
class _Product:
    """Both factors of a product, as the kernel reads them.

    Attributes:
        x: (tokens, columns).
        weights: (experts, rows, columns).
        x_scales: Scales that x is multiplied by, broadcastable to x; None for no scales.
        scales: Scales that the weights are multiplied by, broadcastable to them; None for no
            scales.
    """

    x: Tensor
    weights: Tensor
    x_scales: Tensor | None = None
    scales: Tensor | None = None

    def scale(self, work: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return both factors, multiplied by their scales in a dtype.

        Factors without scales are returned as they are.
        """
        if self.x_scales is None or self.scales is None:
            return self.x, self.weights
        x = self.x.to(work) * self.x_scales.to(work)
        weights = self.weights.to(work) * self.scales.to(work)
        return x, weights


def _quantize_int4(
    randn: Randn,
    tensors: dict[str, Tensor],
    weights: Tensor,
    group: int,
    has_zeros: bool,
) -> _Product:
    """Add packed weights, scales and zero points to the tensors, and return the product.

    Args:
        randn: Draws the numbers.
        tensors: The tensors of the call.
        weights: (experts, rows, columns).
        group: Number of columns that share a scale.
        has_zeros: Whether each group has a zero point. Without zero points, code 8 is zero.
    """
    x = tensors["x"]
    experts, rows, columns = weights.shape
    codes = ((weights * 16).round().clamp(-8, 7) + 8).to(torch.uint8)
    scales = (randn(experts, rows, columns // group).abs() + 0.5).to(x.dtype)
    zero_points = torch.full(scales.shape, 8, dtype=torch.uint8)
    if has_zeros:
        zero_points = (randn(*scales.shape).abs() * 4).clamp(max=15).to(torch.uint8)
        # A byte holds the 4-bit zero points of two rows.
        tensors["zeros"] = zero_points[:, ::2] | zero_points[:, 1::2] << 4
    tensors["weights"] = codes[..., ::2] | codes[..., 1::2] << 4
    tensors["scales"] = scales
    shifted = codes.to(x.dtype) - zero_points.repeat_interleave(group, -1).to(x.dtype)
    return _Product(x, shifted * scales.repeat_interleave(group, -1))


def _quantize_fp8(
    randn: Randn,
    tensors: dict[str, Tensor],
    weights: Tensor,
    kind: str,
) -> _Product:
    """Round x and the weights to FP8; add x and the scales to the tensors; return the product.

    Args:
        randn: Draws the numbers.
        tensors: The tensors of the call.
        weights: (experts, rows, columns).
        kind: Kind of the scales; see the argument `scales` of moe.
    """
    x = tensors["x"].to(FP8).to(weights.dtype)
    weights = weights.to(FP8).to(weights.dtype)
    tokens = len(x)
    experts, rows, columns = weights.shape
    if kind == "blocks":
        x_shape: tuple[int, ...] = (tokens, columns // _BLOCK)
        shape: tuple[int, ...] = (experts, -(-rows // _BLOCK), columns // _BLOCK)
    elif kind == "channels":
        x_shape = (tokens, 1)
        shape = (experts, rows, 1)
    else:
        x_shape = (1,)
        shape = (experts,)
    x_scales = randn(*x_shape).float().abs() + 0.1
    scales = randn(*shape).float().abs() + 0.1
    tensors |= {"x": x, "x_scales": x_scales, "scales": scales}
    if kind == "blocks":
        x_scales = x_scales.repeat_interleave(_BLOCK, -1)
        scales = scales.repeat_interleave(_BLOCK, -1).repeat_interleave(_BLOCK, 1)[:, :rows]
    elif kind == "tensor":
        scales = scales[:, None, None]
    return _Product(x, weights, x_scales, scales)


def run_moe(*args: Any, **options: Any) -> dict[str, Tensor]:
    """Run a product of experts. The arguments are those of :func:`bind_moe`."""
    launch, out = bind_moe(*args, **options)
    launch()
    return {"out": out}


def bind_moe(  # noqa: PLR0913 (the parameters of the kernels)
    x: Tensor,
    experts: Tensor,
    shares: Tensor,
    weights: Tensor,
    *,
    scales: Tensor | None = None,
    zeros: Tensor | None = None,
    x_scales: Tensor | None = None,
    bias: Tensor | None = None,
    bits: int = 16,
    group: int = 32,
    routed: bool = True,
    swizzle: int = 0,
    absent: int = 0,
    columns: int = 0,
    kind: str = "blocks",
) -> tuple[Callable[[], None], Tensor]:
    """Return a function that launches a product of experts, and the tensor that it writes.

    Args:
        x: (tokens, columns).
        experts: The experts of each token, (tokens, top_k).
        shares: The router's weights, (tokens, top_k).
        weights: (experts, rows, columns), or half as many columns for int4.
        scales: Scales of the weights.
        zeros: Zero points of int4 weights.
        x_scales: Scales of x, if it is FP8.
        bias: (experts, rows).
        bits: See moe.
        group: See moe.
        routed: See moe.
        swizzle: See moe.
        absent: See moe.
        columns: Number of columns of the weights without padding; 0 is all.
        kind: Kind of the scales; see the argument `scales` of moe.
    """
    module = importlib.import_module(MOE_MODULE)
    dtype = x.dtype
    tokens, top_k = experts.shape
    count, rows = weights.shape[:2]
    dtype_name = {4: "int4_w4a16", 8: "fp8_w8a8"}.get(bits)
    block = None
    if bits == 4:
        block = [0, group]
    elif bits == 8 and kind == "blocks":
        block = [_BLOCK, _BLOCK]
    config = module.get_default_config(tokens, count, rows, x.shape[1], top_k, dtype_name, block)
    if swizzle:
        config |= {"GROUP_SIZE_M": swizzle}
    if bits == 8:
        # The tensors are converted here, because FP8 tensors cannot be pickled.
        x = x.to(FP8)
        weights = weights.to(FP8)
    weights = weights[..., : columns or None]
    pairs, owners, filled = assign(module, experts, config, count, dtype_name, block)
    owners = owners.masked_fill(owners < absent, -1)
    out = torch.full((tokens, top_k, rows), float("nan"), dtype=dtype, device=x.device)
    common = {
        "A": x,
        "B": weights,
        "C": out,
        "topk_weights": shares,
        "sorted_token_ids": pairs,
        "expert_ids": owners,
        "num_tokens_post_padded": filled,
        "mul_routed_weight": routed,
        "top_k": top_k,
        "config": config,
        "use_int8_w8a16": False,
        "use_int4_w4a16": bits == 4,
        "B_scale": scales,
        "block_shape": block,
        "compute_type": getattr(module.tl, str(dtype).removeprefix("torch.")),
    }
    if bits == 4:
        return partial(module.invoke_fused_moe_wna16_triton_kernel, **common, B_zp=zeros), out
    launch = partial(
        module.invoke_fused_moe_triton_kernel,
        **common,
        A_scale=x_scales,
        use_fp8_w8a8=bits == 8,
        use_int8_w8a8=False,
        per_channel_quant=kind == "channels",
        B_bias=bias,
    )
    return launch, out
