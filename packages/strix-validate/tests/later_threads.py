# SPDX-License-Identifier: BSD-3-Clause
"""Machines from public issue threads that were sampled after the doctor was written.

The comment above a machine is the advice or the cause that the thread gives its owner.
"""

import errno

from hosts import DISCRETE, GIB, GPU, KFD, OSTREE, PCI, UBUNTU, environ, mes, node, released
from other_machines import BAZZITE, MINT
from strix_validate.doctor.tree import DeviceFile
from threads import (
    CACHYOS,
    LXC,
    NIXOS,
    NO_GROUP,
    RESOLUTE,
    VENV,
    VENV_SITE,
    Expected,
    Machine,
    both_devices,
    dpkg,
    kernel,
    torch,
)

QUESTING = released("ID=ubuntu", 'VERSION_ID="25.10"')
#: The environment in kyuz0's toolbox containers (amd-strix-halo-toolboxes).
TOOLBOX = environ(VIRTUAL_ENV="/opt/venv", CONDA_PREFIX="", PATH="/opt/venv/bin:/usr/bin") | {
    "run/.toolboxenv": "",
    "run/.containerenv": "",
    "opt/venv/pyvenv.cfg": "home = /usr/bin\nversion = 3.13.5\n",
    "opt/venv/bin/python3": "",
    "opt/venv/lib/libamdhip64.so.7": "",
}
TOOLBOX_SITE = "opt/venv/lib/python3.13/site-packages"
#: KFD's node properties on a kernel that has the fixes, whatever its version: it exports cwsr_size.
FIXED_NODE = {f"{KFD}/1/properties": node(110501, 80, more="cwsr_size 13701120\n")}


def command_line(text: str) -> dict[str, str]:
    return {"proc/cmdline": f"{text}\n"}


def gtt(gib: float) -> dict[str, str]:
    size = int(gib * GIB)
    pages = {"sys/module/ttm/parameters/pages_limit": f"{size // 4096}\n"}
    return {f"{GPU}/mem_info_gtt_total": f"{size}\n"} | pages


def memory(gib: float) -> dict[str, str]:
    total = int(gib * 2**20)
    return {"proc/meminfo": f"MemTotal: {total} kB\nMemAvailable: {total - 6 * 2**20} kB\n"}


def carve_out(gib: int) -> dict[str, str]:
    return {f"{GPU}/mem_info_vram_total": f"{gib * GIB}\n"}


def wheels(site: str, version: str, *names: str) -> dict[str, str]:
    return {f"{site}/{name}-{version}.dist-info/INSTALLER": "pip\n" for name in names}


def status(user: int, *groups: int) -> dict[str, str]:
    numbers = "\t".join([str(user)] * 4)
    listed = " ".join(map(str, groups))
    return {"proc/self/status": f"Uid:\t{numbers}\nGid:\t{numbers}\nGroups:\t{listed}\n"}


