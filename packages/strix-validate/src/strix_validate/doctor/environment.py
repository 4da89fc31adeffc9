# SPDX-License-Identifier: BSD-3-Clause
"""The doctor's checks of software: variables, libraries, packages, caches and disk space."""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from shutil import disk_usage

from strix_validate import TARGET
from strix_validate.checks import CannotRun, Result
from strix_validate.doctor import cluster_machine, kernel_lists
from strix_validate.doctor._verdicts import (
    Fix,
    combine,
    error,
    fine,
    need_value,
    remark,
    warning,
)
from strix_validate.doctor.interpreter import find_interpreter
from strix_validate.doctor.tree import Tree
from strix_validate.doctor.virtual_packages import REQUIRED
from strix_validate.json_file import read_json_object, read_small_text

#: Bytes that an environment with the ROCm libraries and this repository's packages needs.
DISK = 20 * 10**9
#: Variables that the activation of rocm-sdk-core sets; docs/rocm.md has the reasons.
_ACTIVATION = {
    "ROCPROFILER_QUEUE_INTERPOSITION": "0",
    "MIOPEN_FIND_MODE": "FAST",
}
#: Packages whose updates make compiled kernels stale: packages of conda, wheels, and packages of
#: Linux distributions.
_COMPILERS = ("rocm*", "hip*", "triton", "pytorch", "libtorch", "aotriton*")
_COMPILER_WHEELS = ("rocm", "rocm_sdk_core", "triton", "pytorch_triton_rocm", "torch")
_COMPILER_PACKAGES = ("rocm-core", "amdrocm", "hip-runtime-amd", "comgr", "libamdhip64")
#: Variables for debugging. They make a program wait for each kernel or copy, print each call, or
#: allocate memory anew for each tensor.
_DEBUGGING = (
    "AMD_SERIALIZE_KERNEL",
    "AMD_SERIALIZE_COPY",
    "HIP_LAUNCH_BLOCKING",
    "CUDA_LAUNCH_BLOCKING",
    "AMD_LOG_LEVEL",
    "PYTORCH_NO_HIP_MEMORY_CACHING",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)
_DEBUGGING_SOURCE = "https://rocm.docs.amd.com/projects/HIP/en/latest/reference/env_variables.html"
#: Variables that may point programs to a ROCm outside of the environment.
_PATHS = ("LD_LIBRARY_PATH", "LD_PRELOAD", "ROCM_PATH", "ROCM_HOME", "HIP_PATH")
#: Cache folders in the user's home folder, and variables that name other cache folders.
_CACHE_FOLDERS = (
    ".cache/comgr",
    ".cache/miopen",
    ".config/miopen",
    ".triton/cache",
    ".cache/vllm/torch_compile_cache",
)
_CACHE_VARIABLES = (
    "TRITON_CACHE_DIR",
    "AMD_COMGR_CACHE_DIR",
    "MIOPEN_CUSTOM_CACHE_DIR",
)


def environment(tree: Tree) -> Result:
    """No variable makes libraries mistake the GPU for another model, load another ROCm, hang, or
    run slowly. HSA_OVERRIDE_GFX_VERSION causes memory faults:
    https://github.com/ROCm/legacy-rocm-build/issues/5824"""
    overrides = _read_overrides(tree)
    if overrides:
        return _judge_overrides(overrides, tree)
    foreign = _find_foreign_variables(tree)
    if not foreign or _uses_system_rocm(tree):
        return combine([_judge_activation(tree), _judge_debugging(tree)])
    names = " ".join(dict.fromkeys(foreign))
    fix = f"unset {names}"
    if any(name.startswith("LD_") for name in foreign):
        message = f"{names}: another ROCm's libraries are loaded first"
        return error(message, fix, variables=names)
    return warning(f"{names}: points to another ROCm", fix, variables=names)


def _read_overrides(tree: Tree) -> dict[str, str]:
    """Return the variables that tell libraries which model the GPU is, with their values."""
    names = ["HSA_OVERRIDE_GFX_VERSION"]
    if tree.target_gpu:
        # The suffix of this variable is the GPU's node number in KFD's topology.
        names.append(f"HSA_OVERRIDE_GFX_VERSION_{tree.target_gpu.number}")
    return {name: tree.environ[name] for name in names if tree.environ.get(name)}


def _judge_overrides(overrides: dict[str, str], tree: Tree) -> Result:
    listed = _format_variables(overrides)
    names = " ".join(overrides)
    fix = f"unset {names}, and remove each assignment from the shell's startup files"
    others = [node.name for node in tree.gpus if node.name != TARGET]
    if set(overrides.values()) != {REQUIRED["__amdgpu_arch"]}:
        return error(f"{listed}: libraries mistake the GPU for another model", fix)
    if others and "HSA_OVERRIDE_GFX_VERSION" in overrides:
        message = f"{listed}: programs that see {', '.join(others)} mistake it for {TARGET}"
        return error(message, fix)
    return remark(f"{listed}: this changes nothing on {TARGET}", fix)


