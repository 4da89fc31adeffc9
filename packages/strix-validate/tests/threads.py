# SPDX-License-Identifier: BSD-3-Clause
"""Machines of owners, as public threads tell of them, and what a helper there would have said."""

import errno
from dataclasses import dataclass, field
from pathlib import Path

from hosts import (
    DEBIAN,
    GIB,
    GPU,
    KFD,
    META,
    PCI,
    SITE,
    UBUNTU,
    environ,
    mes,
    node,
    record,
    released,
)
from strix_validate.doctor.tree import DeviceFile

RESOLUTE = released("ID=ubuntu", 'VERSION_ID="26.04"', "UBUNTU_CODENAME=resolute")
CACHYOS = released("ID=cachyos", "ID_LIKE=arch")
NIXOS = released("ID=nixos", "VERSION_ID=26.11")
LXC = {"run/systemd/container": "lxc\n"}
#: A virtual environment instead of the conda environment.
VENV = environ(VIRTUAL_ENV="/home/user/venv", CONDA_PREFIX="") | {
    "home/user/venv/pyvenv.cfg": "home = /usr/bin\nversion = 3.12.3\n",
    "home/user/venv/lib/libamdhip64.so.7": "",
}
VENV_SITE = "home/user/venv/lib/python3.12/site-packages"
#: The conda environment without any package of ours.
NOT_OURS = {
    f"{META}/triton-3.7.1-h1_0.json": None,
    f"{META}/pytorch-2.13.0-h1_0.json": None,
    f"{META}/python-3.12.9-h1_0.json": record("python", "3.12.9", "conda-forge"),
    f"{SITE}/triton-3.7.1.dist-info/INSTALLER": None,
    f"{SITE}/torch-2.13.0.dist-info/INSTALLER": None,
}


def kernel(release: str) -> dict[str, str]:
    return {"proc/sys/kernel/osrelease": f"{release}\n"}


def dpkg(*packages: str, status: str = "install ok installed") -> dict[str, str]:
    """dpkg's list of packages, each a name and a version."""
    pairs = [package.split() for package in packages]
    entries = [f"Package: {n}\nStatus: {status}\nVersion: {v}\n" for n, v in pairs]
    return {"var/lib/dpkg/status": "\n".join(entries) + "\n"}


def torch(site: str, version: str, by: str = "pip", **facts: str | None) -> dict[str, str]:
    """The files of an installed torch, as far as they are read."""
    lines = [f"__version__ = '{version}'"]
    lines += [f"{name}: Optional[str] = {value!r}" for name, value in facts.items()]
    return {
        f"{site}/torch-{version}.dist-info/INSTALLER": f"{by}\n",
        f"{site}/torch/version.py": "\n".join(lines) + "\n",
    }


CUDA = {"cuda": "12.8", "hip": None}


@dataclass(frozen=True)
class Said:
    """What a check must say: its severity ("" for nothing), and parts of message and fix."""

    severity: str
    message: str = ""
    fix: str = ""
    never: str = "\0"
    reboot: bool | None = None


@dataclass(frozen=True)
class Machine:
    """A machine of a thread.

    Attributes:
        files: What differs from the healthy host.
        said: By check. All other checks must neither warn nor fail.
        refusal: The errno with which the devices do not open, or 0.
        device: What the device files tell of their owners.
        rate: Bytes per second of copies from writable memory.
    """

    files: dict[str, str | Path | None]
    said: dict[str, Said] = field(default_factory=dict)
    refusal: int = 0
    device: DeviceFile | None = None
    rate: float = 2e9


def both_devices(said: Said) -> dict[str, Said]:
    return {"kfd": said, "render": said}


STALLS = "stall for a second per 2 MiB"
NO_GROUP = Said("error", "permission denied", never="usermod")

