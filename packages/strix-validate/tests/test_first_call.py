# SPDX-License-Identifier: BSD-3-Clause
"""The full set of kernels has every kernel that the first calls of a model need.

Triton's hook before compilation refuses each kernel, so that all kernels are counted and none is
compiled. Set VLLM_SOURCE to a folder of vLLM's source with the patches of the recipe vllm. The
kernels of flash-attn and amd-aiter are counted if these packages are installed.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from calls import skip_without
from models import CONFIGS
from strix_validate.attention import flash
from strix_validate.layers.config import ModelLayers, read_layers
from strix_validate.layers.table import MODELS, Attention
from strix_validate.precompiled import flash_calls, vllm_calls, warm
from strix_validate.precompiled import packages as kernel_packages
from strix_validate.precompiled.vllm_calls import LAYERS, step
from strix_validate.triton import modes as triton_modes
from strix_validate.triton.call import Call, DeferredCall
from strix_validate.vllm import experts, linear_attention, mla, quantized, sampling

pytestmark = skip_without("triton")
SOURCE = Path(os.environ.get("VLLM_SOURCE", ""))
needs_vllm = pytest.mark.skipif(not os.environ.get("VLLM_SOURCE"), reason="VLLM_SOURCE is not set")
needs_flash_attn = pytest.mark.skipif(
    not kernel_packages.has("flash_attn"), reason="flash_attn is not installed"
)
#: Steps of a server: the number of sequences, and the numbers of new and of cached tokens of each.
STEPS = ((1, 7, 0), (1, 100, 0), (3, 1024, 0), (1, 1, 300), (5, 1, 9000), (16, 1, 64), (64, 1, 64))


def find_kernels_by_call(calls: Sequence[Call]) -> list[set[str]]:
    """Return a set of kernels for each call. Triton may look up a refused kernel more than once."""
    answers = triton_modes.run(calls, "ask").calls
    errors = [answer.error for answer in answers if answer.error]
    assert not errors
    return [set(answer.kernel_keys) for answer in answers]


def find_kernels(calls: Sequence[Call]) -> set[str]:
    return set().union(*find_kernels_by_call(calls))


def deferred(builds: list[partial], dtype: torch.dtype = torch.bfloat16) -> list[DeferredCall]:
    """Return calls that make their tensors only when they run."""
    return [DeferredCall("step", build, dtype, {"source": SOURCE}) for build in builds]


def first_calls(layers: list[Attention], dtype: torch.dtype) -> list[DeferredCall]:
    return deferred(
        [
            partial(step, layer=layer, sequences=n, queries=new, keys=new + cached)
            for layer in layers
            for n, new, cached in STEPS
        ],
        dtype,
    )


@pytest.fixture(scope="module")
def shipped() -> set[str]:
    return find_kernels(vllm_calls.vllm_set("full", SOURCE))


#: Numbers of tokens in a step. Some of these numbers occur in no kernel set.
STEP_TOKENS = (
    1,
    2,
    4,
    7,
    9,
    17,
    32,
    33,
    44,
    64,
    66,
    76,
    96,
    100,
    128,
    131,
    148,
    256,
    511,
    512,
    513,
    524,
    2048,
    2084,
    4099,
)


def first_experts(model: str) -> list[DeferredCall]:
    layers = read_layers(CONFIGS[model]).experts
    return list(vllm_calls.experts_calls(SOURCE, layers, [torch.bfloat16], STEP_TOKENS))


@needs_vllm
def test_experts_of_no_set_are_counted(shipped: set[str]) -> None:
    """Three experts per token need other kernels, because this number is a constant in kernels."""
    layer = replace(experts.LAYERS["Qwen3-235B-A22B"], top_k=3)
    kernels = find_kernels(
        list(vllm_calls.experts_calls(SOURCE, [layer], [torch.bfloat16], [1, 64]))
    )
    assert kernels - shipped


def first_linear(model: str, keys: int = 1) -> list[DeferredCall]:
    """Return calls of linear attention in a server's steps: one prompt, several, and decoding.

    The calls have `keys` times as many heads as the model.
    """
    (linear,) = read_layers(CONFIGS[model]).linear
    heads = {"heads": keys * linear.heads, "value_heads": keys * linear.value_heads}
    channels = 128 * (2 * heads["heads"] + heads["value_heads"])
    delta = partial(linear_attention.delta_rule, size=128, **heads)
    builds = [partial(delta, lengths=n, kernel="chunks") for n in ((7,), (1000, 24), (16, 16, 3))]
    for n in (1, 3, 7, 16, 64):
        builds += [partial(delta, lengths=(1,) * n, kernel=kernel) for kernel in ("one", "several")]
        builds.append(partial(linear_attention.convolution, lengths=(9,) * n, channels=channels))
        rows = n * heads["value_heads"]
        builds.append(partial(linear_attention.gated_norm, rows=rows, columns=128))
    return deferred([*builds, partial(delta, lengths=(1, 1, 70), kernel="several")])


def first_choices(vocabulary: int) -> list[DeferredCall]:
    """Return calls of the kernels that choose the tokens of a server's step."""
    builds = [
        partial(sampling.penalized, vocabulary=vocabulary, prompt=9, generated=64),
        partial(sampling.scaled, vocabulary=vocabulary),
        *(partial(sampling.drawn, vocabulary=vocabulary, draws=n, greedy=1) for n in (3, 15)),
    ]
    for n in (1, 3, 8):
        options = {"vocabulary": vocabulary}
        builds.append(partial(sampling.truncated, keys=(20,) * n, nuclei=(0,) * n, **options))
        builds.append(partial(sampling.truncated, keys=(0,) * n, nuclei=(9,) * n, **options))
        builds.append(partial(sampling.truncated, keys=(50,) * n, nuclei=(9,) * n, **options))
    return deferred(builds, torch.float32)


