# SPDX-License-Identifier: BSD-3-Clause
"""Read a machine: /proc, /sys, /etc and /dev of this machine, or of a copy in a folder.

Whatever is missing, unreadable or malformed reads as None: the doctor never crashes on it.
"""

import os
import re
import stat
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from strix_validate import TARGET
from strix_validate.json_file import small_text

#: PCI's id of AMD, and of the devices that doctor may be about (libdrm's amdgpu.ids).
AMD = "0x1002"
DEVICES = {"gfx1151": "0x1586", "gfx1150": "0x150e", "gfx1152": "0x1114", "gfx1153": "0x1902"}

#: Packages that have the firmware of AMD's GPUs, the more special first.
_FIRMWARE_PACKAGES = (
    "linux-firmware-amd-graphics",
    "firmware-amd-graphics",
    "pve-firmware",
    "linux-firmware",
)
#: The same of rpm's distributions: Fedora's, openSUSE's, and those that do not split it.
_FIRMWARE_RPMS = ("amd-gpu-firmware", "kernel-firmware-amdgpu", "linux-firmware")


def first_version(output: str) -> str | None:
    """Return the first version that rpm prints, which says in words what is not installed."""
    return next((line for line in output.splitlines() if line[:1].isdecimal()), None)


def open_device(path: Path) -> None:
    """Open a device for reading and writing, as ROCm does; mode bits alone do not tell."""
    os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))


@dataclass(frozen=True)
class DeviceFile:
    """Who may open a device: its group's number and its mode bits; and its driver's number."""

    group: int
    mode: int
    major: int


def read_device(path: Path) -> DeviceFile | None:
    """Return what a device file tells; None of a copy's plain file, which tells nothing."""
    try:
        status = path.stat()
    except OSError:
        return None
    if not stat.S_ISCHR(status.st_mode):
        return None
    return DeviceFile(status.st_gid, stat.S_IMODE(status.st_mode), os.major(status.st_rdev))


@dataclass(frozen=True)
class Node:
    """A GPU in KFD's topology; version as 110501 for gfx1151, units None if they are not known."""

    version: int
    render_minor: int
    units: int | None = None
    #: Kernels with the fixed size of the context save area (CWSR) tell it.
    exports_cwsr: bool = False
    #: Its number among KFD's nodes, CPUs included.
    number: int = 0

    @property
    def name(self) -> str:
        """The name in LLVM: the major version in decimal, minor and stepping in hexadecimal."""
        major, minor, step = self.version // 10000, self.version // 100 % 100, self.version % 100
        return f"gfx{major}{minor:x}{step:x}"


