# SPDX-License-Identifier: BSD-3-Clause
"""A functional emulator of gfx1151 and related GPUs: it executes code objects on a CPU.

* `load` reads the kernels of a file. `launch` runs one kernel over a grid, with a `Buffer` for each
  pointer argument, and returns a `Launch`. A kernel that does something forbidden raises a `Trap`.
* `parse_elf` returns the kernels of an ELF file, and `elf_metadata` its AMDGPU metadata.
  `find_disassembler` returns libLLVM. It raises `DisassemblerError` if this machine has no libLLVM
  that can disassemble code objects.
* `decode_kernel` returns a kernel's instructions. From these, `describe_kernel` returns the
  kernel's static facts. `occupancy` returns the number of waves that fit on a SIMD.
* `TARGETS` has the supported GPUs by name, as `Target`.

Programs and other packages import the names in `__all__` from here. Any other name may change.
"""

from strix_emulate.code.elf import elf_metadata
from strix_emulate.code.kernel import Argument, Kernel
from strix_emulate.code.llvm import find_disassembler
from strix_emulate.code.loader import EM_AMDGPU, load, parse_elf
from strix_emulate.code.target import TARGETS, Target
from strix_emulate.errors import DisassemblerError, EmulatorError, LoadError, Trap
from strix_emulate.launches import Buffer, Launch, launch
from strix_emulate.run.options import Options
from strix_emulate.run.program import decode_kernel
from strix_emulate.statistics import describe_kernel, occupancy

__all__ = [
    "EM_AMDGPU",
    "TARGETS",
    "Argument",
    "Buffer",
    "DisassemblerError",
    "EmulatorError",
    "Kernel",
    "Launch",
    "LoadError",
    "Options",
    "Target",
    "Trap",
    "decode_kernel",
    "describe_kernel",
    "elf_metadata",
    "find_disassembler",
    "launch",
    "load",
    "occupancy",
    "parse_elf",
]
