# SPDX-License-Identifier: BSD-3-Clause
"""The pool: the memory that client and server share, used as the emulator's global memory."""

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
_GET_SEALS = 1034
_SEAL_SHRINK = 2
#: PROT_NONE, MAP_FIXED and MAP_NORESERVE of Linux.
_NONE = 0
_FIXED = 0x10
_NORESERVE = 0x4000
_PAGE = 4096
_MAX_ENTRIES = (LAUNCH - HEADER) // ENTRY.itemsize
_MAX_VIEWS = (HEAP - VIEWS) // VIEW.itemsize

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]


def _round_up(value: int, align: int) -> int:
    return -(-value // align) * align


def _is_sealed(descriptor: int) -> bool:
    """Return whether a file is sealed, so that it cannot shrink.

    If a mapped file shrinks, an access to the missing part ends the process.
    """
    try:
        return bool(fcntl.fcntl(descriptor, _GET_SEALS) & _SEAL_SHRINK)
    except OSError:
        return False


def _overlaps(start: np.ndarray, size: np.ndarray) -> bool:
    """Return whether ranges of bytes overlap, or are not sorted."""
    return bool((start[:-1] + size[:-1] > start[1:]).any())


class Pool:
    """The shared file in memory. It is followed by address space for pools of other processes.

    Attributes:
        size: Bytes of the file.
        bytes: The memory: the file, and the address space that follows it.
        views: The memory as words, by bytes of a word.
    """

    def __init__(self, descriptor: int) -> None:
        """Map the file.

        Raises:
            Refused: The file is not sealed, or too small.
        """
        self.size = os.fstat(descriptor).st_size
        if self.size <= HEAP or not _is_sealed(descriptor):
            message = "the pool is too small, or is not a sealed file in memory"
            raise Refused(Status.INVALID_VALUE, message)
        #: (start, end) of each range that `add` has mapped, as offsets.
        self._foreign: list[tuple[int, int]] = []
        room = self.size + ROOM
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._start = _LIBC.mmap(None, room, _NONE, flags, -1, 0)
        self._map(0, self.size, descriptor, 0)
        mapped = (ctypes.c_ubyte * (room // 16 * 16)).from_address(self._start)
        self.bytes = np.frombuffer(mapped, np.uint8)
        self.views = {n: self.bytes.view(f"u{n}") for n in (1, 2, 4, 8)}
        self.views[16] = self.bytes.view("c16")

    def _map(
        self,
        offset: int,
        size: int,
        descriptor: int,
        start: int,
    ) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED | _FIXED
        address = self._start + offset
        mapped = _LIBC.mmap(address, size, protection, flags, descriptor, start)
        if mapped != address:
            raise Refused(Status.OUT_OF_MEMORY, f"cannot map {size} bytes of shared memory")

    def add(
        self,
        offset: int,
        size: int,
        path: str,
        start: int,
    ) -> None:
        """Map bytes of another process's pool.

        Args:
            offset: Offset in this pool.
            size: Number of bytes.
            path: File of the other pool.
            start: Offset in the other pool.

        Raises:
            Refused: The file is not a pool, or the offsets are not valid.
        """
        is_aligned = offset % _PAGE == 0 and start % _PAGE == 0
        is_behind = offset >= self.size and offset + size <= self.size + ROOM
        if not is_aligned or not is_behind:
            raise Refused(Status.INVALID_VALUE, "invalid offset of another process's memory")
        try:
            descriptor = os.open(path, os.O_RDWR)
        except (OSError, ValueError) as error:
            message = f"cannot open another process's memory: {error}"
            raise Refused(Status.INVALID_VALUE, message) from error
        try:
            if not _is_sealed(descriptor) or start + size > os.fstat(descriptor).st_size:
                message = f"{path} is not another process's device memory, or is too small"
                raise Refused(Status.INVALID_VALUE, message)
            self._map(offset, size, descriptor, start)
            self._foreign.append((offset, offset + size))
        finally:
            os.close(descriptor)

    def _is_mapped(self, start: np.ndarray, size: np.ndarray) -> np.ndarray:
        """Return which ranges lie in the pool from HEAP on, or in memory that `add` has mapped.

        An empty range does not.
        """
        has_bytes = size > 0
        mapped = (start >= HEAP) & (start < self.size) & (size <= self.size - start)
        for first, end in self._foreign:
            mapped |= (start >= first) & (start < end) & (size <= end - start)
        return mapped & has_bytes

    def entries(self) -> np.ndarray:
        """Return a copy of the table of allocations, sorted by offset.

        Raises:
            Refused: The table is damaged.
        """
        count = int(self.views[8][1])
        if count > _MAX_ENTRIES:
            raise Refused(Status.INVALID_VALUE, f"the table of allocations has {count} entries")
        end = HEADER + count * ENTRY.itemsize
        table = self.bytes[HEADER:end].view(ENTRY).copy()
        start = table["offset"]
        size = table["size"]
        if not self._is_mapped(start, size).all() or _overlaps(start, size):
            raise Refused(Status.INVALID_VALUE, "the table of allocations is damaged")
        return table

    def allocate(self, size: int, align: int) -> int:
        """Allocate memory for the lifetime of the client. The client waits during this call.

        Returns:
            The offset of the memory, or 0 if there is not enough memory or the table is full.
        """
        table = self.entries()
        start = _round_up(HEAP, align)
        for entry in table:
            if int(entry["offset"]) >= start + size + _PAGE:
                break
            end = int(entry["offset"] + entry["size"])
            start = _round_up(end + _PAGE, align)
        if start + size + _PAGE > self.size or len(table) >= _MAX_ENTRIES:
            return 0
        at = np.searchsorted(table["offset"], start)
        entry = np.array((start, size, Kind.IMAGE, 0, 0, 0, 0), ENTRY)
        table = np.insert(table, at, entry)
        self.bytes[HEADER : HEADER + table.nbytes] = table.view(np.uint8)
        self.views[8][1] = len(table)
        return start

    def mapped_views(self) -> np.ndarray:
        """Return a copy of the table of views, sorted by address.

        Raises:
            Refused: The table is damaged.
        """
        count = int(self.views[8][2])
        if count > _MAX_VIEWS:
            raise Refused(Status.INVALID_VALUE, f"the table of views has {count} entries")
        table = self.bytes[VIEWS : VIEWS + count * VIEW.itemsize].view(VIEW).copy()
        size = table["size"]
        if not self._is_mapped(table["offset"], size).all() or _overlaps(table["address"], size):
            raise Refused(Status.INVALID_VALUE, "the table of views is damaged")
        return table

    def image(self, offset: int, size: int) -> np.ndarray:
        """Return the bytes of the allocation for a module's image.

        Raises:
            Refused: There is no such allocation.
        """
        table = self.entries()
        matching = table[(table["offset"] == offset) & (table["size"] == size)]
        if len(matching) != 1 or matching[0]["kind"] != Kind.IMAGE:
            raise Refused(Status.INVALID_VALUE, "there is no allocation for the module's image")
        return self.bytes[offset : offset + size]


class DeviceMemory(Arena):
    """The pool during one launch.

    A kernel may read and write allocations, but only read its arguments and the dispatch packet.
    Reads of unwritten memory are not reported, because the emulator does not know which memory the
    host wrote.

    Attributes:
        starts, ends: Start and end offsets of the ranges that a kernel may access without a view,
            sorted: arguments, hostcalls, dispatch packet, and allocations. Allocations that only
            views reach, and memory that is only reserved for a graph, are left out.
        view_starts, view_ends: Start and end addresses of the views, minus BASE.
        view_distances: For each view, its offset in the pool minus its start in `view_starts`.
        view_modes: READ_ONLY or WRITABLE for each view.
    """

    def __init__(
        self,
        pool: Pool,
        cell: int,
        checked: bool,
        whole_words: bool,
    ) -> None:
        """Describe the pool to one launch. See `Arena` for the arguments."""
        table = pool.entries()
        end = int(table["offset"][-1] + table["size"][-1]) if len(table) else HEAP
        is_hidden = table["kind"] & (Kind.PHYSICAL | Kind.REGISTERED) != 0
        table = table[~is_hidden & (table["kind"] != Kind.GRAPH)]
        allocated = table["offset"].astype(np.int64)
        allocated_ends = (table["offset"] + table["size"]).astype(np.int64)
        super().__init__(end, cell, checked, False)
        self.bytes = pool.bytes
        self.views = pool.views
        # The first three ranges are arguments, hostcalls and dispatch packet.
        self.starts = np.concatenate([[LAUNCH, hostcall.START, hostcall.END], allocated])
        self.ends = np.concatenate([[hostcall.START, hostcall.END, HEAP], allocated_ends])
        # Threads of the program and other processes may change the memory during a launch.
        self.peers = True
        self.whole_words = whole_words
        views = pool.mapped_views()
        views = views[views["access"] != 0]
        self.view_starts = views["address"].astype(np.int64) - BASE
        self.view_ends = self.view_starts + views["size"].astype(np.int64)
        self.view_distances = views["offset"].astype(np.int64) - self.view_starts
        self.view_modes = np.where(views["access"] == 1, READ_ONLY, WRITABLE)

    def ranges(self) -> np.ndarray:
        """Return the address ranges for C, as :meth:`Arena.ranges` does."""
        number = np.arange(len(self.starts))
        mode = np.where(_is_argument(number), READ_ONLY, WRITABLE)
        columns = [self.starts + BASE, self.ends - self.starts, self.starts, mode]
        rows = np.stack(columns, axis=1)
        if len(self.view_starts):
            columns = [
                self.view_starts + BASE,
                self.view_ends - self.view_starts,
                self.view_starts + self.view_distances,
                self.view_modes,
            ]
            rows = np.concatenate([rows, np.stack(columns, axis=1)])
            rows = rows[np.argsort(rows[:, 0])]
        return np.ascontiguousarray(rows)

    def find(
        self,
        addresses,
        size: int,
        write: bool,
    ) -> tuple[np.ndarray, bool]:
        """Find memory that the program allocated, as :meth:`Arena.find` does."""
        at = (addresses - np.uint64(BASE)).view(np.int64)
        if not len(at):
            return at, False
        array = np.searchsorted(self.starts, at, "right") - 1
        ends = np.take(self.ends, array, mode="clip")
        if self.whole_words and size == 4:
            ends = (ends + 3) // 4 * 4
        outside = (array < 0) | (at > ends - size)
        if len(self.view_starts) and outside.any():
            in_view, at = self._find_in_views(at, size, write, outside)
            # An access to a view gets a number that no range in `starts` has.
            array = np.where(in_view, len(self.starts), array)
            outside &= ~in_view
        if outside.any():
            lane = int(np.flatnonzero(outside)[0])
            message = f"{size} bytes at {int(addresses[lane]):#x} do not lie in an allocation"
            raise Trap("bounds", message, lane)
        arguments = _is_argument(array)
        if write and arguments.any():
            lane = int(np.flatnonzero(arguments)[0])
            raise Trap("readonly", "a store to the kernel's arguments", lane)
        return at, not arguments.all()

    def _find_in_views(
        self,
        at: np.ndarray,
        size: int,
        write: bool,
        outside: np.ndarray,
    ):
        """Return flags of the accesses that hit a view, and the offsets of all accesses."""
        view = np.searchsorted(self.view_starts, at, "right") - 1
        in_view = outside & (view >= 0) & (at <= self.view_ends[view] - size)
        if write and (self.view_modes[view[in_view]] == READ_ONLY).any():
            raise Trap("readonly", "a store to memory that is mapped only for reading")
        return in_view, np.where(in_view, at + self.view_distances[view], at)


def _is_argument(array):
    """Return by number of a range whether it has the arguments or the dispatch packet.

    The numbers are those of the ranges in `DeviceMemory.starts`.
    """
    return (array == 0) | (array == 2)
