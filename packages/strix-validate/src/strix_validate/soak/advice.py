# SPDX-License-Identifier: BSD-3-Clause
"""What may help against a hang or a crash: what doctor finds in this machine, and what was met."""

from strix_validate.checks import Result, State
from strix_validate.doctor.tree import Tree
from strix_validate.tiers import doctor

_LOOK = "read what the kernel says: sudo dmesg | grep -iE 'amdgpu|drm|oom|Xid' | tail -n 50"
#: The doctor's checks of what hangs under load: the kernel, the firmware of the scheduler (MES),
#: options such as lockup_timeout, the power level and profile, and the IOMMU.
_CHECKS = ("doctor/kernel", "doctor/firmware", "doctor/options", "doctor/power", "doctor/iommu")
_POWER_OFF = "https://github.com/superm1/amd-debug-tools/issues/48"


def advise(tree: Tree) -> str:
    """Return advice for this machine; without a GPU of AMD's, to read the kernel's messages.

    They are read before the loads begin: files of a driver may block when the GPU hangs.
    """
    if not tree.has_ours and not tree.gpu_folder:
        return _LOOK
    wanted = [check for check in doctor.checks() if check.id in _CHECKS]
    results = [each for each in doctor.examine(wanted, tree) if each.state is not State.SKIPPED]
    parts = [_LOOK, *(_word(result) for result in results if result.reason)]
    if tree.read("sys/firmware/acpi/platform_profile") == "performance":
        parts.append(
            "if the machine switches itself off: one did so under load in the platform profile "
            f"performance, and not in balanced: powerprofilesctl set balanced ({_POWER_OFF})"
        )
    in_order = [result.check.id for result in results if not result.reason]
    if in_order:
        parts.append(f"nothing to mend in {', '.join(in_order)}")
    return ". ".join(parts)


def _word(result: Result) -> str:
    fix = f": {result.fix}" if result.fix else ""
    source = f" ({result.source})" if result.source else ""
    return f"{result.check.id}: {result.reason}{fix}{source}"
