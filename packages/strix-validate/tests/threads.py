# SPDX-License-Identifier: BSD-3-Clause
"""Machines from public issue threads, and the advice that would have helped the owners."""

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
#: A machine that has a virtual environment instead of the conda environment.
VENV = environ(VIRTUAL_ENV="/home/user/venv", CONDA_PREFIX="") | {
    "home/user/venv/pyvenv.cfg": "home = /usr/bin\nversion = 3.12.3\n",
    "home/user/venv/lib/libamdhip64.so.7": "",
}
VENV_SITE = "home/user/venv/lib/python3.12/site-packages"
#: The conda environment without any package of our channel.
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
    """Return dpkg's status file. Each package is a name and a version."""
    pairs = [package.split() for package in packages]
    entries = [f"Package: {n}\nStatus: {status}\nVersion: {v}\n" for n, v in pairs]
    return {"var/lib/dpkg/status": "\n".join(entries) + "\n"}


def torch(site: str, version: str, installer: str = "pip", **facts: str | None) -> dict[str, str]:
    """Return those files of an installed torch that the doctor reads."""
    lines = [f"__version__ = '{version}'"]
    lines += [f"{name}: Optional[str] = {value!r}" for name, value in facts.items()]
    return {
        f"{site}/torch-{version}.dist-info/INSTALLER": f"{installer}\n",
        f"{site}/torch/version.py": "\n".join(lines) + "\n",
    }


CUDA = {"cuda": "12.8", "hip": None}


@dataclass(frozen=True)
class Expected:
    """The result that a check must have.

    Attributes:
        severity: The severity, or "" if the check has none.
        message: Part of the message.
        fix: Part of the fix.
        never: A text that must not be in the fix.
        reboot: Whether the fix needs a reboot; None if the test does not check this.
    """

    severity: str
    message: str = ""
    fix: str = ""
    never: str = "\0"
    reboot: bool | None = None


@dataclass(frozen=True)
class Machine:
    """A machine that a thread describes, or that is made up.

    Attributes:
        files: Files that differ from those of the healthy host.
        expected: Results by check. All other checks must neither warn nor fail.
        refusal: The errno of opening a device file, or 0 if it opens.
        device: The group, mode and driver of the device files; None if they cannot be read.
        rate: The rate of copies from writable memory, in bytes per second.
    """

    files: dict[str, str | Path | None]
    expected: dict[str, Expected] = field(default_factory=dict)
    refusal: int = 0
    device: DeviceFile | None = None
    rate: float = 2e9


def both_devices(expected: Expected) -> dict[str, Expected]:
    return {"kfd": expected, "render": expected}


STALLS = "stall for a second per 2 MiB"
NO_GROUP = Expected("error", "permission denied", never="usermod")

