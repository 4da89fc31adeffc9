# SPDX-License-Identifier: BSD-3-Clause
"""The doctor's checks of the machine: its GPU, driver, kernel and firmware."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from strix_validate import TARGET
from strix_validate.checks import CannotRun, Result
from strix_validate.doctor import _distribution, containers, kernel_release, parameters
from strix_validate.doctor._verdicts import Fix, error, fine, known, need_gpu, remark, warning
from strix_validate.doctor.host import kernel_version
from strix_validate.doctor.tree import DEVICES, Tree
from strix_validate.doctor.virtual_packages import VARIABLES, WANTED, detected, refused

#: Upstream's first kernel with the fixes for KFD's queue and memory limits.
KERNEL = kernel_release.version_of(kernel_release.upstream_fixed())
_BAD_FIRMWARE = "20251125"
_GOOD_FIRMWARE = "20260110"
_BAD_MES = 0x83
_SUSPECT_MES = 0x86
_SUSPECT = "https://github.com/ROCm/legacy-rocm-build/issues/6165"
_LEFT_BEHIND = "https://github.com/ROCm/legacy-rocm-build/issues/5991"
_PASSTHROUGH = "https://github.com/isc30/ryzen-gpu-passthrough-proxmox/issues/139"


def _hiding(tree: Tree) -> list[str]:
    """List the variables that name the GPUs to show, in the order in which libraries apply them.
    HIP counts those that ROCr left, and reads CUDA's variable where its own is not set."""
    hip = "HIP" if tree.environ.get("HIP_VISIBLE_DEVICES") else "CUDA"
    return ["ROCR_VISIBLE_DEVICES", f"{hip}_VISIBLE_DEVICES"]


def _chosen(gpus: list[int], listed: str) -> list[int]:
    """Select the GPUs that a variable shows; all if it is empty, or names one by its UUID."""
    if not listed or "GPU-" in listed:
        return gpus
    found = []
    for part in listed.split(","):
        # the first that does not exist ends the list
        if not part.strip().isdecimal() or int(part) >= len(gpus):
            break
        found.append(gpus[int(part)])
    return found


def gpu(tree: Tree) -> Result:
    """KFD, the compute part of the amdgpu driver, shows the GPU. gfx1150 (Strix Point) looks like
    gfx1151 and needs other kernels: https://github.com/ROCm/aotriton/issues/183"""
    names = list(dict.fromkeys(node.name for node in tree.gpus))
    measured = {"gpus": ", ".join(f"{node.name} ({node.units} units)" for node in tree.gpus)}
    if tree.ours:
        index = tree.gpus.index(tree.ours)
        others = ", ".join(name for name in names if name != tree.ours.name)
        seen = list(range(len(tree.gpus)))
        for variable in _hiding(tree):
            listed = tree.environ.get(variable, "")
            before, seen = seen, _chosen(seen, listed)
            if variable == "ROCR_VISIBLE_DEVICES" and tree.environ.get(variable) == "":
                # ROCr asks whether it is set: an empty list shows no GPU, unlike HIP's
                seen = []
            if index in before and index not in seen:
                what = f"{variable}={listed} hides the GPU, whose number is {before.index(index)}"
                fix = f"export {variable}={before.index(index)}" if others else f"unset {variable}"
                return error(what, fix, **measured)
        if others and seen != [index]:
            what = f"{others} is beside {TARGET}, the one GPU that these packages have kernels for"
            return warning(what, f"export ROCR_VISIBLE_DEVICES={index}", **measured)
        return fine(**measured)
    if names:
        what = f"the GPU is {', '.join(names)}, and these packages are compiled for {TARGET}"
        mine = next((f"; gpu_arch={n} has doctor examine it" for n in names if n in DEVICES), "")
        return error(what, f"use packages built for this GPU{mine}", **measured)
    if tree.has_ours:
        return _without_kfd(tree)
    if tree.is_wsl:
        what = "this is WSL, whose kernel has no KFD: Windows owns the GPU"
        return error(what, "boot Linux itself, or take AMD's own packages for WSL")
    return _absent(tree)


