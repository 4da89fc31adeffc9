# SPDX-License-Identifier: BSD-3-Clause
"""The doctor's checks of the installed torch: who built it, what hides it, and its ROCm."""

import re
from typing import Any

from strix_validate import TARGET
from strix_validate.checks import CannotRun, Result
from strix_validate.doctor import hardware, kernel_release, workspace
from strix_validate.doctor._verdicts import combine, error, fine, remark, warning
from strix_validate.doctor.interpreter import (
    CONDA_NAMES,
    Distribution,
    Interpreter,
    find_interpreter,
    is_from_our_channel,
    is_our_channel,
    read_conda_record,
)
from strix_validate.doctor.tree import Tree
from strix_validate.installing import is_of_pixi

_AMD = "https://github.com/ROCm/TheRock/blob/main/RELEASES.md"
_WITHOUT_KERNELS = "https://github.com/ROCm/TheRock/issues/7839"
_WRONG_BUILD = "https://github.com/gpustack/gpustack/issues/3786"
#: The page that explains how to move from another torch to our packages.
_MOVE = "docs/move.md"
_SHADOW = "https://docs.python.org/3/library/site.html"
_MISFIT = "https://rocm.docs.amd.com/en/docs-7.14.0/reference/system-optimization/rdna3-5.html"
#: The version of ROCm in kyuz0's toolboxes. Their images patch it with the fix of ROCm 7.2.
_PATCHED_VERSION = (6, 4, 4)
#: Programs that install from PyPI, whose torch for Linux is the build for CUDA.
_PIP = ("pip", "uv", "uv-pixi", "poetry", "pdm")
#: Builds of torch that see no AMD GPU, in words.
_OTHER_BUILDS = {
    "cuda": "CUDA",
    "cpu": "CPUs",
    "xpu": "Intel's GPUs",
}
#: Names of dist-info folders of AMD's wheels with kernels: rocm_sdk_device_gfx1151,
#: amd_torch_device_gfx115x, and before ROCm 10 rocm_sdk_libraries_gfx120x_all.
_WHEEL_OF_GPU = r"(?:rocm_sdk_(?:device|libraries)|amd_torch_device)_(gfx[0-9a-fx]+)(?:_\w+)?"

#: conda-meta's record of a package.
_CondaRecord = dict[str, Any]
#: Lists of distributions by name, in the order in which Python looks for a distribution.
_Installed = dict[str, list[Distribution]]


def suggest_torch(python: Interpreter, torch: Distribution) -> str:
    """Return how to install a torch for the GPU.

    Where possible, this uses the tool that installed the present torch.
    """
    if any(map(is_our_channel, workspace.read_channels(python.prefix))):
        return f"use torch from our channel, which the workspace already names: {_MOVE}"
    if torch.installer == "uv-pixi":
        # pixi would replace a torch that another tool installed, so the fix changes pixi.toml.
        return "in pixi.toml, get torch from AMD's index: docs/pypi.md has the lines to add"
    install = "python -m pip install --force-reinstall"
    if python.kind == "system":
        # Linux distributions refuse pip outside of an environment (PEP 668).
        install = "python3 -m venv ENV && ENV/bin/python -m pip install"
    elif torch.installer.startswith("uv"):
        install = "uv pip install --reinstall"
    return (
        f"{install} --index-url https://stable.repo.amd.com/rocm/whl-next/ "
        f"'torch[device-{TARGET}]' 'torchvision[device-{TARGET}]' torchaudio"
    )


def packages(tree: Tree) -> Result:
    """The torch that Python loads is built for this GPU: our channel's, or AMD's wheels. A package
    from PyPI that requires torch installs PyPI's build, which overwrites ours unless pixi knows the
    name of our package on PyPI:
    https://pixi.prefix.dev/latest/reference/pixi_manifest/#conda-pypi-map-optional"""
    python = find_interpreter(tree)
    if python is None:
        raise CannotRun("torch is not installed")
    installed = _find_installed(python)
    records = _read_records(python)
    if not installed and not records:
        raise CannotRun("torch is not installed")
    measured = {name: distributions[0].version for name, distributions in installed.items()}
    for name, record in records.items():
        measured.setdefault(name, str(record.get("version")))
    results = [_judge_conda_packages(python, installed, records)]
    for distributions in installed.values():
        results.append(_judge_shadow(distributions))
    if "torch" in installed:
        torch = _select_torch(installed["torch"])
        visions = installed.get("torchvision", [])
        results.append(_judge_hidden_environment(tree, python, torch))
        results.append(_judge_torch(tree, python, torch, records))
        results.append(_judge_torchvision(python, torch, visions))
    return combine(results, **measured, environment=python.kind)


