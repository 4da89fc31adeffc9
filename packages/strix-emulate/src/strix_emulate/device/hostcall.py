# SPDX-License-Identifier: BSD-3-Clause
"""Calls of the host from a kernel: printf and malloc, as the device libraries ask for them (clr's
rocclr/device/devhostcall.cpp, devhcmessages.cpp and devhcprintf.cpp).

A wave takes a packet from a stack of free ones, fills it, puts it on the stack of ready ones and
waits until its flag is gone. The server works them off while waves wait.
"""

import ctypes
import re
import sys

import numpy as np

from strix_emulate.device.protocol import BASE, LAUNCH
from strix_emulate.errors import Trap

#: Offsets in the pool: the buffer's head, its signal, headers and payloads of packets, the end.
START = LAUNCH + (64 << 10)
_SIGNAL, _HEADERS, _PAYLOADS, _COUNT = START + 256, START + 4096, START + 8192, 64
#: What malloc keeps in a kernel's global memory (ockl's dm.cl), zero at the start of the process.
HEAP = _PAYLOADS + _COUNT * 4096
END = HEAP + (128 << 10)
#: 64-bit words of a header: next, lanes, service and flags; of a payload, by lane.
_HEADER, _SLOT = 3, 8
_PRINTF, _MEMORY = 2, 3
_SLAB = 2 << 20
_FREE, _READY = START // 8 + 3, START // 8 + 4
_SPECIFIER = re.compile(rb"%[^diouxXfFeEgGaAcspn%]*[diouxXfFeEgGaAcspn%]")
_SNPRINTF = ctypes.CDLL(None).snprintf


