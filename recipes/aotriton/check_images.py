# SPDX-License-Identifier: BSD-3-Clause
"""Check every AOTriton image and each code object in it.

    check_images.py FOLDER [--kernels N]

FOLDER is the folder aotriton.images, and N is the number of kernels that must be in it. An image is
an AKS2 file, which packs compiled kernels. It starts with a header of 16 bytes: the magic "AKS2",
then three little-endian u32: the unpacked size, the number of kernels and the size of the
directory. The rest of the file is an xz stream. Unpacked, the stream is the directory, followed by
the code objects. The directory has an entry for each kernel: five u32 (bytes of LDS, threads per
workgroup, offset, size, length of the name), then the name.
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
HEADER_SIZE = 16
ENTRY = struct.Struct("<5I")
FORWARD = "attn_fwd"
BACKWARD = ("bwd_kernel_dk_dv", "bwd_kernel_dq", "bwd_preprocess")


class Kernel(NamedTuple):
    """One code object of an image.

    Attributes:
        name: The name in the directory.
        lds: The bytes of LDS that it needs.
        threads: The number of threads per workgroup.
        code: The code object.
    """

    name: str
    lds: int
    threads: int
    code: bytes


def kernels(image: bytes) -> Iterator[Kernel]:
    """Yield the code objects of an AKS2 image. Raise CheckFailed if it is not such an image."""
    require(len(image) >= HEADER_SIZE and image[:4] == b"AKS2", "not an AKS2 image")
    size, count, directory = struct.unpack("<3I", image[4:HEADER_SIZE])
    try:
        data = lzma.decompress(image[HEADER_SIZE:])
    except lzma.LZMAError as error:
        raise CheckFailed(f"damaged ({error})") from None
    sizes = f"{len(data)} bytes uncompressed, {directory} of them directory; header: {size} bytes"
    require(len(data) == size and directory <= size, sizes)
    position = 0
    for _ in range(count):
        require(position + ENTRY.size <= directory, "the directory is too short")
        lds, threads, offset, length, name_size = ENTRY.unpack_from(data, position)
        position += ENTRY.size
        name = data[position : position + name_size - 1].decode()  # a zero byte ends the name
        position += name_size
        start = directory + offset
        require(start + length <= size, f"{name} lies outside the image")
        yield Kernel(name, lds, threads, data[start : start + length])


def fault(kernel: Kernel) -> str:
    """Return the fault of a code object, or an empty string if there is none."""
    if not kernel.code:
        return "is empty: upstream's compiler has failed"
    if kernel.lds > LDS_BYTES:
        return f"needs {kernel.lds} bytes of LDS, but {ARCH} has {LDS_BYTES}"
    return elf.fault(kernel.code)


def list_missing(counts: Counter) -> list[str]:
    """For each dtype of forward kernels, return a line for each missing family of backward ones."""
    lines = []
    for dtype in sorted(dtype for family, dtype in counts if family == FORWARD):
        for family in BACKWARD:
            if not counts[family, dtype]:
                lines.append(f"no {family} kernel for {dtype}")
    return lines


def check(folder: Path, expected: int | None) -> Counter:
    """Count the kernels in images by (family, dtype).

    Args:
        folder: The folder aotriton.images.
        expected: The number of all kernels; None to accept any number.

    Raises:
        CheckFailed: An image or a kernel is wrong or missing. The message lists all faults.
    """
    faults = []
    counts = Counter()
    for path in sorted(folder.rglob("*.aks2")):
        match = re.search(r"\uff0a(\w+?)@", path.name)
        dtype = match[1] if match else ""
        family = path.parent.name
        try:
            for kernel in kernels(path.read_bytes()):
                counts[family, dtype] += 1
                reason = fault(kernel)
                if reason:
                    faults.append(f"{path.name}: {kernel.name} {reason}")
        except CheckFailed as error:
            faults.append(f"{path.name}: {error}")
    total = sum(counts.values())
    if expected is not None and total != expected:
        faults.append(f"{total} kernels in {folder}, expected {expected}")
    if not any(family == FORWARD for family, _ in counts):
        faults.append(f"no {FORWARD} kernel in {folder}")
    faults += list_missing(counts)
    if not list(folder.glob("*/__signature__")):
        faults.append(f"no __signature__ below {folder}")
    require(not faults, "\n".join([*faults, f"{len(faults)} faults"]))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kernels", type=int, help="expected number of kernels")
    options = parser.parse_args()
    counts = check(options.folder, options.kernels)
    for (family, dtype), count in sorted(counts.items()):
        print(f"{count:6} {family} {dtype}")
    print(f"{sum(counts.values()):6} kernels, all for {ARCH}")


if __name__ == "__main__":
    main()
