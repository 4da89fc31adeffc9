# SPDX-License-Identifier: BSD-3-Clause
"""Package test: check torch's configuration, and computations that need no GPU.

usage: test_without_gpu.py ROCM_VERSION
"""

import sys
from pathlib import Path

import numpy as np
import torch

from checks.loaded_from import loaded
from checks.target import ARCH
from checks.verdict import require

PREFIX = Path(sys.prefix).resolve()

# If CMake does not find the SDK, torch can be imported but has no GPU code.
version = torch.version
require(version.hip and not version.cuda, f"HIP {version.hip}, CUDA {version.cuda}")
require(version.rocm.startswith(sys.argv[1]), f"ROCm {version.rocm}, expected {sys.argv[1]}")
# This internal function is used because torch.cuda.get_arch_list() is empty without a GPU.
flags = torch._C._cuda_getArchFlags()
require(flags.split() == [ARCH], f"compiled for {flags!r}, expected {ARCH} only")
require(torch.backends.cuda.is_flash_attention_available(), "built without flash attention")
require(torch.distributed.is_nccl_available(), "built without NCCL (RCCL)")
require(torch.distributed.is_gloo_available(), "built without Gloo")

libraries = [file for file in loaded() if file.name.startswith("libaotriton_v2.so")]
folders = [file.parent for file in libraries]
require(folders == [PREFIX / "lib"], f"libaotriton_v2 is loaded from {folders}, not {PREFIX}/lib")
images = PREFIX / "lib" / "aotriton.images" / "amd-gfx115x"
require(any(images.rglob("*")), f"{images} is missing or empty: attention has no kernels")

# BLAS libraries return complex dot products in different ways. If torch assumes the wrong way, the
# result is zero.
z = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128)
dot = torch.dot(z, z).item()
expected = (1 + 2j) ** 2 + (3 - 1j) ** 2
require(dot == expected, f"complex dot product is {dot}, expected {expected}")
total = torch.from_numpy(np.arange(3.0)).numpy().sum()
require(total == 3, f"a NumPy array has the sum {total} after conversion to torch, expected 3")

# torch.compile tests the CPU's vector units with a program, which must find torch's libraries.
compiled = torch.compile(lambda x: torch.sin(x) + x)
x = torch.linspace(0, 1, 1000)
torch.testing.assert_close(compiled(x), torch.sin(x) + x)
print(f"torch {torch.__version__}, HIP {torch.version.hip}, ROCm {torch.version.rocm}")
