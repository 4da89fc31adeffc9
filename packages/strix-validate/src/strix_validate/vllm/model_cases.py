# SPDX-License-Identifier: BSD-3-Clause
"""Cases of vLLM's kernels for the models in models.toml, with one table per kind of kernel.

The values that a kernel is compiled for are those of the models: head dims, experts per token,
group sizes of weights, and ranks. Numbers of tokens, experts and heads are as low as they can be
without hiding faults, and sizes that only add tiles are shortened to the last tiles. A full run
includes all cases. A quick run includes a few inexpensive cases of each table; see
triton.cases.choose.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import product

import torch

from strix_validate.layers.table import (
    FORMATS,
    GEMMA_3_WINDOW,
    MODELS,
    Attention,
    Experts,
    Linear,
    Model,
    small_layers,
)
from strix_validate.triton.call import FP16
from strix_validate.triton.cases import Candidate, Case, choose
from strix_validate.vllm import linear_attention, lora, mla, quantized, sampling
from strix_validate.vllm.attention import paged_attention, store_keys
from strix_validate.vllm.kernels import moe, rms_norm, rope

#: The fault that the cases of attention layers would catch.
LAYER = "a kernel that is wrong only for the heads, head dim, blocks or window of this model"
_EXPERTS = (
    "a kernel that is correct only for fewer experts per token, or for other group sizes of weights"
)
_WRITER = (
    "a second tile of heads left out, or part of a head written to the wrong slot (Phi-3, OLMo)"
)
_NORM = "a last block that is computed as if it was full, or a mean that divides by the padded size"
_ROPE = "wrong rotary sections or heads, or wrong elements rotated (Qwen3-VL, Qwen3.5, GLM-4.5V)"
_LINEAR = "a kernel that is correct only for head size 64, or for as many value heads as key heads"
_LATENT = "a second block of heads, those after the 16th, left out (GLM-4.7-Flash has 20 heads)"
_QUANTIZED = "the scale or zero point of the wrong group, with the group size 128 of checkpoints"
_LORA = "a fault if the rank spans several tiles, or if slices have different sizes (q, k and v)"
_VOCABULARY = "wrong results for tokens in the vocabulary's last block, or unaligned rows (Granite)"
#: Ranks of common LoRA adapters, as far as vLLM supports them.
RANKS = (8, 16, 32, 64, 128, 256)
#: Candidates by name.
_Candidates = Iterator[tuple[str, Candidate]]
#: For each sequence, the number of queries and the number of keys.
_Lengths = tuple[tuple[int, int], ...]


def _shorten(size: int, tile: int, tiles: int) -> int:
    """Return the size of `tiles` full tiles, plus that of the last tile of `size` if not full."""
    return size % tile + tiles * tile


def _keep_distinct(candidates: _Candidates) -> dict[str, Candidate]:
    """Return the first candidate with each combination of column values, by name."""
    listed_columns = set()
    distinct = {}
    for name, candidate in candidates:
        if candidate.columns not in listed_columns:
            listed_columns.add(candidate.columns)
            distinct[name] = candidate
    return distinct


def _list_steps(layer: Attention) -> dict[str, _Lengths]:
    """Return the lengths of a prefill and of a decoding step.

    The longest sequences have more keys than the window and, except in hybrid models, than a block.
    """
    keys = layer.window + 30 if layer.window else 70
    return {
        "prefill": ((9, keys), (20, 20)),
        "decode": ((1, 40), (1, keys)),
    }


def attention_cases() -> dict[str, Case]:
    """Return cases of paged attention for each layer, kind of step and kind of cache."""
    return choose(dict(_attention_candidates()), LAYER)


def _attention_candidates() -> _Candidates:
    for name, layer in small_layers().items():
        for (step, lengths), fp8 in product(_list_steps(layer).items(), (False, True)):
            build = partial(paged_attention, lengths=lengths, fp8=fp8, **asdict(layer))
            window_kind = (layer.window == GEMMA_3_WINDOW) + bool(layer.window)
            columns = (
                layer.group,
                layer.head_dim,
                layer.block,
                window_kind,
                layer.softcap,
                layer.sinks,
                layer.causal,
                step,
                fp8,
            )
            suffix = "-fp8" if fp8 else ""
            yield f"layer-{name}-{step}{suffix}", Candidate(build, columns)


def expert_cases() -> dict[str, Case]:
    """Return cases of both products of a layer of experts, for each format and kind of step."""
    return choose(_keep_distinct(_expert_candidates()), _EXPERTS)


def _expert_candidates() -> _Candidates:
    for model, row in MODELS.items():
        for weight_format, layer in row.experts_by_format().items():
            for step in ("decode", "prefill"):
                for name, candidate in _list_products(layer, step):
                    parts = (model, weight_format.lower(), name, step)
                    suffix = "-".join(part for part in parts if part)
                    yield f"experts-{suffix}", candidate


def _list_products(layer: Experts, step: str) -> _Candidates:
    """Yield the first and the second product of a layer."""
    if step == "decode":
        tokens = 1
        # For one token, vLLM does not sort by expert if there are at least 4 * top_k experts and
        # the weights are not int4.
        experts = 4 * layer.top_k
    else:
        tokens = 23
        experts = layer.top_k + 2
    bits = 16
    if layer.group:
        bits = 4
    elif layer.block:
        bits = 8
    weights: dict = {"bits": bits, "zeros": layer.zeros}
    if layer.group:
        weights["group"] = layer.group
    # Each tuple has the number of rows of x, the number of experts of a row, the rows and columns
    # of the weights, and whether the router's weights are applied.
    products = {
        "up": (
            tokens,
            layer.top_k,
            2 * layer.intermediate_size,
            layer.hidden_size,
            layer.weights_input,
        ),
        "down": (
            tokens * layer.top_k,
            1,
            layer.hidden_size,
            layer.intermediate_size,
            not layer.weights_input,
        ),
    }
    for name, (x_rows, top_k, rows, columns, routed) in products.items():
        build = partial(
            moe,
            tokens=x_rows,
            experts=experts,
            top_k=top_k,
            routed=routed,
            rows=_shorten(rows, 128, 1),
            columns=_shorten(columns, 128, 2),
            **weights,
        )
        values = (
            layer.top_k,
            bits,
            layer.group,
            layer.zeros,
            name,
            step,
            routed,
            columns % 128,
            rows % 128,
        )
        yield name, Candidate(build, values)


def writer_cases() -> dict[str, Case]:
    """Return cases of the cache's writer, with each model's number of heads and head dim."""
    return choose(_keep_distinct(_writer_candidates()), _WRITER)


def _writer_candidates() -> _Candidates:
    for model, row in MODELS.items():
        for layer, fp8 in product(row.layers.attention, (False, True)):
            build = partial(
                store_keys,
                tokens=3,
                heads=layer.kv_heads,
                head_dim=layer.head_dim,
                block=layer.block,
                fp8=fp8,
                exact=fp8,
            )
            # A tile has at most 2048 numbers. The size of a smaller tile is a power of two.
            size = layer.kv_heads * layer.head_dim
            tiles = -(-size // 2048)
            is_power_of_two = size & (size - 1) == 0
            columns = (layer.head_dim, layer.kv_heads, layer.block, tiles, is_power_of_two, fp8)
            suffix = "-fp8" if fp8 else ""
            yield f"reshape-and-cache-{model}{suffix}", Candidate(build, columns)


def norm_cases() -> dict[str, Case]:
    """Return a case of the norm for each hidden size."""
    candidates = {}
    for row in MODELS.values():
        build = partial(rms_norm, columns=row.hidden_size, eps=1e-5)
        columns = (row.hidden_size, row.hidden_size % 1024 > 0)
        candidates[f"rms-norm-{row.hidden_size}"] = Candidate(build, columns)
    return choose(candidates, _NORM)


def rope_cases() -> dict[str, Case]:
    """Return cases of mrope for each model that has it, with all of the model's heads."""
    candidates = {}
    for model, row in MODELS.items():
        angles = row.rope
        if angles is None:
            continue
        build = partial(
            rope,
            heads=angles.heads,
            kv_heads=angles.kv_heads,
            head_dim=angles.head_dim,
            rotary=angles.rotary,
            sections=angles.sections,
            interleaved=angles.interleaved,
            neox=not angles.has_adjacent_pairs,
        )
        columns = (angles, angles.heads, angles.kv_heads)
        candidates[f"rope-{model}"] = Candidate(build, columns)
    return choose(candidates, _ROPE)


