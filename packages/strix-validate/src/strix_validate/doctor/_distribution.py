# SPDX-License-Identifier: BSD-3-Clause
"""Which commands a distribution and its derivatives update and configure a kernel with."""

from pathlib import Path

from strix_validate.doctor import containers, kernel_release
from strix_validate.doctor._verdicts import Fix
from strix_validate.doctor.tree import Tree

#: Ubuntu's release by the codename that derivatives such as Linux Mint keep.
_UBUNTU = {"jammy": "22.04", "noble": "24.04", "resolute": "26.04"}
_UPGRADE = {
    # image-based: dnf cannot change /usr
    "ostree": "sudo rpm-ostree upgrade",
    "fedora": "sudo dnf upgrade --refresh {fedora}",
    "arch": "sudo pacman -Syu",
    "opensuse": "sudo zypper dup",
    "proxmox": "sudo apt update && sudo apt dist-upgrade",
    "nixos": "boot.kernelPackages = pkgs.linuxPackages_latest; in configuration.nix, then "
    "sudo nix-channel --update && sudo nixos-rebuild boot",
}
_INITRAMFS = {
    "fedora": "sudo dracut --force",
    "opensuse": "sudo dracut --force",
    "arch": "sudo mkinitcpio -P",
    "debian": "sudo update-initramfs -u",
    "ubuntu": "sudo update-initramfs -u",
    "proxmox": "sudo update-initramfs -u && sudo proxmox-boot-tool refresh",
}
#: How an argument comes to the kernel's command line, and leaves it.
_ADD = {
    "ostree": "sudo rpm-ostree kargs --append={}",
    "fedora": "sudo grubby --update-kernel=ALL --args={}",
    "nixos": 'boot.kernelParams = [ "{}" ]; in configuration.nix, then sudo nixos-rebuild boot',
}
_REMOVE = {
    "ostree": "sudo rpm-ostree kargs --delete={}",
    "fedora": "sudo grubby --update-kernel=ALL --remove-args={}",
    "nixos": "take {} out of boot.kernelParams in configuration.nix, then sudo nixos-rebuild boot",
}
_ADD_BY_HAND = "add {} to the kernel's command line"
_REMOVE_BY_HAND = "remove {} from the kernel's command line"
#: The family of a kernel, where the distribution of a container says nothing of the host's.
_OF_KERNEL = {
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


def family(tree: Tree) -> str:
    """Return a key of _INITRAMFS, "ostree", "nixos", or the unknown ID of the kernel's host."""
    release = kernel_release.parse(tree.release or "")
    of_kernel = _OF_KERNEL.get(release.origin, "unknown") if release else "unknown"
    if of_kernel == "proxmox" or containers.kind(tree):
        return of_kernel
    if tree.path("run/ostree-booted").exists():
        return "ostree"
    release_file = tree.distribution
    names = [release_file["ID"], *release_file.get("ID_LIKE", "").split()]
    names = ["opensuse" if name.startswith(("opensuse", "suse")) else name for name in names]
    return next((name for name in names if name in {*_UPGRADE, *_INITRAMFS}), names[0])


def ubuntu_release(tree: Tree) -> str:
    """Return the release of Ubuntu, or of the one a derivative is made from; "" elsewhere."""
    release_file = tree.distribution
    if containers.kind(tree):
        return ""
    if release_file["ID"] == "ubuntu":
        return release_file.get("VERSION_ID", "")
    codename = release_file.get("UBUNTU_CODENAME", "")
    return _UBUNTU.get(codename, "") if family(tree) == "ubuntu" else ""


def _on_host(tree: Tree, command: str) -> str:
    """Return a command with the place where it belongs, if that is outside of a container."""
    return f"on the host: {command}" if containers.kind(tree) else command


def kernel_fix(tree: Tree) -> Fix:
    """Return the command that installs a newer kernel."""
    kind = family(tree)
    command = "install Linux 6.18.4 or newer with the distribution's package manager"
    if _stays_old(tree):
        command = _stays_old(tree)
    elif kind == "ubuntu":
        command = _ubuntu_kernel(tree)
    elif kind == "debian":
        command = "sudo apt install -t $(lsb_release -cs)-backports linux-image-amd64"
    elif kind in _UPGRADE:
        command = _UPGRADE[kind].format(fedora="kernel")
    return Fix(_on_host(tree, command), needs_reboot=True)


def _stays_old(tree: Tree) -> str:
    """Return what to do where no update of the distribution's release brings the kernel, or ""."""
    if containers.kind(tree) or _has_newest_kernel(tree):
        return ""
    kind, ubuntu = family(tree), ubuntu_release(tree)
    release = kernel_release.parse(tree.release or "")
    name, version = tree.distribution["ID"], tree.distribution.get("VERSION_ID", "")
    if kind == "ubuntu" and ubuntu != "24.04" and "" < ubuntu < "25.10":
        return "sudo do-release-upgrade, to Ubuntu 24.04, 26.04 or newer"
    if name == "debian" and version in ("11", "12"):
        system = "Proxmox VE 9" if kind == "proxmox" else "Debian 13, whose backports have it"
        return f"upgrade to {system}"
    if name == "opensuse-leap":
        return "install kernel-default of the repository Kernel:stable:Backport, or Tumbleweed"
    if name == "manjaro":
        # its kernels have a package for each series
        return "sudo pacman -Syu && sudo mhwd-kernel -i linux618"
    if release and release.origin == "rhel":
        return "sudo dnf upgrade --refresh kernel; if that stays too old, kernel-ml of ELRepo"
    return ""


def _ubuntu_kernel(tree: Tree) -> str:
    """Return the command that installs a newer kernel of Ubuntu."""
    release = ubuntu_release(tree)
    if _has_newest_kernel(tree) or tree.distribution["ID"] == "pop":
        return "sudo apt update && sudo apt full-upgrade"
    if containers.kind(tree):
        # the host's release shows on the host only
        return "sudo apt install linux-generic-hwe-$(lsb_release -rs)"
    # only releases with long support, of an even year's April, get newer kernels
    if release.endswith("04") and release[:2].isdecimal() and int(release[:2]) % 2 == 0:
        return f"sudo apt install linux-generic-hwe-{release}"
    return "sudo apt update && sudo apt full-upgrade"


def _has_newest_kernel(tree: Tree) -> bool:
    """Return whether the kernel is of a series that updates of Ubuntu still replace."""
    release = kernel_release.parse(tree.release or "")
    return release is not None and release.version >= (7, 0, 0)


def firmware_package(tree: Tree) -> str:
    """Return the package that has the GPU's firmware."""
    names = {"debian": "firmware-amd-graphics", "proxmox": "pve-firmware"}
    return names.get(family(tree), "linux-firmware")


def firmware_fix(tree: Tree) -> Fix:
    """Return the command that installs a newer linux-firmware."""
    kind, name = family(tree), firmware_package(tree)
    command = f"install {name} 20260110 or newer"
    if kind == "ubuntu":
        command = f"sudo apt update && sudo apt install {name}   # 20260110 or newer"
    elif kind in _UPGRADE and kind != "nixos":
        command = _UPGRADE[kind].format(fedora="linux-firmware amd-gpu-firmware")
    return Fix(_on_host(tree, command), needs_reboot=True)


def with_new_initramfs(tree: Tree, command: str) -> str:
    """Return a command that changes /etc/modprobe.d, and the one that makes it count at start.

    The module may be loaded from the initramfs, so its copy of /etc/modprobe.d counts.
    """
    build = _INITRAMFS.get(family(tree))
    if build is None:
        return _on_host(tree, f"{command}; then rebuild the initramfs")
    return _on_host(tree, f"{command} && {build}")


def new_initramfs(tree: Tree) -> Fix:
    """Return the command that puts the installed firmware into the initramfs."""
    command = _INITRAMFS.get(family(tree), "rebuild the initramfs")
    return Fix(_on_host(tree, command), needs_reboot=True)


def edit_modprobe(tree: Tree, file: str, expressions: list[str], change: str) -> str:
    """Return the command that edits a file of modprobe.d.

    Args:
        file: Its path. A file outside of /etc belongs to a package, and one of the same name in
            /etc replaces it.
        expressions: Of sed.
        change: What they remove, in words, for a system whose files are generated.
    """
    if family(tree) == "nixos":
        # /etc/modprobe.d is made from the configuration, and cannot be written
        option = "boot.extraModprobeConfig or boot.blacklistedKernelModules in configuration.nix"
        return _on_host(tree, f"take {change} out of {option}, then sudo nixos-rebuild boot")
    own = f"/etc/modprobe.d/{Path(file).name}"
    copy = "" if file == own else f"sudo cp {file} {own} && "
    step = " ".join(f"-e '{expression}'" for expression in expressions)
    return with_new_initramfs(tree, f"{copy}sudo sed -i {step} {own}")


def module_options(
    tree: Tree, modules: list[str], options: dict[str, int], on_command_line: bool = False
) -> Fix:
    """Return the commands that set options of kernel modules from the next start on.

    Args:
        on_command_line: Whether the kernel's command line sets them already: what it says counts
            whatever files say.
    """
    if on_command_line or family(tree) in ("ostree", "nixos"):
        words = [f"{module}.{n}={v}" for module in modules for n, v in options.items()]
        return with_arguments(tree, *words)
    line = " ".join(f"{name}={value}" for name, value in options.items())
    write = " && ".join(
        f"echo 'options {module} {line}' | sudo tee /etc/modprobe.d/{module}.conf"
        for module in modules
    )
    return Fix(with_new_initramfs(tree, write), needs_reboot=True)


def with_arguments(tree: Tree, *arguments: str) -> Fix:
    """Return the command that adds arguments to the kernel's command line."""
    return Fix(_with_each(tree, _ADD, _ADD_BY_HAND, arguments), needs_reboot=True)


def without_arguments(tree: Tree, *arguments: str) -> str:
    """Return the command that removes arguments from the kernel's command line."""
    return _with_each(tree, _REMOVE, _REMOVE_BY_HAND, arguments)


def _with_each(
    tree: Tree, commands: dict[str, str], by_hand: str, arguments: tuple[str, ...]
) -> str:
    """Return the family's command for each argument, or one instruction for all."""
    kind = family(tree)
    if kind == "nixos":
        command = commands[kind].format('" "'.join(arguments))
    elif kind in commands:
        command = " && ".join(commands[kind].format(argument) for argument in arguments)
    else:
        command = by_hand.format(" and ".join(arguments))
    return _on_host(tree, command)