def _format_variables(variables: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items())


def _find_foreign_variables(tree: Tree) -> list[str]:
    """Return the variables that name a ROCm outside of the active environments."""
    prefixes = []
    for name in ("CONDA_PREFIX", "VIRTUAL_ENV"):
        prefix = tree.environ.get(name)
        if prefix:
            prefixes.append(prefix)
    foreign = []
    for name in _PATHS:
        for part in tree.environ.get(name, "").split(":"):
            if "rocm" in part.lower() and not part.startswith(tuple(prefixes)):
                foreign.append(name)
    return foreign


def _uses_system_rocm(tree: Tree) -> bool:
    """Return whether the examined Python is the system's and has a torch.

    Such a torch may need the system's ROCm.
    """
    python = find_interpreter(tree)
    if python is None or python.kind != "system":
        return False
    return bool(python.find_distributions("torch"))


def _judge_debugging(tree: Tree) -> Result:
    """Warn of variables that slow programs down. Users set them to debug programs."""
    names = [name for name in _DEBUGGING if tree.environ.get(name, "") not in ("", "0")]
    if not names:
        return fine()
    listed = _format_variables({name: tree.environ[name] for name in names})
    message = f"{listed}: a setting for debugging, which slows programs down"
    return warning(message, f"unset {' '.join(names)}", _DEBUGGING_SOURCE)


def _judge_activation(tree: Tree) -> Result:
    """Warn if a variable in _ACTIVATION has another value, because programs may then hang."""
    if not tree.prefix or not any(tree.prefix.glob("conda-meta/rocm-sdk-core-*.json")):
        return fine()
    values = {name: tree.environ.get(name, "unset") for name in _ACTIVATION}
    wrong = [name for name in values if values[name] != _ACTIVATION[name]]
    if not wrong:
        return fine(**values)
    listed = ", ".join(f"{name} is {values[name]}" for name in wrong)
    assignments = " ".join(f"{name}={_ACTIVATION[name]}" for name in wrong)
    message = f"{listed}: programs may hang (docs/rocm.md)"
    return warning(message, f"export {assignments}", **values)


def stray_rocm(tree: Tree) -> Result:
    """No ROCm of the system is on the loader's path. Two versions of ROCm in one process crash, and
    this repository's packages have their own ROCm:
    https://github.com/ROCm/TheRock/blob/main/docs/faq.md"""
    folders = [str(path.relative_to(tree.root)) for path in tree.glob("opt/rocm*")]
    installed = ", ".join(folders)
    for file in tree.glob("etc/ld.so.conf.d/*.conf"):
        if "rocm" not in (tree.read_at(file) or ""):
            continue
        if _uses_system_rocm(tree):
            break
        name = f"/{file.relative_to(tree.root)}"
        message = f"{name} puts the system's ROCm on the loader's path"
        return warning(message, f"sudo rm {name} && sudo ldconfig", installed=installed)
    return fine(installed=installed)


def kernels(tree: Tree) -> Result:
    """Each package of compiled kernels fits the installed Triton and the packages that call the
    kernels. Triton looks a kernel up by its source. If the installed build of a calling package has
    another source, Triton finds no kernel, and compiles one at the first call: docs/validate.md"""
    if not tree.prefix:
        return fine()
    lists = kernel_lists.read_lists(tree.prefix)
    measured = {}
    messages = []
    for package, package_kernels in lists.items():
        number = len(package_kernels)
        measured[package] = f"{number} kernels"
        for other in _find_mismatches(tree.prefix, package):
            measured[package] = f"0 of {number} kernels"
            messages.append(f"{package}: 0 of {number} kernels are for the installed {other}")
    if messages:
        fix = f"pixi update {' '.join(lists)}"
        return warning("; ".join(messages), fix, **measured)
    return fine(**measured)


def _find_mismatches(prefix: Path, package: str) -> Iterator[str]:
    """Yield installed packages in a version or build that a package of kernels does not allow."""
    for name, version, build in find_exact_requirements(prefix, package):
        files = prefix.glob(f"conda-meta/{name}-[0-9]*.json")
        installed = [file.stem for file in files]
        pattern = f"{name}-{version}-{build}"
        if installed and not any(fnmatchcase(stem, pattern) for stem in installed):
            yield installed[0]


def find_exact_requirements(prefix: Path, package: str) -> Iterator[tuple[str, str, str]]:
    """Yield the requirements of an installed package that allow exactly one version.

    Yields:
        A name, a version, and a pattern of build strings.
    """
    for file in prefix.glob(f"conda-meta/{package}-[0-9]*.json"):
        try:
            record = read_json_object(file)
            specs = [*record.get("depends", ()), *record.get("constrains", ())]
        except (ValueError, TypeError):
            continue
        for spec in map(str, specs):
            exact = re.fullmatch(r"(?!__)([\w.-]+) ==([\w.]+)(?: (\S+))?", spec)
            if exact:
                yield exact[1], exact[2], exact[3] or "*"


