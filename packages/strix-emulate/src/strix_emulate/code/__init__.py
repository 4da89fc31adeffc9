# SPDX-License-Identifier: BSD-3-Clause
"""Code objects: files, metadata, and instructions as LLVM prints them.

Its modules, imported where they are needed:

* ``bundles``: clang's offload bundles, which hold code objects for several GPUs.
* ``decode``: `Instruction`, named by LLVM.
* ``elf``: the parts of an ELF file that are read, each once.
* ``encodings``: operands and modifiers, from the fields of an instruction's bytes.
* ``hidden``: arguments that a runtime fills in.
* ``kernel``: `Kernel`: code, arguments, and what its descriptor asks for.
* ``limits``: how much of each kind of input is read.
* ``llvm``: libLLVM's disassembler and assembler.
* ``loader``: `load`, the kernels of an ELF file or of a pack that holds some.
* ``target``: `Target`: the GPUs that are emulated, and all numbers of them.
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
