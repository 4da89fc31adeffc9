# SPDX-License-Identifier: BSD-3-Clause
"""The memory that client and server share, as the emulator's global memory."""

import fcntl
import mmap
import os

import numpy as np

from strix_emulate.device.protocol import BASE, ENTRY, HEADER, HEAP, LAUNCH, Kind, Refused, Status
from strix_emulate.errors import Trap
from strix_emulate.memory import READ_ONLY, WRITABLE, Arena

#: F_GET_SEALS and F_SEAL_SHRINK of Linux: a file that shrank would end this process.
_GET_SEALS, _SEAL_SHRINK = 1034, 2


class Pool:
    """The shared file. Raises Refused if it is none that can be relied on."""

    def __init__(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        try:
            sealed = fcntl.fcntl(descriptor, _GET_SEALS) & _SEAL_SHRINK
        except OSError:
            sealed = 0
        if size <= HEAP or not sealed:
            raise Refused(Status.INVALID_VALUE, "the pool is not a sealed file in memory")
        self.bytes = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        self.views = {n: self.bytes.view(f"u{n}") for n in (1, 2, 4, 8)}
        self.views[16] = self.bytes[: size // 16 * 16].view("c16")

    def entries(self) -> np.ndarray:
        """A copy of the table of allocations, by offset. Raises Refused if it makes no sense."""
        count = int(self.views[8][1])
        if count > (LAUNCH - HEADER) // ENTRY.itemsize:
            raise Refused(Status.INVALID_VALUE, f"the table of allocations has {count} entries")
        end = HEADER + count * ENTRY.itemsize
        table = self.bytes[HEADER:end].view(ENTRY).copy()
        total = np.uint64(len(self.bytes))
        start, size = table["offset"], table["size"]
        right = (start >= HEAP) & (start < total) & (size > 0) & (size <= total - start)
        if not right.all() or (start[:-1] + size[:-1] > start[1:]).any():
            raise Refused(Status.INVALID_VALUE, "the table of allocations is damaged")
        return table

    def image(self, offset: int, size: int) -> np.ndarray:
        """The bytes of the allocation for a module. Raises Refused if it is not one."""
        table = self.entries()
        found = table[(table["offset"] == offset) & (table["size"] == size)]
        if len(found) != 1 or found[0]["kind"] != Kind.IMAGE:
            raise Refused(Status.INVALID_VALUE, "a module is to be placed where nothing is for it")
        return self.bytes[offset : offset + size]


class DeviceMemory(Arena):
    """The pool during one launch: allocations may be read and written, arguments only read.

    cell, checked: as in :class:`strix_emulate.memory.Memory`. Unwritten memory is no trap: what
    the host wrote is not known.
    """

    def __init__(self, pool: Pool, cell: int, checked: bool, whole_words: bool) -> None:
        table = pool.entries()
        self.starts = np.concatenate([[LAUNCH], table["offset"].astype(np.int64)])
        ends = self.starts + np.concatenate([[HEAP - LAUNCH], table["size"].astype(np.int64)])
        super().__init__(int(ends[-1]), cell, checked, False)
        self.bytes, self.views = pool.bytes, pool.views
        self.ends = ends
        self.whole_words = whole_words

    def ranges(self) -> np.ndarray:
        """See :meth:`Arena.ranges`."""
        mode = np.where(np.arange(len(self.starts)) == 0, READ_ONLY, WRITABLE)
        rows = [self.starts + BASE, self.ends - self.starts, self.starts, mode]
        return np.ascontiguousarray(np.stack(rows, axis=1))

    def find(self, addresses, size: int, write: bool) -> tuple[np.ndarray, bool]:
        at = (addresses - np.uint64(BASE)).view(np.int64)
        if not len(at):
            return at, False
        array = np.searchsorted(self.starts, at, "right") - 1
        ends = np.take(self.ends, array, mode="clip")
        if self.whole_words and size == 4:
            ends = (ends + 3) // 4 * 4
        outside = (array < 0) | (at > ends - size)
        if outside.any():
            lane = int(np.flatnonzero(outside)[0])
            text = f"{size} bytes at {int(addresses[lane]):#x} do not lie in an allocation"
            raise Trap("bounds", text, lane)
        arguments = array == 0
        if write and arguments.any():
            lane = int(np.flatnonzero(arguments)[0])
            raise Trap("readonly", "a store to the kernel's arguments", lane)
        return at, not arguments.all()
