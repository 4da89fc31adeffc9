# SPDX-License-Identifier: BSD-3-Clause
"""Made-up machines with the kinds of faults that threads.py has from public issue threads."""

import errno
from pathlib import Path

from hosts import DEBIAN, DISCRETE, GIB, GPU, KFD, OSTREE, PCI, UBUNTU, environ, mes, released
from strix_validate.doctor.tree import DeviceFile
from threads import (
    CACHYOS,
    LXC,
    NIXOS,
    RESOLUTE,
    STALLS,
    VENV,
    VENV_SITE,
    Expected,
    Machine,
    both_devices,
    dpkg,
    kernel,
    torch,
)

BAZZITE = released("ID=bazzite", 'ID_LIKE="fedora"') | OSTREE
TUMBLEWEED = released('ID="opensuse-tumbleweed"', 'ID_LIKE="opensuse suse"')
MINT = released("ID=linuxmint", 'ID_LIKE="ubuntu debian"', "UBUNTU_CODENAME=noble")
#: The GPU is on the PCI bus, but no driver is bound to it.
WITHOUT_DRIVER = {
    f"{KFD}/1/properties": None,
    f"{GPU}/mem_info_vram_total": None,
    "dev/kfd": None,
    "sys/module/amdgpu/initstate": None,
    "dev/dri/renderD128": None,
}
CPUFREQ = "sys/devices/system/cpu/cpu0/cpufreq"


def without_driver(message: str, fix: str) -> dict[str, Expected]:
    expected = Expected("error", message, fix, never="modprobe amdgpu", reboot=True)
    devices = Expected("error", "amdgpu is not loaded", "see doctor/gpu", "modprobe")
    return {
        "gpu": expected,
        "driver": expected,
        "pixi": Expected("warning"),
        **both_devices(devices),
    }


def without_gpu(cpu: str) -> dict[str, str | Path | None]:
    return WITHOUT_DRIVER | {
        f"{PCI}/device": "0x1234\n",
        f"{GPU}/device": None,
        f"{GPU}/vendor": None,
        "proc/cpuinfo": cpu,
    }


def faulty(release: str, files: dict, fix: str, severity: str = "warning") -> Machine:
    message = STALLS if severity == "warning" else "962d684b5dc0"
    return Machine(
        kernel(release) | files, {"kernel": Expected(severity, message, fix, reboot=True)}
    )


