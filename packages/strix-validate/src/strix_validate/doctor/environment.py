# SPDX-License-Identifier: BSD-3-Clause
"""The doctor's checks of what is installed: variables, libraries, packages, caches and space."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from shutil import disk_usage

from strix_validate.checks import CannotRun, Result
from strix_validate.doctor import cluster_machine, kernel_lists
from strix_validate.doctor._verdicts import error, fine, known, remark, warning
from strix_validate.doctor.tree import Tree
from strix_validate.json_file import json_object, small_text

#: Bytes that the ROCm libraries and this repository's packages take.
DISK = 20 * 10**9
#: What activating rocm-sdk-core sets: docs/rocm.md says why.
_ACTIVATION = {"ROCPROFILER_QUEUE_INTERPOSITION": "0", "MIOPEN_FIND_MODE": "FAST"}
#: Packages whose updates make compiled kernels stale.
_COMPILERS = ("rocm*", "hip*", "triton", "pytorch", "libtorch", "aotriton*")

#: Distribution, as its dist-info folder is named, to conda package.
_NAMES = {"torch": "pytorch", "triton": "triton", "torchvision": "torchvision"}
_CONDA_FORGE = "conda-forge"


@dataclass(frozen=True)
class Installed:
    """A distribution or package; by: the program that installed it, "conda" for pixi's conda
    packages too, or "conda-forge" for a package of that channel."""

    name: str
    version: str
    by: str


def installed(prefix: Path) -> list[Installed]:
    """Return each torch, triton and torchvision of an environment.

    There are two of one name where one was put over the other. Distributions and conda packages
    that cannot be read are left out.
    """
    found = []
    for name, package in _NAMES.items():
        for folder in sorted(prefix.glob(f"lib/python3.*/site-packages/{name}-*.dist-info")):
            version = folder.name.removesuffix(".dist-info").removeprefix(f"{name}-")
            by = small_text(folder / "INSTALLER") or "an unknown tool"
            found.append(Installed(name, version, by))
        for file in sorted(prefix.glob(f"conda-meta/{package}-*.json")):
            try:
                record = json_object(file)
            except ValueError:
                continue
            if record.get("name") == package and f"/{_CONDA_FORGE}" in str(record.get("channel")):
                found.append(Installed(package, str(record.get("version")), _CONDA_FORGE))
    return found


def environment(tree: Tree) -> Result:
    """No variable disguises the GPU or loads another ROCm. HSA_OVERRIDE_GFX_VERSION causes memory
    faults: https://github.com/ROCm/legacy-rocm-build/issues/5824"""
    if override := tree.environ.get("HSA_OVERRIDE_GFX_VERSION"):
        fix = "unset HSA_OVERRIDE_GFX_VERSION, and remove it from the shell's startup files"
        return error(f"HSA_OVERRIDE_GFX_VERSION={override}", fix)
    own = tree.environ.get("CONDA_PREFIX", "no environment")
    foreign = [
        name
        for name in ("LD_LIBRARY_PATH", "LD_PRELOAD", "ROCM_PATH", "ROCM_HOME", "HIP_PATH")
        for part in tree.environ.get(name, "").split(":")
        if "rocm" in part.lower() and not part.startswith(own)
    ]
    if not foreign:
        return _activation(tree)
    listed = " ".join(dict.fromkeys(foreign))
    if any(name.startswith("LD_") for name in foreign):
        what = f"{listed}: another ROCm's libraries are loaded first"
        return error(what, f"unset {listed}", variables=listed)
    return warning(f"{listed}: points to another ROCm", f"unset {listed}", variables=listed)


def _activation(tree: Tree) -> Result:
    """Warn if variables without which programs hang or fail lack values that activation sets."""
    if not tree.prefix or not any(tree.prefix.glob("conda-meta/rocm-sdk-core-*.json")):
        return fine()
    seen = {name: tree.environ.get(name, "unset") for name in _ACTIVATION}
    other = {name: value for name, value in seen.items() if value != _ACTIVATION[name]}
    if not other:
        return fine(**seen)
    what = f"{', '.join(f'{k} is {v}' for k, v in other.items())}: programs may hang (docs/rocm.md)"
    return warning(what, f"export {' '.join(f'{k}={_ACTIVATION[k]}' for k in other)}", **seen)


def stray_rocm(tree: Tree) -> Result:
    """No other ROCm is on the loader's path. Two versions in one process crash, and these packages
    bring their own: https://github.com/ROCm/TheRock/blob/main/docs/faq.md"""
    files = [f for f in tree.glob("etc/ld.so.conf.d/*.conf") if "rocm" in (tree.read_at(f) or "")]
    installed = [str(path.relative_to(tree.root)) for path in tree.glob("opt/rocm*")]
    if files:
        name = f"/{files[0].relative_to(tree.root)}"
        what = f"{name} puts the system's ROCm on the loader's path"
        return warning(what, f"sudo rm {name} && sudo ldconfig", installed=", ".join(installed))
    return fine(installed=", ".join(installed))


