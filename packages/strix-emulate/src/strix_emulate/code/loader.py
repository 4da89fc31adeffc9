# SPDX-License-Identifier: BSD-3-Clause
"""AMDGPU code objects: ELF file, kernel descriptor and metadata, and the packs that hold them.

Sources: LLVM's "User Guide for AMDGPU Backend" (ELF header, notes, code object V4 to V6 metadata,
kernel descriptor for GFX11); AOTriton's pack as its v3src reads it (AKS2, then one xz stream).
"""

import io
import json
import lzma
import struct
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgpack
from elftools.elf.elffile import ELFFile

from strix_emulate.code.bundles import BUNDLE, require_modest, unbundle
from strix_emulate.code.kernel import Argument, Image, Kernel
from strix_emulate.code.target import TARGETS, Target, of_elf
from strix_emulate.errors import LoadError, Unsupported

EM_AMDGPU, _NT_AMDGPU_METADATA = "EM_AMDGPU", 32
_ELFOSABI_AMDGPU_HSA = 64
#: e_ident[EI_ABIVERSION] of code object V4, V5 and V6
_ABI_VERSIONS = {2: 4, 3: 5, 4: 6}
#: LLVM's guide, "Relocation Records"
_R_ABS64, _R_RELATIVE64 = 3, 13
_IMAGE_LIMIT = 1 << 28


def load(path: Path) -> list[Kernel]:
    """Load all kernels of a code object, an AOTriton pack, a zip of these, or a Triton cache.

    Raises:
        LoadError: nothing in there can be run, with the reason.
    """
    try:
        if path.is_dir():
            found = [
                kernel
                for file in filter(Path.is_file, sorted(path.rglob("*.hsaco")))
                for kernel in _with_triton_note(file)
            ]
            if not found:
                raise LoadError(f"{path}: no .hsaco file in this folder")
            return found
        if path.exists() and not path.is_file():  # a pipe would be read for ever
            raise LoadError(f"{path}: not a regular file")
        return parse(path.read_bytes(), str(path))
    except OSError as error:
        raise LoadError(f"{path}: {error.strerror}") from error


def parse(data: bytes, origin: str) -> list[Kernel]:
    """Return all kernels in the bytes of a code object, a pack or a zip. Raise LoadError."""
    return _guarded(_parse, origin, data, origin)


def _parse(data: bytes, origin: str) -> list[Kernel]:
    if data[:4] == b"AKS2":
        return [
            kernel
            for name, lds, blob in unpack_aks2(data, origin)
            for kernel in parse_elf(blob, f"{origin}:{name:.200}", lds)
        ]
    if data[:4] == b"CCOB" or data.startswith(BUNDLE):
        return [k for name, blob in unbundle(data, origin) for k in parse_elf(blob, name)]
    if data[:4] == b"PK\x03\x04":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [member for member in archive.infolist() if not member.is_dir()]
            require_modest(sum(member.file_size for member in members), data, origin)
            found = []
            for member in members:
                content, where = archive.read(member), f"{origin}:{member.filename:.200}"
                if content[:2] == b"PK":
                    raise LoadError(f"{where}: zip files nested in another are not read")
                found += _parse(content, where)
            return found
    return parse_elf(data, origin)


