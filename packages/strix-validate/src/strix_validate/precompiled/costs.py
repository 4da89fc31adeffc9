# SPDX-License-Identifier: BSD-3-Clause
"""Measure the cost of a compiled kernel: registers, spills, scratch, LDS, occupancy, WMMA.

These numbers follow from the compiled file alone. They do not include the time of a kernel, but a
kernel that spills to scratch, or does not use matrix instructions, is slow on any machine.
"""

import io
import re
from dataclasses import dataclass

from strix_validate import TARGET

#: A matrix product in Triton's GPU dialect. The pattern's groups are the type of the left factor's
#: numbers, and the layout of the result.
_PRODUCT = re.compile(
    r"tt\.dot .*?: tensor<[\dx]+x(\w+), #ttg\.dot_op<\{opIdx = 0, parent = #(\w+)"
)
#: Types of numbers that the matrix unit of gfx11 can multiply.
_MATRIX_TYPES = ("f16", "bf16", "i8")


@dataclass(frozen=True)
class KernelCost:
    """The cost of one kernel.

    Attributes:
        vgprs: Vector registers of a lane, of 32 bits each.
        sgprs: Scalar registers of a wave, of 32 bits each.
        vgpr_spills: Vector registers that the compiler moved to scratch.
        sgpr_spills: Scalar registers that the compiler moved to vector registers or scratch.
        scratch: Bytes of scratch of a lane.
        lds: Bytes of LDS of a workgroup, including those that Triton adds at launch.
        waves: Number of waves whose registers and LDS fit on a SIMD at the same time.
        wmma: Number of matrix instructions in the code.
    """

    vgprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch: int
    lds: int
    waves: int
    wmma: int


def measure(elf: bytes, assembly: str, launch_lds: int, name: str = "kernel") -> KernelCost:
    """Return the cost of a code object that contains one kernel.

    Args:
        elf: The code object.
        assembly: Its assembly, in which matrix instructions are counted.
        launch_lds: Bytes of LDS that Triton adds at launch.
        name: The kernel's name in messages.

    Raises:
        elftools.common.exceptions.ELFError: The bytes are not an ELF file.
        strix_emulate.errors.LoadError: The file has no AMDGPU metadata note.
        ValueError: The metadata does not describe exactly one kernel.
    """
    # `warm` and `compilations` must work without elftools and strix_emulate, so these are imported
    # only here.
    from elftools.elf.elffile import ELFFile
    from strix_emulate import TARGETS, elf_metadata, occupancy

    (kernel,) = elf_metadata(ELFFile(io.BytesIO(elf)), name)["amdhsa.kernels"]
    vgprs = kernel[".vgpr_count"]
    lds = kernel[".group_segment_fixed_size"] + launch_lds
    threads = kernel[".max_flat_workgroup_size"]
    width = kernel[".wavefront_size"]
    waves = occupancy(TARGETS[TARGET], vgprs, lds, threads, width)
    return KernelCost(
        vgprs=vgprs,
        sgprs=kernel[".sgpr_count"],
        vgpr_spills=kernel[".vgpr_spill_count"],
        sgpr_spills=kernel[".sgpr_spill_count"],
        scratch=kernel[".private_segment_fixed_size"],
        lds=lds,
        waves=waves["bound"],
        wmma=len(re.findall(r"\bv_wmma_", assembly)),
    )


def find_lost_products(ttgir: str) -> list[str]:
    """Return the data types of the products that could use the matrix unit but do not.

    If a tile is too small for the matrix unit, Triton prints "no matching matrix core intrinsic"
    and uses the vector unit instead, at a fraction of the speed.

    Args:
        ttgir: A kernel in Triton's GPU dialect, an intermediate stage of its compilation.
    """
    products = _PRODUCT.findall(ttgir)
    return [
        number
        for number, layout in products
        if number in _MATRIX_TYPES and not layout.startswith("mma")
    ]
