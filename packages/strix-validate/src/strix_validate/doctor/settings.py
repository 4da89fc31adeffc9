# SPDX-License-Identifier: BSD-3-Clause
"""The doctor's checks of settings that an owner may have changed: driver, power and IOMMU."""

import re
from dataclasses import replace

from strix_validate.checks import Result
from strix_validate.doctor import _distribution, hardware, kernel_release, parameters
from strix_validate.doctor._verdicts import (
    Fix,
    combine,
    fine,
    need_gpu,
    need_value,
    remark,
    warning,
)
from strix_validate.doctor.tree import Tree

#: Milliseconds after which the driver resets a ring. _LOCKUP_NEW is the default of kernels from 7.0
#: on, and _LOCKUP_OLD that of earlier kernels. With _LOCKUP_ENOUGH, one machine no longer reset its
#: rings under load.
_LOCKUP_NEW = 2000
_LOCKUP_OLD = 10000
_LOCKUP_ENOUGH = 20000
_LOCKUP = "https://github.com/defilantech/LLMKube/pull/886"
_LOCKUP_LOWERED = "https://github.com/invoke-ai/InvokeAI/issues/9539"
_CWSR = "https://github.com/palazzem/hanzo/pull/345"
_CWSR_NEEDED = "https://github.com/ROCm/legacy-rocm-build/issues/5991"
_GFXOFF = "https://github.com/palazzem/hanzo/pull/252"
#: amdgpu's default mask of power features: all but OverDrive (0x4000) and GFX DCS (0x80000), see
#: https://github.com/torvalds/linux/blob/v6.18/drivers/gpu/drm/amd/amdgpu/amdgpu_drv.c
_POWER_FEATURES = 0xFFF7BFFF
_SCHEDULER = "https://github.com/ROCm/legacy-rocm-build/issues/6530"
#: Values of amdgpu's options that replace the scheduler of queues.
_OTHER_SCHEDULERS = {
    "mes": ("0",),
    "uni_mes": ("0",),
    "sched_policy": ("1", "2"),
}
_LEVEL = "https://github.com/ROCm/legacy-rocm-build/issues/5750"
_LOW_LEVELS = ("low", "profile_min_sclk", "profile_min_mclk", "profile_exit")
_GOVERNOR = "https://github.com/noamsto/nix-amd-ai/issues/19"
_TUNED = "sudo tuned-adm profile accelerator-performance"
_PLATFORM_PROFILE = "sys/firmware/acpi/platform_profile"
#: Values of amd_iommu that the kernel knows, and "on", which it ignores.
_AMD_IOMMU = {
    "on",
    "off",
    "fullflush",
    "force_isolation",
    "force_enable",
    "irtcachedis",
    "nohugepages",
    "pgtbl_v1",
    "pgtbl_v2",
    "v2_pgsizes_only",
}
_IOMMU = "https://github.com/kyuz0/amd-strix-halo-toolboxes/issues/66"
_IOMMU_CRASH = "https://github.com/ROCm/legacy-rocm-build/issues/6598"


def options(tree: Tree) -> Result:
    """No option of the driver is left over from a workaround, and none ends long computations on
    the GPU: https://github.com/palazzem/hanzo/pull/345"""
    need_gpu(tree)
    results = [
        _judge_cwsr(tree),
        _judge_lockup(tree),
        _judge_scheduler(tree),
        _judge_power_features(tree),
    ]
    return combine(results)


def _suggest_removal(tree: Tree, name: str) -> Fix:
    """Return how to remove an option of amdgpu."""
    return parameters.suggest_removal_of(tree, "amdgpu", name)


def _judge_cwsr(tree: Tree) -> Result:
    """Judge cwsr_enable=0, which only kernels without the fixes for KFD's limits need."""
    if parameters.read_value(tree, "amdgpu", "cwsr_enable") not in ("0", "N"):
        return fine()
    release = kernel_release.parse(tree.release or "")
    first = kernel_release.find_first_fixed()
    message = (
        f"amdgpu.cwsr_enable=0 is a workaround for kernels without KFD's fixes of Linux {first}"
    )
    if release is None or not hardware.has_fixes(tree, release):
        message += ": keep it until the kernel has them (doctor/kernel)"
        return remark(message, "", _CWSR_NEEDED)
    message += (
        ", and this kernel has them; with the option, queues cannot be preempted, so a long GPU "
        "kernel blocks the desktop"
    )
    return warning(message, _suggest_removal(tree, "cwsr_enable"), _CWSR)


