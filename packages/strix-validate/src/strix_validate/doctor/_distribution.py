# SPDX-License-Identifier: BSD-3-Clause
"""Suggest a Linux distribution's commands that update and configure its kernel and firmware."""

from pathlib import Path

from strix_validate.doctor import containers, kernel_release
from strix_validate.doctor._verdicts import Fix
from strix_validate.doctor.kernel_release import Release
from strix_validate.doctor.tree import Tree

#: Ubuntu's long-term releases by codename. Derivatives such as Linux Mint also state this codename.
_UBUNTU = {"jammy": "22.04", "noble": "24.04", "resolute": "26.04"}
#: Commands that update packages, by family of distributions.
_UPGRADE = {
    # Systems with ostree boot an image that dnf cannot change. rpm-ostree replaces the image.
    "ostree": "sudo rpm-ostree upgrade",
    "fedora": "sudo dnf upgrade --refresh {fedora}",
    "arch": "sudo pacman -Syu",
    "opensuse": "sudo zypper dup",
    "proxmox": "sudo apt update && sudo apt dist-upgrade",
    "nixos": "boot.kernelPackages = pkgs.linuxPackages_latest; in configuration.nix, then "
    "sudo nix-channel --update && sudo nixos-rebuild boot",
}
#: Commands that rebuild the initramfs, by family of distributions.
_INITRAMFS = {
    "fedora": "sudo dracut --force",
    "opensuse": "sudo dracut --force",
    "arch": "sudo mkinitcpio -P",
    "debian": "sudo update-initramfs -u",
    "ubuntu": "sudo update-initramfs -u",
    "proxmox": "sudo update-initramfs -u && sudo proxmox-boot-tool refresh",
}
_FAMILIES = {*_UPGRADE, *_INITRAMFS}
#: Commands that add an argument to the kernel's command line, by family of distributions.
_ADD = {
    "ostree": "sudo rpm-ostree kargs --append={}",
    "fedora": "sudo grubby --update-kernel=ALL --args={}",
    "nixos": 'boot.kernelParams = [ "{}" ]; in configuration.nix, then sudo nixos-rebuild boot',
}
#: Commands that remove an argument from the kernel's command line, by family of distributions.
_REMOVE = {
    "ostree": "sudo rpm-ostree kargs --delete={}",
    "fedora": "sudo grubby --update-kernel=ALL --remove-args={}",
    "nixos": "remove {} from boot.kernelParams in configuration.nix, then sudo nixos-rebuild boot",
}
_ADD_BY_HAND = "add {} to the kernel's command line"
_REMOVE_BY_HAND = "remove {} from the kernel's command line"
#: The family of the distribution that built a kernel, by the kernel's origin (see kernel_release).
#: In a container, only the kernel's release shows which distribution the host has.
_FAMILY_OF_KERNEL = {
    "fedora": "fedora",
    "rhel": "fedora",
    "proxmox": "proxmox",
    "ubuntu": "ubuntu",
    "ubuntu-oem": "ubuntu",
    "ubuntu-other": "ubuntu",
    "mainline": "ubuntu",
    "debian": "debian",
    "arch": "arch",
    "opensuse": "opensuse",
}


def _read_release(tree: Tree) -> Release | None:
    return kernel_release.parse(tree.release or "")


def detect_family(tree: Tree) -> str:
    """Return the family of distributions that the host's distribution belongs to.

    Returns:
        A key of _UPGRADE or _INITRAMFS; for an unknown distribution, its ID in os-release, or
        "unknown" in a container.
    """
    release = _read_release(tree)
    family_of_kernel = "unknown"
    if release:
        family_of_kernel = _FAMILY_OF_KERNEL.get(release.origin, "unknown")
    if family_of_kernel == "proxmox" or containers.detect(tree):
        return family_of_kernel
    if tree.path("run/ostree-booted").exists():
        return "ostree"
    names = [
        tree.distribution["ID"],
        *tree.distribution.get("ID_LIKE", "").split(),
    ]
    for name in names:
        if name.startswith(("opensuse", "suse")):
            return "opensuse"
        if name in _FAMILIES:
            return name
    return names[0]


