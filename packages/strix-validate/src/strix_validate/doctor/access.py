# SPDX-License-Identifier: BSD-3-Clause
"""The doctor's checks of the device files: whether they exist, and who may open them."""

import errno
import re

from strix_validate.checks import Result
from strix_validate.doctor import containers, hardware
from strix_validate.doctor._verdicts import error, fine, need_gpu, need_value, warning
from strix_validate.doctor.tree import DeviceFile, Tree

_JOIN = "sudo usermod -aG {},video $USER, then log in again"
#: How to give a container the devices and a group that may open them, by kind of container. The key
#: "" stands for any other kind.
_PASS = {
    "lxc": "on the host: add dev0: /dev/kfd,gid=GID and dev1: /dev/dri/renderD128,gid=GID to "
    "/etc/pve/lxc/ID.conf, where GID is the id of the container's group render, then pct reboot "
    "ID; with Incus: incus config device add NAME kfd unix-char source=/dev/kfd gid=GID, and incus "
    "config device add NAME gpu gpu",
    "docker": "on the host, recreate the container with --device /dev/kfd --device /dev/dri "
    "--group-add $(stat -c %g /dev/kfd)",
    "kubepods": "request amd.com/gpu: 1 from ROCm's k8s-device-plugin, and set supplementalGroups "
    "to the number that stat -c %g /dev/kfd prints on the node",
    "flatpak": "flatpak override --user --device=all APP, and start it again; from flatpak 1.18 on "
    "--device=dri is enough",
    "": "recreate the container with --device /dev/kfd --device /dev/dri --group-add keep-groups",
}
#: The group id that a user namespace shows in place of an unmapped group.
_UNMAPPED = 65534
_LXC = "https://github.com/Hal0ai/hal0/issues/420"
_STALE = "https://github.com/ROCm/legacy-rocm-build/issues/5379"
_NUMBERS = "https://github.com/kyuz0/amd-strix-halo-vllm-toolboxes/issues/6"


def _suggest_devices(container: str) -> str:
    """Return how to give a container the devices and a group that may open them."""
    return _PASS.get(container, _PASS[""])


def kfd(tree: Tree) -> Result:
    """/dev/kfd opens for reading and writing. The check opens it, because mode bits do not show
    what a container or sandbox forbids:
    https://rocm.docs.amd.com/projects/install-on-linux/en/latest/install/prerequisites.html"""
    need_gpu(tree)
    return _open(tree, "dev/kfd")


def render(tree: Tree) -> Result:
    """The GPU's render node opens for reading and writing; ROCm needs it as well as /dev/kfd:
    https://rocm.docs.amd.com/projects/install-on-linux/en/latest/install/prerequisites.html"""
    need_gpu(tree)
    return _open(tree, _find_render_node(tree))


def _find_render_node(tree: Tree) -> str:
    """Return the render node of the target GPU, else of another GPU, else the first in /dev/dri."""
    gpus = tree.gpus
    if tree.target_gpu:
        gpus = [tree.target_gpu, *gpus]
    for gpu in gpus:
        if gpu.render_minor >= 128:
            return f"dev/dri/renderD{gpu.render_minor}"
    nodes = tree.glob("dev/dri/renderD*")
    return f"dev/dri/{nodes[0].name}" if nodes else "dev/dri/renderD128"


def groups(tree: Tree) -> Result:
    """The user may open the devices: as root, as a member of the devices' group, or because
    everyone may. The group is render in most distributions:
    https://rocm.docs.amd.com/projects/install-on-linux/en/latest/install/prerequisites.html"""
    need_gpu(tree)
    names = need_value(tree.groups, "the user's groups")
    measured = {"groups": ", ".join(sorted(names))}
    if names & {"render", "root"}:
        return fine(**measured)
    files = ("dev/kfd", _find_render_node(tree))
    devices = [tree.read_device(tree.path(file)) for file in files]
    if all(device and _may_open(tree, device) for device in devices):
        return fine(**measured)
    message = "the user is not in the render group"
    container = containers.detect(tree)
    if container:
        return warning(message, _suggest_devices(container), _NUMBERS, **measured)
    return warning(message, _JOIN.format("render"), **measured)


def _may_open(tree: Tree, device: DeviceFile) -> bool:
    """Return whether mode bits let the user read and write a device."""
    if device.mode & 0o006 == 0o006:
        return True
    is_member = device.group in (tree.group_ids or ())
    return is_member and device.mode & 0o060 == 0o060


def _open(tree: Tree, name: str) -> Result:
    """Open a device file, and judge the failure if there is one."""
    try:
        tree.open_device(tree.path(name))
    except FileNotFoundError:
        return _judge_missing(tree, name)
    except PermissionError as failure:
        if failure.errno == errno.EPERM:
            return _judge_forbidden(tree, name)
        return _judge_denied(tree, name)
    except OSError as failure:
        return _judge_unusable(tree, name, failure)
    return fine(opened=f"/{name}")


def _judge_missing(tree: Tree, name: str) -> Result:
    message = f"/{name} does not exist"
    container = containers.detect(tree)
    if container:
        message += f" in this container ({container})"
        return error(message, _suggest_devices(container))
    if tree.target_driver == "vfio-pci":
        return error(f"{message}: the GPU is bound to vfio-pci", "see doctor/gpu")
    if tree.path("sys/module/amdgpu").is_dir():
        return error(
            f"{message}, though amdgpu is loaded",
            "sudo dmesg | grep -i -e amdgpu -e kfd; a container needs --device /dev/kfd --device "
            "/dev/dri",
        )
    if hardware.find_obstacle(tree):
        return error(f"{message}: amdgpu is not loaded", "see doctor/gpu")
    return error(
        message,
        "sudo modprobe amdgpu; a container needs --device /dev/kfd --device /dev/dri",
    )


