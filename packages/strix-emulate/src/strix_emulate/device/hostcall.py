# SPDX-License-Identifier: BSD-3-Clause
"""Calls of the host from a kernel: printf and malloc, with the protocol of the device libraries.

The protocol is that of clr's rocclr/device/devhostcall.cpp, devhcmessages.cpp and devhcprintf.cpp.
A wave takes a packet from a stack of free packets, fills it, pushes it onto a stack of ready
packets, and waits until the packet's flag is cleared. The server answers the packets while waves
wait.
"""

import ctypes
import re
import sys

import numpy as np

from strix_emulate.device.protocol import BASE, LAUNCH
from strix_emulate.errors import Trap

#: Offsets in the pool: of the buffer of hostcalls, and of its signal, headers and payloads.
START = LAUNCH + (64 << 10)
_SIGNAL = START + 256
_HEADERS = START + 4096
_PAYLOADS = START + 8192
#: Offset in the pool of the structure mg_info, which grid.sync() uses.
_GRID = START + 512
#: Number of packets.
_COUNT = 64
_PAYLOAD_SIZE = 4096
#: Offset in the pool of malloc's state (ockl's dm.cl), which must be zero when the process starts.
HEAP = _PAYLOADS + _COUNT * _PAYLOAD_SIZE
END = HEAP + (128 << 10)
#: Number of 64-bit words of a packet's header. The words are: the next packet; the lanes; the
#: service and flags.
_HEADER_WORDS = 3
#: Number of 64-bit words of a lane's slot in a payload.
_SLOT_WORDS = 8
#: Offset in the pool of the stack of ready packets, in 64-bit words.
_READY = START // 8 + 4
#: Services of the host.
_PRINTF = 2
_MEMORY = 3
#: Flag of a packet that is not answered yet.
_PENDING = 1 << 32
#: Bits of the first word of a printf slot, for the first and the last part of a message.
_IS_FIRST = 1
_IS_LAST = 2
_PAGE = 4096
_SLAB = 2 << 20
_SPECIFIER = re.compile(rb"%[^diouxXfFeEgGaAcspn%]*[diouxXfFeEgGaAcspn%]")
_SNPRINTF = ctypes.CDLL(None).snprintf


