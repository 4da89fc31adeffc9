# SPDX-License-Identifier: BSD-3-Clause
"""clang's offload bundles: files with code objects for several GPUs, possibly compressed."""

import ctypes.util
import struct
import zlib
from collections.abc import Iterator

from strix_emulate.code.limits import Budget
from strix_emulate.code.target import TARGETS, Target
from strix_emulate.errors import LoadError

BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"
_COMPRESSED = b"CCOB"
#: By version of a compressed bundle: size of the header in bytes, and the offset and format of the
#: header's field with the uncompressed size.
_COMPRESSED_HEADERS = {
    1: (20, 8, "<I"),
    2: (24, 12, "<I"),
    3: (32, 16, "<Q"),
}


def is_bundle(data: bytes) -> bool:
    """Return whether bytes are an offload bundle, plain or compressed."""
    return data.startswith((BUNDLE, _COMPRESSED))


def unbundle(
    data: bytes,
    origin: str,
    target: Target | None = None,
    budget: Budget | None = None,
) -> list[tuple[str, bytes]]:
    """Return (name, code object) of each entry for a GPU in clang's bundle, plain or compressed.

    Source: "Bundled Binary File Layout" and "Compressed Bundle" of clang's ClangOffloadBundler.

    Args:
        data: The bundle.
        origin: Name of the file, for messages.
        target: The GPU. None for the first of TARGETS that the bundle has code for.
        budget: Budget of the file that contains the bundle. None if the bundle is the file.

    Raises:
        LoadError: The bundle is damaged, exceeds its budget, has no code for the GPU, or needs
            libzstd and libzstd is missing.
    """
    budget = budget or Budget(origin, len(data))
    names = [target.name] if target else list(TARGETS)
    blobs: dict[str, list[tuple[str, bytes]]] = {}
    bundled_targets = []
    try:
        if data.startswith(_COMPRESSED):
            data = _decompress(data, budget)
        for offset, size, bundled_target in _read_entries(data, budget):
            bundled_targets.append(bundled_target)
            # The entry is TRIPLE-PROCESSOR, or TRIPLE-PROCESSOR:FEATURES.
            name = bundled_target.partition(":")[0].rpartition("-")[2]
            if name not in names:
                continue
            if len(data) < offset + size:
                raise LoadError(f"{origin}: cut off before the end of entry {bundled_target:.80}")
            budget.take(size)
            blob = data[offset : offset + size]
            blobs.setdefault(name, []).append((f"{origin}:{bundled_target:.80}", blob))
    except (struct.error, KeyError, UnicodeDecodeError, zlib.error) as error:
        raise LoadError(f"{origin}: damaged offload bundle ({error})") from error
    for name in names:
        if name in blobs:
            return blobs[name]
    contents = ", ".join(bundled_targets)
    raise LoadError(
        f"{origin}: nothing for {' or '.join(names)} in this bundle, whose entries are for: "
        f"{contents!a:.300}"
    )


def _read_entries(data: bytes, budget: Budget) -> Iterator[tuple[int, int, str]]:
    """Yield (offset, size, target) of each entry of a plain bundle."""
    (count,) = struct.unpack_from("<Q", data, len(BUNDLE))
    at = len(BUNDLE) + 8
    for _ in range(count):
        budget.count("entries")
        offset, size, length = struct.unpack_from("<3Q", data, at)
        target = data[at + 24 : at + 24 + length].decode()
        at += 24 + length
        yield offset, size, target


def _decompress(data: bytes, budget: Budget) -> bytes:
    """Decompress a bundle. In its header, method 0 is zlib, and method 1 is zstd.

    zstd needs libzstd, which is usually installed because libLLVM depends on it.
    """
    version, method = struct.unpack_from("<2H", data, 4)
    header_size, place, size_format = _COMPRESSED_HEADERS[version]
    (size,) = struct.unpack_from(size_format, data, place)
    budget.take(size)
    data = data[header_size:]
    if method == 0:
        return zlib.decompressobj().decompress(data, size)
    name = ctypes.util.find_library("zstd") or "libzstd.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise LoadError(f"a bundle compressed with zstd needs libzstd: {error}") from error
    library.ZSTD_decompress.restype = ctypes.c_size_t
    library.ZSTD_decompress.argtypes = [ctypes.c_void_p, ctypes.c_size_t] * 2
    content = ctypes.create_string_buffer(size)
    written = library.ZSTD_decompress(content, size, data, len(data))
    if written != size:
        raise LoadError("damaged offload bundle (zstd)")
    return content.raw
