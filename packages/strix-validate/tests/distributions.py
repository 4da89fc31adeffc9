# SPDX-License-Identifier: BSD-3-Clause
"""Machines of many distributions: some with a Linux kernel that is too old, some without a fault.

Except on Pop!_OS, the distribution's updates do not replace the old kernel.
"""

from hosts import UBUNTU, released
from later_threads import command_line, gtt, memory, status
from other_machines import TUMBLEWEED
from strix_validate.doctor.tree import DeviceFile
from threads import CACHYOS, RESOLUTE, Expected, Machine, kernel

RELEASES = {
    **{
        f"{name}, whose updates do not bring the kernel": Machine(
            kernel(release) | files, {"kernel": Expected("error", "older", fix, never, reboot=True)}
        )
        for name, release, files, fix, never in (
            (
                "Ubuntu 22.04",
                "6.8.0-106-generic",
                released("ID=ubuntu", 'VERSION_ID="22.04"'),
                "do-release-upgrade",
                "hwe",
            ),
            (
                "Ubuntu 25.04",
                "6.14.0-37-generic",
                released("ID=ubuntu", 'VERSION_ID="25.04"'),
                "do-release-upgrade",
                "full-upgrade",
            ),
            (
                "Mint 21",
                "6.8.0-106-generic",
                released("ID=linuxmint", "ID_LIKE=ubuntu", "UBUNTU_CODENAME=jammy"),
                "do-release-upgrade",
                "hwe",
            ),
            (
                "Debian 12",
                "6.12.12+bpo-amd64",
                released("ID=debian", 'VERSION_ID="12"'),
                "upgrade to Debian 13",
                "backports linux-image",
            ),
            (
                "Proxmox VE 8",
                "6.14.11-4-bpo12-pve",
                released("ID=debian", 'VERSION_ID="12"'),
                "upgrade to Proxmox VE 9",
                "dist-upgrade",
            ),
            (
                "Leap 16",
                "6.12.0-160000.5-default",
                released('ID="opensuse-leap"', 'ID_LIKE="suse opensuse"'),
                "Kernel:stable:Backport",
                "zypper dup",
            ),
            (
                "Manjaro",
                "6.17.13-1-MANJARO",
                released("ID=manjaro", "ID_LIKE=arch"),
                "mhwd-kernel -i linux618",
                "\0",
            ),
            (
                "Rocky Linux 10",
                "6.12.0-124.8.1.el10_1.x86_64",
                released("ID=rocky", 'ID_LIKE="rhel centos fedora"'),
                "ELRepo",
                "\0",
            ),
        )
    },
    "Pop!_OS": Machine(
        kernel("6.17.9-76061709-generic")
        | released("ID=pop", 'ID_LIKE="ubuntu debian"', "UBUNTU_CODENAME=noble"),
        {"kernel": Expected("error", "older than 6.18.4", "apt full-upgrade", "hwe")},
    ),
}

#: Healthy machines with the usual settings of their distributions.
HEALTHY = {
    "Ubuntu 26.04": Machine(
        RESOLUTE | kernel("7.0.0-31-generic") | gtt(110), device=DeviceFile(105, 0o660, 236)
    ),
    "Fedora 44": Machine(
        kernel("7.1.8-200.fc44.x86_64") | status(1000, 10), device=DeviceFile(105, 0o666, 236)
    ),
    "CachyOS after a guide": Machine(
        CACHYOS
        | kernel("7.1.5-2-cachyos")
        | gtt(117.1875)
        | {
            "etc/modprobe.d/amdgpu_llm_optimized.conf": "options amdgpu gttsize=120000\n"
            "options ttm pages_limit=30720000\noptions ttm page_pool_size=30720000\n",
            "usr/lib/modprobe.d/amdgpu.conf": "options amdgpu si_support=1 cik_support=1\n",
        }
    ),
    "Debian 13 with backports": Machine(
        released("ID=debian", 'VERSION_ID="13"')
        | kernel("7.0.13+deb13-amd64")
        | gtt(108)
        | {"etc/modprobe.d/ttm.conf": "options ttm pages_limit=28311552\n"}
    ),
    "Tumbleweed": Machine(TUMBLEWEED | kernel("7.1.7-1-default") | gtt(108)),
    "Proxmox VE 9": Machine(
        released("ID=debian", 'VERSION_ID="13"') | kernel("7.0.14-8-pve") | gtt(96)
    ),
    "64 GB": Machine(
        UBUNTU
        | kernel("6.17.0-35-generic")
        | memory(62.3)
        | gtt(58)
        | command_line("amd_iommu=off ttm.pages_limit=15204352")
    ),
}

DISTRIBUTIONS = RELEASES | {f"healthy: {name}": machine for name, machine in HEALTHY.items()}
