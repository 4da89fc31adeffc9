# SPDX-License-Identifier: BSD-3-Clause
"""Takes one GPU's kernels out of AMD's own images, which are for four processors.

    select_images.py SOURCE TARGET COMMIT

Both are aotriton.images; SOURCE is of AMD's archive of AOTriton at COMMIT. The code objects and
their directory entries stay as they are. The package test counts them.
"""

import lzma
import shutil
import struct
import sys
from pathlib import Path

from check_images import Kernel, kernels

from checks import elf
from checks.target import ARCH
from checks.verdict import require


def image(chosen: list[Kernel]) -> bytes:
    """An AKS2 image, as upstream's v3python/aks2.py writes it."""
    directory = code = b""
    for kernel in chosen:
        name = kernel.name.encode() + b"\0"
        sizes = kernel.lds, kernel.threads, len(code), len(kernel.code), len(name)
        directory += struct.pack("<5I", *sizes) + name
        code += kernel.code
    head = struct.pack("<3I", len(directory) + len(code), len(chosen), len(directory))
    return b"AKS2" + head + lzma.compress(directory + code)


def select(source: Path, target: Path, commit: str) -> int:
    """Writes TARGET; returns the number of kernels. Raises CheckFailed for another AOTriton's."""
    signatures = [path.read_text() for path in source.glob("*/__signature__")]
    require(
        signatures and all(commit in text for text in signatures),
        f"{source} is not of AOTriton {commit}: {signatures or 'no __signature__'}",
    )
    count = 0
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        out = target / path.relative_to(source)
        out.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".aks2":
            shutil.copyfile(path, out)
            continue
        chosen = [kernel for kernel in kernels(path.read_bytes()) if not elf.fault(kernel.code)]
        count += len(chosen)
        if chosen:
            out.write_bytes(image(chosen))
    return count


if __name__ == "__main__":
    number = select(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    print(f"{number} kernels for {ARCH} of AMD's archive")
