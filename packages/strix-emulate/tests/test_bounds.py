# SPDX-License-Identifier: BSD-3-Clause
"""The emulator quickly refuses small files that would take much memory or time.

Tests count the bytes that are read from a file. They measure no time, because it depends on the
machine.
"""

import io
import lzma
import struct
import zlib
from collections.abc import Callable

import msgpack
import numpy as np
import pytest
import typer
from strix_emulate import cli
from strix_emulate.code import elf as elf_module
from strix_emulate.code import limits, loader
from strix_emulate.errors import EmulatorError, LoadError
from test_images import DEVICE, bundle
from test_loader import elf, pack_aks2  # noqa: F401

PHDR = struct.Struct("<2I6Q")
SHDR = struct.Struct("<2I4Q2I2Q")
PT_LOAD = 1
PT_DYNAMIC = 2
PT_NOTE = 4
SHT_RELA = 4
SHT_DYNSYM = 11


class File:
    """An ELF file that a test changes."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)

    def set(self, offset: int, form: str, value: int) -> None:
        struct.pack_into(form, self.data, offset, value)

    def get(self, offset: int, form: str) -> int:
        return struct.unpack_from(form, self.data, offset)[0]

    def section(self, kind: int) -> int:
        """Return the file offset of the first section header with this type."""
        start = self.get(40, "<Q")
        count = self.get(60, "<H")
        places = range(start, start + 64 * count, 64)
        return next(place for place in places if self.get(place + 4, "<I") == kind)

    def add_segments(self, *segments: tuple[int, int, int, int]) -> None:
        """Move the program headers to the end, and add segments (type, offset, filesz, memsz)."""
        start = self.get(32, "<Q")
        count = self.get(56, "<H")
        table = self.data[start : start + 56 * count]
        for kind, offset, filesz, memsz in segments:
            table += PHDR.pack(kind, 4, offset, 0, 0, filesz, memsz, 8)
        self.set(32, "<Q", len(self.data))
        self.set(56, "<H", count + len(segments))
        self.data += table


def many_segments(file: File) -> None:
    """Add segments that each load the whole file."""
    file.add_segments(*[(PT_LOAD, 0, len(file.data), 4096)] * 5000)


def dynamic_segments(file: File) -> None:
    """Add dynamic segments. For each, pyelftools reads the names of all sections."""
    file.add_segments(*[(PT_DYNAMIC, 0, 16, 16)] * 5000)


def many_sections(file: File) -> None:
    """Declare more sections than the file has."""
    file.set(60, "<H", 0xFF00)


def many_symbols(file: File) -> None:
    table = file.section(SHT_DYNSYM)
    file.set(table + 32, "<Q", 24 << 20)


def many_relocations(file: File) -> None:
    """Declare relocations in a section that is longer than any file."""
    table = file.section(SHT_DYNSYM)
    file.set(file.get(40, "<Q") + 4, "<I", SHT_RELA)
    file.set(file.get(40, "<Q") + 32, "<Q", 24 << 30)
    assert file.section(SHT_DYNSYM) == table


def endless_names(file: File) -> None:
    """Give a symbol a name that reaches to the end of the file."""
    table = file.section(SHT_DYNSYM)
    strings = file.get(40, "<Q") + 64 * file.get(table + 40, "<I")
    file.set(strings + 24, "<Q", len(file.data))
    file.data += b"a" * (limits.NAME + 1000) + b"\0"


def many_notes(file: File) -> None:
    file.add_segments((PT_NOTE, len(file.data), 12 * 5000, 0))
    note = struct.pack("<3I", 0, 0, 0) * 5000
    header = file.get(32, "<Q")
    file.set(header + 56 * (file.get(56, "<H") - 1) + 8, "<Q", len(file.data))
    file.data += note


def same_notes(file: File) -> None:
    """Add many segments with the same large metadata."""
    start = file.get(32, "<Q")
    count = file.get(56, "<H")
    notes = [n for n in range(count) if file.get(start + 56 * n, "<I") == PT_NOTE]
    header = start + 56 * notes[0]
    offset = file.get(header + 8, "<Q")
    size = file.get(header + 32, "<Q")
    large = msgpack.packb({"amdhsa.kernels": [None] * (3 << 20)})
    note = struct.pack("<3I", 7, len(large), 32) + b"AMDGPU\0\0" + large
    note += bytes(-len(note) % 4)
    assert offset
    assert size
    file.add_segments(*[(PT_NOTE, len(file.data), len(note), 0)] * 6)
    # add_segments() has appended the table of segments to the file, so that the note follows this
    # table.
    table = file.get(32, "<Q")
    for n in range(count, count + 6):
        file.set(table + 56 * n + 8, "<Q", len(file.data))
    file.data += note


ELF: dict[str, tuple[Callable[[File], None], str]] = {
    "segments": (many_segments, "more than 256 segments"),
    "dynamic segments": (dynamic_segments, "more than 256 segments"),
    "sections": (many_sections, "more than 1024 sections"),
    "symbols": (many_symbols, "more than 131072 symbols"),
    "relocations": (many_relocations, "more than 262144 relocations"),
    "names": (endless_names, "a symbol's name is cut off or has 16384 bytes or more"),
    "notes": (many_notes, "more than 4096 notes"),
    "metadata": (same_notes, "bytes of metadata"),
}


class Counting(io.BytesIO):
    """A file in memory. `count` is the number of bytes that were read from all such files."""

    count = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        Counting.count += len(data)
        return data


@pytest.mark.parametrize("name", ELF)
def test_elf(name: str, elf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    change, words = ELF[name]
    file = File(elf)
    change(file)
    monkeypatch.setattr(elf_module.io, "BytesIO", Counting)
    monkeypatch.setattr(Counting, "count", 0)
    for read in (loader.parse, loader.parse_module):
        with pytest.raises(LoadError, match=f"^bomb: .*{words}"):
            read(bytes(file.data), "bomb")
    assert Counting.count < 40 * len(file.data)


def test_kernels_without_a_size(elf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The end of a kernel is found by bisection. Comparing all symbols would take minutes."""
    starts = list(range(0, 1 << 20, 8))
    lookups: list[int] = []

    class Looked(list):
        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            lookups.append(index if isinstance(index, int) else 1)
            return super().__getitem__(index)

    assert loader._until_next(800, Looked(starts), [(0, 1 << 20)]) == 8
    assert len(lookups) < 40


