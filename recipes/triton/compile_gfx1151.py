# SPDX-License-Identifier: BSD-3-Clause
"""Compile a kernel for gfx1151 without a GPU and read back what the code object says it is for.

Would have caught: a triton built without the AMDGPU target or lld, device libraries left out, and
a wheel whose AMD backend falls back to another architecture.
"""

import io

import triton
import triton.language as tl
from elftools.elf.elffile import ELFFile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

EF_AMDGPU_MACH = 0xFF
GFX1151 = 0x4A  # LLVM, AMDGPU usage, table "AMDGPU Embedding e_flags"


@triton.jit
def scaled_exp(x, y, n, BLOCK: tl.constexpr):
    """Uses a device library function, so that leaving out ocml.bc shows."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < n)
    tl.store(y + offsets, tl.extra.hip.libdevice.expm1(value) * 2.0, mask=offsets < n)


source = ASTSource(
    scaled_exp,
    signature={"x": "*fp32", "y": "*fp32", "n": "i32", "BLOCK": "constexpr"},
    constexprs={"BLOCK": 256},
)
kernel = triton.compile(source, target=GPUTarget("hip", "gfx1151", 32))
elf = ELFFile(io.BytesIO(kernel.asm["hsaco"]))

assert elf.header.e_machine == "EM_AMDGPU", elf.header.e_machine
machine = elf.header.e_flags & EF_AMDGPU_MACH
assert machine == GFX1151, f"machine flag {machine:#x}, gfx1151 is {GFX1151:#x}"
assert '"amdgcn-amd-amdhsa--gfx1151"' in kernel.asm["amdgcn"]
print(f"scaled_exp: {len(kernel.asm['hsaco'])} bytes, machine flag {machine:#x}")