def _without_kfd(tree: Tree) -> Result:
    """Judge a GPU on the PCI bus that KFD does not list, by the driver that it has."""
    message = f"the {TARGET} is on the PCI bus, but KFD does not list it"
    if tree.driver_of_ours == "vfio-pci":
        message = f"the {TARGET} is bound to vfio-pci, for a virtual machine: only that can use it"
        steps = (
            f"use the GPU in that machine, or take 1002:{DEVICES[TARGET][2:]} out of vfio-pci.ids "
            "(grep -rn -e vfio -e blacklist /etc/modprobe.d /proc/cmdline) and rebuild the "
            "initramfs"
        )
        return error(message, Fix(steps, needs_reboot=True), _PASSTHROUGH)
    if tree.driver_of_ours == "amdgpu":
        message += ", though it has the driver amdgpu: the kernel lacks KFD, or KFD did not start"
        return error(message, "sudo dmesg | grep -i -e amdgpu -e kfd")
    cause = find_obstacle(tree)
    if cause:
        return error(f"{message}: {cause.reason}", Fix(cause.fix, cause.needs_reboot), cause.source)
    log = "sudo dmesg | grep -i -e amdgpu -e kfd"
    if tree.path("sys/module/amdgpu").is_dir():
        return error(f"{message}: amdgpu is loaded, and did not take the GPU", log)
    return error(message, f"sudo modprobe amdgpu && {log}")


def find_obstacle(tree: Tree) -> Result | None:
    """Return what keeps the driver amdgpu from being loaded, as far as files tell."""
    for word in parameters.arguments(tree):
        name, _, value = word.partition("=")
        lists = name in ("modprobe.blacklist", "module_blacklist", "rd.driver.blacklist")
        if word == "nomodeset" or (lists and "amdgpu" in value.split(",")):
            fix = Fix(_distribution.without_arguments(tree, word), needs_reboot=True)
            return error(f"{word} on the kernel's command line keeps amdgpu out", fix)
    for file in tree.glob("etc/modprobe.d/*.conf"):
        line = r"(?m)^\s*(blacklist\s+amdgpu\b|install\s+amdgpu\s+/bin/(false|true))"
        if re.search(line, tree.read_at(file) or ""):
            name = f"/{file.relative_to(tree.root)}"
            lines = ["/^ *blacklist *amdgpu/d", "/^ *install *amdgpu/d"]
            steps = _distribution.edit_modprobe(tree, name, lines, "amdgpu")
            return error(f"{name} keeps amdgpu out", Fix(steps, needs_reboot=True))
    secure = [(tree.read_at(f) or "") for f in tree.glob("sys/firmware/efi/efivars/SecureBoot-*")]
    if _has_dkms(tree) and any(text.endswith("\x01") for text in secure):
        steps = "sudo mokutil --import /var/lib/shim-signed/mok/MOK.der, or sudo amdgpu-install "
        return error(
            "Secure Boot is on, and rejects a driver of DKMS whose key is not enrolled",
            Fix(f"{steps}--uninstall", needs_reboot=True),
            "https://github.com/ROCm/legacy-rocm-build/issues/4328",
        )
    folders = [tree.path(name) for name in ("lib/firmware", "usr/lib/firmware")]
    if any(folder.is_dir() for folder in folders) and not _firmware_files(tree):
        package = _distribution.firmware_package(tree)
        steps = f"install {package} (Debian: of the component non-free-firmware)"
        return error(f"no firmware of {TARGET} is installed", Fix(steps, needs_reboot=True))
    return None


def _firmware_files(tree: Tree) -> list[Path]:
    """Return the files of the GPU's firmware; other GPUs' names are not known here."""
    if TARGET != "gfx1151":
        return [tree.root]
    folders = ("lib/firmware", "usr/lib/firmware", "lib/firmware/updates")
    return [file for f in folders for file in tree.glob(f"{f}/amdgpu/gc_11_5_1_*")]


def _has_dkms(tree: Tree) -> bool:
    """Return whether a driver of AMD's was built by DKMS."""
    return tree.path("var/lib/dkms/amdgpu").is_dir() or "amdgpu-dkms" in tree.packages


def _absent(tree: Tree) -> Result:
    """Judge a machine without an AMD GPU, by its processor."""
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
        "no AMD GPU: /sys/class/kfd lists none",
        f"lspci -nn -d 1002:{DEVICES[TARGET][2:]}   # a machine with a {TARGET} prints one line",
    )


