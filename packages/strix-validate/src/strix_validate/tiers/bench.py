# SPDX-License-Identifier: BSD-3-Clause
"""The speed of attention and experts in one run, fp16: torch, flash-attn and vLLM's kernels.

Operations are those of the matrix products, with a multiply-add counted as two: forward
4·B·H·D·pairs (q k^T and weights·v), backward 2.5 times that (five products instead of two, because
the scores are recomputed). pairs is S·S, causal S·(S+1)/2. The well-known script for this chip
counts them double. Decoding is bound by memory: its rate is that of the keys and values read.
"""

import contextlib
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files
from itertools import product

import torch
from torch import Tensor

from strix_validate.attention import sdpa
from strix_validate.checks import (
    ANY,
    Body,
    CannotRun,
    Check,
    Result,
    RunOptions,
    Size,
    judged,
    need_gpu,
    require,
)
from strix_validate.layers.table import MODELS
from strix_validate.tiers import machine_speed, run_each
from strix_validate.timing import Timing, timed
from strix_validate.triton import modes as triton_modes
from strix_validate.vllm import attention as vllm_attention
from strix_validate.vllm import experts
from strix_validate.vllm import source as vllm_source
from strix_validate.vllm.source import VllmCall


@dataclass(frozen=True)
class Work:
    """The size of a call. kv_heads and queries of 0 are as many as heads and seqlen, the keys."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    kv_heads: int = 0
    queries: int = 0

    def shapes(self) -> list[tuple[int, int, int, int]]:
        """Return the shapes of q, k, v and grad_out: (batch, heads, seqlen, head_dim)."""
        q = (self.batch, self.heads, self.queries or self.seqlen, self.head_dim)
        k = (self.batch, self.kv_heads or self.heads, self.seqlen, self.head_dim)
        return [q, k, k, q]

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values."""
        return 4 * self.batch * (self.kv_heads or self.heads) * self.seqlen * self.head_dim


#: gqa and decode are of this one.
_LAYER = MODELS["Llama-3.1-8B"].attention()[0]
#: The first five are those of the published table.
SIZES = {
    "tiny": Work(1, 1, 128, 64),
    "small": Work(2, 4, 512, 64),
    "medium": Work(4, 8, 1024, 64),
    "large": Work(8, 16, 2048, 64),
    "xlarge": Work(16, 16, 4096, 64),
    "large128": Work(8, 16, 2048, 128),
    "gqa": Work(4, _LAYER.heads, 2048, _LAYER.head_dim, kv_heads=_LAYER.kv_heads),
    "decode": Work(16, _LAYER.heads, 4096, _LAYER.head_dim, kv_heads=_LAYER.kv_heads, queries=1),
}
MASKS = {"causal": True, "full": False}
#: Layer and numbers of tokens of the checks of experts: a decoding batch, and a prefill.
_EXPERTS = MODELS["Qwen3-30B-A3B"].mixture()[""]
_TOKENS = {"decode": 16, "prefill": 2048}
#: Those of torch, flash-attn's own package, and vLLM's kernel on its paged cache.
_ROUTES = ("flash", "efficient", "math", "flash-attn", "vllm")
#: Sizes at which math takes seconds; only a full run has them.
_LARGE = ("large", "xlarge", "large128", "gqa")
#: Where scores fill memory, flash attention is at least this much faster than math.
_LEAST_SPEEDUP = 1.5
#: Two measurements of the same call may differ by this much.
_TIMER_TOLERANCE = 0.05
#: Milliseconds below which overwriting the cache no longer hides a call's kernel launches, so that
#: either timer sees some of them: measured, but not judged. A thread of its own launches a backward
#: pass, which took up to 0.14 ms on an H200's host.
_LAUNCHES = 0.2