#: Cases that take too long for a quick run. A quick run includes prompts of one model only; the
#: ratio of its value heads to its key heads is not a power of two.
_EXPENSIVE_LINEAR = (
    "gdn-*-several",
    "gdn-Qwen3-Next-*-chunks",
    "gdn-Qwen3.5-*-chunks",
)
#: Lengths of the sequences, by kernel; see linear_attention.delta_rule.
_RULE_LENGTHS = {
    "chunks": (66,),
    "one": (1, 1, 1),
    "several": (1, 1),
}


def linear_cases() -> dict[str, Case]:
    """Return cases of linear attention for each ratio of value heads to key heads.

    The cases cover the convolution, the delta rule and the norm.
    """
    return choose(_keep_distinct(_linear_candidates()), _LINEAR, _EXPENSIVE_LINEAR)


def _linear_candidates() -> _Candidates:
    for model, row in MODELS.items():
        for layer in row.layers.linear:
            yield from _list_linear(model, layer)


def _list_linear(model: str, layer: Linear) -> _Candidates:
    ratio = layer.value_heads // layer.heads
    for kernel, lengths in _RULE_LENGTHS.items():
        build = partial(
            linear_attention.delta_rule,
            lengths=lengths,
            heads=2,
            value_heads=2 * ratio,
            size=layer.size,
            kernel=kernel,
        )
        dtype = FP16 if kernel == "chunks" else torch.float32
        columns: tuple = ("rule", kernel, ratio, layer.size, 0)
        yield f"gdn-{model}-{kernel}", Candidate(build, columns, dtype)
    build = partial(
        linear_attention.convolution,
        channels=(2 + ratio) * layer.size,
        width=layer.width,
        lengths=(2, 19),
    )
    columns = ("conv", "", ratio, layer.size, layer.width)
    yield f"conv1d-{model}", Candidate(build, columns)
    build = partial(linear_attention.gated_norm, rows=4 * ratio, columns=layer.size)
    columns = ("norm", "", ratio, layer.size, 0)
    yield f"gated-norm-{model}", Candidate(build, columns)


