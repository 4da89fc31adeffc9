# SPDX-License-Identifier: BSD-3-Clause
"""The execution of one launch: its memories, its batches of workgroups, and its outcome."""

import time
from collections.abc import Callable

import numpy as np

from strix_emulate.code.hidden import hint_for_null_pointer
from strix_emulate.code.kernel import Kernel
from strix_emulate.errors import Trap
from strix_emulate.memory.addressing import Spaces
from strix_emulate.memory.arena import Arena
from strix_emulate.memory.findings import CHECKS, Findings, describe_place
from strix_emulate.memory.scratch import Scratch
from strix_emulate.memory.shadow import Memory
from strix_emulate.memory.tags import WORKGROUP
from strix_emulate.memory.waves import LANES
from strix_emulate.native import library as native
from strix_emulate.native.runs import Session
from strix_emulate.run import parallel
from strix_emulate.run.doubts import Doubts
from strix_emulate.run.initial import Geometry, count_registers, start_waves
from strix_emulate.run.options import Options, Outcome
from strix_emulate.run.program import Blocks, Program
from strix_emulate.run.scheduler import Scheduler
from strix_emulate.run.sleep import Sleepers

__all__ = ["Machine", "Options", "Outcome"]

#: Number of waves of 32 lanes in a batch, if numpy executes it or the kernel may poll.
_BATCH = 128
#: Otherwise, the minimum and maximum number of such waves. Within these limits, the number is such
#: that registers, scratch and LDS of a batch fit into a cache of _CACHE bytes.
_MIN_BATCH_IN_C = 32
_MAX_BATCH_IN_C = 512
_CACHE = 1 << 20


