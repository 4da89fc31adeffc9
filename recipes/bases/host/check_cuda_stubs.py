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
assert runtime.cudaGetDeviceCount(ctypes.byref(ctypes.c_int())) == 100, "not cudaErrorNoDevice"
runtime.cudaGetErrorString.restype = ctypes.c_char_p
message = runtime.cudaGetErrorString(100)
assert message and b"pytorch-cuda-stubs" in message, message
