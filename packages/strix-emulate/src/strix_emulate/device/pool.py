# SPDX-License-Identifier: BSD-3-Clause
"""The memory that client and server share, as the emulator's global memory."""

import ctypes
import fcntl
import mmap
import os

import numpy as np

from strix_emulate.device import hostcall
from strix_emulate.device.protocol import (
    BASE,
    ENTRY,
    HEADER,
    HEAP,
    LAUNCH,
    ROOM,
    VIEW,
    VIEWS,
    Kind,
    Refused,
    Status,
)
from strix_emulate.errors import Trap
from strix_emulate.memory.arena import READ_ONLY, WRITABLE, Arena

#: F_GET_SEALS and F_SEAL_SHRINK of Linux.
_GET_SEALS, _SEAL_SHRINK = 1034, 2


_PAGE = 4096


def _up(value: int, align: int) -> int:
    return -(-value // align) * align


def _sealed(descriptor: int) -> bool:
    """Return whether a file cannot shrink, which would end this process."""
    try:
        return bool(fcntl.fcntl(descriptor, _GET_SEALS) & _SEAL_SHRINK)
    except OSError:
        return False


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_NONE, _FIXED, _NORESERVE = 0, 0x10, 0x4000


class Pool:
    """The shared file, and behind it room for what other processes share. Raises Refused if it is
    none that can be relied on."""

    def __init__(self, descriptor: int) -> None:
        self.size = size = os.fstat(descriptor).st_size
        if size <= HEAP or not _sealed(descriptor):
            raise Refused(Status.INVALID_VALUE, "the pool is not a sealed file in memory")
        self._foreign: list[tuple[int, int]] = []
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._start = _LIBC.mmap(None, size + ROOM, _NONE, flags, -1, 0)
        self._map(0, size, descriptor, 0)
        whole = (size + ROOM) // 16 * 16
        self.bytes = np.frombuffer((ctypes.c_ubyte * whole).from_address(self._start), np.uint8)
        self.views = {n: self.bytes.view(f"u{n}") for n in (1, 2, 4, 8)}
        self.views[16] = self.bytes.view("c16")

    def _map(self, offset: int, size: int, descriptor: int, start: int) -> None:
        rights, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED
        place = _LIBC.mmap(self._start + offset, size, rights, flags, descriptor, start)
        if place != self._start + offset:
            raise Refused(Status.OUT_OF_MEMORY, f"cannot map {size} bytes of shared memory")

    def add(self, offset: int, size: int, path: str, start: int) -> None:
        """Map size bytes of another pool, from start on. Raise Refused."""
        if offset < self.size or offset % 4096 or start % 4096 or offset + size > self.size + ROOM:
            raise Refused(Status.INVALID_VALUE, "memory of another process where none can be")
        try:
            descriptor = os.open(path, os.O_RDWR)
        except (OSError, ValueError) as error:
            raise Refused(Status.INVALID_VALUE, f"no memory of another process: {error}") from error
        try:
            if not _sealed(descriptor) or start + size > os.fstat(descriptor).st_size:
                raise Refused(Status.INVALID_VALUE, f"{path} is not a pool")
            self._map(offset, size, descriptor, start)
            self._foreign.append((offset, offset + size))
        finally:
            os.close(descriptor)

    def _is_mapped(self, start: np.ndarray, size: np.ndarray) -> np.ndarray:
        """Return whether ranges of bytes lie in the pool, or in what was added to it."""
        found = (start >= HEAP) & (start < self.size) & (size > 0) & (size <= self.size - start)
        for first, end in self._foreign:
            found |= (start >= first) & (start < end) & (size > 0) & (size <= end - start)
        return found

    def entries(self) -> np.ndarray:
        """Copy the table of allocations, by offset. Raise Refused if it makes no sense."""
        count = int(self.views[8][1])
        if count > (LAUNCH - HEADER) // ENTRY.itemsize:
            raise Refused(Status.INVALID_VALUE, f"the table of allocations has {count} entries")
        end = HEADER + count * ENTRY.itemsize
        table = self.bytes[HEADER:end].view(ENTRY).copy()
        start, size = table["offset"], table["size"]
        if not self._is_mapped(start, size).all() or (start[:-1] + size[:-1] > start[1:]).any():
            raise Refused(Status.INVALID_VALUE, "the table of allocations is damaged")
        return table

    def allocate(self, size: int, align: int) -> int:
        """Allocate memory that stays, while the client waits; return its offset, or 0."""
        table, start = self.entries(), _up(HEAP, align)
        for entry in table:
            if int(entry["offset"]) >= start + size + _PAGE:
                break
            start = _up(int(entry["offset"] + entry["size"]) + _PAGE, align)
        if start + size + _PAGE > self.size or len(table) >= (LAUNCH - HEADER) // ENTRY.itemsize:
            return 0
        at = np.searchsorted(table["offset"], start)
        table = np.insert(table, at, np.array((start, size, Kind.IMAGE, 0, 0), ENTRY))
        self.bytes[HEADER : HEADER + table.nbytes] = table.view(np.uint8)
        self.views[8][1] = len(table)
        return start

    def pieces(self) -> np.ndarray:
        """Copy the table of views, by address. Raise Refused if it makes no sense."""
        count = int(self.views[8][2])
        if count > (HEAP - VIEWS) // VIEW.itemsize:
            raise Refused(Status.INVALID_VALUE, f"the table of views has {count} entries")
        table = self.bytes[VIEWS : VIEWS + count * VIEW.itemsize].view(VIEW).copy()
        start, size, first = table["address"], table["size"], table["offset"]
        if not self._is_mapped(first, size).all() or (start[:-1] + size[:-1] > start[1:]).any():
            raise Refused(Status.INVALID_VALUE, "the table of views is damaged")
        return table

    def image(self, offset: int, size: int) -> np.ndarray:
        """Return the bytes of the allocation for a module. Raise Refused if it is not one."""
        table = self.entries()
        found = table[(table["offset"] == offset) & (table["size"] == size)]
        if len(found) != 1 or found[0]["kind"] != Kind.IMAGE:
            raise Refused(Status.INVALID_VALUE, "a module is to be placed where nothing is for it")
        return self.bytes[offset : offset + size]


class DeviceMemory(Arena):
    """The pool during one launch: allocations may be read and written, arguments only read.

    cell, checked: as in :class:`memory.arena.Memory`. Unwritten memory is no trap: what
    the host wrote is not known.
    """

    def __init__(self, pool: Pool, cell: int, checked: bool, whole_words: bool) -> None:
        table = pool.entries()
        hidden = Kind.PHYSICAL | Kind.REGISTERED
        end = int(table["offset"][-1] + table["size"][-1]) if len(table) else HEAP
        table = table[(table["kind"] & hidden == 0) & (table["kind"] != Kind.GRAPH)]
        # what a launch needs: arguments, calls of the host, the packet
        self.starts = np.concatenate(
            [[LAUNCH, hostcall.START, hostcall.END], table["offset"].astype(np.int64)]
        )
        table_ends = (table["offset"] + table["size"]).astype(np.int64)
        ends = np.concatenate([[hostcall.START, hostcall.END, HEAP], table_ends])
        super().__init__(end, cell, checked, False)
        self.bytes, self.views = pool.bytes, pool.views
        self.ends = ends
        # threads of the program, and other processes
        self.peers = True
        self.whole_words = whole_words
        views = pool.pieces()
        views = views[views["access"] != 0]
        self.seen = views["address"].astype(np.int64) - BASE
        self.seen_end = self.seen + views["size"].astype(np.int64)
        self.moved = views["offset"].astype(np.int64) - self.seen
        self.seen_mode = np.where(views["access"] == 1, READ_ONLY, WRITABLE)

    def ranges(self) -> np.ndarray:
        """Tell C where memory is, as :meth:`Arena.ranges` does."""
        number = np.arange(len(self.starts))
        mode = np.where((number == 0) | (number == 2), READ_ONLY, WRITABLE)
        rows = np.stack([self.starts + BASE, self.ends - self.starts, self.starts, mode], axis=1)
        if len(self.seen):
            size = self.seen_end - self.seen
            more = [self.seen + BASE, size, self.seen + self.moved, self.seen_mode]
            rows = np.concatenate([rows, np.stack(more, axis=1)])
            rows = rows[np.argsort(rows[:, 0])]
        return np.ascontiguousarray(rows)

    def find(self, addresses, size: int, write: bool) -> tuple[np.ndarray, bool]:
        """Find memory that the program allocated, as :meth:`Arena.find` does."""
        at = (addresses - np.uint64(BASE)).view(np.int64)
        if not len(at):
            return at, False
        array = np.searchsorted(self.starts, at, "right") - 1
        ends = np.take(self.ends, array, mode="clip")
        if self.whole_words and size == 4:
            ends = (ends + 3) // 4 * 4
        outside = (array < 0) | (at > ends - size)
        if len(self.seen) and outside.any():
            view = np.searchsorted(self.seen, at, "right") - 1
            here = outside & (view >= 0) & (at <= self.seen_end[view] - size)
            if write and (self.seen_mode[view[here]] == READ_ONLY).any():
                raise Trap("readonly", "a store to memory that is mapped for reading")
            at = np.where(here, at + self.moved[view], at)
            array = np.where(here, 3, array)
            outside &= ~here
        if outside.any():
            lane = int(np.flatnonzero(outside)[0])
            text = f"{size} bytes at {int(addresses[lane]):#x} do not lie in an allocation"
            raise Trap("bounds", text, lane)
        arguments = (array == 0) | (array == 2)
        if write and arguments.any():
            lane = int(np.flatnonzero(arguments)[0])
            raise Trap("readonly", "a store to the kernel's arguments", lane)
        return at, not arguments.all()