def pixi(tree: Tree) -> Result:
    """pixi takes this machine for one with the GPU. Of several it goes by the one with the most
    compute units; where it sees another, `pixi exec` and `pixi global` find no solution, and where
    it sees none, each `pixi run` of a stack warns: https://github.com/conda/ceps/pull/189"""
    if wrong := refused(tree):
        said = " and ".join(f"{VARIABLES[name]}={value}" for name, value in wrong.items())
        return error(f"{said} is not a version, and ends pixi", _export(wrong), **wrong)
    found = detected(tree)
    if found == WANTED:
        return fine(**found)
    if (tree.gpus and not tree.ours) or tree.is_wsl:
        # an override would make pixi install kernels of another GPU
        raise CannotRun(f"there is no {TARGET}")
    said = ", ".join(f"{name}={version}" for name, version in found.items()) or "no AMD GPU"
    missing = [name for name, version in WANTED.items() if found.get(name) != version]
    return warning(f"pixi sees {said}; the stacks are for {TARGET}", _export(missing), **found)


def _export(names: Iterable[str]) -> str:
    return "export " + " ".join(f"{VARIABLES[name]}={WANTED[name]}" for name in names)


def _need_gfx1151() -> None:
    if TARGET != "gfx1151":
        raise CannotRun("known of gfx1151 alone")


def driver(tree: Tree) -> Result:
    """The kernel's own amdgpu driver is loaded. A DKMS driver brings an older KFD than a
    new kernel has: https://github.com/ROCm/TheRock/blob/main/docs/faq.md"""
    need_gpu(tree)
    if not tree.path("sys/module/amdgpu").is_dir():
        if tree.driver_of_ours == "vfio-pci":
            return error("amdgpu is not loaded: the GPU is bound to vfio-pci", "see doctor/gpu")
        cause = find_obstacle(tree)
        if cause:
            return replace(cause, reason=f"amdgpu is not loaded: {cause.reason}")
        return error("amdgpu is not loaded", "sudo modprobe amdgpu")
    version = tree.read("sys/module/amdgpu/version")
    if version:
        message = f"amdgpu {version} comes from DKMS, not from the kernel"
        fix = Fix("sudo amdgpu-install --uninstall", needs_reboot=True)
        return warning(message, fix, version=version)
    return fine()


def kernel(tree: Tree) -> Result:
    """The kernel has the fixes for KFD's queue and memory limits: it is new enough, or KFD exports
    the sizes of the context save area, as backports do. Without them, compute fails to start or
    faults. Nor is it one of the builds that are known to be faulty (doctor/kernels.toml):
    https://rocm.docs.amd.com/en/latest/how-to/system-optimization/strixhalo.html"""
    _need_gfx1151()
    text = known(tree.release, "the kernel's release")
    release = kernel_release.parse(text)
    if release is None:
        raise CannotRun(f"the kernel's release cannot be read: {text!r}")
    name = kernel_version(text)
    if tree.is_wsl:
        raise CannotRun(f"{name} is WSL's kernel, which comes with Windows")
    installed = _better_kernel(tree)
    fix = _distribution.kernel_fix(tree)
    if installed:
        fix = Fix(f"start {installed}, which is installed already", needs_reboot=True)
    if not has_fixes(tree, release):
        bound = kernel_release.first_fixed(release)
        message = f"{text} is older than {bound}, the first with the fixes for gfx1151"
        return error(message, fix, release=name)
    fault = kernel_release.fault_of(release)
    if fault is None:
        return fine(release=name)
    message = f"{text}: {fault.symptom}; {fault.fix}"
    judge = warning if fault.is_reported else remark
    return judge(message, fix, fault.source, release=name)


def _better_kernel(tree: Tree) -> str | None:
    """Return the newest installed kernel that has the fixes and no known fault, if any is."""
    if containers.kind(tree):
        return None
    files = [*tree.glob("lib/modules/*"), *tree.glob("usr/lib/modules/*")]
    releases = [kernel_release.parse(file.name) for file in files]
    good = [
        release
        for release in releases
        if release and kernel_release.is_fixed(release) and not kernel_release.fault_of(release)
    ]
    return max(good, key=lambda r: (r.version, r.candidate, r.build)).text if good else None


