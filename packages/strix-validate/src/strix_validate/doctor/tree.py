# SPDX-License-Identifier: BSD-3-Clause
"""Read a machine: /proc, /sys, /etc and /dev of this machine, or of a copy in a folder.

If a file is missing, unreadable or malformed, the value that is read from it is None, empty or a
default, so that no file crashes the doctor.
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
from strix_validate.json_file import read_small_text

#: AMD's vendor id on the PCI bus.
AMD = "0x1002"
#: PCI device ids of the GPUs that the doctor can look for (libdrm's amdgpu.ids).
DEVICES = {
    "gfx1151": "0x1586",
    "gfx1150": "0x150e",
    "gfx1152": "0x1114",
    "gfx1153": "0x1902",
}

#: dpkg's packages that may have the firmware of AMD's GPUs, the most specific first.
_FIRMWARE_PACKAGES = (
    "linux-firmware-amd-graphics",
    "firmware-amd-graphics",
    "pve-firmware",
    "linux-firmware",
)
#: rpm's packages that may have the firmware of AMD's GPUs: Fedora's, openSUSE's, and the package
#: with all firmware in other distributions.
_FIRMWARE_RPMS = (
    "amd-gpu-firmware",
    "kernel-firmware-amdgpu",
    "linux-firmware",
)


def find_first_version(output: str) -> str | None:
    """Return the first version in rpm's output.

    For a package that is not installed, rpm prints a sentence instead of a version.
    """
    for line in output.splitlines():
        if line[:1].isdecimal():
            return line
    return None


def open_device(path: Path) -> None:
    """Open a device for reading and writing, as ROCm does.

    Mode bits alone do not show whether a container or a sandbox allows the access.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))


@dataclass(frozen=True)
class DeviceFile:
    """The group, the mode and the driver of a device file.

    Attributes:
        group: The id of the group that owns the file.
        mode: The mode bits.
        major: The major number, which identifies the driver.
    """

    group: int
    mode: int
    major: int