def _judge_forbidden(tree: Tree, name: str) -> Result:
    """Judge EPERM: the control group of a container or service forbids the device to all users."""
    container = containers.detect(tree)
    message = f"/{name}: operation not permitted: the control group's device rules forbid it"
    if container == "lxc":
        fix = (
            "on the host: lxc.cgroup2.devices.allow: c MAJOR:* rwm, once with the MAJOR that grep "
            "kfd /proc/devices prints and once with 226; or dev0: /dev/kfd in /etc/pve/lxc/ID.conf"
        )
        return error(message, fix, _LXC)
    if not container:
        fix = (
            "in a systemd service: DeviceAllow=/dev/kfd rw, DeviceAllow=char-drm rw, and no "
            "PrivateDevices"
        )
        return error(message, fix)
    return error(message, _suggest_devices(container))


def _judge_denied(tree: Tree, name: str) -> Result:
    """Judge EACCES: the device's group or mode, SELinux, or a sandbox denies access."""
    message = f"/{name}: permission denied"
    container = containers.detect(tree)
    device = tree.read_device(tree.path(name))
    if device is None:
        return _judge_denied_without_owner(tree, message, container)
    group = tree.group_names.get(device.group, str(device.group))
    if _may_open(tree, device):
        return _judge_denied_member(tree, message, container, group)
    obstacle = ""
    if device.group == 0:
        obstacle = "it belongs to root:root"
    elif device.mode & 0o060 != 0o060:
        obstacle = f"its mode {device.mode:04o} does not admit its group"
    if obstacle:
        message += f": {obstacle}, so joining a group does not help"
        if container:
            return error(message, _suggest_devices(container), _LXC)
        rule = 'KERNEL=="kfd|renderD*", GROUP="render", MODE="0660"'
        file = "/etc/udev/rules.d/70-kfd.rules"
        return error(message, f"echo '{rule}' | sudo tee {file} && sudo udevadm trigger")
    ids = tree.group_ids or set()
    if container and (device.group == _UNMAPPED or device.group not in ids):
        label = str(device.group)
        if device.group in tree.group_names:
            label += f" ({group})"
        listed = ", ".join(map(str, sorted(ids))) or "none"
        message += f": its group is {label}, and the user's groups are {listed}"
        return error(message, _suggest_devices(container), _NUMBERS)
    return error(f"{message}: only root and the group {group} may open it", _JOIN.format(group))


def _judge_denied_member(tree: Tree, message: str, container: str, group: str) -> Result:
    """Judge a denial if the mode bits let the user open the device."""
    enforces_selinux = tree.read("sys/fs/selinux/enforce") == "1"
    if container and (enforces_selinux or container in ("podman", "toolbox")):
        return error(
            f"{message}, although its mode and its group {group} allow it: SELinux may forbid it",
            "sudo setsebool -P container_use_devices=true, or start the container with "
            "--security-opt label=disable",
        )
    return error(
        f"{message}, although its mode and its group {group} allow it",
        "compare the output of ls -lZ /dev/kfd /dev/dri with that of id; SELinux, a sandbox or "
        "another user namespace may forbid access",
    )


def _judge_denied_without_owner(tree: Tree, message: str, container: str) -> Result:
    """Judge a denial if the device's owner is unknown, as in a copy of a machine."""
    if container:
        message += (
            ": the device's group is probably not one of the user's; in the container "
            f"({container}), the device keeps its group id from the host"
        )
        return error(message, _suggest_devices(container), _NUMBERS)
    if "render" not in (tree.groups or ()):
        fix = f"{_JOIN.format('render')}; in a container: --group-add keep-groups"
        return error(message, fix)
    message += (
        ": the device's group is probably not one of the user's (in LXC it is often root:root; in "
        "other containers, the device keeps its group id from the host)"
    )
    fix = (
        f"compare the output of ls -ln /dev/kfd with that of id; in LXC, {_PASS['lxc']}; "
        f"otherwise, {_PASS['']}"
    )
    return error(message, fix, _NUMBERS)


def _judge_unusable(tree: Tree, name: str, failure: OSError) -> Result:
    """Judge EINVAL and similar errors.

    They mean that the file's major number belongs to another driver, or that KFD did not start.
    """
    message = f"/{name} cannot be opened: {failure.strerror}"
    dmesg = "sudo dmesg | grep -i kfd"
    if name != "dev/kfd":
        return error(message, dmesg)
    container = containers.detect(tree)
    device = tree.read_device(tree.path(name))
    majors = re.findall(r"^ *(\d+) kfd$", tree.read("proc/devices") or "", re.M)
    if device and majors and str(device.major) != majors[0]:
        message += f": its major number is {device.major}, but KFD's is {majors[0]}"
        return error(message, _suggest_new_node(container), _STALE)
    if container and device is None:
        message += (
            ": in a container, the cause is often a stale major number, since the number changes "
            "with the kernel"
        )
        new_node = _suggest_new_node(container)
        fix = (
            f"compare the output of ls -l /dev/kfd with that of grep kfd /proc/devices; {new_node}"
        )
        return error(message, fix, _STALE)
    return error(message, dmesg)


def _suggest_new_node(container: str) -> str:
    """Return how to give a container a device file with the driver's present major number."""
    if container == "lxc":
        return f"instead of mknod and lxc.mount.entry, {_PASS['lxc']}"
    return "recreate the device file, or the container with --device /dev/kfd"