def _judge_lockup(tree: Tree) -> Result:
    """Judge the time after which the driver resets a ring that makes no progress."""
    fix = _distribution.suggest_adding_arguments(tree, f"amdgpu.lockup_timeout={_LOCKUP_ENOUGH}")
    value = parameters.read_value(tree, "amdgpu", "lockup_timeout") or ""
    parts = [part for part in value.split(",") if re.fullmatch(r"-?\d{1,9}", part)]
    # 0 stands for the default, and a negative number for no limit.
    times = [int(part) for part in parts if int(part)]
    short = [time for time in times if 0 < time < _LOCKUP_OLD]
    if times:
        if not short:
            return fine()
        message = (
            f"amdgpu.lockup_timeout={value}: rings are reset after {min(short)} ms, even if they "
            "are only slow under load"
        )
        return warning(message, fix, _LOCKUP)
    release = kernel_release.parse(tree.release or "")
    if release is None or release.version < (7, 0, 0) or tree.is_wsl:
        return fine()
    message = (
        f"amdgpu.lockup_timeout is {_LOCKUP_NEW} ms from Linux 7.0 on, {_LOCKUP_OLD} before: while "
        "compute fills the GPU, the desktop's and Vulkan's rings may be reset (device lost)"
    )
    return remark(message, fix, f"{_LOCKUP} {_LOCKUP_LOWERED}")


def _judge_scheduler(tree: Tree) -> Result:
    """Warn of options that replace the scheduler of queues; guides say that this prevents hangs."""
    for name, values in _OTHER_SCHEDULERS.items():
        settings = parameters.find_settings(tree, "amdgpu", name)
        if not settings or settings[0].value not in values:
            continue
        message = (
            f"amdgpu.{name}={settings[0].value} replaces the scheduler of queues. Guides advise "
            "this to prevent hangs, but a machine with this setting hung as well"
        )
        return warning(message, parameters.suggest_removal(tree, *settings), _SCHEDULER)
    return fine()


def _judge_power_features(tree: Tree) -> Result:
    """Remark on a mask that turns off power features that are on by default.

    Owners set such masks to avoid a fault of GFXOFF, which is fixed in Linux 6.18.4. Other masks
    only turn on OverDrive, so that tools for fans and clocks work.
    """
    settings = parameters.find_settings(tree, "amdgpu", "ppfeaturemask")
    if not settings:
        return fine()
    value = settings[0].value
    try:
        mask = int(value, 0)
    except ValueError:
        # amdgpu does not accept the value either.
        return fine()
    if not _POWER_FEATURES & ~mask:
        return fine()
    message = (
        f"amdgpu.ppfeaturemask={value} turns off power features that are on by default; kernels "
        "from 6.18.4 on do not need it"
    )
    return remark(message, parameters.suggest_removal(tree, *settings), _GFXOFF)


def power(tree: Tree) -> Result:
    """The GPU's clocks follow the load: no low performance level, no power-saving profile, and
    mains power: https://github.com/ROCm/legacy-rocm-build/issues/5750"""
    need_gpu(tree)
    results = [
        _judge_level(tree),
        _judge_gpu_profile(tree),
        _judge_platform_profile(tree),
        _judge_processor(tree),
        _judge_daemon(tree),
        _judge_battery(tree),
    ]
    level = tree.read(_level_file(tree))
    measured = {"level": level} if level else {}
    return combine(results, **measured)


def _level_file(tree: Tree) -> str:
    return f"{tree.gpu_folder}/power_dpm_force_performance_level"


def _judge_level(tree: Tree) -> Result:
    """Judge the performance level of the GPU."""
    level = tree.read(_level_file(tree)) if tree.gpu_folder else None
    if level in (None, "", "auto", "high"):
        return _judge_dpm(tree)
    fix = f"echo auto | sudo tee /{_level_file(tree)}"
    message = f"the GPU's performance level is {level}"
    if level in _LOW_LEVELS:
        return warning(f"{message}: its clocks stay at the lowest", fix, _LEVEL)
    return remark(f"{message}, not auto: its clocks do not follow the load", fix, _LEVEL)


def _judge_gpu_profile(tree: Tree) -> Result:
    """Judge the GPU's active power profile, which its file marks with an asterisk."""
    file = f"{tree.gpu_folder}/pp_power_profile_mode"
    active = re.search(r"(?m)^\s*\d+\s+(\w+)\s*\*", tree.read(file) or "")
    if not active or active[1] != "POWER_SAVING":
        return fine()
    fix = f"echo 0 | sudo tee /{file}"
    return warning("the GPU's power profile is POWER_SAVING", fix, _LEVEL)


