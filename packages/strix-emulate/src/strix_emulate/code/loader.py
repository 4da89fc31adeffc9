# SPDX-License-Identifier: BSD-3-Clause
"""Loading of AMDGPU code objects, from ELF files and from files that contain several of them.

Sources: LLVM's "User Guide for AMDGPU Backend" for the ELF header, notes, metadata of code object
V4 to V6, and the kernel descriptor of GFX11. AOTriton's v3src for its packs, which are a header
that begins with "AKS2", and one xz stream.
"""

import bisect
import io
import json
import lzma
import struct
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from strix_emulate.code import limits
from strix_emulate.code.bundles import is_bundle, unbundle
from strix_emulate.code.elf import CodeObject, guarded
from strix_emulate.code.kernel import Argument, Image, Kernel
from strix_emulate.code.limits import Budget, read_file
from strix_emulate.code.target import TARGETS, Target, find_target_of_elf
from strix_emulate.errors import LoadError, Unsupported

EM_AMDGPU = "EM_AMDGPU"
_ELFOSABI_AMDGPU_HSA = 64
#: e_ident[EI_ABIVERSION] of code object V4, V5 and V6.
_ABI_VERSIONS = (2, 3, 4)
#: Values that a wave may receive in its first SGPRs, as (name, number of SGPRs). The index of an
#: entry is the bit of the kernel descriptor's properties that requests the value.
_USER_SGPRS = (
    ("private_buffer", 4),
    ("dispatch", 2),
    ("queue", 2),
    ("kernarg", 2),
    ("dispatch_id", 2),
    ("flat_scratch", 2),
    ("private_size", 1),
)


def load(path: Path) -> list[Kernel]:
    """Load the kernels of a file that `parse` supports, or of all .hsaco files in a Triton cache.

    Raises:
        LoadError: A file, or one of its kernels, cannot be loaded. The message has the reason.
    """
    try:
        if path.is_dir():
            return _load_triton_cache(path)
        if path.exists() and not path.is_file():  # A read of a pipe might never end.
            raise LoadError(f"{path}: not a regular file")
        return parse(read_file(path), str(path))
    except OSError as error:
        raise LoadError(f"{path}: {error.strerror}") from error


def _load_triton_cache(folder: Path) -> list[Kernel]:
    kernels = []
    for file in sorted(folder.rglob("*.hsaco")):
        if file.is_file():
            kernels += _load_with_triton_note(file)
    if not kernels:
        raise LoadError(f"{folder}: no .hsaco file in this folder")
    return kernels


def parse(data: bytes, origin: str) -> list[Kernel]:
    """Return the kernels of a code object, an AOTriton pack, an offload bundle, or a zip of these.

    Of an offload bundle, return only the kernels for one GPU: the first one in TARGETS for which
    the bundle has code.

    Raises:
        LoadError: The data, or one of its kernels, cannot be loaded. The message has the reason.
    """
    return guarded(_parse, origin, data, origin, Budget(origin, len(data)))


def _parse(data: bytes, origin: str, budget: Budget) -> list[Kernel]:
    if data[:4] == b"PK\x03\x04":
        return _parse_zip(data, origin, budget)
    kernels = []
    if data[:4] == b"AKS2":
        for name, lds, blob in unpack_aks2(data, origin, budget):
            kernels += parse_elf(blob, f"{origin}:{name:.200}", lds, budget)
        return kernels
    if is_bundle(data):
        for name, blob in unbundle(data, origin, None, budget):
            kernels += parse_elf(blob, name, 0, budget)
        return kernels
    return parse_elf(data, origin, 0, budget)


def _parse_zip(data: bytes, origin: str, budget: Budget) -> list[Kernel]:
    kernels = []
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [member for member in archive.infolist() if not member.is_dir()]
        budget.count("entries", len(members))
        budget.take(sum(member.file_size for member in members))
        for member in members:
            content = archive.read(member)
            name = f"{origin}:{member.filename:.200}"
            if content[:2] == b"PK":
                raise LoadError(f"{name}: a zip file in another zip file is not supported")
            kernels += _parse(content, name, budget)
    return kernels


