# SPDX-License-Identifier: BSD-3-Clause
"""Attention in tiles with a running maximum, as kernels compute it, in torch on the CPU.

The default kernel is correct. Each field of :class:`Kernel` describes a possible fault, which
test_planted.py plants. The module shares no code with strix_validate.numerics.reference.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

INFINITY = float("inf")


@dataclass(frozen=True)
class Kernel:
    """A kernel with faults. Numbers are limits or change correct values; flags name faults."""

    tile: int = 64
    scale: float = 1.0
    dq_scale: float = 1.0
    dk_scale: float = 1.0
    dv_scale: float = 1.0
    diagonal: int = 0  # additional keys that a causal query sees
    other_corner: bool = False
    window: int = 0  # additional keys on each side of a window
    softcap: bool = True
    log_base: float = 1.0  # the logsumexp is divided by it
    lse_of_last_tile: bool = False
    sums: torch.dtype | None = None  # if set, out is rounded after each tile
    grad_sums: torch.dtype | None = None  # if set, dk and dv are rounded after each tile
    truncates: str = ""  # "all", "weights", "out", "dq", "dk" or "dv": truncated, not rounded
    swallows_nan: bool = False
    skips_partial_tile: bool = False
    skips_last_query: bool = False
    counts_padding: bool = False  # keys of zeros behind the last key count
    max_keys: int = 1 << 30
    max_queries: int = 1 << 30
    neighbour_head: bool = False  # query head h reads key/value head h % kv_heads
    one_head_of_group: bool = False  # dk and dv of the group's last head only
    first_sequence: bool = False  # each sequence reads the first one's tensors
    padded_lanes: bool = False  # a padded head dim has one more lane, from the next row
    contiguous: bool = False  # strides are ignored
    no_delta: bool = False
    stale_out: bool = False  # backward reads the output of the previous call
    keep_scale: bool = True  # kept weights are multiplied by 1 / (1 - p)
    keep_again: bool = False  # backward drops other weights than forward
    mask_of_first_tile: bool = False  # masks apply to the first tile only
    inverts_mask: bool = False  # Boolean masks are inverted
    queries_for_keys: bool = False  # packed keys are read at the offsets of the queries
    empty_shifts: bool = False  # a sequence without keys is left out, and the later ones move up
    ignores_scale: bool = False  # the argument is ignored
    scale_twice: bool = False  # the argument is multiplied with the default
    first_mask: bool = False  # each sequence has the first one's mask
    one_mask_for_heads: bool = False
    mask_in_base_2: bool = False  # also without a guard against a tile of infinities
    dmask_scale: float = 1.0
    v_lanes_of_keys: bool = False  # values have as many lanes as keys
    v_lanes_shared: bool = False  # lanes behind the keys' repeat the first ones
    alone: str = ""  # "dq", "dk" or "dv": wrong if it is the only gradient
    stride_of_size: bool = False  # a stride of 0 is taken for the size of a head
    group_rounded: bool = False  # groups of heads are rounded up to a power of two
    group_rounded_packed: bool = False  # group_rounded, for packed sequences only
    max_heads: int = 1 << 30
    max_planes: int = 1 << 30  # batch times heads
    max_sequences: int = 1 << 30
    swallows_nan_causal: bool = False
    no_maximum_backward: bool = False  # weights are exp(score) / exp(logsumexp)
    dropout_tile: tuple[int, int] = (0, 0)  # queries and keys after which the pattern repeats
    skips_queries_past_keys: bool = False  # queries behind the last key are not written
    inference: tuple = ()  # pairs of fields and values that apply only without gradients
    ignores_alibi: bool = False
    alibi_of_first: bool = False  # each sequence has the first one's slopes
    alibi_sign: float = 1.0
    rotary_offset: bool = True  # angles begin at the cache's length
    rotary_pairs: bool = True  # the argument chooses pairs of neighbours or of halves
    rotary_keys: bool = True  # new keys are rotated
    keeps_unrotated_lanes: bool = True  # lanes behind the rotated ones are kept
    rotary_one_by_one: bool = False  # queries that are not causal have different positions
    max_window: int = 1 << 30
    drops_one_behind: int = 0  # a last key or query that begins a tile of this size is dropped
    swapped_pack: str = ""  # the two of "qkv" that a packed function swaps
    max_tokens: int = 1 << 30
    wide_diagonal: int = 0  # diagonal, for head dims above 128
    values_as_keys: bool = False  # v is read with k's strides
    slice_as_whole: bool = False  # a slice is read as a contiguous tensor
    first_of_sum: bool = False  # a gradient with strides of 0 counts for the first query only
    masks_below: int = 1 << 30  # masks are ignored from this head dim on
    neighbour_of_one: bool = False  # neighbour_head, for a single query
    causal_keep: bool = True  # keep_scale, for causal calls
    max_keys_of_one: int = 1 << 30  # max_keys, for a single query
    max_lanes_of_one: int = 1 << 30  # max_lanes, for a single query
    max_lanes: int = 1 << 30  # later lanes of queries are left out
    first_maximum: float = -INFINITY  # the initial value of the running maximum
    shut_out: float = -INFINITY  # the score of a key that is not seen
    padding_backward: bool = False  # keys of zeros behind the last key count in dq
    mask_without_dropout: bool = False  # masks are ignored with dropout
    mask_by_key_head: bool = False  # masks are indexed by the head of keys
    mask_contiguous: bool = False  # a mask's strides are ignored
    mask_of_first_query: bool = False  # a mask that all queries share applies to the first
    mask_of_own_dtype: bool = False  # a mask of another dtype is ignored
    first_maximum_added: float = -INFINITY  # first_maximum, with an additive mask
    narrow_in_groups: bool = False  # lanes of narrower values are shifted if heads share them
    accumulates: bool = False  # a second backward adds to the first one's dq
    dmask_of_first: bool = False  # a shared mask's gradient is the first sequence's
    full_128: float = 1.0  # scale, for head dim 128 without a causal mask
    wide_gradient_keys: int = 1 << 30  # later keys have no gradient above head dim 128
    alibi_signed: bool = False  # later keys are favoured
    open_window: bool = True  # a window that is open to the left is applied
    window_from_first: bool = False  # in a window, queries before all keys see the first
    first_length: bool = False  # a length that is a number applies to the first sequence

    def store(self, x: Tensor, dtype: torch.dtype, part: str = "") -> Tensor:
        """Return x rounded to dtype, in float32. `part` is a name of `truncates`."""
        if self.truncates not in ("all", part or "all") or dtype is torch.float32:
            return x.to(dtype).float()
        lost_bits = 16 if dtype is torch.bfloat16 else 13
        return (x.contiguous().view(torch.int32) >> lost_bits << lost_bits).view(torch.float32)

    def read(self, x: Tensor) -> Tensor:
        if self.stride_of_size and x.stride(1) == 0:
            x = torch.stack([x[:, i].roll(i, -2) for i in range(x.shape[1])], 1)
        contiguous = torch.empty(x.shape).stride()
        if self.slice_as_whole and x.stride(-2) == x.shape[-1] and x.stride() != contiguous:
            x = torch.as_strided(x, x.shape, contiguous)
        if self.contiguous and not x.is_contiguous():
            x = torch.as_strided(x, x.shape, torch.empty(x.shape).stride())
        if self.first_sequence:
            x = x[:1].expand_as(x)
        x = x.float()
        if self.padded_lanes and x.shape[-1] & (x.shape[-1] - 1):
            x = torch.cat([x, x[..., :1].roll(-1, -2)], -1)
        return x

    def find_visible(self, queries: int, keys: slice, n: int, causal: str, window: tuple[int, int]):
        """Return a mask of the keys that each query sees. n is the number of all keys."""
        query = torch.arange(queries)[:, None]
        key = torch.arange(keys.start, keys.stop)[None]
        position = query + n - queries
        if self.other_corner and causal:
            causal = "bottom-right" if causal == "top-left" else "top-left"
        window = tuple(min(side, self.max_window) for side in window)
        if window[0] < 0 and not self.open_window:
            window = (-1, -1)
        if window[0] >= 0 and self.window_from_first:
            position = position.clamp(min=0)
        visible = torch.ones(queries, key.shape[1], dtype=torch.bool)
        if causal:
            visible &= key <= (query if causal == "top-left" else position) + self.diagonal
        if window[0] >= 0:
            visible &= key >= position - window[0] - self.window
        if window[1] >= 0:
            visible &= key <= position + window[1] + self.window
        return visible

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
        """Return out and lse, and with grad_out also dq, dk, dv and dmask.

        Args:
            q, k, v, grad_out: (batch, heads, seqlen, head_dim).
            keep: For each weight 0 or its factor, for the forward and the backward pass.
            stale: The output of the previous call.
            needs: The inputs whose gradients are needed.
            alibi: Slopes (batch, heads).
        """
        if causal and self.swallows_nan_causal:
            return replace(self, swallows_nan=True, swallows_nan_causal=False)(
                q, k, v, grad_out, causal=causal, mask=mask, stale=stale, needs=needs
            )
        if q.shape[-1] > 128 and self.wide_diagonal:
            faulty = replace(self, diagonal=self.wide_diagonal, wide_diagonal=0)
            return faulty(q, k, v, grad_out, causal=causal, window=window, stale=stale)
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
            faulty = replace(self, neighbour_head=True, neighbour_of_one=False)
            return faulty(q, k, v, grad_out, causal=causal, mask=mask, scale=scale, needs=needs)
        if k.shape[2] > self.max_keys_of_one and q.shape[2] == 1:
            k, v = (x[:, :, : self.max_keys_of_one] for x in (k, v))
        max_lanes = self.max_lanes_of_one if q.shape[2] == 1 else self.max_lanes
        q = q.masked_fill(torch.arange(q.shape[-1]) >= max_lanes, 0)
        dtype = q.dtype
        lanes = q.shape[-1]
        v_lanes = v.shape[-1]
        size = (*q.shape[:-1], v_lanes)
        default = lanes**-0.5
        if scale is None or self.ignores_scale:
            scale = default
        elif self.scale_twice:
            scale *= default
        scale *= self.scale
        q, k, v = (self.read(x) for x in (q, k, v))
        heads = q.shape[1]
        kv_heads, n = k.shape[1:3]
        kv_head = torch.arange(heads) // (heads // kv_heads)
        kv_head = torch.arange(heads) % kv_heads if self.neighbour_head else kv_head
        if self.group_rounded:
            kv_head = (torch.arange(heads) >> ((heads // kv_heads) - 1).bit_length()).clamp(
                max=kv_heads
            )
        k = k[:, kv_head]
        v = v[:, kv_head]
        if self.v_lanes_of_keys and v_lanes > lanes:
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
        used = min(n - one_behind, n - partial, self.max_keys)
        tiles = [slice(i, min(i + self.tile, used)) for i in range(0, used, self.tile)]

        def score(keys: slice) -> tuple[Tensor, Tensor]:
            """Return the scores of keys, -inf if not visible, and the derivative of the softcap."""
            s = q @ k[:, :, keys].transpose(-2, -1) * scale
            slope = torch.ones_like(s)
            if softcap and self.softcap:
                capped = (s / softcap).tanh()
                s = softcap * capped
                slope = 1 - capped**2
            if mask is not None and not (self.mask_of_first_tile and keys.start):
                part = mask[..., keys]
                if self.mask_in_base_2 and part.dtype is not torch.bool:
                    part = (part.float() / math.log(2)).to(dtype) * math.log(2)
                s = s.masked_fill(~part, self.shut_out) if part.dtype is torch.bool else s + part
            visible = self.find_visible(q.shape[2], keys, n, causal, window)
            return s.masked_fill(~visible, self.shut_out), slope

        best = torch.full((*q.shape[:3], 1), first_maximum)
        total = torch.zeros_like(best)
        out = torch.zeros(*q.shape[:3], v.shape[-1])
        sums = self.sums and dtype
        for keys in tiles:
            s, _ = score(keys)
            if self.swallows_nan:
                s = s.nan_to_num(-INFINITY, INFINITY, -INFINITY)
            new = torch.maximum(best, s.amax(-1, keepdim=True))
            base = new if self.mask_in_base_2 else new.masked_fill(new == -INFINITY, 0)
            shrink = (best - base).exp()
            weights = (s - base).exp()
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
        results = {"lse": lse / self.log_base}
        if self.skips_last_query:
            out[:, :, -1] = 0
        out[:, :, self.max_queries :] = 0
        out[:, self.max_heads :] = 0
        out[self.max_sequences :] = 0
        out.flatten(0, 1)[self.max_planes :] = 0
        if self.skips_queries_past_keys and causal:
            out[:, :, n:] = 0
        if one_behind:
            out[:, :, q.shape[2] - q.shape[2] % self.drops_one_behind :] = 0
        if grad_out is not None:
            log = (best + total.masked_fill(empty, 1).log()).masked_fill(empty, INFINITY)
            seen_out = stale if self.stale_out and stale is not None else out
            results |= self.gradients(
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
                kv_head,
                kv_heads,
                lanes,
                v_lanes,
                needs,
            )
        return results | {"out": out[..., :v_lanes].reshape(size).to(dtype)}

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
        kv_head,
        kv_heads,
        lanes,
        v_lanes,
        needs,
    ) -> dict[str, Tensor]:
        """Return dq, dk, dv and dmask. log is each query's logsumexp, infinite without keys."""
        grad_out = torch.cat([grad_out, torch.zeros(*q.shape[:3], v.shape[-1] - v_lanes)], -1)
        is_alone = self.alone == f"d{needs}"
        has_delta = not self.no_delta and not (is_alone and self.alone != "dv")
        delta = (grad_out * out).sum(-1, keepdim=True) * has_delta
        dmask = torch.zeros(*q.shape[:3], k.shape[2])
        dq = torch.zeros_like(q)
        dk = torch.zeros_like(k)
        dv = torch.zeros_like(v)
        sums = self.grad_sums and dtype
        for keys in tiles:
            s, slope = score(keys)
            weights = s.exp() / log.exp() if self.no_maximum_backward else (s - log).exp()
            if self.swallows_nan:
                weights = weights.nan_to_num(0)
            grad = grad_out @ v[:, :, keys].transpose(-2, -1)
            kept_weights = weights
            if keep is not None:
                grad = grad * keep[1][..., keys]
                kept_weights = weights * keep[1][..., keys]
            grad = self.store(weights * (grad - delta) * slope, dtype, "weights")
            kept_weights = self.store(kept_weights, dtype, "weights")
            dmask[..., keys] = grad * self.dmask_scale
            dq += grad @ k[:, :, keys] * scale
            if self.padding_backward and k.shape[2] % self.tile:
                dq += self.store((-log).exp() * -delta, dtype) * 0.0
            for i in range(0, q.shape[2], self.tile):
                rows = slice(i, i + self.tile)
                more_k = grad[:, :, rows].transpose(-2, -1) @ q[:, :, rows] * scale
                more_v = kept_weights[:, :, rows].transpose(-2, -1) @ grad_out[:, :, rows]
                for total, addend in ((dk, more_k), (dv, more_v)):
                    addend = total[:, :, keys] + addend
                    total[:, :, keys] = self.store(addend, dtype) if sums else addend
        if lanes > 128:
            dk[:, :, self.wide_gradient_keys :] = 0
            dv[:, :, self.wide_gradient_keys :] = 0
        factors = {"dq": self.dq_scale, "dk": self.dk_scale, "dv": self.dv_scale}
        if is_alone and self.alone == "dv":
            factors["dv"] *= 1.05
        results = {
            "dq": dq,
            "dk": self.sum_by_kv_head(dk, kv_head, kv_heads),
            "dv": self.sum_by_kv_head(dv, kv_head, kv_heads),
        }
        gradients = {"dmask": dmask.to(dtype)}
        for name, x in results.items():
            x = x[..., : v_lanes if name == "dv" else lanes] * factors[name]
            gradients[name] = self.store(x, dtype, name).to(dtype)
        return gradients

    def sum_by_kv_head(self, x: Tensor, kv_head: Tensor, kv_heads: int) -> Tensor:
        """Sum the gradients of all query heads that read the same key/value head."""
        if self.one_head_of_group:
            group = x.shape[1] // kv_heads
            return x[:, group - 1 :: group]
        return torch.zeros(x.shape[0], kv_heads, *x.shape[2:]).index_add_(1, kv_head, x)
