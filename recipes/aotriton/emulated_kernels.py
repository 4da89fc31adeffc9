# SPDX-License-Identifier: BSD-3-Clause
"""Runs AOTriton's attention kernels (0.12) under emulation: argument layouts and launches.

Triton folds arguments that are constant for a functional, so the same kernel has several layouts.
The order is that of AOTriton's tritonsrc; the sizes and kinds in a code object's own metadata show
which optional groups it has.
"""

from itertools import combinations

import numpy as np
from strix_emulate import Buffer, EmulatorError, Kernel, Launch, launch

#: flash.h: WindowValue::TopLeftAligned
TOP_LEFT = -2147483647
#: Rows per workgroup: the smallest tuned block; surplus workgroups of other kernels do nothing.
SMALLEST_BLOCK = 16
_SHAPE = "Num_head_q:i Num_head_k:i {seqlens}cu_q:p cu_k:p {between}Max_q:i Max_k:i ss_q:p ss_k:p"
_FORWARD_SHAPE = _SHAPE.format(seqlens="Num_seqlens:i ", between="")
_BACKWARD_SHAPE = _SHAPE.format(seqlens="", between="Num_seqlens:i ")
_RANDOM = "[dropout_p:f seed:p offset1:p offset2:l"
_WINDOW = "[Window_left:i Window_right:i]"
#: Groups in brackets are optional; p, f, i, l: pointer, float32, int32, int64.
LAYOUTS = {
    "attn_fwd": "Q:p K:p V:p Sm_scale:f L:p Out:p qz:l qh:l qm:l kz:l kh:l kn:l vz:l vh:l vk:l "
    f"oz:l oh:l om:l {_FORWARD_SHAPE} [Hdim_qk:i Hdim_vo:i] {_RANDOM} seed_out:p offset_out:p] "
    f"{_WINDOW} [counter:p] [Num_CU:i Batch:i]",
    "bwd_preprocess": "Out:p DO:p D:p oz:l oh:l om:l doz:l doh:l dom:l cu_q:p Num_seqlens:i "
    "Max_q:i Hdim_vo:i",
    "bwd_kernel_dk_dv": "Q:p K:p V:p B:p Sm_scale:f DO:p DK:p DV:p L:p D:p qz:l qh:l qm:l kz:l "
    "kh:l kn:l vz:l vh:l vk:l doz:l doh:l dom:l dkz:l dkh:l dkn:l dvz:l dvh:l dvk:l "
    f"{_BACKWARD_SHAPE} Hdim_qk:i Hdim_vo:i {_RANDOM}] {_WINDOW}",
    "bwd_kernel_dq": "Q:p K:p V:p B:p Sm_scale:f DO:p DQ:p DB:p L:p D:p qz:l qh:l qm:l kz:l "
    "kh:l kn:l vz:l vh:l vk:l doz:l doh:l dom:l dqz:l dqh:l dqm:l "
    f"{_BACKWARD_SHAPE} Hdim_qk:i Hdim_vo:i {_RANDOM}] {_WINDOW}",
}
_KINDS = {("global_buffer", 8): "p", ("by_value", 4): "4", ("by_value", 8): "l"}


def arguments(kernel: Kernel, values: dict, causal: bool) -> list:
    """The values, by name, in the order that this code object expects.

    Raises:
        EmulatorError: no known layout fits, as with a bias.
    """
    if kernel.name not in LAYOUTS:
        raise EmulatorError(f"{kernel.name}: not one of {', '.join(LAYOUTS)}")
    parts = LAYOUTS[kernel.name].replace("[", "|[").replace("]", "|").split("|")
    groups = [(part.startswith("["), part.strip("[ ").split()) for part in parts if part.strip()]
    optional = [i for i, (may_lack, _) in enumerate(groups) if may_lack]
    # Triton appends two scratch pointers, LLVM the hidden arguments
    visible = [a for a in kernel.arguments if not a.kind.startswith("hidden")][:-2]
    declared = [_KINDS.get((a.kind, a.size), "?") for a in visible]
    for count in range(len(optional), -1, -1):
        for present in combinations(optional, count):
            names = [
                x for i, (o, group) in enumerate(groups) if not o or i in present for x in group
            ]
            if ("Window_left:i" in names) != (causal and _WINDOW in LAYOUTS[kernel.name]):
                continue
            if [n[-1] if n[-1] in "pl" else "4" for n in names] == declared:
                return [
                    values.get(name[:-2]) if name[-1] == "p" else values[name[:-2]]
                    for name in names
                ]
    raise EmulatorError(f"{kernel.name}: its {len(declared)} arguments fit no known layout")


