# SPDX-License-Identifier: BSD-3-Clause
"""The doctor's checks of the machine: its GPU, driver, kernel and firmware."""

import re
from collections.abc import Iterable
from dataclasses import replace

from strix_validate import TARGET
from strix_validate.checks import CannotRun, Result
from strix_validate.doctor import (
    _distribution,
    containers,
    kernel_release,
    parameters,
    virtual_packages,
)
from strix_validate.doctor._verdicts import (
    Fix,
    error,
    fine,
    need_gpu,
    need_value,
    remark,
    warning,
)
from strix_validate.doctor.host import shorten_release
from strix_validate.doctor.tree import DEVICES, Node, Tree
from strix_validate.doctor.virtual_packages import REQUIRED, VARIABLES

#: Date of the linux-firmware that has the bad version of MES, the GPU's scheduler.
_BAD_FIRMWARE = "20251125"
#: Date of the first linux-firmware after the bad MES was withdrawn.
_GOOD_FIRMWARE = "20260110"
#: Two versions of MES. Compute hangs with _BAD_MES. One machine hung with _SUSPECT_MES.
_BAD_MES = 0x83
_SUSPECT_MES = 0x86
_SUSPECT = "https://github.com/ROCm/legacy-rocm-build/issues/6165"
_LEFT_BEHIND = "https://github.com/ROCm/legacy-rocm-build/issues/5991"
_PASSTHROUGH = "https://github.com/isc30/ryzen-gpu-passthrough-proxmox/issues/139"
#: Kernel arguments that list the modules not to load.
_BLACKLISTS = (
    "modprobe.blacklist",
    "module_blacklist",
    "rd.driver.blacklist",
)


def _list_visibility_variables(tree: Tree) -> list[str]:
    """Return the variables that name the visible GPUs, in the order in which libraries apply them.

    HIP numbers only the GPUs that ROCr shows. HIP reads CUDA's variable if HIP's is not set.
    """
    hip = "HIP_VISIBLE_DEVICES"
    if not tree.environ.get(hip):
        hip = "CUDA_VISIBLE_DEVICES"
    return ["ROCR_VISIBLE_DEVICES", hip]


def _select_visible(gpus: list[int], value: str) -> list[int]:
    """Return the GPUs that a variable shows.

    Args:
        gpus: The GPUs; the variable names them by their position in this list.
        value: The variable's value: positions, separated by commas. If it is empty or has a UUID,
            all GPUs are returned.
    """
    if not value or "GPU-" in value:
        return gpus
    selected = []
    for part in value.split(","):
        # A number that no GPU has ends the list; later numbers are ignored.
        if not part.strip().isdecimal() or int(part) >= len(gpus):
            break
        selected.append(gpus[int(part)])
    return selected


def gpu(tree: Tree) -> Result:
    """KFD, the compute part of the amdgpu driver, lists the GPU, and no variable hides it. gfx1150
    (Strix Point) is easily mistaken for gfx1151, but needs other kernels:
    https://github.com/ROCm/aotriton/issues/183"""
    gpus = [f"{node.name} ({node.units} units)" for node in tree.gpus]
    measured = {"gpus": ", ".join(gpus)}
    if tree.target_gpu:
        return _judge_visibility(tree, tree.target_gpu, measured)
    names = list(dict.fromkeys(node.name for node in tree.gpus))
    if names:
        message = f"the GPU is {', '.join(names)}, but these packages are compiled for {TARGET}"
        fix = "use packages built for this GPU"
        supported = [name for name in names if name in DEVICES]
        if supported:
            fix += f"; to examine this GPU, run doctor with gpu_arch={supported[0]}"
        return error(message, fix, **measured)
    if tree.has_target_gpu:
        return _judge_without_kfd(tree)
    if tree.is_wsl:
        message = "this is WSL, whose kernel has no KFD: Windows owns the GPU"
        return error(message, "boot Linux itself, or use AMD's own packages for WSL")
    return _judge_absent(tree)


