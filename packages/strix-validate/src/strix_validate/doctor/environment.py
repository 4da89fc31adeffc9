# SPDX-License-Identifier: BSD-3-Clause
"""The doctor's checks of what is installed: variables, libraries, packages, caches and space."""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from shutil import disk_usage

from strix_validate.checks import CannotRun, Result
from strix_validate.doctor import cluster_machine, kernel_lists
from strix_validate.doctor._verdicts import Fix, error, fine, known, remark, warning, worst
from strix_validate.doctor.interpreter import interpreter
from strix_validate.doctor.tree import Tree
from strix_validate.doctor.virtual_packages import WANTED
from strix_validate.json_file import json_object, small_text

#: Bytes that the ROCm libraries and this repository's packages take.
DISK = 20 * 10**9
#: What activating rocm-sdk-core sets: docs/rocm.md says why.
_ACTIVATION = {"ROCPROFILER_QUEUE_INTERPOSITION": "0", "MIOPEN_FIND_MODE": "FAST"}
#: Packages whose updates make compiled kernels stale, as conda and as wheels are named.
_COMPILERS = ("rocm*", "hip*", "triton", "pytorch", "libtorch", "aotriton*")
_COMPILING_WHEELS = ("rocm", "rocm_sdk_core", "triton", "pytorch_triton_rocm", "torch")
_COMPILING_PACKAGES = ("rocm-core", "amdrocm", "hip-runtime-amd", "comgr", "libamdhip64")
#: Variables for looking for faults, which wait for each kernel or print each call.
_DEBUGGING = (
    "AMD_SERIALIZE_KERNEL",
    "AMD_SERIALIZE_COPY",
    "HIP_LAUNCH_BLOCKING",
    "CUDA_LAUNCH_BLOCKING",
    "AMD_LOG_LEVEL",
    "PYTORCH_NO_HIP_MEMORY_CACHING",
)
_DEBUGGING_SOURCE = "https://rocm.docs.amd.com/projects/HIP/en/latest/reference/env_variables.html"


def environment(tree: Tree) -> Result:
    """No variable disguises the GPU or loads another ROCm. HSA_OVERRIDE_GFX_VERSION causes memory
    faults: https://github.com/ROCm/legacy-rocm-build/issues/5824"""
    names = ["HSA_OVERRIDE_GFX_VERSION"]
    if tree.ours:
        # the number is that of the node in KFD's topology
        names.append(f"HSA_OVERRIDE_GFX_VERSION_{tree.ours.number}")
    overrides = {name: tree.environ[name] for name in names if tree.environ.get(name)}
    if overrides:
        listed = ", ".join(f"{name}={value}" for name, value in overrides.items())
        fix = f"unset {' '.join(overrides)}, and remove it from the shell's startup files"
        if {*overrides.values()} == {WANTED["__amdgpu_arch"]}:
            return remark(f"{listed} names this GPU, and changes nothing", fix)
        return error(f"{listed}: libraries take the GPU for another one", fix)
    own = tuple(tree.environ.get(n) or "no environment" for n in ("CONDA_PREFIX", "VIRTUAL_ENV"))
    foreign = [
        name
        for name in ("LD_LIBRARY_PATH", "LD_PRELOAD", "ROCM_PATH", "ROCM_HOME", "HIP_PATH")
        for part in tree.environ.get(name, "").split(":")
        if "rocm" in part.lower() and not part.startswith(own)
    ]
    if not foreign or _uses_system(tree):
        return worst([_activation(tree), _debugging(tree)])
    listed = " ".join(dict.fromkeys(foreign))
    if any(name.startswith("LD_") for name in foreign):
        what = f"{listed}: another ROCm's libraries are loaded first"
        return error(what, f"unset {listed}", variables=listed)
    return warning(f"{listed}: points to another ROCm", f"unset {listed}", variables=listed)


