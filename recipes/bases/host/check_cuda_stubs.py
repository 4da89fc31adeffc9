# SPDX-License-Identifier: BSD-3-Clause
"""Package test: the stubs of CUDA's libraries load, and report that there is no GPU."""

import ctypes
import sysconfig
from pathlib import Path

folder = Path(sysconfig.get_path("purelib"), "torch", "lib")
libraries = {}
for path in folder.iterdir():
    libraries[path.name.split(".")[0]] = ctypes.CDLL(str(path))
runtime = libraries["libcudart"]
NO_DEVICE = 100
status = runtime.cudaGetDeviceCount(ctypes.byref(ctypes.c_int()))
if status != NO_DEVICE:
    raise SystemExit(f"cudaGetDeviceCount returned {status}, not cudaErrorNoDevice")
runtime.cudaGetErrorString.restype = ctypes.c_char_p
message = runtime.cudaGetErrorString(NO_DEVICE)
if b"pytorch-cuda-stubs" not in (message or b""):
    raise SystemExit(f"cudaGetErrorString returned {message!r}")