def find_ubuntu_release(tree: Tree) -> str:
    """Return Ubuntu's release, or the one that a derivative of Ubuntu is based on.

    The result is "" elsewhere, in a container, and if the release is unknown.
    """
    if containers.detect(tree):
        return ""
    if tree.distribution["ID"] == "ubuntu":
        return tree.distribution.get("VERSION_ID", "")
    if detect_family(tree) != "ubuntu":
        return ""
    codename = tree.distribution.get("UBUNTU_CODENAME", "")
    return _UBUNTU.get(codename, "")


def _on_host(tree: Tree, command: str) -> str:
    """Return the command; in a container, with a note to run it on the host."""
    if containers.detect(tree):
        return f"on the host: {command}"
    return command


def suggest_new_kernel(tree: Tree) -> Fix:
    """Return the command that installs a newer kernel."""
    command = _suggest_upgrade_for_kernel(tree) or _suggest_kernel_package(tree)
    return Fix(_on_host(tree, command), needs_reboot=True)


def _suggest_kernel_package(tree: Tree) -> str:
    family = detect_family(tree)
    if family == "ubuntu":
        return _suggest_ubuntu_kernel(tree)
    if family == "debian":
        return (
            "add Debian's backports to apt's sources, then: sudo apt update && sudo apt install "
            "-t $(. /etc/os-release; echo $VERSION_CODENAME)-backports linux-image-amd64"
        )
    if family in _UPGRADE:
        return _UPGRADE[family].format(fedora="kernel")
    version = kernel_release.find_first_fixed()
    return f"install Linux {version} or newer with the distribution's package manager"


def _suggest_upgrade_for_kernel(tree: Tree) -> str:
    """Return how to get a newer kernel if an ordinary update of packages may not bring one.

    Returns:
        An instruction. "" if an ordinary update is enough, or in a container, where the host's
        release is unknown.
    """
    if containers.detect(tree) or _has_newest_kernel(tree):
        return ""
    family = detect_family(tree)
    ubuntu = find_ubuntu_release(tree)
    release = _read_release(tree)
    name = tree.distribution["ID"]
    version = tree.distribution.get("VERSION_ID", "")
    if family == "ubuntu" and ubuntu != "24.04" and "" < ubuntu < "25.10":
        return "sudo do-release-upgrade, to Ubuntu 24.04, 26.04 or newer"
    if name == "debian" and version in ("11", "12"):
        if family == "proxmox":
            return "upgrade to Proxmox VE 9"
        return "upgrade to Debian 13, whose backports have a newer kernel"
    if name == "opensuse-leap":
        return (
            "install kernel-default from the repository Kernel:stable:Backport, or change to "
            "openSUSE Tumbleweed"
        )
    if name == "manjaro":
        # Manjaro has a package for each series of kernels.
        return "sudo pacman -Syu && sudo mhwd-kernel -i linux618"
    if release and release.origin == "rhel":
        if family == "ostree":
            return f"{_UPGRADE[family]}; if that is too old, change to an image with a newer kernel"
        return "sudo dnf upgrade --refresh kernel; if that is too old, install ELRepo's kernel-ml"
    return ""


def _suggest_ubuntu_kernel(tree: Tree) -> str:
    """Return the command that installs a newer kernel on Ubuntu."""
    upgrade = "sudo apt update && sudo apt full-upgrade"
    if _has_newest_kernel(tree) or tree.distribution["ID"] == "pop":
        return upgrade
    if containers.detect(tree):
        # In a container, the host's release is unknown, so the command reads it on the host.
        return "sudo apt install linux-generic-hwe-$(lsb_release -rs)"
    release = find_ubuntu_release(tree)
    year = release[:2]
    # Only Ubuntu's long-term releases get newer kernels. They appear in April of even years.
    if release.endswith("04") and year.isdecimal() and int(year) % 2 == 0:
        return f"sudo apt install linux-generic-hwe-{release}"
    return upgrade


def _has_newest_kernel(tree: Tree) -> bool:
    """Return whether the kernel is Linux 7.0 or newer.

    Ordinary updates keep such a kernel up to date.
    """
    release = _read_release(tree)
    return release is not None and release.version >= (7, 0, 0)


def get_firmware_package(tree: Tree) -> str:
    """Return the name of the package that has the GPU's firmware."""
    names = {"debian": "firmware-amd-graphics", "proxmox": "pve-firmware"}
    return names.get(detect_family(tree), "linux-firmware")


