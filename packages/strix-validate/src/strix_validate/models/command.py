# SPDX-License-Identifier: BSD-3-Clause
"""`strix-validate models`: what runs a model, and in how much memory; needs no torch."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from strix_validate import TARGET
from strix_validate.checks import CannotRun
from strix_validate.doctor.tree import Tree
from strix_validate.doctor.vllm_memory import GIB, memory_of
from strix_validate.json_file import json_object
from strix_validate.models import diffusion, model_memory, table
from strix_validate.models.table import NoModel, Row
from strix_validate.terminal import JsonOption, VllmOption

#: What says what a model is: for vLLM, and for diffusers.
_FILES = ("config.json", diffusion.INDEX)
#: What a config whose values have other types or sizes raises, wherever it is asked.
_STRANGE = (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, OSError)


@dataclass(frozen=True)
class ModelAnswer:
    """What is said of one model.

    parts: name by part, as vLLM chooses. weights, token: bytes; None if it cannot be said.
    tiles: of the experts' kernel. uncounted: what the weights leave out. unproven: parts that were
    not compared.
    """

    source: str
    rows: list[Row]
    parts: dict[str, list[str]]
    refusal: str
    weights: int | None
    token: int | None
    compared: bool
    tiles: str
    uncounted: list[str]
    unproven: list[str]


def _find(model: str) -> Path:
    """Find the config.json or model_index.json of a folder, or of a model in Hugging Face's cache.

    Raises:
        NoModel: there is none; the message says how to get it. Nothing is downloaded.
    """
    path = Path(model)
    if path.suffix == ".gguf":
        row = next(row for row in table.rows() if row.of == "gguf")
        raise NoModel(f"{model}: our vLLM refuses GGUF ({row.refused}); take {row.instead}")
    if path.is_file():
        return path
    if path.is_dir():
        if found := [path / name for name in _FILES if (path / name).is_file()]:
            return found[0]
        raise NoModel(f"{model} has no {' and no '.join(_FILES)}: name the folder of a model")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")
        cached = home / "hub" / f"models--{model.replace('/', '--')}" / "snapshots"
        if found := [file for name in _FILES for file in sorted(cached.glob(f"*/{name}"))]:
            return found[-1]
        raise NoModel(
            f"{model} is not on this machine, and nothing is downloaded here: hf download {model} "
            f"config.json model.safetensors.index.json (of a pipeline for images, all files; for a "
            f"gated model, accept its licence on its page and run hf auth login first), then run "
            f"this again"
        )
    raise NoModel(f"{model} is not a file, a directory or a name such as Qwen/Qwen3-8B")


def _read(file: Path) -> dict:
    """Read a config.json.

    Raises:
        NoModel: it is none.
    """
    try:
        return json_object(file)
    except ValueError as error:
        raise NoModel(str(error)) from error


def answer(config: dict, folder: Path | None, source: Path | None) -> ModelAnswer:
    """Return what vLLM's code at source says, or else the table.

    Raises:
        NoModel: the table cannot place it. CannotRun: vLLM's code does not run.
    """
    if not source:
        table.about_target()
    rows: list[Row] = []
    weights = token = None
    files = model_memory.weights_of_files(folder) if folder else 0
    try:
        rows = table.rows_of(config)
        token = model_memory.cache_of_token(config)
        weights = files or model_memory.weights(config)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        # vLLM may know what the table does not: bitsandbytes, 8 bits of weights and activations
        if not source:
            if isinstance(error, NoModel):
                raise
            raise NoModel(f"a dimension is missing or is not a number: {error!r:.200}") from error
    uncounted = [] if files else model_memory.uncounted(config)
    refusal = next((row.refused for row in rows if row.refused), "")
    parts: dict[str, list[str]] = {}
    for row in rows:
        parts[row.part] = sorted({*parts.get(row.part, []), row.chosen})
    said = f"the table, compared with vLLM {table.version()}"
    if source:
        from strix_validate.models.choose import ask
        from strix_validate.vllm.source import version

        (found,) = ask([config], source)
        said = f"the code of vLLM {version(source)}, on a mock {TARGET}"
        refusal = found.get("error", "").partition("\n")[0]
        parts = found.get("chosen", {})
        if counted := found.get("parameters"):
            weights, uncounted = counted, []
    compared, unproven = table.was_compared(config), model_memory.not_in_table(config)
    tiles = table.tiles_of(config, source) if rows else ""
    return ModelAnswer(
        said, rows, parts, refusal, files or weights, token, compared, tiles, uncounted, unproven
    )


def describe(name: str, found: ModelAnswer, tree: Tree) -> list[str]:
    """Return an answer as lines for people."""
    lines = [f"{name}: {'does not start' if found.refusal else 'starts'}, says {found.source}"]
    if not found.compared:
        lines.append("  no model of this architecture was compared: what follows is a guess")
    if found.refusal:
        instead = next((f"; take {row.instead}" for row in found.rows if row.instead), "")
        return [*lines, f"  vLLM says: {found.refusal}{instead}"]
    for part, names in found.parts.items():
        for chosen in names:
            rows = [row for row in found.rows if (row.part, row.chosen) == (part, chosen)]
            proofs = [f"{row.proven} ({row.of})" for row in rows] or ["not in the table"]
            lines.append(f"  {part:17} {chosen}: {'; '.join(proofs)}")
    if found.tiles:
        lines.append(f"  {'tiles of experts':17} {found.tiles}")
    lines += [f"  {'not compared':17} {part}" for part in found.unproven]
    if found.weights is None:
        return [*lines, f"  {'memory':17} cannot be said: config.json lacks a dimension"]
    cache = "no KV cache" if found.token == 0 else "a KV cache of unknown size"
    if found.token:
        cache = f"{found.token / 1024:.0f} KiB of KV cache a token at most"
    least = "at least " if found.uncounted else ""
    lines.append(f"  {'memory':17} {least}{found.weights / GIB:.1f} GiB of weights, {cache}")
    lines += [f"  {'':17} without {part}" for part in found.uncounted]
    if not (machine := memory_of(tree)):
        return [*lines, f"  {'here':17} no Strix Halo whose memory could be read"]
    flags = machine.flags(found.weights)
    if not flags:
        return [*lines, f"  {'here':17} does not fit: strix-validate doctor says what limits it"]
    tokens = machine.cache_gib(found.weights) * GIB // found.token if found.token else 0
    room = f", room for {tokens} tokens" if tokens else ""
    return [*lines, f"  {'here':17} vllm serve {name} {flags}{room}"]


def _as_dict(found: ModelAnswer) -> Mapping:
    """Return what --json prints."""
    proven = [{"part": r.part, "of": r.of, "chosen": r.chosen, "proven": r.proven}
              for r in found.rows]  # fmt: skip
    return vars(found) | {"rows": proven}


def _printable(text: str) -> str:
    """Return a stranger's words without what a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def models(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder, its config.json, or OWNER/NAME.")
    ],
    as_json: JsonOption = False,
    vllm_source: VllmOption = None,
) -> None:
    """Say whether a model runs: vLLM's backends and kernels, how far each is proven, and memory.

    Reads config.json alone and downloads nothing. Where vLLM is installed, its own code chooses, on
    a mock gfx1151; elsewhere a table does that was compared with it. Of a folder for diffusers
    (model_index.json) it says the same of diffusers. Exit status 1: vLLM refuses the model.
    """
    from importlib.util import find_spec

    try:
        file = _find(model)
        config = _read(file)
        if file.name == diffusion.INDEX:
            pipeline = diffusion.answer(config, file.parent)
            said = diffusion.describe(model, pipeline, Tree())
            typer.echo(json.dumps(pipeline.as_dict(), indent=1) if as_json else _printable(said))
            return
        folder = file.parent if file.name == "config.json" else None
        try:
            source = vllm_source
            if source or find_spec("vllm"):
                from strix_validate.vllm import source as vllm

                source = vllm.find(vllm_source)
            found = answer(config, folder, source)
        except (CannotRun, ModuleNotFoundError) as reason:
            typer.echo(f"{reason}: the table answers", err=True)
            found = answer(config, folder, None)
        lines = describe(model, found, Tree())
    except ValueError as error:
        raise typer.BadParameter(_printable(str(error))) from error
    except _STRANGE as error:
        raise typer.BadParameter(f"{model} describes no model: {error!a:.200}") from error
    typer.echo(json.dumps(_as_dict(found), indent=1) if as_json else _printable("\n".join(lines)))
    raise typer.Exit(int(bool(found.refusal)))
