# SPDX-License-Identifier: BSD-3-Clause
"""Fake hosts for the doctor: a healthy Strix Halo machine as files, and one fault at a time."""

import os
import shutil
from pathlib import Path

GIB = 2**30
KFD = "sys/class/kfd/kfd/topology/nodes"
GPU = "sys/class/drm/card1/device"
PCI = "sys/bus/pci/devices/0000:c5:00.0"
#: Triton is two days old, the caches one, and a package that does not matter is new.
NOW = 1_800_000_000
HEALTHY = {
    "proc/sys/kernel/osrelease": "6.18.9-200.fc43.x86_64\n",
    "proc/meminfo": f"MemTotal:       {125 * 2**20} kB\nMemFree: 1 kB\n"
    f"MemAvailable:   {118 * 2**20} kB\n",
    "proc/self/environ": "HOME=/home/user\0CONDA_PREFIX=/home/user/env\0",
    "proc/self/status": "Uid:\t1000\t1000\t1000\t1000\nGid:\t1000\t1000\t1000\t1000\n"
    "Groups:\t39 105 1000 \n",
    "etc/group": "root:x:0:\nvideo:x:39:user\nrender:x:105:user\nuser:x:1000:\n",
    "etc/os-release": 'NAME="Fedora Linux"\nID=fedora\nVERSION_ID=43\n',
    f"{KFD}/0/properties": "cpu_cores_count 32\nsimd_count 0\ngfx_target_version 0\n",
    f"{KFD}/1/properties": "cpu_cores_count 0\nsimd_count 80\ngfx_target_version 110501\n"
    "drm_render_minor 128\n",
    f"{PCI}/vendor": "0x1002\n",
    f"{PCI}/device": "0x1586\n",
    f"{GPU}/mem_info_vram_total": f"{GIB // 2}\n",
    f"{GPU}/mem_info_gtt_total": f"{120 * GIB}\n",
    "sys/module/amdgpu/initstate": "live\n",
    "sys/module/ttm/parameters/pages_limit": f"{120 * GIB // 4096}\n",
    "sys/kernel/debug/dri/1/amdgpu_firmware_info": "VCE feature version: 0, firmware version: 0x0\n"
    "MES feature version: 1, firmware version: 0x00000080\n",
    "var/lib/dpkg/status": "Package: bash\nVersion: 5\n\nPackage: linux-firmware\n"
    "Version: 20260110.git1-0ubuntu1\n\n",
    "dev/kfd": "",
    "dev/dri/renderD128": "",
    "lib64/libc.so.6": "GNU C Library (GNU libc) stable release version 2.42.\n",
    "home/user/env/conda-meta/triton-3.7.1-h1_0.json": "",
    "home/user/env/conda-meta/rich-1-h1_0.json": "",
    "home/user/.cache/comgr/entry": "",
}


def make(root: Path, changes: dict[str, str | None]) -> Path:
    """Writes the healthy host with the changes, None for a file that is not there."""
    for name, text in (HEALTHY | changes).items():
        if text is not None:
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    ages = {"conda-meta/triton-3.7.1-h1_0.json": 2, "conda-meta/rich-1-h1_0.json": 0}
    ages = {f"env/{name}": age for name, age in ages.items()} | {".cache/comgr/entry": 1}
    for name, age in ages.items():
        if (root / "home/user" / name).exists():
            os.utime(root / "home/user" / name, (NOW - age * 86400,) * 2)
    return root


def without_gpu(root: Path) -> Path:
    make(root, {})
    for name in ("sys/class/kfd", "sys/bus/pci", "sys/class/drm", "sys/module/amdgpu", "dev"):
        shutil.rmtree(root / name)
    return root


UBUNTU = 'ID=ubuntu\nVERSION_ID="24.04"\n'


def environ(**values: str) -> dict[str, str]:
    pairs = {"HOME": "/home/user", "CONDA_PREFIX": "/home/user/env"} | values
    return {"proc/self/environ": "\0".join(f"{k}={v}" for k, v in pairs.items()) + "\0"}