TORCH = {
    # AMD's torch also needs the wheel with the GPU's kernels: install torch[device-gfx1151].
    "ROCm/TheRock#7839": Machine(
        VENV
        | torch(VENV_SITE, "2.13.0+rocm10.0.0", hip="7.15.2")
        | wheels(VENV_SITE, "10.0.0", "rocm", "rocm_sdk_core", "rocm_sdk_libraries"),
        {
            "packages": Expected(
                "error", "but not the wheel that has the kernels", "'torch[device-gfx1151]'"
            )
        },
    ),
    "ROCm/TheRock#7839 with the wheel of gfx1151": Machine(
        VENV
        | torch(VENV_SITE, "2.13.0+rocm10.0.0", hip="7.15.2")
        | wheels(VENV_SITE, "10.0.0", "rocm_sdk_core", "rocm_sdk_libraries")
        | wheels(VENV_SITE, "10.0.0", "rocm_sdk_device_gfx1151", "amd_torch_device_gfx1151"),
    ),
    # Install another nightly: ROCm's nightlies of 9 to 12 June 2026 crash when HIP starts.
    "kyuz0/amd-strix-halo-vllm-toolboxes#61": Machine(
        TOOLBOX
        | torch(TOOLBOX_SITE, "2.13.0a0+rocm7.14.0a20260612", hip="7.14.60610")
        | wheels(TOOLBOX_SITE, "7.14.0a20260612", "rocm_sdk_libraries_gfx1151", "rocm_sdk_core"),
        {
            "packages": Expected(
                "error", "crashes when HIP starts", "--force-reinstall", reboot=False
            )
        },
    ),
    "kyuz0/amd-strix-halo-vllm-toolboxes#61 with an older nightly": Machine(
        TOOLBOX | torch(TOOLBOX_SITE, "2.13.0a0+rocm7.14.0a20260608", hip="7.14.60608"),
    ),
    # ROCm 7.11's nightlies from before 2025-12-19, when ROCm was fixed, end in page faults on
    # Linux kernels that have the kernel's own fixes for gfx1151.
    "ROCm 7.11 nightly before the page-fault fix": Machine(
        TOOLBOX | torch(TOOLBOX_SITE, "2.10.0a0+rocm7.11.0a20251212", hip="7.2.53150"),
        {"packages": Expected("error", "ROCm 7.11.0a20251212, which page-faults")},
    ),
    # torch with ROCm 7.1 from repo.radeon.com crashes: use ROCm 7.2 or newer.
    "unslothai/unsloth#5301": Machine(
        VENV
        | UBUNTU
        | kernel("6.17.0-23-generic")
        | torch(VENV_SITE, "2.9.1+rocm7.1.0.lw.git351ff442", hip="7.1.52802-26aae437f6"),
        {
            "packages": Expected(
                "error", "contains ROCm 7.1.0, which page-faults", "--force-reinstall"
            )
        },
    ),
    # Update ROCm's runtime and the Linux kernel, because both are too old.
    "ROCm/legacy-rocm-build#5853": Machine(
        VENV
        | released("ID=fedora", "VERSION_ID=43", "VARIANT_ID=silverblue")
        | OSTREE
        | kernel("6.17.12-300.fc43.x86_64")
        | torch(VENV_SITE, "2.11.0.dev20260105+rocm7.1", hip="7.1.25424"),
        {
            "kernel": Expected("error", "older than 6.18.4", "rpm-ostree upgrade", reboot=True),
            "packages": Expected("warning", "ROCm 7.2 and newer are stable", "--force-reinstall"),
        },
    ),
    # Remove HSA_OVERRIDE_GFX_VERSION, update the Linux kernel and ROCm's runtime, and choose a
    # small carve-out in the BIOS.
    "ROCm/legacy-rocm-build#5824": Machine(
        VENV
        | environ(CONDA_PREFIX="", VIRTUAL_ENV="/home/user/venv", HSA_OVERRIDE_GFX_VERSION="11.0.0")
        | released("ID=nobara", 'ID_LIKE="fedora"', "VERSION_ID=43")
        | kernel("6.17.8-200.nobara.fc43.x86_64")
        | torch(VENV_SITE, "2.9.1+rocm6.3", hip="6.3.42131")
        | carve_out(96)
        | memory(31)
        | gtt(15.5),
        {
            "environment": Expected("error", "=11.0.0", "unset HSA_OVERRIDE_GFX_VERSION"),
            "kernel": Expected("error", "older than 6.18.4", "dnf upgrade"),
            "packages": Expected("warning", "contains ROCm 6.3"),
            "carve-out": Expected("warning", "96 GiB", reboot=True),
            "gtt": Expected("info"),
        },
    ),
    # Update ROCm: Linux 6.17.9 has the kernel's half of the fix, but ROCm 7.1.1 lacks the other
    # half and page-faults.
    "kyuz0/amd-strix-halo-toolboxes#45": Machine(
        FIXED_NODE
        | kernel("6.17.9-300.fc43.x86_64")
        | {"run/.toolboxenv": "", "opt/rocm-7.1.1/.info/version": "7.1.1-38\n"},
        {
            "runtime": Expected("warning", "7.1.1-38, which page-faults", "7.2.1 or newer"),
            "caches": Expected("warning"),
        },
    ),
}

