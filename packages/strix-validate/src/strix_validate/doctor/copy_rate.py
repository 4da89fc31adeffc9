# SPDX-License-Identifier: BSD-3-Clause
"""Measure how fast HIP copies host memory to the GPU, in a process of its own, without torch.

    python copy_rate.py LIBAMDHIP64

LIBAMDHIP64 is the path of HIP's library. The output is JSON: bytes per second for each kind of
source mapping.

A faulty Linux kernel stalls in copies from a writable private mapping whose pages have been
touched. torch creates such a mapping for a checkpoint:
https://github.com/ROCm/legacy-rocm-build/issues/6523. Copies from a read-only mapping are fast with
every kernel.
"""

import ctypes
import json
import mmap
import sys
import tempfile
from time import perf_counter

#: Bytes of a copy. A faulty kernel needs a second for each 2 MiB.
SIZE = 16 << 20
_HOST_TO_DEVICE = 1  # hipMemcpyHostToDevice
_MAP_FAILED = ctypes.c_void_p(-1).value


def _require(status: int, call: str) -> None:
    if status:
        raise SystemExit(f"{call} failed with status {status}")


def _map(file: int, protection: int) -> int:
    """Map a file privately, touch all pages, and return the address of the mapping."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    address = libc.mmap(None, SIZE, protection, mmap.MAP_PRIVATE, file, 0)
    if address == _MAP_FAILED:
        raise SystemExit("mmap failed")
    view = (ctypes.c_char * SIZE).from_address(address)
    for offset in range(0, SIZE, mmap.PAGESIZE):
        view[offset]
    return address


def _load_hip(library: str) -> ctypes.CDLL:
    hip = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    hip.hipMalloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    hip.hipMemcpy.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
    ]
    return hip


def measure_rates(library: str) -> dict[str, float]:
    """Return bytes per second by kind of source mapping: "read_only" and "writable"."""
    hip = _load_hip(library)
    device = ctypes.c_void_p()
    _require(hip.hipMalloc(ctypes.byref(device), SIZE), "hipMalloc")
    protections = {
        "read_only": mmap.PROT_READ,
        "writable": mmap.PROT_READ | mmap.PROT_WRITE,
    }
    rates = {}
    with tempfile.TemporaryFile() as file:
        file.write(bytes(SIZE))
        file.flush()
        # The first copy starts HIP's runtime, and is not measured.
        source = _map(file.fileno(), mmap.PROT_READ)
        _require(hip.hipMemcpy(device, source, SIZE, _HOST_TO_DEVICE), "hipMemcpy")
        for kind, protection in protections.items():
            source = _map(file.fileno(), protection)
            begin = perf_counter()
            _require(hip.hipMemcpy(device, source, SIZE, _HOST_TO_DEVICE), "hipMemcpy")
            _require(hip.hipDeviceSynchronize(), "hipDeviceSynchronize")
            rates[kind] = SIZE / (perf_counter() - begin)
    return rates


if __name__ == "__main__":
    print(json.dumps(measure_rates(sys.argv[1])))
