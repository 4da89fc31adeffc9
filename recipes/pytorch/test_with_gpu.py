# SPDX-License-Identifier: BSD-3-Clause
"""Attention, convolution and a matrix product on the GPU, against fp64 on the CPU.

The whole check of attention is `strix-validate attention`, in strix-validate's own package test:
it needs pytorch, so it cannot be a test of it.
"""

import os
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

if not os.path.exists("/dev/kfd"):
    print("NOT RUN: this machine has no /dev/kfd. Nothing was checked on a GPU.")
    sys.exit()
assert torch.cuda.is_available(), "there is /dev/kfd, but torch sees no GPU"
properties = torch.cuda.get_device_properties(0)
assert properties.gcnArchName.split(":")[0] == "gfx1151", properties.gcnArchName

BOUND = {torch.float16: 5e-3, torch.bfloat16: 4e-2}  # relative error, some 4 roundings of the type


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error in the maximum norm, NaN counted as infinite."""
    difference = (got.cpu().double() - wanted).abs().max() / wanted.abs().max()
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
        wanted = attention(rounded, SDPBackend.MATH, "cpu", torch.float64)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            got = attention(inputs, backend, "cuda", dtype)
            errors = [error(*pair) for pair in zip(got, wanted, strict=True)]
            print(f"{backend.name} {dtype} head dim {dim}: {max(errors):.2e}")
            assert max(errors) < bound, errors

# gfx11 has no such kernel: it must be refused, not answered with what lies in memory
wide = [torch.randn(1, 1, 64, 512, device="cuda", dtype=torch.float16) for _ in range(3)]
for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
    try:
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(*wide)
    except RuntimeError:
        continue
    raise AssertionError(f"{backend.name} accepts head dim 512")

image, weight = torch.randn(2, 8, 32, 32), torch.randn(16, 8, 3, 3)
got = F.conv2d(image.cuda(), weight.cuda(), padding=1)
assert error(got, F.conv2d(image.double(), weight.double(), padding=1)) < 1e-3
a, b = torch.randn(256, 512), torch.randn(512, 128)
assert error(a.cuda() @ b.cuda(), a.double() @ b.double()) < 1e-3
assert torch.backends.cuda.preferred_blas_library() == torch._C._BlasBackend.Cublaslt
print(f"on {properties.name}, {properties.gcnArchName}: all passed")