@needs_vllm
def test_linear_attention_of_no_set_is_counted(shipped: set[str]) -> None:
    """With twice the heads, prompts and decoding need other kernels. Autotuning adds many."""
    assert len(find_kernels(first_linear("Qwen3.6-27B", keys=2)) - shipped) > 90


def first_steps(model: str) -> dict[str, list[Call]]:
    """Return the calls of vLLM's Triton kernels in a server's steps, by part of the model."""
    layers = read_layers(CONFIGS[model])
    latent = [
        partial(mla.latent, keys=(n,) * count, heads=x.heads, rank=x.rank, rope=x.rope)
        for x in layers.latent
        for n, count in ((300, 1), (77, 3), (64, 16))
    ]
    return {
        "attention": first_calls(layers.attention, layers.dtype),
        "experts": first_experts(model),
        "linear": first_linear(model) if layers.linear else [],
        "latent": deferred(latent),
        "sampling": first_choices(*layers.vocabularies),
    }


@needs_vllm
@pytest.mark.parametrize("model", CONFIGS)
def test_a_models_first_steps_compile_nothing(model: str, shipped: set[str]) -> None:
    for part, calls in first_steps(model).items():
        kernels = find_kernels(calls) if calls else set()
        assert bool(kernels) is bool(calls) and not kernels - shipped, part


@needs_vllm
def test_products_with_fp8_in_blocks_compile_nothing(shipped: set[str]) -> None:
    steps = [
        partial(quantized.fp8_blocks, tokens=n, size=640, rows=256) for n in (1, 7, 16, 99, 48)
    ]
    kernels = find_kernels(deferred(steps))
    assert kernels
    assert not kernels - shipped


@needs_vllm
def test_sampling_of_no_set_is_counted(shipped: set[str]) -> None:
    assert find_kernels(first_choices(77777)) - shipped


def test_layers_of_one_model_are_told_apart() -> None:
    assert LAYERS["Whisper-large-v3"].causal
    assert not LAYERS["Whisper-large-v3, across"].causal
    assert not LAYERS["Gemma-3-12B"].window
    assert LAYERS["Gemma-3-12B, windows"].window


@needs_vllm
def test_a_model_of_no_set_is_counted(shipped: set[str]) -> None:
    """No set has kernels for nine query heads per key head: prefill and decoding lack one each."""
    kernels = find_kernels(first_calls([replace(LAYERS["Llama-3.1-8B"], heads=72)], torch.bfloat16))
    assert len(kernels - shipped) == 2


@needs_vllm
def test_one_kernel_for_all_heads_windows_and_batches() -> None:
    """With upstream's source, the test fails. A patch of the recipe for vLLM makes it pass."""
    layers = [Attention(8 * n, 2 * n, 128, window) for n in (1, 3, 16) for window in (33, 4096)]
    steps = [
        partial(step, layer=x, sequences=n, queries=9, keys=64) for x in layers for n in (1, 5, 16)
    ]
    kernels = find_kernels(deferred(steps, torch.float16))
    attention_kernels = {key for key in kernels if "reshape_and_cache" not in key}
    assert len(attention_kernels) == 1


