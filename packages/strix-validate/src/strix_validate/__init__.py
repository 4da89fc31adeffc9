# SPDX-License-Identifier: BSD-3-Clause
"""Check the attention of PyTorch, flash-attn and vLLM on AMD gfx1151, and the machine's setup.

The command `strix-validate` is the interface. From Python, `runner.run` runs checks and returns
their record. Tests of other packages import the module `testing`. Each folder is a subpackage. Its
docstring describes it, and its list `__all__` names the modules that other subpackages may import.
A module or a name that begins with an underscore is private to its subpackage.
"""

import gc
import os

# torch and compiled kernels keep a million objects alive. With Python's default thresholds, the
# garbage collector traverses these objects so often that it takes an eighth of a run's CPU time, or
# a third if the run executes kernels without a GPU.
gc.set_threshold(10_000, 10, 100)

__all__ = ["GPUS", "TARGET", "VLLM_DEVICE_NAME"]

#: Supported GPUs and their number of workgroup processors (HIP's `multiProcessorCount`). A
#: workgroup processor consists of two compute units.
GPUS = {
    "gfx1151": 20,
    "gfx1150": 8,
    "gfx1152": 4,
    "gfx1153": 2,
    "gfx1100": 48,
}
#: The GPU architecture to validate, as LLVM and ROCm name it: the value of the environment variable
#: gpu_arch, or gfx1151 by default. The variable has the name of a key of variants.yaml, because the
#: tests of conda packages get the value of this key in a variable of the same name.
TARGET = os.environ.get("gpu_arch", "gfx1151")  # noqa: SIM112 (the key's name is in lower case)
#: The name of the GPU TARGET in the file names of vLLM's tuned tile sizes: a marketing name for
#: gfx1151, and the architecture's name for other GPUs.
VLLM_DEVICE_NAME = "AMD_Radeon_8060S" if TARGET == "gfx1151" else TARGET
