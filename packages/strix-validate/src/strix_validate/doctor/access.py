# SPDX-License-Identifier: BSD-3-Clause
"""The doctor's checks of the device files: do they exist, and may this user open them."""

import errno
import re

from strix_validate.checks import Result
from strix_validate.doctor import containers, hardware
from strix_validate.doctor._verdicts import error, fine, known, need_gpu, warning
from strix_validate.doctor.tree import DeviceFile, Tree

_JOIN = "sudo usermod -aG {},video $USER, then log in again"
_PASS = {
    "lxc": "on the host: dev0: /dev/kfd,gid=GID and dev1: /dev/dri/renderD128,gid=GID in "
    "/etc/pve/lxc/ID.conf, with GID of render in the container, then pct reboot ID; with Incus: "
    "incus config device add NAME kfd unix-char source=/dev/kfd gid=GID, and add NAME gpu gpu",
    "docker": "on the host, recreate the container with --device /dev/kfd --device /dev/dri "
    "--group-add $(stat -c %g /dev/kfd)",
    "kubepods": "request amd.com/gpu: 1 from ROCm's k8s-device-plugin, with supplementalGroups of "
    "stat -c %g /dev/kfd on the node",
    "flatpak": "flatpak override --user --device=all APP, and start it again; from flatpak 1.18 on "
    "--device=dri is enough",
    "": "recreate the container with --device /dev/kfd --device /dev/dri --group-add keep-groups",
}
#: The number that a user namespace shows for owners that it does not map.
_UNMAPPED = 65534
_LXC = "https://github.com/Hal0ai/hal0/issues/420"
_STALE = "https://github.com/ROCm/legacy-rocm-build/issues/5379"
_NUMBERS = "https://github.com/kyuz0/amd-strix-halo-vllm-toolboxes/issues/6"


def _pass_devices(kind: str) -> str:
    """Return how a container gets the devices, and a group that may open them."""
    return _PASS.get(kind, _PASS[""])


def kfd(tree: Tree) -> Result:
    """/dev/kfd opens for reading and writing. Mode bits would not show what a container or
    sandbox forbids:
    https://rocm.docs.amd.com/projects/install-on-linux/en/latest/install/prerequisites.html"""
    need_gpu(tree)
    return _open(tree, "dev/kfd")


def render(tree: Tree) -> Result:
    """The GPU's render node opens for reading and writing; ROCm needs it as well as /dev/kfd:
    https://rocm.docs.amd.com/projects/install-on-linux/en/latest/install/prerequisites.html"""
    need_gpu(tree)
    return _open(tree, _render_node(tree))


def _render_node(tree: Tree) -> str:
    """Return the render node of the GPU; where KFD does not tell it, the first one."""
    gpus = [tree.ours, *tree.gpus] if tree.ours else tree.gpus
    minors = [node.render_minor for node in gpus if node.render_minor >= 128]
    if minors:
        return f"dev/dri/renderD{minors[0]}"
    nodes = tree.glob("dev/dri/renderD*")
    return f"dev/dri/{nodes[0].name}" if nodes else "dev/dri/renderD128"


def groups(tree: Tree) -> Result:
    """The user is in the group that may open the devices, render in most distributions; without it
    only root can:
    https://rocm.docs.amd.com/projects/install-on-linux/en/latest/install/prerequisites.html"""
    need_gpu(tree)
    names = known(tree.groups, "the user's groups")
    listed = ", ".join(sorted(names))
    devices = [tree.read_device(tree.path(name)) for name in ("dev/kfd", _render_node(tree))]
    may_open = all(device and _may_open(tree, device) for device in devices)
    if may_open or names & {"render", "root"}:
        return fine(groups=listed)
    message = "the user is not in the group render"
    if containers.kind(tree):
        return warning(message, _pass_devices(containers.kind(tree)), _NUMBERS, groups=listed)
    return warning(message, _JOIN.format("render"), groups=listed)


def _may_open(tree: Tree, device: DeviceFile) -> bool:
    """Return whether mode bits let the user read and write a device."""
    is_member = device.group in (tree.group_ids or ())
    return device.mode & 0o006 == 0o006 or (is_member and device.mode & 0o060 == 0o060)


def _open(tree: Tree, name: str) -> Result:
    try:
        tree.open_device(tree.path(name))
    except FileNotFoundError:
        return _missing(tree, name)
    except PermissionError as failure:
        if failure.errno == errno.EPERM:
            return _forbidden(tree, name)
        return _denied(tree, name)
    except OSError as failure:
        return _unusable(tree, name, failure)
    return fine(opened=f"/{name}")


