# SPDX-License-Identifier: BSD-3-Clause
"""Shapes of scaled_dot_product_attention that combine what sdpa_shapes.SHAPES varies one by one.

A kernel is chosen by several arguments at once: a mask's form and dtype, groups, dropout, strides.
"""

from functools import cache

import torch

from strix_validate.attention.sdpa_shapes import HALVES, SdpaShape
from strix_validate.layers.pairs import Combination, combine

_WHY = (
    "a kernel that is correct for each argument alone, and wrong for two of them together: masks "
    "and dropout, groups and strides (https://github.com/pytorch/pytorch/issues/116333)"
)
#: Masks that are added to the scores.
ADDITIVE = ("sequence", "heads", "tiles", "slice")
#: Queries and keys; a mask's gradient needs keys in multiples of 8.
_LENGTHS = {"equal": (72, 72), "fewer": (37, 104), "more": (100, 40), "one": (1, 136)}
#: Query heads and heads of keys.
_GROUPS = {1: (2, 2), 3: (6, 2), 4: (4, 1)}
COLUMNS: dict[str, tuple] = {
    "mask": ("", "causal", "bool", *ADDITIVE),
    "mask_dtype": ("", "float32"),
    "group": tuple(_GROUPS),
    "dropout": (False, True),
    "layout": ("", "strided", "packed", "expanded", "strided-values", "cache", "summed"),
    "lengths": tuple(_LENGTHS),
    "head_dim": (64, 128, 72, 32, 160, 256),
    "narrow": (False, True),
    "needs": ("qkv", "mask", "q", "k", "v", ""),
    "again": (False, True),
    "low": (0.0, -120.0),
}
#: Columns whose values fit together or not, and which do.
_RULES = (
    # numbers have another dtype than the tensors
    (("mask", "mask_dtype"), lambda mask, dtype: not dtype or mask in ADDITIVE),
    (("mask", "needs"), lambda mask, needs: needs != "mask" or mask in ADDITIVE),
    # q, k and v of one tensor are alike; one head of keys cannot be expanded to one
    (("layout", "lengths"), lambda layout, lengths: layout != "packed" or lengths == "equal"),
    (("layout", "group"), lambda layout, group: layout != "packed" or group == 1),
    (("layout", "narrow"), lambda layout, narrow: layout != "packed" or not narrow),
    (("layout", "group"), lambda layout, group: layout != "expanded" or group != 4),
    # a gradient that is asked for
    (("layout", "needs"), lambda layout, needs: layout != "summed" or needs),
    (("again", "needs"), lambda again, needs: not again or needs),
    # of few rows, the rounding of low scores is left to chance
    (("low", "lengths"), lambda low, lengths: not low or lengths != "one"),
)


def fits(values: Combination) -> bool:
    """Return whether values of some columns are those of a call."""
    return all(
        rule(*(values[name] for name in names))
        for names, rule in _RULES
        if all(name in values for name in names)
    )


def _shape(values: Combination) -> SdpaShape:
    heads, kv_heads = _GROUPS[values["group"]]
    head_dim = values["head_dim"]
    v_dim = head_dim * 3 // 4 // 8 * 8 if values["narrow"] else head_dim
    seqlen_q, seqlen_k = _LENGTHS[values["lengths"]]
    if values["dropout"]:
        # which weights are kept is read from that many lanes of the values
        seqlen_k = min(seqlen_k, v_dim - 8)
        if values["lengths"] == "equal":
            seqlen_q = seqlen_k
    is_causal = values["mask"] == "causal"
    return SdpaShape(
        _name(values),
        _WHY,
        # of few rows, whose largest weights decide, the rounding is left to chance
        batch=8 if values["lengths"] == "one" else 2,
        heads=heads,
        kv_heads=kv_heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        v_dim=v_dim if values["narrow"] else 0,
        causal=is_causal,
        attn_mask="" if is_causal else values["mask"],
        mask_dtype=values["mask_dtype"],
        # kept weights are multiplied by 1.25, which 16 bits hold exactly, as some kernels do there
        dropout=0.2 if values["dropout"] else 0.0,
        layout=values["layout"],
        needs="qkvm" if values["needs"] == "mask" else values["needs"],
        again=values["again"],
        low=values["low"],
        # in float32 an additive mask has that dtype, and the scores' own rounding shows where low
        dtypes=HALVES if values["mask_dtype"] or values["low"] else (torch.float32, *HALVES),
    )


def _name(values: Combination) -> str:
    """Name a combination by what is not plain in it."""
    mask = values["mask"]
    parts = {
        mask if mask == "causal" else f"{mask}-mask": mask,
        f"mask-{values['mask_dtype']}": values["mask_dtype"],
        f"gqa{values['group']}": values["group"] > 1,
        "dropout": values["dropout"],
        values["layout"]: values["layout"],
        values["lengths"]: values["lengths"] != "equal",
        f"d{values['head_dim']}": True,
        "narrow": values["narrow"],
        {"mask": "dmask", "": "inference"}.get(values["needs"], f"d{values['needs']}"): (
            values["needs"] != "qkv"
        ),
        "again": values["again"],
        "low": values["low"],
    }
    return "-".join(["pairs", *(name for name, is_told in parts.items() if is_told)])


@cache
def shapes() -> tuple[SdpaShape, ...]:
    """Return the shapes; together they hold each pair of values that fit together."""
    return tuple(_shape(values) for values in combine(COLUMNS, fits))