def _find_installed(python: Interpreter) -> _Installed:
    """Return the installed distributions of each name in CONDA_NAMES."""
    installed = {}
    for name in CONDA_NAMES:
        distributions = python.find_distributions(name)
        if distributions:
            installed[name] = distributions
    return installed


def _read_records(python: Interpreter) -> dict[str, _CondaRecord]:
    """Return conda-meta's records by the name of the distribution."""
    records = {}
    for name, package in CONDA_NAMES.items():
        record = read_conda_record(python.prefix, package)
        if record:
            records[name] = record
    return records


def _select_torch(distributions: list[Distribution]) -> Distribution:
    """Return the environment's own torch, or the first one if the environment has none.

    Python loads the environment's own torch once the distributions that hide it are removed.
    """
    for distribution in distributions:
        if distribution.place.is_in_environment:
            return distribution
    return distributions[0]


def _is_from_conda_forge(record: _CondaRecord) -> bool:
    return "conda-forge" in str(record.get("channel"))


def _is_of_pip(distribution: Distribution) -> bool:
    """Return whether a program that installs from PyPI installed the distribution."""
    return distribution.installer.split(" ")[0] in _PIP


def _judge_conda_packages(
    python: Interpreter,
    installed: _Installed,
    records: dict[str, _CondaRecord],
) -> Result:
    """Judge conda's packages: whether they are conda-forge's, or another tool overwrote them."""
    for name, record in records.items():
        package = CONDA_NAMES[name]
        overwriting = [
            distribution
            for distribution in installed.get(name, [])
            if distribution.place.is_in_environment and distribution.installer != "conda"
        ]
        if not overwriting:
            if _is_from_conda_forge(record):
                return _judge_conda_forge(python, package, record)
            continue
        other = overwriting[0]
        if is_from_our_channel(record):
            message = (
                f"{name} {other.version} was installed by {other.installer}, over our channel's"
            )
            fix = _suggest_reinstall(python, package, other, installed)
            return error(message, f"{fix}; {_MOVE} has more")
        if name == "torch":
            version = record.get("version")
            message = (
                f"{other.installer} installed {name} {other.version} over conda's {version}: the "
                "files of both are in one folder"
            )
            install = suggest_torch(python, other)
            fix = f"pixi remove {package}, or conda remove {package}; then {install}"
            return warning(message, fix)
    return fine()


def _suggest_reinstall(
    python: Interpreter,
    package: str,
    other: Distribution,
    installed: _Installed,
) -> str:
    """Return how to restore the channel's package that another program overwrote."""
    # pixi does not notice that the files changed, not even when it locks the same package again.
    fix = "pixi clean && pixi install"
    if other.installer == "uv-pixi":
        names = []
        for name, distributions in installed.items():
            if any(each.installer == "uv-pixi" for each in distributions):
                names.append(name)
        tables = "put the tables that map our packages to PyPI's names into pixi.toml"
        return f"{tables}; then pixi update --no-install {' '.join(names)} && {fix}"
    if not is_of_pixi(python.prefix):
        fix += f"; in a conda environment: conda install --force-reinstall {package}"
    return fix


def _judge_conda_forge(python: Interpreter, package: str, record: _CondaRecord) -> Result:
    """Judge a package from conda-forge that should come from our channel."""
    message = f"{package} {record.get('version')} is conda-forge's"
    build = str(record.get("build"))
    if "cuda" in build:
        message += " build for CUDA, and sees no AMD GPU"
    elif build.startswith("cpu"):
        message += " build for CPUs, and sees no AMD GPU"
    else:
        message += ", which has no ROCm"
    channels = workspace.read_channels(python.prefix)
    our_channels = [channel for channel in channels if is_our_channel(channel)]
    if not our_channels:
        fix = f'name our channel first, with channel-priority = "strict"; {_MOVE} explains how'
    elif is_our_channel(channels[0]):
        # If the first channel lacks a required version, pixi uses the next channel, even if the
        # priority is strict.
        fix = f"require a version of {package} that our channel has; {_MOVE} has more"
    else:
        message += f": in the workspace, our channel comes after {channels[0]}"
        channel = our_channels[0]
        command = "pixi workspace channel"
        fix = f"{command} remove {channel} && {command} add --prepend {channel}; {_MOVE} has more"
    return error(message, fix)