class Heap:
    """The memory of kernels' malloc, which asks the host for large pieces of it.

    Addresses of pieces are at multiples of 4 KiB, of those from 2 MiB on at multiples of 2 MiB: so
    the device libraries tell them from what they take out of one.
    """

    def __init__(self, start: int, size: int) -> None:
        """Take the address, a multiple of 2 MiB, and bytes."""
        self._free = [(start, start + size)]
        self._given: dict[int, int] = {}

    def take(self, size: int) -> int:
        """Return the address of so many bytes, or 0 where no room is left."""
        unit = _SLAB if size >= _SLAB else 4096
        for i, (start, end) in enumerate(self._free):
            at = -(-start // unit) * unit
            behind = at + -(-size // 4096) * 4096
            if behind <= end:
                self._free[i : i + 1] = [part for part in ((start, at), (behind, end))
                                         if part[0] < part[1]]  # fmt: skip
                self._given[at] = behind
                return at
        return 0

    def give_back(self, address: int) -> None:
        """Take back what :meth:`take` gave. Raise Trap for anything else."""
        if address not in self._given:
            raise Trap("bounds", f"free({address:#x}) in a kernel, of what malloc did not give")
        merged: list[tuple[int, int]] = []
        for start, end in sorted([*self._free, (address, self._given.pop(address))]):
            if merged and merged[-1][1] == start:
                start = merged.pop()[0]
            merged.append((start, end))
        self._free = merged


class Hostcalls:
    """The buffer of one launch. text: what the kernel printed, for the client's standard output."""

    def __init__(self, words: np.ndarray, heap: Heap | None = None) -> None:
        """Take words, the pool as 64-bit ones."""
        self._words, self._heap = words, heap
        self._messages: dict[int, bytearray] = {}
        self.text = b""
        head = [BASE + _HEADERS, BASE + _PAYLOADS, BASE + _SIGNAL, _COUNT - 1, 0, _COUNT - 1]
        words[START // 8 : START // 8 + 6] = head
        words[_SIGNAL // 8 : _SIGNAL // 8 + 8] = [1, 0, 0, 0, 0, 0, 0, 0]
        headers = words[_HEADERS // 8 : _HEADERS // 8 + _HEADER * _COUNT].reshape(_COUNT, _HEADER)
        headers[:] = 0
        # a pointer is an index with a tag above it, so that none is 0
        headers[1:, 0] = [_COUNT, *range(1, _COUNT - 1)]

    address = BASE + START

    def grid(self, groups: int, threads: int) -> int:
        """Return the address of what grid.sync() counts with (mg_info of the device libraries).

        Of one grid with so many workgroups and threads, at its first barrier.
        """
        at = (START + 512) // 8
        self._words[at : at + 6] = [0, 1 << 32, 0, threads, 0, groups]
        return BASE + START + 512

    def serve(self) -> None:
        """Answer what waves ask. Raise Trap for what is neither printf nor malloc."""
        words = self._words
        ready, words[_READY] = int(words[_READY]), 0
        while ready:
            index = ready & (_COUNT - 1)
            header = words[_HEADERS // 8 + _HEADER * index :][:_HEADER]
            ready, lanes, service = int(header[0]), int(header[1]), int(header[2]) & 0xFFFFFFFF
            if service not in (_PRINTF, _MEMORY):
                text = f"service {service} of the host (2 is printf, 3 malloc) from a kernel"
                raise Trap("unknown", text)
            answer = self._add if service == _PRINTF else self._memory
            for lane in (i for i in range(64) if lanes >> i & 1):
                slot = words[_PAYLOADS // 8 + 512 * index + _SLOT * lane :][:_SLOT]
                answer(slot)
            header[2] = int(header[2]) & ~(1 << 32)

    def _memory(self, slot: np.ndarray) -> None:
        """Free what slot[0] is the address of, or put memory of slot[1] bytes there."""
        address, size = int(slot[0]), int(slot[1])
        slot[0] = 0
        if self._heap is not None and address:
            self._heap.give_back(address)
        elif self._heap is not None:
            slot[0] = self._heap.take(size)

    def _add(self, slot: np.ndarray) -> None:
        """Add part of a message; slot holds its number, length, and whether it is first or last."""
        asked = int(slot[0])
        number = asked >> 8
        if asked & 1:
            number = next(i for i in range(len(self._messages) + 1) if i not in self._messages)
            self._messages[number] = bytearray()
            slot[0] = asked & 0xFE | number << 8
        message = self._messages.get(number)
        if message is None:
            raise Trap("unknown", "printf from a kernel goes on with what it did not begin")
        message += slot[1 : 1 + (asked >> 5 & 7)].tobytes()
        if asked & 2:
            del self._messages[number]
            text = _formatted(bytes(message[8:]))
            if message[0] & 1:
                sys.stderr.buffer.write(text)
                sys.stderr.flush()
            else:
                self.text += text
            slot[0] = len(text)


def _string(data: bytes) -> tuple[bytes, bytes]:
    """Split a text that is filled up to 8 bytes from what comes behind it."""
    text = data.split(b"\0", 1)[0]
    return text, data[len(text) // 8 * 8 + 8 :]


def _formatted(data: bytes) -> bytes:
    """Return what C prints for a format and the arguments behind it."""
    form, rest = _string(data)
    found, at = b"", 0
    for match in _SPECIFIER.finditer(form):
        found += form[at : match.start()]
        at = match.end()
        specifier, kind = match[0], match[0][-1:]
        if kind == b"%":
            found += b"%"
            continue
        arguments: list = []
        for _ in range(specifier.count(b"*")):
            arguments.append(ctypes.c_int(int.from_bytes(rest[:4], "little")))
            rest = rest[8:]
        if kind == b"s":
            text, rest = _string(rest)
            arguments.append(ctypes.c_char_p(text))
        else:
            word, rest = rest[:8].ljust(8, b"\0"), rest[8:]
            of = ctypes.c_double if kind in b"fFeEgGaA" else ctypes.c_uint64
            arguments.append(of.from_buffer_copy(word))
        if kind == b"n":
            continue
        size = _SNPRINTF(None, 0, specifier, *arguments)
        room = ctypes.create_string_buffer(max(size, 0) + 1)
        _SNPRINTF(room, len(room), specifier, *arguments)
        found += room.value
    return found + form[at:]
