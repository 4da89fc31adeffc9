# SPDX-License-Identifier: BSD-3-Clause
"""Files of mock machines for tests of the doctor: a healthy Strix Halo, and variants of it."""

import json
import os
import shutil
from pathlib import Path

GIB = 2**30
KFD = "sys/class/kfd/kfd/topology/nodes"
GPU = "sys/class/drm/card1/device"
PCI = "sys/bus/pci/devices/0000:c5:00.0"
META = "home/user/env/conda-meta"
SITE = "home/user/env/lib/python3.12/site-packages"
CONDA_FORGE = "https://conda.anaconda.org/conda-forge/linux-64"


def record(name: str, version: str, channel: str = "https://repo.prefix.dev/strix-forge") -> str:
    """Return conda-meta's record of an installed package, with the keys that are read."""
    return json.dumps({"name": name, "version": version, "build": "h1_0", "channel": channel})


def node(version: int, simds: int, minor: int = 128, more: str = "") -> str:
    """Return a GPU's properties in KFD's topology. A compute unit has two SIMDs."""
    return (
        f"cpu_cores_count 0\nsimd_count {simds}\nsimd_per_cu 2\n"
        f"gfx_target_version {version}\nvendor_id 4098\ndrm_render_minor {minor}\n{more}"
    )


#: The time at which the doctor examines the healthy machine. Triton is two days old and the caches
#: are one day old. The package rich is newer, but must not make the caches stale.
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
    f"{KFD}/1/properties": node(110501, 80),
    f"{PCI}/vendor": "0x1002\n",
    f"{PCI}/device": "0x1586\n",
    f"{GPU}/vendor": "0x1002\n",
    f"{GPU}/device": "0x1586\n",
    f"{GPU}/mem_info_vram_total": f"{GIB // 2}\n",
    f"{GPU}/mem_info_gtt_total": f"{120 * GIB}\n",
    "sys/module/amdgpu/initstate": "live\n",
    "proc/cmdline": "root=/dev/sda amd_iommu=off quiet\n",
    "sys/module/ttm/parameters/pages_limit": f"{120 * GIB // 4096}\n",
    "sys/kernel/debug/dri/1/amdgpu_firmware_info": "VCE feature version: 0, firmware version: 0x0\n"
    "MES feature version: 1, firmware version: 0x00000080\n",
    "var/lib/dpkg/status": "Package: bash\nVersion: 5\n\nPackage: linux-firmware\n"
    "Version: 20260110.git1-0ubuntu1\n\n",
    "dev/kfd": "",
    "dev/dri/renderD128": "",
    # The check doctor/copies loads this library.
    "home/user/env/lib/libamdhip64.so.7": "",
    "lib64/libc.so.6": "GNU C Library (GNU libc) stable release version 2.42.\n",
    f"{META}/triton-3.7.1-h1_0.json": record("triton", "3.7.1"),
    f"{META}/pytorch-2.13.0-h1_0.json": record("pytorch", "2.13.0"),
    f"{META}/rich-1-h1_0.json": record("rich", "1", CONDA_FORGE),
    f"{SITE}/triton-3.7.1.dist-info/INSTALLER": "conda\n",
    f"{SITE}/torch-2.13.0.dist-info/INSTALLER": "conda",
    "home/user/.cache/comgr/entry": "",
}


def make(root: Path, changes: dict[str, str | Path | None]) -> Path:
    """Write the files of the healthy machine, with changes.

    Args:
        root: The folder of the machine.
        changes: The content of files by path, None for an absent file, or the path to which a
            symbolic link points.
    """
    for name, content in (HEALTHY | changes).items():
        file = root / name
        if content is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            file.symlink_to(content)
        elif content is not None:
            file.write_text(content)
    ages = {"triton-3.7.1": 2, "pytorch-2.13.0": 2, "rich-1": 0}
    ages = {f"env/conda-meta/{name}-h1_0.json": age for name, age in ages.items()}
    for name, age in [*ages.items(), (".cache/comgr/entry", 1)]:
        if (root / "home/user" / name).exists():
            os.utime(root / "home/user" / name, (NOW - age * 86400,) * 2)
    return root


