# SPDX-License-Identifier: BSD-3-Clause
"""Registers of waves at the start of a kernel (LLVM's guide, "Initial Kernel Execution State")."""

from dataclasses import dataclass

import numpy as np

from strix_emulate.code.decode import EXEC
from strix_emulate.code.kernel import Kernel
from strix_emulate.errors import Trap
from strix_emulate.memory.waits import Queues
from strix_emulate.memory.waves import LANES, SCALARS, Waves, pack

#: Minimum number of vector registers of a wave.
_MIN_REGISTERS = 8


@dataclass(frozen=True)
class Geometry:
    """Grid and workgroup of a launch.

    Attributes:
        grid: Workgroups as (x, y, z).
        block: Threads of a workgroup as (x, y, z).
        waves: Number of waves of a workgroup.
    """

    grid: tuple[int, ...]
    block: tuple[int, ...]
    waves: int

    @property
    def workgroups(self) -> int:
        """Number of workgroups."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads(self) -> int:
        """Number of threads of a workgroup."""
        return self.block[0] * self.block[1] * self.block[2]


def count_registers(kernel: Kernel) -> int:
    """Return the number of vector registers that the emulator gives to a wave of a kernel."""
    return max(kernel.vgprs, _MIN_REGISTERS)


def start_waves(
    kernel: Kernel,
    geometry: Geometry,
    numbers: np.ndarray,
    pointers: dict[str, int],
    poison: int,
) -> Waves:
    """Return the waves of some workgroups with their initial registers.

    Args:
        kernel: The kernel.
        geometry: Grid and workgroup.
        numbers: Numbers of the workgroups in the grid.
        pointers: Addresses to pass in scalar registers, by their name in `Kernel.user_sgprs`.
        poison: Value of the registers without an initial value.

    Raises:
        Trap: The kernel expects a value that the emulator does not have.
    """
    waves = geometry.waves
    n = len(numbers) * waves
    identity = np.zeros((8, n), np.int64)
    identity[0] = np.repeat(numbers, waves)
    identity[1] = np.tile(np.arange(waves), len(numbers))
    identity[2] = np.arange(n)
    identity[3] = np.repeat(np.arange(len(numbers)), waves)
    V = np.full((count_registers(kernel), n, kernel.width), poison, np.uint32)
    S = np.full((SCALARS, n, 1), poison, np.uint32)
    alive = _write_thread_ids(V, kernel.width, geometry)
    S[EXEC + 1] = 0
    S[EXEC : EXEC + kernel.width // LANES, :, 0] = np.tile(alive, (len(numbers), 1)).T
    used = _write_user_registers(S, kernel, pointers)
    used = _write_workgroup_ids(S, used, kernel, geometry.grid, identity[0])
    started = Waves(V, S, np.zeros((n, 1), bool), 0, identity, Queues())
    started.scalars = used
    return started


def _write_thread_ids(
    V: np.ndarray,
    width: int,
    geometry: Geometry,
) -> np.ndarray:
    """Write the thread IDs to v0. Return the lane masks of a workgroup's waves."""
    block = geometry.block
    waves = geometry.waves
    thread = np.arange(waves * width).reshape(waves, width)
    x = thread % block[0]
    y = thread // block[0] % block[1]
    z = thread // (block[0] * block[1])
    V[0].reshape(-1, waves, width)[:] = x | y << 10 | z << 20
    return pack(thread < geometry.threads)


def _write_user_registers(
    S: np.ndarray,
    kernel: Kernel,
    pointers: dict[str, int],
) -> int:
    """Write the user SGPRs. Return the number of the first register after them."""
    at = 0
    for name, count in kernel.user_sgprs:
        pointer = pointers.get(name)
        if name == "dispatch_id":
            pointer = 0
        elif pointer is None and name != "private_size":
            message = f"the kernel expects `{name}` in scalar registers, which is not supported"
            raise Trap("unknown", message)
        if pointer is not None:
            S[at] = pointer & 0xFFFFFFFF
            S[at + 1] = pointer >> 32
        at += count
    return max(at, kernel.user_count)


def _write_workgroup_ids(
    S: np.ndarray,
    at: int,
    kernel: Kernel,
    grid,
    workgroup,
) -> int:
    """Write the workgroup IDs after the user SGPRs. Return the first unused register's number."""
    ids = (
        workgroup % grid[0],
        workgroup // grid[0] % grid[1],
        workgroup // (grid[0] * grid[1]),
    )
    for is_needed, number in zip(kernel.workgroup_ids, ids, strict=True):
        if is_needed:
            S[at, :, 0] = number
            at += 1
    return at