def _judge_visibility(tree: Tree, target: Node, measured: dict[str, str]) -> Result:
    """Judge whether variables hide the target GPU, or leave other GPUs visible."""
    names = list(dict.fromkeys(node.name for node in tree.gpus))
    others = [name for name in names if name != target.name]
    index = tree.gpus.index(target)
    visible = list(range(len(tree.gpus)))
    for variable in _list_visibility_variables(tree):
        value = tree.environ.get(variable, "")
        candidates = visible
        visible = _select_visible(candidates, value)
        if variable == "ROCR_VISIBLE_DEVICES" and tree.environ.get(variable) == "":
            # ROCr only tests whether its variable is set, so an empty variable hides all GPUs. HIP
            # treats an empty variable as unset.
            visible = []
        if index in candidates and index not in visible:
            number = candidates.index(index)
            message = f"{variable}={value} hides the GPU, whose number is {number}"
            fix = f"export {variable}={number}" if others else f"unset {variable}"
            return error(message, fix, **measured)
    if others and visible != [index]:
        verb = "is" if len(others) == 1 else "are"
        message = (
            f"{', '.join(others)} {verb} visible besides {TARGET}, but these packages have kernels "
            f"only for {TARGET}"
        )
        return warning(message, f"export ROCR_VISIBLE_DEVICES={index}", **measured)
    return fine(**measured)


def _judge_without_kfd(tree: Tree) -> Result:
    """Judge a GPU that is on the PCI bus but not in KFD's list, by its driver."""
    message = f"the {TARGET} is on the PCI bus, but KFD does not list it"
    log = "sudo dmesg | grep -i -e amdgpu -e kfd"
    if tree.target_driver == "vfio-pci":
        message = (
            f"the {TARGET} is bound to vfio-pci for a virtual machine, and only that machine can "
            "use it"
        )
        fix = (
            f"use the GPU in that machine, or remove 1002:{DEVICES[TARGET][2:]} from vfio-pci.ids "
            "(grep -rn -e vfio -e blacklist /etc/modprobe.d /proc/cmdline) and rebuild the "
            "initramfs"
        )
        return error(message, Fix(fix, needs_reboot=True), _PASSTHROUGH)
    if tree.target_driver == "amdgpu":
        message += ", though it has the driver amdgpu: the kernel lacks KFD, or KFD did not start"
        return error(message, log)
    obstacle = find_obstacle(tree)
    if obstacle:
        fix_obstacle = Fix(obstacle.fix, obstacle.needs_reboot)
        return error(f"{message}: {obstacle.reason}", fix_obstacle, obstacle.source)
    if tree.path("sys/module/amdgpu").is_dir():
        return error(f"{message}: amdgpu is loaded, but not bound to the GPU", log)
    return error(message, f"sudo modprobe amdgpu && {log}")


def find_obstacle(tree: Tree) -> Result | None:
    """Return what prevents the driver amdgpu from being loaded, or None if files do not show it."""
    return (
        _find_obstacle_on_command_line(tree)
        or _find_obstacle_in_files(tree)
        or _find_unsigned_driver(tree)
        or _find_missing_firmware(tree)
    )


def _find_obstacle_on_command_line(tree: Tree) -> Result | None:
    for argument in parameters.read_arguments(tree):
        name, _, value = argument.partition("=")
        is_blacklisted = name in _BLACKLISTS and "amdgpu" in value.split(",")
        if argument == "nomodeset" or is_blacklisted:
            command = _distribution.suggest_removing_arguments(tree, argument)
            message = f"{argument} on the kernel's command line keeps amdgpu from loading"
            return error(message, Fix(command, needs_reboot=True))
    return None


def _find_obstacle_in_files(tree: Tree) -> Result | None:
    line = r"(?m)^\s*(blacklist\s+amdgpu\b|install\s+amdgpu\s+/bin/(false|true))"
    expressions = ["/^ *blacklist *amdgpu/d", "/^ *install *amdgpu/d"]
    for file in tree.glob("etc/modprobe.d/*.conf"):
        if re.search(line, tree.read_at(file) or ""):
            name = f"/{file.relative_to(tree.root)}"
            command = _distribution.suggest_modprobe_edit(tree, name, expressions, "amdgpu")
            return error(f"{name} keeps amdgpu from loading", Fix(command, needs_reboot=True))
    return None


