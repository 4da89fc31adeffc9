# SPDX-License-Identifier: BSD-3-Clause
"""Package test: compile a kernel for gfx1151 without a GPU, and check its code object.

The test detects a Triton without the AMDGPU target, lld or the device libraries, and an AMD backend
that falls back to another architecture. It also requires an exception for conversions of the types
fp8e4b8 and fp8e5b16, and that a conversion from fp8e4nv is compiled.
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
    """Call a function of the device libraries, so that a missing ocml.bc is detected."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < n)
    tl.store(y + offsets, tl.extra.hip.libdevice.expm1(value) * 2.0, mask=offsets < n)


@triton.jit
def convert(x, y):
    offsets = tl.arange(0, 128)
    tl.store(y + offsets, tl.load(x + offsets).to(y.dtype.element_ty))


def require_refusal(source_type: str, target_type: str) -> None:
    """Require that a conversion raises an exception. Without our patch, LLVM would abort here."""
    signature = {"x": f"*{source_type}", "y": f"*{target_type}"}
    try:
        triton.compile(ASTSource(convert, signature), target=GPUTarget("hip", ARCH, 32))
    except Exception as error:
        message = str(error)
    else:
        message = "it compiled"
    refused = "not supported in this architecture" in message
    require(refused, f"{source_type} to {target_type} is not refused for {ARCH}: {message}")


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
for name in ("fp8e4b8", "fp8e5b16"):
    require_refusal(name, "bf16")
    require_refusal("fp32", name)
triton.compile(
    ASTSource(convert, {"x": "*fp8e4nv", "y": "*bf16"}), target=GPUTarget("hip", ARCH, 32)
)
print(f"fp8e4b8 and fp8e5b16 are refused for {ARCH}; fp8e4nv is compiled")
