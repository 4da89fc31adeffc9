# SPDX-License-Identifier: BSD-3-Clause
"""printf and malloc in kernels, with packets of the device libraries and with invalid packets."""

import struct

import numpy as np
import pytest
from strix_emulate.device import hostcall
from strix_emulate.device.hostcall import END, START, Hostcalls
from strix_emulate.errors import Trap

#: Offsets of packet headers and payloads in 64-bit words, as in the device libraries.
HEADERS = (START + 4096) // 8
PAYLOADS = (START + 8192) // 8
READY = START // 8 + 4
FIRST = 1
LAST = 2
ERROR = 1


class Buffer:
    """The buffer that waves and the server share."""

    def __init__(self):
        self.words = np.zeros(END // 8, np.uint64)
        self.calls = Hostcalls(self.words)

    def send(self, lanes: dict[int, tuple], index: int = 1, service: int = 2) -> dict[int, int]:
        """Serve a packet of one wave, and return the answers by lane.

        Each lane has flags, the number of a message, and up to 7 words.
        """
        header = self.words[HEADERS + 3 * index :][:3]
        header[:] = [0, sum(1 << lane for lane in lanes), 1 << 32 | service]
        slots = {}
        for lane, (flags, number, words) in lanes.items():
            slots[lane] = self.words[PAYLOADS + 512 * index + 8 * lane :][:8]
            slots[lane][: 1 + len(words)] = [flags | len(words) << 5 | number << 8, *words]
        self.words[READY] = index | 64
        self.calls.serve()
        assert header[2] == service
        assert self.words[READY] == 0
        return {lane: int(slot[0]) for lane, slot in slots.items()}


def words(text: bytes) -> list[int]:
    """Return the 64-bit words of a text with a final zero byte, padded to 8 bytes."""
    raw = text + b"\0" * (8 - len(text) % 8)
    return list(struct.unpack(f"<{len(raw) // 8}Q", raw))


def double(value: float) -> int:
    return struct.unpack("<Q", struct.pack("<d", value))[0]


def test_a_message_comes_in_parts_beside_another() -> None:
    buffer = Buffer()
    long = b"one %s and %5.2f of %d%%\n"
    short = b"%c%-*u|\n"
    parts = [0, *words(long)]
    first_answers = buffer.send({0: (FIRST, 0, parts[:3]), 7: (FIRST, 0, [0])})
    numbers = {lane: answer >> 8 for lane, answer in first_answers.items()}
    assert sorted(numbers.values()) == [0, 1]
    assert not any(answer & FIRST for answer in first_answers.values()), (
        "no answer may have FIRST, or the next part would begin another message"
    )
    buffer.send({0: (0, numbers[0], parts[3:])})
    # The second message ends before the first.
    done = buffer.send({7: (LAST, numbers[7], [*words(short), ord("x"), 4, 21])})
    assert done == {7: len("x21  |\n")}
    assert buffer.calls.text == b"x21  |\n"
    buffer.send({0: (0, numbers[0], words(b"a text of many bytes"))})
    buffer.send({0: (LAST, numbers[0], [double(2.5), 9])})
    assert buffer.calls.text == b"x21  |\none a text of many bytes and  2.50 of 9%\n"
    # The numbers of ended messages are used again.
    assert buffer.send({3: (FIRST, 5, [0])})[3] >> 8 == 0


def test_a_message_to_standard_error(capfdbinary) -> None:
    buffer = Buffer()
    buffer.send({0: (FIRST | LAST, 0, [ERROR, *words(b"failed")])})
    assert buffer.calls.text == b""
    assert capfdbinary.readouterr().err == b"failed"


@pytest.mark.parametrize("flags", [0, LAST])
def test_a_part_of_no_message_is_refused(flags: int) -> None:
    buffer = Buffer()
    with pytest.raises(Trap, match="continues a message that it did not begin"):
        buffer.send({0: (flags, 3, [1])})


def test_another_service_is_refused() -> None:
    with pytest.raises(Trap, match=r"service 4 of the host \(2 is printf, 3 malloc\)"):
        Buffer().send({0: (FIRST, 0, [0])}, service=4)


def test_n_writes_nothing() -> None:
    assert hostcall._format(struct.pack("<2Q", *words(b"a%nb%d"), 7)[:8] + bytes(8) + b"\7") == (
        b"ab7"
    )


MIB = 1 << 20


def test_malloc_asks_for_pieces_and_gives_them_back() -> None:
    heap = hostcall.Heap(4 * MIB, 5 * MIB)
    assert [heap.take(5000), heap.take(2 * MIB), heap.take(4096)] == [
        4 * MIB,
        6 * MIB,
        4 * MIB + 8192,
    ]
    assert heap.take(2 * MIB) == 0
    assert heap.take(2**64 - 1) == 0
    for address in (4 * MIB, 4 * MIB + 8192, 6 * MIB):
        heap.give_back(address)
    assert heap.take(5 * MIB) == 4 * MIB
    with pytest.raises(Trap, match=r"free\(0x600000\) in a kernel: no allocation starts"):
        heap.give_back(6 * MIB)


def test_lanes_ask_for_memory_and_free_it() -> None:
    buffer = Buffer()
    buffer.calls = Hostcalls(buffer.words, hostcall.Heap(4 * MIB, 4 * MIB))
    header = buffer.words[HEADERS + 3 :][:3]
    slots = [buffer.words[PAYLOADS + 512 + 8 * lane :][:2] for lane in (0, 2)]

    def send(*words: tuple[int, int]) -> list[int]:
        header[:] = [0, 0b101, 1 << 32 | 3]
        for slot, pair in zip(slots, words, strict=True):
            slot[:] = pair
        buffer.words[READY] = 1 | 64
        buffer.calls.serve()
        return [int(slot[0]) for slot in slots]

    assert send((0, 2 * MIB), (0, 2 * MIB)) == [4 * MIB, 6 * MIB]
    assert send((4 * MIB, 0), (0, 4096)) == [0, 4 * MIB]
    # Without a heap, malloc returns null.
    buffer.calls = Hostcalls(buffer.words)
    assert send((0, 100), (0, 100)) == [0, 0]
