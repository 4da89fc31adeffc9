# SPDX-License-Identifier: BSD-3-Clause
"""Package test: compile a kernel for gfx1151 without a GPU, and check its code object.

Catches a Triton without the AMDGPU target or lld, one without device libraries, and an AMD backend
that falls back to another architecture.
"""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from checks import elf
from checks.target import ARCH
from checks.verdict import require


@triton.jit
def scaled_exp(x, y, n, BLOCK: tl.constexpr):
    """Calls a device library function, so that a missing ocml.bc shows."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < n)
    tl.store(y + offsets, tl.extra.hip.libdevice.expm1(value) * 2.0, mask=offsets < n)


source = ASTSource(
    scaled_exp,
    signature={"x": "*fp32", "y": "*fp32", "n": "i32", "BLOCK": "constexpr"},
    constexprs={"BLOCK": 256},
)
kernel = triton.compile(source, target=GPUTarget("hip", ARCH, 32))
code = kernel.asm["hsaco"]
fault = elf.fault(code)
require(not fault, f"scaled_exp's code object {fault}")
target = f'"amdgcn-amd-amdhsa--{ARCH}"'
require(target in kernel.asm["amdgcn"], f"scaled_exp's assembly does not name {target}")
print(f"scaled_exp: a code object of {len(code)} bytes for {ARCH}")
