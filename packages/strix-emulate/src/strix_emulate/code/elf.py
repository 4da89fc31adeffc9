# SPDX-License-Identifier: BSD-3-Clause
"""The parts of an ELF file that a code object needs. A budget limits what is read.

pyelftools reads names of any length, and reads overlapping parts once for each reference to them. A
file of three megabytes can make it read terabytes. So this module uses pyelftools only for headers
and notes.
"""

import io
import struct
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import NamedTuple

import msgpack
from elftools.common.utils import struct_parse
from elftools.elf.elffile import ELFFile
from elftools.elf.notes import iter_notes

from strix_emulate.code import limits
from strix_emulate.code.limits import Budget
from strix_emulate.errors import LoadError, Unsupported

_NT_AMDGPU_METADATA = 32
#: Relocation types (LLVM's guide, "Relocation Records").
_R_ABS64 = 3
_R_RELATIVE64 = 13
_STT_OBJECT = 1
#: Elf64_Sym.
_SYMBOL = struct.Struct("<IBBHQQ")
#: Elf64_Rela, with its r_info as (type, symbol).
_RELOCATION = struct.Struct("<QIIq")
_IMAGE_LIMIT = 1 << 28


def guarded(function: Callable, origin: str, *arguments):
    """Return a function's result. Turn any exception into LoadError.

    Damaged files make pyelftools, msgpack, zipfile and lzma raise two dozen types of exceptions.
    """
    try:
        return function(*arguments)
    except LoadError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:200] if str(error) else "cut off"
        raise LoadError(f"{origin}: not a complete AMDGPU code object ({reason})") from error


class Symbol(NamedTuple):
    """A symbol of .dynsym.

    Attributes:
        name: Its name.
        value: Its address.
        size: Bytes.
        kind: Its type.
        section: Its section; 0 if it is not defined in the file.
    """

    name: str
    value: int
    size: int
    kind: int
    section: int

    @property
    def is_variable(self) -> bool:
        """Whether the symbol is a variable."""
        return self.kind == _STT_OBJECT