KERNELS = {
    "Bazzite": faulty("7.0.12-ba02.fc44.x86_64", BAZZITE, "rpm-ostree upgrade"),
    "Tumbleweed": faulty("7.0.12-1-default", TUMBLEWEED, "zypper dup"),
    "Debian backports": faulty("7.0.12+deb13-amd64", DEBIAN, "-backports linux-image-amd64"),
    "Proxmox": faulty("7.0.12-1-pve", DEBIAN, "apt dist-upgrade"),
    "Proxmox with a fixed kernel": Machine(kernel("7.0.14-4-pve") | DEBIAN),
    "mainline kernel on Ubuntu": faulty("7.0.12-070012-generic", UBUNTU, "apt full-upgrade"),
    "System76": faulty("7.0.12-76070012-generic", UBUNTU, "apt full-upgrade"),
    "liquorix kernel on Debian": faulty("7.0.12-1-liquorix-amd64", DEBIAN, "linux-image-amd64"),
    "zen kernel on CachyOS": faulty("7.0.12-zen1-1-zen", CACHYOS, "pacman -Syu"),
    "xanmod kernel on Debian": faulty(
        "7.0.12-x64v3-xanmod1", released("ID=debian"), "linux-image-amd64"
    ),
    "NixOS": faulty("7.0.12", NIXOS, "linuxPackages_latest"),
    "Void": faulty("7.0.12_1", released("ID=void"), "package manager"),
    "Gentoo": faulty("7.0.12-gentoo-r1", released("ID=gentoo"), "package manager"),
    "lowlatency kernel of Ubuntu": faulty("7.0.0-29-lowlatency", RESOLUTE, "apt full-upgrade"),
    "Mint": faulty("7.0.0-28-generic", MINT, "apt full-upgrade"),
    "release candidate of Fedora's kernel": faulty(
        "7.1.0-0.rc6.20260601git1a2b.47.fc45.x86_64", {}, "dnf upgrade", "info"
    ),
    "release candidate of Ubuntu's mainline kernel": faulty(
        "7.1.0-070100rc7-generic", UBUNTU, "apt full-upgrade", "info"
    ),
    "release candidate on CachyOS": faulty("7.1.0-rc6-1-mainline", CACHYOS, "pacman -Syu", "info"),
    "release candidate from before the fault": Machine(kernel("7.1.0-rc5-1-mainline") | CACHYOS),
    "long-term kernel": Machine(kernel("6.18.35-1-lts") | CACHYOS),
    "newest kernel": Machine(kernel("7.2.1-200.fc45.x86_64")),
    "Ubuntu's OEM kernel": Machine(kernel("7.0.0-1005-oem") | UBUNTU),
    "RHEL": Machine(
        kernel("6.12.0-124.8.1.el10_1.x86_64") | released("ID=rhel", "ID_LIKE=fedora"),
        {"kernel": Expected("error", "older than 6.18.4", "dnf upgrade", reboot=True)},
    ),
    "CentOS that boots an image": Machine(
        kernel("6.12.0-124.8.1.el10_1.x86_64")
        | released("ID=centos", "ID_LIKE='rhel fedora'")
        | {"run/ostree-booted": ""},
        {"kernel": Expected("error", "older than 6.18.4", "rpm-ostree upgrade", reboot=True)},
    ),
    "a Fedora host under an Ubuntu container": faulty(
        "7.0.12-200.fc44.x86_64",
        UBUNTU | {".dockerenv": ""},
        "on the host: sudo dnf upgrade --refresh kernel",
    ),
    "an Ubuntu host under a Fedora toolbox": faulty(
        "7.0.0-28-generic",
        {"run/.containerenv": "", "run/.toolboxenv": ""},
        "on the host: sudo apt update",
    ),
    "a fixed kernel that is installed but not booted": Machine(
        kernel("7.0.0-28-generic")
        | UBUNTU
        | {
            "usr/lib/modules/7.0.0-28-generic/kernel/a.ko": "",
            "usr/lib/modules/7.0.0-31-generic/kernel/a.ko": "",
            "usr/lib/modules/6.17.0-35-generic/kernel/a.ko": "",
            # dpkg leaves the files that depmod and DKMS wrote for a removed kernel.
            "usr/lib/modules/7.0.0-35-generic/modules.dep": "",
            "usr/lib/modules/7.0.0-35-generic/updates/dkms/a.ko": "",
        },
        {"kernel": Expected("warning", STALLS, "boot 7.0.0-31-generic", "apt", reboot=True)},
    ),
    "an unknown kernel that stalls": Machine(
        kernel("7.3.1-200.fc45.x86_64"),
        {
            "copies": Expected(
                "warning",
                "kernel 7.3.1-200.fc45.x86_64 may have a fault",
                "another kernel",
                reboot=True,
            )
        },
        rate=2e6,
    ),
    "a known kernel that stalls": Machine(
        kernel("7.0.0-28-generic") | UBUNTU,
        {
            "kernel": Expected("warning", STALLS),
            "copies": Expected("warning", "GB/s", "doctor/kernel"),
        },
        rate=2e6,
    ),
}