def _uses_system(tree: Tree) -> bool:
    """Return whether the system's Python has torch: the system's ROCm is then the one to load."""
    python = interpreter(tree)
    return python is not None and python.kind == "system" and bool(python.distributions("torch"))


def _debugging(tree: Tree) -> Result:
    """Warn of variables that make every kernel wait, as guides against faults set them."""
    names = [name for name in _DEBUGGING if tree.environ.get(name, "0") != "0"]
    if not names:
        return fine()
    listed = ", ".join(f"{name}={tree.environ[name]}" for name in names)
    message = f"{listed}: for debugging; it slows every kernel"
    return warning(message, f"unset {' '.join(names)}", _DEBUGGING_SOURCE)


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
    if files and not _uses_system(tree):
        name = f"/{files[0].relative_to(tree.root)}"
        what = f"{name} puts the system's ROCm on the loader's path"
        return warning(what, f"sudo rm {name} && sudo ldconfig", installed=", ".join(installed))
    return fine(installed=", ".join(installed))


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
    installed = _last_installation(tree)
    if installed is None:
        raise CannotRun("the age of an installed ROCm or Triton cannot be read")
    stale = []
    for name, folder in _cache_folders(tree).items():
        try:
            newest = max((file.stat().st_mtime for file in folder.iterdir()), default=installed)
        except OSError:
            continue
        if newest < installed:
            stale.append(name)
    if not stale:
        return fine()
    listed = " ".join(stale)
    return warning(f"older than the installed ROCm and Triton: {listed}", f"rm -r {listed}")


def _last_installation(tree: Tree) -> float | None:
    """Return when a compiler or a library that compiles was installed last; None if none is."""
    files = []
    if tree.prefix and (tree.prefix / "conda-meta").is_dir():
        meta = tree.prefix / "conda-meta"
        files = [file for name in _COMPILERS for file in meta.glob(f"{name}-*.json")] or [meta]
    python = interpreter(tree)
    for place in python.places if python else ():
        for name in _COMPILING_WHEELS:
            wheels = place.path.glob(f"{name}-*.dist-info")
            files += [wheel for wheel in wheels if small_text(wheel / "INSTALLER") != "conda"]
    # package managers keep the times of files, but write their own lists when they install
    for name in _COMPILING_PACKAGES:
        files += tree.glob(f"var/lib/dpkg/info/{name}*.list")
        files += tree.glob(f"var/lib/pacman/local/{name}-*/desc")
    files += tree.glob("opt/rocm*/.info/version")
    return max((file.stat().st_mtime for file in files if file.exists()), default=None)


def _cache_folders(tree: Tree) -> dict[str, Path]:
    """Return the folders of caches by the names that a user knows them by."""
    folders = {
        "~/.cache/comgr": tree.home / ".cache/comgr",
        "~/.cache/miopen": tree.home / ".cache/miopen",
        "~/.config/miopen": tree.home / ".config/miopen",
        "~/.triton/cache": tree.home / ".triton/cache",
        "~/.cache/vllm/torch_compile_cache": tree.home / ".cache/vllm/torch_compile_cache",
    }
    for name in ("TRITON_CACHE_DIR", "AMD_COMGR_CACHE_DIR", "MIOPEN_CUSTOM_CACHE_DIR"):
        value = tree.environ.get(name)
        if value:
            folders[value] = tree.path(value)
    return folders


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
        fix = Fix("upgrade the distribution", needs_reboot=True)
        return error(f"glibc {text} is older than 2.28", fix, glibc=text)
    return fine(glibc=text)


def disk(tree: Tree) -> Result:
    """20 GB are free where environments are installed; ROCm's libraries alone take 9:
    https://github.com/ROCm/TheRock/blob/main/docs/faq.md"""
    place = tree.prefix or tree.root
    gb = round(disk_usage(place).free / 1e9, 1)
    if gb * 1e9 < DISK:
        return warning(f"{gb} GB are free", "pixi clean cache, or: conda clean --all", free_gb=gb)
    return fine(free_gb=gb)
