# SPDX-License-Identifier: BSD-3-Clause
"""Count the kernels of a common workload that are in packages, and those that are compiled."""

import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from strix_validate.attention import flash
from strix_validate.checks import CannotRun, is_named
from strix_validate.layers.table import DIFFUSION_MODELS, Attention
from strix_validate.precompiled import packages, vllm_calls
from strix_validate.precompiled.flash_calls import FORWARD
from strix_validate.precompiled.vllm_calls import LAYERS, LINEAR, VOCABULARIES
from strix_validate.triton.call import BF16, FP16, Call, DeferredCall
from strix_validate.triton_packages import fla, liger, sage

#: Lengths in tokens: short and long, even and odd, multiples of 16 and others.
LENGTHS = (
    *(1, 2, 3, 5, 8, 13, 16, 17, 21, 31, 32, 33, 34, 48, 55, 64, 65, 89, 100, 127),
    *(128, 129, 144, 160, 200, 233, 255, 256, 300, 377, 400, 511, 512, 513, 610, 700, 777, 987),
    *(1000, 1024),
)
_CAPACITY = 4096
#: A layer of attention and a data type, by name: a model with such a layer, or the head dim.
SHAPES = {
    "Llama-3.1-8B": (LAYERS["Llama-3.1-8B"], BF16),
    "Qwen2.5-0.5B": (LAYERS["Qwen2.5-0.5B"], FP16),
    "Gemma-3-12B": (LAYERS["Gemma-3-12B"], BF16),
    # no package has kernels for this head dim
    "head-dim-112": (Attention(8, 8, 112), FP16),
}
#: The name of a group, and a call whose kernels are counted in this group.
_GroupedCall = tuple[str, Call]


def flash_workload() -> Iterator[_GroupedCall]:
    """Yield (MODEL/KIND, call) for flash-attn: forward, backward, varlen, and with a KV cache."""
    for (model, (layer, dtype)), n in product(SHAPES.items(), LENGTHS):
        for kind, (build, change) in _flash_builds(layer, n).items():
            group = f"{model}/{kind}"
            yield group, DeferredCall(f"{group}/{n}", build, dtype, change)


def _flash_builds(layer: Attention, n: int) -> dict[str, tuple[partial, dict]]:
    """Return for each kind of call a builder, and the fields to replace in the built call."""
    heads = {
        "heads": layer.heads,
        "kv_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
    }
    fixed = partial(flash.fixed, seqlen_q=n, seqlen_k=n, causal=True, **heads)
    varlen = partial(flash.varlen, lengths_q=(n, 3), lengths_k=(n, 3), head_dim=layer.head_dim)
    decode = partial(
        flash.kv_cache,
        queries=1,
        new=1,
        capacity=_CAPACITY,
        lengths=(n - 1,),
        batch=1,
        **heads,
    )
    return {
        "forward": (fixed, FORWARD),
        "backward": (fixed, {}),
        "varlen": (varlen, FORWARD),
        "kvcache": (decode, FORWARD),
    }


