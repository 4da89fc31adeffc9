# SPDX-License-Identifier: BSD-3-Clause
"""Run AOTriton's attention kernels (version 0.12) under emulation.

Triton removes arguments that are constant for a variant of a kernel, so a kernel has several
argument layouts. The arguments have the same order as in AOTriton's folder tritonsrc. The kinds and
sizes in a code object's metadata show which of the optional arguments the code object has.
"""

from collections.abc import Iterator
from itertools import combinations

import numpy as np
from strix_emulate import Buffer, EmulatorError, Kernel, Launch, launch

# flash.h: WindowValue::TopLeftAligned
TOP_LEFT = -2147483647
# Rows per workgroup with the smallest tuned block. The number of workgroups is computed from it, so
# with larger blocks, some workgroups do nothing.
SMALLEST_BLOCK = 16
_SHAPE = "Num_head_q:i Num_head_k:i {seqlens}cu_q:p cu_k:p {between}Max_q:i Max_k:i ss_q:p ss_k:p"
_FORWARD_SHAPE = _SHAPE.format(seqlens="Num_seqlens:i ", between="")
_BACKWARD_SHAPE = _SHAPE.format(seqlens="", between="Num_seqlens:i ")
_RANDOM = "[dropout_p:f seed:p offset1:p offset2:l"
_WINDOW = "[Window_left:i Window_right:i]"
# The arguments of each kernel. Groups in brackets are optional; p, f, i, l stand for pointer,
# float32, int32, int64.
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
# The letter of an argument by its kind and its size in a code object. The letter 4 stands for i or
# f, because the metadata do not distinguish these types.
_KINDS = {
    ("global_buffer", 8): "p",
    ("by_value", 4): "4",
    ("by_value", 8): "l",
}
# Number of pointers that Triton appends to the arguments.
_SCRATCH_POINTERS = 2
# For each tensor, the last letter in the name of its row stride: m in qm, for example.
_ROW_LETTERS = {
    "q": "m",
    "o": "m",
    "do": "m",
    "dq": "m",
    "k": "n",
    "dk": "n",
    "v": "k",
    "dv": "k",
}


def arguments(kernel: Kernel, values: dict, causal: bool) -> list:
    """Return the arguments in the order that a code object expects.

    Args:
        kernel: The code object.
        values: The values of the arguments by name. A missing pointer becomes null.
        causal: Whether the kernel has the arguments for a window.

    Raises:
        EmulatorError: The kernel has another name than those in LAYOUTS, or no known layout fits,
            for example because the kernel has a bias.
    """
    if kernel.name not in LAYOUTS:
        raise EmulatorError(f"{kernel.name}: not one of {', '.join(LAYOUTS)}")
    has_window = causal and _WINDOW in LAYOUTS[kernel.name]
    # Leave out the hidden arguments that LLVM appends.
    visible = [a for a in kernel.arguments if not a.kind.startswith("hidden")]
    declared = [_KINDS.get((a.kind, a.size), "?") for a in visible[:-_SCRATCH_POINTERS]]
    for names in _list_layouts(kernel.name):
        if ("Window_left:i" in names) != has_window:
            continue
        if [_letter_of(name) for name in names] != declared:
            continue
        ordered = []
        for name in names:
            key, kind = name.split(":")
            ordered.append(values.get(key) if kind == "p" else values[key])
        return ordered
    raise EmulatorError(f"{kernel.name}: its {len(declared)} arguments fit no known layout")


def _list_layouts(name: str) -> Iterator[list[str]]:
    """Yield each possible argument list of a kernel, beginning with the longest ones."""
    groups = []
    optional = []
    for part in LAYOUTS[name].replace("[", "|[").replace("]", "|").split("|"):
        if not part.strip():
            continue
        if part.startswith("["):
            optional.append(len(groups))
        groups.append(part.strip("[ ").split())
    for count in range(len(optional), -1, -1):
        for present in combinations(optional, count):
            names = []
            for index, group in enumerate(groups):
                if index not in optional or index in present:
                    names += group
            yield names


def _letter_of(name: str) -> str:
    """Return the letter that _KINDS uses for the kind of an argument."""
    kind = name[-1]
    return kind if kind in "pl" else "4"