THREADS = {
    "ROCm/legacy-rocm-build#6523 7.0.0-28 on 24.04": Machine(
        kernel("7.0.0-28-generic") | UBUNTU,
        {"kernel": Expected("warning", STALLS, "apt full-upgrade", "linux-oem", reboot=True)},
    ),
    "ROCm/legacy-rocm-build#6523 7.0.0-28 on 26.04": Machine(
        kernel("7.0.0-28-generic") | RESOLUTE,
        {"kernel": Expected("warning", "fixed in 7.0.0-30", "apt full-upgrade", reboot=True)},
    ),
    "ROCm/legacy-rocm-build#6523 with a fixed kernel": Machine(kernel("7.0.0-30-generic") | UBUNTU),
    "ROCm/legacy-rocm-build#5952": Machine(kernel("7.0.0-14-generic") | UBUNTU),
    "Comfy-Org/ComfyUI#14488": Machine(
        kernel("7.0.12-2-cachyos") | CACHYOS,
        {"kernel": Expected("warning", STALLS, "sudo pacman -Syu", reboot=True)},
    ),
    "Comfy-Org/ComfyUI#14488 with an older kernel": Machine(kernel("7.0.11-1-cachyos") | CACHYOS),
    "ROCm/legacy-rocm-build#6358": Machine(
        kernel("7.0.12-201.fc44.x86_64"),
        {"kernel": Expected("warning", "fixed in 7.0.13", "dnf upgrade --refresh kernel")},
    ),
    "ROCm/legacy-rocm-build#6358 with a fixed kernel": Machine(kernel("7.0.13-200.fc44.x86_64")),
    "ROCm/FlyDSL#567": Machine(
        VENV | torch(VENV_SITE, "2.11.0", **CUDA),
        {
            "packages": Expected(
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
        {"packages": Expected("error", "the build for CPUs", "--force-reinstall", "pixi")},
    ),
    "patientx-cfz/comfyui-rocm#131": Machine(
        VENV | torch(VENV_SITE, "2.12.0", cuda=None, hip=None),
        {"packages": Expected("error", "the build for CPUs", "--force-reinstall", "pixi")},
    ),
    "gpustack/gpustack#3786": Machine(
        NOT_OURS | torch(SITE, "2.9.0+cu128", "uv", **CUDA),
        {"packages": Expected("error", "the build for CUDA", "uv pip install --reinstall", "pixi")},
    ),
    "gpustack/gpustack#3786 with an old ROCm": Machine(
        VENV | torch(VENV_SITE, "2.7.1+rocm6.3", hip="6.3.42131"),
        {
            "packages": Expected(
                "error", "contains ROCm 6.3, which page-faults", "--force-reinstall", "pixi"
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
            "packages": Expected(
                "error", "contains ROCm 7.1.1, which page-faults", "--force-reinstall", "pixi clean"
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
            "runtime": Expected("warning", "7.1.1-38, which page-faults", "ROCm 7.2.1 or newer"),
            "caches": Expected("warning"),
        },
    ),
    "Hal0ai/hal0#1954": Machine(
        LXC,
        both_devices(Expected("error", "root:root", "gid=GID", "usermod")),
        errno.EACCES,
        DeviceFile(0, 0o660, 236),
    ),
    "Hal0ai/hal0#1954 if the owner of /dev/kfd is unknown": Machine(
        {},
        both_devices(
            Expected("error", "LXC it is often root:root", "/etc/pve/lxc/ID.conf", "usermod")
        ),
        errno.EACCES,
    ),
    "kyuz0/amd-strix-halo-vllm-toolboxes#6": Machine(
        {"run/.containerenv": ""},
        both_devices(Expected("error", "its group is 992", "--group-add keep-groups", "usermod")),
        errno.EACCES,
        DeviceFile(992, 0o660, 236),
    ),
    "kyuz0/amd-strix-halo-vllm-toolboxes#6 in a rootless container": Machine(
        {"run/.containerenv": "", "etc/group": "nogroup:x:65534:\nrender:x:105:user\n"},
        both_devices(Expected("error", "65534 (nogroup)", "--group-add keep-groups", "usermod")),
        errno.EACCES,
        DeviceFile(65534, 0o660, 236),
    ),
    "ROCm/legacy-rocm-build#5379": Machine(
        LXC | {"proc/devices": "Character devices:\n226 drm\n236 kfd\n"},
        {
            "kfd": Expected("error", "major number is 511, but KFD's is 236", "dev0: /dev/kfd"),
            "render": Expected("error", "Invalid argument", "dmesg"),
        },
        errno.EINVAL,
        DeviceFile(105, 0o666, 511),
    ),
    "ROCm/legacy-rocm-build#5379 if the device number of /dev/kfd is unknown": Machine(
        LXC,
        {
            "kfd": Expected("error", "stale major number", "grep kfd /proc/devices"),
            "render": Expected("error", "Invalid argument", "dmesg"),
        },
        errno.EINVAL,
    ),
    "ROCm/legacy-rocm-build#6166": Machine(
        kernel("6.19.12-arch1-1"),
        both_devices(Expected("error", "Invalid argument", "sudo dmesg | grep -i kfd", "dev0")),
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
            "gpu": Expected(
                "error", "bound to vfio-pci", "vfio-pci.ids", "modprobe amdgpu", reboot=True
            ),
            "driver": Expected("error", "bound to vfio-pci", "doctor/gpu", "modprobe amdgpu"),
            "pixi": Expected("warning"),
            **both_devices(Expected("error", "bound to vfio-pci", "doctor/gpu", "modprobe amdgpu")),
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
            "firmware": Expected(
                "warning",
                "amdgpu-dkms-firmware 30.30.0 is loaded before linux-firmware",
                "autoremove --purge amdgpu-dkms-firmware",
                reboot=True,
            )
        },
    ),
    "ROCm/legacy-rocm-build#5991": Machine(
        UBUNTU | kernel("6.17.0-20-generic") | mes(0x83) | dpkg("amdgpu-dkms-firmware 30.30.0"),
        {"firmware": Expected("error", "is the bad MES 0x83", "autoremove --purge", reboot=True)},
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
            "driver": Expected("warning", "DKMS"),
            "gtt": Expected(
                "warning", "uses the limit of amdttm", "/etc/modprobe.d/amdttm.conf", reboot=True
            ),
        },
    ),
    "noamsto/nix-amd-ai#96 with a gttsize that caps GTT": Machine(
        NIXOS
        | kernel("7.1.1")
        | {
            "sys/module/amdgpu/parameters/gttsize": "65536\n",
            f"{GPU}/mem_info_gtt_total": f"{64 * GIB}\n",
            "proc/cmdline": "amd_iommu=off amdgpu.gttsize=65536 ttm.pages_limit=31457280\n",
        },
        {
            "gtt": Expected(
                "warning",
                "amdgpu.gttsize=65536 caps GTT at 64 GiB",
                "remove amdgpu.gttsize=65536 from",
                "options ttm",
                reboot=True,
            )
        },
    ),
    "noamsto/nix-amd-ai#96 with a gttsize equal to pages_limit": Machine(
        NIXOS
        | kernel("7.1.1")
        | {"proc/cmdline": "amd_iommu=off amdgpu.gttsize=122880 ttm.pages_limit=31457280\n"},
        {"gtt": Expected("info", "deprecated and adds nothing", "amdgpu.gttsize=122880")},
    ),
    "kyuz0/amd-strix-halo-vllm-toolboxes#11": Machine(
        {
            "sys/module/ttm/parameters/pages_limit": f"{62 * GIB // 4096}\n",
            f"{GPU}/mem_info_gtt_total": f"{62 * GIB}\n",
        },
        {"gtt": Expected("warning", "62 of 125 GiB", "pages_limit=31719424", reboot=True)},
    ),
    "antirez/ds4#475": Machine(
        {
            f"{GPU}/mem_info_vram_total": f"{64 * GIB}\n",
            "proc/meminfo": f"MemTotal: {62 * 2**20} kB\nMemAvailable: {55 * 2**20} kB\n",
        },
        {
            "carve-out": Expected("warning", "64 GiB", "512 MB in the BIOS", reboot=True),
            "gtt": Expected("info", "doctor/carve-out"),
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
            "options": Expected(
                "warning",
                "cwsr_enable=0",
                "cwsr_enable=[^ ]*//' /etc/modprobe.d/amdgpu",
                reboot=True,
            )
        },
    ),
    "palazzem/hanzo#345 with a kernel that needs cwsr_enable=0": Machine(
        kernel("6.17.0-14-generic")
        | UBUNTU
        | {"proc/cmdline": "amd_iommu=off amdgpu.cwsr_enable=0\n"},
        {
            "options": Expected("info", "keep it until the kernel has them"),
            "kernel": Expected("error", "older than 6.17.0-19", "hwe-24.04"),
        },
    ),
    "defilantech/LLMKube#886": Machine(
        kernel("7.0.4-200.fc44.x86_64"),
        {"options": Expected("info", "2000 ms", "amdgpu.lockup_timeout=20000", reboot=True)},
    ),
    "ROCm/legacy-rocm-build#6598": Machine(
        kernel("6.17.0-35-generic") | UBUNTU | {"proc/cmdline": "quiet splash\n"},
        {"iommu": Expected("info", "crashed within an hour", "amd_iommu=off", reboot=True)},
    ),
    "ROCm/legacy-rocm-build#6118": Machine(
        kernel("6.17.0-20-generic") | UBUNTU | {"sys/module/amdgpu/version": "6.16.13\n"},
        {"driver": Expected("warning", "DKMS", "amdgpu-install --uninstall", reboot=True)},
    ),
    "ROCm/legacy-rocm-build#5750": Machine(
        {f"{GPU}/power_dpm_force_performance_level": "low\n"},
        {"power": Expected("warning", "level is low", "echo auto", reboot=False)},
    ),
    "noamsto/nix-amd-ai#19": Machine(
        {
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
            "sys/devices/system/cpu/cpu0/cpufreq/energy_performance_preference": "performance\n",
            "sys/firmware/acpi/platform_profile": "quiet\n",
        },
        {"power": Expected("warning", "platform profile is quiet", "accelerator-performance")},
    ),
    "lemonade-sdk/vllm-rocm#8": Machine(
        {f"{KFD}/1/properties": node(110502, 16)},
        {"gpu": Expected("error", "gfx1152", "gpu_arch=gfx1152")},
    ),
    "ROCm/legacy-rocm-build#6143": Machine(
        kernel("6.12.74+deb13+1-amd64") | DEBIAN,
        {
            "kernel": Expected(
                "error", "older than 6.18.4", "-backports linux-image-amd64", reboot=True
            )
        },
    ),
    "lemonade-sdk/lemonade#3541": Machine(
        environ(CONDA_PREFIX="", PATH="/usr/bin:/bin")
        | {"opt/rocm-7.2.1/.info/version": "7.2.1-81\n", "opt/rocm/lib/libamdhip64.so.7": ""},
        {"caches": Expected("warning", "~/.cache/comgr", "rm -r ~/.cache/comgr", reboot=False)},
    ),
}
