# SPDX-License-Identifier: BSD-3-Clause
"""Calls that launch vLLM's kernels with the cache layout, scales and padding of its server.

With the patches of the recipe vllm, attention kernels are compiled for each layer in LAYERS. Two
layers that differ only in their numbers of heads, but not in the ratio of these numbers, share
their kernels. Kernels of linear and latent attention are compiled for a model's heads, and kernels
of sampling for the size of its vocabulary. For linear attention, each configuration of an autotuner
is compiled, because only the GPU can tell which one is fastest.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from strix_validate.layers.table import MODELS, Attention, Experts, Latent, Linear
from strix_validate.triton.call import BF16, FP16, Call, DeferredCall, defer
from strix_validate.triton.cases import Randn
from strix_validate.vllm import attention as vllm_attention
from strix_validate.vllm import experts as vllm_experts
from strix_validate.vllm import kernels as vllm_kernels
from strix_validate.vllm import linear_attention, mla, quantized, sampling
from strix_validate.vllm import source as vllm_source
from strix_validate.vllm.source import VllmCall

#: For a cache of at least this many bytes, Triton uses 64-bit addresses, and so another kernel.
_GIB_2 = 2**31
#: Numbers of sequences in a batch. Triton compiles a separate kernel if an integer argument is 1,
#: or a multiple of 16.
_BATCHES = (1, 2, 16)
#: Numbers of tokens of a step. On gfx11, products with FP8 weights in blocks use another tile for
#: more than 16 tokens. For each tile, Triton compiles a separate kernel for multiples of 16.
_FP8_TOKENS = (1, 5, 16, 17, 32)
#: Sizes of a token's vector: 32 and 20 blocks of 128 numbers. Of these two numbers of blocks, only
#: 32 is a multiple of 16.
_FP8_SIZES = (4096, 2560)


def step(
    randn: Randn,
    *,
    layer: Attention,
    sequences: int,
    queries: int,
    keys: int = 300,
    **cache: bool,
) -> tuple[VllmCall, None]:
    """Build a step of a batch in a layer: write new keys into the cache, then compute attention.

    Args:
        randn: Draws normal numbers of a shape.
        layer: The layer.
        sequences: Number of sequences in the batch.
        queries: Number of new tokens of each sequence.
        keys: Number of cached and new tokens of each sequence.
        cache: Options of the cache: fp8, whether its numbers are FP8; huge, whether it exceeds
            2 GiB.
    """
    rows = randn(sequences * queries, layer.heads + 2 * layer.kv_heads, layer.head_dim)
    options = {"layer": layer, "queries": queries, "keys": keys, **cache}
    return VllmCall(_step, {"rows": rows}, options), None


def _step(
    rows: Tensor,
    *,
    layer: Attention,
    queries: int,
    keys: int,
    fp8: bool = False,
    huge: bool = False,
) -> dict[str, Tensor]:
    """Launch the kernels that store keys and compute attention; return no results."""
    count = len(rows) // queries
    device = rows.device
    q, k, v = rows.split([layer.heads, layer.kv_heads, layer.kv_heads], 1)
    shape = (4, layer.kv_heads, layer.block, 2 * layer.head_dim)
    cache_dtype = vllm_attention.FP8 if fp8 else rows.dtype
    cache = torch.empty(shape, dtype=cache_dtype, device=device)
    caches = vllm_attention.split_cache(cache)
    for part in caches:
        part.ptr_range = lambda: _GIB_2 if huge else cache.nbytes
    slots = torch.zeros(len(k), dtype=torch.int64, device=device)
    vllm_attention.store(k, v, caches, slots)
    vllm_attention.attend(
        q,
        caches,
        layer,
        queries=queries,
        most=keys,
        starts=queries * torch.arange(count + 1, dtype=torch.int32, device=device),
        keys=torch.full((count,), keys, dtype=torch.int32, device=device),
        # The width is a multiple of 16, like that of the server's block table.
        table=torch.zeros(count, 256, dtype=torch.int32, device=device),
        sinks=torch.empty(layer.heads, dtype=q.dtype, device=device) if layer.sinks else None,
        fp8=(1.0, 1.0) if fp8 else None,
    )
    return {}


def _list_layers() -> dict[str, Attention]:
    """Return the table's attention layers by model name; suffixes tell a model's layers apart."""
    layers = {}
    for model_name, model in MODELS.items():
        kinds = model.layers.attention
        for layer in kinds:
            name = model_name
            if layer.window and len(kinds) > 1:
                name += ", windows"
            if not layer.causal:
                name += ", across"
            layers[name] = layer
    return layers


#: Attention layers of the models in models.toml, by model.
LAYERS = _list_layers()
#: Linear attention layers of these models, by model.
LINEAR = {name: layer for name, model in MODELS.items() for layer in model.layers.linear}
#: Vocabulary sizes of these models, by model.
VOCABULARIES = {name: model.vocab_size for name, model in MODELS.items()}
#: Names of the models whose attention layers are in a small set of calls, by the set's name.
_SET_LAYERS = {
    "sample": ("Llama-3.1-8B",),
    "core": ("Llama-3.1-8B", "Llama-3.2-1B"),
}


def attention_calls(
    source: Path,
    layers: Iterable[Attention],
    dtypes: Iterable[torch.dtype],
    *,
    fp8: Iterable[bool] = (False, True),
    huge: Iterable[bool] = (False, True),
) -> Iterator[DeferredCall]:
    """Yield calls for prefill and decoding, for each combination of the arguments.

    Args:
        source: vLLM's folder.
        layers: The layers.
        dtypes: Data types.
        fp8: Whether the numbers of the cache are FP8.
        huge: Whether the cache exceeds 2 GiB.
    """
    for layer, dtype, is_fp8, is_huge, n in product(layers, dtypes, fp8, huge, (1, 100)):
        build = partial(step, layer=layer, sequences=2, queries=n, fp8=is_fp8, huge=is_huge)
        yield defer(build, dtype, source=source)


def experts_calls(
    source: Path,
    layers: Iterable[Experts],
    dtypes: Iterable[torch.dtype],
    tokens: Iterable[int] = vllm_experts.TOKENS,
) -> Iterator[DeferredCall]:
    """Yield calls of layers of experts for each number of tokens; a call computes both products."""
    for layer, dtype, n in product(layers, dtypes, tokens):
        build = partial(vllm_experts.mixture, layer=layer, tokens=n)
        yield defer(build, dtype, source=source)


def latent_calls(
    source: Path,
    layers: Iterable[Latent],
    dtypes: Iterable[torch.dtype],
) -> Iterator[DeferredCall]:
    """Yield calls for decoding with these layers of latent attention."""
    for layer, dtype, n in product(layers, dtypes, _BATCHES):
        build = partial(
            mla.latent,
            keys=(300,) * n,
            heads=layer.heads,
            rank=layer.rank,
            rope=layer.rope,
        )
        yield defer(build, dtype, source=source)


def linear_calls(
    source: Path,
    layers: Iterable[Linear],
    dtypes: Iterable[torch.dtype],
    *,
    prompts: tuple[int, ...] = (1, 64, 100),
) -> Iterator[DeferredCall]:
    """Yield calls of layers of linear attention: decoding, and prompts of these lengths."""
    for layer, dtype in product(layers, dtypes):
        for build in _linear_builds(layer, prompts):
            yield defer(build, dtype, source=source)


def _linear_builds(layer: Linear, prompts: tuple[int, ...]) -> Iterator[partial]:
    delta = partial(
        linear_attention.delta_rule,
        heads=layer.heads,
        value_heads=layer.value_heads,
        size=layer.size,
    )
    for n in prompts:
        yield partial(delta, lengths=(n,), kernel="chunks")
    for kernel in ("one", "several"):
        yield partial(delta, lengths=(1,), kernel=kernel)
    channels = (2 * layer.heads + layer.value_heads) * layer.size
    convolution = partial(linear_attention.convolution, channels=channels, width=layer.width)
    for n in _BATCHES:
        yield partial(convolution, lengths=(1,) * n)
    for n in (1, 2, 100):
        rows = n * layer.value_heads
        yield partial(linear_attention.gated_norm, rows=rows, columns=layer.size)


def sampling_calls(source: Path, vocabularies: Iterable[int]) -> Iterator[DeferredCall]:
    """Yield calls for sampling: penalties, temperature, min-p, top-k, top-p and noise."""
    for size in vocabularies:
        for build in _sampling_builds(size):
            yield defer(build, torch.float32, source=source)


def _sampling_builds(vocabulary: int) -> Iterator[partial]:
    yield partial(sampling.penalized, vocabulary=vocabulary)
    yield partial(sampling.scaled, vocabulary=vocabulary)
    yield partial(sampling.drawn, draws=1, greedy=1, vocabulary=vocabulary)
    truncated = partial(sampling.truncated, vocabulary=vocabulary)
    for n, (k, p) in product((1, 2, 5), ((5, 0), (0, 5), (5, 5))):
        yield partial(truncated, keys=(k,) * n, nuclei=(p,) * n)


def _other_calls(source: Path) -> Iterator[DeferredCall]:
    """Yield calls of mrope, batch-invariant RMS norm, and products with FP8 weights in blocks."""
    builds = [partial(vllm_kernels.rope, tokens=n, heads=32, kv_heads=8) for n in _BATCHES]
    builds.append(partial(vllm_kernels.rms_norm, columns=4096))
    for n, size in product(_FP8_TOKENS, _FP8_SIZES):
        builds.append(partial(quantized.fp8_blocks, tokens=n, size=size, rows=512))
    for dtype, build in product((FP16, BF16), builds):
        yield defer(build, dtype, source=source)


def vllm_set(name: str, folder: Path | None) -> list[Call]:
    """Return the calls of a set, with vLLM's source.

    Args:
        name: "sample" or "core"; any other name stands for all calls.
        folder: Folder of vLLM's source; None is the installed vLLM.

    Raises:
        CannotRun: No folder is given, and vLLM is not installed.
        ValueError: The folder is not a source tree of vLLM.
    """
    source = vllm_source.find(folder)
    if name in _SET_LAYERS:
        layers = [LAYERS[model] for model in _SET_LAYERS[name]]
        experts = [vllm_experts.LAYERS["Qwen3-30B-A3B"]]
        linear = [LINEAR["Qwen3-Next-80B-A3B"]]
        return [
            *attention_calls(source, layers, (BF16,), fp8=(False,), huge=(False,)),
            *experts_calls(source, experts, (BF16,), tokens=(1, 2)),
            *linear_calls(source, linear, (BF16,), prompts=()),
            *sampling_calls(source, [VOCABULARIES["Llama-3.1-8B"]]),
        ]
    dtypes = (FP16, BF16)
    # dict.fromkeys removes duplicates, and keeps the order of the table
    latent = dict.fromkeys(layer for model in MODELS.values() for layer in model.layers.latent)
    return [
        *attention_calls(source, dict.fromkeys(LAYERS.values()), dtypes),
        *experts_calls(source, vllm_experts.LAYERS.values(), dtypes),
        *linear_calls(source, dict.fromkeys(LINEAR.values()), (BF16,)),
        *latent_calls(source, latent, (BF16,)),
        *sampling_calls(source, dict.fromkeys(VOCABULARIES.values())),
        *_other_calls(source),
    ]