def _make_values(q, k, v, causal: bool, scale: float) -> dict:
    """Return the values of the arguments that do not depend on the kernel."""
    batch, num_heads, max_seqlen_q, head_dim = q.shape
    _, num_kv_heads, max_seqlen_k, _ = k.shape
    values = {
        "Q": Buffer(q, "in"),
        "K": Buffer(k, "in"),
        "V": Buffer(v, "in"),
        "Sm_scale": float(scale),
        "Num_head_q": num_heads,
        "Num_head_k": num_kv_heads,
        "Num_seqlens": 0,
        "Max_q": max_seqlen_q,
        "Max_k": max_seqlen_k,
        "Hdim_qk": head_dim,
        "Hdim_vo": head_dim,
        "dropout_p": 0.0,
        "offset2": 0,
        "Num_CU": 2,
        "Batch": batch,
        "counter": Buffer(np.zeros(1, np.int32)),
        "seed_out": None,
        "offset_out": None,
    }
    if causal:
        values |= {"Window_left": TOP_LEFT, "Window_right": TOP_LEFT}
    # A kernel with dropout reads these 64-bit words, even though the dropout probability is zero.
    for name in ("seed", "offset1"):
        values[name] = Buffer(np.zeros(1, np.int64), "in")
    return values | _strides("q", q) | _strides("k", k) | _strides("v", v)


def _strides(name: str, array) -> dict:
    """Return the strides of a tensor in elements, by the names of the arguments."""
    z, h, m = (stride // array.itemsize for stride in array.strides[:3])
    row = _ROW_LETTERS[name]
    return {f"{name}z": z, f"{name}h": h, f"{name}{row}": m}


def forward(kernel: Kernel, q, k, v, causal: bool, scale: float):
    """Run the forward kernel, attn_fwd.

    Args:
        kernel: The code object.
        q, k, v: (batch, heads, rows, head_dim); float16, or bfloat16 as uint16.
        causal: Use a causal mask that is aligned at the top left.
        scale: The softmax scale.

    Returns:
        The output, with the shape of q; the logsumexp, float32 (batch, heads, rows); and the
        launch.
    """
    out = np.zeros_like(q)
    lse = np.zeros(q.shape[:3], np.float32)
    values = _make_values(q, k, v, causal, scale) | _strides("o", out)
    values |= {"Out": Buffer(out, "out"), "L": Buffer(lse, "out")}
    ordered = arguments(kernel, values, causal)
    # Persistent kernels have a counter, from which workgroups get their tiles.
    is_persistent = any(value is values["counter"] for value in ordered)
    grid = (4,) if is_persistent else _grid(q.shape)
    return out, lse, launch(kernel, grid, ordered)


def preprocess(kernel: Kernel, out, grad) -> tuple[np.ndarray, Launch]:
    """Run the kernel bwd_preprocess, which prepares the backward pass.

    Returns:
        The sum of out * grad over head_dim, float32 (batch, heads, rows); and the launch.
    """
    delta = np.zeros(out.shape[:3], np.float32)
    values = {
        "Out": Buffer(out, "in"),
        "DO": Buffer(grad, "in"),
        "D": Buffer(delta, "out"),
        "Num_seqlens": 0,
        "Max_q": out.shape[2],
        "Hdim_vo": out.shape[3],
    }
    values |= _strides("o", out) | _strides("do", grad)
    ordered = arguments(kernel, values, causal=False)
    return delta, launch(kernel, _grid(out.shape), ordered)


def backward(  # noqa: PLR0913 (the kernel has these arguments)
    kernel: Kernel,
    q,
    k,
    v,
    grad,
    lse,
    delta,
    causal: bool,
    scale: float,
):
    """Run bwd_kernel_dk_dv or bwd_kernel_dq.

    Returns:
        The gradients, (dk, dv) or (dq,); and the launch.
    """
    values = _make_values(q, k, v, causal, scale) | _strides("do", grad)
    values |= {
        "DO": Buffer(grad, "in"),
        "L": Buffer(lse, "in"),
        "D": Buffer(delta, "in"),
    }
    if kernel.name == "bwd_kernel_dk_dv":
        gradients = {"dk": np.zeros_like(k), "dv": np.zeros_like(v)}
        num_heads, rows = k.shape[1:3]
    else:
        gradients = {"dq": np.zeros_like(q)}
        num_heads, rows = q.shape[1:3]
    for name, array in gradients.items():
        values |= {name.upper(): Buffer(array, "out")} | _strides(name, array)
    grid = _grid((q.shape[0], num_heads, rows))
    ordered = arguments(kernel, values, causal)
    return tuple(gradients.values()), launch(kernel, grid, ordered)


def _grid(shape) -> tuple[int, int, int]:
    """Return the number of workgroups for tensors of (batch, heads, rows, ...)."""
    batch, num_heads, rows = shape[:3]
    return (-(-rows // SMALLEST_BLOCK), num_heads, batch)
