# SPDX-License-Identifier: BSD-3-Clause
"""Cases of vLLM's kernels for the layers of the table of models, one table for each family.

What a kernel is compiled for is the model's: lanes, the experts of a token, groups of weights,
ranks. Numbers of tokens, experts and heads are as few as show faults, and sizes that only add
tiles are shortened to their last ones. In each family quick has few cases, which hold each pair
of what the layers are made of; full has all.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import torch

from strix_validate.layers.table import FORMATS, MODELS, OWN_WINDOW, Attention, small_layers
from strix_validate.triton.cases import Candidate, Case, choose
from strix_validate.vllm import linear_attention, lora, mla, quantized, sampling
from strix_validate.vllm.attention import paged_attention, store_keys
from strix_validate.vllm.kernels import moe, rms_norm, rope

#: The bug that layers of models catch.
LAYER = "a kernel that is correct for other heads, lanes, blocks or windows than this model's"
_EXPERTS = "a kernel that is correct for fewer experts of a token, or another group of weights"
_WRITER = "a second tile of heads left out, or a head's lanes in the wrong slot (Phi-3, OLMo)"
_NORM = "a last block that is counted as full, or a mean over the padded size"
_ROPE = "another model's sections, heads or turned lanes (Qwen3-VL, Qwen3.5, GLM-4.5V)"
_LINEAR = "a kernel that is correct for 64 lanes, or for as many heads of values as of keys"
_LATENT = "heads behind the 16th, which are a second block (GLM-4.7-Flash has 20)"
_QUANTIZED = "a scale or zero point of another group than the one of 128 that checkpoints have"
_LORA = "a rank of more than one tile, or a slice of another size (q beside k and v)"
_VOCABULARY = "tokens of the vocabulary's last block, or rows that are not aligned (Granite)"
#: Ranks that vLLM serves, from those that adapters have.
RANKS = (8, 16, 32, 64, 128, 256)


def _shorten(size: int, tile: int, tiles: int) -> int:
    """Return a size of so many tiles, with the same last one if that is not full."""
    return size % tile + tiles * tile


def _steps(layer: Attention) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return lengths of a step, beyond the window, and in several blocks."""
    far = layer.window + 30 if layer.window else 70
    return {"prefill": ((9, far), (20, 20)), "decode": ((1, 40), (1, far))}


def _attention_columns(layer: Attention, kind: str, fp8: bool) -> tuple:
    window = (layer.window == OWN_WINDOW) + bool(layer.window)
    shape = (layer.group, layer.head_dim, layer.block)
    return (*shape, window, layer.softcap, layer.sinks, layer.causal, kind, fp8)


def attention_cases() -> dict[str, Case]:
    """Return paged attention: each layer, kind of step and kind of cache."""
    return choose(
        {
            f"layer-{name}-{kind}{'-fp8' * fp8}": Candidate(
                partial(paged_attention, lengths=_steps(layer)[kind], fp8=fp8, **asdict(layer)),
                _attention_columns(layer, kind, fp8),
            )
            for name, layer in small_layers().items()
            for kind in _steps(layer)
            for fp8 in (False, True)
        },
        LAYER,
    )


def _distinct(candidates: Iterator[tuple[str, Candidate]]) -> dict[str, Candidate]:
    """Return by name the first candidate with each values of its columns."""
    found: dict[tuple, tuple[str, Candidate]] = {}
    for name, candidate in candidates:
        found.setdefault(candidate.columns, (name, candidate))
    return dict(found.values())


def expert_cases() -> dict[str, Case]:
    """Return both products of a layer of experts: of each format, decoding and a prompt."""
    return choose(_distinct(_expert_products()), _EXPERTS)


def _expert_products() -> Iterator[tuple[str, Candidate]]:
    for model, row in MODELS.items():
        for kind, layer in row.mixture().items():
            bits = 4 if layer.group else 8 if layer.block else 16
            weights: dict = {"bits": bits, "zeros": layer.zeros}
            weights |= {"group": layer.group} if layer.group else {}
            for step in ("decode", "prefill"):
                tokens = 1 if step == "decode" else 23
                # one token's experts are not sorted where there are four times as many
                experts = 4 * layer.top_k if step == "decode" else layer.top_k + 2
                products = {
                    "up": (tokens, layer.top_k, 2 * layer.inner, layer.hidden, layer.first),
                    "down": (tokens * layer.top_k, 1, layer.hidden, layer.inner, not layer.first),
                }
                for name, (rows_of_x, top_k, rows, columns, routed) in products.items():
                    build = partial(
                        moe, tokens=rows_of_x, experts=experts, top_k=top_k, routed=routed,
                        rows=_shorten(rows, 128, 1), columns=_shorten(columns, 128, 2), **weights,
                    )  # fmt: skip
                    values = (layer.top_k, bits, layer.group, layer.zeros, name, step, routed)
                    suffix = "-".join(filter(None, (kind.lower(), name, step)))
                    columns_of = (*values, columns % 128, rows % 128)
                    yield f"experts-{model}-{suffix}", Candidate(build, columns_of)


