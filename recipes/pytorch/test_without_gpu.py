# SPDX-License-Identifier: BSD-3-Clause
"""What an installed torch must say and do on a machine without a GPU.

usage: test_without_gpu.py ROCM_VERSION
"""

import sys
from pathlib import Path

import numpy as np
import torch

PREFIX = Path(sys.prefix).resolve()

# A configure step that found no SDK gives a torch that imports and has no GPU code.
assert torch.version.cuda is None and torch.version.hip, torch.version.hip
assert torch.version.rocm.startswith(sys.argv[1]), (torch.version.rocm, sys.argv[1])
# torch.cuda.get_arch_list() is empty where there is no device
assert torch._C._cuda_getArchFlags().split() == ["gfx1151"], torch._C._cuda_getArchFlags()
assert torch.backends.cuda.is_flash_attention_available()
assert torch.distributed.is_nccl_available() and torch.distributed.is_gloo_available()

maps = Path("/proc/self/maps").read_text().split()
loaded = {Path(word) for word in maps if "/libaotriton_v2.so" in word}
assert [path.parent for path in loaded] == [PREFIX / "lib"], loaded
images = PREFIX / "lib" / "aotriton.images" / "amd-gfx115x"
assert any(images.rglob("*")), f"{images} is empty: attention would have no kernels"

# Complex dot products return in another way from each BLAS; a wrong guess gives zero.
z = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128)
assert torch.dot(z, z).item() == (1 + 2j) ** 2 + (3 - 1j) ** 2
assert torch.from_numpy(np.arange(3.0)).numpy().sum() == 3

# The probe of the CPU's vector units runs a program of its own, which must find torch's libraries.
compiled = torch.compile(lambda x: torch.sin(x) + x)
x = torch.linspace(0, 1, 1000)
torch.testing.assert_close(compiled(x), torch.sin(x) + x)
print(f"torch {torch.__version__}, HIP {torch.version.hip}, ROCm {torch.version.rocm}")