def vllm_workload(source: Path) -> Iterator[_GroupedCall]:
    """Yield (vllm-MODEL/KIND, call) for a server of vLLM.

    The calls are of attention, linear attention and sampling. A step prefills up to 3 prompts, or
    decodes for up to 20 sequences.
    """
    for model, layer in LAYERS.items():
        for i, n in enumerate(LENGTHS):
            for kind, sequences, queries in (
                ("decode" if n == 1 else "prefill", 1 + i % 3, n),
                ("decode", 1 + i // 2, 1),
            ):
                group = f"vllm-{model}/{kind}"
                build = partial(
                    vllm_calls.step,
                    layer=layer,
                    sequences=sequences,
                    queries=queries,
                    keys=n,
                )
                name = f"{group}/{sequences}x{n}"
                yield group, DeferredCall(name, build, BF16, {"source": source})
    for model, linear in LINEAR.items():
        for kind, prompts in (("linear", ()), ("linear-prefill", LENGTHS[::4])):
            for linear_call in vllm_calls.linear_calls(source, [linear], (BF16,), prompts=prompts):
                yield f"vllm-{model}/{kind}", linear_call
    for model, size in VOCABULARIES.items():
        for sampling_call in vllm_calls.sampling_calls(source, [size]):
            yield f"vllm-{model}/sampling", sampling_call


def package_workload() -> Iterator[_GroupedCall]:
    """Yield (PACKAGE-MODEL/KIND, call) for other packages; liger's losses have no MODEL.

    fla computes linear attention, liger-kernel a training step, and sageattention a diffusion
    model's attention.
    """
    yield from _fla_workload()
    yield from _liger_workload()
    for model, (heads, head_dim) in DIFFUSION_MODELS.items():
        for n in (999, 1024, 4096):
            build = partial(
                sage.attention,
                heads=heads,
                kv_heads=heads,
                head_dim=head_dim,
                lengths=(n,),
            )
            yield _group(f"sage-{model}", "attention", build)


def _fla_workload() -> Iterator[_GroupedCall]:
    model = "fla-Qwen3-Next-80B-A3B"
    delta = partial(fla.attention, heads=32, keys=128, values=128, normal=True)
    for n in LENGTHS[::8]:
        yield _group(model, "train", partial(delta, lengths=(n,), last=False))
        yield _group(model, "prefill", partial(delta, lengths=(n,)))
        yield _group(model, "go-on", partial(delta, lengths=(n,), state=True))
        yield _group(model, "norm", partial(fla.gated_norm, rows=32 * n, columns=128))
    decode = partial(delta, lengths=(1,), decode=True, state=True)
    yield _group(model, "decode", decode)


def _liger_workload() -> Iterator[_GroupedCall]:
    for model, (size, inner, heads, kv_heads, head_dim) in liger.MODELS.items():
        rope = partial(liger.rope, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        for batch, n in ((1, 333), (2, 512), (4, 77)):
            builds = (
                partial(liger.rms_norm, rows=batch * n, columns=size),
                partial(liger.rms_norm, rows=batch * n * heads, columns=head_dim),
                partial(rope, batch=batch, tokens=n),
                partial(liger.swiglu, rows=batch * n, columns=inner),
            )
            for build in builds:
                yield _group(f"liger-{model}", "train", build)
    for size, n in product((1024, 2560, 4096), (5, 34)):
        loss = partial(liger.loss, tokens=n, size=size, words=liger.WORDS)
        yield _group("liger", f"loss-{size}", loss)


def _group(model: str, kind: str, build: partial) -> _GroupedCall:
    group = f"{model}/{kind}"
    return group, DeferredCall(f"{group} {build.keywords}", build, BF16)


def count(
    prefix: Path,
    only: Sequence[str],
    vllm: Path | None,
    report: Callable[[str], None],
) -> dict[str, Counter[str]]:
    """Count the kernels that each group of the workload needs if the user's cache is empty.

    Args:
        prefix: Environment with the packages.
        only: Groups to count, as in is_named; an empty list selects all.
        vllm: Folder of vLLM's source; None is the installed vLLM.
        report: Called with each message.

    Returns:
        The counts of packages.count_origins by group.

    Raises:
        CannotRun: No call was selected, or no library of the selected calls is installed.
        RuntimeError: A call failed.
    """
    selected: dict[str, list[_GroupedCall]] = {}
    for library, grouped_calls in _list_workloads(vllm, report).items():
        calls = [call for call in grouped_calls if not only or is_named(call[0], only)]
        if calls:
            selected[library] = calls
    if not selected:
        raise CannotRun("no call of the workload was selected")
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as cache:
        for library, grouped_calls in selected.items():
            report(f"{len(grouped_calls)} calls of {library}")
            calls_only = [call for _, call in grouped_calls]
            answers = packages.look_up(calls_only, Path(cache), in_one_process=True)
            for (group, call), answer in zip(grouped_calls, answers, strict=True):
                if answer.error:
                    raise RuntimeError(f"{call.name}: {': '.join(answer.error)}")
                counts[group] += packages.count_origins([answer], prefix)
    return counts


def _list_workloads(
    vllm: Path | None, report: Callable[[str], None]
) -> dict[str, list[_GroupedCall]]:
    """Return the calls by library; an entry is left out if one of its libraries is missing."""
    workloads: dict[str, list[_GroupedCall]] = {}
    if packages.has("flash_attn"):
        workloads["flash-attn"] = list(flash_workload())
    try:
        workloads["vLLM"] = list(vllm_workload(vllm_calls.vllm_source.find(vllm)))
    except CannotRun as reason:
        report(str(reason))
    if all(packages.has(package.MODULE) for package in packages.SHIPPING):
        workloads["fla-core, liger-kernel and sageattention"] = list(package_workload())
    return workloads