def _values(q, k, v, causal: bool, scale: float) -> dict:
    batch, heads, queries, width = q.shape
    values = {
        "Q": Buffer(q, "in"), "K": Buffer(k, "in"), "V": Buffer(v, "in"), "Sm_scale": float(scale),
        "Num_head_q": heads, "Num_head_k": k.shape[1], "Num_seqlens": 0, "Max_q": queries,
        "Max_k": k.shape[2], "Hdim_qk": width, "Hdim_vo": width, "dropout_p": 0.0, "offset2": 0,
        "Num_CU": 2, "Batch": batch, "counter": Buffer(np.zeros(1, np.int32)),
        **dict.fromkeys(("seed", "offset1", "seed_out", "offset_out")),
    }  # fmt: skip
    if causal:
        values |= {"Window_left": TOP_LEFT, "Window_right": TOP_LEFT}
    # 64-bit words that a kernel with dropout reads; its probability is zero
    for name in ("seed", "offset1"):
        values[name] = Buffer(np.zeros(1, np.int64), "in")
    return values | _strides("q", q) | _strides("k", k) | _strides("v", v)


def _strides(name: str, array) -> dict:
    """Strides in elements; the names of rows differ from kernel to kernel."""
    z, h, m = (x // array.itemsize for x in array.strides[:3])
    row = {"q": "m", "o": "m", "do": "m", "dq": "m", "k": "n", "dk": "n", "v": "k", "dv": "k"}[name]
    return {f"{name}z": z, f"{name}h": h, f"{name}{row}": m}


def forward(kernel: Kernel, q, k, v, causal: bool, scale: float):
    """attn_fwd: q, k, v as (batch, heads, rows, width); float16, or bfloat16 as uint16.

    Returns:
        out like q, logsumexp float32 (batch, heads, rows), the launch.
    """
    out, lse = np.zeros_like(q), np.zeros(q.shape[:3], np.float32)
    values = _values(q, k, v, causal, scale) | _strides("o", out)
    values |= {"Out": Buffer(out, "out"), "L": Buffer(lse, "out")}
    given = arguments(kernel, values, causal)
    # persistent kernels take their tiles from a counter
    takes_tiles = any(x is values["counter"] for x in given)
    grid = (4,) if takes_tiles else _grid(q.shape)
    return out, lse, launch(kernel, grid, given)


def preprocess(kernel: Kernel, out, grad) -> tuple[np.ndarray, Launch]:
    """bwd_preprocess: the sum over the width of out * grad, float32 (batch, heads, rows)."""
    delta = np.zeros(out.shape[:3], np.float32)
    values = {"Out": Buffer(out, "in"), "DO": Buffer(grad, "in"), "D": Buffer(delta, "out")}
    values |= {"Num_seqlens": 0, "Max_q": out.shape[2], "Hdim_vo": out.shape[3]}
    given = arguments(kernel, values | _strides("o", out) | _strides("do", grad), False)
    return delta, launch(kernel, _grid(out.shape), given)


def backward(  # noqa: PLR0913 (what the kernel takes)
    kernel: Kernel, q, k, v, grad, lse, delta, causal: bool, scale: float
):
    """bwd_kernel_dk_dv or bwd_kernel_dq: ((dk, dv) or (dq,), the launch)."""
    values = _values(q, k, v, causal, scale) | _strides("do", grad)
    values |= {"DO": Buffer(grad, "in"), "L": Buffer(lse, "in"), "D": Buffer(delta, "in")}
    of_keys = kernel.name == "bwd_kernel_dk_dv"
    made = {"dk": np.zeros_like(k), "dv": np.zeros_like(v)} if of_keys else {"dq": np.zeros_like(q)}
    for name, array in made.items():
        values |= {name.upper(): Buffer(array, "out")} | _strides(name, array)
    shape = (*q.shape[:1], (k if of_keys else q).shape[1], (k if of_keys else q).shape[2])
    return tuple(made.values()), launch(kernel, _grid(shape), arguments(kernel, values, causal))


def _grid(shape) -> tuple[int, int, int]:
    return (-(-shape[2] // SMALLEST_BLOCK), shape[1], shape[0])