DRIVERS = {
    "amdgpu blacklisted in a file": Machine(
        WITHOUT_DRIVER | {"etc/modprobe.d/no.conf": "blacklist amdgpu\n"},
        without_driver(
            "/etc/modprobe.d/no.conf keeps amdgpu from loading", "/etc/modprobe.d/no.conf"
        ),
    ),
    "nomodeset on the kernel's command line": Machine(
        WITHOUT_DRIVER | {"proc/cmdline": "nomodeset amd_iommu=off\n"},
        without_driver("nomodeset", "grubby --update-kernel=ALL --remove-args=nomodeset"),
    ),
    "amdgpu blacklisted on the kernel's command line": Machine(
        WITHOUT_DRIVER | UBUNTU | {"proc/cmdline": "modprobe.blacklist=nouveau,amdgpu quiet\n"},
        without_driver("modprobe.blacklist", "remove modprobe.blacklist=nouveau,amdgpu"),
    ),
    "Secure Boot rejects a module of DKMS": Machine(
        WITHOUT_DRIVER
        | UBUNTU
        | {
            "var/lib/dkms/amdgpu/6.16.13/source": "",
            "sys/firmware/efi/efivars/SecureBoot-8be4df61": "\6\0\0\0\1",
        },
        without_driver("Secure Boot", "mokutil --import"),
    ),
    "no firmware of gfx1151": Machine(
        WITHOUT_DRIVER
        | DEBIAN
        | {"usr/lib/firmware/amdgpu/navi10_ce.bin": "", "var/lib/dpkg/status": None},
        without_driver("no firmware of gfx1151", "firmware-amd-graphics"),
    ),
    "integrated GPU disabled": Machine(
        without_gpu("model name\t: AMD RYZEN AI MAX+ 395 w/ Radeon 8060S\nflags\t: fpu\n"),
        {
            "gpu": Expected("error", "not on the PCI bus", "in the BIOS", reboot=True),
            "pixi": Expected("warning"),
        },
    ),
    "amdgpu loaded but not bound to the GPU": Machine(
        {
            name: content
            for name, content in WITHOUT_DRIVER.items()
            if name != "sys/module/amdgpu/initstate"
        },
        {
            "gpu": Expected("error", "but not bound to the GPU", "dmesg", never="modprobe"),
            "pixi": Expected("warning"),
            **both_devices(Expected("error", "though amdgpu is loaded", "dmesg", "modprobe")),
        },
    ),
    "virtual machine without the GPU": Machine(
        without_gpu("model name\t: AMD RYZEN AI MAX+ 395\nflags\t: fpu hypervisor\n"),
        {
            "gpu": Expected("error", "virtual machine", "pass the GPU through"),
            "pixi": Expected("warning"),
        },
    ),
    "firmware installed by hand": Machine(
        {"usr/lib/firmware/updates/amdgpu/gc_11_5_1_mes_2.bin": ""},
        {
            "firmware": Expected(
                "info", "is loaded before linux-firmware", "sudo rm /usr/lib/firmware"
            )
        },
    ),
    "amdgpu-dkms-firmware purged": Machine(
        dpkg("amdgpu-dkms-firmware 30.30", status="deinstall ok config-files") | mes(0x80),
    ),
}

