# SPDX-License-Identifier: BSD-3-Clause
"""Code objects: their files, metadata and instructions.

Modules:

* ``bundles``: clang's offload bundles, which contain code objects for several GPUs.
* ``decode``: `Instruction`, and `decode`, which returns the instructions of machine code.
* ``elf``: the parts of an ELF file that a code object needs.
* ``encodings``: operands and modifiers, from the bit fields of an instruction.
* ``hidden``: kernel arguments that a runtime fills in.
* ``kernel``: `Kernel`: code, arguments, and the settings in the kernel's descriptor.
* ``limits``: limits of the size of input files.
* ``llvm``: libLLVM's disassembler and assembler.
* ``loader``: `load`, which returns the kernels of a file or of a Triton cache.
* ``target``: `Target`: the supported GPUs and their properties.
"""

__all__ = [
    "bundles",
    "decode",
    "elf",
    "encodings",
    "hidden",
    "kernel",
    "limits",
    "llvm",
    "loader",
    "target",
]
