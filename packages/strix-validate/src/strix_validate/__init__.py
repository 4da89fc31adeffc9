# SPDX-License-Identifier: BSD-3-Clause
"""Validate the attention of PyTorch, flash-attn and vLLM, and the machine, for AMD gfx1151.

The command `strix-validate` is the interface; `runner.run` makes a record from Python. Each folder
is a subpackage, whose docstring names the modules that others may import. A module or a name that
begins with an underscore is its subpackage's own.
"""

__all__ = ["TARGET"]

#: The GPU architecture that all of this is about, as LLVM and ROCm name it.
TARGET = "gfx1151"
