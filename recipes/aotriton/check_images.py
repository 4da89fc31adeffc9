# SPDX-License-Identifier: BSD-3-Clause
"""Opens every AOTriton image and checks each code object in it.

    check_images.py FOLDER [--kernels N]

FOLDER is aotriton.images. An AKS2 image is a header of 16 bytes (magic, unpacked size, number of
kernels, directory size; little endian), then xz: a directory entry per kernel (five u32: LDS
bytes, threads, offset, size, length of the name) with its name, then the code objects.
"""

from __future__ import annotations

import argparse
import io
import lzma
import re
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

EM_AMDGPU, OSABI_AMDGPU_HSA = 224, 64
EF_AMDGPU_MACH_GFX1151 = 0x4A
LDS_BYTES = 65536
FORWARD, BACKWARD = "attn_fwd", ("bwd_kernel_dk_dv", "bwd_kernel_dq", "bwd_preprocess")


class Kernel(NamedTuple):
    """One code object of an image."""

    name: str
    lds: int
    threads: int
    code: bytes


def kernels(image: bytes) -> Iterator[Kernel]:
    """The code objects of an AKS2 image. Raises ValueError for a file that is none."""
    if len(image) < 16 or image[:4] != b"AKS2":
        raise ValueError("no AKS2 image")
    size, count, directory = struct.unpack("<3I", image[4:16])
    try:
        data = lzma.decompress(image[16:])
    except lzma.LZMAError as error:
        raise ValueError(f"damaged ({error})") from None
    if len(data) != size or directory > size:
        raise ValueError(f"{len(data)} bytes unpacked, its header says {size}")
    position = 0
    for _ in range(count):
        if position + 20 > directory:
            raise ValueError("its directory is too short")
        lds, threads, offset, length, name = struct.unpack_from("<5I", data, position)
        text = data[position + 20 : position + 20 + name - 1].decode()
        position += 20 + name
        start = directory + offset
        if start + length > size:
            raise ValueError(f"{text} lies outside of it")
        yield Kernel(text, lds, threads, data[start : start + length])


def fault(kernel: Kernel) -> str:
    """What is wrong with one code object, or nothing."""
    if not kernel.code:
        return "is empty: its compilation was given up"
    try:
        elf = ELFFile(io.BytesIO(kernel.code))
    except ELFError as error:
        return f"is no ELF file ({error})"
    header = elf.header
    if header["e_machine"] not in ("EM_AMDGPU", EM_AMDGPU):
        return f"is for {header['e_machine']}"
    if kernel.code[7] != OSABI_AMDGPU_HSA or elf.elfclass != 64:
        return "is no HSA code object"
    if (machine := header["e_flags"] & 0xFF) != EF_AMDGPU_MACH_GFX1151:
        return f"is for machine {machine:#x}, not gfx1151 ({EF_AMDGPU_MACH_GFX1151:#x})"
    if kernel.lds > LDS_BYTES:
        return f"wants {kernel.lds} bytes of LDS; gfx1151 has {LDS_BYTES}"
    return ""


def check(folder: Path, wanted: int | None) -> Counter:
    """Kernels by (family, dtype). Raises SystemExit that names every fault."""
    faults, found = [], Counter()
    for path in sorted(folder.rglob("*.aks2")):
        dtype = re.search(r"\uff0a(\w+?)@", path.name)
        try:
            for kernel in kernels(path.read_bytes()):
                found[path.parent.name, dtype[1] if dtype else ""] += 1
                if what := fault(kernel):
                    faults.append(f"{path.name}: {kernel.name} {what}")
        except ValueError as error:
            faults.append(f"{path.name}: {error}")
    total = sum(found.values())
    if wanted is not None and total != wanted:
        faults.append(f"{total} kernels in {folder}, expected {wanted}")
    dtypes = {dtype for family, dtype in found if family == FORWARD}
    if not dtypes:
        faults.append(f"no {FORWARD} kernel in {folder}")
    faults += [
        f"no {family} kernel for {dtype}"
        for dtype in sorted(dtypes)
        for family in BACKWARD
        if not found[family, dtype]
    ]
    if not list(folder.glob("*/__signature__")):
        faults.append(f"no __signature__ below {folder}")
    if faults:
        raise SystemExit("\n".join([*faults, f"{len(faults)} faults"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kernels", type=int, help="how many there have to be")
    options = parser.parse_args()
    found = check(options.folder, options.kernels)
    for (family, dtype), count in sorted(found.items()):
        print(f"{count:6} {family} {dtype}")
    print(f"{sum(found.values()):6} kernels, all for gfx1151")


if __name__ == "__main__":
    main()
