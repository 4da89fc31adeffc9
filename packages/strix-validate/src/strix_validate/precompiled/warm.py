# SPDX-License-Identifier: BSD-3-Clause
"""Compile the kernels of a model before its first request, and count what a workload compiles."""

import math
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from strix_validate.attention import flash
from strix_validate.checks import CannotRun, is_named
from strix_validate.json_file import json_object
from strix_validate.layers.table import MODELS, PICTURES, Attention, Experts, Latent, Linear
from strix_validate.precompiled import packages, vllm_calls
from strix_validate.precompiled.flash_calls import FLASH_SETS, FORWARD, flash_calls
from strix_validate.precompiled.vllm_calls import LAYERS, LINEAR, VOCABULARIES
from strix_validate.triton import modes as triton_modes
from strix_validate.triton.call import BF16, FP16, Call, DeferredCall
from strix_validate.triton.modes import CallAnswer
from strix_validate.triton_packages import fla, liger, sage
from strix_validate.vllm.experts import LAYERS as EXPERTS

#: Of one core for a kernel: 594 took 29 minutes (evidence/2026-11-22-kernel-packages.md).
_SECONDS = 3
#: What transformers assumes where gemma-3-4b's own file is silent.
_DEFAULTS = {"gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}}
#: Heads of a layer, and numbers of a head: more is no model.
_MOST = 4096


@dataclass(frozen=True)
class ModelLayers:
    """What a config.json says: layers of each kind, sizes of the vocabulary, and the dtype."""

    attention: list[Attention]
    experts: list[Experts]
    linear: list[Linear]
    latent: list[Latent]
    vocabularies: list[int]
    dtype: torch.dtype


def layers_of(config: dict) -> ModelLayers:
    """Return what a model's config.json for transformers says.

    Raises:
        ValueError: a number is missing, none, or none that a model has.
    """
    try:
        text = config.get("text_config", config)
        size = int(text.get("vocab_size") or 0)
        if not 0 <= size <= _MOST**2:
            raise ValueError(f"a vocabulary of {size} tokens")
        name = str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype"))
        dtype = getattr(torch, name.removeprefix("torch."), None)
        return ModelLayers(
            _attention(config, text), _experts(config, text), _linear(text), _latent(text),
            [size] if size else [], dtype if dtype in (FP16, BF16) else BF16,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ValueError(f"no layers can be read from it: {error!r:.200}") from error


def _attention(config: dict, text: dict) -> list[Attention]:
    """Return the kinds of attention layers with keys and values of their own."""
    if text.get("kv_lora_rank"):  # MLA has kernels of its own
        return []
    kind = str(text.get("model_type"))
    text = _DEFAULTS.get(kind, {}) | text
    heads = int(text.get("num_attention_heads") or text["decoder_attention_heads"])
    size = int(text.get("head_dim") or (text.get("hidden_size") or text["d_model"]) // heads)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    window = int(text.get("sliding_window") or 0) * bool(text.get("use_sliding_window", True))
    # gemma's own files name no kinds of layers: some see all
    both = {"sliding_attention", "full_attention"} if kind.startswith("gemma") else ()
    kinds = text.get("layer_types") or both or {"sliding_attention"}
    softcap = float(text.get("attn_logit_softcapping") or 0)
    if not (0 < kv_heads <= heads <= _MOST and 0 < size <= _MOST and 0 <= window < 1 << 31):
        raise ValueError(f"{heads} heads, {kv_heads} of keys, of {size} numbers")
    layer = Attention(
        heads, kv_heads, size, 0, softcap, kind == "gpt_oss", _block(text, kv_heads, size)
    )
    layers: list[Attention] = []
    if not window or set(kinds) - {"sliding_attention"}:
        layers.append(_global(text, layer))
    if window and "sliding_attention" in kinds:
        layers.append(replace(layer, window=window))
    if config.get("is_encoder_decoder"):
        layers.append(replace(layer, causal=False))
    return layers


def _global(text: dict, layer: Attention) -> Attention:
    """Return the layers without a window, which in gemma4 have wider heads, and fewer of them.

    Their blocks take as many bytes as those of the other layers.
    """
    if not (size := int(text.get("global_head_dim") or 0)):
        return layer
    kv_heads = int(text.get("num_global_key_value_heads") or layer.kv_heads)
    block = layer.block * layer.kv_heads * layer.head_dim // (kv_heads * size)
    return replace(layer, kv_heads=kv_heads, head_dim=size, block=max(block, layer.block))


def _block(text: dict, kv_heads: int, size: int) -> int:
    """Count the tokens of a block of the cache, in 16 bits.

    Beside layers of linear attention it takes at least the bytes of their state: of the
    convolution in 16 bits, and in float32 of each value head. Follow _align_hybrid_block_size of
    vllm/platforms/interface.py.
    """
    state = sum(
        2 * (x.width - 1) * (2 * x.heads + x.value_heads) * x.size + 4 * x.value_heads * x.size**2
        for x in _linear(text)
    )
    return 16 * max(1, -(-state // (16 * 4 * kv_heads * size)))


def _linear(text: dict) -> list[Linear]:
    """Return a model's layer of linear attention, whose keys are as wide as its values."""
    if not (values := int(text.get("linear_num_value_heads") or 0)):
        return []
    sizes = {int(text[f"linear_{name}_head_dim"]) for name in ("key", "value")}
    heads, width = int(text["linear_num_key_heads"]), int(text["linear_conv_kernel_dim"])
    if len(sizes) > 1 or not (0 < heads <= values <= _MOST and 0 < min(sizes) <= _MOST):
        raise ValueError(f"{heads} and {values} heads of linear attention, of {sizes} numbers")
    if not 2 <= width <= 4:  # what vLLM's convolution has
        raise ValueError(f"a convolution of {width} tokens")
    return [Linear(heads, values, sizes.pop(), width)]


def _latent(text: dict) -> list[Latent]:
    """Return a model's layer of MLA."""
    if not (rank := int(text.get("kv_lora_rank") or 0)):
        return []
    heads, rope = int(text["num_attention_heads"]), int(text["qk_rope_head_dim"])
    if not (0 < heads <= _MOST and 0 < rank <= _MOST and 0 < rope <= _MOST):
        raise ValueError(f"{heads} heads of MLA, of {rank} and {rope} numbers")
    return [Latent(heads, rank, rope)]


def _experts(config: dict, text: dict) -> list[Experts]:
    """Return a model's layer of experts, if vLLM multiplies them with its own Triton kernels.

    Those are for weights of 16 bits, of 4 in groups, and of FP8 in blocks; gpt-oss's have kernels
    of their own.
    """
    quantized = config.get("quantization_config") or {}
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((int(text[name]) for name in names if text.get(name)), 0)
    bits = int(quantized.get("bits") or 0)
    block = int((quantized.get("weight_block_size") or [0])[0])
    if not experts or bits != (4 if quantized and not block else 0):
        return []
    return [
        Experts(
            experts,
            int(text.get("top_k_experts") or text["num_experts_per_tok"]),
            int(text["hidden_size"]),
            int(text.get("moe_intermediate_size") or text["intermediate_size"]),
            group=int(quantized["group_size"]) if bits else 0,
            zeros=bool(quantized.get("zero_point", not quantized.get("sym", True))),
            block=block,
            first=str(text.get("model_type")).startswith("llama4"),
        )
    ]


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


#: In tokens: short and long ones, even and odd, multiples of 16 and none.
LENGTHS = (
    *(1, 2, 3, 5, 8, 13, 16, 17, 21, 31, 32, 33, 34, 48, 55, 64, 65, 89, 100, 127),
    *(128, 129, 144, 160, 200, 233, 255, 256, 300, 377, 400, 511, 512, 513, 610, 700, 777, 987),
    *(1000, 1024),
)
_CAPACITY = 4096
#: Layers of attention, and their types, by a model that has them.
SHAPES = {
    "Llama-3.1-8B": (LAYERS["Llama-3.1-8B"], BF16),
    "Qwen2.5-0.5B": (LAYERS["Qwen2.5-0.5B"], FP16),
    "Gemma-3-12B": (LAYERS["Gemma-3-12B"], BF16),
    # no package has its kernels
    "head-dim-112": (Attention(8, 8, 112), FP16),
}


def flash_workload() -> Iterator[tuple[str, Call]]:
    """Yield (MODEL/KIND, call): flash_attn_func, also with gradients, varlen, and a cache."""
    for model, (shape, dtype) in SHAPES.items():
        heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
        for n in LENGTHS:
            fixed = partial(flash.fixed, seqlen_q=n, seqlen_k=n, causal=True, **heads)
            packed = partial(
                flash.varlen, lengths_q=(n, 3), lengths_k=(n, 3), head_dim=shape.head_dim
            )
            cache: dict = {"capacity": _CAPACITY, "lengths": (n - 1,), "batch": 1}
            decode = partial(flash.kv_cache, queries=1, new=1, **cache, **heads)
            for kind, build, change in (
                ("forward", fixed, FORWARD),
                ("backward", fixed, {}),
                ("varlen", packed, FORWARD),
                ("kvcache", decode, FORWARD),
            ):
                name = f"{model}/{kind}"
                yield name, DeferredCall(f"{name}/{n}", build, dtype, change)


def vllm_workload(source: Path) -> Iterator[tuple[str, Call]]:
    """Yield (vllm-MODEL/KIND, call): a server prefills up to 3 prompts and decodes up to 20.

    Beside attention: linear attention, and the choice of tokens.
    """
    for model in LAYERS:
        for i, n in enumerate(LENGTHS):
            for count, queries in ((1 + i % 3, n), (1 + i // 2, 1)):
                name = f"vllm-{model}/{'decode' if queries == 1 else 'prefill'}"
                shape: dict = {"sequences": count, "queries": queries, "keys": n}
                build = partial(vllm_calls.step, layer=LAYERS[model], **shape)
                yield name, DeferredCall(f"{name}/{count}x{n}", build, BF16, {"source": source})
    for model, linear in LINEAR.items():
        for kind, prompts in (("linear", ()), ("linear-prefill", LENGTHS[::4])):
            for linear_call in vllm_calls.linear_calls(source, [linear], (BF16,), prompts=prompts):
                yield f"vllm-{model}/{kind}", linear_call
    for model, size in VOCABULARIES.items():
        for choice in vllm_calls.sampling_calls(source, [size]):
            yield f"vllm-{model}/sampling", choice


def package_workload() -> Iterator[tuple[str, Call]]:
    """Yield (PACKAGE-MODEL/KIND, call): layers of linear attention, a training step, diffusion."""
    delta = partial(fla.attention, heads=32, keys=128, values=128, normal=True)
    for n in LENGTHS[::8]:
        shape = {"lengths": (n,)}
        for kind, more in (("train", {"last": False}), ("prefill", {}), ("go-on", {"state": True})):
            yield _planned("fla-Qwen3-Next-80B-A3B", kind, partial(delta, **shape, **more))
        norm = partial(fla.gated_norm, rows=32 * n, columns=128)
        yield _planned("fla-Qwen3-Next-80B-A3B", "norm", norm)
    decode = partial(delta, lengths=(1,), decode=True, state=True)
    yield _planned("fla-Qwen3-Next-80B-A3B", "decode", decode)
    for model, (size, inner, heads, kv_heads, head_dim) in liger.MODELS.items():
        turn = partial(liger.rope, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        for batch, n in ((1, 333), (2, 512), (4, 77)):
            for build in (
                partial(liger.rms_norm, rows=batch * n, columns=size),
                partial(liger.rms_norm, rows=batch * n * heads, columns=head_dim),
                partial(turn, batch=batch, tokens=n),
                partial(liger.swiglu, rows=batch * n, columns=inner),
            ):
                yield _planned(f"liger-{model}", "train", build)
    for size, n in product((1024, 2560, 4096), (5, 34)):
        loss = partial(liger.loss, tokens=n, size=size, words=liger.WORDS)
        yield _planned("liger", f"loss-{size}", loss)
    for model, (heads, head_dim) in PICTURES.items():
        for n in (999, 1024, 4096):
            build = partial(sage.attention, heads=heads, kv_heads=heads, head_dim=head_dim)
            yield _planned(f"sage-{model}", "attention", partial(build, lengths=(n,)))


def _planned(model: str, kind: str, build: partial) -> tuple[str, Call]:
    return f"{model}/{kind}", DeferredCall(f"{model}/{kind} {build.keywords}", build, BF16)


def count(
    prefix: Path, only: Sequence[str], vllm: Path | None, say: Callable[[str], None]
) -> dict[str, Counter[str]]:
    """Count what each group of the workload needs, with an empty cache of the user's; see origins.

    Raises:
        CannotRun: nothing was selected, or no library has it. RuntimeError: a call failed.
    """
    calls: dict[str, list[tuple[str, Call]]] = {}
    if packages.has("flash_attn"):
        calls["flash-attn"] = list(flash_workload())
    try:
        calls["vLLM"] = list(vllm_workload(vllm_calls.vllm_source.find(vllm)))
    except CannotRun as reason:
        say(str(reason))
    if all(packages.has(package.MODULE) for package in packages.SHIPPING):
        calls["fla-core, liger-kernel and sageattention"] = list(package_workload())
    chosen = {
        library: [(group, call) for group, call in pairs if not only or is_named(group, only)]
        for library, pairs in calls.items()
    }
    chosen = {library: pairs for library, pairs in chosen.items() if pairs}
    if not chosen:
        raise CannotRun("no call of the workload was selected")
    found: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as cache:
        for library, pairs in chosen.items():
            say(f"{len(pairs)} calls of {library}")
            wanted = [call for _, call in pairs]
            answers: list[CallAnswer] = packages.look_up(wanted, Path(cache), whole=True)
            for (group, call), answer in zip(pairs, answers, strict=True):
                if answer.error:
                    raise RuntimeError(f"{call.name}: {': '.join(answer.error)}")
                origins = packages.origins([answer], prefix)
                found[group] = found.get(group, Counter()) + origins
    return found