def packages(tree: Tree) -> Result:
    """The environment's torch and triton are those of our channel. What PyPI's packages require is
    taken from PyPI, over ours, unless pixi knows our names there:
    https://pixi.prefix.dev/latest/reference/pixi_manifest/#conda-pypi-map-optional"""
    found = installed(tree.prefix) if tree.prefix else []
    if not found:
        raise CannotRun("torch is not installed")
    measured = {each.name: each.version for each in found}
    for each in found:
        if each.by == _CONDA_FORGE:
            what = f"{each.name} {each.version} is conda-forge's, which has no ROCm"
            fix = 'in pixi.toml: our channel first, and channel-priority = "strict"'
            return error(what, fix, **measured)
        if each.by != "conda":
            what = f"{each.name} {each.version} was installed by {each.by}, over our channel's"
            # pixi does not notice that the files changed, not even when it locks ours again
            fix = "pixi clean && pixi install"
            if each.by == "uv-pixi":
                names = " ".join(other.name for other in found if other.by == each.by)
                fix = f"pixi update --no-install {names} && {fix}, with docs/pypi.md's table"
            return error(what, fix, **measured)
    for each in found:
        if each.name == "torch" and "+rocm" in each.version:
            what = f"torch {each.version} is AMD's build: head dims above 256 give wrong values"
            return error(what, "take the channel's own build: ./forge build pytorch", **measured)
    return fine(**measured)


def kernels(tree: Tree) -> Result:
    """The kernels that packages install are those of the installed versions. Triton finds a kernel
    by its source, so another build of flash-attn or vLLM compiles at its first call:
    docs/validate.md"""
    prefix = tree.prefix or Path()
    lists = kernel_lists.installed(prefix) if tree.prefix else {}
    found, missed = {}, []
    for package, kernels in lists.items():
        found[package] = f"{len(kernels)} kernels"
        for name, version, build in requirements(prefix, package):
            there = [file.stem for file in prefix.glob(f"conda-meta/{name}-[0-9]*.json")]
            wanted = f"{name}-{version}-{build}"
            if there and not any(fnmatchcase(each, wanted) for each in there):
                found[package] = f"0 of {len(kernels)} kernels"
                missed.append(f"{package}: {found[package]} are for the installed {there[0]}")
    if missed:
        return warning("; ".join(missed), f"pixi update {' '.join(lists)}", **found)
    return fine(**found)


def requirements(prefix: Path, package: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, version and build (a pattern) of what a package fits in one version alone."""
    for file in prefix.glob(f"conda-meta/{package}-[0-9]*.json"):
        try:
            record = json_object(file)
            specs = [*record.get("depends", ()), *record.get("constrains", ())]
        except (ValueError, TypeError):
            continue
        for spec in map(str, specs):
            exact = re.fullmatch(r"(?!__)([\w.-]+) ==([\w.]+)(?: (\S+))?", spec)
            if exact:
                yield exact[1], exact[2], exact[3] or "*"


def caches(tree: Tree) -> Result:
    """No cache of compiled kernels is older than the installed ROCm and Triton. comgr, MIOpen and
    Triton reuse stale kernels: https://github.com/ROCm/legacy-rocm-build/issues/6034"""
    if tree.prefix is None or not (tree.prefix / "conda-meta").is_dir():
        raise CannotRun("the active environment cannot be read: CONDA_PREFIX is not set")
    meta = tree.prefix / "conda-meta"
    files = [file for name in _COMPILERS for file in meta.glob(f"{name}-*.json")]
    made = max((file.stat().st_mtime for file in files), default=meta.stat().st_mtime)
    stale = []
    for name in (".cache/comgr", ".cache/miopen", ".config/miopen", ".triton/cache"):
        folder = tree.home / name
        try:
            newest = max((file.stat().st_mtime for file in folder.iterdir()), default=made)
        except OSError:
            continue
        if newest < made:
            stale.append(name)
    if not stale:
        return fine()
    listed = " ".join(f"~/{name}" for name in stale)
    return warning(f"older than the installed ROCm and Triton: {listed}", f"rm -r {listed}")


def two_machines(tree: Tree) -> Result:
    """Where Ray is installed, what two machines need of this one: open files, a network, and the
    hash of all packages, which must be the other machine's: docs/cluster.md"""
    if not (tree.prefix and any(tree.prefix.glob("conda-meta/ray-core-*.json"))):
        return fine()
    needed = cluster_machine.FILES
    soft, hard = cluster_machine.open_files()
    if hard < needed:
        limits = f"add `* hard nofile {needed}` to /etc/security/limits.conf and log in again"
        return error(f"at most {hard} open files, and a cluster needs {needed}", limits)
    links = cluster_machine.interfaces()
    if not links:
        return error("no network but loopback", "give the cable's interface an address")
    addresses = ", ".join(f"{link.interface} {link.address}" for link in links)
    what = f"packages {cluster_machine.digest_of_packages(tree.prefix)}, addresses {addresses}"
    advice = "the other machine's doctor must print the same packages"
    if soft < needed:
        advice += f"; before `ray start`, run: ulimit -n {needed}"
    return remark(what, advice)


def glibc(tree: Tree) -> Result:
    """glibc is 2.28 or newer, which ROCm's libraries require:
    https://github.com/ROCm/TheRock/blob/main/docs/faq.md"""
    version = known(tree.glibc, "glibc's version")
    text = ".".join(map(str, version))
    if version < (2, 28):
        return error(f"glibc {text} is older than 2.28", "upgrade the distribution", glibc=text)
    return fine(glibc=text)


def disk(tree: Tree) -> Result:
    """20 GB are free where environments are installed; ROCm's libraries alone take 9:
    https://github.com/ROCm/TheRock/blob/main/docs/faq.md"""
    place = tree.prefix or tree.root
    gb = round(disk_usage(place).free / 1e9, 1)
    if gb * 1e9 < DISK:
        return warning(f"{gb} GB are free", "pixi clean cache, or: conda clean --all", free_gb=gb)
    return fine(free_gb=gb)
