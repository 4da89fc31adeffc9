# SPDX-License-Identifier: BSD-3-Clause
"""Build the inputs of a case of scaled_dot_product_attention, and its expected results."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from strix_validate.attention.sdpa_cases import SdpaCase
from strix_validate.checks import derive_seed
from strix_validate.numerics import reference

#: Number of different sequences in a batch whose tensors exceed 2 GiB. It is prime. Otherwise, an
#: offset that wraps around could reach a sequence with the same numbers.
_POOL = 61
#: Largest number of scores in one call of the reference for several sequences.
_SCORES_AT_A_TIME = 2**20
_ADDITIVE = ("sequence", "heads", "slice", "tiles")


class Problem:
    """The inputs of a case, which are drawn from its seed, and the expected results.

    Attributes:
        case: The case.
        dtype: Dtype of the inputs.
        inputs: q, k, v and the gradient of the output, with the strides of the case's layout.
        options: Keyword arguments of the call.
        compared: Indices of the sequences whose results are compared; None is all.
        expected: The method `expect` with a cache of its results.
    """

    def __init__(self, case: SdpaCase, dtype: torch.dtype, device: str) -> None:
        self.case = case
        self.dtype = dtype
        generator = torch.Generator().manual_seed(derive_seed(case.name))
        q, k, v, grad_out = _draw_inputs(case, dtype, generator)
        attn_mask = build_mask(case, dtype, generator)
        reference_device = device if case.on_device else "cpu"
        # The reference needs all heads, even if the case expands one head of keys and values.
        self._reference_inputs = [
            q.to(reference_device),
            k.expand(-1, case.kv_heads, -1, -1).to(reference_device),
            v.expand(-1, case.kv_heads, -1, -1).to(reference_device),
            grad_out.to(reference_device),
        ]
        self._mask = attn_mask
        if attn_mask is not None:
            self._mask = attn_mask.to(reference_device)
            attn_mask = _lay_out_mask(case, attn_mask.to(device))
        self.inputs = _lay_out(
            case,
            q.to(device),
            k.to(device),
            v.to(device),
            grad_out.to(device),
        )
        self.options: dict[str, Any] = {
            "attn_mask": attn_mask,
            "is_causal": case.causal,
            "scale": case.scale,
            "enable_gqa": case.heads != case.kv_heads,
        }
        if case.dropout:
            self.options["dropout_p"] = case.dropout
        self.compared: list[int] | None = None
        if case.gib:
            last = case.batch - 1
            self.compared = [0, 1, last // 2, last - 1, last]
        self.expected: Callable[[reference.Precision], dict[str, Tensor]] = cache(self.expect)

    def expect(
        self,
        dtype: reference.Precision,
        keep: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the expected results; see reference.attention.

        Args:
            dtype: Precision of the results.
            keep: The factor by which dropout multiplies each weight; None without dropout.
        """
        causal: reference.Causal = "top-left" if self.case.causal else None
        parts = []
        for rows in self._list_parts():
            mask = self._mask
            if mask is not None and mask.dim() == 4 and len(mask) > 1:
                mask = mask[rows]
            part_keep = None if keep is None else keep[rows]
            q, k, v, grad_out = (x[rows] for x in self._reference_inputs)
            part = reference.attention(
                q,
                k,
                v,
                grad_out,
                causal=causal,
                attn_mask=mask,
                keep=part_keep,
                scale=self.case.scale,
                dtype=dtype,
            )
            parts.append(part)
        results = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        if "m" in self.case.needs and self._mask is not None:
            # the gradient is summed over the dimensions that the mask was broadcast to
            grad_mask = results["dmask"].sum_to_size(self._mask.shape)
            results["dmask"] = reference.store(grad_mask, dtype)
        return results

    def _list_parts(self) -> list[slice]:
        """Return the slices of the batch that the reference computes one after the other.

        In the largest cases, the scores of all sequences would not fit into memory in float64. If
        `compared` is set, each slice is one of the compared sequences.
        """
        if self.compared:
            return [slice(i % _POOL, i % _POOL + 1) for i in self.compared]
        scores = self.case.seqlen_q * self.case.seqlen_k
        step = 1
        if scores <= 4096:
            step = max(1, _SCORES_AT_A_TIME // (scores * self.case.heads))
        return [slice(i, i + step) for i in range(0, self.case.batch, step)]


def _draw_inputs(
    case: SdpaCase,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw q, k, v and the gradient of the output, (batch, heads, seqlen, head_dim), on the CPU.

    A case with `gib` gets only _POOL sequences, which _lay_out repeats.
    """

    def randn(heads: int, seqlen: int, head_dim: int) -> Tensor:
        batch = min(case.batch, _POOL) if case.gib else case.batch
        if case.layout == "strided":
            x = torch.randn((batch, seqlen, heads, head_dim), generator=generator)
            return x.to(dtype).transpose(1, 2)
        x = torch.randn((batch, heads, seqlen, head_dim), generator=generator)
        return x.to(dtype)

    v_dim = case.v_dim or case.head_dim
    kv_heads = 1 if case.layout == "expanded" else case.kv_heads
    q = randn(case.heads, case.seqlen_q, case.head_dim)
    grad_out = randn(case.heads, case.seqlen_q, v_dim)
    k = randn(kv_heads, case.seqlen_k, case.head_dim)
    v = randn(kv_heads, case.seqlen_k, v_dim)
    if case.layout == "summed":
        grad_out = torch.ones((), dtype=dtype).expand_as(grad_out)
    if case.sink:
        tensors = reference.with_sink(q, k, v, grad_out, sink=case.sink)
        q, k, v, grad_out = (x.to(dtype) for x in tensors)
    if case.low:
        scale = case.scale or case.head_dim**-0.5
        q, k = reference.with_low_scores(q, k, case.low, scale)
    if case.dropout:
        v[..., : case.seqlen_k] = torch.eye(case.seqlen_k, dtype=dtype)
    return q, k, v, grad_out


def _lay_out(
    case: SdpaCase,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Give the tensors the strides and the batch size of the case.

    The tensors are already on the device, because a later copy would change some of the strides.
    """
    if case.layout == "expanded":
        k = k.expand(-1, case.kv_heads, -1, -1)
        v = v.expand(-1, case.kv_heads, -1, -1)
    if case.layout == "packed":
        # (batch, seqlen, 3, heads, head_dim), the layout of one linear layer's output
        packed = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)
        q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    if case.layout == "strided-values":
        v = v.transpose(1, 2).contiguous().transpose(1, 2)
    if case.layout == "cache":
        padding = (0, 0, 0, 51)
        longer = (torch.nn.functional.pad(x, padding, value=torch.nan) for x in (k, v))
        k, v = (x[:, :, : case.seqlen_k] for x in longer)
    if case.layout == "summed":
        grad_out = grad_out[:1, :1, :1, :1].expand_as(grad_out)
    if case.gib:
        rows = torch.arange(case.batch, device=q.device) % _POOL
        q, k, v, grad_out = (x[rows] for x in (q, k, v, grad_out))
    return q, k, v, grad_out


def _lay_out_mask(case: SdpaCase, attn_mask: Tensor) -> Tensor:
    """Give a mask of the kind "slice" its strides; return any other mask unchanged."""
    if case.attn_mask != "slice":
        return attn_mask
    wider = torch.nn.functional.pad(attn_mask, (0, 24), value=torch.nan)
    return wider[..., : case.seqlen_k]


def build_mask(
    case: SdpaCase,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor | None:
    """Build the case's mask, with two or four dimensions; None if the case has none.

    Args:
        case: The case.
        dtype: Dtype of an additive mask, unless the case has a mask_dtype.
        generator: Source of random masks.
    """
    if case.mask_dtype:
        dtype = getattr(torch, case.mask_dtype)
    # These numbers are drawn even for kinds of masks that do not use them. Otherwise, the random
    # masks below would have other numbers.
    scores = torch.randn(case.seqlen_q, case.seqlen_k, generator=generator)
    if case.attn_mask == "bool":
        return (scores > 0).index_fill(1, torch.tensor(0), True)  # every query sees key 0
    if case.attn_mask == "additive":
        return scores.to(dtype)
    if case.attn_mask == "learned":
        size = (case.batch, case.heads, case.seqlen_q, case.seqlen_k)
        return torch.randn(size, generator=generator).to(dtype)
    if case.attn_mask in _ADDITIVE:
        return _draw_additive_mask(case, generator).to(dtype)
    key = torch.arange(case.seqlen_k)
    sequence = torch.arange(case.batch)[:, None, None, None]
    if case.attn_mask == "padding":
        return key < case.seqlen_k - 37 * sequence
    if case.attn_mask == "least":
        # the second sequence begins with 70 keys of padding, which more than fill a tile of 64
        query = torch.arange(case.seqlen_q)[:, None]
        aligned_key = query + case.seqlen_k - case.seqlen_q
        visible = (key <= aligned_key) & (key >= 70 * sequence)
        zeros = torch.zeros(visible.shape, dtype=dtype)
        return zeros.masked_fill(~visible, torch.finfo(dtype).min)
    return None


def _draw_additive_mask(case: SdpaCase, generator: torch.Generator) -> Tensor:
    size = (1, 1, case.seqlen_q, case.seqlen_k)
    if case.attn_mask == "sequence":
        size = (case.batch, 1, 1, case.seqlen_k)
    if case.attn_mask == "heads":
        size = (1, case.heads, case.seqlen_q, case.seqlen_k)
    numbers = torch.randn(size, generator=generator)
    if case.attn_mask == "tiles":
        numbers[..., case.seqlen_q // 2 :, : case.seqlen_k - 4] = -torch.inf
    return numbers
