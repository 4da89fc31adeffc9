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
    """A kernel whose fields plant faults. The default of each field is correct.

    Attributes:
        tile: Keys per tile, and queries per tile of dk and dv.
        scale: Factor of the softmax scale.
        dq_scale: Factor of dq.
        dk_scale: Factor of dk.
        dv_scale: Factor of dv.
        diagonal: Additional keys that a causal query sees.
        other_corner: Causal masks are aligned at the other corner.
        window: Additional keys on each side of a window.
        softcap: Whether the softcap is applied.
        log_base: The logsumexp is divided by this number.
        lse_of_last_tile: The logsumexp is that of the last tile alone.
        sums: If set, out is rounded to the inputs' dtype after each tile.
        grad_sums: If set, dk and dv are rounded to the inputs' dtype after each tile.
        truncates: The numbers that are truncated instead of rounded: "all", "weights", "out", "dq",
            "dk" or "dv".
        swallows_nan: A score that is NaN counts as minus infinity.
        skips_partial_tile: A last tile that is not full is left out.
        skips_last_query: The output of the last query is 0.
        counts_padding: Keys of zeros after the last key count in the sum of weights.
        max_keys: Keys after this number are left out.
        max_queries: The output of queries after this number is 0.
        neighbour_head: Query head h reads key/value head h % kv_heads.
        one_head_of_group: dk and dv come only from the last query head of each group.
        first_sequence: Each sequence reads the tensors of the first one.
        padded_lanes: If the head dim is not a power of two, it has one more lane, which comes from
            the next row.
        contiguous: Strides are ignored.
        no_delta: The gradient of the softmax lacks its correction, the sum of grad_out * out.
        stale_out: Backward reads the output of the previous call.
        keep_scale: Whether kept weights are multiplied by 1 / (1 - p).
        keep_again: Backward drops other weights than forward.
        mask_of_first_tile: Masks apply only to the first tile.
        inverts_mask: Boolean masks are inverted.
        queries_for_keys: Packed keys are read at the offsets of the queries.
        empty_shifts: A sequence without keys is left out, and the rows of later sequences move up.
        ignores_scale: The argument `scale` is ignored.
        scale_twice: The argument `scale` is multiplied by the default scale.
        first_mask: Each sequence has the first one's mask.
        one_mask_for_heads: Each head has the first one's mask.
        mask_in_base_2: Additive masks are rounded in base 2, and a tile of infinities has no guard.
        dmask_scale: Factor of the mask's gradient.
        v_lanes_of_keys: Values are read with the head dim of keys. Further lanes are 0.
        v_lanes_shared: Values are shifted by one element if keys have another head dim.
        alone: "dq", "dk" or "dv": this gradient is wrong if it is the only one.
        stride_of_size: A stride of 0 between heads is replaced by the size of a head.
        group_rounded: The number of query heads in a group is rounded up to a power of two.
        group_rounded_packed: group_rounded, for packed sequences only.
        max_heads: The output of heads after this number is 0.
        max_planes: The output of heads after this number, counted over the batch, is 0.
        max_sequences: The output of sequences after this number is 0.
        swallows_nan_causal: swallows_nan, for causal calls only.
        no_maximum_backward: Backward computes weights as exp(score) / exp(logsumexp).
        dropout_tile: Numbers of queries and keys after which the dropout pattern repeats, or 0.
        skips_queries_past_keys: In causal calls, the output of queries after the last key is 0.
        inference: Pairs of fields and values that apply only in calls without gradients.
        ignores_alibi: ALiBi is not applied.
        alibi_of_first: Each sequence has the first one's ALiBi slopes.
        alibi_sign: Factor of the ALiBi slopes.
        rotary_offset: Whether rotary angles begin at the cache's length.
        rotary_pairs: Whether rotary_interleaved chooses the pairs as documented, and not the
            opposite.
        rotary_keys: Whether new keys are rotated.
        keeps_unrotated_lanes: Whether lanes after the rotated ones are kept.
        rotary_one_by_one: Queries of a call that is not causal have different positions.
        max_window: Wider windows are narrowed to this number of keys on each side.
        drops_one_behind: Tile size. A single key after the last whole tile is left out, and the
            output of the queries after the last whole tile is 0.
        swapped_pack: The two tensors of "qkv" that a packed function swaps.
        max_tokens: The output of packed tokens after this number is 0.
        wide_diagonal: diagonal, for head dims above 128.
        values_as_keys: Values are read with the strides of keys.
        slice_as_whole: A slice is read as a contiguous tensor.
        first_of_sum: A gradient with strides of 0 counts only for the first query.
        masks_below: From this head dim on, masks are ignored.
        neighbour_of_one: neighbour_head, for calls with a single query.
        causal_keep: keep_scale, for causal calls.
        max_keys_of_one: max_keys, for calls with a single query.
        max_lanes_of_one: max_lanes, for calls with a single query.
        max_lanes: Lanes of queries after this number are left out.
        first_maximum: The initial value of the running maximum.
        shut_out: The score of a masked key.
        padding_backward: Keys of zeros after the last key count in dq.
        mask_without_dropout: Masks are ignored in calls with dropout.
        mask_by_key_head: Masks are indexed by the key/value head.
        mask_contiguous: The strides of masks are ignored.
        mask_of_first_query: An additive mask that all queries share applies only to the first one.
        mask_of_own_dtype: An additive mask of another dtype than q is ignored.
        first_maximum_added: first_maximum, in calls with an additive mask.
        narrow_in_groups: Values are shifted by one element if query heads share them and keys have
            a larger head dim.
        accumulates: A second backward pass adds its dq to the first one's.
        dmask_of_first: The gradient of a mask that sequences share comes from the first one only.
        full_128: Factor of the scale for head dim 128 without any mask.
        wide_gradient_keys: Above head dim 128, keys after this number have no gradient.
        alibi_signed: ALiBi uses signed distances, so it favours later keys.
        open_window: Whether a window without a left bound is applied.
        window_from_first: In a window, queries before all keys see the first key.
        first_length: A cache length for all sequences applies only to the first one.
    """

    tile: int = 64
    scale: float = 1.0
    dq_scale: float = 1.0
    dk_scale: float = 1.0
    dv_scale: float = 1.0
    diagonal: int = 0
    other_corner: bool = False
    window: int = 0
    softcap: bool = True
    log_base: float = 1.0
    lse_of_last_tile: bool = False
    sums: torch.dtype | None = None
    grad_sums: torch.dtype | None = None
    truncates: str = ""
    swallows_nan: bool = False
    skips_partial_tile: bool = False
    skips_last_query: bool = False
    counts_padding: bool = False
    max_keys: int = 1 << 30
    max_queries: int = 1 << 30
    neighbour_head: bool = False
    one_head_of_group: bool = False
    first_sequence: bool = False
    padded_lanes: bool = False
    contiguous: bool = False
    no_delta: bool = False
    stale_out: bool = False
    keep_scale: bool = True
    keep_again: bool = False
    mask_of_first_tile: bool = False
    inverts_mask: bool = False
    queries_for_keys: bool = False
    empty_shifts: bool = False
    ignores_scale: bool = False
    scale_twice: bool = False
    first_mask: bool = False
    one_mask_for_heads: bool = False
    mask_in_base_2: bool = False
    dmask_scale: float = 1.0
    v_lanes_of_keys: bool = False
    v_lanes_shared: bool = False
    alone: str = ""
    stride_of_size: bool = False
    group_rounded: bool = False
    group_rounded_packed: bool = False
    max_heads: int = 1 << 30
    max_planes: int = 1 << 30
    max_sequences: int = 1 << 30
    swallows_nan_causal: bool = False
    no_maximum_backward: bool = False
    dropout_tile: tuple[int, int] = (0, 0)
    skips_queries_past_keys: bool = False
    inference: tuple = ()
    ignores_alibi: bool = False
    alibi_of_first: bool = False
    alibi_sign: float = 1.0
    rotary_offset: bool = True
    rotary_pairs: bool = True
    rotary_keys: bool = True
    keeps_unrotated_lanes: bool = True
    rotary_one_by_one: bool = False
    max_window: int = 1 << 30
    drops_one_behind: int = 0
    swapped_pack: str = ""
    max_tokens: int = 1 << 30
    wide_diagonal: int = 0
    values_as_keys: bool = False
    slice_as_whole: bool = False
    first_of_sum: bool = False
    masks_below: int = 1 << 30
    neighbour_of_one: bool = False
    causal_keep: bool = True
    max_keys_of_one: int = 1 << 30
    max_lanes_of_one: int = 1 << 30
    max_lanes: int = 1 << 30
    first_maximum: float = -INFINITY
    shut_out: float = -INFINITY
    padding_backward: bool = False
    mask_without_dropout: bool = False
    mask_by_key_head: bool = False
    mask_contiguous: bool = False
    mask_of_first_query: bool = False
    mask_of_own_dtype: bool = False
    first_maximum_added: float = -INFINITY
    narrow_in_groups: bool = False
    accumulates: bool = False
    dmask_of_first: bool = False
    full_128: float = 1.0
    wide_gradient_keys: int = 1 << 30
    alibi_signed: bool = False
    open_window: bool = True
    window_from_first: bool = False
    first_length: bool = False

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
            keep: The weights' dropout factors (0 if dropped), for the forward and the backward
                pass.
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