THREADS = {
    "ROCm/legacy-rocm-build#6523 7.0.0-28 on 24.04": Machine(
        kernel("7.0.0-28-generic") | UBUNTU,
        {"kernel": Said("warning", STALLS, "apt full-upgrade", "linux-oem", reboot=True)},
    ),
    "ROCm/legacy-rocm-build#6523 7.0.0-28 on 26.04": Machine(
        kernel("7.0.0-28-generic") | RESOLUTE,
        {"kernel": Said("warning", "fixed in 7.0.0-30", "apt full-upgrade", reboot=True)},
    ),
    "ROCm/legacy-rocm-build#6523 mended": Machine(kernel("7.0.0-30-generic") | UBUNTU),
    "ROCm/legacy-rocm-build#5952": Machine(kernel("7.0.0-14-generic") | UBUNTU),
    "Comfy-Org/ComfyUI#14488": Machine(
        kernel("7.0.12-2-cachyos") | CACHYOS,
        {"kernel": Said("warning", STALLS, "sudo pacman -Syu", reboot=True)},
    ),
    "Comfy-Org/ComfyUI#14488 before": Machine(kernel("7.0.11-1-cachyos") | CACHYOS),
    "ROCm/legacy-rocm-build#6358": Machine(
        kernel("7.0.12-201.fc44.x86_64"),
        {"kernel": Said("warning", "fixed in 7.0.13", "dnf upgrade --refresh kernel")},
    ),
    "ROCm/legacy-rocm-build#6358 mended": Machine(kernel("7.0.13-200.fc44.x86_64")),
    "ROCm/FlyDSL#567": Machine(
        VENV | torch(VENV_SITE, "2.11.0", **CUDA),
        {
            "packages": Said(
                "error",
                "the build for CUDA",
                "whl-next/ 'torch[device-gfx1151]'",
                "pixi",
                reboot=False,
            )
        },
    ),
    "docling-project/docling-serve#342": Machine(
        VENV | torch(VENV_SITE, "2.9.1+cpu"),
        {"packages": Said("error", "the build for CPUs", "--force-reinstall", "pixi")},
    ),
    "patientx-cfz/comfyui-rocm#131": Machine(
        VENV | torch(VENV_SITE, "2.12.0", cuda=None, hip=None),
        {"packages": Said("error", "the build for CPUs", "--force-reinstall", "pixi")},
    ),
    "gpustack/gpustack#3786": Machine(
        NOT_OURS | torch(SITE, "2.9.0+cu128", "uv", **CUDA),
        {"packages": Said("error", "the build for CUDA", "uv pip install --reinstall", "pixi")},
    ),
    "gpustack/gpustack#3786 old ROCm": Machine(
        VENV | torch(VENV_SITE, "2.7.1+rocm6.3", hip="6.3.42131"),
        {
            "packages": Said(
                "error", "brings ROCm 6.3, which page-faults", "--force-reinstall", "pixi"
            )
        },
    ),
    "AMD's wheels in a conda environment": Machine(
        NOT_OURS
        | torch(SITE, "2.13.0+rocm10.0.0", hip="7.15.26333")
        | {
            f"{SITE}/rocm_sdk_device_gfx1151-10.0.0.dist-info/INSTALLER": "pip",
            f"{SITE}/amd_torch_device_gfx115x-2.13.0.dist-info/INSTALLER": "pip",
        },
    ),
    "kyuz0/amd-strix-halo-toolboxes#16": Machine(
        kernel("6.18.9-200.fc43.x86_64")
        | NOT_OURS
        | torch(SITE, "2.9.1+rocm7.1.1", hip="7.1.25424"),
        {
            "packages": Said(
                "error", "brings ROCm 7.1.1, which page-faults", "--force-reinstall", "pixi clean"
            )
        },
    ),
    "kyuz0/amd-strix-halo-toolboxes#16 in the toolbox": Machine(
        kernel("6.14.0-1020-oem")
        | {
            "run/.toolboxenv": "",
            "run/.containerenv": "",
            "opt/rocm-7.1.1/.info/version": "7.1.1-38\n",
        },
        {
            "runtime": Said("warning", "7.1.1-38, which page-faults", "ROCm 7.2.1 or newer"),
            "caches": Said("warning"),
        },
    ),
    "Hal0ai/hal0#1954": Machine(
        LXC,
        both_devices(Said("error", "root:root", "gid=GID", "usermod")),
        errno.EACCES,
        DeviceFile(0, 0o660, 236),
    ),
    "Hal0ai/hal0#1954 without the node's owner": Machine(
        {},
        both_devices(Said("error", "LXC often root:root", "/etc/pve/lxc/ID.conf", "usermod")),
        errno.EACCES,
    ),
    "kyuz0/amd-strix-halo-vllm-toolboxes#6": Machine(
        {"run/.containerenv": ""},
        both_devices(Said("error", "its group is 992", "--group-add keep-groups", "usermod")),
        errno.EACCES,
        DeviceFile(992, 0o660, 236),
    ),
    "kyuz0/amd-strix-halo-vllm-toolboxes#6 rootless": Machine(
        {"run/.containerenv": "", "etc/group": "nogroup:x:65534:\nrender:x:105:user\n"},
        both_devices(Said("error", "65534 (nogroup)", "--group-add keep-groups", "usermod")),
        errno.EACCES,
        DeviceFile(65534, 0o660, 236),
    ),
    "ROCm/legacy-rocm-build#5379": Machine(
        LXC | {"proc/devices": "Character devices:\n226 drm\n236 kfd\n"},
        {
            "kfd": Said("error", "major number is 511, but KFD's is 236", "dev0: /dev/kfd"),
            "render": Said("error", "Invalid argument", "dmesg"),
        },
        errno.EINVAL,
        DeviceFile(105, 0o666, 511),
    ),
    "ROCm/legacy-rocm-build#5379 without the node's number": Machine(
        LXC,
        {
            "kfd": Said("error", "stale major number", "grep kfd /proc/devices"),
            "render": Said("error", "Invalid argument", "dmesg"),
        },
        errno.EINVAL,
    ),
    "ROCm/legacy-rocm-build#6166": Machine(
        kernel("6.19.12-arch1-1"),
        both_devices(Said("error", "Invalid argument", "sudo dmesg | grep -i kfd", "dev0")),
        errno.EINVAL,
        DeviceFile(105, 0o666, 237),
    ),
    "isc30/ryzen-gpu-passthrough-proxmox#139": Machine(
        {
            f"{KFD}/1/properties": None,
            f"{GPU}/mem_info_vram_total": None,
            "dev/kfd": None,
            "sys/module/amdgpu/initstate": None,
            "dev/dri/renderD128": None,
            f"{PCI}/driver": Path("/sys/bus/pci/drivers/vfio-pci"),
            "etc/modprobe.d/vfio.conf": "options vfio-pci ids=1002:1586\n",
        },
        {
            "gpu": Said(
                "error", "bound to vfio-pci", "vfio-pci.ids", "modprobe amdgpu", reboot=True
            ),
            "driver": Said("error", "bound to vfio-pci", "doctor/gpu", "modprobe amdgpu"),
            "pixi": Said("warning"),
            **both_devices(Said("error", "bound to vfio-pci", "doctor/gpu", "modprobe amdgpu")),
        },
    ),
    "ROCm/legacy-rocm-build#5991 without debugfs": Machine(
        UBUNTU
        | kernel("6.17.0-20-generic")
        | {
            "sys/kernel/debug/dri/1/amdgpu_firmware_info": None,
            **dpkg("amdgpu-dkms-firmware 30.30.0", "linux-firmware 20260110"),
        },
        {
            "firmware": Said(
                "warning",
                "amdgpu-dkms-firmware 30.30.0 comes before linux-firmware",
                "autoremove --purge amdgpu-dkms-firmware",
                reboot=True,
            )
        },
    ),
    "ROCm/legacy-rocm-build#5991": Machine(
        UBUNTU | kernel("6.17.0-20-generic") | mes(0x83) | dpkg("amdgpu-dkms-firmware 30.30.0"),
        {"firmware": Said("error", "is the bad MES 0x83", "autoremove --purge", reboot=True)},
    ),
    "ROCm/legacy-rocm-build#5595": Machine(
        UBUNTU
        | kernel("6.14.0-1018-oem")
        | {
            "sys/module/amdgpu/version": "6.14.14\n",
            "sys/module/amdttm/parameters/pages_limit": f"{62 * GIB // 4096}\n",
            f"{GPU}/mem_info_gtt_total": f"{62 * GIB}\n",
            "proc/cmdline": "quiet amd_iommu=off amdgpu.gtt_size=122880\n",
        },
        {
            "driver": Said("warning", "DKMS"),
            "gtt": Said(
                "warning", "takes the limit of amdttm", "/etc/modprobe.d/amdttm.conf", reboot=True
            ),
        },
    ),
    "noamsto/nix-amd-ai#96 capped": Machine(
        NIXOS
        | kernel("7.1.1")
        | {
            "sys/module/amdgpu/parameters/gttsize": "65536\n",
            f"{GPU}/mem_info_gtt_total": f"{64 * GIB}\n",
            "proc/cmdline": "amd_iommu=off amdgpu.gttsize=65536 ttm.pages_limit=31457280\n",
        },
        {
            "gtt": Said(
                "warning",
                "amdgpu.gttsize=65536 caps GTT at 64 GiB",
                "take amdgpu.gttsize=65536 out of",
                "options ttm",
                reboot=True,
            )
        },
    ),
    "noamsto/nix-amd-ai#96 equal": Machine(
        NIXOS
        | kernel("7.1.1")
        | {"proc/cmdline": "amd_iommu=off amdgpu.gttsize=122880 ttm.pages_limit=31457280\n"},
        {"gtt": Said("info", "deprecated and adds nothing", "amdgpu.gttsize=122880")},
    ),
    "kyuz0/amd-strix-halo-vllm-toolboxes#11": Machine(
        {
            "sys/module/ttm/parameters/pages_limit": f"{62 * GIB // 4096}\n",
            f"{GPU}/mem_info_gtt_total": f"{62 * GIB}\n",
        },
        {"gtt": Said("warning", "62 of 125 GiB", "pages_limit=31719424", reboot=True)},
    ),
    "antirez/ds4#475": Machine(
        {
            f"{GPU}/mem_info_vram_total": f"{64 * GIB}\n",
            "proc/meminfo": f"MemTotal: {62 * 2**20} kB\nMemAvailable: {55 * 2**20} kB\n",
        },
        {
            "carve-out": Said("warning", "64 GiB", "512 MB in the BIOS", reboot=True),
            "gtt": Said("info", "doctor/carve-out"),
        },
    ),
    "noamsto/nix-amd-ai#42": Machine(
        NIXOS
        | kernel("7.1.0")
        | {
            "proc/cmdline": "iommu.passthrough=0 ttm.pages_limit=25165824 "
            "ttm.page_pool_size=25165824\n",
            "sys/module/ttm/parameters/pages_limit": "25165824\n",
            f"{GPU}/mem_info_gtt_total": f"{96 * GIB}\n",
            f"{GPU}/mem_info_vram_total": f"{4 * GIB}\n",
        },
    ),
    "palazzem/hanzo#345": Machine(
        kernel("7.0.8-1-cachyos")
        | CACHYOS
        | {
            "sys/module/amdgpu/parameters/cwsr_enable": "0\n",
            "etc/modprobe.d/amdgpu.conf": "# GZ302\noptions amdgpu cwsr_enable=0 abmlevel=0\n",
        },
        {
            "options": Said(
                "warning",
                "cwsr_enable=0",
                "cwsr_enable=[^ ]*//' /etc/modprobe.d/amdgpu",
                reboot=True,
            )
        },
    ),
    "palazzem/hanzo#345 while it is needed": Machine(
        kernel("6.17.0-14-generic")
        | UBUNTU
        | {"proc/cmdline": "amd_iommu=off amdgpu.cwsr_enable=0\n"},
        {
            "options": Said("info", "keep it until the kernel is newer"),
            "kernel": Said("error", "older than 6.17.0-19", "hwe-24.04"),
        },
    ),
    "defilantech/LLMKube#886": Machine(
        kernel("7.0.4-200.fc44.x86_64"),
        {"options": Said("info", "2000 ms", "amdgpu.lockup_timeout=20000", reboot=True)},
    ),
    "ROCm/legacy-rocm-build#6598": Machine(
        kernel("6.17.0-35-generic") | UBUNTU | {"proc/cmdline": "quiet splash\n"},
        {"iommu": Said("info", "crashes within an hour", "amd_iommu=off", reboot=True)},
    ),
    "ROCm/legacy-rocm-build#6118": Machine(
        kernel("6.17.0-20-generic") | UBUNTU | {"sys/module/amdgpu/version": "6.16.13\n"},
        {"driver": Said("warning", "DKMS", "amdgpu-install --uninstall", reboot=True)},
    ),
    "ROCm/legacy-rocm-build#5750": Machine(
        {f"{GPU}/power_dpm_force_performance_level": "low\n"},
        {"power": Said("warning", "level is low", "echo auto", reboot=False)},
    ),
    "noamsto/nix-amd-ai#19": Machine(
        {
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
            "sys/devices/system/cpu/cpu0/cpufreq/energy_performance_preference": "performance\n",
            "sys/firmware/acpi/platform_profile": "quiet\n",
        },
        {"power": Said("warning", "platform profile is quiet", "accelerator-performance")},
    ),
    "lemonade-sdk/vllm-rocm#8": Machine(
        {f"{KFD}/1/properties": node(110502, 16)},
        {"gpu": Said("error", "gfx1152", "gpu_arch=gfx1152")},
    ),
    "ROCm/legacy-rocm-build#6143": Machine(
        kernel("6.12.74+deb13+1-amd64") | DEBIAN,
        {"kernel": Said("error", "older than 6.18.4", "-backports linux-image-amd64", reboot=True)},
    ),
    "lemonade-sdk/lemonade#3541": Machine(
        environ(CONDA_PREFIX="", PATH="/usr/bin:/bin")
        | {"opt/rocm-7.2.1/.info/version": "7.2.1-81\n", "opt/rocm/lib/libamdhip64.so.7": ""},
        {"caches": Said("warning", "~/.cache/comgr", "rm -r ~/.cache/comgr", reboot=False)},
    ),
}
