# SPDX-License-Identifier: BSD-3-Clause
"""Validate the attention of PyTorch, flash-attn and vLLM, and the machine, for AMD gfx1151.

The command `strix-validate` is the interface; `runner.run` makes a record from Python. Tests of
other packages import `testing`. Each folder is a subpackage, whose `__all__` names the modules that
the others may import; what each is for, it says itself. A module or a name that begins with an
underscore is its subpackage's own.
"""

import gc
import os

# torch and compiled kernels leave a million objects, and the collector walks all of them again and
# again: an eighth of a run's CPU time, a third where kernels are executed.
gc.set_threshold(10_000, 10, 100)

__all__ = ["GPUS", "NAMED", "TARGET"]

#: What kernels can be compiled for, and executed as: how many workgroup processors each has, which
#: are two compute units, and which HIP counts.
GPUS = {"gfx1151": 20, "gfx1150": 8, "gfx1152": 4, "gfx1153": 2, "gfx1100": 48}
#: The GPU architecture that all of this is about, as LLVM and ROCm name it; the variable is named
#: like the key in variants.yaml, which package tests get.
TARGET = os.environ.get("gpu_arch", "gfx1151")  # noqa: SIM112
#: How vLLM names it in files of tuned tiles, which no other GPU here has.
NAMED = "AMD_Radeon_8060S" if TARGET == "gfx1151" else TARGET
