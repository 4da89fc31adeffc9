# SPDX-License-Identifier: BSD-3-Clause
"""A mock of vLLM's module of the same name."""

import torch
from vllm.absent.compiled_extension import anything  # noqa: F401
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton

ROCM = current_platform.is_rocm()


@triton.jit
def _rms_norm_kernel(source, weight, target, n_cols, eps, BLOCK_SIZE: tl.constexpr):
    column = tl.arange(0, BLOCK_SIZE)
    inside = column < n_cols
    row = tl.program_id(0) * n_cols
    x = tl.load(source + row + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / n_cols + eps)
    tl.store(target + row + column, (x * scale * w).to(target.dtype.element_ty), mask=inside)


def rms_norm_batch_invariant(input, weight, eps=1e-6):
    if not ROCM:
        raise RuntimeError("the platform is not replaced")
    out = torch.empty_like(input)
    n_cols = input.shape[-1]
    block = triton.next_power_of_2(n_cols)
    _rms_norm_kernel[(input.shape[0],)](input, weight, out, n_cols, eps, BLOCK_SIZE=block)
    return out