def _find_unsigned_driver(tree: Tree) -> Result | None:
    if not _has_dkms(tree):
        return None
    for file in tree.glob("sys/firmware/efi/efivars/SecureBoot-*"):
        if (tree.read_at(file) or "").endswith("\x01"):
            command = (
                "sudo mokutil --import /var/lib/shim-signed/mok/MOK.der, or sudo amdgpu-install "
                "--uninstall"
            )
            return error(
                "Secure Boot is on, and rejects a driver of DKMS whose key is not enrolled",
                Fix(command, needs_reboot=True),
                "https://github.com/ROCm/legacy-rocm-build/issues/4328",
            )
    return None


def _find_missing_firmware(tree: Tree) -> Result | None:
    folders = [tree.path("lib/firmware"), tree.path("usr/lib/firmware")]
    if not any(folder.is_dir() for folder in folders) or _has_firmware(tree):
        return None
    package = _distribution.get_firmware_package(tree)
    fix = f"install {package} (Debian: of the component non-free-firmware)"
    return error(f"no firmware of {TARGET} is installed", Fix(fix, needs_reboot=True))


def _has_firmware(tree: Tree) -> bool:
    """Return whether the GPU's firmware is installed.

    The result is True for other GPUs than gfx1151, because their files' names are not known here.
    """
    if TARGET != "gfx1151":
        return True
    folders = ("lib/firmware", "usr/lib/firmware", "lib/firmware/updates")
    return any(tree.glob(f"{folder}/amdgpu/gc_11_5_1_*") for folder in folders)


def _has_dkms(tree: Tree) -> bool:
    """Return whether AMD's driver for DKMS is installed."""
    return tree.path("var/lib/dkms/amdgpu").is_dir() or "amdgpu-dkms" in tree.packages


def _judge_absent(tree: Tree) -> Result:
    """Judge a machine whose target GPU is not on the PCI bus, and where KFD lists no GPU."""
    cpu = tree.read("proc/cpuinfo") or ""
    if TARGET == "gfx1151" and re.search(r"(?mi)^model name.*\bAI MAX\b", cpu):
        if re.search(r"(?m)^flags.*\bhypervisor\b", cpu):
            message = "the processor is a Strix Halo, but this virtual machine has no AMD GPU"
            fix = "pass the GPU through to the virtual machine, or use a container on the host"
            return error(message, fix, _PASSTHROUGH)
        message = "the processor is a Strix Halo, but its GPU is not on the PCI bus"
        fix = "enable the integrated GPU in the BIOS (primary display, UMA or iGPU), without Auto"
        return error(message, Fix(fix, needs_reboot=True))
    return error(
        f"no {TARGET} is on the PCI bus, and /sys/class/kfd lists no GPU",
        f"lspci -nn -d 1002:{DEVICES[TARGET][2:]}   # a machine with a {TARGET} prints one line",
    )


def pixi(tree: Tree) -> Result:
    """pixi detects the GPU. Of several GPUs, pixi detects the one with the most compute units. If
    this is not the GPU that the stacks are for, `pixi exec` and `pixi global` find no solution. If
    pixi detects no GPU, each `pixi run` in a stack prints a warning:
    https://github.com/conda/ceps/pull/189"""
    invalid = virtual_packages.find_invalid_overrides(tree)
    if invalid:
        assignments = [f"{VARIABLES[name]}={value}" for name, value in invalid.items()]
        message = f"pixi does not accept {' and '.join(assignments)}, and ends with an error"
        return error(message, _suggest_export(invalid), **invalid)
    detected = virtual_packages.detect(tree)
    if detected == REQUIRED:
        return fine(**detected)
    if (tree.gpus and not tree.target_gpu) or tree.is_wsl:
        # No override is suggested: with one, pixi would install kernels for a GPU that is absent.
        raise CannotRun(f"there is no {TARGET} GPU")
    packages = [f"{name}={version}" for name, version in detected.items()]
    listed = ", ".join(packages) or "no AMD GPU"
    missing = [name for name in REQUIRED if detected.get(name) != REQUIRED[name]]
    message = f"pixi detects {listed}, but the stacks are for {TARGET}"
    return warning(message, _suggest_export(missing), **detected)


def _suggest_export(names: Iterable[str]) -> str:
    """Return the command that overrides virtual packages with the required versions."""
    assignments = [f"{VARIABLES[name]}={REQUIRED[name]}" for name in names]
    return f"export {' '.join(assignments)}"