def operations(size: str, causal: bool, direction: str) -> float:
    """Count the operations of one "forward" or "backward" call; see the module."""
    work = SIZES[size]
    queries = work.queries or work.seqlen
    pairs = queries * (queries + 1) // 2 if causal else queries * work.seqlen
    forward = 4 * work.batch * work.heads * work.head_dim * pairs
    return forward * {"forward": 1.0, "backward": 2.5}[direction]


def _cases() -> Iterator[tuple[str, str, str]]:
    """Yield route, size and mask of what is measured.
    Decoding has no mask, and vLLM only a causal one, which for one query is none."""
    for size, work in SIZES.items():
        for mask, route in product(MASKS, _ROUTES):
            if mask == ("causal" if work.queries else "full" if route == "vllm" else ""):
                continue
            yield route, size, mask


def checks() -> list[Check]:
    """List one check for each route, size and mask."""
    return list(bodies(dict))


def bodies(measure: Callable[..., dict]) -> dict[Check, Body]:
    """Return each check with its function, which times with measure or compares what it timed."""
    cases, published = list(_cases()), _published()
    measured = {
        Check(
            f"bench/{route}/{size}-{mask}",
            f"{route} {SIZES[size].shapes()[:2]} {mask}: forward and backward",
            "a speed-up claimed but not measured, or measured with twice the operations: "
            "https://github.com/lhl/strix-halo-testing",
        ): lambda options, case=(route, size, mask): measure(*case)
        for route, size, mask in cases
    }
    ratios = {
        Check(
            f"bench/speedup/{size}-{mask}",
            f"flash : math, {size} {mask}",
            "flash attention that is silently math: https://github.com/ROCm/TheRock/issues/1364",
        ): partial(_speedup, measure, size, mask)
        for route, size, mask in cases
        if route == "flash"
    }
    beside = {
        Check(
            f"bench/published/{size}-{mask}",
            f"{size} {mask}, beside published gfx1151 times",
            f"a build slower than others for the same chip: {published['source']}",
        ): partial(_beside_published, measure, size, mask)
        for mask in MASKS
        for size in published["run"][0][mask]["forward"]
    }
    mixtures = {
        Check(
            f"bench/experts/{name}",
            f"vLLM's two products of {_EXPERTS.experts} experts, for {tokens} tokens",
            "tiles that were never tuned for this GPU: https://github.com/ROCm/vllm/pull/972",
        ): partial(_mixture, tokens)
        for name, tokens in _TOKENS.items()
    }
    timers = {_TIMER: _compare_timers}
    return {**measured, **ratios, **beside, **mixtures, **timers, **machine_speed.CHECKS}


def applies(check: Check, options: RunOptions) -> bool:
    """Return False for large sizes on a CPU, which would take minutes for them."""
    if check in machine_speed.CHECKS or check == _TIMER:
        return True
    size = check.id.rsplit("/", 1)[-1].split("-")[0]
    if options.device == "cuda":
        return options.size.holds(Size.FULL) or size not in _LARGE
    return size in ("tiny", "small")


def run(wanted: list[Check], options: RunOptions) -> Iterator[Result]:
    """See strix_validate.tiers."""
    # ratios reuse the measurements
    measure = cache(lambda route, size, mask: _measure(route, size, mask, options))
    yield from run_each(wanted, options, bodies(measure))


def _measure(route: str, size: str, mask: str, options: RunOptions) -> dict:
    work, causal, device = SIZES[size], MASKS[mask], options.device
    if route in ("flash-attn", "vllm") and device != "cuda":
        raise CannotRun(f"only a GPU's {route} is measured")
    found: dict = {}
    if route == "vllm":
        forward, backward = _time_vllm(work, options), None
    else:
        forward, backward = time_torch(route, work, causal, device, found)
    peak = machine_speed.peak(device)
    for direction, timing in (("forward", forward), ("backward", backward)):
        if timing is None:
            continue
        rate = operations(size, causal, direction) / timing.median / 1e9
        found |= {
            f"{direction}_ms": timing.median,
            f"{direction}_low_ms": timing.low,
            f"{direction}_high_ms": timing.high,
            f"{direction}_repeats": timing.repeats,
            f"{direction}_tflops": rate,
        }
        if timing.kernels:
            found[f"{direction}_kernels"] = timing.kernels
        if peak:
            found[f"{direction}_of_peak"] = rate / peak
    if work.queries:
        found["cache_gbps"] = work.cache_bytes / forward.median / 1e6
    return found | ({"peak_tflops": peak} if peak else {})


