# SPDX-License-Identifier: BSD-3-Clause
"""Calls of the host from a kernel: printf, as the device libraries ask for it (clr's
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
END = _PAYLOADS + _COUNT * 4096
#: 64-bit words of a header: next, lanes, service and flags; of a payload, by lane.
_HEADER, _SLOT = 3, 8
_PRINTF = 2
_FREE, _READY = START // 8 + 3, START // 8 + 4
_SPECIFIER = re.compile(rb"%[^diouxXfFeEgGaAcspn%]*[diouxXfFeEgGaAcspn%]")
_SNPRINTF = ctypes.CDLL(None).snprintf


class Hostcalls:
    """The buffer of one launch. text: what the kernel printed, for the client's standard output."""

    def __init__(self, words: np.ndarray) -> None:
        """Take words, the pool as 64-bit ones."""
        self._words = words
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
        """Answer what waves ask. Raise Trap for what is not printf."""
        words = self._words
        ready, words[_READY] = int(words[_READY]), 0
        while ready:
            index = ready & (_COUNT - 1)
            header = words[_HEADERS // 8 + _HEADER * index :][:_HEADER]
            ready, lanes, service = int(header[0]), int(header[1]), int(header[2]) & 0xFFFFFFFF
            if service != _PRINTF:
                raise Trap("unknown", f"service {service} of the host (2 is printf) from a kernel")
            for lane in (i for i in range(64) if lanes >> i & 1):
                slot = words[_PAYLOADS // 8 + 512 * index + _SLOT * lane :][:_SLOT]
                self._add(slot)
            header[2] = int(header[2]) & ~(1 << 32)

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
