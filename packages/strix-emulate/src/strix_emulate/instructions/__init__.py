# SPDX-License-Identifier: BSD-3-Clause
"""Instructions as functions on waves.

Its modules, imported where they are needed:

* ``atomics``: atomic read-modify-writes of global memory and LDS.
* ``crosslane``: data between lanes: DPP, permlane, readlane; packed maths; WMMA.
* ``flow``: data flow: predecessors, registers that instructions write, copies.
* ``microops``: `MicroOp`, one operation on registers; `Compiled`, an instruction for numpy and C.
* ``mnemonics``: what the mnemonics of memory instructions say.
* ``salu``: scalar instructions other than branches, waits and memory.
* ``steps``: `Step`, one instruction as numpy executes it, with its checks.
* ``uses``: the stores that a loaded value may influence, derived from the code alone.
* ``valu``: vector instructions: VOP1, VOP2, VOP3, VOPC, VOPD.
* ``vmem``: loads and stores, and lane exchange through LDS.
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