def caches(tree: Tree) -> Result:
    """No cache of compiled kernels is older than the last installation of ROCm, Triton or torch.
    comgr, MIOpen and Triton reuse stale kernels:
    https://github.com/ROCm/legacy-rocm-build/issues/6034"""
    installed = _find_last_installation(tree)
    if installed is None:
        raise CannotRun("the age of caches cannot be judged: no ROCm, Triton or torch is installed")
    stale = []
    for name, folder in _find_cache_folders(tree).items():
        try:
            times = [file.stat().st_mtime for file in folder.iterdir()]
        except OSError:
            continue
        if times and max(times) < installed:
            stale.append(name)
    if not stale:
        return fine()
    listed = " ".join(stale)
    message = f"older than the last installation of ROCm, Triton or torch: {listed}"
    return warning(message, f"rm -r {listed}")


def _find_last_installation(tree: Tree) -> float | None:
    """Return when ROCm, Triton or torch was last installed, or None if none of them was.

    In a conda environment that has none of them, the last change of its packages counts.
    """
    files: list[Path] = []
    if tree.prefix and (tree.prefix / "conda-meta").is_dir():
        meta = tree.prefix / "conda-meta"
        for name in _COMPILERS:
            files += meta.glob(f"{name}-*.json")
        files = files or [meta]
    python = find_interpreter(tree)
    for place in python.places if python else ():
        for name in _COMPILER_WHEELS:
            for wheel in place.path.glob(f"{name}-*.dist-info"):
                if read_small_text(wheel / "INSTALLER") != "conda":
                    files.append(wheel)
    # Package managers preserve the times of files, but write their own lists when they install. So
    # the times of these lists are read.
    for name in _COMPILER_PACKAGES:
        files += tree.glob(f"var/lib/dpkg/info/{name}*.list")
        files += tree.glob(f"var/lib/pacman/local/{name}-*/desc")
    files += tree.glob("opt/rocm*/.info/version")
    times = [file.stat().st_mtime for file in files if file.exists()]
    return max(times, default=None)


def _find_cache_folders(tree: Tree) -> dict[str, Path]:
    """Return each cache folder by its printed path: ~/NAME, or the value of a variable."""
    folders = {f"~/{name}": tree.home / name for name in _CACHE_FOLDERS}
    for variable in _CACHE_VARIABLES:
        name = tree.environ.get(variable)
        if name:
            folders[name] = tree.path(name)
    return folders


def two_machines(tree: Tree) -> Result:
    """If Ray is installed, this machine fits into a cluster of two. The machine allows enough open
    files and has a network. The hash of its packages is printed, to compare it with the hash of the
    other machine's packages: docs/cluster.md"""
    if not tree.prefix or not any(tree.prefix.glob("conda-meta/ray-core-*.json")):
        return fine()
    needed = cluster_machine.FILES
    soft, hard = cluster_machine.read_file_limits()
    if hard < needed:
        fix = f"add `* hard nofile {needed}` to /etc/security/limits.conf and log in again"
        return error(f"at most {hard} open files are allowed, but a cluster needs {needed}", fix)
    links = cluster_machine.list_links()
    if not links:
        return error(
            "this machine has no IPv4 address but loopback",
            "give the interface of the cable between the machines an address",
        )
    addresses = ", ".join(f"{link.interface} {link.address}" for link in links)
    digest = cluster_machine.hash_packages(tree.prefix)
    advice = "the doctor must print the same hash of packages on the other machine"
    if soft < needed:
        advice += f"; before `ray start`, run: ulimit -n {needed}"
    return remark(f"hash of packages {digest}, addresses {addresses}", advice)


def glibc(tree: Tree) -> Result:
    """glibc is 2.28 or newer, which ROCm's libraries require:
    https://github.com/ROCm/TheRock/blob/main/docs/faq.md"""
    version = need_value(tree.glibc, "glibc's version")
    text = ".".join(map(str, version))
    if version < (2, 28):
        fix = Fix("upgrade the distribution", needs_reboot=True)
        return error(f"glibc {text} is older than 2.28", fix, glibc=text)
    return fine(glibc=text)


def disk(tree: Tree) -> Result:
    """20 GB are free on the environment's disk; ROCm's libraries alone need 9 GB:
    https://github.com/ROCm/TheRock/blob/main/docs/faq.md"""
    folder = tree.prefix or tree.root
    gb = round(disk_usage(folder).free / 1e9, 1)
    if gb * 1e9 < DISK:
        return warning(
            f"{gb} GB are free on the disk of {folder}, and an installation needs up to "
            f"{DISK // 10**9} GB",
            "pixi clean cache, or: conda clean --all",
            free_gb=gb,
        )
    return fine(free_gb=gb)
