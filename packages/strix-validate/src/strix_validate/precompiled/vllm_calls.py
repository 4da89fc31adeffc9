# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's attention and sampling as its server launches them: the cache's layout, scales, padding.

With the recipe's patches, vLLM's attention is compiled for what a layer's LAYERS row has but the
numbers of heads, of which only their ratio counts; linear and latent attention for a model's heads,
sampling for its vocabulary. Of linear attention each candidate of an autotuner is called, because
which one wins only the GPU can say.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from strix_validate.layers.table import MODELS, Attention, Experts, Latent, Linear
from strix_validate.triton.call import BF16, FP16, Call, DeferredCall, deferred
from strix_validate.triton.cases import Randn
from strix_validate.vllm import attention as vllm_attention
from strix_validate.vllm import experts as vllm_experts
from strix_validate.vllm import kernels as vllm_kernels
from strix_validate.vllm import linear_attention, mla, quantized, sampling
from strix_validate.vllm import source as vllm_source
from strix_validate.vllm.source import VllmCall

#: Beyond this, Triton addresses a cache with 64 bits, in another kernel.
_GIB_2 = 2**31
#: Of sequences in a batch, for the kernels that are compiled anew for one and for multiples of 16.
_BATCHES = (1, 2, 16)
#: Tokens of a step, for each tile of a product with FP8 in blocks.
_FP8_TOKENS = (1, 5, 16, 17, 32)
#: Of a token: their blocks of 128 are a multiple of 16, and none.
_FP8_SIZES = (4096, 2560)


def step(
    randn: Randn, *, layer: Attention, sequences: int, queries: int, keys: int = 300, **cache: bool
) -> tuple[VllmCall, None]:
    """Build a batch's step in a layer: its keys are written into the cache, and its queries attend.

    Args:
        sequences: of the batch. queries: new tokens of each. keys: tokens of each, cached and new.
        cache: fp8: of such numbers. huge: it exceeds 2 GiB.
    """
    rows = randn(sequences * queries, layer.heads + 2 * layer.kv_heads, layer.head_dim)
    options = {"layer": layer, "queries": queries, "keys": keys, **cache}
    return VllmCall(_step, {"rows": rows}, options), None


