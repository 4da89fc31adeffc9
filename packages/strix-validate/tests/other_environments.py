# SPDX-License-Identifier: BSD-3-Clause
"""Made-up Python environments, which differ in the installed builds of torch, Triton and ROCm."""

import json

from hosts import CONDA_FORGE, META, SITE, environ, record, released
from threads import CUDA, NOT_OURS, VENV, VENV_SITE, Expected, Machine, kernel, torch

USER_SITE = "home/user/.local/lib/python3.12/site-packages"
#: A pixi environment without packages of our channel.
PIXI = environ(CONDA_PREFIX="/home/user/work/.pixi/envs/default") | {
    "home/user/work/.pixi/envs/default/conda-meta/python-3.13.9-h1_0.json": record(
        "python", "3.13.9", "conda-forge"
    ),
    "home/user/work/.pixi/envs/default/lib/libamdhip64.so.7": "",
}
PIXI_SITE = "home/user/work/.pixi/envs/default/lib/python3.13/site-packages"
PIXI_META = "home/user/work/.pixi/envs/default/conda-meta"
OURS = "https://repo.prefix.dev/strix-forge"


def workspace(*channels: str, file: str = "pixi.toml", table: str = "workspace") -> dict[str, str]:
    """Return the manifest of the workspace to which the environment PIXI belongs."""
    return {f"home/user/work/{file}": f"[{table}]\nchannels = {json.dumps(channels)}\n"}


def conda_pytorch(meta: str, build: str, channel: str, name: str = "pytorch") -> dict[str, str]:
    """Return the record of a conda package."""
    data = {"name": name, "version": "2.10.0", "build": build, "channel": channel}
    return {f"{meta}/{name}-2.10.0-{build}.json": json.dumps(data)}


def moved(build: str, kind: str, manifest: dict[str, str]) -> Machine:
    """Return a machine that has conda-forge's pytorch because its workspace prefers conda-forge."""
    fix = f"channel remove {OURS} && pixi workspace channel add --prepend {OURS}; docs/move.md"
    message = f"build for {kind}, and sees no AMD GPU: in the workspace, our channel comes after"
    return Machine(
        PIXI
        | conda_pytorch(PIXI_META, build, CONDA_FORGE)
        | torch(PIXI_SITE, "2.10.0", "conda", **CUDA)
        | manifest,
        {"packages": Expected("error", message, fix)},
    )


