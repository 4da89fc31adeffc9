# SPDX-License-Identifier: BSD-3-Clause
"""The doctor's checks of the installed torch: whose build it is, what it shadows, what it needs."""

import re

from strix_validate import TARGET
from strix_validate.checks import CannotRun, Result
from strix_validate.doctor import hardware, kernel_release, workspace
from strix_validate.doctor._verdicts import error, fine, remark, warning, worst
from strix_validate.doctor.interpreter import (
    CONDA_NAMES,
    Distribution,
    Interpreter,
    conda_record,
    interpreter,
    is_our_channel,
    is_ours,
)
from strix_validate.doctor.tree import Tree
from strix_validate.installing import is_of_pixi

_AMD = "https://github.com/ROCm/TheRock/blob/main/RELEASES.md"
_WITHOUT_KERNELS = "https://github.com/ROCm/TheRock/issues/7839"
_WRONG_BUILD = "https://github.com/gpustack/gpustack/issues/3786"
#: How to come to our packages from another torch.
_MOVE = "docs/move.md"
_SHADOW = "https://docs.python.org/3/library/site.html"
_MISFIT = "https://rocm.docs.amd.com/en/docs-7.14.0/reference/system-optimization/rdna3-5.html"
#: A runtime that one project's images have with the fix.
_MENDED = (6, 4, 4)
#: What installs from PyPI, whose torch for Linux is the build for CUDA.
_PIP = ("pip", "uv", "uv-pixi", "poetry", "pdm")
_OTHER_BUILDS = {"cuda": "CUDA", "cpu": "CPUs", "xpu": "Intel's GPUs"}
#: Names of dist-info folders of AMD's wheels with kernels: rocm_sdk_device_gfx1151,
#: amd_torch_device_gfx115x, and before ROCm 10 rocm_sdk_libraries_gfx120x_all.
_WHEEL_OF_GPU = r"(?:rocm_sdk_(?:device|libraries)|amd_torch_device)_(gfx[0-9a-fx]+)(?:_\w+)?"


def install_command(python: Interpreter, torch: Distribution) -> str:
    """Return the command that installs AMD's wheels for the GPU, with the tool that is in use."""
    if any(map(is_our_channel, workspace.channels(python.prefix))):
        return f"take torch from our channel, which the workspace names: {_MOVE}"
    if torch.by == "uv-pixi":
        # pixi would undo what another tool installs
        return "in pixi.toml, take torch from AMD's index: docs/pypi.md has the four lines"
    install = "python -m pip install --force-reinstall"
    if python.kind == "system":
        # distributions refuse pip outside of an environment (PEP 668)
        install = "python3 -m venv ENV && ENV/bin/python -m pip install"
    elif torch.by.startswith("uv"):
        install = "uv pip install --reinstall"
    return (
        f"{install} --index-url https://stable.repo.amd.com/rocm/whl-next/ "
        f"'torch[device-{TARGET}]' 'torchvision[device-{TARGET}]' torchaudio"
    )


def packages(tree: Tree) -> Result:
    """The torch that Python loads is built for this GPU: our channel's, or AMD's wheels. What
    PyPI's packages require is taken from PyPI, over ours, unless pixi knows our names there:
    https://pixi.prefix.dev/latest/reference/pixi_manifest/#conda-pypi-map-optional"""
    python = interpreter(tree)
    loaded = {} if python is None else _loaded(python)
    records = {} if python is None else _records(python)
    if python is None or not (loaded or records):
        raise CannotRun("torch is not installed")
    measured = {name: each[0].version for name, each in loaded.items()}
    measured |= {n: str(r.get("version")) for n, r in records.items() if n not in measured}
    results = [_conda_packages(python, loaded, records)]
    results += [_shadowed(installed) for installed in loaded.values()]
    if loaded.get("torch"):
        # the environment's own is what is used after the fix of a shadow
        own = [each for each in loaded["torch"] if each.place.label == "the environment"]
        torch = (own or loaded["torch"])[0]
        results.append(_hidden_environment(tree, python, torch))
        results.append(_torch(tree, python, torch, records))
        results.append(_torchvision(python, torch, loaded.get("torchvision", [])))
    return worst(results, **measured, environment=python.kind)


def _loaded(python: Interpreter) -> dict[str, list[Distribution]]:
    """Return the distributions of each name that is installed."""
    pairs = {name: python.distributions(name) for name in CONDA_NAMES}
    return {name: each for name, each in pairs.items() if each}


def _records(python: Interpreter) -> dict[str, dict]:
    """Return conda-meta's records by the name of the distribution."""
    pairs = {name: conda_record(python.prefix, conda) for name, conda in CONDA_NAMES.items()}
    return {name: record for name, record in pairs.items() if record}