def without_gpu(root: Path, changes: dict[str, str | Path | None] | None = None) -> Path:
    make(root, changes or {})
    for name in ("sys/class/kfd", "sys/bus/pci", "sys/class/drm", "sys/module/amdgpu", "dev"):
        shutil.rmtree(root / name)
    return root


#: The environment variables with which pixi behaves as on a Strix Halo machine.
OVERRIDE, OVERRIDE_ARCH = "CONDA_OVERRIDE_AMDGPU=0", "CONDA_OVERRIDE_AMDGPU_ARCH=11.5.1"
#: A Radeon RX 7900 XTX, which KFD lists before the APU.
DISCRETE = {
    f"{KFD}/1/properties": node(110000, 192),
    f"{KFD}/2/properties": node(110501, 80, 129),
    "sys/class/drm/card0/device/vendor": "0x1002\n",
    "sys/class/drm/card0/device/device": "0x744c\n",
    "sys/class/drm/card0/device/mem_info_vram_total": f"{24 * GIB}\n",
    "sys/class/drm/card0/device/mem_info_gtt_total": f"{62 * GIB}\n",
    "dev/dri/renderD129": "",
}
#: The GPU has a driver, but this kernel's KFD does not know the GPU.
WITHOUT_KFD = {
    f"{KFD}/1/properties": None,
    f"{GPU}/driver": Path("/sys/bus/pci/drivers/amdgpu"),
    f"{PCI}/driver": Path("/sys/bus/pci/drivers/amdgpu"),
}
HALO = {"__amdgpu": "0", "__amdgpu_arch": "11.5.1"}
#: For each machine: the changes to the healthy machine's files, and the virtual packages that pixi
#: detects there.
MACHINES = {
    "alone": ({}, HALO),
    "beside-discrete": (DISCRETE, {"__amdgpu": "0", "__amdgpu_arch": "11.0.0"}),
    # All users can read sysfs, but this user may not open /dev/kfd.
    "without-rights": (
        {"proc/self/status": "Uid:\t1000\nGid:\t1000\nGroups:\t1000\n"},
        HALO,
    ),
    "older-kernel": ({"proc/sys/kernel/osrelease": "6.17.7-300.fc43.x86_64\n"}, HALO),
    "kernel-without-kfd": (WITHOUT_KFD, {"__amdgpu": "0"}),
    "without-gpu": ({f"{KFD}/1/properties": None}, {}),
    "integrated-larger": ({f"{KFD}/2/properties": node(110003, 24)}, HALO),
    "same-size": (
        {f"{KFD}/2/properties": node(120001, 80)},
        {"__amdgpu": "0", "__amdgpu_arch": "12.0.1"},
    ),
    "size-unknown": (
        {
            f"{KFD}/1/properties": "gfx_target_version 90010\n",
            f"{KFD}/2/properties": "gfx_target_version 110501\nsimd_count 80\nsimd_per_cu 0\n",
        },
        HALO,
    ),
}
#: Overrides that rattler refuses, so that every command of pixi ends with an error.
REFUSED = [("CONDA_OVERRIDE_AMDGPU", value) for value in ("1", "true", "gfx1151", "0.0")]
REFUSED += [
    ("CONDA_OVERRIDE_AMDGPU_ARCH", value)
    for value in ("gfx1151", "11.5", "11.5.1.0", "11.5.x", "0x11.5.1")
]


def released(*lines: str) -> dict[str, str]:
    """Return the file that names a distribution."""
    return {"etc/os-release": "".join(f"{line}\n" for line in lines)}


ARCH = released("ID=arch")
DEBIAN = released("ID=debian")
UBUNTU = released("ID=ubuntu", 'VERSION_ID="24.04"')
OSTREE = {"run/ostree-booted": ""}


