# SPDX-License-Identifier: BSD-3-Clause
"""The bytes of a memory, and loads and stores of them by many lanes at once."""

import numpy as np

from strix_emulate.memory.pages import shared_zeros


class Storage:
    """Bytes with offsets from 0 on.

    Attributes:
        name: Name of the memory in messages.
        size: Number of bytes.
        bytes: The bytes, followed by spare bytes, so that an access of several bytes may start at
            the last byte.
        views: The same bytes as unsigned words, by bytes of a word. Words of 16 bytes are
            complex128.
    """

    def __init__(self, name: str, size: int, shared: bool = False):
        self.name = name
        self.size = size
        room = (size + 31) // 16 * 16
        # The zeros of numpy take no memory until they are touched.
        self.bytes = shared_zeros(room) if shared else np.zeros(room, np.uint8)
        self.views = {n: self.bytes.view(f"u{n}") for n in (1, 2, 4, 8)}
        self.views[16] = self.bytes.view("c16")

    def load(self, at, size: int):
        """Load `size` bytes at each offset.

        Returns:
            (words, len(at)) uint32. Loads of 1 and 2 bytes are zero-extended.
        """
        is_aligned = size != 12 and not (at & (min(size, 16) - 1)).any()
        if is_aligned:
            values = np.take(self.views[size], at // size, mode="clip")
            if size < 4:
                return values.astype(np.uint32)[None]
            return values.view(np.uint32).reshape(len(at), size // 4).T
        if size >= 4 and not (at & 3).any():
            words = (at >> 2) + np.arange(size // 4)[:, None]
            return np.take(self.views[4], words, mode="clip")
        places = at + np.arange(size)[:, None]
        raw = np.take(self.bytes, places, mode="clip").astype(np.uint32)
        if size < 4:
            return sum(raw[i] << np.uint32(8 * i) for i in range(size))[None]
        return sum(raw[i::4] << np.uint32(8 * i) for i in range(4))

    def store(self, at, data, size: int) -> None:
        """Store the low `size` bytes of data, (words, len(at)) uint32, at each offset."""
        if size == 2 and not (at & 1).any():
            self.views[2][at >> 1] = data[0].astype(np.uint16)
        elif size >= 4 and not (at & 3).any():
            for i in range(size // 4):
                self.views[4][(at >> 2) + i] = data[i]
        else:
            for i in range(size):
                shifted = data[i // 4] >> np.uint32(8 * (i % 4))
                self.bytes[at + i] = shifted.astype(np.uint8)

    def differs(self, at, data, size: int) -> bool:
        """Return whether a store of the data would change a byte."""
        if size < 4:
            data = data & np.uint32((1 << 8 * size) - 1)
        return not np.array_equal(self.load(at, size), data)
