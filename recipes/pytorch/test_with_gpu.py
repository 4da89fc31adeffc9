# SPDX-License-Identifier: BSD-3-Clause
"""Package test: compare attention and a matrix product on the GPU with float64 on the CPU.

The test is skipped unless this machine has the GPU that the package is for.

`strix-validate attention` checks attention completely, but pytorch cannot use strix-validate in its
tests, because strix-validate requires pytorch. Convolutions are not tested, because they fail with
the MIOpen of ROCm 10.0 (ROCm/MIOpen#3964), and a failed test would discard a build of hours.
"""

import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from checks.gpu import find_skip_reason
from checks.target import ARCH
from checks.verdict import CheckFailed, require

reason = find_skip_reason()
if reason:
    print(f"SKIPPED: {reason}; nothing ran on {ARCH}")
    sys.exit()
require(torch.cuda.is_available(), f"there is a {ARCH}, but torch finds no GPU")
properties = torch.cuda.get_device_properties(0)
arch = properties.gcnArchName
require(arch.split(":")[0] == ARCH, f"this GPU is {arch}, but the package is for {ARCH}")

# The largest allowed relative error of each dtype, five times its eps.
BOUNDS = {torch.float16: 5e-3, torch.bfloat16: 4e-2}
FLOAT32_BOUND = 1e-3
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error in the maximum norm; NaN counts as infinite."""
    difference = (result.cpu().double() - expected).abs().max() / expected.abs().max()
    return float(torch.nan_to_num(difference, nan=torch.inf))


def attention(inputs, backend, device, dtype):
    """Return the output and the gradients of causal attention."""
    tensors = [x.to(device, dtype).detach().requires_grad_() for x in inputs]
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(*tensors, is_causal=True)
    out.sum().backward()
    return [out.detach(), *(x.grad for x in tensors)]


torch.manual_seed(0)
for head_dim in (64, 128):
    inputs = [torch.randn(2, 4, 333, head_dim, dtype=torch.float64) for _ in range(3)]
    for dtype, bound in BOUNDS.items():
        rounded = [x.to(dtype).double() for x in inputs]
        expected = attention(rounded, SDPBackend.MATH, "cpu", torch.float64)
        for backend in BACKENDS:
            results = attention(inputs, backend, "cuda", dtype)
            error = max(map(relative_error, results, expected))
            case = f"{backend.name} {dtype} head dim {head_dim}: {error:.2e}"
            require(error < bound, f"{case}, bound {bound}")
            print(case)

# There is no kernel for head dimension 512 on gfx11. torch must raise an error instead of returning
# uninitialized memory.
wide = [torch.randn(1, 1, 64, 512, device="cuda", dtype=torch.float16) for _ in range(3)]
for backend in BACKENDS:
    try:
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(*wide)
    except RuntimeError:
        continue
    raise CheckFailed(f"{backend.name} accepts head dim 512")
# This call goes directly to AOTriton, which refuses it, and torch must report the refusal as an
# AcceleratorError. If an argument of the call were wrong, torch would raise another error.
try:
    torch.ops.aten._efficient_attention_forward(*wide, *[None] * 5, 0.0, 0)
except torch.AcceleratorError:
    pass
else:
    raise CheckFailed("torch ignores the error that AOTriton returns")

a = torch.randn(256, 512)
b = torch.randn(512, 128)
error = relative_error(a.cuda() @ b.cuda(), a.double() @ b.double())
require(error < FLOAT32_BOUND, f"matrix product: {error:.2e}, bound {FLOAT32_BOUND}")
blas = torch.backends.cuda.preferred_blas_library()
require(blas == torch._C._BlasBackend.Cublaslt, f"the default BLAS is {blas}, not hipBLASLt")
print(f"on {properties.name}, {arch}: all passed")
