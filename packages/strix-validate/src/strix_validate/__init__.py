# SPDX-License-Identifier: BSD-3-Clause
"""Validate the attention of PyTorch, flash-attn and vLLM, and the machine, for AMD gfx1151.

The command `strix-validate` is the interface; `runner.run` makes a record from Python. Tests of
other packages import `testing`. Each folder is a subpackage; its `__all__` names the modules that
the others may import, and its docstring describes it. A module or a name that begins with an
underscore is private to its subpackage.
"""

import gc
import os

# torch and compiled kernels leave a million objects, which the garbage collector walks again and
# again: an eighth of a run's CPU time, a third where kernels are executed.
gc.set_threshold(10_000, 10, 100)

__all__ = ["GPUS", "TARGET", "VLLM_DEVICE_NAME"]

#: Supported GPUs and their number of workgroup processors (HIP's `multiProcessorCount`), each of
#: which is two compute units.
GPUS = {
    "gfx1151": 20,
    "gfx1150": 8,
    "gfx1152": 4,
    "gfx1153": 2,
    "gfx1100": 48,
}
#: The GPU architecture to validate, as LLVM and ROCm name it. The variable has the name of the key
#: in variants.yaml, which package tests get.
TARGET = os.environ.get("gpu_arch", "gfx1151")  # noqa: SIM112 (the key's name is in lower case)
#: The name of the GPU in vLLM's files of tuned tiles; only gfx1151 has one here.
VLLM_DEVICE_NAME = "AMD_Radeon_8060S" if TARGET == "gfx1151" else TARGET