APPENDED = ("conda-forge", OURS)
#: Environments that moved to our packages (see docs/move.md). Most of the moves failed.
MOVED = {
    "conda-forge's CUDA build, our channel appended": moved(
        "cuda129_mkl_py312_h1_303", "CUDA", workspace(*APPENDED)
    ),
    "conda-forge's CPU build, our channel appended": moved(
        "cpu_mkl_py312_h1_100", "CPUs", workspace(*APPENDED)
    ),
    "conda-forge's CPU build, our channel appended in a pyproject.toml": moved(
        "cpu_generic_py312_h1_0",
        "CPUs",
        workspace(*APPENDED, file="pyproject.toml", table="tool.pixi.workspace"),
    ),
    "conda-forge's CUDA build, our channel appended in an older manifest": moved(
        "cuda126_generic_py312_h1_200", "CUDA", workspace(*APPENDED, table="project")
    ),
    "conda-forge's CUDA build, our channel with a low priority": moved(
        "cuda129_mkl_py312_h1_303",
        "CUDA",
        {
            "home/user/work/pixi.toml": '[workspace]\nchannels = [{ channel = "conda-forge" }, '
            f'{{ channel = "{OURS}", priority = -1 }}]\n'
        },
    ),
    "conda-forge's CUDA build, without our channel": Machine(
        PIXI
        | conda_pytorch(PIXI_META, "cuda129_mkl_py312_h1_303", CONDA_FORGE)
        | torch(PIXI_SITE, "2.10.0", "conda", **CUDA)
        | workspace("conda-forge"),
        {
            "packages": Expected(
                "error", "build for CUDA, and sees", "docs/move.md", "channel remove"
            )
        },
    ),
    "conda-forge's CUDA build, with a malformed manifest": Machine(
        PIXI
        | conda_pytorch(PIXI_META, "cuda129_mkl_py312_h1_303", CONDA_FORGE)
        | torch(PIXI_SITE, "2.10.0", "conda", **CUDA)
        | {"home/user/work/pixi.toml": "[workspace\n"},
        {"packages": Expected("error", "build for CUDA, and sees", "docs/move.md")},
    ),
    "conda-forge's triton beside our torch": Machine(
        PIXI
        | conda_pytorch(PIXI_META, "rocm_h1_0", OURS)
        | torch(PIXI_SITE, "2.13.0", "conda", hip="7.15.2")
        | conda_pytorch(PIXI_META, "cuda129py312h1_1", CONDA_FORGE, "triton")
        | workspace(OURS, "conda-forge"),
        {
            "packages": Expected(
                "error",
                "triton 2.10.0 is conda-forge's build for CUDA",
                "require a version of triton",
            )
        },
    ),
    "PyPI's torch and triton over ours": Machine(
        PIXI
        | conda_pytorch(PIXI_META, "rocm_h1_0", OURS)
        | torch(PIXI_SITE, "2.15.0", "uv-pixi", **CUDA)
        | {f"{PIXI_SITE}/triton-3.9.0.dist-info/INSTALLER": "uv-pixi"}
        | workspace(OURS, "conda-forge"),
        {
            "packages": Expected(
                "error",
                "over our channel's",
                "tables that map our packages to PyPI's names into pixi.toml; then pixi update "
                "--no-install torch triton && pixi clean && pixi install; docs/move.md has more",
            )
        },
    ),
    "pip's torch over ours": Machine(
        PIXI
        | conda_pytorch(PIXI_META, "rocm_h1_0", OURS)
        | torch(PIXI_SITE, "2.15.0", "pip", **CUDA)
        | workspace(OURS, "conda-forge"),
        {
            "packages": Expected(
                "error", "by pip, over our", "pixi clean && pixi install; docs/move.md"
            )
        },
    ),
    "PyPI's triton alone over ours": Machine(
        PIXI
        | conda_pytorch(PIXI_META, "rocm_h1_0", OURS)
        | conda_pytorch(PIXI_META, "h1_0", OURS, "triton")
        | torch(PIXI_SITE, "2.13.0", "conda", hip="7.15.2")
        | {f"{PIXI_SITE}/triton-3.9.0.dist-info/INSTALLER": "uv-pixi"}
        | workspace(OURS, "conda-forge"),
        {"packages": Expected("error", "triton 3.9.0 was installed by uv-pixi", "docs/move.md")},
    ),
    "PyPI's torch beside our channel": Machine(
        PIXI | torch(PIXI_SITE, "2.15.0", "uv-pixi", **CUDA) | workspace(OURS, "conda-forge"),
        {"packages": Expected("error", "the build for CUDA", "docs/move.md", "AMD's index")},
    ),
    "AMD's wheels in a virtual environment over our environment": Machine(
        environ(VIRTUAL_ENV="/home/user/venv", PATH="/home/user/venv/bin:/home/user/env/bin")
        | {"home/user/venv/pyvenv.cfg": "home = /usr/bin\n"}
        | torch(VENV_SITE, "2.13.0+rocm10.0.0", hip="7.15.2"),
        {
            "packages": Expected(
                "error",
                "torch 2.13.0+rocm10.0.0 of the virtual environment is loaded instead of our",
                "docs/move.md",
            )
        },
    ),
    "AMD's wheels in a virtual environment of our Python": Machine(
        environ(VIRTUAL_ENV="/home/user/venv", CONDA_PREFIX="")
        | {
            "home/user/venv/pyvenv.cfg": "home = /home/user/env/bin\n"
            "include-system-site-packages = true\n"
        }
        | torch(VENV_SITE, "2.13.0+rocm10.0.0", hip="7.15.2"),
        {"packages": Expected("error", "of the virtual environment is loaded", "deactivate")},
    ),
    "a virtual environment with access to our environment's torch": Machine(
        environ(VIRTUAL_ENV="/home/user/venv", CONDA_PREFIX="")
        | {
            "home/user/venv/pyvenv.cfg": "home = /home/user/env/bin\n"
            "include-system-site-packages = true\n",
            "home/user/venv/lib/python3.12/site-packages/pip-25.dist-info/INSTALLER": "pip",
            "home/user/venv/lib/libamdhip64.so.7": "",
        }
    ),
    "AMD's wheels in a virtual environment beside another conda environment": Machine(
        NOT_OURS
        | environ(VIRTUAL_ENV="/home/user/venv", PATH="/home/user/venv/bin:/home/user/env/bin")
        | {"home/user/venv/pyvenv.cfg": "home = /usr/bin\n"}
        | torch(VENV_SITE, "2.13.0+rocm10.0.0", hip="7.15.2")
    ),
    "a triton in the user's folder, loaded before the environment's": Machine(
        {f"{USER_SITE}/triton-3.9.0.dist-info/INSTALLER": "pip"},
        {
            "packages": Expected(
                "error",
                "triton 3.9.0 of the user's folder is loaded before 3.7.1",
                "PYTHONNOUSERSITE=1, or python3 -m pip uninstall triton; docs/move.md",
            )
        },
    ),
    "AMD's torch in the user's folder, loaded before ours": Machine(
        torch(USER_SITE, "2.13.0+rocm10.0.0", hip="7.15.2"),
        {"packages": Expected("error", "of the user's folder is loaded before", "docs/move.md")},
    ),
}