def _conda_packages(
    python: Interpreter, loaded: dict[str, list[Distribution]], records: dict[str, dict]
) -> Result:
    """Judge conda's packages: whether another channel's was taken, or pip wrote over ours."""
    for name, record in records.items():
        package, version = CONDA_NAMES[name], record.get("version")
        own = [each for each in loaded.get(name, []) if each.place.label == "the environment"]
        over = [each for each in own if each.by != "conda"]
        if is_ours(record) and over:
            message = f"{name} {over[0].version} was installed by {over[0].by}, over our channel's"
            # pixi does not notice that the files changed, not even when it locks ours again
            fix = "pixi clean && pixi install"
            if over[0].by == "uv-pixi":
                names = " ".join(n for n in loaded if any(e.by == "uv-pixi" for e in loaded[n]))
                tables = "put the tables of PyPI's names into pixi.toml"
                fix = f"{tables}; then pixi update --no-install {names} && {fix}"
            elif not is_of_pixi(python.prefix):
                fix += f"; in a conda environment: conda install --force-reinstall {package}"
            return error(message, f"{fix}; {_MOVE} has more")
        if "conda-forge" in str(record.get("channel")) and not over:
            return _conda_forges(python, package, record)
        if over and name == "torch":
            message = f"{over[0].by} installed {name} {over[0].version} over conda's {version}"
            install = install_command(python, over[0])
            fix = f"pixi remove {package}, or conda remove {package}; then {install}"
            return warning(f"{message}: files of both lie in one folder", fix)
    return fine()


def _conda_forges(python: Interpreter, package: str, record: dict) -> Result:
    """Judge a package of conda-forge's, where ours has the same name."""
    build = str(record.get("build"))
    kind = "CUDA" if "cuda" in build else "CPUs" if build.startswith("cpu") else ""
    message = f"{package} {record.get('version')} is conda-forge's"
    message += f" build for {kind}, and sees no AMD GPU" if kind else ", which has no ROCm"
    channels = workspace.channels(python.prefix)
    ours = [channel for channel in channels if is_our_channel(channel)]
    fix = f'name our channel first, and channel-priority = "strict"; {_MOVE} says how'
    if ours and is_our_channel(channels[0]):
        # pixi takes a version that the first channel lacks from the next, strict or not
        fix = f"ask for a version of {package} that our channel has; {_MOVE} has more"
    elif ours:
        message += f": the workspace asks our channel after {channels[0]}"
        command = "pixi workspace channel"
        fix = f"{command} remove {ours[0]} && {command} add --prepend {ours[0]}; {_MOVE} has more"
    return error(message, fix)


def _shadowed(installed: list[Distribution]) -> Result:
    """Judge whether another distribution is loaded before the environment's own."""
    first = installed[0]
    behind = [each for each in installed if each.place.label == "the environment"]
    if first.place.label == "the environment" or not behind:
        return fine()
    name = f"{first.name} {first.version} of {first.place.label}"
    message = f"{name} is loaded before {behind[0].version}, the environment's own"
    uninstall = f"python3 -m pip uninstall {first.name}"
    fixes = {
        "PYTHONPATH": "unset PYTHONPATH",
        "the user's folder": f"export PYTHONNOUSERSITE=1, or {uninstall}; {_MOVE} has more",
    }
    remove = f"remove {first.place.label}, which names {first.place.path}"
    return error(message, fixes.get(first.place.label, remove), _SHADOW)


def _hidden_environment(tree: Tree, python: Interpreter, torch: Distribution) -> Result:
    """Judge whether a virtual environment's torch is used in the place of our channel's."""
    active = tree.environ.get("CONDA_PREFIX")
    prefixes = [tree.path(active), python.base] if active else [python.base]
    for prefix in prefixes:
        record = conda_record(prefix, CONDA_NAMES["torch"])
        is_loaded = torch.place.path.is_relative_to(prefix)
        if python.kind != "venv" or record is None or not is_ours(record) or is_loaded:
            continue
        message = (
            f"torch {torch.version} of the virtual environment is loaded, and not "
            f"{record.get('version')}, our channel's"
        )
        fix = f"deactivate, and run Python by pixi run or conda run; {_MOVE} has more"
        return error(message, fix, _SHADOW)
    return fine()


def _torch(
    tree: Tree, python: Interpreter, torch: Distribution, records: dict[str, dict]
) -> Result:
    """Judge the build of torch that is loaded."""
    in_place = torch.place.label == "the environment"
    record = records.get("torch", {}) if torch.by == "conda" and in_place else {}
    if is_ours(record) and "+rocm" in torch.version:
        message = f"torch {torch.version} is AMD's build: head dims above 256 give wrong values"
        return error(message, "take the channel's own build: ./forge build pytorch")
    if is_ours(record) or "conda-forge" in str(record.get("channel")):
        # what there is to say of conda-forge's, _conda_packages says
        return fine()
    by_pip = torch.by.split(" ")[0] in _PIP
    is_of_pypi = by_pip and torch.build == "" and "+" not in torch.version
    build = "cuda" if is_of_pypi else torch.build
    if build in _OTHER_BUILDS:
        message = f"torch {torch.version} is the build for {_OTHER_BUILDS[build]}"
        return error(
            f"{message}, and sees no AMD GPU", install_command(python, torch), _WRONG_BUILD
        )
    return worst([_runtime(tree, python, torch), _kernels_of(python, torch)])