def _judge_dpm(tree: Tree) -> Result:
    """Judge amdgpu.dpm=0, which turns power management off."""
    if parameters.read_value(tree, "amdgpu", "dpm") != "0":
        return fine()
    message = "amdgpu.dpm=0 turns power management off: clocks keep their boot-time values"
    return warning(message, _suggest_removal(tree, "dpm"), _LEVEL)


def _judge_platform_profile(tree: Tree) -> Result:
    """Judge the firmware's platform profile, which limits processor and GPU power together."""
    profile = tree.read(_PLATFORM_PROFILE)
    if profile not in ("low-power", "quiet", "cool"):
        return fine()
    message = f"the platform profile is {profile}: it limits processor and GPU together"
    fix = f"powerprofilesctl set performance, or echo performance | sudo tee /{_PLATFORM_PROFILE}"
    return warning(message, fix, _GOVERNOR)


def _judge_processor(tree: Tree) -> Result:
    """Judge the frequency governor of the processor, which gives the GPU its work."""
    folder = "sys/devices/system/cpu/cpu0/cpufreq"
    governor = tree.read(f"{folder}/scaling_governor")
    preference = tree.read(f"{folder}/energy_performance_preference")
    fix = f"sudo cpupower frequency-set -g performance, or {_TUNED}"
    if governor == "powersave" and preference is None:
        # Without an energy preference, the governor powersave keeps the lowest clock.
        message = "the processor's governor is powersave: its clock stays at the lowest"
        return warning(message, fix, _GOVERNOR)
    if preference == "power":
        message = "the processor's energy preference is power: it saves energy and is slower"
        return warning(message, fix, _GOVERNOR)
    if governor == "powersave":
        message = (
            "the processor's governor is powersave: with tuned's accelerator-performance, memory "
            "bandwidth was 3 % higher and prompt speed 5 to 8 % (Strix Halo wiki)"
        )
        return remark(message, fix, _GOVERNOR)
    return fine()


def _judge_daemon(tree: Tree) -> Result:
    """Judge the profile that tuned or power-profiles-daemon has chosen."""
    profile = tree.read("etc/tuned/active_profile") or ""
    if "powersave" in profile:
        return warning(f"tuned's profile is {profile}", _TUNED, _GOVERNOR)
    state = tree.read("var/lib/power-profiles-daemon/state.ini") or ""
    if re.search(r"(?m)^Profile=power-saver", state):
        fix = "powerprofilesctl set performance"
        return warning("power-profiles-daemon's profile is power-saver", fix, _GOVERNOR)
    return fine()


def _judge_battery(tree: Tree) -> Result:
    files = tree.glob("sys/class/power_supply/A*/online")
    states = [tree.read_at(file) for file in files]
    if not states or "1" in states:
        return fine()
    return warning("the machine runs on battery: clocks are lower", "plug it in")


def iommu(tree: Tree) -> Result:
    """The IOMMU is off, or its cost is reported. Without it, one Strix Halo ran llama.cpp 5 to 12 %
    faster, and another one, which had crashed within an hour, ran for a week:
    https://github.com/kyuz0/amd-strix-halo-toolboxes/issues/66"""
    need_gpu(tree)
    command_line = need_value(tree.read("proc/cmdline"), "the kernel's command line")
    arguments = command_line.split()
    if "amd_iommu=off" in arguments or "iommu=off" in arguments:
        return fine(amd_iommu="off")
    units = tree.path("sys/class/iommu")
    if units.is_dir() and not any(units.iterdir()):
        return fine(amd_iommu="off in the BIOS")
    message = (
        "the IOMMU is on. With amd_iommu=off one machine was 5 to 12 % faster (kyuz0), and another "
        "no longer crashed within an hour of load; but amd_iommu=off also turns off the NPU, "
        "passthrough to virtual machines, and the protection against devices' DMA. iommu=pt "
        "changed nothing"
    )
    fix = _distribution.suggest_adding_arguments(tree, "amd_iommu=off")
    unknown = _find_unknown_arguments(arguments)
    if unknown:
        message = f"the kernel ignores {unknown[0]}, which it does not know; {message}"
        removal = _distribution.suggest_removing_arguments(tree, *unknown)
        fix = replace(fix, text=f"{removal}; {fix.text}")
    return remark(message, fix, f"{_IOMMU} {_IOMMU_CRASH}")


def _find_unknown_arguments(arguments: list[str]) -> list[str]:
    """Return the arguments amd_iommu=... with values that the kernel does not know."""
    unknown = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name == "amd_iommu" and not set(value.split(",")) <= _AMD_IOMMU:
            unknown.append(argument)
    return unknown
