# SPDX-License-Identifier: BSD-3-Clause
"""Cases of scaled_dot_product_attention that vary several arguments at once.

sdpa_cases.CASES varies most arguments one by one, but torch chooses a kernel by several arguments
together: the mask's form and dtype, the group of heads, dropout and strides.
"""

from collections.abc import Callable
from functools import cache

import torch

from strix_validate.attention.sdpa_cases import HALVES, SdpaCase
from strix_validate.layers.pairs import Combination, combine

_CATCHES = (
    "a kernel that is correct for each argument alone but wrong for two together, such as a mask "
    "and dropout (https://github.com/pytorch/pytorch/issues/116333)"
)
#: The kinds of additive masks in these cases. Their numbers are added to the scores.
ADDITIVE = ("sequence", "heads", "tiles", "slice")
#: Numbers of queries and of keys. A mask's gradient needs a number of keys that is a multiple of 8.
_LENGTHS = {
    "equal": (72, 72),
    "fewer": (37, 104),
    "more": (100, 40),
    "one": (1, 136),
}
#: Numbers of query heads and of key heads, by their ratio.
_GROUPS = {
    1: (2, 2),
    3: (6, 2),
    4: (4, 1),
}
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
#: Pairs of columns, each with a function that returns whether two of their values fit together. All
#: values of columns without a rule fit together.
_RULES: tuple[tuple[tuple[str, str], Callable], ...] = (
    # only an additive mask can have a gradient, or another dtype than the tensors
    (("mask", "mask_dtype"), lambda mask, dtype: not dtype or mask in ADDITIVE),
    (("mask", "needs"), lambda mask, needs: needs != "mask" or mask in ADDITIVE),
    # q, k and v that are packed in one tensor have the same size
    (("layout", "lengths"), lambda layout, lengths: layout != "packed" or lengths == "equal"),
    (("layout", "group"), lambda layout, group: layout != "packed" or group == 1),
    (("layout", "narrow"), lambda layout, narrow: layout != "packed" or not narrow),
    # with a group of 4, there is only one head of keys, so that "expanded" would change nothing
    (("layout", "group"), lambda layout, group: layout != "expanded" or group != 4),
    # a summed output and a second backward pass need a gradient
    (("layout", "needs"), lambda layout, needs: layout != "summed" or needs),
    (("again", "needs"), lambda again, needs: not again or needs),
    # with one query, the rounding error of low scores is a matter of chance
    (("low", "lengths"), lambda low, lengths: not low or lengths != "one"),
)


def fits(values: Combination) -> bool:
    """Return whether these values, of all columns or only some, can be combined in one call."""
    for (first, second), rule in _RULES:
        if first in values and second in values and not rule(values[first], values[second]):
            return False
    return True


def _make_case(values: Combination) -> SdpaCase:
    heads, kv_heads = _GROUPS[values["group"]]
    head_dim = values["head_dim"]
    v_dim = head_dim
    if values["narrow"]:
        v_dim = head_dim * 3 // 4 // 8 * 8
    seqlen_q, seqlen_k = _LENGTHS[values["lengths"]]
    if values["dropout"]:
        # The kept weights are read from the output, so the output needs an element for each key.
        seqlen_k = min(seqlen_k, v_dim - 8)
        if values["lengths"] == "equal":
            seqlen_q = seqlen_k
    is_causal = values["mask"] == "causal"
    dtypes: tuple[torch.dtype, ...] = (torch.float32, *HALVES)
    if values["mask_dtype"] or values["low"]:
        # float32 is left out. There, mask_dtype changes nothing, and low scores would show the
        # rounding of the scores themselves.
        dtypes = HALVES
    return SdpaCase(
        _name(values),
        _CATCHES,
        # with few queries, the error depends on a few large weights, whose rounding is a matter of
        # chance, so a case with one query per sequence gets more sequences
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
        # with 0.2, the factor 1 / (1 - 0.2) = 1.25 is exact in kernels that multiply in 16 bits
        dropout=0.2 if values["dropout"] else 0.0,
        layout=values["layout"],
        needs="qkvm" if values["needs"] == "mask" else values["needs"],
        again=values["again"],
        low=values["low"],
        dtypes=dtypes,
    )


def _name(values: Combination) -> str:
    """Return a name that lists the head dim, and all values other than the defaults."""
    mask = values["mask"]
    gradients = {"mask": "dmask", "": "inference"}
    needs = gradients.get(values["needs"], f"d{values['needs']}")
    parts = (
        ("causal", mask == "causal"),
        (f"{mask}-mask", mask not in ("", "causal")),
        (f"mask-{values['mask_dtype']}", values["mask_dtype"]),
        (f"gqa{values['group']}", values["group"] > 1),
        ("dropout", values["dropout"]),
        (values["layout"], values["layout"]),
        (values["lengths"], values["lengths"] != "equal"),
        (f"d{values['head_dim']}", True),
        ("narrow", values["narrow"]),
        (needs, values["needs"] != "qkv"),
        ("again", values["again"]),
        ("low", values["low"]),
    )
    return "-".join(["pairs", *(name for name, is_named in parts if is_named)])


@cache
def cases() -> tuple[SdpaCase, ...]:
    """Return cases that together contain, for any two columns, every allowed pair of values."""
    return tuple(_make_case(values) for values in combine(COLUMNS, fits))
