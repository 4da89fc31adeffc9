# SPDX-License-Identifier: BSD-3-Clause
"""Which commands a distribution and its derivatives update and configure a kernel with."""

from strix_validate.doctor.tree import Tree

#: Ubuntu's release by the codename that derivatives such as Linux Mint keep.
_UBUNTU = {"noble": "24.04", "resolute": "26.04"}
_UPGRADE = {
    # image-based: dnf cannot change /usr
    "ostree": "sudo rpm-ostree upgrade && sudo reboot",
    "fedora": "sudo dnf upgrade --refresh {fedora} && sudo reboot",
    "arch": "sudo pacman -Syu && sudo reboot",
    "opensuse": "sudo zypper dup && sudo reboot",
}
_INITRAMFS = {
    "fedora": "sudo dracut --force",
    "opensuse": "sudo dracut --force",
    "arch": "sudo mkinitcpio -P",
    "debian": "sudo update-initramfs -u",
}
_ARGUMENT = {
    "ostree": "sudo rpm-ostree kargs --append={}",
    "fedora": "sudo grubby --update-kernel=ALL --args={}",
}


def family(tree: Tree) -> str:
    """Return "ostree", "ubuntu", "debian", "fedora", "arch", "opensuse", or the unknown ID."""
    if tree.path("run/ostree-booted").exists():
        return "ostree"
    found = tree.distribution
    names = [found["ID"], *found.get("ID_LIKE", "").split()]
    names = ["opensuse" if name.startswith(("opensuse", "suse")) else name for name in names]
    known = ("ubuntu", "debian", "fedora", "arch", "opensuse")
    return next((name for name in names if name in known), names[0])


def ubuntu_release(tree: Tree) -> str:
    """Return the release of Ubuntu, or of the one a derivative is made from; "" elsewhere."""
    found = tree.distribution
    if found["ID"] == "ubuntu":
        return found.get("VERSION_ID", "")
    codename = found.get("UBUNTU_CODENAME", "")
    return _UBUNTU.get(codename, "") if family(tree) == "ubuntu" else ""


#: noble-updates has 6.17 under this name: https://packages.ubuntu.com/noble-updates/linux-oem-24.04a
OLDER_KERNEL_OF_24_04 = (
    'sudo apt install linux-oem-24.04a, then start it from "Advanced options" of the boot menu'
)


def kernel_fix(tree: Tree) -> str:
    """Return the command that installs a newer kernel."""
    kind, release = family(tree), ubuntu_release(tree)
    if kind == "ubuntu":
        # only releases with long support, of an even year's April, get newer kernels
        has_hwe = release.endswith("04") and release[:2].isdecimal() and int(release[:2]) % 2 == 0
        hwe = f"sudo apt install linux-generic-hwe-{release}"
        return f"{hwe if has_hwe else 'sudo apt update && sudo apt full-upgrade'} && sudo reboot"
    if kind == "debian":
        return "sudo apt install -t $(lsb_release -cs)-backports linux-image-amd64 && sudo reboot"
    other = "install Linux 6.18.4 or newer with the distribution's package manager"
    return _UPGRADE.get(kind, other).format(fedora="kernel")


def firmware_fix(tree: Tree) -> str:
    """Return the command that installs a newer linux-firmware."""
    name = "firmware-amd-graphics" if family(tree) == "debian" else "linux-firmware"
    other = f"install {name} 20260110 or newer, then reboot"
    return _UPGRADE.get(family(tree), other).format(fedora="linux-firmware amd-gpu-firmware")


def module_options(tree: Tree, module: str, options: dict[str, int]) -> str:
    """Return the commands that set a kernel module's options from the next start on.

    The module may be loaded from the initramfs, so its copy of /etc/modprobe.d counts.
    """
    kind = family(tree)
    if kind == "ostree":
        return " && ".join(
            [*(_ARGUMENT[kind].format(f"{module}.{n}={v}") for n, v in options.items()),
             "sudo reboot"]
        )  # fmt: skip
    line = " ".join(f"{name}={value}" for name, value in options.items())
    write = f"echo 'options {module} {line}' | sudo tee /etc/modprobe.d/{module}.conf"
    build = _INITRAMFS.get("debian" if kind == "ubuntu" else kind)
    if build is None:
        return f"{write}; then rebuild the initramfs and reboot"
    return f"{write} && {build} && sudo reboot"


def kernel_argument(tree: Tree, argument: str) -> str:
    """Return the command that adds an argument to the kernel's command line."""
    known = _ARGUMENT.get(family(tree))
    return known.format(argument) if known else f"add {argument} to the kernel's command line"
