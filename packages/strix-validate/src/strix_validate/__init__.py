# SPDX-License-Identifier: BSD-3-Clause
"""Validate the attention of PyTorch, flash-attn and vLLM, and the machine, for AMD gfx1151.

The command `strix-validate` is the interface; `runner.run` makes a record from Python. Tests of
other packages import `testing`. Each folder is a subpackage, whose `__all__` names the modules that
the others may import; what each is for, it says itself. A module or a name that begins with an
underscore is its subpackage's own.
"""

import os

__all__ = ["GPUS", "TARGET"]

#: What kernels can be compiled for, and executed as.
GPUS = ("gfx1151", "gfx1150", "gfx1152", "gfx1153", "gfx1100")
#: The GPU architecture that all of this is about, as LLVM and ROCm name it; the variable is named
#: like the key in variants.yaml, which package tests get.
TARGET = os.environ.get("gpu_arch", GPUS[0])  # noqa: SIM112
