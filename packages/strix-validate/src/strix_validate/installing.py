# SPDX-License-Identifier: BSD-3-Clause
"""Suggest how to add a package to the validator's environment, with the tool that created it."""

import os
import sys
from pathlib import Path

from strix_validate import TARGET
from strix_validate.json_file import read_small_text

#: Packages that have another name in conda channels than on PyPI: conda's name, by PyPI's name.
_CONDA_NAMES = {
    "torch": "pytorch",
    "matplotlib": "matplotlib-base",
}
#: pip's arguments for packages for which the name is not enough: strix-emulate is not on PyPI, and
#: PyPI's torch is built for CUDA.
_PIP_ARGUMENTS = {
    "strix-emulate": "./packages/strix-emulate",
    "torch": f"--index-url https://stable.repo.amd.com/rocm/whl-next/ 'torch[device-{TARGET}]'",
}
_BESIDE_TORCH = "install strix-validate beside your PyTorch: packages/strix-validate/README.md"


def suggest_installation(name: str, prefix: Path | None = None) -> str:
    """Return the command that adds a package to an environment, or what to do instead.

    Args:
        name: The package's name on PyPI.
        prefix: The environment; by default that of the running Python.
    """
    prefix = prefix or Path(sys.prefix)
    return _advise_conda(name, prefix) or _advise_pip(name, prefix)


def _advise_conda(name: str, prefix: Path) -> str:
    """Return the command for an environment of pixi or conda, or "" for other environments."""
    package = _CONDA_NAMES.get(name, name)
    if "cached-envs-v0" in prefix.parts:
        return f"pixi exec --with {package} strix-validate ..."
    if prefix.parent == _pixi_home() / "envs":
        return f"pixi global add --environment {prefix.name} {package}"
    if is_of_pixi(prefix):
        return f"pixi add {package}"
    if (prefix / "conda-meta").is_dir():
        return f"conda install {package}"
    return ""


def _advise_pip(name: str, prefix: Path) -> str:
    """Return the command for an environment of pipx, uv or venv.

    The environments of pipx, uvx and `uv tool` are for strix-validate alone. If torch is missing in
    one of them, the advice is to install strix-validate in torch's environment instead.
    """
    arguments = _PIP_ARGUMENTS.get(name, name)
    config = read_small_text(prefix / "pyvenv.cfg") or ""
    is_of_pipx = "pipx" in prefix.parts
    is_of_uv = "\nuv = " in f"\n{config}"
    is_of_uvx = is_of_uv and "archive-v0" in prefix.parts
    is_tool_of_uv = is_of_uv and (prefix / "uv-receipt.toml").is_file()
    if name == "torch" and (is_of_pipx or is_of_uvx or is_tool_of_uv):
        return _BESIDE_TORCH
    if is_of_pipx:
        return f"pipx inject strix-validate {arguments}"
    if is_of_uvx:
        return f"uvx --from ./packages/strix-validate --with {arguments} strix-validate ..."
    if is_tool_of_uv:
        return f"uv tool install ./packages/strix-validate --with {arguments}"
    if is_of_uv:
        return f"uv pip install {arguments}"
    return f"python -m pip install {arguments}"


def is_of_pixi(prefix: Path) -> bool:
    """Return whether an environment belongs to a pixi workspace.

    Such an environment is in the workspace's folder .pixi, or in another folder ("detached"). The
    result is also True for other environments in a folder .pixi, such as those of pixi global.
    """
    return ".pixi" in prefix.parts or (prefix / "conda-meta/pixi").is_file()


def _pixi_home() -> Path:
    home = os.environ.get("PIXI_HOME")
    return Path(home) if home else Path.home() / ".pixi"
