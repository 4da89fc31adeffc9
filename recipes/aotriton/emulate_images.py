# SPDX-License-Identifier: BSD-3-Clause
"""Package test: executes some of the shipped attention kernels under emulation, against float64.

    emulate_images.py FOLDER

FOLDER is aotriton.images. Runs one kernel of each image of head dim 64, fp16, causal or not,
without padding, dropout and bias: forward, then the backward kernels. Without a disassembler it
executes nothing and says so.
"""

import sys
from pathlib import Path

import emulated_kernels
import numpy as np
from strix_emulate import DisassemblerError, Kernel, find_disassembler, load

ROWS, WIDTH, SCALE = 70, 64, 0.125
# fp16 attention is off by about 1e-3; a wrong row, scale or mask by 0.1 or more
BOUND = 5e-3
CAUSAL_TYPES = {False: "0", True: "3"}


def kernel(folder: Path, name: str, fields: str) -> Kernel:
    """The first code object of one image. Raises SystemExit if there is no such image."""
    found = sorted(folder.rglob(f"{name}/FONLY__\uff0afp16@16_{WIDTH}_{fields}__*.aks2"))
    if not found:
        raise SystemExit(f"no image of {name} for fp16, head dimension {WIDTH}, {fields}")
    return load(found[0])[0]


def reference(q, k, v, grad, causal: bool) -> dict[str, np.ndarray]:
    """Output, logsumexp and gradients in float64; the first query sees the first key."""
    q, k, v, grad = (x.astype(np.float64) for x in (q, k, v, grad))
    scores = SCALE * q @ k.swapaxes(-1, -2)
    if causal:
        scores[..., ~np.tri(ROWS, dtype=bool)] = -np.inf
    lse = np.log(np.exp(scores).sum(-1))
    p = np.exp(scores - lse[..., None])
    out = p @ v
    ds = SCALE * p * (grad @ v.swapaxes(-1, -2) - (grad * out).sum(-1, keepdims=True))
    return {
        "out": out, "lse": lse, "dq": ds @ k, "dk": ds.swapaxes(-1, -2) @ q,
        "dv": p.swapaxes(-1, -2) @ grad,
    }  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    try:
        find_disassembler()
    except DisassemblerError as error:
        print(f"SKIPPED, nothing was executed: {error}")
        return
    random = np.random.default_rng(1)
    q, k, v, grad = (random.standard_normal((1, 2, ROWS, WIDTH)).astype("f2") for _ in range(4))
    worst = 0.0
    for causal, kind in CAUSAL_TYPES.items():
        # the fields of a name stand in another order forward and backward
        forward = kernel(folder, "attn_fwd", f"F_F_{kind}_0")
        out, lse, _ = emulated_kernels.forward(forward, q, k, v, causal, SCALE)
        delta, _ = emulated_kernels.preprocess(kernel(folder, "bwd_preprocess", "F"), out, grad)
        got = {"out": out, "lse": lse}
        for name, gradients in (("bwd_kernel_dk_dv", ("dk", "dv")), ("bwd_kernel_dq", ("dq",))):
            code = kernel(folder, name, f"{kind}_F_F_0")
            made, _ = emulated_kernels.backward(code, q, k, v, grad, lse, delta, causal, SCALE)
            got |= dict(zip(gradients, made, strict=True))
        for name, right in reference(q, k, v, grad, causal).items():
            error = float(np.abs(got[name] - right).max())
            if not error <= BOUND:
                raise SystemExit(f"{name}, causal {causal}: off by {error:.1e}, bound {BOUND}")
            worst = max(worst, error)
    print(f"8 code objects executed under emulation, largest error {worst:.1e} (bound {BOUND})")


if __name__ == "__main__":
    main()
