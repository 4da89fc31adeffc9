# SPDX-License-Identifier: BSD-3-Clause
"""Package test: execute some of the packaged attention kernels under emulation.

    emulate_images.py FOLDER

FOLDER is aotriton.images. The test executes the forward and the backward kernels for fp16 and head
dimension 64, with and without a causal mask, but without padding, dropout and bias. It executes
the first kernel of each image for these options, and compares the results with float64. Without a
disassembler, it executes nothing, and prints the reason.
"""

import sys
from pathlib import Path

import emulated_kernels
import numpy as np
from strix_emulate import DisassemblerError, Kernel, find_disassembler, load

SHAPE = (1, 2, 70, 64)  # batch, heads, sequence length, head dim
SCALE = 0.125
# A correct result in fp16 has errors of about 1e-3. A wrong row, scale or mask gives 0.1 or more.
BOUND = 5e-3
CAUSAL_TYPES = {False: "0", True: "3"}


def load_kernel(folder: Path, name: str, fields: str) -> Kernel:
    """Return the first code object of an image. Raise SystemExit if there is no such image.

    Args:
        folder: The folder aotriton.images.
        name: The name of the kernel.
        fields: The middle part of the image's name, which has the values of kernel options.
    """
    head_dim = SHAPE[-1]
    images = sorted(folder.rglob(f"{name}/FONLY__\uff0afp16@16_{head_dim}_{fields}__*.aks2"))
    if not images:
        raise SystemExit(f"no image of {name} for fp16, head dimension {head_dim}, {fields}")
    return load(images[0])[0]


def compute_reference(q, k, v, grad, causal: bool) -> dict[str, np.ndarray]:
    """Return the output, the logsumexp and the gradients in float64.

    If causal, the mask is aligned at the top left: the first query attends only to the first key.
    """
    q, k, v, grad = (x.astype(np.float64) for x in (q, k, v, grad))
    scores = SCALE * q @ k.swapaxes(-1, -2)
    if causal:
        rows = q.shape[-2]
        scores[..., ~np.tri(rows, dtype=bool)] = -np.inf
    lse = np.log(np.exp(scores).sum(-1))
    p = np.exp(scores - lse[..., None])
    out = p @ v
    delta = (grad * out).sum(-1, keepdims=True)
    ds = SCALE * p * (grad @ v.swapaxes(-1, -2) - delta)
    return {
        "out": out,
        "lse": lse,
        "dq": ds @ k,
        "dk": ds.swapaxes(-1, -2) @ q,
        "dv": p.swapaxes(-1, -2) @ grad,
    }


def execute(folder: Path, q, k, v, grad, causal: bool) -> dict[str, np.ndarray]:
    """Return the output, the logsumexp and the gradients of the packaged kernels."""
    kind = CAUSAL_TYPES[causal]
    # The names of forward and of backward images have the same fields in different orders.
    forward = load_kernel(folder, "attn_fwd", f"F_F_{kind}_0")
    preprocess = load_kernel(folder, "bwd_preprocess", "F")
    backward_dk_dv = load_kernel(folder, "bwd_kernel_dk_dv", f"{kind}_F_F_0")
    backward_dq = load_kernel(folder, "bwd_kernel_dq", f"{kind}_F_F_0")
    out, lse, _ = emulated_kernels.forward(forward, q, k, v, causal, SCALE)
    delta, _ = emulated_kernels.preprocess(preprocess, out, grad)
    inputs = (q, k, v, grad, lse, delta, causal, SCALE)
    (dk, dv), _ = emulated_kernels.backward(backward_dk_dv, *inputs)
    (dq,), _ = emulated_kernels.backward(backward_dq, *inputs)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def main() -> None:
    folder = Path(sys.argv[1])
    try:
        find_disassembler()
    except DisassemblerError as error:
        print(f"SKIPPED, nothing was executed: {error}")
        return
    random = np.random.default_rng(1)
    inputs = [random.standard_normal(SHAPE).astype("f2") for _ in range(4)]
    worst = 0.0
    for causal in CAUSAL_TYPES:
        results = execute(folder, *inputs, causal)
        for name, expected in compute_reference(*inputs, causal).items():
            error = float(np.abs(results[name] - expected).max())
            if not error <= BOUND:
                raise SystemExit(f"{name}, causal {causal}: off by {error:.1e}, bound {BOUND}")
            worst = max(worst, error)
    print(f"8 launches under emulation, largest error {worst:.1e} (bound {BOUND})")


if __name__ == "__main__":
    main()