def unpack_aks2(data: bytes, origin: str) -> list[tuple[str, int, bytes]]:
    """Return (name, LDS bytes at launch, code object) of each entry of a pack. Raise LoadError."""
    try:
        magic, total, count, directory = struct.unpack_from("<4s3I", data)
        require_modest(total, data, origin)
        raw = lzma.LZMADecompressor().decompress(data[16:], total + 1)
    except (struct.error, lzma.LZMAError) as error:
        raise LoadError(f"{origin}: damaged AKS2 pack ({error})") from error
    if magic != b"AKS2" or len(raw) != total:
        raise LoadError(f"{origin}: AKS2 header says {total} bytes, unpacked are {len(raw)}")
    entries, at = [], 0
    for _ in range(count):
        try:
            lds, _, offset, size, length = struct.unpack_from("<5I", raw, at)
        except struct.error as error:
            raise LoadError(f"{origin}: AKS2 directory ends early") from error
        name = raw[at + 20 : at + 20 + length].rstrip(b"\0").decode(errors="replace")
        at += 20 + length
        blob = raw[directory + offset : directory + offset + size]
        if len(blob) != size:
            raise LoadError(f"{origin}: AKS2 entry {name!r:.200} lies outside of the pack")
        # AOTriton leaves an empty entry where a kernel did not compile
        if size:
            entries.append((name, lds, blob))
    if at != directory:
        raise LoadError(f"{origin}: AKS2 directory has {at} bytes, its header says {directory}")
    return entries


def parse_elf(data: bytes, origin: str, launch_lds: int = 0) -> list[Kernel]:
    """Return the kernels of one code object.

    Raises:
        LoadError: no ELF file, damaged, for another machine, or of an unknown version.
    """
    return _guarded(_parse_elf, origin, _opened(data, origin), origin, launch_lds)


def _opened(data: bytes, origin: str) -> ELFFile:
    return _guarded(ELFFile, origin, io.BytesIO(data))


def _guarded(function: Callable, origin: str, *arguments):
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


@dataclass(frozen=True)
class Module:
    """A code object as a runtime loads it: kernels by name, its image, (address in the image, size)
    of each variable. refused: why other kernels cannot be run, by name."""

    kernels: dict[str, Kernel]
    refused: dict[str, str]
    image: Image
    variables: dict[str, tuple[int, int]]


def parse_module(data: bytes, origin: str) -> Module:
    """Return everything in one code object.

    Raises:
        LoadError: as :func:`parse_elf` does, but not for a kernel that is not supported.
    """
    elf = _opened(data, origin)
    refused: dict[str, str] = {}
    kernels = {x.name: x for x in _guarded(_parse_elf, origin, elf, origin, 0, refused)}
    raw, executable, pointers = _guarded(_image, origin, elf, origin)
    variables = _guarded(_variables, origin, elf)
    return Module(kernels, refused, Image(raw, 0, executable, pointers), variables)


def _variables(elf: ELFFile) -> dict[str, tuple[int, int]]:
    return {
        symbol.name: (symbol["st_value"], symbol["st_size"])
        for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
        if symbol["st_info"]["type"] == "STT_OBJECT" and not symbol.name.endswith(".kd")
    }


def _parse_elf(
    elf: ELFFile, origin: str, launch_lds: int, refused: dict[str, str] | None = None
) -> list[Kernel]:
    """Read all kernels; refused takes what is wrong with single ones, which is raised otherwise."""
    if elf["e_machine"] != EM_AMDGPU:
        raise LoadError(f"{origin}: machine is {elf['e_machine']}, not {EM_AMDGPU}")
    mach = elf["e_flags"] & 0xFF
    target = of_elf(mach)
    if target is None:
        emulated = ", ".join(f"{name} is {x.mach:#x}" for name, x in TARGETS.items())
        raise LoadError(f"{origin}: made for another GPU (EF_AMDGPU_MACH {mach:#x}, {emulated})")
    elf.stream.seek(7)
    os_abi, abi_version = elf.stream.read(2)
    if os_abi != _ELFOSABI_AMDGPU_HSA:
        raise LoadError(f"{origin}: OS ABI is {os_abi}, AMDGPU_HSA is {_ELFOSABI_AMDGPU_HSA}")
    if abi_version not in _ABI_VERSIONS:
        raise Unsupported(f"{origin}: unknown code object version (ABI version {abi_version})")
    metadata = elf_metadata(elf, origin)
    symbols = {s.name: s for s in elf.get_section_by_name(".dynsym").iter_symbols()}
    data, executable, pointers = _image(elf, origin)
    places = {}
    for described in metadata["amdhsa.kernels"]:
        code = symbols[described[".name"]]
        size = code["st_size"] or _until_next(code["st_value"], symbols.values(), executable)
        places[described[".name"]] = (code["st_value"], size)
    functions = _without(executable, places.values())
    kernels = []
    for described in metadata["amdhsa.kernels"]:
        start, size = places[described[".name"]]
        descriptor = _read(elf, symbols[described[".symbol"]]["st_value"], 64, origin)
        text = _read(elf, start, size, origin)
        image = Image(data, start, functions, pointers)
        try:
            kernels.append(_kernel(described, descriptor, text, launch_lds, image, target))
        except Unsupported as error:
            if refused is None:
                raise
            refused[described[".name"]] = f"{origin}: {error}"
    return kernels


