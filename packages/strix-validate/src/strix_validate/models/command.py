# SPDX-License-Identifier: BSD-3-Clause
"""`strix-validate models`: what runs a model, and in how much memory; needs no torch."""

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from strix_validate.checks import CannotRun
from strix_validate.doctor.tree import Tree
from strix_validate.models import diffusion, gguf_file, lora, mistral, reading
from strix_validate.models.answer import STRANGE, ModelAnswer, answer, describe
from strix_validate.models.table import NoModel
from strix_validate.terminal import JsonOption, VllmOption

#: What a file whose values have other types or sizes raises, wherever it is asked.
_STRANGE = (*STRANGE, RecursionError, OSError)


def _as_dict(result: ModelAnswer) -> Mapping:
    """Return what --json prints."""
    proven = [
        {"part": r.part, "of": r.of, "chosen": r.chosen, "proven": r.proven} for r in result.rows
    ]
    return vars(result) | {"rows": proven}


def _printable(text: str) -> str:
    """Return a stranger's words without what a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


_GGUF = (
    "vLLM reads GGUF by vllm-gguf-plugin alone, in the vllm stack's environment formats; llama.cpp "
    "reads it too"
)


def _answer_config(config: dict, folder: Path | None, source: Path | None) -> ModelAnswer:
    """Answer by vLLM's own code where there is one, or else by the table."""
    try:
        if source or find_spec("vllm"):
            from strix_validate.vllm import source as vllm

            source = vllm.find(source)
        return answer(config, folder, source)
    except (CannotRun, ModuleNotFoundError) as reason:
        typer.echo(f"{reason}: the table answers", err=True)
        return answer(config, folder, None)


def answer_gguf(file: Path) -> ModelAnswer:
    """Answer for a GGUF file: vLLM reads it by a plugin, so the table answers."""
    model = gguf_file.read(file)
    result = answer(model.config, None, None)
    rows = [row for row in result.rows if row.part not in ("linear", "experts")] + model.rows
    parts = {part: names for part, names in result.parts.items() if part != "linear"}
    parts["linear"] = sorted({row.chosen for row in model.rows if row.chosen})
    tokenizer = model.base or "OWNER/NAME-OF-THE-ORIGINAL"
    return replace(
        result,
        rows=rows,
        parts=parts,
        weights=model.weights,
        token=model.token,
        tiles="",
        refusal=next((row.refused for row in model.rows if row.refused), ""),
        uncounted=[],
        is_estimate=False,
        compared=True,
        speed="",
        drafts=[],
        command="pixi run -e formats serve",
        suffix=f" --tokenizer {tokenizer}",
        notes=[_GGUF],
    )


def _answer_adapter(file: Path, config: dict, source: Path | None) -> tuple[str, ModelAnswer]:
    """Answer for a LoRA: for the model that it belongs to, with the flags that load it.

    Raises:
        NoModel: Its model is not on this machine, or vLLM does not read the adapter.
    """
    adapter = lora.adapter_of(config)
    flags = adapter.flags(str(file.parent))
    if adapter.refused:
        raise NoModel(
            f"{file} is a LoRA of {adapter.base} with {adapter.refused}, which vLLM refuses: "
            f"merge it into its model (PEFT's merge_and_unload)"
        )
    base = Path(adapter.base)
    described = reading.find(adapter.base) if base.exists() else reading.cached(adapter.base)
    if described is None or described.name == lora.FILE:
        raise NoModel(
            f"{file} is a LoRA of rank {adapter.rank}, not a model: vllm serve {adapter.base} "
            f"{flags}. Of {adapter.base} nothing is on this machine: hf download {adapter.base} "
            f"config.json model.safetensors.index.json, then run this again"
        )
    result = _answer_config(reading.read(described), described.parent, source)
    note = f"a LoRA of rank {adapter.rank}: what follows is of {adapter.base}, which it belongs to"
    return adapter.base, replace(result, suffix=f" {flags}", notes=[note])


def answer_model(model: str, source: Path | None) -> tuple[str, ModelAnswer]:
    """Return what is served, and what is answered about it."""
    file = reading.find(model)
    if file.suffix == gguf_file.SUFFIX:
        return str(file), answer_gguf(file)
    config = reading.read(file)
    if file.name == lora.FILE:
        return _answer_adapter(file, config, source)
    folder = file.parent if file.name in (reading.CONFIG, mistral.FILE) else None
    result = _answer_config(config, folder, None if file.name == mistral.FILE else source)
    if file.name == mistral.FILE:
        result = replace(result, suffix=f" {mistral.FLAGS}")
    return model, result


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
    """Say whether a model runs: vLLM's backends and kernels, how far each is proven, and memory.

    Reads what describes the model (config.json, params.json, a GGUF file's header, a LoRA's
    adapter_config.json) and downloads nothing. Where vLLM is installed, its own code chooses, on
    a mock gfx1151; elsewhere a table does that was compared with it. Of a folder for diffusers
    (model_index.json) it says the same of diffusers. Exit status 1: vLLM refuses the model.
    """
    try:
        file = reading.find(model)
        if file.name == diffusion.INDEX:
            pipeline = diffusion.answer(reading.read(file), file.parent)
            text = diffusion.describe(model, pipeline, Tree())
            typer.echo(json.dumps(pipeline.as_dict(), indent=1) if as_json else _printable(text))
            return
        name, result = answer_model(model, vllm_source)
        lines = describe(name, result, Tree())
    except ValueError as error:
        raise typer.BadParameter(_printable(str(error))) from error
    except _STRANGE as error:
        raise typer.BadParameter(f"{model} describes no model: {error!a:.200}") from error
    typer.echo(json.dumps(_as_dict(result), indent=1) if as_json else _printable("\n".join(lines)))
    raise typer.Exit(int(bool(result.refusal)))