def time_torch(
    route: str, work: Work, causal: bool, device: str, found: dict
) -> tuple[Timing, Timing | None]:
    """Time forward, and backward unless it decodes, of torch or flash-attn; put memory in found."""
    generator = torch.Generator(device).manual_seed(0)
    tensors = [
        torch.randn(shape, generator=generator, device=device, dtype=torch.float16)
        for shape in work.shapes()
    ]
    if route == "flash-attn":
        tensors = [x.transpose(1, 2).contiguous() for x in tensors]
    *leaves, grad_out = tensors
    for leaf in leaves:
        leaf.requires_grad_(not work.queries)
    function = _function(route)
    options = {"is_causal": causal, "enable_gqa": bool(work.kv_heads)}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    try:
        # sdpa.call tells a refusal from an error
        out, operators = sdpa.call(function, *leaves, **options)
        ran = sdpa.kind_of(operators)
        require(route not in sdpa.BACKENDS or ran == route, f"{ran} ran, not {route}")
        if not work.queries:
            torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        if device == "cuda":
            found["memory_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        with torch.no_grad():
            forward = timed(lambda: function(*leaves, **options), device)
        if work.queries:
            return forward, None
        return forward, timed(
            lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True), device
        )
    except torch.cuda.OutOfMemoryError as error:
        raise CannotRun("the GPU is out of memory") from error
    finally:
        out = None
        if device == "cuda":
            torch.cuda.empty_cache()


def _function(route: str) -> Callable:
    """Return attention with torch's arguments; for flash-attn, tensors have its layout."""
    if route != "flash-attn":
        return sdpa.ROUTES[route]
    try:
        from flash_attn import flash_attn_func
    except ModuleNotFoundError as error:
        raise CannotRun("flash_attn is not installed") from error

    def function(q, k, v, is_causal, enable_gqa):
        del enable_gqa  # it looks at the heads
        return flash_attn_func(q, k, v, causal=is_causal)

    return function


def timed_launch(rows: Tensor, *, launch: Callable, **given) -> dict[str, Tensor]:
    """Return the packed timing of a launch, in place of what it returns."""
    return timed(lambda: launch(rows=rows, **given), rows.device.type).pack()


def _time_vllm(work: Work, options: RunOptions) -> Timing:
    lengths = ((work.queries or work.seqlen, work.seqlen),) * work.batch
    call, _ = vllm_attention.paged_attention(
        lambda *shape: torch.randn(shape).half(), lengths=lengths, heads=work.heads,
        kv_heads=work.kv_heads or work.heads, head_dim=work.head_dim,
    )  # fmt: skip
    given = {"launch": call.launch, **call.options}
    return _time_in_child(replace(call, launch=timed_launch, options=given), options)


def _time_in_child(call: VllmCall, options: RunOptions) -> Timing:
    """Time a call of vLLM's kernels; it returns a packed timing."""
    call = replace(call, source=vllm_source.find(options.vllm))
    (answer,) = triton_modes.run([call], "native").calls
    require(answer.error is None, ": ".join(answer.error or ()))
    return Timing.unpack(answer.tensors)