def _until_next(start: int, symbols: Iterable, executable) -> int:
    """Count bytes up to the next symbol or the code's end: hand-written kernels declare no size."""
    ends = [first + size for first, size in executable if first <= start < first + size]
    later = [s["st_value"] for s in symbols if s["st_value"] > start]
    return min([*ends, *later], default=start) - start


def _without(ranges: Iterable, holes: Iterable) -> tuple[tuple[int, int], ...]:
    """Cut holes out of ranges, all (address, size): a file of rocBLAS has 10 MiB of kernels."""
    left = []
    for first, size in ranges:
        at, end = first, first + size
        for start, length in sorted(holes):
            if at < start < end:
                left.append((at, start - at))
            if first <= start < end:
                at = max(at, start + length)
        if at < end:
            left.append((at, end - at))
    return tuple(left)


def _image(elf: ELFFile, origin: str):
    """Read what Image holds: the segments and relocations of LLVM's guide, "Relocation Records"."""
    loaded = list(elf.iter_segments("PT_LOAD"))
    size = max((s["p_vaddr"] + s["p_memsz"] for s in loaded), default=0)
    if size > _IMAGE_LIMIT:
        raise Unsupported(f"{origin}: {size} bytes in memory, at most {_IMAGE_LIMIT} are supported")
    data = bytearray(size)
    for segment in loaded:
        raw = segment.data()
        data[segment["p_vaddr"] : segment["p_vaddr"] + len(raw)] = raw
    pointers = []
    for section in elf.iter_sections():
        if section["sh_type"] != "SHT_RELA":
            continue
        for entry in section.iter_relocations():
            kind, place, value = entry["r_info_type"], entry["r_offset"], entry["r_addend"]
            if kind == _R_ABS64:
                symbol = elf.get_section(section["sh_link"]).get_symbol(entry["r_info_sym"])
                if symbol["st_shndx"] == "SHN_UNDEF":
                    raise LoadError(f"{origin}: {symbol.name} is not defined in this file")
                value += symbol["st_value"]
            elif kind != _R_RELATIVE64:
                raise Unsupported(f"{origin}: relocation type {kind} is not supported")
            struct.pack_into("<Q", data, place, value & (1 << 64) - 1)
            pointers.append(place)
    executable = tuple((s["p_vaddr"], s["p_filesz"]) for s in loaded if s["p_flags"] & 1)
    return bytes(data), executable, tuple(pointers)


