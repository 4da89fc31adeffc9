# SPDX-License-Identifier: BSD-3-Clause
"""Compile the kernels of a model before its first request."""

import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from strix_validate.checks import CannotRun
from strix_validate.json_file import json_object
from strix_validate.layers.config import ModelLayers, layers_of
from strix_validate.layers.table import MODELS, Attention
from strix_validate.precompiled import packages, vllm_calls
from strix_validate.precompiled.flash_calls import FLASH_SETS, flash_calls
from strix_validate.precompiled.vllm_calls import LAYERS, LINEAR, VOCABULARIES
from strix_validate.triton import modes as triton_modes
from strix_validate.triton.call import Call
from strix_validate.triton.modes import CallAnswer
from strix_validate.vllm.experts import LAYERS as EXPERTS

#: Of one core for a kernel: 594 took 29 minutes (docs/evidence/2026-11-22-kernel-packages.md).
_SECONDS = 3


def calls(file: Path | None, vllm: Path | None) -> dict[str, list[Call]]:
    """Return what to warm up, by library: a model's calls, or those of common ones.

    A library that is not installed is left out.

    Raises:
        CannotRun: neither library is there. ValueError: see layers_of.
    """
    found: dict[str, list[Call]] = {}
    model = layers_of(json_object(file)) if file else None
    if packages.has("flash_attn"):
        own = FLASH_SETS["core"]()
        if model:
            sizes = {layer.head_dim for layer in model.attention}
            windowed = any(layer.window for layer in model.attention)
            own = flash_calls(sizes, [model.dtype], windowed=windowed)
        found["flash-attn"] = list(own)
    try:
        source = vllm_calls.vllm_source.find(vllm)
        found["vLLM"] = (
            list(_of_vllm(source, model)) if model else vllm_calls.vllm_set("core", source)
        )
    except CannotRun as reason:
        if not found:
            raise CannotRun(f"flash_attn is not installed; {reason}") from reason
    return found


def _of_vllm(source: Path, model: ModelLayers) -> Iterator[Call]:
    yield from vllm_calls.attention_calls(source, model.attention, [model.dtype])
    yield from vllm_calls.experts_calls(source, model.experts, [model.dtype])
    yield from vllm_calls.linear_calls(source, model.linear, [model.dtype])
    yield from vllm_calls.latent_calls(source, model.latent, [model.dtype])
    yield from vllm_calls.sampling_calls(source, model.vocabularies)


def _kind(layer: Attention) -> Attention:
    """Return what vLLM's kernels are compiled for: the ratio of heads, and whether a window."""
    return replace(layer, heads=layer.group, kv_heads=1, window=int(layer.window > 0))


def beyond_table(model: ModelLayers) -> ModelLayers:
    """Return of a model what no model of the table has, and so no package its kernels."""
    known = {_kind(layer) for layer in LAYERS.values()}
    latent = [layer for row in MODELS.values() for layer in row.compressed()]
    return ModelLayers(
        [layer for layer in model.attention if _kind(layer) not in known],
        [layer for layer in model.experts if layer not in EXPERTS.values()],
        [layer for layer in model.linear if layer not in LINEAR.values()],
        [layer for layer in model.latent if layer not in latent],
        [n for n in model.vocabularies if n not in VOCABULARIES.values()],
        model.dtype,
    )


def foretell(file: Path, vllm: Path | None, jobs: int | None) -> str:
    """Say how many of vLLM's kernels no package has for a model, and how long they compile.

    Triton is asked, and compiles none. Raises: see :func:`calls`.
    """
    lacking = beyond_table(layers_of(json_object(file)))
    wanted = list(_of_vllm(vllm_calls.vllm_source.find(vllm), lacking))
    if not wanted:
        return "vLLM's kernels for this model are all in vllm-kernels-gfx1151"
    answers = triton_modes.run(wanted, "ask").calls
    number = len({key for answer in answers for key in answer.asked})
    minutes = math.ceil(number * _SECONDS / 60 / (jobs or len(os.sched_getaffinity(0))))
    return f"{number} of vLLM's kernels for this model are in no package: about {minutes} min"


def fill(wanted: dict[str, list[Call]], jobs: int | None, console: Console) -> bool:
    """Fill the user's cache, with progress; say what came from where, return whether a call failed.

    Raises:
        ModuleNotFoundError: triton is not installed.
    """
    from triton import knobs

    answers: list[CallAnswer] = []
    with Progress(console=console) as bar:
        for library, part in wanted.items():
            task = bar.add_task(library, total=len(part))
            answers += packages.look_up(
                part,
                Path(knobs.cache.dir),
                jobs,
                lambda some, task=task: bar.advance(task, len(some)),  # type: ignore[misc]
            )
    names = [call.name for part in wanted.values() for call in part]
    failures = [(n, a.error) for n, a in zip(names, answers, strict=True) if a.error]
    for name, error in failures:
        console.print(escape(f"{name}: {': '.join(error)}"))
    found = packages.origins(answers, Path(sys.base_prefix))
    console.print(
        f"{found.total()} kernels: {found['packages']} from packages, {found['cache']} were in the "
        f"cache, {found['compiled']} compiled"
    )
    return bool(failures)
