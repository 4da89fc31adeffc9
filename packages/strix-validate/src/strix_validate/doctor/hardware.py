# SPDX-License-Identifier: BSD-3-Clause
"""The doctor's checks of the machine: its GPU, kernel, firmware, devices and memory."""

import re
from collections.abc import Iterable
from dataclasses import replace

from strix_validate import TARGET
from strix_validate.checks import CannotRun, Result, RunOptions
from strix_validate.doctor import _distribution
from strix_validate.doctor._verdicts import error, fine, known, need_gpu, remark, warning
from strix_validate.doctor.host import kernel_version
from strix_validate.doctor.tree import DEVICES, Tree
from strix_validate.doctor.virtual_packages import VARIABLES, WANTED, detected, refused
from strix_validate.doctor.vllm_memory import GIB, OVERHEAD, PAGE, SPARE, UTILIZATION, memory_of

#: The first kernels with the fixes for KFD's queue and memory limits.
KERNEL = (6, 18, 4)
_KERNEL_UBUNTU_24_HWE = (6, 17, 0, 19)
_KERNEL_UBUNTU_24_OEM = (6, 14, 0, 1018)
_BAD_FIRMWARE = "20251125"
_BAD_MES = 0x83
#: A machine hung under hours of vLLM; open: https://github.com/ROCm/legacy-rocm-build/issues/6165
_SUSPECT_MES = 0x86
#: Bytes reserved by the BIOS above which the memory is worth getting back first.
_LARGE_CARVE_OUT = 8 * GIB


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
        what = f"the {TARGET} is on the PCI bus, but KFD does not list it"
        return error(what, "sudo modprobe amdgpu && sudo dmesg | grep -i -e amdgpu -e kfd")
    if tree.is_wsl:
        what = "this is WSL, whose kernel has no KFD: Windows owns the GPU"
        return error(what, "boot Linux itself, or take AMD's own packages for WSL")
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
        return error(f"pixi ends at {said}: not a version", _export(wrong), **wrong)
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
        return error("amdgpu is not loaded", "sudo modprobe amdgpu")
    version = tree.read("sys/module/amdgpu/version")
    if version:
        what = f"amdgpu {version} comes from DKMS, not from the kernel"
        return warning(what, "sudo amdgpu-install --uninstall", version=version)
    return fine()


def kernel(tree: Tree) -> Result:
    """The kernel has the fixes for KFD's queue and memory limits: it is new enough, or KFD exports
    the sizes of the context save area, as backports do. Without them, compute fails to start or
    faults: https://rocm.docs.amd.com/en/latest/how-to/system-optimization/strixhalo.html"""
    _need_gfx1151()
    release = known(tree.release, "the kernel's release")
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?:-(\d+))?", release)
    if not found:
        raise CannotRun(f"the kernel's release cannot be read: {release!r}")
    version = tuple(int(part or 0) for part in found.groups())
    name = kernel_version(release)
    if tree.is_wsl:
        raise CannotRun(f"{name} is WSL's kernel, which comes with Windows")
    needed: tuple[int, ...] = KERNEL
    if _distribution.ubuntu_release(tree) == "24.04":
        if version >= (7, 0):
            what = f"{release} is too new for Ubuntu 24.04: loading models was 300 times slower"
            return warning(what, _distribution.OLDER_KERNEL_OF_24_04, release=name)
        # 6.17.0-061700-generic is upstream's 6.17.0, without Ubuntu's fixes
        if not re.search(r"-0\d{5}-", release):
            is_oem = release.endswith("-oem")
            needed = _KERNEL_UBUNTU_24_OEM if is_oem else _KERNEL_UBUNTU_24_HWE
    if version < needed and not any(gpu.exports_cwsr for gpu in tree.gpus):
        least = ".".join(map(str, needed[:3])) + "".join(f"-{part}" for part in needed[3:])
        fix = _distribution.kernel_fix(tree)
        return error(f"{release} is older than {least}", fix, release=name)
    return fine(release=name)


