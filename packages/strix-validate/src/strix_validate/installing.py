# SPDX-License-Identifier: BSD-3-Clause
"""How to add a package to the environment that the validator runs in, with the tool it came by."""

import os
import sys
from pathlib import Path

from strix_validate import TARGET
from strix_validate.json_file import small_text

#: Names of packages in conda channels, where they differ from PyPI's.
_CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
#: What pip takes in the place of a name: strix-emulate is not on PyPI, whose torch is for CUDA.
_PIP_WORDS = {
    "strix-emulate": "./packages/strix-emulate",
    "torch": f"--index-url https://stable.repo.amd.com/rocm/whl-next/ 'torch[device-{TARGET}]'",
}
_BESIDE_TORCH = "install strix-validate beside your PyTorch: packages/strix-validate/README.md"


def install_advice(name: str, prefix: Path | None = None) -> str:
    """Return the command that adds a package to an environment, or what to do instead.

    Args:
        name: As it is called on PyPI.
        prefix: The environment's; without one that of the running Python.
    """
    prefix = prefix or Path(sys.prefix)
    folders = prefix.parts
    conda, pip = _CONDA_NAMES.get(name, name), _PIP_WORDS.get(name, name)
    is_of_uv = "\nuv = " in f"\n{small_text(prefix / 'pyvenv.cfg') or ''}"
    is_isolated = "pipx" in folders or (is_of_uv and {"archive-v0", "tools"} & {*folders})
    if "cached-envs-v0" in folders:
        return f"pixi exec --with {conda} strix-validate ..."
    if prefix.parent == _pixi_home() / "envs":
        return f"pixi global add --environment {prefix.name} {conda}"
    if is_of_pixi(prefix):
        return f"pixi add {conda}"
    if (prefix / "conda-meta").is_dir():
        return f"conda install {conda}"
    if name == "torch" and is_isolated:
        return _BESIDE_TORCH
    if "pipx" in folders:
        return f"pipx inject strix-validate {pip}"
    if is_of_uv and "archive-v0" in folders:
        return f"uvx --from ./packages/strix-validate --with {pip} strix-validate ..."
    if is_of_uv and "tools" in folders:
        return f"uv tool install ./packages/strix-validate --with {pip}"
    return f"{'uv pip' if is_of_uv else 'python -m pip'} install {pip}"


def is_of_pixi(prefix: Path) -> bool:
    """Return whether an environment is of a pixi workspace, in its folder or detached."""
    return ".pixi" in prefix.parts or (prefix / "conda-meta/pixi").is_file()


def _pixi_home() -> Path:
    home = os.environ.get("PIXI_HOME")
    return Path(home) if home else Path.home() / ".pixi"
