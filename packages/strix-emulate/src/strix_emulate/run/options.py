# SPDX-License-Identifier: BSD-3-Clause
"""Options of a launch, and its outcome."""

from dataclasses import dataclass, field

from strix_emulate.memory.findings import Note
from strix_emulate.run.program import Block

#: Fills registers, LDS and scratch: a NaN in float32, and in both halves as float16.
POISON = 0x7FB5_7FB5


@dataclass(frozen=True)
class Options:
    """How a launch is executed.

    Attributes:
        checks: Make the checks of :data:`strix_emulate.memory.findings.CHECKS`.
        batch: Maximum number of waves that are executed at a time. One workgroup is always
            executed, even if it has more waves. By default, the number is 128 for waves of 32
            lanes, and 64 for waves of 64 lanes. If C executes a kernel that cannot poll, the
            default is a quarter of this number to four times this number, chosen so that registers,
            scratch and LDS fit into a cache.
        lockstep: Execute waves at the same instruction as one operation. Otherwise each wave runs
            alone.
        budget: Wave-instructions before a kernel counts as hung.
        seconds: Seconds of wall-clock time before a kernel counts as hung.
        poison: 32-bit value that fills registers, LDS and scratch at the start.
        native: Execute instructions in C where libstrix-emulate is installed.
        cores: Maximum number of processor cores. More than one is used only if workgroups cannot
            wait for each other and there is enough work (:mod:`strix_emulate.run.parallel`).
        disabled_checks: Checks that are not made (:data:`strix_emulate.memory.findings.CHECKS`).
        lenient: Report findings without stopping the launch.
        warn_only: Checks whose findings are only reported.
        cooperative: Allow grid.sync(), if all workgroups fit into one batch.
        barriers_wait: Barriers also order accesses that are still outstanding, as if the waves had
            waited for them. The check `pending` still requires the waits.
    """

    checks: bool = True
    batch: int | None = None
    lockstep: bool = True
    budget: int = 200_000_000
    seconds: float = 1800
    poison: int = POISON
    native: bool = True
    cores: int = 1
    disabled_checks: frozenset[str] = frozenset()
    lenient: bool = False
    warn_only: frozenset[str] = frozenset()
    cooperative: bool = False
    barriers_wait: bool = False


@dataclass
class Outcome:
    """What a launch executed.

    Attributes:
        executed: Number of executed wave-instructions.
        blocks: Basic blocks by address, each with the number of entries into it.
        seconds: CPU seconds of the forked processes.
        cores: Number of processor cores that were used.
        one_core_reason: Why the kernel had to stay on one core although more were allowed, or "".
        notes: Findings that did not end the launch.
    """

    executed: int
    blocks: dict[int, Block]
    seconds: float = 0.0
    cores: int = 1
    one_core_reason: str = ""
    notes: list[Note] = field(default_factory=list)