def firmware(tree: Tree) -> Result:
    """linux-firmware is not 20251125, whose MES 0x83 hangs compute on gfx1151:
    https://github.com/ROCm/legacy-rocm-build/issues/5724"""
    need_gpu(tree)
    _need_gfx1151()
    mes = None
    for file in tree.glob("sys/kernel/debug/dri/*/amdgpu_firmware_info"):
        text = tree.read(str(file.relative_to(tree.root))) or ""
        found = re.search(r"^MES feature version: \d+, firmware version: (0x[0-9a-f]+)", text, re.M)
        mes = int(found.group(1), 16) & 0xFF if found else mes
    version = tree.firmware
    if version is None and mes is None:
        raise CannotRun("linux-firmware's version cannot be read")
    measured = {"version": version, "mes": hex(mes) if mes is not None else None}
    is_bad = bool(version and _BAD_FIRMWARE in version)
    if is_bad or mes == _BAD_MES:
        what = f"linux-firmware {version}" if is_bad else f"the loaded MES {measured['mes']}"
        return error(f"{what} is known bad", _distribution.firmware_fix(tree), **measured)
    if mes == _SUSPECT_MES:
        what = "MES 0x86: a machine with it hung without a message under sustained load of vLLM"
        return warning(what, "if this machine hangs, install a newer linux-firmware", **measured)
    return fine(**measured)


def _opens(tree: Tree, name: str) -> Result:
    try:
        tree.open_device(tree.path(name))
    except FileNotFoundError:
        return error(f"/{name} does not exist", "sudo modprobe amdgpu; in a container: --device "
                      "/dev/kfd --device /dev/dri")  # fmt: skip
    except PermissionError:
        fix = "sudo usermod -aG render,video $USER, then log in again; in a container: --group-add "
        return error(f"/{name}: permission denied", fix + "keep-groups")
    except OSError as failure:
        return error(f"/{name} cannot be opened: {failure.strerror}", "sudo dmesg | grep -i kfd")
    return fine(opened=f"/{name}")


def kfd(tree: Tree) -> Result:
    """/dev/kfd opens for reading and writing. Mode bits would not show what a container or
    sandbox forbids:
    https://rocm.docs.amd.com/projects/install-on-linux/en/latest/install/prerequisites.html"""
    need_gpu(tree)
    return _opens(tree, "dev/kfd")


def render(tree: Tree) -> Result:
    """The GPU's render node opens for reading and writing; ROCm needs it as well as /dev/kfd:
    https://rocm.docs.amd.com/projects/install-on-linux/en/latest/install/prerequisites.html"""
    need_gpu(tree)
    gpus = [tree.ours, *tree.gpus] if tree.ours else tree.gpus
    minors = [node.render_minor for node in gpus if node.render_minor >= 128]
    if not minors:
        nodes = tree.glob("dev/dri/renderD*")
        return _opens(tree, f"dev/dri/{nodes[0].name}" if nodes else "dev/dri/renderD128")
    return _opens(tree, f"dev/dri/renderD{minors[0]}")


def groups(tree: Tree) -> Result:
    """The user is in the group render; without it only root can open the devices:
    https://rocm.docs.amd.com/projects/install-on-linux/en/latest/install/prerequisites.html"""
    need_gpu(tree)
    names = known(tree.groups, "the user's groups")
    listed = ", ".join(sorted(names))
    if names & {"render", "root"}:
        return fine(groups=listed)
    what = "the user is not in the group render"
    return warning(what, "sudo usermod -aG render,video $USER, then log in again", groups=listed)


def carve_out(tree: Tree) -> Result:
    """The BIOS reserves little memory for the GPU. The GPU reaches all memory through GTT; what the
    BIOS carves out is lost to everything else:
    https://github.com/ROCm/legacy-rocm-build/issues/5444"""
    need_gpu(tree)
    name = known(tree.gpu_folder, "the GPU's memory")
    size = known(tree.number(f"{name}/mem_info_vram_total"), "the GPU's memory")
    measured = {"gib": round(size / GIB, 1)}
    if size > _LARGE_CARVE_OUT:
        fix = (
            "set the UMA frame buffer size to 512 MB in the BIOS, and run doctor again: the limit "
            "of GTT depends on the memory that is there then"
        )
        return warning(f"{size / GIB:.0f} GiB are reserved for the GPU", fix, **measured)
    return fine(**measured)


