# SPDX-License-Identifier: BSD-3-Clause
"""Global memory: the addresses of arrays, and the lookup of the array that an access hits."""

import numpy as np

from strix_emulate.errors import Trap
from strix_emulate.memory.happens_before import Order
from strix_emulate.memory.shadow import Memory

#: First address of global memory. Addresses have 48 bits.
BASE = 0x2000_0000_0000
#: Base-2 logarithm of the distance from one array to the next.
_SLOT = 33
#: Modes of an array. A load from an UNWRITTEN array is reported if no store wrote the bytes before.
READ_ONLY = 1
WRITABLE = 2
UNWRITTEN = 3


class Arena(Memory):
    """Global memory. Its arrays are far apart, and each lies across a 4 GiB boundary.

    An array of less than 32 bytes begins at the boundary instead. An address that misses its array,
    even by gigabytes, does not hit another one. The boundary reveals code that loses the carry into
    the high half of an address.

    Attributes:
        whole_words: Whether accesses of 4 bytes may reach past an array's end, up to the next
            multiple of 4 bytes (`Program.whole_words`).
        aliases: Host addresses of arrays, which pointers in memory may contain, as (3, n): first
            address minus BASE, end minus BASE, and distance to the array's address in global
            memory.
        peers: Whether anything besides the kernel's waves may change the memory during a launch.
        top: Offset of the next array.
        arrays: The arrays as (4, n): first address minus BASE, offset, bytes, mode.
        written_earlier: Whether each cell was written before the last barrier of the grid. Empty if
            there was no such barrier, or if no array is UNWRITTEN.
    """

    def __init__(
        self,
        size: int,
        cell: int,
        checked: bool,
        strict: bool,
        shared: bool = False,
    ):
        super().__init__("global memory", size, cell, checked, strict, shared)
        self.one_workgroup = False
        self.order = Order() if checked else None
        self.whole_words = False
        self.aliases = np.zeros((3, 0), np.int64)
        self.peers = False
        self.top = 0
        self.arrays = np.zeros((4, 0), np.int64)
        self.written_earlier = np.zeros(0, bool)

    def place(self, data: np.ndarray, mode: int) -> int:
        """Copy bytes into memory and return their address, a multiple of 16.

        Kernels must not rely on a larger alignment. Because the alignment is small, the 4 GiB
        boundary can lie inside a row of an array.
        """
        start = self.top
        number = self.arrays.shape[1]
        self.bytes[start : start + len(data)] = data
        middle = (number << _SLOT) + (1 << (_SLOT - 1))
        first = middle - len(data) // 2 // 16 * 16
        entry = np.array([[first], [start], [len(data)], [mode]])
        self.arrays = np.concatenate([self.arrays, entry], axis=1)
        self.top = (start + len(data) + 255) // 256 * 256
        return BASE + first

    def clear_tags_at_grid_barrier(self) -> None:
        """Clear the tags. Cells of UNWRITTEN arrays that were written still count as written."""
        arrays = self.arrays[1:3, self.arrays[3] == UNWRITTEN]
        if self.checked and self.strict and arrays.size:
            if not self.written_earlier.size:
                self.written_earlier = np.zeros(len(self.written), bool)
            for start, length in arrays.T.tolist():
                cells = slice(start // self.cell, -(-(start + length) // self.cell))
                self.written_earlier[cells] |= self.written[cells] != 0
        self.clear_tags()

    def alias(self, host: int, length: int, address: int) -> None:
        """Make the array at an address also reachable at a host address."""
        row = np.array([[host - BASE], [host + length - BASE], [address - host]])
        self.aliases = np.concatenate([self.aliases, row], axis=1)

    def _resolve_aliases(self, relative):
        for start, end, distance in self.aliases.T:
            is_alias = (relative >= start) & (relative < end)
            relative = np.where(is_alias, relative + distance, relative)
        return relative

    def fetch(self, address: int, size: int) -> np.ndarray:
        """Return a copy of the first `size` bytes of the array that was placed at an address."""
        start = int(self.arrays[1, (address - BASE) >> _SLOT])
        return self.bytes[start : start + size].copy()

    def ranges(self) -> np.ndarray:
        """Return the address ranges of the arrays and of their aliases.

        Returns:
            (n, 4) int64, sorted: first address, bytes, offset, mode.
        """
        first, start, length, mode = self.arrays
        rows = [np.stack([first + BASE, length, start, mode], axis=1)]
        for host, end, distance in self.aliases.T.tolist():
            slot = host + distance >> _SLOT
            offset = int(start[slot] + host + distance - first[slot])
            rows.append(np.array([[host + BASE, end - host, offset, mode[slot]]]))
        ranges = np.concatenate(rows)
        return np.ascontiguousarray(ranges[np.argsort(ranges[:, 0])])

    def find(
        self,
        addresses,
        size: int,
        write: bool,
    ) -> tuple[np.ndarray, bool]:
        """Return the offsets of addresses (uint64), and whether any memory there is writable.

        Raises:
            Trap: An address outside of all arrays, a store to a read-only array, or a load of bytes
                of an UNWRITTEN array that nothing wrote, if such a finding ends the launch.
        """
        relative = (addresses - np.uint64(BASE)).view(np.int64)
        if not len(relative):
            return relative, False
        if self.aliases.size:
            relative = self._resolve_aliases(relative)
        slot = relative >> _SLOT
        has_slot = (slot >= 0) & (slot < self.arrays.shape[1])
        first, start, length, mode = np.take(self.arrays, slot, axis=1, mode="clip")
        at = relative - first
        if self.whole_words and size == 4:
            length = (length + 3) // 4 * 4
        outside = ~has_slot | (at < 0) | (at > length - size)
        if outside.any():
            lane = int(np.flatnonzero(outside)[0])
            address = int(addresses[lane])
            message = f"{size} bytes at {address:#x} do not lie in an argument's array"
            raise Trap("bounds", message, lane)
        at = at + start
        if write and (mode == READ_ONLY).any():
            raise Trap("readonly", "a store to an argument that is read-only")
        if not write and self.checked and self.strict and (mode == UNWRITTEN).any():
            cells = at[mode == UNWRITTEN] // self.cell
            is_written = self.written[cells] != 0
            if self.written_earlier.size:
                is_written |= self.written_earlier[cells]
            if not is_written.all():
                self.report_unwritten()
        return at, bool((mode != READ_ONLY).any())