def environ(**values: str) -> dict[str, str]:
    pairs = {"HOME": "/home/user", "CONDA_PREFIX": "/home/user/env"} | values
    return {"proc/self/environ": "\0".join(f"{k}={v}" for k, v in pairs.items()) + "\0"}


def mes(version: int) -> dict[str, str]:
    """Return the file that names the scheduler's loaded firmware."""
    text = f"MES feature version: 1, firmware version: {version:#010x}\n"
    return {"sys/kernel/debug/dri/1/amdgpu_firmware_info": text}


#: Each fault has changes to the healthy machine's files, and for each check that reports it: the
#: state, the severity, a part of the message, and a part of the fix.
FAULTS = {
    "gfx1150": (
        {f"{KFD}/1/properties": node(110500, 32)},
        {"gpu": ("failed", "error", "gfx1150", "run doctor with gpu_arch=gfx1150")},
    ),
    "hidden-by-rocr": (
        environ(ROCR_VISIBLE_DEVICES="1"),
        {"gpu": ("failed", "error", "ROCR_VISIBLE_DEVICES=1 hides", "unset ROCR_VISIBLE_DEVICES")},
    ),
    "hidden-by-hip": (
        environ(HIP_VISIBLE_DEVICES="-1", CUDA_VISIBLE_DEVICES="0"),
        {"gpu": ("failed", "error", "HIP_VISIBLE_DEVICES=-1 hides", "unset HIP_VISIBLE_DEVICES")},
    ),
    "hidden-by-cuda": (
        environ(CUDA_VISIBLE_DEVICES="2"),
        {"gpu": ("failed", "error", "hides the GPU", "unset CUDA_VISIBLE_DEVICES")},
    ),
    "hidden-behind-discrete": (
        DISCRETE | environ(ROCR_VISIBLE_DEVICES="0", CONDA_OVERRIDE_AMDGPU_ARCH="11.5.1"),
        {
            "gpu": (
                "failed",
                "error",
                "hides the GPU, whose number is 1",
                "export ROCR_VISIBLE_DEVICES=1",
            )
        },
    ),
    "beside-discrete-numbered-twice": (
        # HIP's number counts the two devices that ROCr shows, in ROCr's order
        DISCRETE
        | environ(
            ROCR_VISIBLE_DEVICES="1,0", HIP_VISIBLE_DEVICES="1", CONDA_OVERRIDE_AMDGPU_ARCH="11.5.1"
        ),
        {"gpu": ("failed", "error", "whose number is 0", "export HIP_VISIBLE_DEVICES=0")},
    ),
    "beside-discrete-by-uuid": (
        DISCRETE | environ(ROCR_VISIBLE_DEVICES="GPU-0123", CONDA_OVERRIDE_AMDGPU_ARCH="11.5.1"),
        {"gpu": ("passed", "warning", "is visible besides", "export ROCR_VISIBLE_DEVICES=1")},
    ),
    "iommu-on": (
        {"proc/cmdline": "quiet amd_iommu=pt\n"},
        {"iommu": ("passed", "info", "the NPU", "grubby --update-kernel=ALL --args=amd_iommu=off")},
    ),
    "iommu-on-ostree": (
        {"proc/cmdline": "quiet\n", **OSTREE},
        {"iommu": ("passed", "info", "5 to 12 %", "rpm-ostree kargs --append=amd_iommu=off")},
    ),
    "driver-missing": (
        {
            f"{KFD}/1/properties": None,
            "sys/module/amdgpu/initstate": None,
            "dev/kfd": None,
            f"{GPU}/mem_info_vram_total": None,
        },
        {
            "gpu": ("failed", "error", "PCI bus", "modprobe amdgpu"),
            "pixi": ("passed", "warning", "no AMD GPU", f"{OVERRIDE} {OVERRIDE_ARCH}"),
            "driver": ("failed", "error", "not loaded", "modprobe amdgpu"),
            "kfd": ("failed", "error", "does not exist", "--device"),
        },
    ),
    "kernel-without-kfd": (
        WITHOUT_KFD,
        {
            "gpu": ("failed", "error", "though it has the driver amdgpu", "dmesg"),
            "pixi": ("passed", "warning", "pixi detects __amdgpu=0,", f"export {OVERRIDE_ARCH}"),
        },
    ),
    "beside-discrete": (
        DISCRETE,
        {
            "gpu": (
                "passed",
                "warning",
                "gfx1100 is visible besides gfx1151",
                "export ROCR_VISIBLE_DEVICES=1",
            ),
            "pixi": ("passed", "warning", "__amdgpu_arch=11.0.0", f"export {OVERRIDE_ARCH}"),
        },
    ),
    "beside-two-discrete": (
        DISCRETE | {f"{KFD}/10/properties": node(120001, 192, 130), "dev/dri/renderD130": ""},
        {
            "gpu": (
                "passed",
                "warning",
                "gfx1100, gfx1201 are visible besides gfx1151",
                "export ROCR_VISIBLE_DEVICES=1",
            ),
            "pixi": ("passed", "warning", "__amdgpu_arch=12.0.1", f"export {OVERRIDE_ARCH}"),
        },
    ),
    "beside-discrete-second": (
        {
            f"{KFD}/1/properties": None,
            f"{KFD}/2/properties": node(110501, 80),
            f"{KFD}/10/properties": node(110000, 192, 129),
        },
        {
            "gpu": (
                "passed",
                "warning",
                "gfx1100 is visible besides gfx1151",
                "export ROCR_VISIBLE_DEVICES=0",
            ),
            "pixi": ("passed", "warning", "__amdgpu_arch=11.0.0", f"export {OVERRIDE_ARCH}"),
        },
    ),
    "beside-discrete-without-render-node": (
        DISCRETE
        | {"dev/dri/renderD129": None}
        | environ(ROCR_VISIBLE_DEVICES="1", CONDA_OVERRIDE_AMDGPU_ARCH="11.5.1"),
        {"render": ("failed", "error", "renderD129 does not exist", "--device")},
    ),
    "beside-discrete-mended": (
        DISCRETE | environ(ROCR_VISIBLE_DEVICES="1", CONDA_OVERRIDE_AMDGPU_ARCH="11.5.1"),
        {},
    ),
    "override-hides-the-gpu": (
        environ(CONDA_OVERRIDE_AMDGPU=""),
        {"pixi": ("passed", "warning", "no AMD GPU", f"export {OVERRIDE}")},
    ),
    "torch-of-pypi": (
        {f"{SITE}/torch-2.15.0.dist-info/INSTALLER": "uv-pixi\n"},
        {
            "packages": (
                "failed",
                "error",
                "torch 2.15.0 was installed by uv-pixi",
                "pixi update --no-install torch && pixi clean && pixi install",
            )
        },
    ),
    "triton-of-pypi-over-ours": (
        {f"{SITE}/triton-3.7.1.dist-info/INSTALLER": "pip"},
        {"packages": ("failed", "error", "triton 3.7.1 was installed by pip", "pixi clean")},
    ),
    "torch-of-amds-wheels": (
        {
            f"{SITE}/torch-2.13.0.dist-info/INSTALLER": None,
            f"{SITE}/torch-2.13.0+rocm10.0.0.dist-info/INSTALLER": "conda\n",
        },
        {
            "packages": (
                "failed",
                "error",
                "2.13.0+rocm10.0.0 is AMD's build: head dims above 256",
                "forge build pytorch",
            )
        },
    ),
    "torch-of-conda-forge": (
        {f"{META}/pytorch-2.13.0-h1_0.json": record("pytorch", "2.13.0", CONDA_FORGE)},
        {"packages": ("failed", "error", "pytorch 2.13.0 is conda-forge's", "channel-priority")},
    ),
    "dkms": (
        {"sys/module/amdgpu/version": "6.12.12\n"},
        {"driver": ("passed", "warning", "DKMS", "amdgpu-install --uninstall")},
    ),
    **{
        f"kernel-{name}old": (
            {"proc/sys/kernel/osrelease": f"{release}\n"} | files,
            {"kernel": ("failed", "error", f"older than {bound}", fix)},
        )
        for name, release, bound, files, fix in (
            ("", "6.17.7-300.fc43.x86_64", "6.18.4", {}, "dnf upgrade"),
            ("arch-", "6.18.3-arch1-1", "6.18.4", ARCH, "sudo pacman -Syu"),
            ("ubuntu-hwe-", "6.17.0-14-generic", "6.17.0-19", UBUNTU, "linux-generic-hwe-24.04"),
            ("ubuntu-mainline-", "6.17.0-061700-generic", "6.18.4", UBUNTU, "apt install"),
            ("ubuntu-oem-", "6.14.0-1017-oem", "6.14.0-1018", UBUNTU, "apt install"),
            (
                "ubuntu-26-",
                "6.17.0-14-generic",
                "6.17.0-19",
                released("ID=ubuntu", 'VERSION_ID="26.04"', "UBUNTU_CODENAME=resolute"),
                "linux-generic-hwe-26.04",
            ),
            (
                "ubuntu-interim-",
                "6.17.0-5-generic",
                "6.17.0-19",
                released("ID=ubuntu", 'VERSION_ID="25.10"'),
                "apt full-upgrade",
            ),
            (
                "mint-",
                "6.17.0-14-generic",
                "6.17.0-19",
                released("ID=linuxmint", 'ID_LIKE="ubuntu debian"', "UBUNTU_CODENAME=noble"),
                "linux-generic-hwe-24.04",
            ),
            (
                "bazzite-",
                "6.17.7-ba25.fc43.x86_64",
                "6.18.4",
                released("ID=bazzite", 'ID_LIKE="fedora"') | OSTREE,
                "rpm-ostree upgrade",
            ),
            (
                "tumbleweed-",
                "6.18.1-1-default",
                "6.18.4",
                released('ID="opensuse-tumbleweed"', 'ID_LIKE="opensuse suse"'),
                "zypper dup",
            ),
            ("nixos-", "6.18.1", "6.18.4", released("ID=nixos"), "pkgs.linuxPackages_latest"),
            ("unknown-", "6.18.1", "6.18.4", released("ID=void"), "install Linux 6.18.4 or newer"),
            ("proxmox-", "6.17.2-1-pve", "6.18.4", DEBIAN, "apt dist-upgrade"),
            ("backports-", "6.16.12+deb13-amd64", "6.18.4", DEBIAN, "-backports linux-image-amd64"),
        )
    },
    "kernel-old-with-backports": (
        {
            "proc/sys/kernel/osrelease": "6.12.74-amd64\n",
            f"{KFD}/1/properties": node(110501, 80, more="cwsr_size 13701120\n"),
        },
        {},
    ),
    "mes-suspect": (
        mes(0x86),
        {"firmware": ("passed", "warning", "MES 0x86", "newer linux-firmware")},
    ),
    "firmware-bad": (
        {"var/lib/dpkg/status": "Package: linux-firmware\nVersion: 20251125-1\n\n"},
        {"firmware": ("failed", "error", "20251125", "dnf upgrade")},
    ),
    "firmware-bad-pacman": (
        {
            "var/lib/dpkg/status": None,
            **ARCH,
            "sys/kernel/debug/dri/1/amdgpu_firmware_info": None,
            "var/lib/pacman/local/linux-firmware-20251125-2/desc": "",
        },
        {"firmware": ("failed", "error", "20251125-2", "sudo pacman -Syu")},
    ),
    "firmware-bad-mes": (
        {"var/lib/dpkg/status": None} | mes(0x83),
        {"firmware": ("failed", "error", "the loaded MES 0x83 is known bad", "linux-firmware")},
    ),
    "firmware-loaded-before-the-upgrade": (
        mes(0x83),
        {
            "firmware": (
                "failed",
                "error",
                "MES 0x83, older than the installed linux-firmware 2026",
                "sudo dracut --force",
            )
        },
    ),
    "firmware-bad-debian": (
        {
            "var/lib/dpkg/status": "Package: firmware-amd-graphics\nVersion: 20251125-1\n\n",
            **DEBIAN,
        },
        {"firmware": ("failed", "error", "20251125-1", "firmware-amd-graphics 20260110")},
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
        {f"{KFD}/1/properties": node(110501, 80, 129)},
        {"render": ("failed", "error", "renderD129", "--device")},
    ),
    "not-in-group": (
        {
            "proc/self/status": "Uid:\t1000\t1000\t1000\t1000\nGid:\t1000\t1000\t1000\t1000\n"
            "Groups:\t1000\n"
        },
        {"groups": ("passed", "warning", "not in the render group", "usermod -aG render,video")},
    ),
    "carve-out-large": (
        {
            f"{GPU}/mem_info_vram_total": f"{96 * GIB}\n",
            "proc/meminfo": f"MemTotal: {30 * 2**20} kB\n",
            "sys/module/ttm/parameters/pages_limit": f"{25 * GIB // 4096}\n",
        },
        {
            "carve-out": ("passed", "warning", "96 GiB", "512 MB in the BIOS, or to the smallest"),
            "gtt": ("passed", "info", "fix doctor/carve-out first", ""),
        },
    ),
    **{
        f"gtt-default{name}": (
            {"sys/module/ttm/parameters/pages_limit": f"{62 * GIB // 4096}\n"} | files,
            {"gtt": ("passed", "warning", "62 of 125 GiB", fix)},
        )
        for name, files, fix in (
            (
                "",
                {},
                "options ttm pages_limit=31719424 page_pool_size=31719424' | sudo tee "
                "/etc/modprobe.d/ttm.conf && sudo dracut --force",
            ),
            ("-mint", released("ID=linuxmint", "ID_LIKE=ubuntu"), "update-initramfs -u"),
            ("-debian", DEBIAN, "update-initramfs -u"),
            ("-arch", ARCH, "sudo mkinitcpio -P"),
            ("-bazzite", OSTREE, "--append=ttm.pages_limit=31719424"),
            ("-nixos", released("ID=nixos"), 'boot.kernelParams = [ "ttm.pages_limit=31719424"'),
            ("-unknown", released("ID=void"), "; then rebuild the initramfs"),
        )
    },
    "gtt-all": (
        {
            "sys/module/ttm/parameters/pages_limit": f"{125 * GIB // 4096}\n",
            f"{GPU}/mem_info_gtt_total": f"{125 * GIB}\n",
        },
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
    "not-activated": (
        environ(MIOPEN_FIND_MODE="FAST") | {f"{META}/rocm-sdk-core-10.0.0-h1_0.json": "{}"},
        {
            "environment": (
                "passed",
                "warning",
                "ROCPROFILER_QUEUE_INTERPOSITION is unset: programs",
                "export ROCPROFILER_QUEUE_INTERPOSITION=0",
            )
        },
    ),
    "loader-path": (
        {"etc/ld.so.conf.d/10-rocm.conf": "/opt/rocm/lib\n", "opt/rocm/README": ""},
        {"stray-rocm": ("passed", "warning", "loader's path", "rm /etc/ld.so.conf.d/10-rocm.conf")},
    ),
    "glibc-old": (
        {"lib64/libc.so.6": "GNU C Library stable release version 2.27.\n"},
        {"glibc": ("failed", "error", "2.27 is older", "upgrade")},
    ),
}