def _raise_gtt(tree: Tree, memory: int) -> str:
    pages = (memory - SPARE) // PAGE
    return _distribution.module_options(
        tree, "ttm", {"pages_limit": pages, "page_pool_size": pages}
    )


def gtt(tree: Tree) -> Result:
    """The GPU may map most of the memory, but not all. The default limit is half of it, and models
    that would fit run out of memory: https://github.com/ROCm/TheRock/issues/519"""
    need_gpu(tree)
    memory = known(tree.memory, "the size of the memory")
    pages = tree.number("sys/module/ttm/parameters/pages_limit")
    size = tree.number(f"{tree.gpu_folder}/mem_info_gtt_total") if tree.gpu_folder else None
    limits = [pages * PAGE if pages else None, size]
    limit = known(min((x for x in limits if x), default=None), "the limit of GTT")
    measured = {"gtt_gib": round(limit / GIB, 1), "memory_gib": round(memory / GIB, 1)}
    if (tree.number(f"{tree.gpu_folder}/mem_info_vram_total") or 0) > _LARGE_CARVE_OUT:
        # a limit computed from what the BIOS left would be wrong once it is given back
        return remark("doctor/carve-out comes first", **measured)
    fix = _raise_gtt(tree, memory)
    if limit > memory - SPARE // 2:
        what = f"the GPU may take {limit / GIB:.0f} of {memory / GIB:.0f} GiB: the system may swap"
        return warning(what, fix, **measured)
    if limit < 0.75 * memory:
        what = f"the GPU may map {limit / GIB:.0f} of {memory / GIB:.0f} GiB"
        return warning(what, fix, **measured)
    return fine(**measured)


def iommu(tree: Tree) -> Result:
    """The IOMMU is off, or its cost is known. Without it one Strix Halo ran llama.cpp 5 to 12 %
    faster: https://github.com/kyuz0/amd-strix-halo-toolboxes/issues/66"""
    need_gpu(tree)
    arguments = known(tree.read("proc/cmdline"), "the kernel's command line").split()
    if "amd_iommu=off" in arguments:
        return fine(amd_iommu="off")
    what = (
        "amd_iommu=off was 5 to 12 % faster (kyuz0); it also ends protection against devices' DMA, "
        "passthrough to virtual machines, and the NPU. iommu=pt changed nothing"
    )
    return remark(what, _distribution.kernel_argument(tree, "amd_iommu=off"))


def vllm_memory(tree: Tree, options: RunOptions) -> Result:
    """vLLM is told how much memory the GPU may use now. By default it takes 92 % of HIP's total,
    whatever the system uses of that: https://github.com/vllm-project/vllm/pull/54776"""
    need_gpu(tree)
    found = known(memory_of(tree), "the GPU's memory or the system's available memory")
    measured = {
        "usable_gib": round(found.usable / GIB, 1),
        "hip_total_gib": round(found.total / GIB, 1),
        "utilization": found.utilization,
    }
    if flags := found.flags(options.weights):
        return replace(fine(**measured), reason=f"vllm serve MODEL {flags}")
    usable = f"{found.usable / GIB:.0f} GiB are usable"
    what = f"a model of {options.weights / GIB:.0f} GiB does not fit: {usable}"
    needed = (options.weights + OVERHEAD + GIB) / UTILIZATION + SPARE
    if found.is_shared and tree.memory and needed < min(tree.memory, tree.available or 0):
        return warning(what, _raise_gtt(tree, tree.memory), **measured)
    return warning(
        what, "free memory, or take a smaller or more strongly quantized model", **measured
    )
