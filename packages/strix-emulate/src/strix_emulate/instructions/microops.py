# SPDX-License-Identifier: BSD-3-Clause
"""Compiled instructions: functions that numpy executes, and register operations for C.

Both have the same effect.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from strix_emulate.code.decode import Operand


@dataclass(frozen=True)
class MicroOp:
    """One operation on registers.

    `function` takes the sources and returns the result, a mask of flags, or both in this order.

    Attributes:
        name: Name of the function in the tables of operations and in C. "" if there is none.
            C then executes the operation only if `function` is None.
        function: Function on numpy arrays. None if only a handler of C implements the operation.
        kind: Kind of the result, such as "f32" or "u16".
        target: Register that gets the result, or None.
        sources: Operands with their kinds. "mask" is a bit for each lane, "scc" the wave's SCC.
        keeps_denormals: Whether each source keeps denormal numbers. Empty if all sources do.
        flag: Register that gets the mask of flags, or None.
        dpp: DPP modifiers of source 0. None without DPP.
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
    """The description of an instruction with which C can execute it instead of numpy.

    Attributes:
        micros: Operations of the instruction. Empty if it does nothing, None if only numpy can
            execute it. C also leaves the instruction to numpy if it lacks the function of an
            operation.
        issues: Wait counters that count the instruction, and the instruction's entry in them.
        waits: Whether the instruction is a wait.
        orders: Function that records for the race checks which accesses the instruction orders. Its
            arguments are waves, memory, offsets, bytes and tags.
    """

    micros: tuple[MicroOp, ...] | None = None
    issues: tuple[tuple[int, ...], Any] | None = None
    waits: bool = False
    orders: Callable | None = None


@dataclass(frozen=True)
class Compiled:
    """An instruction, compiled for the memories of one launch.

    Attributes:
        run: Function that executes the instruction on Waves with numpy.
        executable: The description with which C can execute it. It refers to no memory of the
            launch, so it remains valid after the launch.
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