def has_fixes(tree: Tree, release: kernel_release.Release) -> bool:
    """Return whether the kernel has the fixes for KFD's limits."""
    return kernel_release.is_fixed(release) or any(gpu.exports_cwsr for gpu in tree.gpus)


def known_fault(tree: Tree) -> kernel_release.Faulty | None:
    """Return the row of the table that says what is wrong with the kernel, if one does."""
    release = kernel_release.parse(tree.release or "")
    return kernel_release.fault_of(release) if release else None


def firmware(tree: Tree) -> Result:
    """linux-firmware is not 20251125, whose MES 0x83 hangs compute on gfx1151, and no package of
    AMD's driver replaces it: https://github.com/ROCm/legacy-rocm-build/issues/5724"""
    need_gpu(tree)
    _need_gfx1151()
    mes, version, override = _loaded_mes(tree), tree.firmware, _overriding_firmware(tree)
    if version is None and mes is None and override is None:
        raise CannotRun("linux-firmware's version cannot be read")
    measured = {"version": version, "mes": hex(mes) if mes is not None else None}
    if override is not None:
        place, fix = override
        message = f"{place} comes before linux-firmware, so that an update changes nothing"
        if mes is None or mes == _BAD_MES:
            known_bad = "may be the bad MES 0x83" if mes is None else "is the bad MES 0x83"
            judge = error if mes == _BAD_MES else warning
            return judge(f"{message}, and {known_bad}", fix, _LEFT_BEHIND, **measured)
        if mes != _SUSPECT_MES:
            return remark(message, fix, _LEFT_BEHIND, **measured)
    is_bad = bool(version and _BAD_FIRMWARE in version)
    if is_bad or mes == _BAD_MES:
        name = f"linux-firmware {version}" if is_bad else f"the loaded MES {measured['mes']}"
        fix = _distribution.firmware_fix(tree)
        if not is_bad and _is_good_firmware(version):
            name += f", older than the installed linux-firmware {version},"
            fix = _distribution.new_initramfs(tree)
        return error(f"{name} is known bad", fix, **measured)
    if mes == _SUSPECT_MES:
        message = "MES 0x86: a machine with it hung without a message under sustained load of vLLM"
        update = Fix("if this machine hangs, install a newer linux-firmware", needs_reboot=True)
        return warning(message, override[1] if override else update, _SUSPECT, **measured)
    return fine(**measured)


def _is_good_firmware(version: str | None) -> bool:
    """Return whether a package of firmware is of a date after the bad one was taken back."""
    date = re.match(r"(?:\d+:)?(\d{8})", version or "")
    return date is not None and date[1] >= _GOOD_FIRMWARE


def _loaded_mes(tree: Tree) -> int | None:
    """Return the version of the loaded scheduler; None without debugfs, which only root reads."""
    mes = None
    for file in tree.glob("sys/kernel/debug/dri/*/amdgpu_firmware_info"):
        line = r"^MES feature version: \d+, firmware version: (0x[0-9a-f]+)"
        version = re.search(line, tree.read_at(file) or "", re.M)
        mes = int(version.group(1), 16) & 0xFF if version else mes
    return mes


def _overriding_firmware(tree: Tree) -> tuple[str, Fix] | None:
    """Return what the kernel loads firmware from before linux-firmware, and how to remove it."""
    if "amdgpu-dkms-firmware" in tree.packages:
        step = "sudo apt autoremove --purge amdgpu-dkms-firmware && sudo apt install --reinstall "
        step += _distribution.firmware_package(tree)
        fix = Fix(_distribution.with_new_initramfs(tree, step), needs_reboot=True)
        return f"amdgpu-dkms-firmware {tree.packages['amdgpu-dkms-firmware']}", fix
    for folder in ("lib/firmware/updates/amdgpu", "usr/lib/firmware/updates/amdgpu"):
        files = [file.name for file in tree.glob(f"{folder}/gc_11_5_1_mes*")]
        if files:
            step = f"sudo rm /{folder}/gc_11_5_1_*"
            fix = Fix(_distribution.with_new_initramfs(tree, step), needs_reboot=True)
            return f"/{folder}/{files[0]}", fix
    return None