def _kernel(
    described: dict, descriptor: bytes, code: bytes, launch_lds: int, image: Image, target: Target
) -> Kernel:
    """Read the kernel descriptor's fields: LLVM's guide, "Kernel Descriptor for GFX6-GFX12"."""
    # hand-written kernels leave it 0 in the descriptor
    kernarg = struct.unpack_from("<3I", descriptor)[2] or described[".kernarg_segment_size"]
    rsrc1, rsrc2, properties, preload = struct.unpack_from("<2I2H", descriptor, 48)
    width = 32 if properties >> 10 & 1 else 64
    if described.get(".wavefront_size", width) != width:
        raise LoadError(f"{described['.name']}: its descriptor is for waves of {width} lanes")
    if rsrc1 >> 12 & 0xF:
        raise Unsupported(f"{described['.name']}: rounds other than to nearest even")
    user = (
        ("private_buffer", 4), ("dispatch", 2), ("queue", 2), ("kernarg", 2), ("dispatch_id", 2),
        ("flat_scratch", 2), ("private_size", 1),
    )  # fmt: skip
    if preload & 0x7F:
        raise LoadError(f"{described['.name']}: preloads kernel arguments, GFX11 cannot")
    return Kernel(
        name=described[".name"],
        code=code,
        lds=described[".group_segment_fixed_size"],
        scratch=described[".private_segment_fixed_size"],
        kernarg=kernarg,
        vgprs=((rsrc1 & 0x3F) + 1) * 256 // width,
        width=width,
        sgprs=described[".sgpr_count"],
        denormals_32=rsrc1 >> 16 & 3 == 3,
        denormals_16_64=rsrc1 >> 18 & 3 == 3,
        clamp_nan=bool(rsrc1 >> 21 & 1),
        ieee=bool(rsrc1 >> 23 & 1),
        user_sgprs=tuple(x for bit, x in enumerate(user) if properties >> bit & 1),
        user_count=rsrc2 >> 1 & 0x1F,
        workgroup_ids=tuple(bool(rsrc2 >> bit & 1) for bit in (7, 8, 9)),
        max_threads=described[".max_flat_workgroup_size"],
        vgpr_spills=described.get(".vgpr_spill_count", 0),
        sgpr_spills=described.get(".sgpr_spill_count", 0),
        arguments=tuple(
            Argument(x.get(".name", ""), x[".offset"], x[".size"], x[".value_kind"])
            for x in described.get(".args", ())
        ),
        finite_16=bool(rsrc1 >> 26 & 1),
        two_units=bool(rsrc1 >> 29 & 1),
        launch_lds=launch_lds,
        image=image,
        dynamic_stack=bool(described.get(".uses_dynamic_stack", False)),
        target=target,
    )


def elf_metadata(elf: ELFFile, origin: str) -> dict:
    """Return the AMDGPU metadata of a code object.

    Of several notes, the kernels of all: the linker keeps one from each object file (rocBLAS's
    files hold hundreds). Raise LoadError if there is none.
    """
    found = [
        msgpack.unpackb(note["n_descdata"])
        for segment in elf.iter_segments("PT_NOTE")
        for note in segment.iter_notes()
        if note["n_name"] == "AMDGPU" and note["n_type"] == _NT_AMDGPU_METADATA
    ]
    if not found:
        raise LoadError(f"{origin}: no AMDGPU metadata note")
    return found[0] | {"amdhsa.kernels": [k for one in found for k in one["amdhsa.kernels"]]}


def _read(elf: ELFFile, address: int, size: int, origin: str) -> bytes:
    for segment in elf.iter_segments("PT_LOAD"):
        start = segment["p_vaddr"]
        if start <= address and address + size <= start + segment["p_filesz"]:
            elf.stream.seek(segment["p_offset"] + address - start)
            data = elf.stream.read(size)
            if len(data) == size:
                return data
    raise LoadError(f"{origin}: cut off, address {address:#x} is not in the file")


def _with_triton_note(file: Path) -> list[Kernel]:
    """Read a file of Triton's cache; the LDS that a launch asks for is in the JSON beside it."""
    note = file.with_suffix(".json")
    lds = _guarded(json.loads, str(note), note.read_bytes()) if note.is_file() else {}
    lds = lds.get("shared", 0) if isinstance(lds, dict) else None
    wrong = LoadError(f"{note}: no note of Triton's, whose shared is bytes of LDS")
    if type(lds) is not int or lds < 0:
        raise wrong
    found = parse_elf(file.read_bytes(), str(file), lds)
    if any(lds > kernel.target.lds for kernel in found):
        raise wrong
    return found
