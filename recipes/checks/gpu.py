# SPDX-License-Identifier: BSD-3-Clause
"""Whether this machine has the GPU that the packages are for, by the kernel driver (KFD).

A check on the GPU runs on that GPU alone. Elsewhere it is skipped and prints the reason: a machine
that builds may have no GPU, one that it must not use, or another one. `strix-emulate device` has a
device that KFD does not know; what runs on it prints its name, with "(emulated)".
"""

import os
import re
from pathlib import Path

from checks.target import ARCH, KFD_VERSION

NODES = Path("/sys/class/kfd/kfd/topology/nodes")
DEVICE = Path("/dev/kfd")
TARGET_VERSION = re.compile(r"^gfx_target_version (\d+)$", re.M)


def find_skip_reason(nodes: Path = NODES, device: Path = DEVICE) -> str:
    """Return why nothing can run on such a GPU of this machine; empty if it can.

    Args:
        nodes: KFD's folder of nodes.
        device: KFD's device.
    """
    emulated = os.environ.get("STRIX_EMULATE_TARGET")
    if emulated == ARCH:
        return ""
    if emulated:
        return f"the emulated device is a {emulated}, not a {ARCH}"
    versions = []
    for path in sorted(nodes.glob("*/properties")):
        versions += [int(version) for version in TARGET_VERSION.findall(path.read_text())]
    if KFD_VERSION not in versions:
        # the version of a CPU is 0
        others = ", ".join(str(version) for version in versions if version)
        return f"KFD names no GPU of gfx_target_version {KFD_VERSION}, only: {others or 'none'}"
    if not os.access(device, os.R_OK | os.W_OK):
        return f"{device} cannot be opened"
    return ""
