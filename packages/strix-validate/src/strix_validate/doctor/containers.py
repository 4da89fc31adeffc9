# SPDX-License-Identifier: BSD-3-Clause
"""Whether this is a container, and what its limits are: kernel and devices are then the host's."""

import re

from strix_validate.doctor.tree import Tree

#: Files that a container's manager writes, by manager; the first that exists counts.
_MARKS = {"toolbox": "run/.toolboxenv", "podman": "run/.containerenv", "docker": ".dockerenv"}


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
    """Return the bytes that this process' control group may use, or None without a limit."""
    own = re.search(r"^0::/(\S*)$", tree.read("proc/self/cgroup") or "", re.M)
    parts = own[1].split("/") if own else []
    folders = ["/".join(parts[:depth]) for depth in range(len(parts) + 1)]
    names = [f"sys/fs/cgroup/{folder}/memory.max" for folder in folders]
    names.append("sys/fs/cgroup/memory/memory.limit_in_bytes")
    limits = [tree.number(name) for name in names]
    # version 1 writes nearly 2**63 for no limit
    return min((limit for limit in limits if limit and limit < 1 << 60), default=None)


def shared_memory(tree: Tree) -> int | None:
    """Return the bytes of /dev/shm, or None if its mount names no size."""
    mount = r"^\S+ /dev/shm tmpfs \S*\bsize=(\d{1,15})([kmg]?)"
    size = re.search(mount, tree.read("proc/mounts") or "", re.M)
    if not size:
        return None
    return int(size[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[size[2]]