def suggest_new_firmware(tree: Tree) -> Fix:
    """Return the command that installs newer firmware for the GPU."""
    family = detect_family(tree)
    name = get_firmware_package(tree)
    command = f"install {name} 20260110 or newer"
    if family == "ubuntu":
        command = f"sudo apt update && sudo apt install {name}   # 20260110 or newer"
    elif family in _UPGRADE and family != "nixos":
        command = _UPGRADE[family].format(fedora="linux-firmware amd-gpu-firmware")
    return Fix(_on_host(tree, command), needs_reboot=True)


def add_initramfs_build(tree: Tree, command: str) -> str:
    """Append the rebuild of the initramfs to a command that changes modprobe.d or firmware.

    A module that is loaded from the initramfs uses only the copies of these files in the initramfs.
    """
    build = _INITRAMFS.get(detect_family(tree))
    if build is None:
        return _on_host(tree, f"{command}; then rebuild the initramfs")
    return _on_host(tree, f"{command} && {build}")


def suggest_new_initramfs(tree: Tree) -> Fix:
    """Return the command that puts the installed firmware into the initramfs."""
    command = _INITRAMFS.get(detect_family(tree), "rebuild the initramfs")
    return Fix(_on_host(tree, command), needs_reboot=True)


def suggest_modprobe_edit(tree: Tree, file: str, expressions: list[str], change: str) -> str:
    """Return the command that removes lines or options from a file of modprobe.d.

    Args:
        tree: The machine.
        file: The path of the file. A file outside of /etc belongs to a package; one of the same
            name in /etc replaces it.
        expressions: The sed expressions that remove the lines or options.
        change: A name for the lines or options. It is used on NixOS, where the result is an
            instruction instead of a command.
    """
    if detect_family(tree) == "nixos":
        # NixOS generates /etc/modprobe.d from its configuration, so these files are read-only.
        option = "boot.extraModprobeConfig or boot.blacklistedKernelModules in configuration.nix"
        return _on_host(tree, f"remove {change} from {option}, then sudo nixos-rebuild boot")
    target = f"/etc/modprobe.d/{Path(file).name}"
    script = " ".join(f"-e '{expression}'" for expression in expressions)
    command = f"sudo sed -i {script} {target}"
    if file != target:
        command = f"sudo cp {file} {target} && {command}"
    return add_initramfs_build(tree, command)


def suggest_module_options(
    tree: Tree,
    modules: list[str],
    options: dict[str, int],
    on_command_line: bool = False,
) -> Fix:
    """Return the commands that set options of kernel modules from the next start on.

    Args:
        tree: The machine.
        modules: The modules, each of which gets all options.
        options: Values of the options by name.
        on_command_line: Whether the kernel's command line already sets any of the options. The
            command line takes precedence over files of modprobe.d.
    """
    if on_command_line or detect_family(tree) in ("ostree", "nixos"):
        arguments = []
        for module in modules:
            arguments += [f"{module}.{name}={value}" for name, value in options.items()]
        return suggest_adding_arguments(tree, *arguments)
    line = " ".join(f"{name}={value}" for name, value in options.items())
    steps = [
        f"echo 'options {module} {line}' | sudo tee /etc/modprobe.d/{module}.conf"
        for module in modules
    ]
    return Fix(add_initramfs_build(tree, " && ".join(steps)), needs_reboot=True)


def suggest_adding_arguments(tree: Tree, *arguments: str) -> Fix:
    """Return the command that adds arguments to the kernel's command line."""
    command = _format_commands(tree, _ADD, _ADD_BY_HAND, arguments)
    return Fix(command, needs_reboot=True)


def suggest_removing_arguments(tree: Tree, *arguments: str) -> str:
    """Return the command that removes arguments from the kernel's command line."""
    return _format_commands(tree, _REMOVE, _REMOVE_BY_HAND, arguments)


def _format_commands(
    tree: Tree,
    commands: dict[str, str],
    by_hand: str,
    arguments: tuple[str, ...],
) -> str:
    """Return the distribution's commands for the arguments, or an instruction to edit by hand."""
    family = detect_family(tree)
    if family == "nixos":
        command = commands[family].format('" "'.join(arguments))
    elif family in commands:
        steps = [commands[family].format(argument) for argument in arguments]
        command = " && ".join(steps)
    else:
        command = by_hand.format(" and ".join(arguments))
    return _on_host(tree, command)