def latent_cases() -> dict[str, Case]:
    """Return cases of decoding with latent attention, with each model's heads and sizes."""
    return choose(dict(_latent_candidates()), _LATENT)


def _latent_candidates() -> _Candidates:
    for model, row in MODELS.items():
        for layer, fp8 in product(row.layers.latent, (False, True)):
            build = partial(mla.latent, keys=(40, 9), splits=2, fp8=fp8, **asdict(layer))
            suffix = "-fp8" if fp8 else ""
            yield f"mla-decode-{model}{suffix}", Candidate(build, (layer, fp8))


def quantized_cases() -> dict[str, Case]:
    """Return cases of both products of a dense layer, in each format of its weights."""
    return choose(_keep_distinct(_quantized_candidates()), _QUANTIZED)


_awq = partial(quantized.awq, group=FORMATS["AWQ"]["group"])
_w4a16 = partial(quantized.w4a16, group=FORMATS["GPTQ"]["group"])
_fp8_blocks = partial(quantized.fp8_blocks, block=FORMATS["FP8"]["block"])
#: The builder of a product and its dtype, by the name of the format.
_DENSE_FORMATS: dict[str, tuple[partial, torch.dtype]] = {
    "awq": (_awq, FP16),
    "w4a16": (_w4a16, torch.float32),
    # In 16 bits and without zero points, the kernel has another form: it uses an instruction of
    # gfx1151.
    "w4a16-packed": (_w4a16, FP16),
    "w4a16-zeros": (partial(_w4a16, zeros=True), FP16),
    "fp8-blocks": (_fp8_blocks, FP16),
}


def _quantized_candidates() -> _Candidates:
    for model, row in MODELS.items():
        if not row.intermediate_size:
            continue
        products = {
            "up": (row.intermediate_size, row.hidden_size),
            "down": (row.hidden_size, row.intermediate_size),
        }
        for (name, shape), format_name in product(products.items(), _DENSE_FORMATS):
            rows, size = shape
            for step, candidate in _list_dense(format_name, name, rows, size):
                yield f"{format_name}-{model}-{name}-{step}", candidate


