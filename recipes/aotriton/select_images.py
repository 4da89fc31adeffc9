# SPDX-License-Identifier: BSD-3-Clause
"""Select the kernels for one GPU from AMD's images, which have kernels for four GPUs.

    select_images.py SOURCE TARGET COMMIT

SOURCE and TARGET are folders aotriton.images. SOURCE comes from AMD's archive of AOTriton at
COMMIT. The code objects and their directory entries are copied unchanged. The package test checks
the number of code objects.
"""

import lzma
import shutil
import struct
import sys
from pathlib import Path

from check_images import ENTRY, Kernel, kernels

from checks import elf
from checks.target import ARCH
from checks.verdict import require


def make_image(selected: list[Kernel]) -> bytes:
    """Return an AKS2 image, as upstream's v3python/aks2.py writes it."""
    directory = b""
    code = b""
    for kernel in selected:
        name = kernel.name.encode() + b"\0"
        directory += ENTRY.pack(
            kernel.lds,
            kernel.threads,
            len(code),
            len(kernel.code),
            len(name),
        )
        directory += name
        code += kernel.code
    size = len(directory) + len(code)
    header = struct.pack("<3I", size, len(selected), len(directory))
    return b"AKS2" + header + lzma.compress(directory + code)


def select(source: Path, target: Path, commit: str) -> int:
    """Write images with the kernels for the GPU.

    Args:
        source: The folder aotriton.images of AMD's archive.
        target: The folder to write.
        commit: The commit of AOTriton.

    Returns:
        The number of kernels.

    Raises:
        CheckFailed: The images are not of this commit of AOTriton, or an image is damaged.
    """
    signatures = [path.read_text() for path in source.glob("*/__signature__")]
    is_of_commit = signatures and all(commit in text for text in signatures)
    content = signatures or "no __signature__"
    require(is_of_commit, f"{source} is not of AOTriton {commit}: {content}")
    count = 0
    for path in sorted(source.rglob("*")):
        if not path.is_file():
            continue
        out = target / path.relative_to(source)
        out.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".aks2":
            shutil.copyfile(path, out)
            continue
        selected = []
        for kernel in kernels(path.read_bytes()):
            if not elf.fault(kernel.code):
                selected.append(kernel)
        count += len(selected)
        if selected:
            out.write_bytes(make_image(selected))
    return count


if __name__ == "__main__":
    number = select(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    print(f"{number} kernels for {ARCH} of AMD's archive")