def read_device(path: Path) -> DeviceFile | None:
    """Return the group, mode and driver of a device file.

    Returns:
        None if the file is missing, or a plain file as in a copy of a machine.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    if not stat.S_ISCHR(status.st_mode):
        return None
    return DeviceFile(
        group=status.st_gid,
        mode=stat.S_IMODE(status.st_mode),
        major=os.major(status.st_rdev),
    )


@dataclass(frozen=True)
class Node:
    """A GPU in KFD's topology.

    Attributes:
        version: KFD's gfx_target_version, such as 110501 for gfx1151.
        render_minor: The minor number of its render node.
        units: Number of compute units, or None if unknown.
        exports_cwsr: Whether KFD exports the size of the context save area (CWSR). Kernels with the
            fix for this size export it.
        number: Its number among KFD's nodes, which include CPUs.
    """

    version: int
    render_minor: int
    units: int | None = None
    exports_cwsr: bool = False
    number: int = 0

    @property
    def name(self) -> str:
        """The name in LLVM: the major version in decimal, minor and stepping in hexadecimal."""
        major = self.version // 10000
        minor = self.version // 100 % 100
        step = self.version % 100
        return f"gfx{major}{minor:x}{step:x}"


@dataclass(frozen=True)
class Tree:
    """A machine, or a copy of its files.

    The user's groups come from /proc/self/status. In a copy, the environment comes from
    /proc/self/environ, and no program is run.

    Attributes:
        root: The folder that contains the machine's files.
        open_device: Opens a device file; raises OSError if it cannot.
        read_device: Reads a device file's group, mode and driver.
        measure_copies: Measures the rate of copies with a HIP library, in bytes per second by kind
            of source mapping. If it is None, doctor.copies measures the rate, on the machine itself
            only.
    """

    root: Path = Path("/")
    open_device: Callable[[Path], None] = field(default=open_device)
    read_device: Callable[[Path], DeviceFile | None] = field(default=read_device)
    measure_copies: Callable[[Path], dict[str, float]] | None = None

    @property
    def is_live(self) -> bool:
        """Whether this is the machine itself, not a copy."""
        return self.root.resolve() == Path("/")

    def path(self, name: str) -> Path:
        """Return the path of a file of the machine."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str | None:
        """Return the text of a file without blanks at its ends, or None if it cannot be read."""
        return read_small_text(self.path(name))

    def read_at(self, file: Path) -> str | None:
        """Return the text of a file that glob returned."""
        return self.read(str(file.relative_to(self.root)))

    def link(self, file: Path) -> str | None:
        """Return the last part of a symbolic link's target."""
        try:
            return file.readlink().name
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """Return the integer in a file."""
        text = self.read(name)
        if text and re.fullmatch(r"-?\d{1,20}", text):
            return int(text)
        return None

    def glob(self, pattern: str) -> list[Path]:
        """Return files below root, sorted; the pattern has no leading slash."""
        try:
            return sorted(self.root.glob(pattern))
        except OSError:
            return []

    @cached_property
    def environ(self) -> Mapping[str, str]:
        """The environment variables of this process or, in a copy, of the recorded process."""
        if self.is_live:
            return os.environ
        pairs = (self.read("proc/self/environ") or "").split("\0")
        return dict(pair.split("=", 1) for pair in pairs if "=" in pair)

    @cached_property
    def release(self) -> str | None:
        """The kernel's release, as `uname -r` prints it."""
        return self.read("proc/sys/kernel/osrelease")

    @cached_property
    def distribution(self) -> dict[str, str]:
        """The variables of /etc/os-release; ID is "unknown" if the file does not state it."""
        variables = {"ID": "unknown"}
        for line in (self.read("etc/os-release") or "").splitlines():
            key, separator, value = line.partition("=")
            if separator:
                variables[key] = value.strip("\"'")
        return variables

    @property
    def is_wsl(self) -> bool:
        """Whether Windows runs this kernel: its releases end in -microsoft-standard-WSL2."""
        return "microsoft" in (self.release or "").lower()

    @cached_property
    def memory(self) -> int | None:
        """MemTotal in bytes, without what the BIOS reserves for the GPU."""
        return self._read_meminfo("MemTotal")

    @cached_property
    def available(self) -> int | None:
        """MemAvailable in bytes: what can be used without swapping."""
        return self._read_meminfo("MemAvailable")

    def _read_meminfo(self, name: str) -> int | None:
        text = self.read("proc/meminfo") or ""
        match = re.search(rf"^{name}:\s+(\d{{1,15}}) kB", text, re.M)
        return int(match[1]) * 1024 if match else None

    @cached_property
    def gpus(self) -> list[Node]:
        """The GPUs in KFD's topology, without CPUs and malformed nodes.

        They are in the order of KFD's nodes. The numbers in ROCR_VISIBLE_DEVICES follow this order.
        """
        files = self.glob("sys/class/kfd/kfd/topology/nodes/*/properties")
        files.sort(key=lambda file: (len(file.parent.name), file))
        nodes = []
        for file in files:
            node = self._read_node(file)
            if node:
                nodes.append(node)
        return nodes

    def _read_node(self, file: Path) -> Node | None:
        """Return the GPU that a node's properties file describes, or None if the node is no GPU."""
        lines = re.findall(r"^(\w+) (\d{1,20})$", self.read_at(file) or "", re.M)
        properties = {key: int(value) for key, value in lines}
        version = properties.get("gfx_target_version", 0)
        if not version:
            return None
        simds = properties.get("simd_count")
        simds_per_unit = properties.get("simd_per_cu")
        units = None
        if simds is not None and simds_per_unit:
            units = simds // simds_per_unit
        name = file.parent.name
        number = int(name) if name.isdecimal() else 0
        return Node(
            version,
            properties.get("drm_render_minor", 0),
            units,
            exports_cwsr=properties.get("cwsr_size", 0) > 0,
            number=number,
        )

    @property
    def target_gpu(self) -> Node | None:
        """The target GPU: the first GPU in KFD's topology that the packages are built for."""
        for node in self.gpus:
            if node.name == TARGET:
                return node
        return None

    @cached_property
    def has_target_gpu(self) -> bool:
        """Whether a PCI device has the id of the target GPU, with or without a driver."""
        return any(map(self._is_target, self.glob("sys/bus/pci/devices/*")))

    def _is_target(self, folder: Path) -> bool:
        """Return whether the sysfs folder of a PCI device is that of the target GPU."""
        vendor = self.read_at(folder / "vendor")
        device = self.read_at(folder / "device")
        return vendor == AMD and device == DEVICES.get(TARGET)

    @cached_property
    def target_driver(self) -> str | None:
        """The driver that is bound to the target GPU, such as amdgpu or vfio-pci, or None."""
        for folder in self.glob("sys/bus/pci/devices/*"):
            if self._is_target(folder):
                return self.link(folder / "driver")
        return None

    @cached_property
    def gpu_folder(self) -> str | None:
        """The sysfs folder, relative to root, that has the sizes of the GPU's memory.

        If the machine has no target GPU, this is the folder of the first GPU.
        """
        files = self.glob("sys/class/drm/card*/device/mem_info_vram_total")
        folders = [file.parent for file in files]
        folders.sort(key=self._is_target, reverse=True)
        return str(folders[0].relative_to(self.root)) if folders else None

    @cached_property
    def group_ids(self) -> set[int] | None:
        """The ids of the user's groups."""
        status = self.read("proc/self/status") or ""
        groups = re.search(r"^Groups:(.*)$", status, re.M)
        if not groups:
            return None
        ids = [*groups[1].split(), *re.findall(r"^Gid:\s+(\d+)", status, re.M)]
        return {int(id_) for id_ in ids if re.fullmatch(r"\d{1,10}", id_)}

    @cached_property
    def group_names(self) -> dict[int, str]:
        """The names of groups by id."""
        names = {}
        for line in (self.read("etc/group") or "").splitlines():
            fields = line.split(":")
            if len(fields) > 2 and re.fullmatch(r"\d{1,10}", fields[2]):
                names[int(fields[2])] = fields[0]
        return names

    @property
    def is_root(self) -> bool:
        """Whether the effective user is the superuser."""
        status = self.read("proc/self/status") or ""
        return re.search(r"^Uid:\s+\d+\s+0\b", status, re.M) is not None

    @cached_property
    def groups(self) -> set[str] | None:
        """The names of the user's groups; "root" is among them for the superuser."""
        if self.group_ids is None:
            return None
        names = {name for number, name in self.group_names.items() if number in self.group_ids}
        if self.is_root:
            names.add("root")
        return names

    @cached_property
    def packages(self) -> dict[str, str]:
        """The versions of dpkg's installed packages by name."""
        versions = {}
        for entry in (self.read("var/lib/dpkg/status") or "").split("\n\n"):
            fields = dict(re.findall(r"^(\w+): (.*)$", entry, re.M))
            is_installed = "deinstall" not in fields.get("Status", "")
            if is_installed and "Package" in fields and "Version" in fields:
                versions[fields["Package"]] = fields["Version"]
        return versions

    @cached_property
    def firmware(self) -> str | None:
        """The version of the GPU's firmware package, according to dpkg, pacman or rpm."""
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
            process = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=20,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return find_first_version(process.stdout)

    @cached_property
    def glibc(self) -> tuple[int, ...] | None:
        """The version of the C library, or None."""
        match = re.search(r"(?:glibc|release version) (\d+)\.(\d+)", self._read_libc_version())
        return tuple(map(int, match.groups())) if match else None

    def _read_libc_version(self) -> str:
        """Return a text with glibc's version: from confstr or, in a copy, from libc.so.6."""
        if self.is_live:
            return os.confstr("CS_GNU_LIBC_VERSION") or ""
        for folder in ("lib*", "lib*/*", "usr/lib*", "usr/lib/*"):
            for file in self.glob(f"{folder}/libc.so.6"):
                return self.read_at(file) or ""
        return ""

    @cached_property
    def home(self) -> Path:
        """The user's folder."""
        return self.path(self.environ.get("HOME", "/root"))

    @cached_property
    def prefix(self) -> Path | None:
        """The active conda environment: the folder that CONDA_PREFIX names, if it exists."""
        name = self.environ.get("CONDA_PREFIX")
        if not name:
            return None
        prefix = self.path(name)
        # Path.is_dir raises OSError for a name that is too long.
        is_folder = os.path.isdir(prefix)  # noqa: PTH112
        return prefix if is_folder else None
