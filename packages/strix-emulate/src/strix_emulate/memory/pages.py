# SPDX-License-Identifier: BSD-3-Clause
"""Zeroed arrays for large shadows. Later launches reuse their pages."""

import mmap
import os
import sys
from pathlib import Path

import numpy as np

#: MAP_NORESERVE of Linux, which Python 3.11 does not name.
_NORESERVE = 0x4000
#: Arrays with fewer bytes are ordinary numpy arrays.
_MAPPED_SIZE = 1 << 20
#: Maximum bytes of pages that are kept for later launches.
_CACHE_LIMIT = 1 << 26
#: Pages that launches have released, by size in bytes. Each size is a power of two.
_cache: dict[int, list[np.ndarray]] = {}
_PAGE = mmap.PAGESIZE


def shared_zeros(size: int) -> np.ndarray:
    """Return zeroed bytes that this process shares with processes forked later."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8, size)


def lazy_zeros(count: int, dtype) -> tuple[np.ndarray, np.ndarray | None]:
    """Return zeros that take no memory until they are touched, and the pages that contain them.

    Pages of an earlier launch are reused, because a page fault takes longer than everything that a
    launch does with most pages. The emulated device needs zeros that take no memory: its address
    range includes room for the memory of other processes, and the shadow of the whole range would
    take many times a machine's memory.

    Returns:
        The array, and its pages for `release`. The pages are None if the array is small, or if the
        system is not Linux.
    """
    size = count * np.dtype(dtype).itemsize
    if size < _MAPPED_SIZE or sys.platform != "linux":
        return np.zeros(count, dtype), None
    room = 1 << (size - 1).bit_length()
    cached = _cache.get(room)
    if cached:
        pages = cached.pop()
        _clear(pages)
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        pages = np.frombuffer(mmap.mmap(-1, room, flags), np.uint8)
    return pages[:size].view(dtype), pages


def release(pages: np.ndarray) -> None:
    """Keep pages for later launches, unless too many are kept already."""
    if cached_bytes() + len(pages) <= _CACHE_LIMIT:
        _cache.setdefault(len(pages), []).append(pages)


def cached_bytes() -> int:
    """Return the bytes of all pages that are kept."""
    return sum(size * len(pages) for size, pages in _cache.items())


def _clear(pages: np.ndarray) -> None:
    """Clear the pages that were touched, according to /proc/self/pagemap.

    If a sandbox hides /proc/self/pagemap, all pages are cleared.
    """
    count = len(pages) // _PAGE
    first = pages.ctypes.data // _PAGE
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
            raw = os.pread(file.fileno(), 8 * count, 8 * first)
        entries = np.frombuffer(raw, np.uint64)
    except OSError:
        entries = np.empty(0, np.uint64)
    if len(entries) != count:
        pages[:] = 0
        return
    # Bit 62 of an entry means that the page is swapped out, and bit 63 that it is present.
    touched = np.flatnonzero(entries >> np.uint64(62))
    pages.reshape(count, _PAGE)[touched] = 0
