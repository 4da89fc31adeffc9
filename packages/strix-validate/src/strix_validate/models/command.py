# SPDX-License-Identifier: BSD-3-Clause
"""The command `strix-validate models`: how a model runs, and in how much memory; needs no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from strix_validate.checks import CannotRun
from strix_validate.doctor.tree import Tree
from strix_validate.models import diffusion, gguf_file, lora, mistral, reading
from strix_validate.models.answer import MALFORMED, ModelAnswer, answer, describe
from strix_validate.models.table import NoModel
from strix_validate.terminal import JsonOption, VllmOption

#: Exceptions raised if a file cannot be read, or if its values have other types or sizes than
#: expected.
_MALFORMED = (*MALFORMED, RecursionError, OSError)
_GGUF_NOTE = (
    "vLLM reads GGUF only with vllm-gguf-plugin, which is in the environment `formats` of the vllm "
    "stack; llama.cpp reads GGUF too"
)


def _as_dict(result: ModelAnswer) -> Mapping:
    """Return what --json prints."""
    rows = []
    for row in result.rows:
        rows.append(
            {
                "part": row.part,
                "of": row.of,
                "chosen": row.chosen,
                "proven": row.proven,
            }
        )
    return vars(result) | {"rows": rows}


def _escape_unprintable(text: str) -> str:
    """Escape the characters of a file's text that would control the terminal."""
    letters = []
    for letter in text:
        if letter.isprintable() or letter == "\n":
            letters.append(letter)
        else:
            letters.append(ascii(letter)[1:-1])
    return "".join(letters)


def _answer_config(config: dict, folder: Path | None, source: Path | None) -> ModelAnswer:
    """Answer with vLLM's own code if it runs on this machine, or else from the table."""
    try:
        if source or find_spec("vllm"):
            from strix_validate.vllm import source as vllm_source

            source = vllm_source.find(source)
        return answer(config, folder, source)
    except (CannotRun, ModuleNotFoundError) as reason:
        typer.echo(f"{reason}: the answer comes from the table", err=True)
        return answer(config, folder, None)


def answer_gguf(file: Path) -> ModelAnswer:
    """Answer for a GGUF file from the table, because only a plugin of vLLM reads such files."""
    model = gguf_file.read(file)
    result = answer(model.config, None, None)
    rows = [row for row in result.rows if row.part not in ("linear", "experts")] + model.rows
    parts = dict(result.parts)
    parts.pop("linear", None)
    parts["linear"] = sorted({row.chosen for row in model.rows if row.chosen})
    tokenizer = model.base or "OWNER/NAME-OF-THE-ORIGINAL"
    return replace(
        result,
        rows=rows,
        parts=parts,
        weights=model.weights,
        token=model.token,
        tiles="",
        refusal=next((row.refused for row in rows if row.refused), ""),
        uncounted=[],
        is_estimate=False,
        compared=True,
        speed="",
        drafts=[],
        command="pixi run -e formats serve",
        suffix=f" --tokenizer {tokenizer}",
        notes=[_GGUF_NOTE],
    )


@dataclass(frozen=True)
class Served:
    """A model and the answer about it.

    Attributes:
        name: The argument of `vllm serve`; for a LoRA, the model that the LoRA belongs to.
        answer: The answer.
    """

    name: str
    answer: ModelAnswer


def _answer_adapter(file: Path, config: dict, source: Path | None) -> Served:
    """Answer for the model that a LoRA belongs to, with the flags that load the LoRA.

    Raises:
        NoModel: The model is not on this machine or has no config.json, or the adapter is not
            valid, or vLLM does not read it.
    """
    adapter = lora.read_adapter(config)
    if adapter.refused:
        raise NoModel(
            f"{file} is a LoRA of {adapter.base} with {adapter.refused}, which vLLM refuses: "
            f"merge the LoRA into its model (PEFT's merge_and_unload)"
        )
    flags = adapter.flags(str(file.parent))
    is_path = Path(adapter.base).exists()
    base_file = reading.find(adapter.base) if is_path else reading.find_cached(adapter.base)
    if base_file is None or base_file.name == lora.FILE:
        advice = f"{adapter.base} has no config.json of a model"
        if not is_path:
            advice = (
                f"{adapter.base} is not on this machine: run hf download {adapter.base} "
                "config.json model.safetensors.index.json, then this command again"
            )
        raise NoModel(
            f"{file} is a LoRA of rank {adapter.rank}, not a model: vllm serve {adapter.base} "
            f"{flags}. {advice}"
        )
    result = _answer_config(reading.read(base_file), base_file.parent, source)
    note = (
        f"a LoRA of rank {adapter.rank}: the following lines are about {adapter.base}, to which it "
        "belongs"
    )
    return Served(adapter.base, replace(result, suffix=f" {flags}", notes=[note]))


def answer_model(model: str, source: Path | None) -> Served:
    """Answer for a model.

    Args:
        model: A folder, a file that describes a model, or OWNER/NAME.
        source: vLLM's source folder, or None for the installed vLLM or, without one, the table.
    """
    file = reading.find(model)
    if file.suffix == gguf_file.SUFFIX:
        return Served(str(file), answer_gguf(file))
    config = reading.read(file)
    if file.name == lora.FILE:
        return _answer_adapter(file, config, source)
    # `vllm serve` takes the folder, not the file in it.
    is_in_folder = Path(model).is_file() and file.name in (reading.CONFIG, mistral.FILE)
    name = str(file.parent) if is_in_folder else model
    if file.name == mistral.FILE:
        result = _answer_config(config, file.parent, source)
        return Served(name, replace(result, suffix=f" {mistral.FLAGS}"))
    folder = file.parent if file.name == reading.CONFIG else None
    return Served(name, _answer_config(config, folder, source))


def models(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A folder, its config.json, a GGUF file, or OWNER/NAME."
        ),
    ],
    as_json: JsonOption = False,
    vllm_source: VllmOption = None,
) -> None:
    """Report whether a model runs, with which backends and kernels of vLLM, and in how much memory.

    The output says how far each of vLLM's choices is proven. The command reads the file that
    describes the model (config.json, params.json, a GGUF file's header, a LoRA's
    adapter_config.json), and downloads nothing. If vLLM is installed, its own code makes the
    choices, on a mock gfx1151. Otherwise, and for GGUF files, the choices come from a table that
    was compared with vLLM. For a folder of diffusers (model_index.json), the command reports the
    choices of diffusers. Exit status 1: vLLM refuses the model.
    """
    try:
        file = reading.find(model)
        if file.name == diffusion.INDEX:
            pipeline = diffusion.answer(reading.read(file), file.parent)
            text = diffusion.describe(model, pipeline, Tree())
            _print(text, pipeline.as_dict(), as_json)
            return
        served = answer_model(model, vllm_source)
        text = "\n".join(describe(served.name, served.answer, Tree()))
    except ValueError as error:
        raise typer.BadParameter(_escape_unprintable(str(error))) from error
    except _MALFORMED as error:
        raise typer.BadParameter(f"{model} describes no model: {error!a:.200}") from error
    _print(text, _as_dict(served.answer), as_json)
    status = 1 if served.answer.refusal else 0
    raise typer.Exit(status)


def _print(text: str, values: Mapping, as_json: bool) -> None:
    """Print an answer as text or as JSON."""
    if as_json:
        typer.echo(json.dumps(values, indent=1))
    else:
        typer.echo(_escape_unprintable(text))