def _need_gfx1151() -> None:
    if TARGET != "gfx1151":
        raise CannotRun("this check knows only gfx1151")


def driver(tree: Tree) -> Result:
    """The kernel's own amdgpu driver is loaded. DKMS's driver has an older KFD than new kernels:
    https://github.com/ROCm/TheRock/blob/main/docs/faq.md"""
    need_gpu(tree)
    if not tree.path("sys/module/amdgpu").is_dir():
        if tree.target_driver == "vfio-pci":
            return error("amdgpu is not loaded: the GPU is bound to vfio-pci", "see doctor/gpu")
        obstacle = find_obstacle(tree)
        if obstacle:
            return replace(obstacle, reason=f"amdgpu is not loaded: {obstacle.reason}")
        return error("amdgpu is not loaded", "sudo modprobe amdgpu")
    version = tree.read("sys/module/amdgpu/version")
    if version:
        message = f"amdgpu {version} comes from DKMS, not from the kernel"
        fix = Fix("sudo amdgpu-install --uninstall", needs_reboot=True)
        return warning(message, fix, version=version)
    return fine()


def kernel(tree: Tree) -> Result:
    """The kernel has the fixes for KFD's queue and memory limits, and no known fault. It has the
    fixes if it is new enough, or if its KFD exports the size of the context save area, as kernels
    with backports do. Without the fixes, compute fails to start or faults. doctor/kernels.toml
    lists faulty builds:
    https://rocm.docs.amd.com/en/latest/how-to/system-optimization/strixhalo.html"""
    _need_gfx1151()
    text = need_value(tree.release, "the kernel's release")
    release = kernel_release.parse(text)
    if release is None:
        raise CannotRun(f"the kernel's release does not begin with a version: {text!r}")
    name = shorten_release(text)
    if tree.is_wsl:
        raise CannotRun(f"{name} is WSL's kernel, which comes with Windows")
    if not has_fixes(tree, release):
        bound = kernel_release.find_first_fixed(release)
        message = f"{text} is older than {bound}, the first with the fixes for gfx1151"
        return error(message, _suggest_kernel(tree), release=name)
    fault = kernel_release.find_fault(release)
    if fault is None:
        return fine(release=name)
    message = f"{text}: {fault.symptom}; {fault.fix}"
    verdict = warning if fault.is_reported else remark
    return verdict(message, _suggest_kernel(tree), fault.source, release=name)


def _suggest_kernel(tree: Tree) -> Fix:
    """Return how to start a better kernel: boot an installed one, or else install a newer one."""
    installed = _find_better_kernel(tree)
    if installed:
        return Fix(f"boot {installed}, which is already installed", needs_reboot=True)
    return _distribution.suggest_new_kernel(tree)


def _find_better_kernel(tree: Tree) -> str | None:
    """Return the newest installed kernel that has the fixes and no known fault, or None."""
    if containers.detect(tree):
        return None
    candidates = []
    for folder in [*tree.glob("lib/modules/*"), *tree.glob("usr/lib/modules/*")]:
        release = kernel_release.parse(folder.name)
        if release is None or not kernel_release.is_fixed(release):
            continue
        if not (folder / "kernel").is_dir():
            # The kernel was removed, but other programs left files in its folder.
            continue
        if kernel_release.find_fault(release) is None:
            candidates.append(release)
    if not candidates:
        return None
    newest = max(candidates, key=lambda each: (each.version, each.candidate, each.build))
    return newest.text


def has_fixes(tree: Tree, release: kernel_release.Release) -> bool:
    """Return whether the kernel has the fixes for KFD's limits."""
    return kernel_release.is_fixed(release) or any(node.exports_cwsr for node in tree.gpus)


def find_kernel_fault(tree: Tree) -> kernel_release.Faulty | None:
    """Return the known fault of the running kernel, if it has one."""
    release = kernel_release.parse(tree.release or "")
    return kernel_release.find_fault(release) if release else None


