# SPDX-License-Identifier: BSD-3-Clause
"""Instructions as functions on waves.

Modules:

* ``atomics``: atomic read-modify-writes of global memory and LDS.
* ``crosslane``: moves of data between lanes (DPP, permlane, readlane), packed maths, WMMA.
* ``flow``: data flow: predecessors, registers that instructions write, copies.
* ``microops``: `MicroOp`, one operation on registers; `Compiled`, an instruction for numpy and C.
* ``mnemonics``: the kinds of memory instructions, by mnemonic.
* ``salu``: scalar instructions other than branches, waits and memory.
* ``steps``: `Step`, an instruction of a kernel, with its checks.
* ``uses``: the stores that a loaded value may influence, derived from the code alone.
* ``valu``: vector instructions: VOP1, VOP2, VOP3, VOPC, VOPD.
* ``vmem``: loads, stores, and data exchange between lanes through LDS.
"""

__all__ = [
    "atomics",
    "crosslane",
    "flow",
    "microops",
    "mnemonics",
    "salu",
    "steps",
    "uses",
    "valu",
    "vmem",
]
