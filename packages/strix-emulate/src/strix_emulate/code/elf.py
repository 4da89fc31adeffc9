# SPDX-License-Identifier: BSD-3-Clause
"""The parts of an ELF file that a code object consists of, each read once and within a budget.

pyelftools reads a name to its end, and overlapping parts as often as they are named: a file of
three megabytes can have it read terabytes. So it parses headers and notes here, and no names.
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
#: LLVM's guide, "Relocation Records"
_R_ABS64, _R_RELATIVE64 = 3, 13
_STT_OBJECT = 1
#: Elf64_Sym, and Elf64_Rela with its r_info as (type, symbol)
_SYMBOL, _RELOCATION = struct.Struct("<IBBHQQ"), struct.Struct("<QIIq")
_IMAGE_LIMIT = 1 << 28


def guarded(function: Callable, origin: str, *arguments):
    """Return the function's result; turn what a reader raises for a damaged file into LoadError.

    pyelftools, msgpack, zipfile and lzma have two dozen kinds of exceptions for that.
    """
    try:
        return function(*arguments)
    except LoadError:
        raise
    except Exception as error:
        says = f"{type(error).__name__}: {error}"[:200] if str(error) else "cut off"
        raise LoadError(f"{origin}: no whole AMDGPU code object ({says})") from error


class Symbol(NamedTuple):
    """A symbol of .dynsym: its name, address and size, type, and section (0: not defined)."""

    name: str
    value: int
    size: int
    kind: int
    section: int

    @property
    def is_variable(self) -> bool:
        """Whether it is data."""
        return self.kind == _STT_OBJECT


class CodeObject:
    """An ELF file. Raises LoadError for anything else, and for one that exceeds its budget."""

    def __init__(self, data: bytes, origin: str, budget: Budget) -> None:
        self.data, self.origin, self.budget = data, origin, budget
        self._elf: ELFFile = guarded(ELFFile, origin, io.BytesIO(data))
        self.header = self._elf.header
        budget.count("sections", self.header["e_shnum"])
        self._segments = guarded(_segments, origin, self._elf, budget)
        self.loaded = [s for s in self._segments if s["p_type"] == "PT_LOAD"]

    @cached_property
    def sections(self) -> list:
        """Headers of the sections."""
        form = self._elf.structs.Elf_Shdr
        return _headers(self._elf, form, *(self.header[f"e_sh{n}"] for n in _TABLE))

    @cached_property
    def symbols(self) -> list[Symbol]:
        """The symbols of the first dynamic symbol table."""
        table = next(s for s in self.sections if s["sh_type"] == "SHT_DYNSYM")
        count = self.budget.count("symbols", table["sh_size"] // _SYMBOL.size)
        entries = self._part(table["sh_offset"], count * _SYMBOL.size)
        strings = self.sections[table["sh_link"]]["sh_offset"]
        found = []
        for name, info, _, section, value, size in _SYMBOL.iter_unpack(entries):
            begin = strings + name
            end = self.data.find(b"\0", begin, begin + limits.NAME)
            if end < 0:
                raise LoadError(f"{self.origin}: a symbol's name of more than {limits.NAME} bytes")
            text = self._part(begin, end - begin).decode(errors="replace")
            found.append(Symbol(text, value, size, info & 0xF, section))
        return found

    def _part(self, start: int, size: int) -> bytes:
        self.budget.take(size)
        return self.data[start : start + size]

    def read(self, address: int, size: int) -> bytes:
        """Return bytes by their address. Raise LoadError if they are not in the file."""
        for segment in self.loaded:
            start = segment["p_vaddr"]
            if start <= address and address + size <= start + segment["p_filesz"]:
                data = self._part(segment["p_offset"] + address - start, size)
                if len(data) == size:
                    return data
        raise LoadError(f"{self.origin}: cut off, address {address:#x} is not in the file")

    def metadata(self) -> dict:
        """Return the metadata of all kernels. Raise LoadError if there is none."""
        return _metadata(self._elf, self._segments, self.origin, self.budget)

    def image(self) -> tuple[bytes, tuple[tuple[int, int], ...], tuple[int, ...]]:
        """Return the file in memory, (address, size) of what is code, and where pointers stand.

        Source: the segments and relocations of LLVM's guide, "Relocation Records".
        """
        size = max((s["p_vaddr"] + s["p_memsz"] for s in self.loaded), default=0)
        if size > _IMAGE_LIMIT:
            raise Unsupported(
                f"{self.origin}: {size} bytes in memory, at most {_IMAGE_LIMIT} are supported"
            )
        self.budget.take(size)
        data = bytearray(size)
        for segment in self.loaded:
            raw = self._part(segment["p_offset"], segment["p_filesz"])
            data[segment["p_vaddr"] : segment["p_vaddr"] + len(raw)] = raw
        pointers = []
        for section in self.sections:
            if section["sh_type"] == "SHT_RELA":
                for place, value in self._relocations(section):
                    struct.pack_into("<Q", data, place, value & (1 << 64) - 1)
                    pointers.append(place)
        executable = tuple((s["p_vaddr"], s["p_filesz"]) for s in self.loaded if s["p_flags"] & 1)
        return bytes(data), executable, tuple(pointers)

    def _relocations(self, section) -> Iterable[tuple[int, int]]:
        """Yield where an address stands, and which one."""
        count = self.budget.count("relocations", section["sh_size"] // _RELOCATION.size)
        entries = self._part(section["sh_offset"], count * _RELOCATION.size)
        for place, kind, index, value in _RELOCATION.iter_unpack(entries):
            if kind == _R_ABS64:
                if self.sections[section["sh_link"]]["sh_type"] != "SHT_DYNSYM":
                    raise Unsupported(f"{self.origin}: relocations by another table than .dynsym")
                symbol = self.symbols[index]
                if not symbol.section:
                    raise LoadError(f"{self.origin}: {symbol.name} is not defined in this file")
                value += symbol.value
            elif kind != _R_RELATIVE64:
                raise Unsupported(f"{self.origin}: relocation type {kind} is not supported")
            yield place, value


#: What e_sh and e_ph are followed by: where the headers are, the bytes of each, how many.
_TABLE = ("off", "entsize", "num")


def _headers(elf: ELFFile, form, start: int, step: int, count: int) -> list:
    return [struct_parse(form, elf.stream, stream_pos=start + step * n) for n in range(count)]


def _segments(elf: ELFFile, budget: Budget) -> list:
    budget.count("segments", elf["e_phnum"])
    return _headers(elf, elf.structs.Elf_Phdr, *(elf[f"e_ph{name}"] for name in _TABLE))


def elf_metadata(elf: ELFFile, origin: str) -> dict:
    """Return the AMDGPU metadata of a code object. Raise LoadError if there is none."""
    budget = Budget(origin, elf.stream_len)
    return _metadata(elf, _segments(elf, budget), origin, budget)


def _metadata(elf: ELFFile, segments: Iterable, origin: str, budget: Budget) -> dict:
    """Return the metadata; of several notes, the kernels of all.

    The linker keeps a note from each object file: rocBLAS's files hold hundreds.
    """
    found, size = [], 0
    for segment in (s for s in segments if s["p_type"] == "PT_NOTE"):
        for note in iter_notes(elf, segment["p_offset"], segment["p_filesz"]):
            budget.count("notes")
            budget.take(note["n_namesz"] + note["n_descsz"])
            if note["n_name"] == "AMDGPU" and note["n_type"] == _NT_AMDGPU_METADATA:
                size += note["n_descsz"]
                if size > limits.METADATA:
                    raise LoadError(f"{origin}: more than {limits.METADATA} bytes of metadata")
                found.append(msgpack.unpackb(note["n_descdata"]))
    if not found:
        raise LoadError(f"{origin}: no AMDGPU metadata note")
    kernels = [kernel for one in found for kernel in one["amdhsa.kernels"]]
    budget.count("kernels", len(kernels))
    return found[0] | {"amdhsa.kernels": kernels}