ENVIRONMENTS = {
    "a torch in the user's folder, loaded before the environment's": Machine(
        torch(USER_SITE, "2.9.0", **CUDA),
        {
            "packages": Expected(
                "error", "of the user's folder is loaded before 2.13.0", "PYTHONNOUSERSITE=1"
            )
        },
    ),
    "a torch in the user's folder that PYTHONNOUSERSITE hides": Machine(
        environ(PYTHONNOUSERSITE="1") | torch(USER_SITE, "2.9.0", **CUDA)
    ),
    "a torch in the user's folder that a virtual environment hides": Machine(
        VENV
        | torch(VENV_SITE, "2.13.0+rocm10.0.0", hip="7.15.2")
        | torch(USER_SITE, "2.9.0", **CUDA)
    ),
    "PYTHONPATH": Machine(
        environ(PYTHONPATH="/opt/old") | torch("opt/old", "2.9.0", **CUDA),
        {
            "packages": Expected(
                "error", "of PYTHONPATH is loaded before 2.13.0", "unset PYTHONPATH"
            )
        },
    ),
    "a virtual environment with access to the system's packages": Machine(
        VENV
        | torch("usr/lib/python3/dist-packages", "2.9.0", **CUDA)
        | {
            "home/user/venv/pyvenv.cfg": "home = /usr/bin\ninclude-system-site-packages = true\n"
            "version = 3.12.3\n",
            f"{VENV_SITE}/pip-25.dist-info/INSTALLER": "pip",
        },
        {"packages": Expected("error", "the build for CUDA", "--force-reinstall")},
    ),
    "a torch in a folder that a .pth file names": Machine(
        VENV
        | torch("srv/torch", "2.9.0", **CUDA)
        | {f"{VENV_SITE}/more.pth": "import os\n/srv/torch\n"},
        {"packages": Expected("error", "the build for CUDA", "--force-reinstall")},
    ),
    "PyPI's torch without version.py": Machine(
        VENV | {f"{VENV_SITE}/torch-2.15.0.dist-info/INSTALLER": "uv"},
        {"packages": Expected("error", "the build for CUDA", "uv pip install --reinstall")},
    ),
    "AMD's wheels for another GPU": Machine(
        VENV
        | torch(VENV_SITE, "2.13.0+rocm10.0.0", hip="7.15.2")
        | {f"{VENV_SITE}/rocm_sdk_device_gfx1201-10.0.0.dist-info/INSTALLER": "pip"},
        {"packages": Expected("error", "wheels for gfx1201", "device-gfx1151")},
    ),
    "AMD's older wheels for other GPUs": Machine(
        VENV
        | torch(VENV_SITE, "2.9.1+rocm7.13.0", hip="7.13.1")
        | {f"{VENV_SITE}/rocm_sdk_libraries_gfx110X_all-7.13.0.dist-info/INSTALLER": "pip"},
        {"packages": Expected("error", "wheels for gfx110x", "device-gfx1151")},
    ),
    "AMD's older wheels for this GPU": Machine(
        VENV
        | torch(VENV_SITE, "2.9.1+rocm7.13.0", hip="7.13.1")
        | {f"{VENV_SITE}/rocm_sdk_libraries_gfx1151-7.13.0.dist-info/INSTALLER": "pip"},
    ),
    "a ROCm nightly before the page-fault fix": Machine(
        VENV | torch(VENV_SITE, "2.10.0a0+rocm7.10.0a20251015", hip="7.1.5"),
        {"packages": Expected("error", "ROCm 7.10.0a20251015, which page-faults")},
    ),
    "a nightly whose version is only a date, before the page-fault fix": Machine(
        VENV | torch(VENV_SITE, "2.7.0a0+rocmsdk20250801", hip="6.5.2"),
        {"packages": Expected("error", "page-faults")},
    ),
    "an old ROCm on an old Linux kernel": Machine(
        VENV
        | torch(VENV_SITE, "2.9.1+rocm6.4", hip="6.4.43483")
        | kernel("6.17.7-300.fc43.x86_64"),
        {"packages": Expected("warning", "is unstable"), "kernel": Expected("error", "older")},
    ),
    "rocBLAS without kernels for gfx1151": Machine(
        VENV
        | torch(VENV_SITE, "2.10.0+rocm7.2", hip="7.2.26015")
        | {f"{VENV_SITE}/torch/lib/rocblas/library/TensileLibrary_lazy_gfx1100.dat": ""},
        {"packages": Expected("error", "no kernels for gfx1151")},
    ),
    "rocBLAS with kernels for gfx1151": Machine(
        VENV
        | torch(VENV_SITE, "2.10.0+rocm7.2", hip="7.2.26015")
        | {f"{VENV_SITE}/torch/lib/rocblas/library/TensileLibrary_lazy_gfx1151.dat": ""},
    ),
    "a torchvision for CUDA": Machine(
        VENV
        | torch(VENV_SITE, "2.13.0+rocm10.0.0", hip="7.15.2")
        | {f"{VENV_SITE}/torchvision-0.28.0+cu128.dist-info/INSTALLER": "pip"},
        {"packages": Expected("warning", "built for ROCm, but torchvision 0.28.0+cu128 is not")},
    ),
    "a package of the channel pytorch": Machine(
        {
            f"{META}/pytorch-2.13.0-h1_0.json": json.dumps(
                {
                    "name": "pytorch",
                    "version": "2.5.1",
                    "channel": "https://conda.anaconda.org/pytorch",
                }
            ),
            f"{SITE}/torch-2.13.0.dist-info/INSTALLER": None,
        }
        | torch(SITE, "2.5.1", "conda", **CUDA),
        {"packages": Expected("error", "the build for CUDA")},
    ),
    "a package of a channel in a folder": Machine(
        {
            f"{META}/pytorch-2.13.0-h1_0.json": json.dumps(
                {"name": "pytorch", "version": "2.13.0", "channel": "file:///srv/channel/linux-64"}
            )
        },
    ),
    "AMD's torch over conda-forge's": Machine(
        {
            f"{META}/pytorch-2.13.0-h1_0.json": json.dumps(
                {"name": "pytorch", "version": "2.13.0", "channel": "conda-forge"}
            ),
            f"{SITE}/torch-2.13.0.dist-info/INSTALLER": None,
        }
        | torch(SITE, "2.13.0+rocm10.0.0", hip="7.15.2"),
        {"packages": Expected("warning", "over conda's 2.13.0", "pixi remove pytorch")},
    ),
    "an old /opt/rocm beside AMD's wheels": Machine(
        NOT_OURS
        | torch(SITE, "2.13.0+rocm10.0.0", hip="7.15.2")
        | {"opt/rocm-6.4.1/.info/version": "6.4.1-83\n"},
        {"runtime": Expected("info", "torch has its own"), "caches": Expected("warning")},
    ),
    "Arch's own ROCm, which has the page-fault fix": Machine(
        released("ID=arch") | {"opt/rocm/.info/version": "7.1.1\n"}, {"caches": Expected("warning")}
    ),
    "Fedora's own torch, whose ROCm has the page-fault fix": Machine(
        environ(CONDA_PREFIX="", PATH="/usr/bin")
        | torch("usr/lib64/python3.14/site-packages", "2.9.1", "rpm", hip="6.4.43484")
    ),
    "pip's torch beside Fedora's Python": Machine(
        environ(CONDA_PREFIX="", PATH="/usr/bin")
        | torch("usr/lib64/python3.14/site-packages", "2.9.1+rocm6.4", hip="6.4.43484"),
        {"packages": Expected("error", "contains ROCm 6.4, which page-faults")},
    ),
    "a torch in the user's folder of Debian's Python": Machine(
        environ(CONDA_PREFIX="", PATH="/usr/bin")
        | torch("home/user/.local/lib/python3.13/site-packages", "2.9.1", **CUDA)
        | {"usr/lib/python3.13/os.py": "", "usr/lib/python3/dist-packages/x": ""},
        {
            "packages": Expected(
                "error", "the build for CUDA", "python3 -m venv ENV && ENV/bin/python"
            )
        },
    ),
    "a virtual environment that is only on PATH": Machine(
        environ(CONDA_PREFIX="", PATH="/home/user/.local/bin:/opt/venv/bin:/usr/bin")
        | torch("home/user/.local/lib/python3.12/site-packages", "2.13.0+rocm10.0.0", hip="7.15")
        | torch("opt/venv/lib/python3.12/site-packages", "2.9.1", **CUDA)
        | {"opt/venv/pyvenv.cfg": "home = /usr/bin\n", "opt/venv/bin/python3": ""},
        {"packages": Expected("error", "the build for CUDA")},
    ),
    "a virtual environment activated after a conda environment": Machine(
        environ(VIRTUAL_ENV="/home/user/venv", PATH="/home/user/venv/bin:/home/user/env/bin")
        | {"home/user/venv/pyvenv.cfg": "home = /usr/bin\n"}
        | torch(VENV_SITE, "2.9.1", **CUDA),
        {"packages": Expected("error", "the build for CUDA")},
    ),
    "a conda environment activated after a virtual environment": Machine(
        environ(VIRTUAL_ENV="/home/user/venv", PATH="/home/user/env/bin:/home/user/venv/bin")
        | {"home/user/venv/pyvenv.cfg": "home = /usr/bin\n"}
        | torch(VENV_SITE, "2.9.1", **CUDA),
    ),
    "kyuz0's toolbox of ROCm 6.4.4": Machine(
        {"run/.toolboxenv": "", "opt/rocm-6.4.4/.info/version": "6.4.4-129\n"},
        {"runtime": Expected("info", "kyuz0's toolbox"), "caches": Expected("warning")},
    ),
    "a torch that poetry installed": Machine(
        VENV | {f"{VENV_SITE}/torch-2.15.0.dist-info/INSTALLER": "poetry 2.2.1"},
        {"packages": Expected("error", "the build for CUDA", "--force-reinstall")},
    ),
    "PyPI's torch in pixi's environment": Machine(
        PIXI | torch(PIXI_SITE, "2.11.0", "uv-pixi", **CUDA),
        {"packages": Expected("error", "the build for CUDA", "in pixi.toml", "uv pip install")},
    ),
    "AMD's wheels in pixi's environment": Machine(
        PIXI
        | torch(PIXI_SITE, "2.13.0+rocm10.0.0", "uv-pixi", hip="7.15.2")
        | {
            f"{PIXI_SITE}/{name}-10.0.0.dist-info/INSTALLER": "uv-pixi"
            for name in ("rocm_sdk_core", "rocm_sdk_device_gfx1151", "amd_torch_device_gfx1151")
        }
    ),
    "Arch's own torch and ROCm": Machine(
        released("ID=arch")
        | environ(CONDA_PREFIX="", PATH="/usr/bin", ROCM_PATH="/opt/rocm", HIP_PATH="/opt/rocm")
        | torch("usr/lib/python3.14/site-packages", "2.11.0", "an unknown tool", hip="7.2.53211")
        | {
            "etc/ld.so.conf.d/rocm.conf": "/opt/rocm/lib\n",
            "opt/rocm/.info/version": "7.2.4\n",
            "opt/rocm/lib/libamdhip64.so.7": "",
            "home/user/.cache/comgr/entry": None,
        },
    ),
    "Arch's own ROCm loaded before AMD's wheels": Machine(
        VENV
        | environ(CONDA_PREFIX="", VIRTUAL_ENV="/home/user/venv", LD_LIBRARY_PATH="/opt/rocm/lib")
        | torch(VENV_SITE, "2.13.0+rocm10.0.0", hip="7.15.2")
        | {"etc/ld.so.conf.d/rocm.conf": "/opt/rocm/lib\n", "opt/rocm/README": ""},
        {
            "environment": Expected("error", "loaded first", "unset LD_LIBRARY_PATH"),
            "stray-rocm": Expected("warning", "loader's path", "rm /etc/ld.so.conf.d/rocm.conf"),
        },
    ),
    "a torch for Intel's GPUs": Machine(
        VENV | torch(VENV_SITE, "2.10.0+xpu", cuda=None, hip=None),
        {"packages": Expected("error", "the build for Intel's GPUs", "--force-reinstall")},
    ),
}
