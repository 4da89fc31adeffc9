# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's linear attention and sampling as its server launches them.

Their kernels are compiled for a model's heads and for its vocabulary. Of linear attention each
candidate of an autotuner is called, because which one wins only the GPU can say.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch

from strix_validate.precompiled.deferred import DeferredCall
from strix_validate.vllm import linear_attention, sampling


@dataclass(frozen=True)
class Linear:
    """A layer of gated delta rule: heads of keys and of values, lanes of each, convolved tokens."""

    heads: int
    value_heads: int
    size: int = 128
    width: int = 4


#: Layers of common models, by a model that has them.
LINEAR = {
    "Qwen3-Next-80B-A3B": Linear(16, 32),  # Qwen3.5-35B-A3B
    "Qwen3.6-27B": Linear(16, 48),  # Qwen3.5-27B
}
#: Sizes of vocabularies, by a model that has one.
VOCABULARIES = {
    "Llama-3.1-8B": 128256,
    "Llama-4-Scout": 202048,
    "Qwen3-8B": 151936,
    "Qwen2.5-VL-7B": 152064,
    "Qwen3.6-27B": 248320,
    "gpt-oss-20b": 201088,
    "Gemma-2-9B": 256000,
    "Gemma-3-4B": 262208,
    "Gemma-4-31B": 262144,
    "Mistral-7B": 32000,
    "Mistral-7B-v0.3": 32768,
    "Mistral-Small": 131072,
    "Phi-4": 100352,
    "Phi-4-mini": 200064,  # MiniMax-M2
    "GLM-4.5-Air": 151552,
    "Seed-OSS-36B": 155136,
    "Whisper-large-v3": 51866,
}


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
        yield from (_planned(build, dtype, source) for build in builds)


def sampling_calls(source: Path, vocabularies: Iterable[int]) -> Iterator[DeferredCall]:
    """Yield a step's choice of tokens: penalties, temperature, min-p, top-k, top-p, noise."""
    for size in vocabularies:
        named: dict = {"vocabulary": size}
        cut = partial(sampling.truncated, **named)
        builds = [partial(sampling.penalized, **named), partial(sampling.scaled, **named)]
        builds.append(partial(sampling.drawn, draws=1, greedy=1, **named))
        for n, (k, p) in product((1, 2, 5), ((5, 0), (0, 5), (5, 5))):
            builds.append(partial(cut, keys=(k,) * n, nuclei=(p,) * n))
        yield from (_planned(build, torch.float32, source) for build in builds)


def _planned(build: Callable, dtype: torch.dtype, source: Path) -> DeferredCall:
    said = " ".join(f"{name}={value}" for name, value in build.keywords.items())  # type: ignore[attr-defined]
    kind = str(dtype).removeprefix("torch.")
    return DeferredCall(f"{build.func.__name__} {said} {kind}", build, dtype, source=source)  # type: ignore[attr-defined]