def make_overlapping_pack(data: bytes, count: int) -> bytes:
    """Return a pack in which every entry is all of the data."""
    entry = struct.pack("<5I", 0, 128, 0, len(data), 2) + b"a\0"
    raw = entry * count + data
    head = struct.pack("<4s3I", b"AKS2", len(raw), count, len(entry) * count)
    return head + lzma.compress(raw)


def test_a_pack_whose_entries_overlap(elf: bytes) -> None:  # noqa: F811
    """Without a check for overlaps, a pack of ten kilobytes would unpack to a gigabyte."""
    pack = make_overlapping_pack(bytes(1 << 24), 64)
    assert len(pack) < 10_000
    with pytest.raises(LoadError, match="^pack: AKS2 entries overlap"):
        loader.parse(pack, "pack")
    assert len(loader.parse(pack_aks2([("a", 0, elf)] * 3), "pack")) == 3


def test_a_pack_of_many_entries() -> None:
    with pytest.raises(LoadError, match="^pack: more than 16384 entries"):
        loader.parse(make_overlapping_pack(b"", 1 << 15), "pack")


def test_a_stream_that_asks_for_memory() -> None:
    """An xz block names the size of its dictionary. Here the dictionary has four gigabytes."""
    stream = bytearray(lzma.compress(b"a"))
    size = 4 * (stream[12] + 1)
    assert stream[14:16] == b"\x21\x01"  # The filter is LZMA2, with one byte of properties.
    stream[16] = 40
    struct.pack_into("<I", stream, 12 + size - 4, zlib.crc32(stream[12 : 12 + size - 4]))
    with pytest.raises(LoadError, match=r"damaged AKS2 pack \(Memory usage limit exceeded\)"):
        loader.parse(struct.pack("<4s3I", b"AKS2", 1, 0, 0) + bytes(stream), "pack")


def test_a_bundle_whose_entries_overlap(elf: bytes, monkeypatch) -> None:  # noqa: F811
    """All entries are the same code object, whose bytes count once for each entry."""
    monkeypatch.setattr(limits, "ALLOWED", 1 << 18)
    monkeypatch.setattr(limits, "RATIO", 1)
    overlapping = bundle(*[(DEVICE, elf)] * 3)
    assert len(loader.parse(overlapping, "bundle")) == 3
    same = bytearray(overlapping)
    count = 200
    head = same[:24] + struct.pack("<Q", count)
    entry = struct.pack("<3Q", len(head), len(elf), len(DEVICE)) + DEVICE.encode()
    with pytest.raises(LoadError, match=r"^bundle: .* would grow to more than"):
        loader.parse(bytes(head + entry * count) + elf, "bundle")


def test_images_that_are_larger_than_the_file(elf: bytes, monkeypatch) -> None:  # noqa: F811
    """All code objects of a pack together may take no more memory than a single file may."""
    monkeypatch.setattr(limits, "ALLOWED", 1 << 22)
    monkeypatch.setattr(limits, "RATIO", 1)
    file = File(elf)
    file.add_segments((PT_LOAD, 0, 0, 1 << 20))
    large = bytes(file.data)
    assert loader.parse(large, "one")
    with pytest.raises(LoadError, match=r"^pack: .* would grow to more than"):
        loader.parse(pack_aks2([("a", 0, large)] * 8), "pack")


def test_a_large_file_is_not_read(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.hsaco"
    with file.open("wb") as out:
        out.truncate(limits.FILE + 1)
    # The loader must read the limit at each call: a default argument would keep the old limit.
    monkeypatch.setattr(limits, "FILE", 1000)
    with pytest.raises(LoadError, match=r"a\.hsaco: has more than \d+ bytes"):
        loader.load(file)


def test_an_array_that_unpacks_to_more(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ARRAY", 1 << 16)
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros(1 << 16))
    np.save(tmp_path / "a.npy", np.zeros(1 << 16))
    for name in ("a.npz", "a.npy"):
        with pytest.raises(EmulatorError, match="holds .* bytes, more than 65536, the limit"):
            cli._parse_argument(f"in={tmp_path / name}", {})


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "inf"])
def test_a_limit_of_time_that_no_launch_can_have_is_refused(seconds):
    parser = typer.main.get_command(cli.app).commands["device"]
    with pytest.raises(typer.BadParameter) as raised:
        parser.make_context("device", ["--seconds", seconds, "true"])
    assert "--seconds" in raised.value.format_message()
