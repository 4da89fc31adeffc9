# SPDX-License-Identifier: BSD-3-Clause
"""A plugin for vLLM that reports the emulated device.

vLLM itself looks for an AMD GPU in amdsmi and, with this project's patch, in the kernel driver. If
neither lists one, vLLM ends with "Failed to infer device type", although HIP works.
"""

import os

from strix_emulate.device import launcher


def platform() -> str | None:
    """Return vLLM's ROCm platform in a program of `strix-emulate device`, and None elsewhere."""
    if launcher.PYTHON_VARIABLE not in os.environ:
        return None
    return "vllm.platforms.rocm.RocmPlatform"
