# SPDX-License-Identifier: BSD-3-Clause
"""The doctor's checks of what the owner, or a guide, has set: driver options, power and IOMMU."""

import re
from dataclasses import replace

from strix_validate.checks import Result
from strix_validate.doctor import _distribution, hardware, kernel_release, parameters
from strix_validate.doctor._verdicts import Fix, fine, known, need_gpu, remark, warning, worst
from strix_validate.doctor.tree import Tree

#: Milliseconds after which the driver resets a ring: the default of kernels from 7.0 on, and of
#: those before, and what ended resets of a machine under load.
_LOCKUP_NEW, _LOCKUP_OLD, _LOCKUP_ENOUGH = 2000, 10000, 20000
_LOCKUP = "https://github.com/defilantech/LLMKube/pull/886"
_LOCKUP_LOWERED = "https://github.com/invoke-ai/InvokeAI/issues/9539"
_CWSR = "https://github.com/palazzem/hanzo/pull/345"
_CWSR_NEEDED = "https://github.com/ROCm/legacy-rocm-build/issues/5991"
_GFXOFF = "https://github.com/palazzem/hanzo/pull/252"
_SCHEDULER = "https://github.com/ROCm/legacy-rocm-build/issues/6530"
_LEVEL = "https://github.com/ROCm/legacy-rocm-build/issues/5750"
_GOVERNOR = "https://github.com/noamsto/nix-amd-ai/issues/19"
_TUNED = "sudo tuned-adm profile accelerator-performance"
#: Values of amd_iommu that the kernel knows; "on" changes nothing.
_AMD_IOMMU = {"on", "off", "fullflush", "force_isolation", "force_enable", "irtcachedis"}
_AMD_IOMMU |= {"nohugepages", "pgtbl_v1", "pgtbl_v2", "v2_pgsizes_only"}
_IOMMU_CRASH = "https://github.com/ROCm/legacy-rocm-build/issues/6598"


def options(tree: Tree) -> Result:
    """No option of the driver is left over from a workaround, and none keeps the GPU from long
    work: https://github.com/palazzem/hanzo/pull/345"""
    need_gpu(tree)
    return worst([_cwsr(tree), _lockup(tree), _scheduler(tree), _power_features(tree)])


def _removal(tree: Tree, name: str) -> Fix:
    own = parameters.setting(tree, "amdgpu", name)
    if own:
        return parameters.removal(tree, own)
    return Fix(f"find who sets it: grep -rn {name} /etc/modprobe.d /proc/cmdline", True)


def _cwsr(tree: Tree) -> Result:
    """Judge cwsr_enable=0: needed without the fixes of KFD, and left over with them."""
    if parameters.value_of(tree, "amdgpu", "cwsr_enable") not in ("0", "N"):
        return fine()
    release = kernel_release.parse(tree.release or "")
    message = "amdgpu.cwsr_enable=0 is a workaround for kernels before 6.18.4"
    if release is None or not hardware.has_fixes(tree, release):
        message += ": keep it until the kernel is newer (doctor/kernel)"
        return remark(message, "", _CWSR_NEEDED)
    message += ", and left over: queues cannot be preempted, and a long kernel blocks the desktop"
    return warning(message, _removal(tree, "cwsr_enable"), _CWSR)


def _lockup(tree: Tree) -> Result:
    """Judge the time after which the driver resets a ring that makes no progress."""
    value = parameters.value_of(tree, "amdgpu", "lockup_timeout") or ""
    times = [int(part) for part in value.split(",") if re.fullmatch(r"-?\d{1,9}", part)]
    set_times = [time for time in times if time]
    release = kernel_release.parse(tree.release or "")
    fix = _distribution.with_arguments(tree, f"amdgpu.lockup_timeout={_LOCKUP_ENOUGH}")
    if set_times:
        if all(time < 0 or time >= _LOCKUP_OLD for time in set_times):
            return fine()
        message = f"amdgpu.lockup_timeout={value}: rings are reset after {min(set_times)} ms"
        return warning(f"{message}, under load too", fix, _LOCKUP)
    if release is None or release.version < (7, 0, 0) or tree.is_wsl:
        return fine()
    message = (
        f"amdgpu.lockup_timeout is {_LOCKUP_NEW} ms from Linux 7.0 on, {_LOCKUP_OLD} before: while "
        "compute fills the GPU, the desktop's and Vulkan's rings may be reset (device lost)"
    )
    return remark(message, fix, f"{_LOCKUP} {_LOCKUP_LOWERED}")


def _scheduler(tree: Tree) -> Result:
    """Warn of options that replace the scheduler of queues, which guides name against hangs."""
    for name, values in (("mes", ("0",)), ("uni_mes", ("0",)), ("sched_policy", ("1", "2"))):
        own = parameters.setting(tree, "amdgpu", name)
        if own and own.value in values:
            message = f"amdgpu.{name}={own.value} replaces the scheduler of queues, as guides "
            message += "advise against hangs: a machine with it hung as well"
            return warning(message, parameters.removal(tree, own), _SCHEDULER)
    return fine()


def _power_features(tree: Tree) -> Result:
    """Remark on a mask of power features that someone set: GFXOFF's fault ended with 6.18.4."""
    own = parameters.setting(tree, "amdgpu", "ppfeaturemask")
    if own is None:
        return fine()
    message = f"amdgpu.ppfeaturemask={own.value} is set; kernels from 6.18.4 on do not need it"
    return remark(message, parameters.removal(tree, own), _GFXOFF)