def _missing(tree: Tree, name: str) -> Result:
    message, kind = f"/{name} does not exist", containers.kind(tree)
    if kind:
        return error(f"{message} in this container ({kind})", _pass_devices(kind))
    if tree.driver_of_ours == "vfio-pci":
        return error(f"{message}: the GPU is bound to vfio-pci", "see doctor/gpu")
    if not tree.path("sys/module/amdgpu").is_dir() and hardware.find_obstacle(tree):
        return error(f"{message}: amdgpu is not loaded", "see doctor/gpu")
    if not tree.path("sys/module/amdgpu").is_dir():
        return error(
            message,
            "sudo modprobe amdgpu; in a container: --device /dev/kfd --device /dev/dri",
        )
    return error(
        f"{message}, though amdgpu is loaded",
        "sudo dmesg | grep -i -e amdgpu -e kfd; in a container: --device /dev/kfd --device "
        "/dev/dri",
    )


def _forbidden(tree: Tree, name: str) -> Result:
    """EPERM: the control group of a container forbids the device, whoever owns it."""
    kind = containers.kind(tree)
    message = f"/{name}: operation not permitted: the control group's device rules forbid it"
    if kind == "lxc":
        fix = (
            "on the host: lxc.cgroup2.devices.allow: c MAJOR:* rwm for kfd and 226, with MAJOR of "
            "grep kfd /proc/devices; or dev0: /dev/kfd in /etc/pve/lxc/ID.conf"
        )
        return error(message, fix, _LXC)
    if not kind:
        fix = "in a systemd service: DeviceAllow=/dev/kfd rw, DeviceAllow=char-drm rw, and no "
        return error(message, fix + "PrivateDevices")
    return error(message, _pass_devices(kind))


def _denied(tree: Tree, name: str) -> Result:
    """EACCES: the node's group, its mode or SELinux keeps the user out."""
    device, kind = tree.read_device(tree.path(name)), containers.kind(tree)
    ids, message = tree.group_ids or set(), f"/{name}: permission denied"
    if device is None:
        return _denied_unseen(tree, message, kind)
    owner = tree.group_names.get(device.group, str(device.group))
    if _may_open(tree, device):
        if (tree.read("sys/fs/selinux/enforce") or "") == "1" or kind in ("podman", "toolbox"):
            return error(
                f"{message}, although the group {owner} may open it: SELinux forbids it",
                "sudo setsebool -P container_use_devices=true, or --security-opt label=disable",
            )
        return error(
            f"{message}, although the user is in its group {owner}",
            "ls -lZ /dev/kfd /dev/dri; id; a sandbox or another user namespace forbids it",
        )
    if device.group == 0:
        message += ": it belongs to root:root, so that no group helps"
        if kind:
            return error(message, _pass_devices(kind), _LXC)
        rule = 'KERNEL=="kfd|renderD*", GROUP="render", MODE="0660"'
        file = "/etc/udev/rules.d/70-kfd.rules"
        return error(message, f"echo '{rule}' | sudo tee {file} && sudo udevadm trigger")
    if kind and (device.group == _UNMAPPED or device.group not in ids):
        named = f" ({owner})" if device.group in tree.group_names else ""
        message += f": its group is {device.group}{named}, and the user is in "
        message += ", ".join(map(str, sorted(ids))) or "none"
        return error(message, _pass_devices(kind), _NUMBERS)
    return error(f"{message}: only the group {owner} may open it", _JOIN.format(owner))


def _denied_unseen(tree: Tree, message: str, kind: str) -> Result:
    """Judge a denial where the node's owner is not known, as in a copy of a machine."""
    if "render" not in (tree.groups or ()) and not kind:
        return error(message, f"{_JOIN.format('render')}; in a container: --group-add keep-groups")
    where = f"in this container ({kind})" if kind else "in LXC often root:root, in other containers"
    message += f": the node's group is not one of the user's ({where} the host's number)"
    fix = _pass_devices(kind) if kind else f"compare ls -ln /dev/kfd with id; {_PASS['lxc']}; else "
    return error(message, fix if kind else fix + _PASS[""], _NUMBERS)


def _unusable(tree: Tree, name: str, failure: OSError) -> Result:
    """Judge EINVAL and the like: another driver's number, or a KFD that did not start."""
    message, kind = f"/{name} cannot be opened: {failure.strerror}", containers.kind(tree)
    device = tree.read_device(tree.path(name))
    majors = re.findall(r"^ *(\d+) kfd$", tree.read("proc/devices") or "", re.M)
    if name == "dev/kfd" and device and majors and str(device.major) != majors[0]:
        message += f": its major number is {device.major}, but KFD's is {majors[0]}"
        return error(message, _stale_node(kind), _STALE)
    if name == "dev/kfd" and kind and device is None:
        message += ": in a container often a stale major number, which changes with the kernel"
        fix = f"compare ls -l /dev/kfd with grep kfd /proc/devices; {_stale_node(kind)}"
        return error(message, fix, _STALE)
    return error(message, "sudo dmesg | grep -i kfd")


def _stale_node(kind: str) -> str:
    if kind == "lxc":
        return f"{_PASS['lxc']}, in place of mknod and lxc.mount.entry"
    return "recreate the node or the container: --device /dev/kfd takes the host's numbers"
