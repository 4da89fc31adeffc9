# SPDX-License-Identifier: BSD-3-Clause
"""Whether this machine has the GPU that the packages are for, as the kernel (KFD) tells.

A check on the GPU runs on that one alone: elsewhere it is skipped and says why. A machine that
builds may have no GPU, one that it must not use, or another one. `strix-emulate device` has one
that KFD knows nothing of; what runs there says its name, "(emulated)".
"""

import os
import re
from pathlib import Path

from checks.target import ARCH, KFD_VERSION

NODES = Path("/sys/class/kfd/kfd/topology/nodes")
DEVICE = Path("/dev/kfd")


def why_skipped(nodes: Path = NODES, device: Path = DEVICE) -> str:
    """Why nothing can run on such a GPU of this machine; empty if it can."""
    if emulated := os.environ.get("STRIX_EMULATE_TARGET"):
        return "" if emulated == ARCH else f"the emulated device is a {emulated}, not a {ARCH}"
    texts = [path.read_text() for path in sorted(nodes.glob("*/properties"))]
    found = [
        int(v) for text in texts for v in re.findall(r"^gfx_target_version (\d+)$", text, re.M)
    ]
    others = ", ".join(str(version) for version in found if version)
    if KFD_VERSION not in found:
        return f"KFD names no GPU of gfx_target_version {KFD_VERSION}, only: {others or 'none'}"
    if not os.access(device, os.R_OK | os.W_OK):
        return f"{device} cannot be opened"
    return ""
