# SPDX-License-Identifier: BSD-3-Clause
"""Read ELF files: the GPU that a code object is for, and the libraries that a file needs."""

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
    """A file's dynamic section.

    Attributes:
        soname: The entry of DT_SONAME, or "" without one.
        needed: The entries of DT_NEEDED.
        search_path: The entries of DT_RPATH and DT_RUNPATH.
    """

    soname: str
    needed: list[str]
    search_path: list[str]


def fault(code: bytes) -> str:
    """Return why bytes are not a 64-bit HSA code object for the GPU, or "" if they are one."""
    try:
        elf = ELFFile(io.BytesIO(code))
    except ELFError as error:
        return f"is not an ELF file ({error})"
    machine = elf.header["e_machine"]
    if machine not in ("EM_AMDGPU", EM_AMDGPU):
        return f"is for {machine}, not AMDGPU"
    if elf.elfclass != 64 or code[7] != ELFOSABI_AMDGPU_HSA:
        return "is not a 64-bit HSA code object"
    processor = elf.header["e_flags"] & EF_AMDGPU_MACH
    if processor != PROCESSOR:
        return f"is for processor {processor:#x}, not {ARCH} ({PROCESSOR:#x})"
    return ""


def dynamic(path: Path) -> Dynamic:
    """Read the dynamic section of an ELF file. Raise CheckFailed if it cannot be read."""
    soname = ""
    needed = []
    search_path = []
    try:
        with path.open("rb") as stream:
            dynamic_section = ELFFile(stream).get_section_by_name(".dynamic")
            tags = list(dynamic_section.iter_tags()) if dynamic_section else []
            for tag in tags:
                match tag.entry.d_tag:
                    case "DT_SONAME":
                        soname = tag.soname
                    case "DT_NEEDED":
                        needed.append(tag.needed)
                    case "DT_RPATH":
                        search_path += tag.rpath.split(":")
                    case "DT_RUNPATH":
                        search_path += tag.runpath.split(":")
    except (ELFError, OSError) as error:
        raise CheckFailed(f"{path.name} is not a readable ELF file: {error}") from None
    return Dynamic(soname, needed, search_path)


def section(path: Path, name: str) -> bytes:
    """Read a section of an ELF file.

    Returns:
        The bytes of the section; empty if the file has no such section.

    Raises:
        CheckFailed: The file cannot be read.
    """
    try:
        with path.open("rb") as stream:
            named = ELFFile(stream).get_section_by_name(name)
            return named.data() if named else b""
    except (ELFError, OSError) as error:
        raise CheckFailed(f"{path.name} is not a readable ELF file: {error}") from None
