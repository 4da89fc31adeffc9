# SPDX-License-Identifier: BSD-3-Clause
"""Device images that HIP's compiler embeds: each must be a code object for the GPU.

Format: clang's documentation, "Clang Offload Bundler"; a compressed bundle starts with CCOB.
"""

import struct
import zlib
from collections.abc import Iterator

import zstandard

from checks import elf
from checks.target import ARCH
from checks.verdict import CheckFailed

SECTION = ".hip_fatbin"
MAGIC, COMPRESSED = b"__CLANG_OFFLOAD_BUNDLE__", b"CCOB"


def count_images(data: bytes) -> int:
    """The number of device images in a .hip_fatbin section.

    Raises CheckFailed for damaged bundles and for an image for another GPU.
    """
    count = 0
    for bundle in bundles(data):
        for target, offset, size in entries(bundle):
            if target.startswith("host"):
                continue
            if target.split(":")[0].rsplit("-", 1)[1] != ARCH:
                raise CheckFailed(f"a device image for {target}, expected {ARCH} only")
            if fault := elf.fault(bundle[offset : offset + size]):
                raise CheckFailed(f"the device image for {target} ({size} bytes) {fault}")
            count += 1
    return count


def bundles(data: bytes) -> Iterator[bytes]:
    """The bundles of a .hip_fatbin section, uncompressed.

    Bundles follow each other; raises CheckFailed for anything but zeros between them.
    """
    at = 0
    while True:
        while at < len(data) and data[at] == 0:
            at += 1
        if at == len(data):
            return
        if data.startswith(MAGIC, at):
            size = _bundle_size(data[at:])
            yield data[at : at + size]
        elif data.startswith(COMPRESSED, at):
            size, bundle = _decompress(data[at:])
            yield bundle
        else:
            found = data[at : at + 8]
            raise CheckFailed(f"no offload bundle at byte {at} of {SECTION}: {found!r}")
        at += size


def entries(bundle: bytes) -> Iterator[tuple[str, int, int]]:
    """(target ID, offset, size) of each entry of an uncompressed bundle."""
    if not bundle.startswith(MAGIC):
        raise CheckFailed("a compressed bundle does not contain a bundle")
    (count,) = struct.unpack_from("<Q", bundle, len(MAGIC))
    at = len(MAGIC) + 8
    for _ in range(count):
        offset, size, length = struct.unpack_from("<QQQ", bundle, at)
        yield bundle[at + 24 : at + 24 + length].decode(), offset, size
        at += 24 + length


def _bundle_size(data: bytes) -> int:
    return max((offset + size for _, offset, size in entries(data)), default=len(MAGIC) + 8)


def _decompress(data: bytes) -> tuple[int, bytes]:
    """The size of a compressed bundle, header included, and its content."""
    version, method = struct.unpack_from("<HH", data, 4)
    if version not in (2, 3):
        raise CheckFailed(f"a compressed bundle of version {version}; this check reads 2 and 3")
    size, unpacked = struct.unpack_from("<II" if version == 2 else "<QQ", data, 8)
    body = data[24 if version == 2 else 32 : size]
    try:
        if method == 1:
            return size, zstandard.decompress(body, max_output_size=unpacked)
        return size, zlib.decompress(body)
    except (zlib.error, zstandard.ZstdError) as error:
        raise CheckFailed(f"a compressed bundle does not decompress: {error}") from None
