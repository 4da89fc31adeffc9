# SPDX-License-Identifier: BSD-3-Clause
"""clang's offload bundles: files that hold code objects for several GPUs, maybe compressed."""

import ctypes.util
import struct
import zlib

from strix_emulate.code.limits import Budget
from strix_emulate.code.target import TARGETS, Target
from strix_emulate.errors import LoadError

BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"


def unbundle(
    data: bytes, origin: str, wanted: Target | None = None, budget: Budget | None = None
) -> list[tuple[str, bytes]]:
    """Return (name, code object) for a GPU in clang's bundle, plain or compressed.

    wanted: None for the first of TARGETS that is in it. budget: of the file around it.

    Source: "Bundled Binary File Layout" and "Compressed Bundle" of clang's ClangOffloadBundler.
    """
    budget = budget or Budget(origin, len(data))
    try:
        if data[:4] == b"CCOB":
            version, method = struct.unpack_from("<2H", data, 4)
            header = {1: 20, 2: 24, 3: 32}[version]
            size = struct.unpack_from("<I" if version < 3 else "<Q", data, header - 12 if
                                      version < 3 else header - 16)[0]  # fmt: skip
            budget.take(size)
            data = _inflate(data[header:], size, method)
        names = [wanted.name] if wanted else list(TARGETS)
        (count,) = struct.unpack_from("<Q", data, len(BUNDLE))
        at, targets = len(BUNDLE) + 8, []
        found: dict[str, list[tuple[str, bytes]]] = {}
        for _ in range(count):
            budget.count("entries")
            offset, size, length = struct.unpack_from("<3Q", data, at)
            target = data[at + 24 : at + 24 + length].decode()
            at += 24 + length
            targets.append(target)
            # features may follow the name
            name = target.partition(":")[0].rpartition("-")[2]
            if name in names:
                if len(data) < offset + size:
                    raise LoadError(f"{origin}: cut off, {target:.80} is not in the file")
                budget.take(size)
                blob = data[offset : offset + size]
                found.setdefault(name, []).append((f"{origin}:{target:.80}", blob))
    except (struct.error, KeyError, UnicodeDecodeError, zlib.error) as error:
        raise LoadError(f"{origin}: damaged offload bundle ({error})") from error
    if not found:
        there = ", ".join(targets)
        raise LoadError(
            f"{origin}: nothing for {' or '.join(names)} in this bundle: {there!a:.300}"
        )
    return next(found[name] for name in names if name in found)


def _inflate(data: bytes, size: int, method: int) -> bytes:
    """Decompress by method 0, zlib, or 1, zstd, whose library libLLVM depends on."""
    if method == 0:
        return zlib.decompressobj().decompress(data, size)
    name = ctypes.util.find_library("zstd") or "libzstd.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise LoadError(f"a bundle compressed with zstd needs libzstd: {error}") from error
    library.ZSTD_decompress.restype = ctypes.c_size_t
    library.ZSTD_decompress.argtypes = [ctypes.c_void_p, ctypes.c_size_t] * 2
    made = ctypes.create_string_buffer(size)
    done = library.ZSTD_decompress(made, size, data, len(data))
    if done != size:
        raise LoadError("damaged offload bundle (zstd)")
    return made.raw