def _step(
    rows: Tensor, *, layer: Attention, queries: int, keys: int, fp8: bool = False,
    huge: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Launch both kernels, on a cache that is made here; return nothing."""
    count, place = len(rows) // queries, {"device": rows.device}
    q, k, v = rows.split([layer.heads, layer.kv_heads, layer.kv_heads], 1)
    shape = (4, layer.kv_heads, layer.block, 2 * layer.head_dim)
    cache = torch.empty(shape, dtype=vllm_attention.FP8 if fp8 else rows.dtype, **place)
    caches = vllm_attention.halves(cache)
    for part in caches:
        part.ptr_range = lambda: _GIB_2 if huge else cache.nbytes
    vllm_attention.store(k, v, caches, torch.zeros(len(k), dtype=torch.int64, **place))
    vllm_attention.attend(
        q, caches, layer, queries=queries, most=keys,
        starts=queries * torch.arange(count + 1, dtype=torch.int32, **place),
        keys=torch.full((count,), keys, dtype=torch.int32, **place),
        # as wide as for the longest context: a multiple of 16
        table=torch.zeros(count, 256, dtype=torch.int32, **place),
        sinks=torch.empty(layer.heads, dtype=q.dtype, **place) if layer.sinks else None,
        fp8=(1.0, 1.0) if fp8 else None,
    )  # fmt: skip
    return {}


#: Attention layers of the table of models, by a model that has them.
LAYERS = {
    model
    + ", windows" * bool(layer.window and row.windows)
    + ", across" * (not layer.causal): layer
    for model, row in MODELS.items()
    for layer in row.attention()
}
_SET_LAYERS = {"sample": ("Llama-3.1-8B",), "core": ("Llama-3.1-8B", "Llama-3.2-1B")}


def attention_calls(
    source: Path, layers: Iterable[Attention], dtypes: Iterable[torch.dtype],
    *, fp8: Iterable[bool] = (False, True), huge: Iterable[bool] = (False, True),
) -> Iterator[DeferredCall]:  # fmt: skip
    """Yield prefill and decoding of these layers."""
    for layer, dtype, is_fp8, is_huge, n in product(layers, dtypes, fp8, huge, (1, 100)):
        build = partial(step, layer=layer, sequences=2, queries=n, fp8=is_fp8, huge=is_huge)
        yield deferred(build, dtype, source=source)


def experts_calls(
    source: Path, layers: Iterable[Experts], dtypes: Iterable[torch.dtype],
    tokens: Iterable[int] = vllm_experts.TOKENS,
) -> Iterator[DeferredCall]:  # fmt: skip
    """Yield both products of these layers of experts, for every kind of batch."""
    for layer, dtype, n in product(layers, dtypes, tokens):
        yield deferred(partial(vllm_experts.mixture, layer=layer, tokens=n), dtype, source=source)


#: Layers, and sizes of vocabularies, by a model of the table that has them.
LINEAR = {model: layer for model, row in MODELS.items() for layer in row.recurrent()}
VOCABULARIES = {model: row.words for model, row in MODELS.items()}


def latent_calls(
    source: Path, layers: Iterable[Latent], dtypes: Iterable[torch.dtype]
) -> Iterator[DeferredCall]:
    """Yield decoding by these layers of MLA."""
    for layer, dtype, n in product(layers, dtypes, (1, 2, 16)):
        shape: dict = {"heads": layer.heads, "rank": layer.rank, "rope": layer.rope}
        yield deferred(partial(mla.latent, keys=(300,) * n, **shape), dtype, source=source)


def linear_calls(
    source: Path, layers: Iterable[Linear], dtypes: Iterable[torch.dtype],
    *, prompts: tuple[int, ...] = (1, 64, 100),
) -> Iterator[DeferredCall]:  # fmt: skip
    """Yield decoding by these layers, and prompts of so many tokens."""
    for layer, dtype in product(layers, dtypes):
        shape: dict = {"heads": layer.heads, "value_heads": layer.value_heads, "size": layer.size}
        channels = (2 * layer.heads + layer.value_heads) * layer.size
        delta = partial(linear_attention.delta_rule, **shape)
        short = partial(linear_attention.convolution, channels=channels, width=layer.width)
        builds = [partial(delta, lengths=(n,), kernel="chunks") for n in prompts]
        builds += [partial(delta, lengths=(1,), kernel=kernel) for kernel in ("one", "several")]
        builds += [partial(short, lengths=(1,) * n) for n in (1, 2, 16)]
        for n in (1, 2, 100):
            rows = n * layer.value_heads
            builds.append(partial(linear_attention.gated_norm, rows=rows, columns=layer.size))
        yield from (deferred(build, dtype, source=source) for build in builds)


def sampling_calls(source: Path, vocabularies: Iterable[int]) -> Iterator[DeferredCall]:
    """Yield a step's choice of tokens: penalties, temperature, min-p, top-k, top-p, noise."""
    for size in vocabularies:
        named: dict = {"vocabulary": size}
        cut = partial(sampling.truncated, **named)
        builds = [partial(sampling.penalized, **named), partial(sampling.scaled, **named)]
        builds.append(partial(sampling.drawn, draws=1, greedy=1, **named))
        for n, (k, p) in product((1, 2, 5), ((5, 0), (0, 5), (5, 5))):
            builds.append(partial(cut, keys=(k,) * n, nuclei=(p,) * n))
        yield from (deferred(build, torch.float32, source=source) for build in builds)


def _other_calls(source: Path) -> Iterator[DeferredCall]:
    """Yield rope in sections, batch-invariant RMS norm, and products with FP8 in blocks."""
    for dtype in (FP16, BF16):
        plans = [
            *(partial(vllm_kernels.rope, tokens=n, heads=32, kv_heads=8) for n in _BATCHES),
            partial(vllm_kernels.rms_norm, columns=4096),
            *(
                partial(quantized.fp8_blocks, tokens=n, size=size, rows=512)
                for n, size in product(_FP8_TOKENS, _FP8_SIZES)
            ),
        ]
        yield from (deferred(build, dtype, source=source) for build in plans)


def vllm_set(name: str, folder: Path | None) -> list[Call]:
    """Return the calls of a set, from vLLM's source.

    Raises:
        CannotRun: vLLM is not installed, and no folder was given.
    """
    source = vllm_source.find(folder)
    if name in _SET_LAYERS:
        layers = [LAYERS[model] for model in _SET_LAYERS[name]]
        experts = [vllm_experts.LAYERS["Qwen3-30B-A3B"]]
        return [
            *attention_calls(source, layers, (BF16,), fp8=(False,), huge=(False,)),
            *experts_calls(source, experts, (BF16,), tokens=(1, 2)),
            *linear_calls(source, [LINEAR["Qwen3-Next-80B-A3B"]], (BF16,), prompts=()),
            *sampling_calls(source, [VOCABULARIES["Llama-3.1-8B"]]),
        ]
    dtypes = (FP16, BF16)
    latent = dict.fromkeys(layer for row in MODELS.values() for layer in row.compressed())
    return [
        *attention_calls(source, dict.fromkeys(LAYERS.values()), dtypes),
        *experts_calls(source, vllm_experts.LAYERS.values(), dtypes),
        *linear_calls(source, dict.fromkeys(LINEAR.values()), (BF16,)),
        *latent_calls(source, latent, (BF16,)),
        *sampling_calls(source, dict.fromkeys(VOCABULARIES.values())),
        *_other_calls(source),
    ]