MEMORY = {
    # Choose 1 GB in the BIOS, the smallest carve-out that it offers. This frees 7 GiB.
    "peonist-ai/halogen-flash-server#12": Machine(
        RESOLUTE
        | kernel("7.0.0-31-generic")
        | carve_out(8)
        | memory(115.3)
        | gtt(105.5)
        | command_line("quiet amd_iommu=off amdgpu.gpu_recovery=1 ttm.pages_limit=27648000"),
        {
            "carve-out": Expected(
                "warning", "the BIOS reserves 8 GiB", "the smallest size that it offers"
            ),
            "gtt": Expected("info"),
        },
    ),
    # The option amdgpu.ggtsize does not exist. pages_limit is set on the kernel's command line, so
    # change it there.
    "kyuz0/amd-strix-halo-toolboxes#39": Machine(
        CACHYOS
        | gtt(124)
        | kernel("6.18.9-2-cachyos")
        | command_line("amd_iommu=off amdgpu.ggtsize=126976, ttm.pages_limit=32505858"),
        {
            "gtt": Expected(
                "warning",
                "amdgpu.ggtsize=126976,: the driver has no such option",
                "remove ttm.pages_limit=32505858 from the kernel's command line; add ttm.pages_",
                "modprobe.d",
                reboot=True,
            )
        },
    ),
    # Lower the limit: 128 GiB are more than the machine's 125 GiB. amdgpu.gttsize is not needed.
    "kyuz0/amd-strix-halo-toolboxes#16 in GRUB": Machine(
        UBUNTU
        | gtt(128)
        | kernel("6.17.0-35-generic")
        | command_line("amd_iommu=off amdgpu.gttsize=131072 ttm.pages_limit=33554432"),
        {
            "gtt": Expected(
                "warning",
                "128 of 125 GiB",
                "remove ttm.pages_limit=33554432 from",
                "modprobe.d",
                reboot=True,
            )
        },
    ),
    # Change the limit in Talos' machine configuration, which has the node's kernel arguments.
    "defilantech/LLMKube#698": Machine(
        UBUNTU
        | gtt(124)
        | kernel("6.18.24-talos")
        | {"proc/1/cgroup": "0::/kubepods/burstable/pod1/abc\n"}
        | command_line("amdgpu.gttsize=126976 ttm.pages_limit=32505856 amd_iommu=off"),
        {
            "gtt": Expected(
                "warning", "124 of 125", "on the host: remove ttm.pages_limit", "modprobe.d"
            )
        },
    ),
    "another file sets the limit": Machine(
        gtt(62) | {"etc/modprobe.d/zz.conf": "options ttm pages_limit=16252928\n"},
        {
            "gtt": Expected(
                "warning",
                "62 of 125",
                "pages_limit=[^ ]*//' /etc/modprobe.d/zz.conf && sudo dracut --force; echo",
            )
        },
    ),
    "a limit on Bazzite's kernel command line": Machine(
        BAZZITE
        | gtt(62)
        | kernel("7.0.9-ba01.fc44.x86_64")
        | command_line("amd_iommu=off ttm.pages_limit=16252928"),
        {
            "gtt": Expected(
                "warning", "62 of 125", "--delete=ttm.pages_limit=16252928; sudo rpm-ostree"
            )
        },
    ),
    "a misspelt option in a file": Machine(
        {"etc/modprobe.d/ai.conf": "options amdgpu gtt_size=122880\n"},
        {"gtt": Expected("warning", "no such option", "gtt_size=[^ ]*//' /etc/modprobe.d/ai.conf")},
    ),
}