def first_flash_calls(model: str, layers: ModelLayers) -> Iterator:
    """Yield flash-attn's calls of a model's layers: prompts, packed batches, training, and a cache.

    If config.json has no scale, the calls have an arbitrary one. If amd-aiter is installed, a layer
    with a window of n keys has the windows that transformers and other callers pass: n - 1 keys to
    either side, n keys to the left, and n keys to the left with no limit to the right.
    """
    scale = CONFIGS[model].get("text_config", CONFIGS[model]).get("query_pre_attn_scalar", 77)
    supported = [layer for layer in layers.attention if layer.head_dim <= 256]
    for layer in supported:
        windows = [(-1, -1)]
        if (n := layer.window) and flash_calls.has_aiter():
            windows = [(n - 1, n - 1), (n, 0), (n, -1)]
        caches = [(4096, 0), (3000, 0)]
        if flash_calls.has_aiter():
            caches.append((4096, 256))
        heads = {"heads": layer.heads, "kv_heads": layer.kv_heads, "head_dim": layer.head_dim}
        for window in windows:
            options = heads | {"window": window, "scale": scale**-0.5}
            make_call = partial(DeferredCall, model, dtype=layers.dtype)
            for n, causal in ((1, False), (32, True)):
                build = partial(flash.fixed, seqlen_q=n, seqlen_k=32, causal=causal, **options)
                yield make_call(build, change={} if causal else flash_calls.FORWARD)
            yield make_call(partial(flash.varlen, lengths_q=(9, 64), lengths_k=(9, 64), **options))
            for capacity, page in caches:
                cache = {"capacity": capacity, "lengths": (1000,), "page": page, "batch": 1}
                yield make_call(partial(flash.kv_cache, queries=1, new=1, **cache, **options))


@pytest.fixture(scope="module")
def shipped_flash() -> set[str]:
    return find_kernels(list(flash_calls.FLASH_SETS["full"]()))


@needs_flash_attn
def test_flash_attn_compiles_nothing(shipped_flash: set[str]) -> None:
    calls = [
        call
        for model, config in CONFIGS.items()
        for call in first_flash_calls(model, read_layers(config))
    ]
    kernels_by_call = find_kernels_by_call(calls)
    assert all(kernels_by_call)
    assert not {
        call.name for call, keys in zip(calls, kernels_by_call, strict=True) if keys - shipped_flash
    }


#: Calls of vLLM's encoders: heads, head dimension, tokens of images or of 30 s of audio, and dtype.
ENCODERS = {
    "Whisper-large-v3": (20, 64, (1500, 1500), torch.float16),
    "Qwen2.5-VL-7B": (16, 80, (64, 64, 16), torch.bfloat16),
    "Qwen2.5-VL-7B, whole": (16, 80, (4096,), torch.bfloat16),
    "Mistral-Small": (16, 64, (1000, 300), torch.bfloat16),
    "Gemma-3-4B": (16, 72, (4096,), torch.bfloat16),
}


@needs_flash_attn
@pytest.mark.parametrize("model", ENCODERS)
def test_encoders_compile_nothing(model: str, shipped_flash: set[str]) -> None:
    heads, head_dim, lengths, dtype = ENCODERS[model]
    shape = {"heads": heads, "kv_heads": heads, "head_dim": head_dim, "causal": False}
    options = {"lengths_q": lengths, "lengths_k": lengths, "scale": head_dim**-0.5}
    build = partial(flash.varlen, **shape, **options)
    kernels = find_kernels([DeferredCall(model, build, dtype, flash_calls.FORWARD)])
    assert kernels
    assert not kernels - shipped_flash


@needs_flash_attn
def test_flash_attn_of_no_set_is_counted(shipped_flash: set[str]) -> None:
    """Kernels for a head dimension that no set has are counted, even if a larger tile would fit."""
    layers = replace(read_layers(CONFIGS["Phi-4"]), attention=[Attention(4, 2, 112)])
    kernels = find_kernels(list(first_flash_calls("Phi-4", layers)))
    assert len(kernels - shipped_flash) > 3


