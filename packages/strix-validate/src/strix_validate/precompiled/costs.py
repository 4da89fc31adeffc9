# SPDX-License-Identifier: BSD-3-Clause
"""What a compiled kernel costs on the GPU: registers, spills, scratch, LDS, occupancy, WMMA.

These numbers follow from the compiled file alone. They say nothing of time, but a kernel that
spills to scratch, or that lost its matrix instructions, is slow on any machine.
"""

import io
import re
from dataclasses import dataclass

from strix_validate import TARGET

#: A product in Triton's GPU dialect: the numbers of its left factor, and the layout of the result.
_PRODUCT = re.compile(
    r"tt\.dot .*?: tensor<[\dx]+x(\w+), #ttg\.dot_op<\{opIdx = 0, parent = #(\w+)"
)
#: Numbers that the matrix unit of gfx11 multiplies.
_MATRIX_TYPES = ("f16", "bf16", "i8")


@dataclass(frozen=True)
class KernelCost:
    """The cost of one kernel. Registers are of 32 bits per lane.

    Attributes:
        vgprs: Vector registers of a lane.
        sgprs: Scalar registers of a wave.
        vgpr_spills: Vector registers that the compiler moved to scratch.
        sgpr_spills: Scalar registers that the compiler moved to vector registers or scratch.
        scratch: Bytes of scratch of a lane.
        lds: Bytes of LDS of a workgroup, with those that Triton adds at launch.
        waves: Waves that fit on a SIMD, by registers and LDS.
        wmma: Matrix instructions in the code.
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
    """Return the cost of a code object that holds one kernel.

    Args:
        elf: The code object.
        assembly: Its assembly, in which matrix instructions are counted.
        launch_lds: Bytes of LDS that Triton adds at launch.
        name: The kernel's name in messages.

    Raises:
        elftools.common.exceptions.ELFError: Not an ELF file.
        strix_emulate.errors.LoadError: The file has no AMDGPU metadata note.
        ValueError: The metadata does not describe exactly one kernel.
    """
    # Only who measures kernels needs the two: `warm` and `compilations` work without them.
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
    """Return the number types of products that could use the matrix unit, and do not.

    Triton prints "no matching matrix core intrinsic" where a tile is too small for the unit, goes
    on, and multiplies with the vector unit, at a fraction of the speed.

    Args:
        ttgir: A kernel in Triton's GPU dialect, a stage of its compiler.
    """
    products = _PRODUCT.findall(ttgir)
    return [
        number
        for number, layout in products
        if number in _MATRIX_TYPES and not layout.startswith("mma")
    ]