class CodeObject:
    """An ELF file. The methods raise LoadError if the file exceeds its budget.

    For a damaged file, they raise LoadError or other exceptions, so callers use `guarded`.

    Attributes:
        data: The file.
        origin: Its name, for messages.
        budget: Limits of what may still be read from the file.
        header: The ELF header.
        loaded: Headers of the segments that are loaded.
    """

    def __init__(self, data: bytes, origin: str, budget: Budget) -> None:
        self.data = data
        self.origin = origin
        self.budget = budget
        self._elf: ELFFile = guarded(ELFFile, origin, io.BytesIO(data))
        self.header = self._elf.header
        budget.count("sections", self.header["e_shnum"])
        self._segments = guarded(_read_segments, origin, self._elf, budget)
        self.loaded = [s for s in self._segments if s["p_type"] == "PT_LOAD"]

    @cached_property
    def sections(self) -> list:
        """Headers of the sections."""
        return _read_headers(
            self._elf,
            self._elf.structs.Elf_Shdr,
            self.header["e_shoff"],
            self.header["e_shentsize"],
            self.header["e_shnum"],
        )

    @cached_property
    def symbols(self) -> list[Symbol]:
        """The symbols of the first dynamic symbol table."""
        table = next(s for s in self.sections if s["sh_type"] == "SHT_DYNSYM")
        count = self.budget.count("symbols", table["sh_size"] // _SYMBOL.size)
        entries = self._slice(table["sh_offset"], count * _SYMBOL.size)
        strings = self.sections[table["sh_link"]]["sh_offset"]
        symbols = []
        for name_offset, info, _, section, value, size in _SYMBOL.iter_unpack(entries):
            begin = strings + name_offset
            end = self.data.find(b"\0", begin, begin + limits.NAME)
            if end < 0:
                raise LoadError(
                    f"{self.origin}: a symbol's name is cut off or has {limits.NAME} bytes or more"
                )
            name = self._slice(begin, end - begin).decode(errors="replace")
            symbols.append(Symbol(name, value, size, info & 0xF, section))
        return symbols

    def _slice(self, start: int, size: int) -> bytes:
        self.budget.take(size)
        return self.data[start : start + size]

    def read(self, address: int, size: int) -> bytes:
        """Return the bytes at an address. Raise LoadError if they are not in the file."""
        for segment in self.loaded:
            start = segment["p_vaddr"]
            end = start + segment["p_filesz"]
            if address < start or address + size > end:
                continue
            data = self._slice(segment["p_offset"] + address - start, size)
            if len(data) == size:
                return data
        raise LoadError(f"{self.origin}: cut off before address {address:#x}")

    def metadata(self) -> dict:
        """Return the metadata of all kernels. Raise LoadError if there is none."""
        return _read_metadata(self._elf, self._segments, self.origin, self.budget)

    def image(self) -> tuple[bytes, tuple[tuple[int, int], ...], tuple[int, ...]]:
        """Return the memory that a loader fills from the file.

        Source: the segments and relocations of LLVM's guide, "Relocation Records".

        Returns:
            The bytes by address, (address, size) of the segments of code, and the addresses of
            pointers.
        """
        size = max((s["p_vaddr"] + s["p_memsz"] for s in self.loaded), default=0)
        if size > _IMAGE_LIMIT:
            raise Unsupported(
                f"{self.origin}: takes {size} bytes in memory, at most {_IMAGE_LIMIT} are supported"
            )
        self.budget.take(size)
        data = bytearray(size)
        for segment in self.loaded:
            raw = self._slice(segment["p_offset"], segment["p_filesz"])
            start = segment["p_vaddr"]
            data[start : start + len(raw)] = raw
        pointers = []
        for section in self.sections:
            if section["sh_type"] != "SHT_RELA":
                continue
            for place, value in self._relocations(section):
                struct.pack_into("<Q", data, place, value & (1 << 64) - 1)
                pointers.append(place)
        executable = tuple((s["p_vaddr"], s["p_filesz"]) for s in self.loaded if s["p_flags"] & 1)
        return bytes(data), executable, tuple(pointers)

    def _relocations(self, section) -> Iterable[tuple[int, int]]:
        """Yield (address, value) of each pointer."""
        count = self.budget.count("relocations", section["sh_size"] // _RELOCATION.size)
        entries = self._slice(section["sh_offset"], count * _RELOCATION.size)
        for place, kind, index, value in _RELOCATION.iter_unpack(entries):
            if kind == _R_ABS64:
                if self.sections[section["sh_link"]]["sh_type"] != "SHT_DYNSYM":
                    raise Unsupported(
                        f"{self.origin}: relocations use another symbol table than .dynsym"
                    )
                symbol = self.symbols[index]
                if not symbol.section:
                    raise LoadError(f"{self.origin}: {symbol.name} is not defined in this file")
                value += symbol.value
            elif kind != _R_RELATIVE64:
                raise Unsupported(f"{self.origin}: relocation type {kind} is not supported")
            yield place, value


def _read_headers(elf: ELFFile, form, start: int, step: int, count: int) -> list:
    """Return `count` headers of one form. They begin at `start`, `step` bytes apart."""
    return [struct_parse(form, elf.stream, stream_pos=start + step * n) for n in range(count)]


def _read_segments(elf: ELFFile, budget: Budget) -> list:
    budget.count("segments", elf["e_phnum"])
    form = elf.structs.Elf_Phdr
    return _read_headers(elf, form, elf["e_phoff"], elf["e_phentsize"], elf["e_phnum"])


def elf_metadata(elf: ELFFile, origin: str) -> dict:
    """Return the AMDGPU metadata of a code object. Raise LoadError if there is none."""
    budget = Budget(origin, elf.stream_len)
    return _read_metadata(elf, _read_segments(elf, budget), origin, budget)


def _read_metadata(elf: ELFFile, segments: Iterable, origin: str, budget: Budget) -> dict:
    """Return the metadata of the first note, with the kernels of all notes.

    The linker keeps a note from each object file. rocBLAS's files contain hundreds of notes.
    """
    parts = []
    size = 0
    for segment in segments:
        if segment["p_type"] != "PT_NOTE":
            continue
        for note in iter_notes(elf, segment["p_offset"], segment["p_filesz"]):
            budget.count("notes")
            budget.take(note["n_namesz"] + note["n_descsz"])
            if note["n_name"] != "AMDGPU" or note["n_type"] != _NT_AMDGPU_METADATA:
                continue
            size += note["n_descsz"]
            if size > limits.METADATA:
                raise LoadError(f"{origin}: has more than {limits.METADATA} bytes of metadata")
            parts.append(msgpack.unpackb(note["n_descdata"]))
    if not parts:
        raise LoadError(f"{origin}: no AMDGPU metadata note")
    kernels = []
    for part in parts:
        kernels += part["amdhsa.kernels"]
    budget.count("kernels", len(kernels))
    return parts[0] | {"amdhsa.kernels": kernels}