class Heap:
    """The memory from which malloc in kernels requests large blocks.

    The address of a block of 2 MiB or more is a multiple of 2 MiB. The address of a smaller block
    is a multiple of 4 KiB. By this alignment, the device libraries distinguish a block from the
    smaller pieces into which they divide a block.
    """

    def __init__(self, start: int, size: int) -> None:
        """Begin with all memory free. `start` is an address, a multiple of 2 MiB."""
        self._free = [(start, start + size)]
        #: End of each allocated block, by the block's address.
        self._allocated: dict[int, int] = {}

    def take(self, size: int) -> int:
        """Allocate a block of `size` bytes. Return its address, or 0 if there is no room."""
        unit = _SLAB if size >= _SLAB else _PAGE
        for i, (start, end) in enumerate(self._free):
            first = -(-start // unit) * unit
            behind = first + -(-size // _PAGE) * _PAGE
            if behind <= end:
                parts = [(start, first), (behind, end)]
                self._free[i : i + 1] = [part for part in parts if part[0] < part[1]]
                self._allocated[first] = behind
                return first
        return 0

    def give_back(self, address: int) -> None:
        """Free the block at an address that :meth:`take` returned.

        Raises:
            Trap: Nothing is allocated at the address.
        """
        if address not in self._allocated:
            message = f"free({address:#x}) in a kernel: no allocation starts at this address"
            raise Trap("bounds", message)
        freed = (address, self._allocated.pop(address))
        merged: list[tuple[int, int]] = []
        for start, end in sorted([*self._free, freed]):
            if merged and merged[-1][1] == start:
                start = merged.pop()[0]
            merged.append((start, end))
        self._free = merged


class Hostcalls:
    """The buffer of hostcalls of one launch.

    Attributes:
        address: Address of the buffer.
        text: The text that the kernel printed to standard output.
    """

    address = BASE + START

    def __init__(self, words: np.ndarray, heap: Heap | None = None) -> None:
        """Prepare the buffer.

        Args:
            words: The pool as 64-bit words.
            heap: The memory for malloc, or None.
        """
        self._words = words
        self._heap = heap
        self._messages: dict[int, bytearray] = {}
        self.text = b""
        head = START // 8
        words[head : head + 6] = [
            BASE + _HEADERS,
            BASE + _PAYLOADS,
            BASE + _SIGNAL,
            _COUNT - 1,
            0,
            _COUNT - 1,
        ]
        words[_SIGNAL // 8 : _SIGNAL // 8 + 8] = [1, 0, 0, 0, 0, 0, 0, 0]
        first = _HEADERS // 8
        headers = words[first : first + _HEADER_WORDS * _COUNT].reshape(_COUNT, _HEADER_WORDS)
        headers[:] = 0
        # The pointer to a packet is its index plus a tag in higher bits, so that it is never 0.
        headers[1:, 0] = [_COUNT, *range(1, _COUNT - 1)]

    def grid(self, groups: int, threads: int) -> int:
        """Write the structure mg_info, which grid.sync() uses, and return its address.

        The device libraries define mg_info. This one describes a launch of a single grid.

        Args:
            groups: Workgroups of the grid.
            threads: Threads of the grid.
        """
        at = _GRID // 8
        self._words[at : at + 6] = [0, 1 << 32, 0, threads, 0, groups]
        return BASE + _GRID

    def serve(self) -> None:
        """Answer the packets that are ready.

        Raises:
            Trap: A wave requests a service other than printf and malloc, frees an address at which
                no block starts, or continues a message that it did not begin.
        """
        words = self._words
        ready = int(words[_READY])
        words[_READY] = 0
        while ready:
            index = ready & (_COUNT - 1)
            first = _HEADERS // 8 + _HEADER_WORDS * index
            header = words[first : first + _HEADER_WORDS]
            ready = int(header[0])
            lanes = int(header[1])
            service = int(header[2]) & 0xFFFFFFFF
            if service not in (_PRINTF, _MEMORY):
                message = f"a kernel calls service {service} of the host (2 is printf, 3 malloc)"
                raise Trap("unknown", message)
            answer = self._print if service == _PRINTF else self._allocate
            for lane in range(64):
                if lanes >> lane & 1:
                    answer(self._slot(index, lane))
            header[2] = int(header[2]) & ~_PENDING

    def _slot(self, packet: int, lane: int) -> np.ndarray:
        payload = (_PAYLOADS + packet * _PAYLOAD_SIZE) // 8
        first = payload + _SLOT_WORDS * lane
        return self._words[first : first + _SLOT_WORDS]

    def _allocate(self, slot: np.ndarray) -> None:
        """Free the block at the address slot[0], or allocate slot[1] bytes if slot[0] is 0.

        slot[0] becomes the address of the allocated block, or 0 if no block was allocated.
        """
        address = int(slot[0])
        size = int(slot[1])
        slot[0] = 0
        if self._heap is None:
            return
        if address:
            self._heap.give_back(address)
        else:
            slot[0] = self._heap.take(size)

    def _print(self, slot: np.ndarray) -> None:
        """Add a part to a message.

        After the last part, write the message to standard error or, if it is for standard output,
        add it to `text`. The first word of the slot has the message's number, the number of words,
        and whether the part is the first or the last one.
        """
        descriptor = int(slot[0])
        number = descriptor >> 8
        if descriptor & _IS_FIRST:
            number = self._free_number()
            self._messages[number] = bytearray()
            slot[0] = descriptor & 0xFE | number << 8
        message = self._messages.get(number)
        if message is None:
            raise Trap("unknown", "printf from a kernel continues a message that it did not begin")
        count = descriptor >> 5 & 7
        message += slot[1 : 1 + count].tobytes()
        if not descriptor & _IS_LAST:
            return
        del self._messages[number]
        text = _format(bytes(message[8:]))
        if message[0] & 1:
            sys.stderr.buffer.write(text)
            sys.stderr.flush()
        else:
            self.text += text
        slot[0] = len(text)

    def _free_number(self) -> int:
        number = 0
        while number in self._messages:
            number += 1
        return number


def _split_string(data: bytes) -> tuple[bytes, bytes]:
    """Split off the string at the start of data, with its padding to a multiple of 8 bytes.

    Returns:
        The string without padding, and the remaining data.
    """
    text = data.split(b"\0", 1)[0]
    return text, data[len(text) // 8 * 8 + 8 :]


def _format(data: bytes) -> bytes:
    """Return the text that C's printf prints. data has the format string, then its arguments."""
    form, data = _split_string(data)
    output = b""
    at = 0
    for match in _SPECIFIER.finditer(form):
        output += form[at : match.start()]
        at = match.end()
        specifier = match[0]
        kind = specifier[-1:]
        if kind == b"%":
            output += b"%"
            continue
        arguments: list = []
        for _ in range(specifier.count(b"*")):
            width = int.from_bytes(data[:4], "little")
            arguments.append(ctypes.c_int(width))
            data = data[8:]
        if kind == b"s":
            text, data = _split_string(data)
            arguments.append(ctypes.c_char_p(text))
        else:
            word = data[:8].ljust(8, b"\0")
            data = data[8:]
            number_type = ctypes.c_double if kind in b"fFeEgGaA" else ctypes.c_uint64
            arguments.append(number_type.from_buffer_copy(word))
        if kind != b"n":
            output += _call_snprintf(specifier, arguments)
    return output + form[at:]


def _call_snprintf(specifier: bytes, arguments: list) -> bytes:
    size = _SNPRINTF(None, 0, specifier, *arguments)
    buffer = ctypes.create_string_buffer(max(size, 0) + 1)
    _SNPRINTF(buffer, len(buffer), specifier, *arguments)
    return buffer.value