DEVICES = {
    "SELinux denies a container the device files": Machine(
        {"run/.containerenv": "", "sys/fs/selinux/enforce": "1"},
        both_devices(Expected("error", "SELinux", "container_use_devices", "usermod")),
        errno.EACCES,
        DeviceFile(105, 0o660, 236),
    ),
    "SELinux denies the device files outside of containers": Machine(
        {"sys/fs/selinux/enforce": "1"},
        both_devices(Expected("error", "allow it", "ls -lZ", "container_use_devices")),
        errno.EACCES,
        DeviceFile(105, 0o660, 236),
    ),
    "no device rule in Docker": Machine(
        {".dockerenv": ""},
        both_devices(Expected("error", "not permitted", "--device /dev/kfd", "usermod")),
        errno.EPERM,
        DeviceFile(105, 0o660, 236),
    ),
    "no device rule in LXC": Machine(
        LXC,
        both_devices(Expected("error", "not permitted", "lxc.cgroup2.devices.allow", "usermod")),
        errno.EPERM,
        DeviceFile(105, 0o660, 236),
    ),
    "/dev/kfd not passed to Docker": Machine(
        {".dockerenv": "", "dev/kfd": None},
        {"kfd": Expected("error", "in this container (docker)", "--group-add $(stat", "modprobe")},
        device=DeviceFile(105, 0o660, 236),
    ),
    "/dev/kfd not passed to Incus": Machine(
        LXC | kernel("7.0.13+deb13-amd64") | {"dev/kfd": None},
        {"kfd": Expected("error", "in this container (lxc)", "incus config device add NAME kfd")},
    ),
    "/dev/kfd not passed to LXC": Machine(
        LXC | {"dev/kfd": None},
        {"kfd": Expected("error", "in this container (lxc)", "dev0: /dev/kfd", "modprobe")},
    ),
    "no /dev/kfd although amdgpu is loaded": Machine(
        {"dev/kfd": None},
        {"kfd": Expected("error", "though amdgpu is loaded", "dmesg", "modprobe")},
    ),
    "no udev rule for the device files": Machine(
        {},
        both_devices(Expected("error", "belongs to root:root", "70-kfd.rules", "usermod")),
        errno.EACCES,
        DeviceFile(0, 0o600, 236),
    ),
    "device files that only root may open": Machine(
        {},
        both_devices(Expected("error", "its mode 0600", "70-kfd.rules", "usermod")),
        errno.EACCES,
        DeviceFile(105, 0o600, 236),
    ),
    "user not in the group render": Machine(
        {"proc/self/status": "Uid:\t1000\t1000\nGid:\t1000\t1000\nGroups:\t1000 \n"},
        {
            "groups": Expected(
                "warning", "not in the render group", "usermod -aG render", reboot=False
            ),
            **both_devices(
                Expected("error", "only root and the group render", "usermod -aG render")
            ),
        },
        errno.EACCES,
        DeviceFile(105, 0o660, 236),
    ),
    "device files open to all users": Machine(
        {"proc/self/status": "Uid:\t1000\t1000\nGid:\t1000\t1000\nGroups:\t1000 \n"},
        device=DeviceFile(105, 0o666, 236),
    ),
    "/dev/kfd belongs to the group video": Machine(
        {"etc/group": "video:x:39:user\nuser:x:1000:\n"}, device=DeviceFile(39, 0o660, 236)
    ),
}

