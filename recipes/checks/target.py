# SPDX-License-Identifier: BSD-3-Clause
"""The GPU that packages are compiled for.

rattler-build sets an environment variable for each variant key, so tests can read `gpu_arch`.
"""

import os

from checks.verdict import require

# LLVM, "User Guide for AMDGPU Backend", section "AMDGPU Embedding e_flags"
PROCESSORS = {
    "gfx1150": 0x43,
    "gfx1151": 0x4A,
    "gfx1152": 0x55,
    "gfx1153": 0x58,
}
# Packages that do not depend on the GPU do not have this variant key. Their tests use the default.
ARCH = os.environ.get("gpu_arch", "gfx1151")  # noqa: SIM112 (the key's name)
require(ARCH in PROCESSORS, f"gpu_arch is {ARCH}; the checks know {', '.join(PROCESSORS)}")
PROCESSOR = PROCESSORS[ARCH]
_MAJOR, _MINOR, _STEPPING = int(ARCH[3:-2]), int(ARCH[-2]), int(ARCH[-1])
KFD_VERSION = _MAJOR * 10000 + _MINOR * 100 + _STEPPING  # gfx_target_version