def power(tree: Tree) -> Result:
    """The GPU's clocks follow the load: no fixed low level, no power-saving profile, and mains
    power: https://github.com/ROCm/legacy-rocm-build/issues/5750"""
    need_gpu(tree)
    results = [_level(tree), _gpu_profile(tree), _platform_profile(tree), _processor(tree)]
    results.append(_daemon(tree))
    mains = [tree.read_at(file) for file in tree.glob("sys/class/power_supply/A*/online")]
    if mains and "1" not in mains:
        results.append(warning("the machine runs on battery: clocks are lower", "plug it in"))
    level = tree.read(f"{tree.gpu_folder}/power_dpm_force_performance_level")
    return worst(results, **({"level": level} if level else {}))


def _level(tree: Tree) -> Result:
    """Judge the performance level of the GPU."""
    file = f"{tree.gpu_folder}/power_dpm_force_performance_level"
    level = tree.read(file) if tree.gpu_folder else None
    if level in (None, "", "auto", "high"):
        return _dpm(tree)
    fix = f"echo auto | sudo tee /{file}"
    message = f"the GPU's performance level is {level}"
    if level in ("low", "profile_min_sclk", "profile_min_mclk", "profile_exit"):
        return warning(f"{message}: its clocks stay at the lowest", fix, _LEVEL)
    return remark(f"{message}, not auto: its clocks do not follow the load", fix, _LEVEL)


def _gpu_profile(tree: Tree) -> Result:
    """Judge the GPU's own profile, whose active line has a star."""
    file = f"{tree.gpu_folder}/pp_power_profile_mode"
    active = re.search(r"(?m)^\s*\d+\s+(\w+)\s*\*", tree.read(file) or "")
    if not active or active[1] != "POWER_SAVING":
        return fine()
    fix = f"echo 0 | sudo tee /{file}"
    return warning("the GPU's power profile is POWER_SAVING", fix, _LEVEL)


def _dpm(tree: Tree) -> Result:
    if parameters.value_of(tree, "amdgpu", "dpm") != "0":
        return fine()
    message = "amdgpu.dpm=0 turns power management off: clocks stay at those of the start"
    return warning(message, _removal(tree, "dpm"), _LEVEL)


def _platform_profile(tree: Tree) -> Result:
    """Judge the profile of the firmware, which limits the power of processor and GPU together."""
    profile = tree.read("sys/firmware/acpi/platform_profile")
    if profile not in ("low-power", "quiet", "cool"):
        return fine()
    message = f"the platform profile is {profile}: it limits processor and GPU together"
    file = "/sys/firmware/acpi/platform_profile"
    fix = f"powerprofilesctl set performance, or echo performance | sudo tee {file}"
    return warning(message, fix, _GOVERNOR)


def _processor(tree: Tree) -> Result:
    """Judge the governor of the processor, which feeds the GPU."""
    folder = "sys/devices/system/cpu/cpu0/cpufreq"
    governor = tree.read(f"{folder}/scaling_governor")
    preference = tree.read(f"{folder}/energy_performance_preference")
    fix = "sudo cpupower frequency-set -g performance, or " + _TUNED
    if governor == "powersave" and preference is None:
        # without a preference, powersave is the lowest clock
        message = "the processor's governor is powersave: its clock stays at the lowest"
        return warning(message, fix, _GOVERNOR)
    if preference == "power":
        message = "the processor's energy preference is power: it saves before it computes"
        return warning(message, fix, _GOVERNOR)
    if governor == "powersave":
        message = (
            "the processor's governor is powersave: tuned's accelerator-performance gave 3 % of "
            "memory bandwidth and 5 to 8 % of prompt speed (Strix Halo wiki)"
        )
        return remark(message, fix, _GOVERNOR)
    return fine()


def _daemon(tree: Tree) -> Result:
    """Judge the profile that tuned or power-profiles-daemon has chosen."""
    profile = tree.read("etc/tuned/active_profile") or ""
    if "powersave" in profile:
        return warning(f"tuned's profile is {profile}", _TUNED, _GOVERNOR)
    state = tree.read("var/lib/power-profiles-daemon/state.ini") or ""
    if re.search(r"(?m)^Profile=power-saver", state):
        fix = "powerprofilesctl set performance"
        return warning("power-profiles-daemon's profile is power-saver", fix, _GOVERNOR)
    return fine()


def iommu(tree: Tree) -> Result:
    """The IOMMU is off, or its cost is known. Without it one Strix Halo ran llama.cpp 5 to 12 %
    faster, and another, which had crashed within the hour, ran for a week:
    https://github.com/kyuz0/amd-strix-halo-toolboxes/issues/66"""
    need_gpu(tree)
    words = known(tree.read("proc/cmdline"), "the kernel's command line").split()
    units = tree.path("sys/class/iommu")
    if "amd_iommu=off" in words or "iommu=off" in words:
        return fine(amd_iommu="off")
    if units.is_dir() and not any(units.iterdir()):
        return fine(amd_iommu="off in the BIOS")
    message = (
        "the IOMMU is on. With amd_iommu=off one machine was 5 to 12 % faster (kyuz0), and another "
        "no longer had crashes within an hour of load; but it turns off the protection against "
        "devices' DMA, passthrough to virtual machines and the NPU. iommu=pt changed nothing"
    )
    unknown = [
        word
        for word in words
        if word.startswith("amd_iommu=") and not {*word[10:].split(",")} <= _AMD_IOMMU
    ]
    fix = _distribution.with_arguments(tree, "amd_iommu=off")
    if unknown:
        message = f"the kernel ignores {unknown[0]}, which it does not know; {message}"
        removal = _distribution.without_arguments(tree, *unknown)
        fix = replace(fix, text=f"{removal}; {fix.text}")
    source = f"https://github.com/kyuz0/amd-strix-halo-toolboxes/issues/66 {_IOMMU_CRASH}"
    return remark(message, fix, source)
