# SPDX-License-Identifier: BSD-3-Clause
"""Check device images that HIP's compiler embeds: each must be a code object for the GPU.

The page "Clang Offload Bundler" of clang's documentation describes the format. A compressed bundle
starts with CCOB.
"""

import struct
import zlib
from collections.abc import Iterator

import zstandard

from checks import elf
from checks.target import ARCH
from checks.verdict import CheckFailed

SECTION = ".hip_fatbin"
MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
COMPRESSED = b"CCOB"
COUNT_SIZE = 8
ENTRY_SIZE = 24
# By version of a compressed bundle: the struct format of the two sizes in the bundle's header, and
# the number of bytes of the header. The sizes follow the fields version and method.
HEADERS = {2: ("<II", 24), 3: ("<QQ", 32)}
ZSTANDARD = 1


def count_images(data: bytes) -> int:
    """Count the device images in a .hip_fatbin section.

    Raises:
        CheckFailed: A bundle is damaged, or an image is for another GPU.
    """
    count = 0
    for bundle in bundles(data):
        for target, offset, size in entries(bundle):
            if target.startswith("host"):
                continue
            arch = target.split(":")[0].rsplit("-", 1)[1]
            if arch != ARCH:
                raise CheckFailed(f"a device image for {target}, expected {ARCH} only")
            fault = elf.fault(bundle[offset : offset + size])
            if fault:
                raise CheckFailed(f"the device image for {target} ({size} bytes) {fault}")
            count += 1
    return count


def bundles(data: bytes) -> Iterator[bytes]:
    """Yield each bundle of a .hip_fatbin section, decompressed if necessary.

    Raises:
        CheckFailed: A byte between bundles is not zero, or a compressed bundle is damaged.
    """
    position = 0
    while True:
        while position < len(data) and data[position] == 0:
            position += 1
        if position == len(data):
            return
        if data.startswith(MAGIC, position):
            size = _bundle_size(data[position:])
            yield data[position : position + size]
        elif data.startswith(COMPRESSED, position):
            size, bundle = _decompress(data[position:])
            yield bundle
        else:
            start = data[position : position + 8]
            raise CheckFailed(f"no offload bundle at byte {position} of {SECTION}: {start!r}")
        position += size


def entries(bundle: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield the target ID, the offset and the size of each entry of an uncompressed bundle."""
    if not bundle.startswith(MAGIC):
        raise CheckFailed("a compressed bundle does not contain a bundle")
    position = len(MAGIC)
    (count,) = struct.unpack_from("<Q", bundle, position)
    position += COUNT_SIZE
    for _ in range(count):
        offset, size, length = struct.unpack_from("<QQQ", bundle, position)
        position += ENTRY_SIZE
        target = bundle[position : position + length].decode()
        position += length
        yield target, offset, size


def _bundle_size(data: bytes) -> int:
    ends = [offset + size for _, offset, size in entries(data)]
    return max(ends, default=len(MAGIC) + COUNT_SIZE)


def _decompress(data: bytes) -> tuple[int, bytes]:
    """Return the size of a compressed bundle (including its header), and its content."""
    version, method = struct.unpack_from("<HH", data, 4)
    if version not in HEADERS:
        raise CheckFailed(f"a compressed bundle of version {version}; this check reads 2 and 3")
    sizes, header_size = HEADERS[version]
    size, unpacked_size = struct.unpack_from(sizes, data, 8)
    body = data[header_size:size]
    try:
        if method == ZSTANDARD:
            return size, zstandard.decompress(body, max_output_size=unpacked_size)
        return size, zlib.decompress(body)
    except (zlib.error, zstandard.ZstdError) as error:
        raise CheckFailed(f"a compressed bundle does not decompress: {error}") from None
