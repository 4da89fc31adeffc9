# SPDX-License-Identifier: BSD-3-Clause
"""Count which kernels of a common workload the packages have, and which a machine compiles."""

import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from strix_validate.attention import flash
from strix_validate.checks import CannotRun, is_named
from strix_validate.layers.table import PICTURES, Attention
from strix_validate.precompiled import packages, vllm_calls
from strix_validate.precompiled.flash_calls import FORWARD
from strix_validate.precompiled.vllm_calls import LAYERS, LINEAR, VOCABULARIES
from strix_validate.triton.call import BF16, FP16, Call, DeferredCall
from strix_validate.triton_packages import fla, liger, sage

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
        for kind, more in (("train", {"last": False}), ("prefill", {}), ("go-on", {"state": True})):
            yield _planned("fla-Qwen3-Next-80B-A3B", kind, partial(delta, lengths=(n,), **more))
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
        library: wanted
        for library, pairs in calls.items()
        if (wanted := [pair for pair in pairs if not only or is_named(pair[0], only)])
    }
    if not chosen:
        raise CannotRun("no call of the workload was selected")
    found: dict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as cache:
        for library, pairs in chosen.items():
            say(f"{len(pairs)} calls of {library}")
            answers = packages.look_up([call for _, call in pairs], Path(cache), whole=True)
            for (group, call), answer in zip(pairs, answers, strict=True):
                if answer.error:
                    raise RuntimeError(f"{call.name}: {': '.join(answer.error)}")
                found[group] += packages.origins([answer], prefix)
    return found
