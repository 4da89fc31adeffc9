# SPDX-License-Identifier: BSD-3-Clause
"""Device code inside compiled modules: for gfx1151, for nothing else, and enough of it.

    python device_code.py PACKAGE_OR_FILE... [--at-least IMAGES]

Runs inside the tests of packages that carry HIP code; needs no GPU and imports none of them.
Format: https://clang.llvm.org/docs/ClangOffloadBundler.html
"""

import argparse
import importlib.util
import io
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

TARGET = "gfx1151"
#: EF_AMDGPU_MACH of gfx1151, https://llvm.org/docs/AMDGPUUsage.html#header
MACH_GFX1151 = 0x4A
EM_AMDGPU = "EM_AMDGPU"
FATBIN = ".hip_fatbin"
MAGIC, COMPRESSED = b"__CLANG_OFFLOAD_BUNDLE__", b"CCOB"


def images(fatbin: bytes) -> Iterator[tuple[str, bytes]]:
    """(target id, code object) of every device entry in a .hip_fatbin section.

    The section holds one bundle per source file. Raises ValueError for a compressed one, because
    what cannot be read must not count as checked.
    """
    if COMPRESSED in fatbin:
        raise ValueError("compressed bundle: build without --offload-compress")
    start = fatbin.find(MAGIC)
    while start >= 0:
        at = start + len(MAGIC)
        (count,) = struct.unpack_from("<Q", fatbin, at)
        at += 8
        for _ in range(count):
            offset, size, length = struct.unpack_from("<3Q", fatbin, at)
            name = fatbin[at + 24 : at + 24 + length].decode()
            at += 24 + length
            if not name.startswith("host-"):
                yield name, fatbin[start + offset : start + offset + size]
        start = fatbin.find(MAGIC, at)


def findings(name: str, image: bytes) -> tuple[list[str], int]:
    """What is wrong with one code object, and how many kernels it holds."""
    target = name.rpartition("--")[2]
    if target != TARGET:
        return [f"code for {target}"], 0
    if not image:
        return ["an empty code object"], 0
    elf = ELFFile(io.BytesIO(image))
    wrong = []
    if elf["e_machine"] != EM_AMDGPU or elf["e_flags"] & 0xFF != MACH_GFX1151:
        wrong.append(f"a code object that says {TARGET} and is for another processor")
    tables = (s for s in elf.iter_sections() if isinstance(s, SymbolTableSection))
    return wrong, len({s.name for t in tables for s in t.iter_symbols() if s.name.endswith(".kd")})


def libraries(argument: str) -> list[Path]:
    """A file itself, or every shared library of an installed package, which is not imported."""
    if Path(argument).is_file():
        return [Path(argument)]
    spec = importlib.util.find_spec(argument)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{argument} is neither a file nor an installed package")
    return sorted(f for d in spec.submodule_search_locations for f in Path(d).rglob("*.so*"))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+")
    parser.add_argument("--at-least", type=int, default=1, metavar="IMAGES")
    options = parser.parse_args(arguments)
    total, failed = 0, False
    try:
        files = [file for argument in options.what for file in libraries(argument)]
    except ValueError as error:
        print(error)
        return 2
    for file in files:
        with file.open("rb") as stream:
            section = ELFFile(stream).get_section_by_name(FATBIN)
            if section is None:
                continue
            try:
                found = [(name, *findings(name, image)) for name, image in images(section.data())]
            except ValueError as error:
                print(f"{file.name}: {error}")
                failed = True
                continue
        wrong = sorted({text for _, texts, _ in found for text in texts})
        kernels = sum(count for _, _, count in found)
        print(f"{file.name}: {len(found)} images, {kernels} kernels", *wrong, sep="; ")
        failed, total = failed or bool(wrong), total + len(found)
    if total < options.at_least:
        print(f"only {total} images, at least {options.at_least} are expected")
        failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