#: The parts of a model that have kernels of their own.
PARTS = ("attention", "experts", "linear", "latent", "vocabularies")


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Gemma-2-9B", "Qwen3.6-27B", "Qwen3-30B-A3B"])
def test_a_model_of_the_table_compiles_nothing(model: str) -> None:
    """More heads in the same ratio, or another window, need no other kernels."""
    config = CONFIGS[model].get("text_config", CONFIGS[model])
    more_heads = {name: 2 * config[name] for name in ("num_attention_heads", "num_key_value_heads")}
    for change in (
        {},
        more_heads | {"head_dim": config.get("head_dim", 128)},
        {"sliding_window": 77},
    ):
        if "sliding_window" in change and not config.get("sliding_window"):
            continue
        if change and "linear_num_key_heads" in config:
            continue  # here, a block of the KV cache depends on the number of heads
        beyond = warm.beyond_table(read_layers(config | change))
        assert not beyond.attention
        assert not beyond.experts
        assert not beyond.linear
        assert not beyond.vocabularies


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"num_attention_heads": 36}, "attention"),
        ({"head_dim": 96}, "attention"),
        ({"vocab_size": 77777}, "vocabularies"),
        ({"num_experts": 99}, "experts"),
    ],
)
def test_what_no_model_of_the_table_has_is_foretold(change: dict, part: str) -> None:
    beyond = warm.beyond_table(read_layers(CONFIGS["Qwen3-30B-A3B"] | change))
    assert [name for name in PARTS if getattr(beyond, name)] == [part]


@pytest.mark.parametrize(
    ("model", "part"), [("Qwen3.6-27B", "linear"), ("GLM-4.7-Flash", "latent")]
)
def test_layers_that_are_packaged_in_bfloat16_only_are_foretold(model: str, part: str) -> None:
    """4-bit models of AWQ often have float16."""
    layers = replace(read_layers(CONFIGS[model]), dtype=torch.float16)
    beyond = warm.beyond_table(layers)
    assert [name for name in PARTS if getattr(beyond, name)] == [part]


@needs_vllm
def test_warm_foretells_what_it_compiles(tmp_path: Path, shipped: set[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGS["Qwen3-8B"] | {"head_dim": 96}))
    missing_kernels = find_kernels(warm.calls(file, SOURCE)["vLLM"]) - shipped
    assert warm.estimate_compilation(file, SOURCE, 2).startswith(
        f"{len(missing_kernels)} of vLLM's kernels"
    )


WARMED = ("Gemma-2-9B", "Qwen3.6-27B", "Whisper-large-v3")


@needs_vllm
@pytest.mark.parametrize("model", WARMED)
def test_warm_leaves_nothing_to_vllm(model: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGS[model]))
    warmed = find_kernels(warm.calls(file, SOURCE)["vLLM"])
    steps = first_steps(model)
    kernels = find_kernels([*steps["attention"], *steps["linear"]])
    assert kernels
    assert not kernels - warmed


@needs_flash_attn
def test_warm_leaves_nothing_to_flash_attn(tmp_path: Path) -> None:
    """The calls have windows, a scale and a cache, but no gradients: a server needs none."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGS["Mistral-7B"]))
    warmed = find_kernels(warm.calls(file, None)["flash-attn"])
    calls = first_flash_calls("Mistral-7B", read_layers(CONFIGS["Mistral-7B"]))
    kernels = find_kernels([replace(call, change=flash_calls.FORWARD) for call in calls])
    assert kernels
    assert not kernels - warmed


@pytest.mark.parametrize("model", CONFIGS)
def test_the_table_has_what_config_says(model: str) -> None:
    """The table of models has the layers of each config, in the model's row if there is one."""
    layers = read_layers(CONFIGS[model])
    beyond = warm.beyond_table(layers)
    assert not any(getattr(beyond, part) for part in PARTS), beyond
    if row := MODELS.get(model):
        # The row lists the experts in several formats, but a config has them in one.
        assert [*layers.attention] == row.layers.attention
        assert layers.experts == [
            x for x in row.experts_by_format().values() if x in layers.experts
        ]
        assert bool(layers.experts) is bool(row.experts_by_format())
        assert (layers.linear, layers.latent) == (row.layers.linear, row.layers.latent)
        assert layers.vocabularies == [row.vocab_size]
