# SPDX-License-Identifier: BSD-3-Clause
"""Global memory: where arrays lie, and which accesses hit one."""

import numpy as np

from strix_emulate.errors import Trap
from strix_emulate.memory.happens_before import Order
from strix_emulate.memory.shadow import Memory

#: First address of global memory, of 48 bits, and the distance of arrays as a power of two.
BASE, _SLOT = 0x2000_0000_0000, 33
READ_ONLY, WRITABLE, UNWRITTEN = 1, 2, 3


class Arena(Memory):
    """Global memory: arrays far apart, each across a multiple of 4 GiB.

    So an address that misses its array by any distance lies nowhere, and a carry into the high half
    of an address that is lost shows.
    """

    def __init__(self, size: int, cell: int, checked: bool, strict: bool, shared: bool = False):
        super().__init__("global memory", size, cell, checked, strict, shared)
        self.one_workgroup = False
        self.order = Order() if checked else None
        #: whether aligned words may reach past an array's end: atomics of 16 bits are of 32 there
        self.whole_words = False
        #: addresses of the host that pointers in memory may hold, as (start, end, what to add)
        self.aliases = np.zeros((3, 0), np.int64)
        #: whether more than the kernel's waves may change it while they run
        self.peers = False
        self.top = 0
        #: by array: first address (less BASE), offset in bytes, length, mode
        self.arrays = np.zeros((4, 0), np.int64)

    def place(self, data: np.ndarray, mode: int) -> int:
        """Copy bytes in; return their address, a multiple of 16.

        No more than kernels may count on: then the 4 GiB boundary falls inside of rows, too.
        """
        start, number = self.top, self.arrays.shape[1]
        self.bytes[start : start + len(data)] = data
        first = (number << _SLOT) + (1 << (_SLOT - 1)) - len(data) // 2 // 16 * 16
        entry = np.array([[first], [start], [len(data)], [mode]])
        self.arrays = np.concatenate([self.arrays, entry], axis=1)
        self.top = (start + len(data) + 255) // 256 * 256
        return BASE + first

    def alias(self, host: int, length: int, address: int) -> None:
        """Make the array that was placed at the address reachable under the host's, too."""
        row = np.array([[host - BASE], [host + length - BASE], [address - host]])
        self.aliases = np.concatenate([self.aliases, row], axis=1)

    def _translated(self, relative):
        for start, end, more in self.aliases.T:
            relative = np.where((relative >= start) & (relative < end), relative + more, relative)
        return relative

    def fetch(self, address: int, size: int) -> np.ndarray:
        """Copy the first size bytes of the array that was placed at the address."""
        start = int(self.arrays[1, (address - BASE) >> _SLOT])
        return self.bytes[start : start + size].copy()

    def ranges(self) -> np.ndarray:
        """Tell C where memory is: rows of first address, bytes, offset and mode, in order."""
        first, start, length, mode = self.arrays
        rows = [np.stack([first + BASE, length, start, mode], axis=1)]
        for host, end, more in self.aliases.T.tolist():
            to = host + more >> _SLOT
            offset = int(start[to] + host + more - first[to])
            rows.append(np.array([[host + BASE, end - host, offset, mode[to]]]))
        found = np.concatenate(rows)
        return np.ascontiguousarray(found[np.argsort(found[:, 0])])

    def find(self, addresses, size: int, write: bool) -> tuple[np.ndarray, bool]:
        """Return offsets of addresses (uint64), and whether more than read-only memory is touched.

        Raises:
            Trap: outside of all arrays, a store to a read-only one, a load of what nothing wrote.
        """
        relative = (addresses - np.uint64(BASE)).view(np.int64)
        if not len(relative):
            return relative, False
        if self.aliases.size:
            relative = self._translated(relative)
        slot = relative >> _SLOT
        known = (slot >= 0) & (slot < self.arrays.shape[1])
        first, start, length, mode = np.take(self.arrays, slot, axis=1, mode="clip")
        at = relative - first
        if self.whole_words and size == 4:
            length = (length + 3) // 4 * 4
        outside = ~known | (at < 0) | (at > length - size)
        if outside.any():
            lane = int(np.flatnonzero(outside)[0])
            bad = int(addresses[lane])
            text = f"{size} bytes at {bad:#x} do not lie in an argument's array"
            raise Trap("bounds", text, lane)
        at = at + start
        if write and (mode == READ_ONLY).any():
            raise Trap("readonly", "a store to an argument that was given as read-only")
        if not write and self.checked and self.strict and (mode == UNWRITTEN).any():
            asked = at[mode == UNWRITTEN]
            if not self.written[asked // self.cell].all():
                self.findings.found("uninitialised", f"{self.name} is read before it is written")
        return at, bool((mode != READ_ONLY).any())
