# SPDX-License-Identifier: BSD-3-Clause
"""Attention and a matrix product on the GPU, against fp64 on the CPU; skipped on any other GPU.

Attention is checked in full by `strix-validate attention`. It is a test of strix-validate, which
needs pytorch and so cannot be a test of it. No convolution: MIOpen of ROCm 10.0 fails there
(ROCm/MIOpen#3964), and this test stands between a build of hours and its package.
"""

import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from checks.gpu import why_skipped
from checks.target import ARCH
from checks.verdict import CheckFailed, require

if reason := why_skipped():
    print(f"SKIPPED: {reason}; nothing ran on {ARCH}")
    sys.exit()
require(torch.cuda.is_available(), f"KFD names a {ARCH}, but torch sees no GPU")
properties = torch.cuda.get_device_properties(0)
arch = properties.gcnArchName
require(arch.split(":")[0] == ARCH, f"this GPU is {arch}, and the package is for {ARCH}")

# relative error, five eps of the type
BOUND = {torch.float16: 5e-3, torch.bfloat16: 4e-2}
SINGLE = 1e-3


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the maximum norm; NaN counts as infinite."""
    difference = (got.cpu().double() - expected).abs().max() / expected.abs().max()
    return float(torch.nan_to_num(difference, nan=torch.inf))


def attention(inputs, backend, device, dtype):
    """Output and gradients of causal attention."""
    q, k, v = (x.to(device, dtype).detach().requires_grad_() for x in inputs)
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out.sum().backward()
    return out.detach(), q.grad, k.grad, v.grad


torch.manual_seed(0)
for dim in (64, 128):
    inputs = [torch.randn(2, 4, 333, dim, dtype=torch.float64) for _ in range(3)]
    for dtype, bound in BOUND.items():
        rounded = [x.to(dtype).double() for x in inputs]
        expected = attention(rounded, SDPBackend.MATH, "cpu", torch.float64)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            got = attention(inputs, backend, "cuda", dtype)
            errors = [error(*pair) for pair in zip(got, expected, strict=True)]
            case = f"{backend.name} {dtype} head dim {dim}: {max(errors):.2e}"
            require(max(errors) < bound, f"{case}, bound {bound}")
            print(case)

# gfx11 has no such kernel: torch must refuse, not return whatever is in memory
wide = [torch.randn(1, 1, 64, 512, device="cuda", dtype=torch.float16) for _ in range(3)]
for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
    try:
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(*wide)
    except RuntimeError:
        continue
    raise CheckFailed(f"{backend.name} accepts head dim 512")
# asked past that choice, AOTriton refuses, and torch must say so; a wrong argument is another error
try:
    torch.ops.aten._efficient_attention_forward(*wide, *[None] * 5, 0.0, 0)
except torch.AcceleratorError:
    pass
else:
    raise CheckFailed("what AOTriton returns is passed over")

a, b = torch.randn(256, 512), torch.randn(512, 128)
off = error(a.cuda() @ b.cuda(), a.double() @ b.double())
require(off < SINGLE, f"matrix product: {off:.2e}, bound {SINGLE}")
blas = torch.backends.cuda.preferred_blas_library()
require(blas == torch._C._BlasBackend.Cublaslt, f"the default BLAS is {blas}, not hipBLASLt")
print(f"on {properties.name}, {arch}: all passed")
