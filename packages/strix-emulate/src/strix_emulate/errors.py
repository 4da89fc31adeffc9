# SPDX-License-Identifier: BSD-3-Clause
"""Errors: bad input, a missing disassembler, and traps of kernels."""

from typing import Any


class EmulatorError(Exception):
    """An error whose message tells the user what failed, where, and what to do."""


class LoadError(EmulatorError):
    """A file that the emulator cannot load."""


class Unsupported(LoadError):
    """A file, or a kernel in it, that the GPU can run but this emulator cannot."""


class DisassemblerError(EmulatorError):
    """There is no libLLVM that decodes GFX11. Nothing was executed."""


class Trap(EmulatorError):
    """A kernel did something that is forbidden, or that this emulator does not support.

    Attributes:
        kind: unknown, bounds, misaligned, pending, race, stale, uninitialised, wmma, barrier,
            abort, budget, readonly, or lds.
        position: Index of the faulty lane among the access's active lanes, or None.
        where: Kernel and instruction, for the message.
        lane: Lane, wave and workgroup, for the message.
        hint: A feature that the emulator lacks and that may explain the trap, for the message.
        instruction: The instruction (code.decode.Instruction), or None.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        position: int | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.position = position
        self.where = ""
        self.lane = ""
        self.hint = ""
        self.instruction: Any = None

    def __str__(self) -> str:
        return f"{self.where}{self.kind}: {super().__str__()}{self.lane}{self.hint}"
