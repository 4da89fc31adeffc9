# SPDX-License-Identifier: BSD-3-Clause
"""ELF files: the GPU that a code object is for, and the libraries that a file needs."""

import io
from pathlib import Path
from typing import NamedTuple

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from checks.target import ARCH, PROCESSOR
from checks.verdict import CheckFailed

# LLVM, "User Guide for AMDGPU Backend", section "Header"
EM_AMDGPU = 224
ELFOSABI_AMDGPU_HSA = 64
EF_AMDGPU_MACH = 0xFF


class Dynamic(NamedTuple):
    """A file's dynamic section: SONAME, DT_NEEDED, and the entries of DT_RPATH and DT_RUNPATH."""

    soname: str
    needed: list[str]
    search_path: list[str]


def fault(code: bytes) -> str:
    """What keeps `code` from being a 64-bit HSA code object for the GPU, or an empty string."""
    try:
        elf = ELFFile(io.BytesIO(code))
    except ELFError as error:
        return f"is not an ELF file ({error})"
    machine, processor = elf.header["e_machine"], elf.header["e_flags"] & EF_AMDGPU_MACH
    if machine not in ("EM_AMDGPU", EM_AMDGPU):
        return f"is for {machine}, not AMDGPU"
    if elf.elfclass != 64 or code[7] != ELFOSABI_AMDGPU_HSA:
        return "is not a 64-bit HSA code object"
    if processor != PROCESSOR:
        return f"is for processor {processor:#x}, not {ARCH} ({PROCESSOR:#x})"
    return ""


def dynamic(path: Path) -> Dynamic:
    """The dynamic section of an ELF file. Raises CheckFailed for a file that cannot be read."""
    soname, needed, paths = "", [], []
    try:
        with path.open("rb") as stream:
            found = ELFFile(stream).get_section_by_name(".dynamic")
            for tag in found.iter_tags() if found else ():
                match tag.entry.d_tag:
                    case "DT_SONAME":
                        soname = tag.soname
                    case "DT_NEEDED":
                        needed.append(tag.needed)
                    case "DT_RPATH":
                        paths += tag.rpath.split(":")
                    case "DT_RUNPATH":
                        paths += tag.runpath.split(":")
    except (ELFError, OSError) as error:
        raise CheckFailed(f"{path.name} is not a readable ELF file: {error}") from None
    return Dynamic(soname, needed, paths)


def section(path: Path, name: str) -> bytes:
    """One section of an ELF file; empty if it has none of that name. Raises like `dynamic`."""
    try:
        with path.open("rb") as stream:
            found = ELFFile(stream).get_section_by_name(name)
            return found.data() if found else b""
    except (ELFError, OSError) as error:
        raise CheckFailed(f"{path.name} is not a readable ELF file: {error}") from None
