# SPDX-License-Identifier: BSD-3-Clause
"""Which commands a distribution and its derivatives update and configure a kernel with."""

from strix_validate.doctor import containers, kernel_release
from strix_validate.doctor._verdicts import Fix
from strix_validate.doctor.tree import Tree

#: Ubuntu's release by the codename that derivatives such as Linux Mint keep.
_UBUNTU = {"noble": "24.04", "resolute": "26.04"}
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
    kind, release = family(tree), ubuntu_release(tree)
    command = "install Linux 6.18.4 or newer with the distribution's package manager"
    if kind == "ubuntu":
        # only releases with long support, of an even year's April, get newer kernels
        has_hwe = release.endswith("04") and release[:2].isdecimal() and int(release[:2]) % 2 == 0
        command = "sudo apt update && sudo apt full-upgrade"
        if has_hwe and not _has_newest_kernel(tree):
            command = f"sudo apt install linux-generic-hwe-{release}"
    elif kind == "debian":
        command = "sudo apt install -t $(lsb_release -cs)-backports linux-image-amd64"
    elif kind in _UPGRADE:
        command = _UPGRADE[kind].format(fedora="kernel")
    return Fix(_on_host(tree, command), needs_reboot=True)


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


def module_options(tree: Tree, modules: list[str], options: dict[str, int]) -> Fix:
    """Return the commands that set options of kernel modules from the next start on."""
    kind = family(tree)
    if kind in ("ostree", "nixos"):
        words = [f"{module}.{n}={v}" for module in modules for n, v in options.items()]
        if kind == "ostree":
            command = " && ".join(_ADD[kind].format(word) for word in words)
        else:
            command = _ADD[kind].format('" "'.join(words))
        return Fix(_on_host(tree, command), needs_reboot=True)
    line = " ".join(f"{name}={value}" for name, value in options.items())
    write = " && ".join(
        f"echo 'options {module} {line}' | sudo tee /etc/modprobe.d/{module}.conf"
        for module in modules
    )
    return Fix(with_new_initramfs(tree, write), needs_reboot=True)


def with_argument(tree: Tree, argument: str) -> Fix:
    """Return the command that adds an argument to the kernel's command line."""
    command = _ADD.get(family(tree), "add {} to the kernel's command line")
    return Fix(_on_host(tree, command.format(argument)), needs_reboot=True)


def without_argument(tree: Tree, argument: str) -> str:
    """Return the command that removes an argument from the kernel's command line."""
    command = _REMOVE.get(family(tree), "remove {} from the kernel's command line")
    return _on_host(tree, command.format(argument))
