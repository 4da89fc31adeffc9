# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's linear and latent attention, and sampling, as its server launches them.

Their kernels are compiled for a model's heads and for its vocabulary. Of linear attention each
candidate of an autotuner is called, because which one wins only the GPU can say.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch

from strix_validate.layers.table import MODELS, Latent, Linear
from strix_validate.precompiled.deferred import DeferredCall, deferred
from strix_validate.vllm import linear_attention, mla, sampling

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