def unpack_aks2(data: bytes, origin: str, budget: Budget) -> list[tuple[str, int, bytes]]:
    """Return (name, LDS bytes at launch, code object) of each entry of a pack.

    Raises:
        LoadError: The pack is damaged, or exceeds its budget.
    """
    try:
        magic, total, count, directory = struct.unpack_from("<4s3I", data)
        budget.take(total)
        stream = lzma.LZMADecompressor(lzma.FORMAT_AUTO, limits.XZ_MEMORY)
        raw = stream.decompress(data[16:], total + 1)
    except (struct.error, lzma.LZMAError) as error:
        raise LoadError(f"{origin}: damaged AKS2 pack ({error})") from error
    if magic != b"AKS2" or len(raw) != total:
        raise LoadError(f"{origin}: AKS2 pack does not unpack to its header's {total} bytes")
    entries = []
    at = 0
    remaining = total
    for _ in range(budget.count("entries", count)):
        try:
            lds, _, offset, size, length = struct.unpack_from("<5I", raw, at)
        except struct.error as error:
            raise LoadError(f"{origin}: AKS2 directory ends early") from error
        name = raw[at + 20 : at + 20 + length].rstrip(b"\0").decode(errors="replace")
        at += 20 + length
        remaining -= size
        if remaining < 0:
            raise LoadError(
                f"{origin}: AKS2 entries overlap: together they are larger than the pack"
            )
        blob = raw[directory + offset : directory + offset + size]
        if len(blob) != size:
            raise LoadError(f"{origin}: AKS2 entry {name!r:.200} lies outside of the pack")
        # AOTriton leaves an empty entry where a kernel did not compile.
        if size:
            entries.append((name, lds, blob))
    if at != directory:
        raise LoadError(
            f"{origin}: AKS2 directory has {at} bytes, the pack's header says {directory}"
        )
    return entries


def parse_elf(
    data: bytes, origin: str, launch_lds: int = 0, budget: Budget | None = None
) -> list[Kernel]:
    """Return the kernels of one code object.

    Args:
        data: The code object.
        origin: Name of the file, for messages.
        launch_lds: Bytes of LDS that a launch adds.
        budget: Budget of the file that contains the code object. None if `data` is all of the file.

    Raises:
        LoadError: The data is not an ELF file, is damaged, exceeds its budget, is not for a
            supported GPU, has an unknown version, or has a kernel that is not supported.
    """
    code_object = CodeObject(data, origin, budget or Budget(origin, len(data)))
    return guarded(_parse_elf, origin, code_object, launch_lds)


@dataclass(frozen=True)
class Module:
    """A code object as a runtime loads it.

    Attributes:
        kernels: Kernels by name.
        refused: Reasons why the other kernels are not supported, by the kernel's name.
        image: The loaded file.
        variables: (address in the image, size) of variables, by name.
    """

    kernels: dict[str, Kernel]
    refused: dict[str, str]
    image: Image
    variables: dict[str, tuple[int, int]]


def parse_module(data: bytes, origin: str) -> Module:
    """Return the kernels, the image and the variables of one code object.

    A kernel that is not supported raises no error. `Module.refused` lists it.

    Raises:
        LoadError: For the other reasons for which :func:`parse_elf` raises it.
    """
    code_object = CodeObject(data, origin, Budget(origin, len(data)))
    refused: dict[str, str] = {}
    kernels = guarded(_parse_elf, origin, code_object, 0, refused)
    raw, executable, pointers = guarded(code_object.image, origin)
    variables = {}
    for symbol in code_object.symbols:
        if symbol.is_variable and not symbol.name.endswith(".kd"):
            variables[symbol.name] = (symbol.value, symbol.size)
    image = Image(raw, 0, executable, pointers)
    return Module({kernel.name: kernel for kernel in kernels}, refused, image, variables)