def _judge_shadow(distributions: list[Distribution]) -> Result:
    """Judge whether Python loads another distribution instead of the environment's own."""
    first = distributions[0]
    label = first.place.label
    shadowed = [each for each in distributions if each.place.is_in_environment]
    if first.place.is_in_environment or not shadowed:
        return fine()
    message = (
        f"{first.name} {first.version} of {label} is loaded before {shadowed[0].version}, the "
        "environment's own"
    )
    uninstall = f"python3 -m pip uninstall {first.name}"
    fixes = {
        "PYTHONPATH": "unset PYTHONPATH",
        "the user's folder": f"export PYTHONNOUSERSITE=1, or {uninstall}; {_MOVE} has more",
    }
    remove = f"remove {label}, which names {first.place.path}"
    return error(message, fixes.get(label, remove), _SHADOW)


def _judge_hidden_environment(tree: Tree, python: Interpreter, torch: Distribution) -> Result:
    """Judge whether Python loads a virtual environment's torch instead of our channel's."""
    if python.kind != "venv":
        return fine()
    prefixes = [python.base]
    active = tree.environ.get("CONDA_PREFIX")
    if active:
        prefixes.insert(0, tree.path(active))
    for prefix in prefixes:
        record = read_conda_record(prefix, CONDA_NAMES["torch"])
        is_loaded = torch.place.path.is_relative_to(prefix)
        if record is None or not is_from_our_channel(record) or is_loaded:
            continue
        message = (
            f"torch {torch.version} of the virtual environment is loaded instead of our channel's "
            f"{record.get('version')}"
        )
        fix = f"deactivate, and run Python with pixi run or conda run; {_MOVE} has more"
        return error(message, fix, _SHADOW)
    return fine()


def _judge_torch(
    tree: Tree,
    python: Interpreter,
    torch: Distribution,
    records: dict[str, _CondaRecord],
) -> Result:
    """Judge the build of the torch that _select_torch chose."""
    record: _CondaRecord = {}
    if torch.installer == "conda" and torch.place.is_in_environment:
        record = records.get("torch", {})
    if is_from_our_channel(record) and "+rocm" in torch.version:
        message = f"torch {torch.version} is AMD's build: head dims above 256 give wrong values"
        return error(message, "use the channel's own build: ./forge build pytorch")
    if is_from_our_channel(record) or _is_from_conda_forge(record):
        # _judge_conda_packages judges conda-forge's build.
        return fine()
    build = torch.build
    if _is_of_pip(torch) and build == "" and "+" not in torch.version:
        # PyPI's own torch, whose version has no "+", is built for CUDA.
        build = "cuda"
    if build in _OTHER_BUILDS:
        message = (
            f"torch {torch.version} is the build for {_OTHER_BUILDS[build]}, and sees no AMD GPU"
        )
        return error(message, suggest_torch(python, torch), _WRONG_BUILD)
    return combine([_judge_runtime(tree, python, torch), _judge_kernels(python, torch)])


def _judge_runtime(tree: Tree, python: Interpreter, torch: Distribution) -> Result:
    """Judge torch's ROCm: 7.2 and newer, except 7.9 and 7.10, work with the fixed Linux kernels."""
    if TARGET != "gfx1151":
        return fine()
    fix = suggest_torch(python, torch)
    nightly = kernel_release.find_faulty_nightly(torch.runtime)
    if nightly:
        message = f"torch {torch.version} contains a nightly build of ROCm that {nightly.symptom}"
        return error(message, fix, nightly.source)
    misfit = kernel_release.find_misfit(torch.runtime)
    # Linux distributions patch the ROCm that they package, so its version does not prove a fault.
    is_wheel = torch.place.label != "the system" or _is_of_pip(torch)
    if torch.build != "rocm" or misfit is None or not is_wheel:
        return fine()
    source = f"{misfit.source} {_MISFIT}"
    release = kernel_release.parse(tree.release or "")
    message = f"torch {torch.version} contains ROCm {torch.runtime}"
    if release is None or not hardware.has_fixes(tree, release):
        message += (
            ", whose support of gfx1151 is unstable; ROCm 7.2 and newer are stable, except 7.9 and "
            "7.10"
        )
        return warning(message, fix, source)
    message += (
        f", which page-faults on kernels with the fixes for gfx1151 ({release.text}); ROCm 7.2 and "
        "newer work, except 7.9 and 7.10"
    )
    return error(message, fix, source)