def writer_cases() -> dict[str, Case]:
    """Return the cache's writer: as many heads and lanes as each model has."""
    return choose(_distinct(_writers()), _WRITER)


def _writers() -> Iterator[tuple[str, Candidate]]:
    for model, row in MODELS.items():
        for layer in row.attention():
            size = layer.kv_heads * layer.head_dim
            for fp8 in (False, True):
                build = partial(
                    store_keys, tokens=3, heads=layer.kv_heads, head_dim=layer.head_dim,
                    block=layer.block, fp8=fp8, exact=fp8,
                )  # fmt: skip
                # tiles of at most 2048 numbers; those of fewer are a power of two
                tiles = (-(-size // 2048), size & (size - 1) == 0)
                name = f"reshape-and-cache-{model}{'-fp8' * fp8}"
                columns = (layer.head_dim, layer.kv_heads, layer.block, *tiles, fp8)
                yield name, Candidate(build, columns)


def norm_cases() -> dict[str, Case]:
    """Return the norm of each size of a token's vector."""
    candidates = {
        f"rms-norm-{row.hidden}": Candidate(
            partial(rms_norm, columns=row.hidden, eps=1e-5), (row.hidden, row.hidden % 1024 > 0)
        )
        for row in MODELS.values()
    }
    return choose(candidates, _NORM)


def rope_cases() -> dict[str, Case]:
    """Return the angles of each model with several positions, with all of its heads."""
    candidates = {}
    for model, row in MODELS.items():
        for angles in row.angles():
            build = partial(
                rope, heads=angles.heads, kv_heads=angles.kv_heads, head_dim=angles.head_dim,
                rotary=angles.rotary, sections=angles.sections, interleaved=angles.interleaved,
                neox=not angles.adjacent,
            )  # fmt: skip
            candidates[f"rope-{model}"] = Candidate(build, (angles, angles.heads, angles.kv_heads))
    return choose(candidates, _ROPE)


def linear_cases() -> dict[str, Case]:
    """Return convolution, delta rule and norm: each ratio of heads of values to heads of keys."""
    # quick has the prompt of one model, whose ratio is no power of two
    dear = ("gdn-*-several", "gdn-Qwen3-Next-*-chunks", "gdn-Qwen3.5-*-chunks")
    return choose(_distinct(_linear_kernels()), _LINEAR, dear)


def _linear_kernels() -> Iterator[tuple[str, Candidate]]:
    lengths = {"chunks": (66,), "one": (1, 1, 1), "several": (1, 1)}
    for model, row in MODELS.items():
        for layer in row.recurrent():
            ratio = layer.value_heads // layer.heads
            for kernel, own in lengths.items():
                build = partial(
                    linear_attention.delta_rule, lengths=own, heads=2, value_heads=2 * ratio,
                    size=layer.size, kernel=kernel,
                )  # fmt: skip
                dtype = torch.float16 if kernel == "chunks" else torch.float32
                columns = ("rule", kernel, ratio, layer.size, 0)
                yield f"gdn-{model}-{kernel}", Candidate(build, columns, dtype)
            channels = (2 + ratio) * layer.size
            build = partial(
                linear_attention.convolution, channels=channels, width=layer.width, lengths=(2, 19)
            )
            yield (
                f"conv1d-{model}",
                Candidate(build, ("conv", "", ratio, layer.size, layer.width)),
            )
            build = partial(linear_attention.gated_norm, rows=4 * ratio, columns=layer.size)
            yield f"gated-norm-{model}", Candidate(build, ("norm", "", ratio, layer.size, 0))


def latent_cases() -> dict[str, Case]:
    """Return decoding with latent attention, with all heads and lanes of each model."""
    candidates = {
        f"mla-decode-{model}{'-fp8' * fp8}": Candidate(
            partial(mla.latent, keys=(40, 9), splits=2, fp8=fp8, **asdict(layer)), (layer, fp8)
        )
        for model, row in MODELS.items()
        for layer in row.compressed()
        for fp8 in (False, True)
    }
    return choose(candidates, _LATENT)


def quantized_cases() -> dict[str, Case]:
    """Return both products of a dense layer, in each format of its weights."""
    return choose(_distinct(_dense_products()), _QUANTIZED)


def _dense_products() -> Iterator[tuple[str, Candidate]]:
    w4a16 = partial(quantized.w4a16, group=FORMATS["GPTQ"]["group"])
    formats = {
        "awq": (partial(quantized.awq, group=FORMATS["AWQ"]["group"]), torch.float16),
        # in 16 bits the kernel has an instruction of gfx1151 where there are no zero points
        "w4a16": (w4a16, torch.float32),
        "w4a16-packed": (w4a16, torch.float16),
        "w4a16-zeros": (partial(w4a16, zeros=True), torch.float16),
        "fp8-blocks": (partial(quantized.fp8_blocks, block=FORMATS["FP8"]["block"]), torch.float16),
    }
    for model, row in MODELS.items():
        products = {"up": (row.inner, row.hidden), "down": (row.hidden, row.inner)}
        for product, (rows, size) in products.items() if row.inner else ():
            for name, (build, dtype) in formats.items():
                # five tokens and fewer go to another kernel than w4a16
                for step, tokens in (("decode", 6 if name.startswith("w4a16") else 1),
                                     ("prefill", 40)):  # fmt: skip
                    shape = {
                        "tokens": tokens,
                        "rows": _shorten(rows, 256, 0) or 64,
                        "size": _shorten(size, 256, 1),
                    }
                    columns = (name, product, step, rows % 256, size % 256)
                    yield (
                        f"{name}-{model}-{product}-{step}",
                        Candidate(partial(build, **shape), columns, dtype),
                    )


def lora_cases() -> dict[str, Case]:
    """Return adapters of each rank, for layers of one, two and three slices."""
    # a kernel has a program for each 16 of a rank, of 64 parts of a token's vector
    return choose(_distinct(_adapters()), _LORA, ("lora-*-[12]??-*", "lora-*-qkv-64-*"))


def _adapters() -> Iterator[tuple[str, Candidate]]:
    owners = {"one": (0,), "mixed": (1, -1, 0, 0, -1)}
    for model, row in MODELS.items():
        heads = row.heads * row.head_dim, row.kv_heads * row.head_dim
        layers = {
            "qkv": (row.hidden, (heads[0], heads[1], heads[1])),
            "gate-up": (row.hidden, (row.inner, row.inner)),
            "down": (row.inner, (row.hidden,)),
        }
        for layer, (size, rows) in layers.items():
            if not size or not all(rows):
                continue
            for rank in RANKS:
                for kind, own in owners.items():
                    build = partial(
                        lora.adapted, owners=own, rank=rank, adapters=max(own) + 1,
                        size=_shorten(size, 256, 1), rows=_slices(rows),
                    )  # fmt: skip
                    columns = (layer, rank, kind)
                    yield f"lora-{model}-{layer}-{rank}-{kind}", Candidate(build, columns)


def _slices(rows: tuple[int, ...]) -> tuple[int, ...]:
    """Shorten the slices of an output; the first of several stays longer where it is."""
    return tuple(_shorten(n, 64, 1 + (n > rows[-1])) for n in rows)


def sampling_cases() -> dict[str, Case]:
    """Return what is done with logits, for whole vocabularies."""
    # top-k and top-p of the largest vocabularies go through all of it some twenty times
    return choose(
        _distinct(_samplers()), _VOCABULARY, ("top-k-top-p-Gemma-*", "top-k-top-p-Llama-4-*")
    )


def _samplers() -> Iterator[tuple[str, Candidate]]:
    kernels: dict[str, Callable] = {
        "top-k-top-p": partial(sampling.truncated, keys=(50,), nuclei=(10,)),
        "penalties": sampling.penalized,
        "temperature-min-p": sampling.scaled,
    }
    for model, row in MODELS.items():
        # rows begin at a multiple of so many numbers; the largest have more than 2^17 tokens
        aligned = min(row.words & -row.words, 16)
        size = max(16, (row.words - 1).bit_length())
        for name, kernel in kernels.items():
            yield (
                f"{name}-{model}",
                Candidate(
                    partial(kernel, vocabulary=row.words), (name, aligned, size), torch.float32
                ),
            )


#: By family: its cases by name.
GENERATED: dict[str, dict[str, Case]] = {
    "attention": attention_cases(),
    "experts": expert_cases(),
    "writer": writer_cases(),
    "norm": norm_cases(),
    "rope": rope_cases(),
    "linear": linear_cases(),
    "latent": latent_cases(),
    "quantized": quantized_cases(),
    "lora": lora_cases(),
    "sampling": sampling_cases(),
}