@dataclass(frozen=True)
class Tree:
    """A machine below root. In a copy, the environment comes from /proc/self/environ and the user's
    groups from /proc/self/status, and no program runs."""

    root: Path = Path("/")
    open_device: Callable[[Path], None] = field(default=open_device)
    read_device: Callable[[Path], DeviceFile | None] = field(default=read_device)
    #: Measures copies with a HIP library; None for the way of doctor.copies, on this machine only.
    measure_copies: Callable[[Path], dict[str, float]] | None = None

    @property
    def is_live(self) -> bool:
        """Whether this is the machine itself, not a recorded tree."""
        return self.root.resolve() == Path("/")

    def path(self, name: str) -> Path:
        """Return the path of a file of the machine."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str | None:
        """Return a text file without blanks at its ends, or None."""
        return small_text(self.path(name))

    def read_at(self, file: Path) -> str | None:
        """Return the text of a file that glob found."""
        return self.read(str(file.relative_to(self.root)))

    def link(self, file: Path) -> str | None:
        """Return the last part of what a symbolic link names."""
        try:
            return file.readlink().name
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """Return the integer in a file."""
        text = self.read(name)
        return int(text) if text and re.fullmatch(r"-?\d{1,20}", text) else None

    def glob(self, pattern: str) -> list[Path]:
        """Return files below root, sorted; the pattern has no leading slash."""
        try:
            return sorted(self.root.glob(pattern))
        except OSError:
            return []

    @cached_property
    def environ(self) -> Mapping[str, str]:
        """The environment of this process, or the recorded one."""
        if self.is_live:
            return os.environ
        pairs = (self.read("proc/self/environ") or "").split("\0")
        return dict(pair.split("=", 1) for pair in pairs if "=" in pair)

    @cached_property
    def release(self) -> str | None:
        """The kernel release, as `uname -r` prints it."""
        return self.read("proc/sys/kernel/osrelease")

    @cached_property
    def distribution(self) -> dict[str, str]:
        """/etc/os-release; ID is "unknown" without one."""
        lines = (self.read("etc/os-release") or "").splitlines()
        pairs = (line.split("=", 1) for line in lines if "=" in line)
        return {"ID": "unknown"} | {key: value.strip("\"'") for key, value in pairs}

    @property
    def is_wsl(self) -> bool:
        """Whether Windows runs this kernel: its releases end in -microsoft-standard-WSL2."""
        return "microsoft" in (self.release or "").lower()

    @cached_property
    def memory(self) -> int | None:
        """MemTotal in bytes, without what the BIOS reserves for the GPU."""
        return self._meminfo("MemTotal")

    @cached_property
    def available(self) -> int | None:
        """MemAvailable in bytes: what can be used without swapping."""
        return self._meminfo("MemAvailable")

    def _meminfo(self, name: str) -> int | None:
        found = re.search(rf"^{name}:\s+(\d{{1,15}}) kB", self.read("proc/meminfo") or "", re.M)
        return int(found.group(1)) * 1024 if found else None

    @cached_property
    def gpus(self) -> list[Node]:
        """GPUs in KFD's topology, without CPUs and malformed nodes.

        Their order is that of the nodes, by which ROCR_VISIBLE_DEVICES counts.
        """
        found = []
        files = self.glob("sys/class/kfd/kfd/topology/nodes/*/properties")
        for file in sorted(files, key=lambda file: (len(file.parent.name), file)):
            lines = re.findall(r"^(\w+) (\d{1,20})$", self.read_at(file) or "", re.M)
            values = {key: int(value) for key, value in lines}
            if version := values.get("gfx_target_version", 0):
                simds, per_unit = values.get("simd_count"), values.get("simd_per_cu")
                units = simds // per_unit if simds is not None and per_unit else None
                minor, size = values.get("drm_render_minor", 0), values.get("cwsr_size", 0)
                number = int(file.parent.name) if file.parent.name.isdecimal() else 0
                found.append(Node(version, minor, units, size > 0, number))
        return found

    @property
    def ours(self) -> Node | None:
        """The first GPU in KFD's topology that the packages are for."""
        return next((node for node in self.gpus if node.name == TARGET), None)

    @cached_property
    def has_ours(self) -> bool:
        """Whether a PCI device has that GPU's id, with or without a driver."""
        return any(map(self._is_ours, self.glob("sys/bus/pci/devices/*")))

    def _is_ours(self, folder: Path) -> bool:
        """Return whether the sysfs folder of a PCI device has the GPU's id."""
        found = [self.read_at(folder / name) for name in ("vendor", "device")]
        return found == [AMD, DEVICES.get(TARGET)]

    @cached_property
    def driver_of_ours(self) -> str | None:
        """The driver that is bound to the GPU on the PCI bus: amdgpu, vfio-pci; None without."""
        folders = self.glob("sys/bus/pci/devices/*")
        return next((self.link(f / "driver") for f in folders if self._is_ours(f)), None)

    @cached_property
    def gpu_folder(self) -> str | None:
        """The sysfs folder with the sizes of that GPU's memory, or of the first GPU's.

        Relative to root.
        """
        files = self.glob("sys/class/drm/card*/device/mem_info_vram_total")
        folders = sorted((file.parent for file in files), key=self._is_ours, reverse=True)
        return str(folders[0].relative_to(self.root)) if folders else None

    @cached_property
    def group_ids(self) -> set[int] | None:
        """Numbers of the user's groups."""
        status = self.read("proc/self/status") or ""
        ids = re.search(r"^Groups:(.*)$", status, re.M)
        if not ids:
            return None
        words = [*ids.group(1).split(), *re.findall(r"^Gid:\s+(\d+)", status, re.M)]
        return {int(word) for word in words if re.fullmatch(r"\d{1,10}", word)}

    @cached_property
    def group_names(self) -> dict[int, str]:
        """Names of groups by number."""
        lines = (line.split(":") for line in (self.read("etc/group") or "").splitlines())
        pairs = [line for line in lines if len(line) > 2 and re.fullmatch(r"\d{1,10}", line[2])]
        return {int(line[2]): line[0] for line in pairs}

    @property
    def is_root(self) -> bool:
        """Whether the effective user is the superuser."""
        return bool(re.search(r"^Uid:\s+\d+\s+0\b", self.read("proc/self/status") or "", re.M))

    @cached_property
    def groups(self) -> set[str] | None:
        """Names of the user's groups; "root" is among them for the superuser."""
        if self.group_ids is None:
            return None
        names = {name for number, name in self.group_names.items() if number in self.group_ids}
        return names | ({"root"} if self.is_root else set())

    @cached_property
    def packages(self) -> dict[str, str]:
        """Versions of dpkg's installed packages by name."""
        versions = {}
        for entry in (self.read("var/lib/dpkg/status") or "").split("\n\n"):
            lines = dict(re.findall(r"^(\w+): (.*)$", entry, re.M))
            is_installed = "deinstall" not in lines.get("Status", "")
            if is_installed and "Package" in lines and "Version" in lines:
                versions[lines["Package"]] = lines["Version"]
        return versions

    @cached_property
    def firmware(self) -> str | None:
        """Version of the GPU's firmware package, according to dpkg, pacman or rpm."""
        for name in _FIRMWARE_PACKAGES:
            if name in self.packages:
                return self.packages[name]
        for name in ("linux-firmware-amdgpu", "linux-firmware"):
            for folder in self.glob(f"var/lib/pacman/local/{name}-[0-9]*"):
                return folder.name.removeprefix(f"{name}-")
        if not (self.is_live and self.path("usr/bin/rpm").exists()):
            return None
        command = ["/usr/bin/rpm", "-q", "--qf", "%{VERSION}\\n", *_FIRMWARE_RPMS]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return first_version(done.stdout)

    @cached_property
    def glibc(self) -> tuple[int, ...] | None:
        """The version of the C library, or None."""
        if self.is_live:
            text = os.confstr("CS_GNU_LIBC_VERSION") or ""
        else:
            folders = ("lib*", "lib*/*", "usr/lib*", "usr/lib/*")
            files = [file for folder in folders for file in self.glob(f"{folder}/libc.so.6")]
            text = self.read(str(files[0].relative_to(self.root))) or "" if files else ""
        found = re.search(r"(?:glibc|release version) (\d+)\.(\d+)", text)
        return tuple(map(int, found.groups())) if found else None

    @cached_property
    def home(self) -> Path:
        """The user's folder."""
        return self.path(self.environ.get("HOME", "/root"))

    @cached_property
    def prefix(self) -> Path | None:
        """The active conda environment, if there is a folder of that name."""
        name = self.environ.get("CONDA_PREFIX")
        place = self.path(name or "")
        # Path.is_dir raises OSError for a name that is too long
        return place if name and os.path.isdir(place) else None  # noqa: PTH112