def _parse_elf(
    code_object: CodeObject, launch_lds: int, refused: dict[str, str] | None = None
) -> list[Kernel]:
    """Return the kernels of a code object.

    Args:
        code_object: The code object.
        launch_lds: Bytes of LDS that a launch adds.
        refused: Receives, by the kernel's name, the reason why a kernel is not supported. If
            `refused` is None, such a kernel raises Unsupported.
    """
    target = _read_target(code_object)
    descriptions = code_object.metadata()["amdhsa.kernels"]
    symbols = {symbol.name: symbol for symbol in code_object.symbols}
    data, executable, pointers = code_object.image()
    starts = sorted({symbol.value for symbol in code_object.symbols})
    places = {}
    for description in descriptions:
        name = description[".name"]
        code = symbols[name]
        size = code.size or _until_next(code.value, starts, executable)
        places[name] = (code.value, size)
    functions = _subtract_ranges(executable, places.values())
    kernels = []
    for description in descriptions:
        name = description[".name"]
        start, size = places[name]
        descriptor = code_object.read(symbols[description[".symbol"]].value, 64)
        text = code_object.read(start, size)
        image = Image(data, start, functions, pointers)
        try:
            kernels.append(_read_kernel(description, descriptor, text, launch_lds, image, target))
        except Unsupported as error:
            if refused is None:
                raise
            refused[name] = f"{code_object.origin}: {error}"
    return kernels


def _read_target(code_object: CodeObject) -> Target:
    """Return a code object's GPU. Raise LoadError if the GPU, OS ABI or version is unsupported."""
    header = code_object.header
    origin = code_object.origin
    if header["e_machine"] != EM_AMDGPU:
        raise LoadError(f"{origin}: machine is {header['e_machine']}, not {EM_AMDGPU}")
    mach = header["e_flags"] & 0xFF
    target = find_target_of_elf(mach)
    if target is None:
        emulated = ", ".join(f"{name} is {x.mach:#x}" for name, x in TARGETS.items())
        raise LoadError(
            f"{origin}: made for a GPU that is not supported "
            f"(EF_AMDGPU_MACH is {mach:#x}; {emulated})"
        )
    os_abi, abi_version = code_object.data[7:9]
    if os_abi != _ELFOSABI_AMDGPU_HSA:
        raise LoadError(f"{origin}: OS ABI is {os_abi}, not {_ELFOSABI_AMDGPU_HSA} (AMDGPU_HSA)")
    if abi_version not in _ABI_VERSIONS:
        raise Unsupported(f"{origin}: unknown code object version (ABI version {abi_version})")
    return target


def _until_next(start: int, starts: list[int], executable) -> int:
    """Return the number of bytes up to the next symbol or the end of the code.

    Hand-written kernels need this, because their symbols have no size.
    """
    ends = [first + size for first, size in executable if first <= start < first + size]
    next_starts = starts[bisect.bisect_right(starts, start) :][:1]
    return min([*ends, *next_starts], default=start) - start


def _subtract_ranges(ranges: Iterable, holes: Iterable) -> tuple[tuple[int, int], ...]:
    """Return the parts of the ranges that are in none of the holes.

    Ranges, holes and results are (address, size). The caller removes the kernels from the code, so
    that only functions remain. A file of rocBLAS has 10 MiB of kernels, and few functions.
    """
    remaining = []
    holes = sorted(holes)
    for first, size in ranges:
        at = first
        end = first + size
        for start, length in holes:
            if at < start < end:
                remaining.append((at, start - at))
            if first <= start < end:
                at = max(at, start + length)
        if at < end:
            remaining.append((at, end - at))
    return tuple(remaining)