SETTINGS = {
    # Remove amd_iommu=pt, because amd_iommu has no value pt.
    "kyuz0/amd-strix-halo-toolboxes#66": Machine(
        kernel("7.0.4-100.fc43.x86_64") | command_line("quiet amd_iommu=pt"),
        {
            "iommu": Expected(
                "info", "the kernel ignores amd_iommu=pt", "--remove-args=amd_iommu=pt", reboot=True
            )
        },
    ),
    "amd_iommu=on": Machine(
        command_line("amd_iommu=on"),
        {"iommu": Expected("info", "With amd_iommu=off", never="remove-args")},
    ),
    # Change NixOS' configuration, from which NixOS writes the files in /etc/modprobe.d.
    "NixOS' extraModprobeConfig": Machine(
        NIXOS
        | kernel("6.18.12")
        | {
            "etc/modprobe.d/nixos.conf": "options amdgpu cwsr_enable=0\n",
            "sys/module/amdgpu/parameters/cwsr_enable": "0\n",
        },
        {
            "options": Expected(
                "warning",
                "this kernel has them",
                "remove cwsr_enable=0 from boot.extraModprobeConfig",
                "sed",
                reboot=True,
            )
        },
    ),
    "an option of a package's file": Machine(
        {"usr/lib/modprobe.d/vendor.conf": "options amdgpu ppfeaturemask=0xffff7fff\n"},
        {
            "options": Expected(
                "info",
                "ppfeaturemask",
                "sudo cp /usr/lib/modprobe.d/vendor.conf /etc/modprobe.d/vendor.conf && sudo sed",
            )
        },
    ),
    "a decimal number that the module prints in hexadecimal": Machine(
        command_line("amd_iommu=off amdgpu.ppfeaturemask=4294934527")
        | {"sys/module/amdgpu/parameters/ppfeaturemask": "0xffff7fff\n"},
        {
            "options": Expected(
                "info", "0xffff7fff", "--remove-args=amdgpu.ppfeaturemask=4294934527"
            )
        },
    ),
}

DRIVERS = {
    # Remove amdgpu-dkms and its firmware, and use the driver of the Linux kernel.
    "ROCm/amdgpu#209": Machine(
        UBUNTU
        | kernel("6.18.14-061814-generic")
        | dpkg("amdgpu-dkms 1:6.16.13", "amdgpu-dkms-firmware 1:6.16.13", "linux-firmware 2024")
        | {"sys/kernel/debug/dri/1/amdgpu_firmware_info": None},
        {"firmware": Expected("warning", "is loaded before linux-firmware", "autoremove --purge")},
    ),
    # Remove amdgpu-dkms, which installs an older KFD.
    "ROCm/legacy-rocm-build#5905": Machine(
        QUESTING | kernel("6.18.7-061807-generic") | {"sys/module/amdgpu/version": "6.16.13\n"},
        {"driver": Expected("warning", "DKMS", "--uninstall", reboot=True)},
    ),
    "ROCm/legacy-rocm-build#6182": Machine(
        UBUNTU
        | kernel("6.17.0-1020-oem")
        | mes(0x83)
        | {"sys/module/amdgpu/version": "6.16.13\n"}
        | dpkg("amdgpu-dkms 1:6.16.13", "amdgpu-dkms-firmware 1:6.16.13"),
        {
            "driver": Expected("warning", "DKMS", "--uninstall"),
            "firmware": Expected("error", "is the bad MES 0x83", "autoremove --purge", reboot=True),
        },
    ),
    # Update the Linux kernel, remove amdgpu-dkms, and choose a small carve-out in the BIOS.
    "lmstudio-ai/lmstudio-bug-tracker#1004": Machine(
        UBUNTU
        | kernel("6.14.0-29-generic")
        | carve_out(64)
        | memory(62)
        | gtt(31)
        | {"sys/module/amdgpu/version": "6.12.12\n", "opt/rocm-6.4.3/.info/version": "6.4.3-128\n"},
        {
            "kernel": Expected("error", "older than 6.17.0-19", "linux-generic-hwe-24.04"),
            "driver": Expected("warning", "DKMS"),
            "carve-out": Expected("warning", "64 GiB"),
            "gtt": Expected("info"),
            "caches": Expected("warning"),
        },
    ),
    # Remove HSA_OVERRIDE_GFX_VERSION, because it changes the APU's architecture, too.
    "ROCm/legacy-rocm-build#5696": Machine(
        DISCRETE
        | {f"{KFD}/1/properties": node(120001, 128)}
        | environ(HSA_OVERRIDE_GFX_VERSION="12.0.1"),
        {
            "environment": Expected("error", "=12.0.1", "unset HSA_OVERRIDE_GFX_VERSION"),
            "gpu": Expected("warning", "gfx1201 is visible besides", "ROCR_VISIBLE_DEVICES=1"),
            "pixi": Expected("warning"),
        },
    ),
    # This GPU is a gfx1152, not a Strix Halo.
    "ROCm/TheRock#7952": Machine(
        MINT
        | kernel("7.0.0-31-generic")
        | {
            f"{KFD}/1/properties": node(110502, 16),
            f"{PCI}/device": "0x1114\n",
            f"{GPU}/device": "0x1114\n",
        },
        {"gpu": Expected("error", "the GPU is gfx1152", "gpu_arch=gfx1152")},
    ),
}

