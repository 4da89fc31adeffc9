# SPDX-License-Identifier: BSD-3-Clause
"""Give advice for a hang or a crash: the doctor's findings, and what owners reported."""

from strix_validate.checks import Result, State
from strix_validate.doctor.tree import Tree
from strix_validate.tiers import doctor

_READ_LOG = "read the kernel's log: sudo dmesg | grep -iE 'amdgpu|drm|oom|Xid' | tail -n 50"
#: The doctor's checks that concern hangs under load. They examine the kernel, the scheduler's
#: firmware (MES), options such as lockup_timeout, the power level and profile, and the IOMMU.
_CHECKS = (
    "doctor/kernel",
    "doctor/firmware",
    "doctor/options",
    "doctor/power",
    "doctor/iommu",
)
_POWER_OFF = "https://github.com/superm1/amd-debug-tools/issues/48"


def advise(tree: Tree) -> str:
    """Return advice for this machine. Without an AMD GPU, advise only to read the kernel's log.

    Call this before the loads begin, because reading a driver's files may block when the GPU hangs.
    """
    if not tree.has_target_gpu and not tree.gpu_folder:
        return _READ_LOG
    checks = [check for check in doctor.checks() if check.id in _CHECKS]
    parts = [_READ_LOG]
    without_findings = []
    for result in doctor.examine(checks, tree):
        if result.state is State.SKIPPED:
            continue
        if result.reason:
            parts.append(_describe(result))
        else:
            without_findings.append(result.check.id)
    if tree.read("sys/firmware/acpi/platform_profile") == "performance":
        parts.append(
            "if the machine switches itself off, try powerprofilesctl set balanced: one machine "
            "did so under load in the platform profile performance, but not in balanced "
            f"({_POWER_OFF})"
        )
    if without_findings:
        parts.append(f"no findings of {', '.join(without_findings)}")
    return ". ".join(parts)


def _describe(result: Result) -> str:
    text = f"{result.check.id}: {result.reason}"
    if result.fix:
        text += f": {result.fix}"
    if result.source:
        text += f" ({result.source})"
    return text
