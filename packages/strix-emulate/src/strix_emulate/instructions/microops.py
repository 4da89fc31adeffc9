# SPDX-License-Identifier: BSD-3-Clause
"""One operation on registers: what both numpy and C execute."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from strix_emulate.code.decode import Operand


@dataclass(frozen=True)
class MicroOp:
    """function of sources gives a result of that kind, a mask of flags, or both in this order.

    name: the function's, in the tables and in C; function: None where C alone has a handler for it.
    sources: operands with their kinds; "mask" is a
    bit for each lane, "scc" the wave's own. keeps: whether each source keeps denormals. flag: where
    the mask goes. dpp: the modifiers of source 0, or None. after: output modifiers (clamp, factor,
    flush) with their values. handler: what of emulate.c executes it.
    """

    name: str
    function: Any
    kind: str
    target: Operand | None
    sources: tuple[tuple[Operand, str], ...]
    keeps: tuple[bool, ...] = ()
    flag: Operand | None = None
    dpp: dict | None = None
    after: dict = field(default_factory=dict)
    handler: str = "vector"
    #: fields of emulate.c's Op that the handler reads besides
    access: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Executable:
    """What C needs to execute a step in numpy's place: micros, or None if it cannot.

    issues: the wait counters that count it, and the entry; waits: it is a wait. orders: notes what
    it orders for the race checks, given waves, memory, offsets, bytes and tags.
    """

    micros: tuple[MicroOp, ...] | None = None
    issues: tuple[tuple[int, ...], Any] | None = None
    waits: bool = False
    orders: Callable | None = None


_EXECUTABLE = "executable"


def executes(
    run: Callable,
    *micros: MicroOp,
    issues=None,
    waits: bool = False,
    orders: Callable | None = None,
) -> Callable:
    """Note on a function on Waves what does the same in C."""
    setattr(run, _EXECUTABLE, Executable(micros, issues, waits, orders))
    return run


def executable(run: Callable) -> Executable:
    """Return what is marked on a function that executes an instruction, if anything is."""
    return getattr(run, _EXECUTABLE, Executable())
