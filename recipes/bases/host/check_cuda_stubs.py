# SPDX-License-Identifier: BSD-3-Clause
"""What the stubs of CUDA's libraries must do: load, and say that there is no GPU."""

import ctypes
import sysconfig
from pathlib import Path

libraries = {
    path.name.split(".")[0]: ctypes.CDLL(str(path))
    for path in Path(sysconfig.get_path("purelib"), "torch", "lib").iterdir()
}
runtime = libraries["libcudart"]
NO_DEVICE = 100
status = runtime.cudaGetDeviceCount(ctypes.byref(ctypes.c_int()))
if status != NO_DEVICE:
    raise SystemExit(f"cudaGetDeviceCount returned {status}, not cudaErrorNoDevice")
runtime.cudaGetErrorString.restype = ctypes.c_char_p
message = runtime.cudaGetErrorString(NO_DEVICE)
if b"pytorch-cuda-stubs" not in (message or b""):
    raise SystemExit(f"cudaGetErrorString returned {message!r}")
