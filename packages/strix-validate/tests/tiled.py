# SPDX-License-Identifier: BSD-3-Clause
"""Attention in tiles with a running maximum, as kernels compute it, in torch on the CPU.

Right by default. Each field of :class:`Kernel` is a place where a kernel can be wrong; test_planted
puts a fault there. It shares no code with strix_validate.numerics.reference.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

INFINITY = float("inf")


@dataclass(frozen=True)
class Kernel:
    """Numbers are added to the right value or multiplied with it; flags name what goes wrong."""

    tile: int = 64
    scale: float = 1.0
    dq_scale: float = 1.0
    dk_scale: float = 1.0
    dv_scale: float = 1.0
    diagonal: int = 0  # keys more that a causal query sees
    other_corner: bool = False
    window: int = 0  # keys more that a window has
    softcap: bool = True
    log_base: float = 1.0  # the logarithm is divided by it
    lse_of_last_tile: bool = False
    sums: torch.dtype | None = None  # of out between tiles
    grad_sums: torch.dtype | None = None  # of dk and dv
    truncates: str = ""  # "all" results, or one: "weights", "out", "dq", "dk", "dv"
    swallows_nan: bool = False
    skips_partial_tile: bool = False
    skips_last_query: bool = False
    counts_padding: bool = False  # keys of zeros behind the last one
    most_keys: int = 1 << 30
    most_queries: int = 1 << 30
    neighbour_head: bool = False  # query head h reads key/value head h % kv_heads
    one_head_of_group: bool = False  # dk and dv of the group's last head only
    first_sequence: bool = False  # read for each sequence
    padded_lanes: bool = False  # one more lane, of the next row, where the head dim is padded
    contiguous: bool = False  # strides are ignored
    no_delta: bool = False
    stale_out: bool = False  # backward reads the output of the call before
    keep_scale: bool = True  # kept weights are multiplied by 1 / (1 - p)
    keep_again: bool = False  # backward drops other weights
    mask_of_first_tile: bool = False  # of an additive or Boolean mask
    inverts_mask: bool = False  # a Boolean one
    queries_for_keys: bool = False  # offsets of a packed sequence
    empty_shifts: bool = False  # a sequence without keys is left out, and all behind it move up
    ignores_scale: bool = False  # the argument
    scale_twice: bool = False  # the argument times the default
    first_mask: bool = False  # of the sequences' masks
    one_mask_for_heads: bool = False
    mask_in_base_2: bool = False  # and no guard against a tile of infinities
    dmask_scale: float = 1.0
    most_v_lanes: bool = False  # values have as many lanes as keys
    v_lanes_shared: bool = False  # lanes behind the keys' repeat the first ones
    alone: str = ""  # the gradient that lacks something where it is the only one: "dq", "dk", "dv"
    stride_of_size: bool = False  # a stride of 0 taken for the head's size
    group_rounded: bool = False  # up to a power of two
    group_rounded_packed: bool = False  # where sequences are packed
    most_heads: int = 1 << 30
    most_planes: int = 1 << 30  # batch times heads
    most_sequences: int = 1 << 30
    swallows_nan_causal: bool = False
    no_maximum_backward: bool = False  # exp(score) / exp(logsumexp)
    dropout_tile: tuple[int, int] = (0, 0)  # queries and keys behind which the pattern repeats
    most_queries_for_keys: bool = False  # queries behind the last key are not written
    inference: tuple = ()  # fields that differ where no gradient is wanted, as pairs
    ignores_alibi: bool = False
    alibi_of_first: bool = False  # the first sequence's slopes
    alibi_sign: float = 1.0
    rotary_offset: bool = True  # angles begin at the cache's length
    rotary_pairs: bool = True  # neighbours or halves, as asked
    rotary_keys: bool = True
    rotary_rest: bool = True  # lanes behind the rotated ones are kept
    rotary_one_by_one: bool = False  # queries that are not causal as well
    most_window: int = 1 << 30
    drops_one_behind: int = 0  # the last key or query where it begins a tile of this size
    swapped_pack: str = ""  # the two of "qkv" that a packed function swaps
    most_tokens: int = 1 << 30
    wide_diagonal: int = 0  # keys more that a causal query sees, in head dims above 128
    values_as_keys: bool = False  # v is read with k's strides
    slice_as_whole: bool = False  # rows in a piece lie as the shape says
    first_of_sum: bool = False  # a gradient of strides 0 is read once
    masks_below: int = 1 << 30  # of a head dim from which on masks are ignored
    neighbour_of_one: bool = False  # neighbour_head, where there is one query
    causal_keep: bool = True  # keep_scale of causal calls
    most_keys_of_one: int = 1 << 30  # keys behind it are left out, where there is one query
    most_lanes_of_one: int = 1 << 30  # and lanes of it
    most_lanes: int = 1 << 30  # lanes of queries behind it are left out
    first_maximum: float = -INFINITY  # of the running maximum
    shut_out: float = -INFINITY  # the score of a key that is not seen
    padding_backward: bool = False  # keys of zeros behind the last one, in dq
    mask_without_dropout: bool = False  # masks are ignored where weights are dropped
    mask_by_key_head: bool = False  # a mask's head is the head of keys
    mask_contiguous: bool = False  # a mask's strides are ignored
    mask_of_first_query: bool = False  # numbers that all queries share are added to the first one's
    mask_of_own_dtype: bool = False  # a mask of another dtype is left out
    first_maximum_added: float = -INFINITY  # first_maximum, where numbers are added
    narrow_in_groups: bool = False  # lanes of narrower values shifted where heads share them
    accumulates: bool = False  # a second backward adds to the first one's dq
    dmask_of_first: bool = False  # the gradient of a mask that sequences share is the first one's
    full_128: float = 1.0  # scale, without a causal mask and at head dim 128
    wide_gradient_keys: int = 1 << 30  # keys behind it lack gradients above head dim 128
    alibi_signed: bool = False  # later keys are favoured
    open_window: bool = True  # a window that is open to the left is one
    window_from_first: bool = False  # queries in front of all keys see the first one in a window
    first_length: bool = False  # a length that is a number is the first sequence's

    def store(self, x: Tensor, dtype: torch.dtype, part: str = "") -> Tensor:
        """x, rounded to dtype, in float32; part: see truncates."""
        if self.truncates not in ("all", part or "all") or dtype is torch.float32:
            return x.to(dtype).float()
        lost = 16 if dtype is torch.bfloat16 else 13
        return (x.contiguous().view(torch.int32) >> lost << lost).view(torch.float32)

    def read(self, x: Tensor) -> Tensor:
        if self.stride_of_size and x.stride(1) == 0:
            x = torch.stack([x[:, i].roll(i, -2) for i in range(x.shape[1])], 1)
        whole = torch.empty(x.shape).stride()
        if self.slice_as_whole and x.stride(-2) == x.shape[-1] and x.stride() != whole:
            x = torch.as_strided(x, x.shape, whole)
        if self.contiguous and not x.is_contiguous():
            x = torch.as_strided(x, x.shape, torch.empty(x.shape).stride())
        if self.first_sequence:
            x = x[:1].expand_as(x)
        x = x.float()
        if self.padded_lanes and x.shape[-1] & (x.shape[-1] - 1):
            x = torch.cat([x, x[..., :1].roll(-1, -2)], -1)
        return x

    def seen(self, queries: int, keys: slice, n: int, causal: str, window: tuple[int, int]):
        """Which of the keys each query sees; n: number of keys."""
        query, key = torch.arange(queries)[:, None], torch.arange(keys.start, keys.stop)[None]
        own = query + n - queries
        if self.other_corner and causal:
            causal = {"top-left": "bottom-right", "bottom-right": "top-left"}[causal]
        window = tuple(min(side, self.most_window) for side in window)
        if window[0] < 0 and not self.open_window:
            window = (-1, -1)
        if window[0] >= 0 and self.window_from_first:
            own = own.clamp(min=0)
        found = torch.ones(queries, key.shape[1], dtype=torch.bool)
        if causal:
            found &= key <= (query if causal == "top-left" else own) + self.diagonal
        if window[0] >= 0:
            found &= key >= own - window[0] - self.window
        if window[1] >= 0:
            found &= key <= own + window[1] + self.window
        return found

    def __call__(
        self,
        q,
        k,
        v,
        grad_out=None,
        *,
        causal="",
        window=(-1, -1),
        softcap=0.0,
        mask=None,
        keep=None,
        stale=None,
        scale=None,
        needs="qkv",
        alibi=None,
    ) -> dict[str, Tensor]:
        """out and lse, and with grad_out dq, dk, dv and dmask; (batch, heads, seqlen, head_dim).

        keep: (0 or the factor of kept weights, the same for the backward pass). stale: the output
        of the call before. needs: the gradients that are wanted. alibi: (batch, heads) slopes.
        """
        if causal and self.swallows_nan_causal:
            return replace(self, swallows_nan=True, swallows_nan_causal=False)(
                q, k, v, grad_out, causal=causal, mask=mask, stale=stale, needs=needs
            )
        if q.shape[-1] > 128 and self.wide_diagonal:
            wrong = replace(self, diagonal=self.wide_diagonal, wide_diagonal=0)
            return wrong(q, k, v, grad_out, causal=causal, window=window, stale=stale)
        if q.shape[-1] == 128 and not causal and mask is None:
            scale = (scale or 128**-0.5) * self.full_128
        if q.shape[-1] >= self.masks_below or (keep is not None and self.mask_without_dropout):
            mask = None
        is_added = mask is not None and mask.dtype is not torch.bool
        if is_added and self.mask_of_own_dtype and mask.dtype is not q.dtype:
            mask = None
        if mask is not None and self.mask_contiguous:
            mask = torch.as_strided(mask, mask.shape, torch.empty(mask.shape).stride())
        if is_added and self.mask_of_first_query and mask.dim() == 4 and mask.shape[2] == 1:
            rows = torch.zeros(*mask.shape[:2], q.shape[2], k.shape[2], dtype=mask.dtype)
            mask = torch.cat([mask, rows[:, :, 1:]], 2)
        if mask is not None and self.mask_by_key_head and mask.dim() == 4 and mask.shape[1] > 1:
            mask = mask[:, torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])]
        if self.narrow_in_groups and v.shape[-1] < q.shape[-1] and k.shape[1] < q.shape[1]:
            v = v.roll(1, -1)
        first_maximum = self.first_maximum_added if is_added else self.first_maximum
        if self.values_as_keys and v.shape == k.shape:
            v = torch.as_strided(v, v.shape, k.stride())
        if self.first_of_sum and grad_out is not None and not any(grad_out.stride()):
            grad_out = torch.zeros_like(grad_out).index_fill_(2, torch.tensor(0), 1)
        if self.neighbour_of_one and q.shape[2] == 1:
            wrong = replace(self, neighbour_head=True, neighbour_of_one=False)
            return wrong(q, k, v, grad_out, causal=causal, mask=mask, scale=scale, needs=needs)
        if k.shape[2] > self.most_keys_of_one and q.shape[2] == 1:
            k, v = (x[:, :, : self.most_keys_of_one] for x in (k, v))
        most_lanes = self.most_lanes_of_one if q.shape[2] == 1 else self.most_lanes
        q = q.masked_fill(torch.arange(q.shape[-1]) >= most_lanes, 0)
        dtype, lanes, v_lanes = q.dtype, q.shape[-1], v.shape[-1]
        size = (*q.shape[:-1], v_lanes)
        default = lanes**-0.5
        if scale is None or self.ignores_scale:
            scale = default
        elif self.scale_twice:
            scale *= default
        scale *= self.scale
        q, k, v = (self.read(x) for x in (q, k, v))
        heads, kv_heads, n = q.shape[1], k.shape[1], k.shape[2]
        own = torch.arange(heads) // (heads // kv_heads)
        own = torch.arange(heads) % kv_heads if self.neighbour_head else own
        if self.group_rounded:
            own = (torch.arange(heads) >> ((heads // kv_heads) - 1).bit_length()).clamp(
                max=kv_heads
            )
        k, v = k[:, own], v[:, own]
        if self.most_v_lanes and v_lanes > lanes:
            v = v.index_fill(-1, torch.arange(lanes, v_lanes), 0)
        if self.v_lanes_shared and v_lanes != lanes:
            v = v.roll(1, -1)
        if mask is not None and self.inverts_mask and mask.dtype is torch.bool:
            mask = ~mask
        if mask is not None and self.first_mask and mask.dim() == 4:
            mask = mask[:1].expand(q.shape[0], -1, -1, -1)
        if mask is not None and self.one_mask_for_heads and mask.dim() == 4:
            mask = mask[:, :1]
        if alibi is not None and not self.ignores_alibi:
            alibi = alibi[:1].expand_as(alibi) if self.alibi_of_first else alibi
            place = torch.arange(q.shape[2])[:, None] + n - q.shape[2] - torch.arange(n)
            place = place if self.alibi_signed else place.abs()
            mask = -self.alibi_sign * alibi[:, :, None, None] * place
        one_behind = bool(self.drops_one_behind and n % self.drops_one_behind == 1 and n > 1)
        partial = n % self.tile if self.skips_partial_tile and n > self.tile else 0
        used = min(n - one_behind, n - partial, self.most_keys)
        tiles = [slice(i, min(i + self.tile, used)) for i in range(0, used, self.tile)]

        def score(keys: slice) -> tuple[Tensor, Tensor]:
            """Scores of these keys, -inf where not seen, and the derivative of the soft cap."""
            s = q @ k[:, :, keys].transpose(-2, -1) * scale
            slope = torch.ones_like(s)
            if softcap and self.softcap:
                capped = (s / softcap).tanh()
                s, slope = softcap * capped, 1 - capped**2
            if mask is not None and not (self.mask_of_first_tile and keys.start):
                part = mask[..., keys]
                if self.mask_in_base_2 and part.dtype is not torch.bool:
                    part = (part.float() / math.log(2)).to(dtype) * math.log(2)
                s = s.masked_fill(~part, self.shut_out) if part.dtype is torch.bool else s + part
            seen = self.seen(q.shape[2], keys, n, causal, window)
            return s.masked_fill(~seen, self.shut_out), slope

        best = torch.full((*q.shape[:3], 1), first_maximum)
        total, out = torch.zeros_like(best), torch.zeros(*q.shape[:3], v.shape[-1])
        sums = self.sums and dtype
        for keys in tiles:
            s, _ = score(keys)
            if self.swallows_nan:
                s = s.nan_to_num(-INFINITY, INFINITY, -INFINITY)
            new = torch.maximum(best, s.amax(-1, keepdim=True))
            base = new if self.mask_in_base_2 else new.masked_fill(new == -INFINITY, 0)
            shrink, weights = (best - base).exp(), (s - base).exp()
            total = total * shrink + weights.sum(-1, keepdim=True)
            if keep is not None:
                weights = weights * keep[0][..., keys]
            share = self.store(weights, dtype, "weights") @ v[:, :, keys]
            out = self.store(out * shrink + share, sums) if sums else out * shrink + share
            best = new
        if self.counts_padding:
            total = total + (-n % 16) * (-best).exp().nan_to_num(0, 0, 0)
        empty = total == 0
        out = self.store(out / total.masked_fill(empty, 1), dtype, "out")
        lse = (best + total.log())[..., 0]
        if self.lse_of_last_tile:
            lse = score(tiles[-1])[0].logsumexp(-1)
        found = {"lse": lse / self.log_base}
        if self.skips_last_query:
            out[:, :, -1] = 0
        out[:, :, self.most_queries :] = 0
        out[:, self.most_heads :] = 0
        out[self.most_sequences :] = 0
        out.flatten(0, 1)[self.most_planes :] = 0
        if self.most_queries_for_keys and causal:
            out[:, :, n:] = 0
        if one_behind:
            out[:, :, q.shape[2] - q.shape[2] % self.drops_one_behind :] = 0
        if grad_out is not None:
            log = (best + total.masked_fill(empty, 1).log()).masked_fill(empty, INFINITY)
            seen_out = stale if self.stale_out and stale is not None else out
            found |= self.gradients(
                q,
                k,
                v,
                grad_out.float(),
                seen_out,
                log,
                score,
                tiles,
                keep,
                scale,
                dtype,
                own,
                kv_heads,
                lanes,
                v_lanes,
                needs,
            )
        return found | {"out": out[..., :v_lanes].reshape(size).to(dtype)}

    def gradients(
        self,
        q,
        k,
        v,
        grad_out,
        out,
        log,
        score,
        tiles,
        keep,
        scale,
        dtype,
        own,
        kv_heads,
        lanes,
        v_lanes,
        needs,
    ) -> dict[str, Tensor]:
        """log: each query's logarithm of its sum of weights, infinite without keys."""
        grad_out = torch.cat([grad_out, torch.zeros(*q.shape[:3], v.shape[-1] - v_lanes)], -1)
        is_alone = self.alone == f"d{needs}"
        has_delta = not self.no_delta and not (is_alone and self.alone != "dv")
        delta = (grad_out * out).sum(-1, keepdim=True) * has_delta
        dmask = torch.zeros(*q.shape[:3], k.shape[2])
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        sums = self.grad_sums and dtype
        for keys in tiles:
            s, slope = score(keys)
            weights = s.exp() / log.exp() if self.no_maximum_backward else (s - log).exp()
            if self.swallows_nan:
                weights = weights.nan_to_num(0)
            grad = grad_out @ v[:, :, keys].transpose(-2, -1)
            kept = weights
            if keep is not None:
                grad, kept = grad * keep[1][..., keys], weights * keep[1][..., keys]
            grad = self.store(weights * (grad - delta) * slope, dtype, "weights")
            kept = self.store(kept, dtype, "weights")
            dmask[..., keys] = grad * self.dmask_scale
            dq += grad @ k[:, :, keys] * scale
            if self.padding_backward and k.shape[2] % self.tile:
                dq += self.store((-log).exp() * -delta, dtype) * 0.0
            for i in range(0, q.shape[2], self.tile):
                rows = slice(i, i + self.tile)
                more_k = grad[:, :, rows].transpose(-2, -1) @ q[:, :, rows] * scale
                more_v = kept[:, :, rows].transpose(-2, -1) @ grad_out[:, :, rows]
                for whole, more in ((dk, more_k), (dv, more_v)):
                    more = whole[:, :, keys] + more
                    whole[:, :, keys] = self.store(more, dtype) if sums else more
        if lanes > 128:
            dk[:, :, self.wide_gradient_keys :] = dv[:, :, self.wide_gradient_keys :] = 0
        factors = {"dq": self.dq_scale, "dk": self.dk_scale, "dv": self.dv_scale}
        if is_alone and self.alone == "dv":
            factors["dv"] *= 1.05
        found = {
            "dq": dq,
            "dk": self.per_head(dk, own, kv_heads),
            "dv": self.per_head(dv, own, kv_heads),
        }
        return {"dmask": dmask.to(dtype)} | {
            name: self.store(
                x[..., : v_lanes if name == "dv" else lanes] * factors[name], dtype, name
            ).to(dtype)
            for name, x in found.items()
        }

    def per_head(self, x: Tensor, own: Tensor, kv_heads: int) -> Tensor:
        """Gradients by query head summed over those that read the same key/value head."""
        if self.one_head_of_group:
            group = x.shape[1] // kv_heads
            return x[:, group - 1 :: group]
        return torch.zeros(x.shape[0], kv_heads, *x.shape[2:]).index_add_(1, own, x)