def _mixture(tokens: int, options: RunOptions) -> dict:
    need_gpu(options, "only a GPU's speed is of interest")
    call, _ = experts.mixture(torch.randn, layer=_EXPERTS, tokens=tokens)
    call = replace(call, launch=experts.time_mixture, tensors={"x": call.tensors["x"].half()})
    timing = _time_in_child(call, options)
    pairs = tokens * _EXPERTS.top_k
    weights = 3 * _EXPERTS.hidden * _EXPERTS.inner  # of an expert, of both products
    return {
        "experts_ms": timing.median,
        "experts_tflops": 2 * pairs * weights / timing.median / 1e9,
        "weights_gbps": 2 * min(pairs, _EXPERTS.experts) * weights / timing.median / 1e6,
        "kernels": timing.kernels,
    }


def _speedup(measure: Callable[..., dict], size: str, mask: str, options: RunOptions) -> dict:
    need_gpu(options, "only a GPU's ratio is judged")
    flash, math = (measure(route, size, mask) for route in ("flash", "math"))
    found = {
        direction: math[f"{direction}_ms"] / flash[f"{direction}_ms"]
        for direction in ("forward", "backward")
        if f"{direction}_ms" in flash
    }
    if size in _LARGE:
        require(found["forward"] >= _LEAST_SPEEDUP, f"flash is {found['forward']:.2f} times math")
    return found


@cache
def _published() -> dict:
    return tomllib.loads((files("strix_validate.tiers") / "published.toml").read_text())


def _beside_published(
    measure: Callable[..., dict], size: str, mask: str, options: RunOptions
) -> dict:
    need_gpu(options, "only a GPU is compared")
    here = measure("flash", size, mask)
    found = {f"{name}_tflops": here[f"{name}_tflops"] for name in ("forward", "backward")}
    with contextlib.suppress(CannotRun):
        library = measure("flash-attn", size, mask)
        found |= {f"flash_attn_{n}_tflops": library[f"{n}_tflops"] for n in ("forward", "backward")}
    for i, run_ in enumerate(_published()["run"]):
        for direction, times in run_.get(mask, {}).items():
            found[f"published_{i}"] = run_["software"]
            rate = operations(size, MASKS[mask], direction) / times[size] / 1e9
            found[f"published_{i}_{direction}_tflops"] = rate
    return found


_TIMER = Check(
    "bench/timer",
    "the timer agrees with triton.testing.do_bench within 5 %",
    "times of launches instead of kernels, because synchronisation is missing: "
    "https://triton-lang.org/main/python-api/generated/triton.testing.do_bench.html",
)


def _compare_timers(options: RunOptions) -> Result:
    need_gpu(options, "only a GPU has do_bench")
    from triton.testing import do_bench

    flash = sdpa.ROUTES["flash"]
    found, wrong = {}, []
    sizes = [name for name in _published()["run"][0]["causal"]["forward"]
             if options.size.holds(Size.FULL) or "large" not in name]  # fmt: skip
    for size in sizes:
        q, k, v, grad_out = (
            torch.randn(shape, device="cuda", dtype=torch.float16).requires_grad_()
            for shape in SIZES[size].shapes()
        )
        out = flash(q, k, v, is_causal=True)
        calls = {
            "forward": lambda q=q, k=k, v=v: flash(q, k, v, is_causal=True),
            "backward": lambda out=out, leaves=(q, k, v), grad=grad_out: torch.autograd.grad(
                out, leaves, grad, retain_graph=True
            ),
        }
        for direction, function in calls.items():
            # alternately, so that a change of clocks affects both
            pairs = [
                (timed(function, "cuda").median, do_bench(function, return_mode="median"))
                for _ in range(5)
            ]
            # the minimum: interruptions only add
            ours, theirs = (min(column) for column in zip(*pairs, strict=True))
            found[f"{size}_{direction}"] = ours / theirs
            if ours > _LAUNCHES and abs(ours / theirs - 1) > _TIMER_TOLERANCE:
                wrong.append(f"{size} {direction}: {ours:.4g} ms, do_bench {theirs:.4g} ms")
    return judged(ANY, wrong, found)
