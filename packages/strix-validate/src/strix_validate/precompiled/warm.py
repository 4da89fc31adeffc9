# SPDX-License-Identifier: BSD-3-Clause
"""Compile the kernels of a model, or of common models, before the first request."""

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID

from strix_validate.checks import CannotRun
from strix_validate.json_file import read_json_object
from strix_validate.layers.config import EXPERTS_LEFT_OUT, ModelLayers, read_layers
from strix_validate.layers.table import MODELS, Attention, Latent
from strix_validate.precompiled import packages, vllm_calls
from strix_validate.precompiled.flash_calls import FLASH_SETS, flash_calls
from strix_validate.precompiled.vllm_calls import LAYERS, LINEAR, VOCABULARIES
from strix_validate.triton import modes as triton_modes
from strix_validate.triton.call import BF16, Call
from strix_validate.triton.modes import CallAnswer
from strix_validate.vllm.experts import LAYERS as EXPERTS

#: Seconds that one core takes to compile a kernel: 594 kernels took 29 minutes
#: (docs/evidence/2026-11-22-kernel-packages.md).
_SECONDS = 3


def calls(file: Path | None, vllm: Path | None) -> dict[str, list[Call]]:
    """Return the calls to warm up, by library; a library that is not installed is left out.

    Args:
        file: A model's config.json; None for the calls of common models.
        vllm: Folder of vLLM's source; None is the installed vLLM.

    Raises:
        CannotRun: Neither flash-attn nor vLLM was found.
        ValueError: The file cannot be read, see read_layers; or the folder is not vLLM's source.
    """
    by_library: dict[str, list[Call]] = {}
    model = read_layers(read_json_object(file)) if file else None
    if packages.has("flash_attn"):
        by_library["flash-attn"] = list(_list_flash_calls(model))
    try:
        source = vllm_calls.vllm_source.find(vllm)
    except CannotRun as reason:
        if not by_library:
            raise CannotRun(f"flash_attn is not installed; {reason}") from reason
        return by_library
    if model:
        by_library["vLLM"] = list(_list_vllm_calls(source, model))
    else:
        by_library["vLLM"] = vllm_calls.vllm_set("core", source)
    return by_library


def _list_flash_calls(model: ModelLayers | None) -> Iterator[Call]:
    if model is None:
        return FLASH_SETS["core"]()
    head_dims = {layer.head_dim for layer in model.attention}
    has_windows = any(layer.window for layer in model.attention)
    return flash_calls(head_dims, [model.dtype], windowed=has_windows)


def _list_vllm_calls(source: Path, model: ModelLayers) -> Iterator[Call]:
    dtypes = [model.dtype]
    yield from vllm_calls.attention_calls(source, model.attention, dtypes)
    yield from vllm_calls.experts_calls(source, model.experts, dtypes)
    yield from vllm_calls.linear_calls(source, model.linear, dtypes)
    yield from vllm_calls.latent_calls(source, model.latent, dtypes)
    yield from vllm_calls.sampling_calls(source, model.vocabularies)


def _reduce_to_kernel(layer: Attention) -> Attention:
    """Reduce a layer to the values that vLLM's kernels are compiled for.

    The kernels depend on the ratio of the numbers of heads, and on whether there is a window.
    """
    return replace(layer, heads=layer.group, kv_heads=1, window=int(layer.window > 0))


def beyond_table(model: ModelLayers) -> ModelLayers:
    """Return the layers of a model for which no package has kernels.

    The packages have kernels only for layers of the models in models.toml. Their kernels of linear
    and latent attention are only for bfloat16.
    """
    kernels = {_reduce_to_kernel(layer) for layer in LAYERS.values()}
    latent: list[Latent] = []
    for table_model in MODELS.values():
        latent += table_model.layers.latent
    linear = list(LINEAR.values())
    if model.dtype is not BF16:
        linear = []
        latent = []
    return ModelLayers(
        attention=[x for x in model.attention if _reduce_to_kernel(x) not in kernels],
        experts=[x for x in model.experts if x not in EXPERTS.values()],
        linear=[x for x in model.linear if x not in linear],
        latent=[x for x in model.latent if x not in latent],
        vocabularies=[n for n in model.vocabularies if n not in VOCABULARIES.values()],
        dtype=model.dtype,
    )


def estimate_compilation(file: Path, vllm: Path | None, jobs: int | None) -> str:
    """Say how many of vLLM's kernels for a model are in no package, and the time to compile them.

    The kernels of a layer count as packaged if a model in models.toml has such a layer, whether or
    not the package is installed. Triton lists the kernels, but does not compile them.

    Args:
        file: The model's config.json.
        vllm: Folder of vLLM's source; None is the installed vLLM.
        jobs: Number of parallel processes; None is one for each core.

    Raises:
        CannotRun: vLLM is not installed, and no folder is given.
        ValueError: The file cannot be read, see read_layers; or the folder is not vLLM's source.
    """
    layers = read_layers(read_json_object(file))
    remark = f"; {EXPERTS_LEFT_OUT}" if layers.lacks_experts else ""
    source = vllm_calls.vllm_source.find(vllm)
    missing_calls = list(_list_vllm_calls(source, beyond_table(layers)))
    if not missing_calls:
        return f"all of vLLM's kernels for this model are in vllm-kernels-gfx1151{remark}"
    kernels: set[str] = set()
    for answer in triton_modes.run(missing_calls, "ask").calls:
        kernels.update(answer.kernel_keys)
    jobs = jobs or len(os.sched_getaffinity(0))
    minutes = math.ceil(len(kernels) * _SECONDS / 60 / jobs)
    return (
        f"{len(kernels)} of vLLM's kernels for this model are in no package: compiling them takes "
        f"about {minutes} min{remark}"
    )


def _make_callback(bar: Progress, task: TaskID) -> Callable[[Sequence[CallAnswer]], None]:
    """Return a function that advances the bar's task by one for each answer that it gets."""

    def advance(answers: Sequence[CallAnswer]) -> None:
        bar.advance(task, len(answers))

    return advance


def fill(by_library: dict[str, list[Call]], jobs: int | None, console: Console) -> bool:
    """Compile the missing kernels into the user's cache; print the progress and a summary.

    Args:
        by_library: Calls whose kernels are needed, by library.
        jobs: Number of parallel processes; None is one for each core.
        console: The console to print on.

    Returns:
        True if a call failed.

    Raises:
        ModuleNotFoundError: triton is not installed.
    """
    from triton import knobs

    cache = Path(knobs.cache.dir)
    answers: list[CallAnswer] = []
    with Progress(console=console) as bar:
        for library, library_calls in by_library.items():
            task = bar.add_task(library, total=len(library_calls))
            advance = _make_callback(bar, task)
            answers += packages.look_up(library_calls, cache, jobs, advance)
    names: list[str] = []
    for library_calls in by_library.values():
        names += [call.name for call in library_calls]
    has_failed = False
    for name, answer in zip(names, answers, strict=True):
        if answer.error:
            has_failed = True
            console.print(escape(f"{name}: {': '.join(answer.error)}"))
    origins = packages.count_origins(answers, Path(sys.base_prefix))
    console.print(
        f"{origins.total()} kernels: {origins['packages']} from packages, "
        f"{origins['cache']} were in the cache, {origins['compiled']} compiled"
    )
    return has_failed
