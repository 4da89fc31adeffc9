# SPDX-License-Identifier: BSD-3-Clause
"""Where a model is, and in which of the formats that describe one."""

import os
import re
from pathlib import Path
from typing import Any

from strix_validate.json_file import json_object
from strix_validate.models import diffusion, gguf_file, lora, mistral
from strix_validate.models.defaults import NoModel

CONFIG = "config.json"
#: What says what a model is: for vLLM, diffusers, vLLM as Mistral's, and of a LoRA.
_FILES = (CONFIG, diffusion.INDEX, mistral.FILE, lora.FILE)
#: Where ModelOpt of 2024 wrote its format.
_MODELOPT = "hf_quant_config.json"


def find(model: str) -> Path:
    """Find the file that describes a model: in a folder, or of a model in Hugging Face's cache.

    Raises:
        NoModel: there is none; the message says how to get it. Nothing is downloaded.
    """
    path = Path(model)
    if path.is_file():
        return path
    if path.is_dir():
        return _find_in(path)
    if path.suffix == gguf_file.SUFFIX:
        raise NoModel(f"{model} is not a file")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        file = cached(model)
        if file:
            return file
        raise NoModel(
            f"{model} is not on this machine, and nothing is downloaded here: hf download {model} "
            f"config.json model.safetensors.index.json (of a pipeline for images, all files; for a "
            f"gated model, accept its licence on its page and run hf auth login first), then run "
            f"this again"
        )
    raise NoModel(f"{model} is not a file, a directory or a name such as Qwen/Qwen3-8B")


def _find_in(folder: Path) -> Path:
    files = [folder / name for name in _FILES if (folder / name).is_file()]
    files += sorted(folder.glob(f"*{gguf_file.SUFFIX}"))
    if files:
        return files[0]
    raise NoModel(
        f"{folder} has no {', no '.join(_FILES)} and no {gguf_file.SUFFIX} file: name the folder "
        f"of a model"
    )


def cached(name: str) -> Path | None:
    """Return the file that describes a model in Hugging Face's cache, if it is there."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")
    snapshots = home / "hub" / f"models--{name.replace('/', '--')}" / "snapshots"
    files = [file for kind in _FILES for file in sorted(snapshots.glob(f"*/{kind}"))]
    return files[-1] if files else None


def read(file: Path) -> dict[str, Any]:
    """Read a file that describes a model.

    Raises:
        NoModel: it describes none.
    """
    try:
        config = json_object(file)
    except ValueError as error:
        raise NoModel(str(error)) from error
    if file.name == mistral.FILE:
        try:
            return mistral.config_of(config)
        except (TypeError, AttributeError, ArithmeticError) as error:
            raise NoModel(f"{file} is not Mistral's: {error!s:.100}") from error
    beside = file.with_name(_MODELOPT)
    if file.name == CONFIG and not config.get("quantization_config") and beside.is_file():
        try:
            config["quantization_config"] = {"quant_method": "modelopt", **json_object(beside)}
        except ValueError as error:
            raise NoModel(str(error)) from error
    return config