CONTAINERS = {
    # Give the container the host's group numbers, because its own groups have other numbers.
    "debpalash/VoiceStudio#1274": Machine(
        {".dockerenv": "", "etc/group": "video:x:44:\n"} | status(1000, 39, 105),
        both_devices(Expected("error", "its group is 992", "--group-add $(stat", "usermod"))
        | {"groups": Expected("warning")},
        errno.EACCES,
        DeviceFile(992, 0o660, 236),
    ),
    # Add the host's group, because the user of the container image is no longer root.
    "lemonade-sdk/lemonade#2857": Machine(
        {".dockerenv": "", "etc/group": "render:x:992:\n"} | status(10001, 10001),
        both_devices(Expected("error", "992 (render)", "--group-add $(stat", "usermod"))
        | {"groups": Expected("warning")},
        errno.EACCES,
        DeviceFile(992, 0o660, 236),
    ),
    # A rootless container maps groups to other numbers, so use the option --group-add keep-groups.
    "kyuz0/amd-strix-halo-toolboxes#53": Machine(
        environ(DISTROBOX_ENTER_PATH="/usr/bin/distrobox-enter") | {"run/.containerenv": ""},
        both_devices(NO_GROUP),
        errno.EACCES,
        DeviceFile(65534, 0o660, 236),
    ),
    # Give the flatpak permission for all devices or, from flatpak 1.18 on, only for /dev/kfd.
    "flatpak/flatpak#5383": Machine(
        environ(container="flatpak") | {"dev/kfd": None},
        {"kfd": Expected("error", "(flatpak)", "flatpak override --user --device=all", "recreate")},
    ),
    # Pass /dev/kfd to the container in addition to /dev/dri, and install a torch for ROCm.
    "Comfy-Org/ComfyUI#14326": Machine(
        VENV | {".dockerenv": "", "dev/kfd": None} | torch(VENV_SITE, "2.12.0+cpu"),
        {
            "kfd": Expected("error", "in this container (docker)", "--device /dev/kfd"),
            "packages": Expected("error", "the build for CPUs"),
        },
    ),
    # Update the host's kernel, which is too old. The host may have another distribution than the
    # image.
    "ollama/ollama#14921": Machine(
        {".dockerenv": ""} | kernel("6.8.0-106-generic") | environ(AMD_LOG_LEVEL="3"),
        {
            "kernel": Expected(
                "error", "older", "on the host: sudo apt install linux-generic-hwe-$("
            ),
            "environment": Expected("warning", "AMD_LOG_LEVEL=3"),
        },
    ),
    # Nothing is wrong on this machine.
    "Hal0ai/hal0#2216": Machine(RESOLUTE | LXC | kernel("7.0.14-8-pve") | memory(96)),
}

KERNELS = {
    "ollama/ollama#13589": Machine(
        UBUNTU
        | kernel("6.17.0-14-generic")
        | environ(LD_LIBRARY_PATH="/opt/rocm-7.2.0/lib")
        | {f"{KFD}/1/properties": node(110501, 64)},
        {
            "kernel": Expected("error", "older than 6.17.0-19", "linux-generic-hwe-24.04"),
            "environment": Expected("error", "loaded first", "unset LD_LIBRARY_PATH"),
        },
    ),
    "kyuz0/amd-strix-halo-comfyui-toolboxes#9": Machine(
        QUESTING | kernel("6.17.0-8-generic"),
        {"kernel": Expected("error", "older than 6.17.0-19", "apt full-upgrade", reboot=True)},
    ),
}

LATER_THREADS = KERNELS | TORCH | MEMORY | SETTINGS | DRIVERS | CONTAINERS
