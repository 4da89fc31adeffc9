# SPDX-License-Identifier: BSD-3-Clause
"""One operation on registers, as both numpy and C execute it, and a compiled instruction."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from strix_emulate.code.decode import Operand


@dataclass(frozen=True)
class MicroOp:
    """One operation on registers.

    `function` takes the sources and returns the result, a mask of flags, or both in this order.

    Attributes:
        name: Name of the function in the tables of operations and in C.
        function: Function on numpy arrays; None where only C has a handler for the operation.
        kind: Kind of the result, such as "f32" or "u16".
        target: Register that gets the result; None without one.
        sources: Operands with their kinds. "mask" is a bit for each lane, "scc" the wave's SCC.
        keeps_denormals: Whether each source keeps denormal numbers; empty if all do.
        flag: Register that gets the mask of flags; None without one.
        dpp: DPP modifiers of source 0; None without DPP.
        after: Output modifiers ("clamp", "factor", "flush") with their values.
        handler: Name of the handler in emulate.c that executes the operation.
        access: Further fields of emulate.c's Op that the handler reads.
    """

    name: str
    function: Any
    kind: str
    target: Operand | None
    sources: tuple[tuple[Operand, str], ...]
    keeps_denormals: tuple[bool, ...] = ()
    flag: Operand | None = None
    dpp: dict | None = None
    after: dict = field(default_factory=dict)
    handler: str = "vector"
    access: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Executable:
    """What C needs to execute an instruction in numpy's place.

    Attributes:
        micros: Operations of the instruction: none if it does nothing, None if C cannot execute it.
        issues: Wait counters that count the instruction, and the entry that they count.
        waits: Whether the instruction is a wait.
        orders: Notes for the race checks what the instruction orders, given waves, memory, offsets,
            bytes and tags.
    """

    micros: tuple[MicroOp, ...] | None = None
    issues: tuple[tuple[int, ...], Any] | None = None
    waits: bool = False
    orders: Callable | None = None


@dataclass(frozen=True)
class Compiled:
    """An instruction, compiled for the memories of one launch.

    Attributes:
        run: Executes the instruction on Waves with numpy.
        executable: What C needs to do the same. It refers to no memory, so it outlives the launch.
    """

    run: Callable
    executable: Executable = Executable()


def compiled_for_c(
    run: Callable,
    *micros: MicroOp,
    issues: tuple[tuple[int, ...], Any] | None = None,
    waits: bool = False,
    orders: Callable | None = None,
) -> Compiled:
    """Return an instruction that C executes as well. For the arguments, see `Executable`."""
    return Compiled(run, Executable(micros, issues, waits, orders))


NO_OPERATION = compiled_for_c(lambda _g: None)
