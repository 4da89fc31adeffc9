# SPDX-License-Identifier: BSD-3-Clause
"""What can go wrong: bad input, a missing disassembler, and what a kernel did wrong."""


class EmulatorError(Exception):
    """One clear message for the user: what, where, what to do."""


class LoadError(EmulatorError):
    """A file that is no code object for this machine."""


class DisassemblerError(EmulatorError):
    """No LLVM that can decode gfx1151; nothing was run."""


class Trap(EmulatorError):
    """A kernel did what the machine forbids, or what this emulator does not know.

    kind is one word for counting: unknown, bounds, pending, race, uninitialised, wmma, barrier,
    budget, readonly, mode. The machine adds where it happened.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.where = ""

    def __str__(self) -> str:
        return f"{self.where}{self.kind}: {super().__str__()}"
