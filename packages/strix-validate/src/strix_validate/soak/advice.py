# SPDX-License-Identifier: BSD-3-Clause
"""What may help against a hang or a crash on a Strix Halo, beside what this machine has set."""

import re
from collections.abc import Sequence

from strix_validate.doctor.tree import Tree
from strix_validate.reporting.record import Device

_ISSUES = "https://github.com/ROCm/legacy-rocm-build/issues"
_LOCKUP = "https://github.com/defilantech/LLMKube/pull/886"
_IOMMU = f"{_ISSUES}/6598"
_FIRMWARE = f"{_ISSUES}/5724"
_LEVEL = f"{_ISSUES}/5750"
_PROFILE = "https://github.com/superm1/amd-debug-tools/issues/48"


def advise(tree: Tree, device: Device, faults: Sequence[str]) -> str:
    """Return advice in sentences; for other GPUs than AMD's only to look into the kernel's log.

    Args:
        faults: the kernel's messages of faults.
    """
    look = "read what the kernel says: sudo dmesg | grep -iE 'amdgpu|drm|oom|Xid' | tail -n 50"
    if device.build != "rocm":
        return look
    return ". ".join([look, _lockup(tree, faults), _power(tree), _iommu(tree), _firmware(tree)])


def _lockup(tree: Tree, faults: Sequence[str]) -> str:
    value = _parameter(tree, "amdgpu.lockup_timeout")
    state = f"amdgpu.lockup_timeout is {value}" if value else "amdgpu.lockup_timeout is not set"
    if any("timeout" in message for message in faults):
        return (
            f"{state}, and the kernel reports a timeout: where a long kernel is mistaken for a "
            f"hang, amdgpu.lockup_timeout=20000 on the kernel's command line ends that ({_LOCKUP})"
        )
    return (
        f"{state}: it makes the kernel reset the GPU after a false alarm or a hang, and the kernel "
        f"has reported none ({_LOCKUP})"
    )


def _power(tree: Tree) -> str:
    level = tree.read(f"{tree.gpu_folder}/power_dpm_force_performance_level") or "unknown"
    profile = tree.read("sys/firmware/acpi/platform_profile") or "unknown"
    advice = f"the GPU's power level is {level} and the platform profile {profile}"
    if profile == "performance":
        advice += (
            ": machines switched themselves off in that profile under load and not in balanced "
            f"({_PROFILE}); try powerprofilesctl set balanced"
        )
    if level not in ("auto", "unknown"):
        advice += f": set auto in power_dpm_force_performance_level ({_LEVEL})"
    return advice


def _iommu(tree: Tree) -> str:
    if not tree.glob("sys/class/iommu/*"):
        return "the IOMMU is off, so it is not the cause"
    return (
        "the IOMMU is on: one machine crashed within an hour with it, and after seven days with "
        f"amd_iommu=off on the kernel's command line, which no virtual machine may need ({_IOMMU})"
    )


def _firmware(tree: Tree) -> str:
    version = tree.firmware or "of an unknown version"
    return (
        f"linux-firmware is {version}: a firmware of the GPU's scheduler (MES) has hung under load "
        f"before; install the distribution's newest and reboot ({_FIRMWARE})"
    )


def _parameter(tree: Tree, name: str) -> str:
    """Return the value of a parameter on the kernel's command line, or an empty string."""
    match = re.search(rf"(?:^|\s){re.escape(name)}=(\S+)", tree.read("proc/cmdline") or "")
    return match.group(1) if match else ""