def _runtime(tree: Tree, python: Interpreter, torch: Distribution) -> Result:
    """Judge the age of torch's ROCm: those before 7.2 and 7.11 do not fit the fixed kernels."""
    nightly = kernel_release.nightly_of(torch.runtime)
    if nightly and TARGET == "gfx1151":
        message = f"torch {torch.version} brings a nightly build of ROCm that {nightly.symptom}"
        return error(message, install_command(python, torch), nightly.source)
    row = kernel_release.misfit_of(torch.runtime)
    # distributions mend the runtimes that they package
    is_wheel = torch.place.label != "the system" or torch.by.split(" ")[0] in _PIP
    if torch.build != "rocm" or row is None or TARGET != "gfx1151" or not is_wheel:
        return fine()
    release = kernel_release.parse(tree.release or "")
    message = f"torch {torch.version} brings ROCm {torch.runtime}"
    fix = install_command(python, torch)
    if release is None or not hardware.has_fixes(tree, release):
        message += ", whose support of gfx1151 is unstable; it is stable from 7.2 and 7.11 on"
        return warning(message, fix, f"{row.source} {_MISFIT}")
    message += f", which page-faults on kernels with the fixes for gfx1151 ({release.text})"
    return error(f"{message}: 7.2 and 7.11 are the first that fit", fix, f"{row.source} {_MISFIT}")


def _kernels_of(python: Interpreter, torch: Distribution) -> Result:
    """Judge whether the installed wheels have kernels for this GPU."""
    names = [name.lower() for name in python.names()]
    matches = [re.fullmatch(_WHEEL_OF_GPU, name) for name in names]
    gpus = sorted({match[1] for match in matches if match})
    if "rocm_sdk_core" in names and not gpus:
        message = "AMD's wheels are installed without the ones that have the kernels of a GPU"
        return error(message, install_command(python, torch), _WITHOUT_KERNELS)
    if gpus and not any(map(_is_for_target, gpus)):
        message = f"AMD's wheels for {', '.join(gpus)} are installed, without kernels for {TARGET}"
        return error(message, install_command(python, torch), _AMD)
    library = torch.place.path / "torch/lib/rocblas/library"
    if library.is_dir() and not any(library.glob(f"*{TARGET}*")):
        message = f"torch {torch.version} has no kernels for {TARGET}: its rocBLAS has none"
        return error(message, install_command(python, torch), _AMD)
    return fine()


def _is_for_target(gpu: str) -> bool:
    """Return whether a GPU of a wheel's name is ours; gfx115x is a family, x any digit."""
    digits = gpu.removeprefix("gfx").replace("x", "[0-9a-f]")
    return re.fullmatch(f"gfx{digits}", TARGET) is not None


def _torchvision(python: Interpreter, torch: Distribution, visions: list[Distribution]) -> Result:
    """Warn of a torchvision of another build: its operators do not load."""
    if torch.build != "rocm" or not visions or visions[0].build in ("", "rocm"):
        return fine()
    message = f"torchvision {visions[0].version} is not built for ROCm, as torch {torch.version} is"
    return warning(message, install_command(python, torch), _WRONG_BUILD)


def runtime(tree: Tree) -> Result:
    """The system's ROCm is as new as the kernel needs it: AMD's runtimes before 7.2 compute a save
    area of their own, and page-fault on kernels with the fixes for gfx1151:
    https://github.com/ROCm/TheRock/issues/2991"""
    names = [tree.distribution["ID"], *tree.distribution.get("ID_LIKE", "").split()]
    if "arch" in names:
        # its packages in /opt/rocm have the fix, whatever their version
        return fine()
    versions = [tree.read_at(file) or "" for file in tree.glob("opt/rocm*/.info/version")]
    versions = list(dict.fromkeys(version for version in versions if version))
    release = kernel_release.parse(tree.release or "")
    measured = {"rocm": ", ".join(versions)} if versions else {}
    old = [version for version in versions if kernel_release.misfit_of(version)]
    if not old or TARGET != "gfx1151" or release is None or not hardware.has_fixes(tree, release):
        return fine(**measured)
    message = (
        f"/opt/rocm has ROCm {', '.join(old)}, which page-faults on kernels with the fixes for "
        f"gfx1151 ({release.text}): 7.2 and 7.11 are the first that fit"
    )
    fix = "install ROCm 7.2.1 or newer"
    python = interpreter(tree)
    if all(kernel_release.version_of(version)[:3] == _MENDED for version in old):
        return remark(f"{message}; kyuz0's toolbox has a 6.4.4 with the fix", fix, **measured)
    if python and any(torch.build == "rocm" for torch in python.distributions("torch")[:1]):
        return remark(f"{message}; torch brings its own", fix, **measured)
    return warning(message, fix, **measured)
