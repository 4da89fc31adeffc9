# SPDX-License-Identifier: BSD-3-Clause
"""The inputs of a shape of scaled_dot_product_attention, and what it must make of them."""

from functools import cache

import torch
from torch import Tensor

from strix_validate.attention.sdpa_shapes import SdpaShape
from strix_validate.checks import seed_of
from strix_validate.numerics import reference

#: Sequences of other numbers where tensors exceed 2 GiB: a prime, so that an offset that wraps
#: around never meets the same numbers again.
_POOL = 61


class Problem:
    """The inputs of a shape, the same for a seed, and what attention makes of them.

    compared: the sequences whose results are; all if it is None.
    """

    def __init__(self, shape: SdpaShape, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(seed_of(shape.name))

        def randn(heads: int, seqlen: int, head_dim: int = shape.head_dim) -> Tensor:
            batch = min(shape.batch, _POOL) if shape.gib else shape.batch
            size = (batch, heads, seqlen, head_dim)
            if shape.layout == "strided":
                size = (batch, seqlen, heads, head_dim)
            x = torch.randn(size, generator=generator).to(dtype)
            return x.transpose(1, 2) if shape.layout == "strided" else x

        self.shape, self.dtype, self.device = shape, dtype, device
        v_dim, kv_heads = shape.v_dim or shape.head_dim, shape.kv_heads
        q = randn(shape.heads, shape.seqlen_q)
        grad_out = randn(shape.heads, shape.seqlen_q, v_dim)
        k = randn(1 if shape.layout == "expanded" else kv_heads, shape.seqlen_k)
        v = randn(k.shape[1], shape.seqlen_k, v_dim)
        if shape.layout == "summed":
            grad_out = torch.ones((), dtype=dtype).expand_as(grad_out)
        if shape.sink:
            found = reference.with_sink(q, k, v, grad_out, sink=shape.sink)
            q, k, v, grad_out = (x.to(dtype) for x in found)
        attn_mask = _attn_mask(shape, dtype, generator)
        where = device if shape.on_device else "cpu"
        all_heads = (x.expand(-1, kv_heads, -1, -1) for x in (k, v))
        self._reference = [x.to(where) for x in (q, *all_heads, grad_out)]
        self._mask = None if attn_mask is None else attn_mask.to(where)
        self.compared = None
        if shape.gib:
            last = shape.batch - 1
            self.compared = [0, 1, last // 2, last - 1, last]
        self.inputs = self._laid_out(*(x.to(device) for x in (q, k, v, grad_out)))
        self.options = {
            "attn_mask": None if attn_mask is None else attn_mask.to(device),
            "is_causal": shape.causal,
            "scale": shape.scale,
            "enable_gqa": shape.heads != shape.kv_heads,
        }
        self.expected = cache(self._expect)

    def _laid_out(self, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
        """Lay out the tensors as the shape says, on the device: a copy to it would change some."""
        if self.shape.layout == "expanded":
            k, v = (x.expand(-1, self.shape.kv_heads, -1, -1) for x in (k, v))
        if self.shape.layout == "packed":
            # (batch, seqlen, 3, heads, head_dim), as one linear layer gives them
            together = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)
            q, k, v = (x.transpose(1, 2) for x in together.unbind(2))
        if self.shape.layout == "strided-values":
            v = v.transpose(1, 2).contiguous().transpose(1, 2)
        if self.shape.layout == "cache":
            longer = (torch.nn.functional.pad(x, (0, 0, 0, 51), value=torch.nan) for x in (k, v))
            k, v = (x[:, :, : self.shape.seqlen_k] for x in longer)
        if self.shape.layout == "summed":
            grad_out = grad_out[:1, :1, :1, :1].expand_as(grad_out)
        if self.shape.gib:
            chosen = torch.arange(self.shape.batch, device=q.device) % _POOL
            q, k, v, grad_out = (x[chosen] for x in (q, k, v, grad_out))
        return q, k, v, grad_out

    def _expect(self, dtype: reference.Precision) -> dict[str, Tensor]:
        causal: reference.Causal = "top-left" if self.shape.causal else None
        # one sequence at a time: in float64 the scores of the largest shapes fill the memory
        length = self.shape.seqlen_q * self.shape.seqlen_k
        step = 1 if length > 4096 else max(1, 2**20 // (length * self.shape.heads))
        chosen = [slice(i, i + step) for i in range(0, self.shape.batch, step)]
        if self.compared:
            chosen = [slice(i % _POOL, i % _POOL + 1) for i in self.compared]
        masks = [self._mask] * len(chosen)
        if self._mask is not None and self._mask.dim() == 4:
            masks = [self._mask[rows] for rows in chosen]
        parts = [
            reference.attention(
                *(x[rows] for x in self._reference),
                causal=causal,
                attn_mask=mask,
                scale=self.shape.scale,
                dtype=dtype,
            )
            for rows, mask in zip(chosen, masks, strict=True)
        ]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _attn_mask(shape: SdpaShape, dtype: torch.dtype, generator: torch.Generator) -> Tensor | None:
    """Build the shape's mask, of two dimensions where all sequences and heads share it."""
    scores = torch.randn(shape.seqlen_q, shape.seqlen_k, generator=generator)
    if shape.attn_mask == "bool":
        return (scores > 0).index_fill(1, torch.tensor(0), True)  # every query sees key 0
    if shape.attn_mask == "additive":
        return scores.to(dtype)
    if shape.attn_mask == "learned":
        size = (shape.batch, shape.heads, *scores.shape)
        return torch.randn(size, generator=generator).to(dtype)
    key, own = torch.arange(shape.seqlen_k), torch.arange(shape.seqlen_q)[:, None]
    sequence = torch.arange(shape.batch)[:, None, None, None]
    if shape.attn_mask == "padding":
        return key < shape.seqlen_k - 37 * sequence
    if shape.attn_mask == "least":
        # all of the first 64 keys of the second sequence are padding
        own = own + shape.seqlen_k - shape.seqlen_q
        seen = (key <= own) & (key >= 70 * sequence)
        return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    return None
