# SPDX-License-Identifier: BSD-3-Clause
"""Tell vLLM of the emulated device. It asks amdsmi and the kernel driver for an AMD GPU and ends
with "Failed to infer device type" where neither knows one, although HIP works."""

import os


def platform() -> str | None:
    """Name vLLM's ROCm platform in a program of `strix-emulate device`, and none elsewhere."""
    emulated = "STRIX_EMULATE_PYTHON" in os.environ
    return "vllm.platforms.rocm.RocmPlatform" if emulated else None
