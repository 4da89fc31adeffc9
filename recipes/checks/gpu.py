# SPDX-License-Identifier: BSD-3-Clause
"""Find out from the kernel driver (KFD) whether this machine has the GPU that packages are for.

Checks that need the GPU run only on that GPU. On other machines they are skipped, and the reason is
printed: the machine has no GPU, only other GPUs, or a GPU that the user may not open. The emulated
device of the command `strix-emulate device` counts as a GPU. KFD does not list this device, so an
environment variable names it.
"""

import os
import re
from pathlib import Path

from checks.target import ARCH, KFD_VERSION

NODES = Path("/sys/class/kfd/kfd/topology/nodes")
DEVICE = Path("/dev/kfd")
TARGET_VERSION = re.compile(r"^gfx_target_version (\d+)$", re.M)


def find_skip_reason(nodes: Path = NODES, device: Path = DEVICE) -> str:
    """Return why a check cannot run on the GPU, or an empty string if it can.

    Args:
        nodes: KFD's folder of nodes.
        device: KFD's device file.
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
        # The nodes include CPUs, whose version is 0.
        others = ", ".join(str(version) for version in versions if version)
        return (
            f"KFD lists no GPU with gfx_target_version {KFD_VERSION} (others: {others or 'none'})"
        )
    if not os.access(device, os.R_OK | os.W_OK):
        return f"{device} cannot be opened"
    return ""
