# SPDX-License-Identifier: BSD-3-Clause
"""Detect whether this is a container, and read its memory limits.

The kernel and the devices of a container are those of the host.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from strix_validate.doctor.tree import Tree

#: Files that a container's manager writes, by manager. The first existing file shows the manager.
_MARKS = {
    "toolbox": "run/.toolboxenv",
    "podman": "run/.containerenv",
    "docker": ".dockerenv",
}
#: Names of container managers that appear in the path of process 1's control group.
_GROUP_NAMES = ("lxc", "docker", "kubepods", "libpod")
#: A limit of this number of bytes or more means "no limit". Version 1 of control groups reports
#: nearly 2**63 bytes if there is no limit.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class _GroupVersion:
    """Where a version of control groups keeps the limit and the use of memory.

    Attributes:
        line: Pattern of the line of /proc/self/cgroup that names the process' own group.
        root: The folder of the groups.
        limit_file: The file of a group's limit in bytes.
        use_file: The file of a group's use in bytes.
        reclaimable: The key in memory.stat for memory that is used but can be reclaimed.
    """

    line: str
    root: str
    limit_file: str
    use_file: str
    reclaimable: str


_VERSIONS = (
    _GroupVersion(
        line=r"^0::/(\S*)$",
        root="sys/fs/cgroup",
        limit_file="memory.max",
        use_file="memory.current",
        reclaimable="inactive_file",
    ),
    _GroupVersion(
        line=r"^\d+:(?:\S+,)?memory(?:,\S+)?:/(\S*)$",
        root="sys/fs/cgroup/memory",
        limit_file="memory.limit_in_bytes",
        use_file="memory.usage_in_bytes",
        reclaimable="total_inactive_file",
    ),
)


def detect(tree: Tree) -> str:
    """Return the kind of container in which this process runs.

    Returns:
        "lxc", "toolbox", "distrobox", "podman", "docker", another manager's name, or "" on a host.
    """
    for name, file in _MARKS.items():
        if not tree.path(file).exists():
            continue
        if name == "podman" and "DISTROBOX_ENTER_PATH" in tree.environ:
            return "distrobox"
        return name
    manager = (
        tree.environ.get("container")
        or tree.read("run/systemd/container")
        or _read_manager_of_init(tree)
    )
    if manager:
        return manager
    if re.search(r"^lxcfs ", tree.read("proc/mounts") or "", re.M):
        return "lxc"
    group = tree.read("proc/1/cgroup") or ""
    return next((name for name in _GROUP_NAMES if name in group), "")


def _read_manager_of_init(tree: Tree) -> str:
    """Return the variable `container` of process 1, or "" if it has none."""
    pairs = (tree.read("proc/1/environ") or "").split("\0")
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name == "container" and value:
            return value
    return ""


def read_memory_limit(tree: Tree) -> int | None:
    """Return the bytes that this process' control groups may use, or None without a limit."""
    limits = [limit for limit, _ in _read_memory_groups(tree)]
    return min(limits, default=None)


def read_available_memory(tree: Tree) -> int | None:
    """Return the bytes that this process can use without swapping, or None if unknown.

    This is the machine's available memory, or less if a control group of the process leaves less.
    """
    if tree.available is None:
        return None
    available = tree.available
    for limit, used in _read_memory_groups(tree):
        available = min(available, max(limit - used, 0))
    return available


def _read_memory_groups(tree: Tree) -> Iterator[tuple[int, int]]:
    """Yield the limit and the use in bytes of each control group that limits this process."""
    groups = tree.read("proc/self/cgroup") or ""
    for version in _VERSIONS:
        match = re.search(version.line, groups, re.M)
        parts = match[1].split("/") if match else []
        if ".." in parts:
            # The group is outside of this cgroup namespace, so only the namespace's root is read.
            parts = []
        for depth in range(len(parts) + 1):
            folder = "/".join([version.root, *parts[:depth]])
            limit = tree.number(f"{folder}/{version.limit_file}")
            if limit and limit < _NO_LIMIT:
                yield limit, _read_memory_use(tree, folder, version)


def _read_memory_use(tree: Tree, folder: str, version: _GroupVersion) -> int:
    """Return the bytes that a control group uses, without those that the kernel can reclaim."""
    statistics = tree.read(f"{folder}/memory.stat") or ""
    line = rf"^{version.reclaimable} (\d{{1,15}})$"
    cache = re.search(line, statistics, re.M)
    used = tree.number(f"{folder}/{version.use_file}") or 0
    return used - int(cache[1]) if cache else used


def read_shared_memory(tree: Tree) -> int | None:
    """Return the size of /dev/shm in bytes, or None if its mount states none."""
    mount = r"^\S+ /dev/shm tmpfs \S*\bsize=(\d{1,15})([kmg]?)"
    size = re.search(mount, tree.read("proc/mounts") or "", re.M)
    if not size:
        return None
    shifts = {"": 0, "k": 10, "m": 20, "g": 30}
    return int(size[1]) << shifts[size[2]]