def _keeps_denormals(name: str, mode: int) -> bool:
    """Return True if a denormal mode keeps denormals, and False if it flushes them.

    Raise Unsupported if it flushes denormals only in inputs or only in results.
    """
    if mode not in (0, 3):
        raise Unsupported(f"{name}: flushes denormals only in inputs or only in results")
    return mode == 3


def _read_kernel(
    description: dict,
    descriptor: bytes,
    code: bytes,
    launch_lds: int,
    image: Image,
    target: Target,
) -> Kernel:
    """Return a kernel from its descriptor's fields and its metadata, which is `description`.

    Source: LLVM's guide, "Kernel Descriptor for GFX6-GFX12".
    """
    name = description[".name"]
    # A hand-written kernel's descriptor may have kernarg size 0. The metadata has the real size.
    kernarg = struct.unpack_from("<3I", descriptor)[2] or description[".kernarg_segment_size"]
    rsrc1, rsrc2, properties, preload = struct.unpack_from("<2I2H", descriptor, 48)
    width = 32 if properties >> 10 & 1 else 64
    if description.get(".wavefront_size", width) != width:
        raise LoadError(
            f"{name}: its descriptor is for waves of {width} lanes, unlike its metadata"
        )
    if rsrc1 >> 12 & 0xF:
        raise Unsupported(f"{name}: does not round to nearest even, the only supported rounding")
    if preload & 0x7F:
        raise LoadError(f"{name}: preloads kernel arguments, which GFX11 cannot do")
    return Kernel(
        name=name,
        code=code,
        lds=description[".group_segment_fixed_size"],
        scratch=description[".private_segment_fixed_size"],
        kernarg=kernarg,
        vgprs=((rsrc1 & 0x3F) + 1) * 256 // width,
        width=width,
        sgprs=description[".sgpr_count"],
        denormals_32=_keeps_denormals(name, rsrc1 >> 16 & 3),
        denormals_16_64=_keeps_denormals(name, rsrc1 >> 18 & 3),
        clamp_nan=bool(rsrc1 >> 21 & 1),
        ieee=bool(rsrc1 >> 23 & 1),
        user_sgprs=tuple(x for bit, x in enumerate(_USER_SGPRS) if properties >> bit & 1),
        user_count=rsrc2 >> 1 & 0x1F,
        workgroup_ids=tuple(bool(rsrc2 >> bit & 1) for bit in (7, 8, 9)),
        max_threads=description[".max_flat_workgroup_size"],
        vgpr_spills=description.get(".vgpr_spill_count", 0),
        sgpr_spills=description.get(".sgpr_spill_count", 0),
        arguments=_read_arguments(description),
        finite_16=bool(rsrc1 >> 26 & 1),
        two_units=bool(rsrc1 >> 29 & 1),
        launch_lds=launch_lds,
        image=image,
        dynamic_stack=bool(description.get(".uses_dynamic_stack", False)),
        target=target,
    )


def _read_arguments(description: dict) -> tuple[Argument, ...]:
    arguments = []
    for entry in description.get(".args", ()):
        name = entry.get(".name", "")
        arguments.append(Argument(name, entry[".offset"], entry[".size"], entry[".value_kind"]))
    return tuple(arguments)


def _load_with_triton_note(file: Path) -> list[Kernel]:
    """Load the kernels of a file in Triton's cache.

    The JSON file next to it has the bytes of LDS that a launch needs.
    """
    note = file.with_suffix(".json")
    content = {}
    if note.is_file():
        content = guarded(json.loads, str(note), read_file(note, limits.NOTE))
    lds = content.get("shared", 0) if isinstance(content, dict) else None
    error = LoadError(
        f'{note}: expected Triton\'s JSON, in which "shared" is a number of bytes that fits in LDS'
    )
    if type(lds) is not int or lds < 0:
        raise error
    kernels = parse_elf(read_file(file), str(file), lds)
    if any(lds > kernel.target.lds for kernel in kernels):
        raise error
    return kernels