def _judge_kernels(python: Interpreter, torch: Distribution) -> Result:
    """Judge whether the installed wheels have kernels for this GPU."""
    names = [name.lower() for name in python.list_names()]
    fix = suggest_torch(python, torch)
    gpus = set()
    for name in names:
        match = re.fullmatch(_WHEEL_OF_GPU, name)
        if match:
            gpus.add(match[1])
    if "rocm_sdk_core" in names and not gpus:
        message = "AMD's wheels are installed, but not the wheel that has the kernels for a GPU"
        return error(message, fix, _WITHOUT_KERNELS)
    if gpus and not any(map(_is_for_target, gpus)):
        listed = ", ".join(sorted(gpus))
        message = f"AMD's wheels for {listed} are installed, without kernels for {TARGET}"
        return error(message, fix, _AMD)
    library = torch.place.path / "torch/lib/rocblas/library"
    if library.is_dir() and not any(library.glob(f"*{TARGET}*")):
        message = f"torch {torch.version} has a rocBLAS with no kernels for {TARGET}"
        return error(message, fix, _AMD)
    return fine()


def _is_for_target(gpu: str) -> bool:
    """Return whether a GPU in a wheel's name is the target; in gfx115x, x stands for any digit."""
    digits = gpu.removeprefix("gfx").replace("x", "[0-9a-f]")
    return re.fullmatch(f"gfx{digits}", TARGET) is not None


def _judge_torchvision(
    python: Interpreter,
    torch: Distribution,
    visions: list[Distribution],
) -> Result:
    """Warn of a torchvision that is not built for ROCm beside a torch that is.

    The operators of such a torchvision do not load.
    """
    if torch.build != "rocm" or not visions or visions[0].build in ("", "rocm"):
        return fine()
    message = (
        f"torch {torch.version} is built for ROCm, but torchvision {visions[0].version} is not"
    )
    return warning(message, suggest_torch(python, torch), _WRONG_BUILD)


def runtime(tree: Tree) -> Result:
    """The system's ROCm fits the Linux kernel. ROCm before 7.2, and 7.9 and 7.10, compute the size
    of the context save area themselves, and page-fault on Linux kernels with the fixes for gfx1151:
    https://github.com/ROCm/TheRock/issues/2991"""
    names = [tree.distribution["ID"], *tree.distribution.get("ID_LIKE", "").split()]
    if "arch" in names:
        # Arch's ROCm in /opt/rocm works with the fixed Linux kernels, whatever its version.
        return fine()
    texts = [tree.read_at(file) for file in tree.glob("opt/rocm*/.info/version")]
    versions = list(dict.fromkeys(text for text in texts if text))
    if not versions:
        return fine()
    measured = {"rocm": ", ".join(versions)}
    misfits = [version for version in versions if kernel_release.find_misfit(version)]
    release = kernel_release.parse(tree.release or "")
    if not misfits or TARGET != "gfx1151":
        return fine(**measured)
    if release is None or not hardware.has_fixes(tree, release):
        return fine(**measured)
    message = (
        f"/opt/rocm has ROCm {', '.join(misfits)}, which page-faults on kernels with the fixes for "
        f"gfx1151 ({release.text}); ROCm 7.2 and newer work, except 7.9 and 7.10"
    )
    fix = "install ROCm 7.2.1 or newer"
    numbers = {kernel_release.parse_version(version)[:3] for version in misfits}
    if numbers == {_PATCHED_VERSION}:
        return remark(f"{message}; in kyuz0's toolboxes, ROCm 6.4.4 is patched", fix, **measured)
    if _loads_rocm_torch(tree):
        return remark(f"{message}; torch has its own ROCm", fix, **measured)
    return warning(message, fix, **measured)


def _loads_rocm_torch(tree: Tree) -> bool:
    python = find_interpreter(tree)
    if python is None:
        return False
    distributions = python.find_distributions("torch")
    return bool(distributions) and distributions[0].build == "rocm"