SETTINGS = {
    "an override with the GPU's own architecture": Machine(
        environ(HSA_OVERRIDE_GFX_VERSION="11.5.1"),
        {"environment": Expected("info", "changes nothing", "unset HSA_OVERRIDE", reboot=False)},
    ),
    "an override that makes another GPU gfx1151": Machine(
        DISCRETE
        | environ(
            HSA_OVERRIDE_GFX_VERSION="11.5.1",
            ROCR_VISIBLE_DEVICES="1",
            CONDA_OVERRIDE_AMDGPU_ARCH="11.5.1",
        ),
        {
            "environment": Expected(
                "error", "programs that see gfx1100 mistake it", "unset HSA_OVERRIDE", reboot=False
            )
        },
    ),
    "an override of the GPU's KFD node": Machine(
        environ(HSA_OVERRIDE_GFX_VERSION_1="11.0.0"),
        {
            "environment": Expected(
                "error", "HSA_OVERRIDE_GFX_VERSION_1=11.0.0", "unset HSA_OVERRIDE_GFX_VERSION_1"
            )
        },
    ),
    "an override of another KFD node": Machine(environ(HSA_OVERRIDE_GFX_VERSION_2="10.3.0")),
    "a debugging variable": Machine(
        environ(AMD_SERIALIZE_KERNEL="3"),
        {
            "environment": Expected(
                "warning", "AMD_SERIALIZE_KERNEL=3", "unset AMD_SERIALIZE_KERNEL"
            )
        },
    ),
    "torch's cache of memory is off": Machine(
        environ(PYTORCH_NO_CUDA_MEMORY_CACHING="1"),
        {"environment": Expected("warning", "CACHING=1", "unset PYTORCH_NO_CUDA_MEMORY_CACHING")},
    ),
    "debugging variables that are off": Machine(
        environ(PYTORCH_NO_HIP_MEMORY_CACHING="0", AMD_LOG_LEVEL="")
    ),
    "the wheels' own libraries in LD_LIBRARY_PATH": Machine(
        VENV
        | environ(
            VIRTUAL_ENV="/home/user/venv",
            CONDA_PREFIX="",
            LD_LIBRARY_PATH=f"/{VENV_SITE}/_rocm_sdk_core/lib",
        )
        | torch(VENV_SITE, "2.13.0+rocm10.0.0", hip="7.15.2"),
    ),
    "a machine that runs on battery": Machine(
        {"sys/class/power_supply/AC0/online": "0\n"}, {"power": Expected("warning", "battery")}
    ),
    "CPU governor powersave without an energy preference": Machine(
        {"sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n"},
        {"power": Expected("warning", "governor is powersave", "cpupower", reboot=False)},
    ),
    "CPU governor powersave with an energy preference": Machine(
        {
            f"{CPUFREQ}/scaling_governor": "powersave\n",
            f"{CPUFREQ}/energy_performance_preference": "balance_performance\n",
        },
        {"power": Expected("info", "bandwidth was 3 % higher")},
    ),
    "tuned with the profile powersave": Machine(
        {"etc/tuned/active_profile": "powersave\n"},
        {"power": Expected("warning", "tuned's profile is powersave", "tuned-adm profile")},
    ),
    "power-profiles-daemon with the profile power-saver": Machine(
        {"var/lib/power-profiles-daemon/state.ini": "[State]\nProfile=power-saver\n"},
        {"power": Expected("warning", "power-saver", "powerprofilesctl set performance")},
    ),
    "GPU's power profile is POWER_SAVING": Machine(
        {f"{GPU}/pp_power_profile_mode": " 0 BOOTUP_DEFAULT :\n 2 POWER_SAVING*:\n 5 COMPUTE :\n"},
        {"power": Expected("warning", "POWER_SAVING", "echo 0", reboot=False)},
    ),
    "GPU's performance level is manual": Machine(
        {f"{GPU}/power_dpm_force_performance_level": "manual\n"},
        {"power": Expected("info", "level is manual", "echo auto")},
    ),
    "GPU's power management turned off": Machine(
        {"proc/cmdline": "amd_iommu=off amdgpu.dpm=0\n"},
        {"power": Expected("warning", "amdgpu.dpm=0", "--remove-args=amdgpu.dpm=0", reboot=True)},
    ),
    "options that replace the GPU's scheduler": Machine(
        {"proc/cmdline": "amd_iommu=off amdgpu.uni_mes=0 amdgpu.sched_policy=2\n"},
        {"options": Expected("warning", "amdgpu.uni_mes=0", "--remove-args=amdgpu.uni_mes=0")},
    ),
    "short lockup timeout": Machine(
        {"proc/cmdline": "amd_iommu=off amdgpu.lockup_timeout=1000,5000\n"},
        {"options": Expected("warning", "reset after 1000 ms", "lockup_timeout=20000")},
    ),
    "no lockup timeout for the first ring": Machine(
        {"proc/cmdline": "amd_iommu=off amdgpu.lockup_timeout=-1,5000\n"},
        {"options": Expected("warning", "reset after 5000 ms", "lockup_timeout=20000")},
    ),
    "long lockup timeout": Machine(
        kernel("7.0.4-200.fc44.x86_64")
        | {"proc/cmdline": "amd_iommu=off amdgpu.lockup_timeout=20000\n"},
    ),
    "an option that changes the mask of power features": Machine(
        {"etc/modprobe.d/amdgpu.conf": "options amdgpu ppfeaturemask=0xffff7fff\n"},
        {"options": Expected("info", "ppfeaturemask=0xffff7fff", "ppfeaturemask=[^ ]*")},
    ),
    "an option that also turns on OverDrive": Machine(
        {"etc/modprobe.d/amdgpu.conf": "options amdgpu ppfeaturemask=0xfff7ffff\n"},
        {"options": Expected("")},
    ),
    "an option that turns on all power features": Machine(
        {"proc/cmdline": "amd_iommu=off amdgpu.ppfeaturemask=0xffffffff\n"},
        {"options": Expected("")},
    ),
    "an option that turns off the GPU's dynamic clocks": Machine(
        {"proc/cmdline": "amd_iommu=off amdgpu.ppfeaturemask=0xfffffffe\n"},
        {"options": Expected("info", "0xfffffffe turns off power features", "--remove-args")},
    ),
    "a mask of power features that amdgpu does not accept": Machine(
        {"proc/cmdline": "amd_iommu=off amdgpu.ppfeaturemask=all\n"},
        {"options": Expected("")},
    ),
    "a pages_limit in MiB instead of pages": Machine(
        {
            "proc/cmdline": "amd_iommu=off ttm.pages_limit=122880\n",
            "sys/module/ttm/parameters/pages_limit": "122880\n",
            f"{GPU}/mem_info_gtt_total": f"{122880 * 4096}\n",
        },
        {
            "gtt": Expected("warning", "is a number of pages, of 4 KiB", "pages_limit=31719424"),
            "vllm-memory": Expected("warning", "a model does not fit: 0 GiB are usable"),
        },
    ),
    "an empty ROCR_VISIBLE_DEVICES": Machine(
        environ(ROCR_VISIBLE_DEVICES=""),
        {"gpu": Expected("error", "ROCR_VISIBLE_DEVICES= hides", "unset ROCR_VISIBLE_DEVICES")},
    ),
    "an empty HIP_VISIBLE_DEVICES": Machine(environ(HIP_VISIBLE_DEVICES="")),
    "a misspelt option": Machine(
        {"proc/cmdline": "amd_iommu=off ttm.page_limit=31457280\n"},
        {"gtt": Expected("warning", "no such option", "--remove-args=ttm.page_limit", reboot=True)},
    ),
    "options for amdttm, which only DKMS installs": Machine(
        {
            "proc/cmdline": "amd_iommu=off amdttm.pages_limit=31457280\n",
            "sys/module/ttm/parameters/pages_limit": f"{62 * GIB // 4096}\n",
            f"{GPU}/mem_info_gtt_total": f"{62 * GIB}\n",
        },
        {
            "gtt": Expected(
                "warning", "amdttm is not loaded", "options ttm pages_limit", reboot=True
            )
        },
    ),
    "gttsize in a file of modprobe.d": Machine(
        {
            "etc/modprobe.d/amdgpu.conf": "options amdgpu gttsize=65536\n",
            f"{GPU}/mem_info_gtt_total": f"{64 * GIB}\n",
        },
        {
            "gtt": Expected(
                "warning",
                "caps GTT at 64 GiB",
                "/etc/modprobe.d/amdgpu.conf && sudo dracut",
                "options ttm",
                reboot=True,
            )
        },
    ),
    "a memory limit of a container": Machine(
        {
            ".dockerenv": "",
            "sys/fs/cgroup/memory.max": f"{16 * GIB}\n",
            "proc/mounts": "shm /dev/shm tmpfs rw,nosuid,size=65536k 0 0\n",
        },
        {
            "container": Expected(
                "warning", "16 GiB of 125; /dev/shm has 64 MiB", "--shm-size 8g", reboot=False
            )
        },
    ),
    "a memory limit of a service": Machine(
        {
            "proc/self/cgroup": "0::/system.slice/vllm.service\n",
            "sys/fs/cgroup/system.slice/vllm.service/memory.max": f"{32 * GIB}\n",
        },
        {"container": Expected("warning", "32 GiB of 125", "MemoryMax")},
    ),
    "an LXC container with a share of the memory": Machine(
        LXC | {"proc/meminfo": f"MemTotal: {32 * 2**20} kB\nMemAvailable: {30 * 2**20} kB\n"},
    ),
    "old kernel under LXC": Machine(
        LXC | kernel("6.17.2-1-pve") | DEBIAN,
        {"kernel": Expected("error", "older than 6.18.4", "on the host: sudo apt update")},
    ),
}

OTHERS = KERNELS | DRIVERS | DEVICES | SETTINGS