class Machine:
    """Executes one launch.

    Attributes:
        service: Function that answers the kernel's hostcalls while waves wait for them, or None.
    """

    def __init__(
        self,
        kernel: Kernel,
        program: Program,
        arena: Arena,
        options: Options,
        lds: int,
        code: int = 0,
        packet: int = 0,
        queue: int = 0,
    ):
        """Prepare a launch.

        Args:
            kernel: The kernel.
            program: Its instructions.
            arena: Global memory, with the arguments.
            options: How the launch is executed.
            lds: Bytes of LDS of a workgroup.
            code: Address of the kernel's first instruction.
            packet: Address of the dispatch packet.
            queue: Address of the queue.
        """
        self._kernel = kernel
        self._program = program
        self._arena = arena
        self._options = options
        self._lds = lds
        self._code = code
        self._pointers = {}
        for name, address in (("dispatch", packet), ("queue", queue)):
            if address:
                self._pointers[name] = address
        self.service: Callable[[], None] | None = None
        self._findings: Findings | None = None
        if options.checks:
            self._findings = Findings(
                options.disabled_checks,
                options.lenient,
                options.warn_only,
            )
        self._scheduler = Scheduler(options, arena, self._findings, code)

    def run(
        self,
        kernarg: int,
        grid: tuple[int, ...],
        block: tuple[int, ...],
    ) -> Outcome:
        """Execute all workgroups.

        Args:
            kernarg: Address of the arguments.
            grid: Workgroups as (x, y, z).
            block: Threads of a workgroup as (x, y, z).

        Raises:
            Trap: The kernel did something forbidden or unsupported, or hangs. The message says
                where.
        """
        width = self._kernel.width
        threads = block[0] * block[1] * block[2]
        waves = -(-threads // width)
        self._geometry = Geometry(grid, block, waves)
        self._pointers["kernarg"] = kernarg
        library = native.load_library() if self._options.native else None
        polls = self._program.polls
        first, groups = self._batch_sizes(in_c=library is not None and not polls)
        scheduler = self._scheduler
        scheduler.service = self.service
        scheduler.total = self._geometry.workgroups
        scheduler.resident = groups
        lanes = groups * waves * width
        spaces = self._make_spaces(groups, lanes)
        self._prepare_doubts()
        session = None
        if library:
            registers = count_registers(self._kernel)
            session = Session(
                library,
                spaces,
                lanes,
                registers,
                self._options.checks,
            )
        blocks = self._program.blocks(self._kernel, spaces, session)
        scheduler.attach(blocks, session, polls)
        return self._run_batches(spaces, blocks, first, groups)

    def _run_batches(
        self,
        spaces: Spaces,
        blocks: Blocks,
        first: int,
        groups: int,
    ) -> Outcome:
        """Run the first batch, which shows how much work there is, and then the other batches."""
        total = self._geometry.workgroups
        outcome = Outcome(0, blocks)

        def run_batch(start: int, end: int) -> None:
            """Run workgroups from start up to end."""
            self._run_batch(spaces, start, end)

        try:
            with np.errstate(all="ignore"):
                run_batch(0, first)
                is_done = False
                if self._options.cores > 1:
                    is_done = self._run_on_cores(
                        run_batch,
                        first,
                        total,
                        outcome,
                    )
                if not is_done:
                    for start in range(first, total, groups):
                        run_batch(start, min(start + groups, total))
        finally:
            self._release(spaces)
        if self._arena.doubts:
            self._arena.doubts.note_unused()
        outcome.executed = self._scheduler.executed
        if self._findings:
            outcome.notes = self._findings.notes
        return outcome

    def _run_batch(self, spaces: Spaces, start: int, end: int) -> None:
        self._clear(spaces)
        numbers = np.arange(start, end)
        waves = start_waves(
            self._kernel,
            self._geometry,
            numbers,
            self._pointers,
            self._options.poison,
        )
        waves.scalars = max(waves.scalars, self._program.scalars)
        memories = (self._arena, spaces.lds, spaces.scratch)
        sleepers = Sleepers(memories, is_closed=not self._arena.peers)
        try:
            self._scheduler.run_batch(waves, self._geometry.waves, sleepers)
            if self._arena.doubts:
                self._arena.doubts.judge()
        except Trap as trap:
            trap.hint = trap.hint or hint_for_null_pointer(self._kernel, trap)
            if not trap.where:
                place = describe_place(trap.instruction or self._scheduler.last_control)
                trap.where = f"{self._kernel.name} at {place}: "
            raise

    def _clear(self, spaces: Spaces) -> None:
        """Prepare the memories for the next workgroups."""
        for memory in (spaces.lds, spaces.scratch):
            if self._scheduler.executed:
                memory.clear_tags_in_place()
            memory.views[4][:] = self._options.poison
        self._scheduler.update_shadows()

    def _release(self, spaces: Spaces) -> None:
        """Release the launch's memory, to which the program and this object still refer."""
        self._program.release()
        self._scheduler.detach()
        for memory in (self._arena, spaces.lds, spaces.scratch):
            memory.release_tags()

    def _prepare_doubts(self) -> None:
        """If the flow of loaded values is known, judge races by the use of these values."""
        uses = self._program.uses
        if self._findings and uses.complete and not self._program.partial:
            self._arena.doubts = Doubts(
                uses,
                self._findings,
                self._arena.ranges(),
                self._geometry.waves,
                self._geometry.workgroups,
            )

    def _batch_sizes(self, in_c: bool) -> tuple[int, int]:
        """Return the number of workgroups in the first batch, and in the other batches.

        If several cores may be used, the first batch is small. It shows whether there is enough
        work for them.
        """
        min_waves = _MIN_BATCH_IN_C if in_c else _BATCH
        max_waves = _MAX_BATCH_IN_C if in_c else _BATCH
        lane_bytes = 4 * count_registers(self._kernel) + self._kernel.scratch
        wave_bytes = lane_bytes * LANES + self._lds // self._geometry.waves
        max_waves = max(min_waves, min(max_waves, _CACHE // wave_bytes))
        smallest = self._count_groups(min_waves)
        largest = self._count_groups(max_waves)
        if self._options.cores == 1:
            return largest, largest
        return smallest, largest

    def _count_groups(self, waves: int) -> int:
        """Return the number of workgroups in a batch of up to `waves` waves of 32 lanes.

        If Options.batch is set, the batch has up to that many waves instead. A batch has at least
        one workgroup.
        """
        waves = self._options.batch or waves * LANES // self._kernel.width
        groups = min(self._geometry.workgroups, waves // self._geometry.waves)
        return max(1, groups)

    def _make_spaces(self, groups: int, lanes: int) -> Spaces:
        """Return the memories of the launch, for batches of `groups` workgroups.

        `lanes` is the number of lanes of all these workgroups.
        """
        cell = self._program.cell
        checks = self._options.checks
        stride = (self._lds + 15) // 16 * 16
        scratch = self._kernel.scratch
        spaces = Spaces(
            self._arena,
            lds=Memory("LDS", groups * stride, cell, checks, checks),
            lds_size=self._lds,
            lds_stride=stride,
            scratch=Scratch("scratch", lanes * scratch, cell, checks, checks),
            scratch_size=scratch,
            code_address=self._code,
            clock=lambda: self._scheduler.executed,
            target=self._kernel.target,
            polls=self._program.polls,
            orders=self._program.orders,
        )
        order = self._arena.order
        spaces.lds.order = order
        if order is not None:
            order.one_cache = not self._kernel.two_units
            if self._program.orders:
                self._arena.record_stores(self._program.instructions)
        findings = self._findings or Findings(frozenset(CHECKS))
        for memory in (self._arena, spaces.lds, spaces.scratch):
            memory.findings = findings
        return spaces

    def _run_on_cores(
        self,
        run_batch: Callable[[int, int], None],
        first: int,
        total: int,
        outcome: Outcome,
    ) -> bool:
        """Run the workgroups from number `first` to the last one on several cores.

        Returns:
            Whether the workgroups were run. If not, the caller must run them on one core.
        """
        outcome.one_core_reason = parallel.find_one_core_reason(self._program.communicates)
        executed_before = self._scheduler.executed
        expected = executed_before / first * (total - first)
        if self._arena.doubts or outcome.one_core_reason:
            return False
        if not parallel.is_worthwhile(expected, self._arena):
            return False
        size = min(first, -(-(total - first) // self._options.cores))
        blocks = outcome.blocks

        def execute(share: list[int]) -> parallel.Answer:
            self._end_at_findings()
            entered = {at: block.entered for at, block in blocks.items()}
            for start in share:
                run_batch(start, min(start + size, total))
            more = {at: block.entered - entered.get(at, 0) for at, block in blocks.items()}
            executed = self._scheduler.executed - executed_before
            return parallel.Answer(executed, more, time.process_time())

        answers = parallel.run_shares(
            parallel.deal(range(first, total, size), self._options.cores),
            execute,
            self._arena,
            first_tag=(first + 1) << WORKGROUP,
            budget=self._options.budget - executed_before,
        )
        if answers is None:
            return False
        outcome.cores = len(answers)
        for answer in answers:
            self._scheduler.executed += answer.executed
            outcome.seconds += answer.seconds
            for at, waves in answer.entered.items():
                blocks[at].entered += waves
        return True

    def _end_at_findings(self) -> None:
        """Let every finding end this process. One core then repeats the work and adds the notes."""
        if self._findings:
            self._findings.lenient = False
            self._findings.warn_only = frozenset()
        if self._arena.doubts is not None:
            self._arena.doubts.refused = True
