# SPDX-License-Identifier: BSD-3-Clause
"""Whether this is a container, and what its limits are: kernel and devices are then the host's."""

import re
from collections.abc import Iterator

from strix_validate.doctor.tree import Tree

#: Files that a container's manager writes, by manager; the first that exists counts.
_MARKS = {"toolbox": "run/.toolboxenv", "podman": "run/.containerenv", "docker": ".dockerenv"}
#: Of versions 2 and 1 of control groups: the line of /proc/self/cgroup that names a process' own,
#: where groups are, the files of their limit and use, and which part of the use is given back.
_VERSIONS = (
    (r"^0::/(\S*)$", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        r"^\d+:(?:\S+,)?memory(?:,\S+)?:/(\S*)$",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def kind(tree: Tree) -> str:
    """Return "lxc", "toolbox", "podman", "docker", another manager's name, or "" on a host."""
    for name, file in _MARKS.items():
        if tree.path(file).exists():
            is_distrobox = name == "podman" and "DISTROBOX_ENTER_PATH" in tree.environ
            return "distrobox" if is_distrobox else name
    own = tree.environ.get("container") or tree.read("run/systemd/container")
    if own:
        return own
    pairs = (tree.read("proc/1/environ") or "").split("\0")
    own = next((pair[10:] for pair in pairs if pair.startswith("container=")), "")
    if own:
        return own
    if re.search(r"^lxcfs ", tree.read("proc/mounts") or "", re.M):
        return "lxc"
    groups = tree.read("proc/1/cgroup") or ""
    return next((name for name in ("lxc", "docker", "kubepods", "libpod") if name in groups), "")


def memory_limit(tree: Tree) -> int | None:
    """Return the bytes that this process' control groups may use, or None without a limit."""
    return min((limit for limit, _ in _memory_groups(tree)), default=None)


def available_memory(tree: Tree) -> int | None:
    """Return the bytes that this process can use without swapping, or None if it is not known.

    That is what the machine has available, and no more than its control groups leave.
    """
    left = [max(limit - used, 0) for limit, used in _memory_groups(tree)]
    return None if tree.available is None else min([tree.available, *left])


def _memory_groups(tree: Tree) -> Iterator[tuple[int, int]]:
    """Yield limit and use in bytes of each control group of this process that limits memory."""
    for line, root, limit_file, use_file, reclaimable in _VERSIONS:
        own = re.search(line, tree.read("proc/self/cgroup") or "", re.M)
        parts = own[1].split("/") if own else []
        # outside of this namespace of groups, where only its root can be read
        parts = [] if ".." in parts else parts
        for depth in range(len(parts) + 1):
            group = "/".join([root, *parts[:depth]])
            limit = tree.number(f"{group}/{limit_file}")
            # version 1 writes nearly 2**63 for no limit
            if limit and limit < 1 << 60:
                statistics = tree.read(f"{group}/memory.stat") or ""
                cache = re.search(rf"^{reclaimable} (\d{{1,15}})$", statistics, re.M)
                used = tree.number(f"{group}/{use_file}") or 0
                yield limit, used - (int(cache[1]) if cache else 0)


def shared_memory(tree: Tree) -> int | None:
    """Return the bytes of /dev/shm, or None if its mount names no size."""
    mount = r"^\S+ /dev/shm tmpfs \S*\bsize=(\d{1,15})([kmg]?)"
    size = re.search(mount, tree.read("proc/mounts") or "", re.M)
    if not size:
        return None
    return int(size[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[size[2]]
