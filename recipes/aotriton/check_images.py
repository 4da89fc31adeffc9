# SPDX-License-Identifier: BSD-3-Clause
"""Open every AOTriton image and check each code object in it.

    check_images.py FOLDER [--kernels N]

FOLDER is aotriton.images. An AKS2 image is a header of 16 bytes (magic, unpacked size, number of
kernels, directory size; little endian), then xz: a directory entry per kernel (five u32: LDS
bytes, threads, offset, size, length of the name) with its name, then the code objects.
"""

from __future__ import annotations

import argparse
import lzma
import re
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from checks import elf
from checks.target import ARCH
from checks.verdict import CheckFailed, require

LDS_BYTES = 65536
FORWARD, BACKWARD = "attn_fwd", ("bwd_kernel_dk_dv", "bwd_kernel_dq", "bwd_preprocess")


class Kernel(NamedTuple):
    """One code object of an image."""

    name: str
    lds: int
    threads: int
    code: bytes


def kernels(image: bytes) -> Iterator[Kernel]:
    """The code objects of an AKS2 image. Raises CheckFailed for anything else."""
    require(len(image) >= 16 and image[:4] == b"AKS2", "not an AKS2 image")
    size, count, directory = struct.unpack("<3I", image[4:16])
    try:
        data = lzma.decompress(image[16:])
    except lzma.LZMAError as error:
        raise CheckFailed(f"damaged ({error})") from None
    sizes = f"{len(data)} bytes uncompressed, {directory} of them directory; header: {size} bytes"
    require(len(data) == size and directory <= size, sizes)
    position = 0
    for _ in range(count):
        require(position + 20 <= directory, "the directory is too short")
        lds, threads, offset, length, name = struct.unpack_from("<5I", data, position)
        text = data[position + 20 : position + 20 + name - 1].decode()
        position += 20 + name
        start = directory + offset
        require(start + length <= size, f"{text} lies outside the image")
        yield Kernel(text, lds, threads, data[start : start + length])


def fault(kernel: Kernel) -> str:
    """What is wrong with one code object, or an empty string."""
    if not kernel.code:
        return "is empty: upstream gave up compiling it"
    if kernel.lds > LDS_BYTES:
        return f"needs {kernel.lds} bytes of LDS, and {ARCH} has {LDS_BYTES}"
    return elf.fault(kernel.code)


def check(folder: Path, expected: int | None) -> Counter:
    """The number of kernels by (family, dtype). Raises CheckFailed with every fault."""
    faults, found = [], Counter()
    for path in sorted(folder.rglob("*.aks2")):
        dtype = re.search(r"\uff0a(\w+?)@", path.name)
        try:
            for kernel in kernels(path.read_bytes()):
                found[path.parent.name, dtype[1] if dtype else ""] += 1
                if what := fault(kernel):
                    faults.append(f"{path.name}: {kernel.name} {what}")
        except CheckFailed as error:
            faults.append(f"{path.name}: {error}")
    total = sum(found.values())
    if expected is not None and total != expected:
        faults.append(f"{total} kernels in {folder}, expected {expected}")
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
    require(not faults, "\n".join([*faults, f"{len(faults)} faults"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kernels", type=int, help="expected number of kernels")
    options = parser.parse_args()
    found = check(options.folder, options.kernels)
    for (family, dtype), count in sorted(found.items()):
        print(f"{count:6} {family} {dtype}")
    print(f"{sum(found.values()):6} kernels, all for {ARCH}")


if __name__ == "__main__":
    main()
