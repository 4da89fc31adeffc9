# SPDX-License-Identifier: BSD-3-Clause
"""Find the file that describes a model, and read it in its format."""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from strix_validate.json_file import read_json_object
from strix_validate.layers.defaults import NoModel
from strix_validate.models import diffusion, gguf_file, lora, mistral

CONFIG = "config.json"
#: Files that describe a model: config.json, diffusers' file, Mistral's file, and a LoRA's file.
_FILES = (CONFIG, diffusion.INDEX, mistral.FILE, lora.FILE)
#: The file in which ModelOpt of 2024 wrote the format of the weights.
_MODELOPT = "hf_quant_config.json"


def find(model: str) -> Path:
    """Find the file that describes a model.

    It is the given file, or is in the given folder or in Hugging Face's cache. Nothing is
    downloaded.

    Raises:
        NoModel: There is no such file. For OWNER/NAME, the message says how to get it.
    """
    path = Path(model)
    if path.is_file():
        return path
    if path.is_dir():
        return _find_in(path)
    if path.suffix == gguf_file.SUFFIX:
        raise NoModel(f"{model} is not a file")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise NoModel(f"{model} is not a file, a directory or a name such as Qwen/Qwen3-8B")
    file = find_cached(model)
    if file is None:
        raise NoModel(
            f"{model} is not on this machine, and this command downloads nothing: run hf download "
            f"{model} config.json model.safetensors.index.json (for a pipeline for images, "
            f"download all files; for a gated model, first accept its licence on its page and run "
            f"hf auth login), then run this command again"
        )
    return file


def _find_in(folder: Path) -> Path:
    for name in _FILES:
        if (folder / name).is_file():
            return folder / name
    gguf_files = sorted(folder.glob(f"*{gguf_file.SUFFIX}"))
    if gguf_files:
        # llama.cpp puts "mmproj" into the name of an encoder's file.
        models = [file for file in gguf_files if "mmproj" not in file.name]
        return (models or gguf_files)[0]
    raise NoModel(
        f"{folder} has no {', no '.join(_FILES)} and no {gguf_file.SUFFIX} file: pass the folder "
        f"of a model"
    )


def find_cached(name: str) -> Path | None:
    """Return the file that describes a model in Hugging Face's cache, if it is there."""
    snapshots = _find_cache() / f"models--{name.replace('/', '--')}" / "snapshots"
    newest_first = sorted(snapshots.glob("*"), key=lambda folder: folder.stat().st_mtime)[::-1]
    for snapshot in newest_first:
        with contextlib.suppress(NoModel):
            return _find_in(snapshot)
    return None


def _find_cache() -> Path:
    """Return the folder of Hugging Face's cache, which four variables may set (huggingface_hub)."""
    folder = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if folder:
        return Path(folder).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        home = f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(home).expanduser() / "hub"


def read(file: Path) -> dict[str, Any]:
    """Read a file that describes a model.

    Raises:
        NoModel: The file describes no model.
    """
    config = _read_object(file)
    if file.name == mistral.FILE:
        try:
            return mistral.convert_params(config)
        except (TypeError, AttributeError, ArithmeticError) as error:
            raise NoModel(f"{file} is not in Mistral's format: {error!s:.100}") from error
    quantization_file = file.with_name(_MODELOPT)
    has_format = file.name != CONFIG or config.get("quantization_config")
    if not has_format and quantization_file.is_file():
        quantization = _read_object(quantization_file)
        config["quantization_config"] = {"quant_method": "modelopt", **quantization}
    return config


def _read_object(file: Path) -> dict[str, Any]:
    try:
        return read_json_object(file)
    except ValueError as error:
        raise NoModel(str(error)) from error