def firmware(tree: Tree) -> Result:
    """The GPU has neither the firmware of linux-firmware 20251125, whose MES 0x83 hangs compute on
    gfx1151, nor MES 0x86, with which one machine hung. Nothing overrides linux-firmware's files:
    https://github.com/ROCm/legacy-rocm-build/issues/5724"""
    need_gpu(tree)
    _need_gfx1151()
    mes = _read_loaded_mes(tree)
    version = tree.firmware
    override = _find_overriding_firmware(tree)
    if version is None and mes is None and override is None:
        raise CannotRun("linux-firmware's version cannot be read")
    measured = {
        "version": version,
        "mes": None if mes is None else hex(mes),
    }
    if override is not None and mes != _SUSPECT_MES:
        return _judge_override(mes, override, measured)
    if version and _BAD_FIRMWARE in version:
        fix = _distribution.suggest_new_firmware(tree)
        return error(f"linux-firmware {version} is known bad", fix, **measured)
    if mes == _BAD_MES:
        return _judge_bad_mes(tree, mes, version, measured)
    if mes == _SUSPECT_MES:
        message = "MES 0x86 is loaded; a machine with this MES hung without a message under vLLM"
        fix = Fix("if this machine hangs, install a newer linux-firmware", needs_reboot=True)
        if override:
            _, fix = override
        return warning(message, fix, _SUSPECT, **measured)
    return fine(**measured)


def _judge_override(mes: int | None, override: tuple[str, Fix], measured: dict) -> Result:
    """Judge firmware that the kernel loads instead of linux-firmware's."""
    source, fix = override
    message = f"{source} is loaded before linux-firmware, whose update therefore changes nothing"
    if mes is None:
        message += ", and may be the bad MES 0x83"
        return warning(message, fix, _LEFT_BEHIND, **measured)
    if mes == _BAD_MES:
        message += ", and is the bad MES 0x83"
        return error(message, fix, _LEFT_BEHIND, **measured)
    return remark(message, fix, _LEFT_BEHIND, **measured)


def _judge_bad_mes(tree: Tree, mes: int, version: str | None, measured: dict) -> Result:
    """Judge a bad MES that is loaded although the installed package is not known to be bad."""
    name = f"the loaded MES {hex(mes)}"
    fix = _distribution.suggest_new_firmware(tree)
    if _is_good_firmware(version):
        name += f", older than the installed linux-firmware {version},"
        fix = _distribution.suggest_new_initramfs(tree)
    return error(f"{name} is known bad", fix, **measured)


def _is_good_firmware(version: str | None) -> bool:
    """Return whether a firmware package is dated after the withdrawal of the bad MES."""
    date = re.match(r"(?:\d+:)?(\d{8})", version or "")
    return date is not None and date[1] >= _GOOD_FIRMWARE


def _read_loaded_mes(tree: Tree) -> int | None:
    """Return the last byte of the version of the loaded MES, or None if debugfs does not show it.

    Only root can read debugfs.
    """
    if tree.gpu_folder is None:
        return None
    # debugfs numbers the GPUs as /sys/class/drm does.
    number = re.sub(r".*/card(\d+)/.*", r"\1", tree.gpu_folder)
    text = tree.read(f"sys/kernel/debug/dri/{number}/amdgpu_firmware_info") or ""
    line = r"^MES feature version: \d+, firmware version: (0x[0-9a-f]+)"
    version = re.search(line, text, re.M)
    return int(version[1], 16) & 0xFF if version else None


def _find_overriding_firmware(tree: Tree) -> tuple[str, Fix] | None:
    """Return firmware that the kernel prefers to linux-firmware's, and how to remove it."""
    version = tree.packages.get("amdgpu-dkms-firmware")
    if version is not None:
        package = _distribution.get_firmware_package(tree)
        command = (
            "sudo apt autoremove --purge amdgpu-dkms-firmware && sudo apt install --reinstall "
            f"{package}"
        )
        fix = Fix(_distribution.add_initramfs_build(tree, command), needs_reboot=True)
        return f"amdgpu-dkms-firmware {version}", fix
    for folder in ("lib/firmware/updates/amdgpu", "usr/lib/firmware/updates/amdgpu"):
        files = tree.glob(f"{folder}/gc_11_5_1_mes*")
        if files:
            command = f"sudo rm /{folder}/gc_11_5_1_*"
            fix = Fix(_distribution.add_initramfs_build(tree, command), needs_reboot=True)
            return f"/{folder}/{files[0].name}", fix
    return None