#: name: (changes, {check: (state, severity or None, part of what is said, part of the fix)})
FAULTS = {
    "gfx1150": (
        {f"{KFD}/1/properties": "simd_count 32\ngfx_target_version 110500\ndrm_render_minor 128\n"},
        {"gpu": ("failed", "error", "gfx1150", "use packages")},
    ),
    "driver-missing": (
        {f"{KFD}/1/properties": None, "sys/module/amdgpu/initstate": None, "dev/kfd": None,
         f"{GPU}/mem_info_vram_total": None},
        {"gpu": ("failed", "error", "PCI bus", "modprobe amdgpu"),
         "driver": ("failed", "error", "not loaded", "modprobe amdgpu"),
         "kfd": ("failed", "error", "does not exist", "--device")},
    ),
    "dkms": (
        {"sys/module/amdgpu/version": "6.12.12\n"},
        {"driver": ("passed", "warning", "DKMS", "amdgpu-install --uninstall")},
    ),
    "kernel-old": (
        {"proc/sys/kernel/osrelease": "6.17.7-300.fc43.x86_64\n"},
        {"kernel": ("failed", "error", "older than 6.18.4", "dnf upgrade")},
    ),
    "kernel-old-with-backports": (
        {"proc/sys/kernel/osrelease": "6.12.74-amd64\n",
         f"{KFD}/1/properties": "simd_count 80\ngfx_target_version 110501\n"
         "drm_render_minor 128\ncwsr_size 13701120\nctl_stack_size 45056\n"},
        {},
    ),
    "mes-suspect": (
        {"sys/kernel/debug/dri/1/amdgpu_firmware_info":
         "MES feature version: 1, firmware version: 0x00000086\n"},
        {"firmware": ("passed", "warning", "MES 0x86", "newer linux-firmware")},
    ),
    "kernel-old-arch": (
        {"proc/sys/kernel/osrelease": "6.18.3-arch1-1\n", "etc/os-release": "ID=arch\n"},
        {"kernel": ("failed", "error", "older than 6.18.4", "pacman -Syu linux")},
    ),
    "kernel-ubuntu-hwe-old": (
        {"proc/sys/kernel/osrelease": "6.17.0-14-generic\n", "etc/os-release": UBUNTU},
        {"kernel": ("failed", "error", "6.17.0-19", "linux-generic-hwe-24.04")},
    ),
    "kernel-ubuntu-oem-old": (
        {"proc/sys/kernel/osrelease": "6.14.0-1017-oem\n", "etc/os-release": UBUNTU},
        {"kernel": ("failed", "error", "6.14.0-1018", "apt install")},
    ),
    "kernel-ubuntu-too-new": (
        {"proc/sys/kernel/osrelease": "7.0.0-5-generic\n", "etc/os-release": UBUNTU},
        {"kernel": ("passed", "warning", "300 times slower", "apt install")},
    ),
    "firmware-bad": (
        {"var/lib/dpkg/status": "Package: linux-firmware\nVersion: 20251125-1\n\n"},
        {"firmware": ("failed", "error", "20251125", "dnf upgrade")},
    ),
    "firmware-bad-pacman": (
        {"var/lib/dpkg/status": None, "etc/os-release": "ID=arch\n",
         "sys/kernel/debug/dri/1/amdgpu_firmware_info": None,
         "var/lib/pacman/local/linux-firmware-20251125-2/desc": ""},
        {"firmware": ("failed", "error", "20251125-2", "pacman -Syu linux-firmware")},
    ),
    "firmware-bad-mes": (
        {"var/lib/dpkg/status": None, "sys/kernel/debug/dri/1/amdgpu_firmware_info":
         "MES feature version: 1, firmware version: 0x00000083\n"},
        {"firmware": ("failed", "error", "0x83", "linux-firmware")},
    ),
    "no-kfd-node": (
        {"dev/kfd": None},
        {"kfd": ("failed", "error", "/dev/kfd does not exist", "--device /dev/kfd")},
    ),
    "no-render-node": (
        {"dev/dri/renderD128": None},
        {"render": ("failed", "error", "renderD128 does not exist", "--device")},
    ),
    "render-node-other": (
        {f"{KFD}/1/properties": "simd_count 80\ngfx_target_version 110501\ndrm_render_minor 129\n"},
        {"render": ("failed", "error", "renderD129", "--device")},
    ),
    "not-in-group": (
        {"proc/self/status": "Uid:\t1000\t1000\t1000\t1000\nGid:\t1000\t1000\t1000\t1000\n"
         "Groups:\t1000\n"},
        {"groups": ("passed", "warning", "not in the group render", "usermod -aG render,video")},
    ),
    "carve-out-large": (
        {f"{GPU}/mem_info_vram_total": f"{96 * GIB}\n",
         "proc/meminfo": f"MemTotal: {30 * 2**20} kB\n",
         "sys/module/ttm/parameters/pages_limit": f"{25 * GIB // 4096}\n"},
        {"carve-out": ("passed", "warning", "96 GiB", "512 MB in the BIOS")},
    ),
    "gtt-default": (
        {"sys/module/ttm/parameters/pages_limit": f"{62 * GIB // 4096}\n"},
        {"gtt": ("passed", "warning", "62 of 125 GiB", "options ttm pages_limit=31719424")},
    ),
    "gtt-all": (
        {"sys/module/ttm/parameters/pages_limit": f"{125 * GIB // 4096}\n",
         f"{GPU}/mem_info_gtt_total": f"{125 * GIB}\n"},
        {"gtt": ("passed", "warning", "may swap", "options ttm pages_limit=31719424")},
    ),
    "override": (
        environ(HSA_OVERRIDE_GFX_VERSION="11.0.0"),
        {"environment": ("failed", "error", "=11.0.0", "unset HSA_OVERRIDE_GFX_VERSION")},
    ),
    "other-rocm-first": (
        environ(LD_LIBRARY_PATH="/opt/rocm-6.3/lib:/usr/lib", ROCM_PATH="/opt/rocm-6.3"),
        {"environment": ("failed", "error", "loaded first", "unset LD_LIBRARY_PATH ROCM_PATH")},
    ),
    "other-rocm-named": (
        environ(HIP_PATH="/opt/rocm"),
        {"environment": ("passed", "warning", "another ROCm", "unset HIP_PATH")},
    ),
    "loader-path": (
        {"etc/ld.so.conf.d/10-rocm.conf": "/opt/rocm/lib\n", "opt/rocm/README": ""},
        {"stray-rocm": ("passed", "warning", "loader's path", "rm /etc/ld.so.conf.d/10-rocm.conf")},
    ),
    "glibc-old": (
        {"lib64/libc.so.6": "GNU C Library stable release version 2.27.\n"},
        {"glibc": ("failed", "error", "2.27 is older", "upgrade")},
    ),
}  # fmt: skip