def _list_dense(format_name: str, product_name: str, rows: int, size: int) -> _Candidates:
    """Yield a product's candidates: one for decoding, and one for a prompt."""
    build, dtype = _DENSE_FORMATS[format_name]
    # For five or fewer tokens, vLLM does not use the kernel of w4a16.
    fewest_tokens = 6 if format_name.startswith("w4a16") else 1
    for step, tokens in (("decode", fewest_tokens), ("prefill", 40)):
        build_step = partial(
            build,
            tokens=tokens,
            rows=_shorten(rows, 256, 0) or 64,
            size=_shorten(size, 256, 1),
        )
        columns = (format_name, product_name, step, rows % 256, size % 256)
        yield step, Candidate(build_step, columns, dtype)


#: Cases that take too long for a quick run. For every 16 numbers of the rank, a kernel has 64
#: programs, one for each part of a token's vector.
_EXPENSIVE_LORA = ("lora-*-[12]??-*", "lora-*-qkv-64-*")
#: The adapter of each token.
_LORA_OWNERS = {"one": (0,), "mixed": (1, -1, 0, 0, -1)}


def lora_cases() -> dict[str, Case]:
    """Return cases of adapters of each rank, for layers of one, two and three slices."""
    return choose(_keep_distinct(_lora_candidates()), _LORA, _EXPENSIVE_LORA)


def _lora_candidates() -> _Candidates:
    for model, row in MODELS.items():
        for layer, (size, rows) in _list_adapted_layers(row).items():
            if not size or not all(rows):
                continue
            for rank, (owners_name, owners) in product(RANKS, _LORA_OWNERS.items()):
                build = partial(
                    lora.adapted_layer,
                    owners=owners,
                    rank=rank,
                    adapters=max(owners) + 1,
                    size=_shorten(size, 256, 1),
                    rows=_shorten_slices(rows),
                )
                columns = (layer, rank, owners_name)
                yield f"lora-{model}-{layer}-{rank}-{owners_name}", Candidate(build, columns)


def _list_adapted_layers(row: Model) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return for each layer the number of columns of x, and of each slice of the result."""
    queries = row.num_attention_heads * row.head_dim
    keys = row.num_key_value_heads * row.head_dim
    return {
        "qkv": (row.hidden_size, (queries, keys, keys)),
        "gate-up": (row.hidden_size, (row.intermediate_size, row.intermediate_size)),
        "down": (row.intermediate_size, (row.hidden_size,)),
    }


def _shorten_slices(rows: tuple[int, ...]) -> tuple[int, ...]:
    """Shorten the slices of an output.

    A slice that is longer than the last slice stays longer.
    """
    shortened = []
    for n in rows:
        tiles = 2 if n > rows[-1] else 1
        shortened.append(_shorten(n, 64, tiles))
    return tuple(shortened)


#: Cases that take too long for a quick run, because the kernel of top-k and top-p reads each of
#: these large vocabularies about twenty times.
_EXPENSIVE_SAMPLING = ("top-k-top-p-Gemma-*", "top-k-top-p-Llama-4-*")
_SAMPLERS: dict[str, Callable] = {
    "top-k-top-p": partial(sampling.truncated, keys=(50,), nuclei=(10,)),
    "penalties": sampling.penalized,
    "temperature-min-p": sampling.scaled,
}


def sampling_cases() -> dict[str, Case]:
    """Return cases of sampling with whole vocabularies."""
    return choose(_keep_distinct(_sampling_candidates()), _VOCABULARY, _EXPENSIVE_SAMPLING)


def _sampling_candidates() -> _Candidates:
    for model, row in MODELS.items():
        # Each row of logits begins at a multiple of this number of elements.
        alignment = min(row.vocab_size & -row.vocab_size, 16)
        # The largest vocabularies have more than 2^17 tokens.
        bits = max(16, (row.vocab_size - 1).bit_length())
        for name, sampler in _SAMPLERS.items():
            build = partial(sampler, vocabulary=row.vocab_size)
            columns = (name, alignment, bits)
            yield f"{name}-{model}", Candidate(build, columns, torch.float32)


#: The tables of cases, by kind of kernel. Each table has cases by name.
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
