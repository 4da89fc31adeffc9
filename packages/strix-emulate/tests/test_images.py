# SPDX-License-Identifier: BSD-3-Clause
"""Files as HIP builds them: functions, variables with relocations, hidden arguments, bundles."""

import ctypes.util
import struct
import zlib

import fixtures
import numpy as np
import pytest
from device_support import compile_device_code
from strix_emulate import Buffer, launch, launches
from strix_emulate.code import bundles, loader
from strix_emulate.errors import LoadError
from strix_emulate.run import program

SOURCE = """
#define DEVICE __attribute__((device))
__attribute__((constant)) float table[8] = {1, 2, 4, 8, 16, 32, 64, 128};
DEVICE float *halves[2] = {(float *)table, (float *)table + 4};
DEVICE __attribute__((noinline)) float twice(float x, int i) {
  for (; i > 0; i--) x += x;
  return x;
}
extern "C" __attribute__((global)) void kernel(const float *x, float *out, int n) {
  int i = __builtin_amdgcn_workgroup_id_x() * __builtin_amdgcn_workgroup_size_x() +
          __builtin_amdgcn_workitem_id_x();
  if (i < n)
    out[i] = twice(x[i], 3) + table[i & 7] + halves[i & 1][i & 3] + __builtin_amdgcn_grid_size_x();
}
"""


@pytest.fixture(scope="module")
def hip(tmp_path_factory) -> bytes:
    """Compile SOURCE by clang to a code object."""
    folder = tmp_path_factory.mktemp("hip")
    (folder / "k.hip").write_text(SOURCE)
    return compile_device_code(folder / "k.hip", folder / "k.co").read_bytes()


@pytest.mark.parametrize("max_code", [program._MAX_CODE, 0])
def test_functions_variables_and_hidden_arguments(hip, max_code, monkeypatch):
    """In a file with more code than the limit, functions are decoded when they are called."""
    monkeypatch.setattr(program, "_MAX_CODE", max_code)
    launches._cached_program.cache_clear()
    (kernel,) = loader.parse(hip, "k.co")
    assert kernel.image.pointers, (
        "the image must have the addresses in `halves`, which are relocations"
    )
    x = np.arange(100, dtype=np.float32)
    out = np.zeros(100, np.float32)
    i = np.arange(100)
    done = launch(kernel, (2,), [Buffer(x, "in"), Buffer(out), 100], threads=64)
    launches._cached_program.cache_clear()
    assert any(ins.name == "s_setpc_b64" for ins in done.instructions) == (max_code > 0)
    table = 2.0 ** np.arange(8)
    more = np.where(i & 1, table[4 + (i & 3)], table[i & 3])
    assert (out == 8 * x + table[i & 7] + more + 128).all()


HOST = "host-x86_64-unknown-linux-gnu-"
DEVICE = "hipv4-amdgcn-amd-amdhsa--gfx1151"


def bundle(*entries: tuple[str, bytes], alignment: int = 1) -> bytes:
    """Return clang's bundle of these targets. clang-offload-bundler aligns the entries."""
    head = bundles.BUNDLE + struct.pack("<Q", len(entries))
    start = -(-(len(head) + sum(24 + len(name) for name, _ in entries)) // alignment) * alignment
    blobs = b""
    for name, blob in entries:
        head += struct.pack("<3Q", start + len(blobs), len(blob), len(name)) + name.encode()
        blobs += blob
    return head.ljust(start, b"\0") + blobs


def compress(plain: bytes, version: int, method: int) -> bytes:
    """Return a compressed bundle (CCOB). Method 0 is zlib, method 1 is zstd."""
    if method == 0:
        data = zlib.compress(plain)
    else:
        zstd = ctypes.CDLL(ctypes.util.find_library("zstd") or "libzstd.so.1")
        zstd.ZSTD_compressBound.restype = ctypes.c_size_t
        zstd.ZSTD_compress.restype = ctypes.c_size_t
        buffer = ctypes.create_string_buffer(zstd.ZSTD_compressBound(ctypes.c_size_t(len(plain))))
        size = zstd.ZSTD_compress(
            buffer, ctypes.c_size_t(len(buffer)), plain, ctypes.c_size_t(len(plain)), 3
        )
        data = buffer.raw[:size]
    sizes = {
        1: struct.pack("<I", len(plain)),
        2: struct.pack("<2I", 24 + len(data), len(plain)),
        3: struct.pack("<2Q", 32 + len(data), len(plain)),
    }[version]
    return b"CCOB" + struct.pack("<2H", version, method) + sizes + bytes(8) + data


@pytest.mark.parametrize("version", [0, 1, 2, 3])
@pytest.mark.parametrize("method", [0, 1])
def test_bundles(version, method):
    elf = fixtures.code_object()
    uncompressed = bundle((HOST, b""), ("hipv4-amdgcn-amd-amdhsa--gfx1100", b"x"), (DEVICE, elf))
    packed = compress(uncompressed, version, method) if version else uncompressed
    assert [k.name for k in loader.parse(packed, "file")] == ["add"]
    wrong_target = bundle(("hipv4-amdgcn-amd-amdhsa--gfx1201", b"x"))
    message = "nothing for gfx1151 or gfx1150 .*'hipv4-amdgcn-amd-amdhsa--gfx1201'"
    with pytest.raises(LoadError, match=message):
        loader.parse(compress(wrong_target, version, method) if version else wrong_target, "file")
    with pytest.raises(LoadError):
        loader.parse(packed[: len(packed) // 2], "file")
