# SPDX-License-Identifier: BSD-3-Clause
"""Errors: bad input, a missing disassembler, and traps of kernels."""

from typing import Any


class EmulatorError(Exception):
    """One clear message for the user: what, where, what to do."""


class LoadError(EmulatorError):
    """The file is not a code object that this machine can run."""


class Unsupported(LoadError):
    """A file that the GPU would take, and this machine does not."""


class DisassemblerError(EmulatorError):
    """No libLLVM here can decode GFX11; nothing was executed."""


class Trap(EmulatorError):
    """A kernel did something that the machine forbids or this emulator does not support.

    kind, one word: unknown, bounds, pending, race, stale, uninitialised, wmma, barrier, abort,
    budget, readonly, lds. The machine adds where it happened, and a hint at what is not supported.
    position: which of an access's active lanes it was, where that is known.
    """

    def __init__(self, kind: str, message: str, position: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.where = ""
        self.position = position
        self.lane = ""
        self.hint = ""
        self.instruction: Any = None  # of decode.Instruction

    def __str__(self) -> str:
        return f"{self.where}{self.kind}: {super().__str__()}{self.lane}{self.hint}"
