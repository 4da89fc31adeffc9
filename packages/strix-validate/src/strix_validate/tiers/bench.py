# SPDX-License-Identifier: BSD-3-Clause
"""The speed of attention in one run, fp16: torch's backends, flash-attn and vLLM's kernels.

Operations are those of the matrix products, with a multiply-add counted as two: forward
4·B·H·D·pairs (q k^T and weights·v), backward 2.5 times that (five products instead of two, because
the scores are recomputed). pairs is S·S, causal S·(S+1)/2. The well-known script for this chip
counts them double. Decoding is bound by memory: its rate is that of the keys and values read.
"""

import contextlib
import statistics
import time
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
from strix_validate.tiers import run_each
from strix_validate.triton import modes as triton_modes
from strix_validate.vllm import attention as vllm_attention
from strix_validate.vllm import source as vllm_source


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


@dataclass(frozen=True)
class Timing:
    """Milliseconds: median, and the 10th and 90th percentile of the repeats."""

    median: float
    low: float
    high: float
    repeats: int


def timed(function: Callable[[], object], device: str, budget_ms: float = 300) -> Timing:
    """Time one call, over as many calls as the budget allows, at least 5, after a warm-up.

    A GPU is timed with its own events. Each call follows an overwriting of the cache, so that data
    come from memory and the launch is hidden.
    """
    if device == "cpu":
        function()
        times: list[float] = []
        while len(times) < 5 or sum(times) < budget_ms:
            begin = time.perf_counter()
            function()
            times.append((time.perf_counter() - begin) * 1e3)
        return _timing(times)
    cache_filler = torch.empty(64 * 2**20, dtype=torch.int32, device=device)

    def times_of(number: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(number)]
        for begin, end in events:
            cache_filler.zero_()
            begin.record()
            function()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in events]

    estimate = statistics.median(times_of(5))
    repeats = max(5, min(500, int(budget_ms / max(estimate, 1e-3))))
    times_of(max(3, repeats // 4))
    return _timing(times_of(repeats))


def _timing(times: list[float]) -> Timing:
    # inclusive: of few repeats the other method gives times below the least one
    low, *_, high = statistics.quantiles(times, n=10, method="inclusive")
    return Timing(statistics.median(times), low, high, len(times))


#: gqa and decode are of this one.
_LAYER = MODELS["Llama-3.1-8B"].attention()[0]
#: The first five are those of the published table.
SIZES = {
    "tiny": Work(1, 1, 128, 64),
    "small": Work(2, 4, 512, 64),
    "medium": Work(4, 8, 1024, 64),
    "large": Work(8, 16, 2048, 64),
    "xlarge": Work(16, 16, 4096, 64),
    "gqa": Work(4, _LAYER.heads, 2048, _LAYER.head_dim, kv_heads=_LAYER.kv_heads),
    "decode": Work(16, _LAYER.heads, 4096, _LAYER.head_dim, kv_heads=_LAYER.kv_heads, queries=1),
}
MASKS = {"causal": True, "full": False}
#: Those of torch, flash-attn's own package, and vLLM's kernel on its paged cache.
_ROUTES = ("flash", "efficient", "math", "flash-attn", "vllm")
#: fp16 operations per clock of one multiprocessor's matrix units. RDNA 3: 512 of a compute unit
#: (WMMA, ISA guide), of which HIP counts two as one: https://github.com/ROCm/hip/issues/3198.
#: NVIDIA: dense, from the data sheets of A100 and H100.
_OPERATIONS_PER_CLOCK = {"gfx1151": 1024, "gfx1100": 1024, "sm_80": 2048, "sm_90": 4096}
#: Where scores fill memory, flash attention is at least this much faster than math.
_LEAST_SPEEDUP = 1.5
#: Parts of the ids of checks in _WHOLE.
_WHOLE_KINDS = ("timer", "copy", "product", "product-fp32", "host-copy")
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


def peak_tflops(arch: str, units: int, clock_mhz: float) -> float | None:
    """Return 10^12 fp16 operations per second at this clock, None for an unknown chip."""
    per_clock = _OPERATIONS_PER_CLOCK.get(arch.split(":")[0])
    return units * per_clock * clock_mhz / 1e6 if per_clock and clock_mhz else None


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
            f"bench/published/{size}",
            f"{size} causal, beside published gfx1151 times",
            f"a build slower than others for the same chip: {published['source']}",
        ): partial(_beside_published, measure, size)
        for size in published["run"][0]["forward"]
    }
    return {**measured, **ratios, **beside, **_WHOLE}


def applies(check: Check, options: RunOptions) -> bool:
    """Return False for large sizes on a CPU, which would take minutes for them."""
    kind, rest = check.id.split("/")[1], check.id.rsplit("/", 1)[-1].split("-")[0]
    if options.device == "cuda":
        return options.size.holds(Size.FULL) or rest not in ("large", "xlarge", "gqa")
    return kind in _WHOLE_KINDS or rest in ("tiny", "small")


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
    peak = _peak(device)
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
    """Return what Timing holds of a launch, in place of what it returns."""
    found = timed(lambda: launch(rows=rows, **given), rows.device.type)
    return {"timing": torch.tensor([found.median, found.low, found.high, found.repeats])}


def _time_vllm(work: Work, options: RunOptions) -> Timing:
    lengths = ((work.queries or work.seqlen, work.seqlen),) * work.batch
    call, _ = vllm_attention.paged_attention(
        lambda *shape: torch.randn(shape).half(), lengths=lengths, heads=work.heads,
        kv_heads=work.kv_heads or work.heads, head_dim=work.head_dim,
    )  # fmt: skip
    source, given = vllm_source.find(options.vllm), {"launch": call.launch, **call.options}
    call = replace(call, launch=timed_launch, options=given, source=source)
    (answer,) = triton_modes.run([call], "native").calls
    require(answer.error is None, ": ".join(answer.error or ()))
    median, low, high, repeats = answer.tensors["timing"].tolist()
    return Timing(median, low, high, int(repeats))


@cache
def _peak(device: str) -> float | None:
    from strix_validate.doctor.host import describe_device

    found = describe_device(device)
    return peak_tflops(found.architecture, found.units, found.clock_mhz)


def _speedup(measure: Callable[..., dict], size: str, mask: str, options: RunOptions) -> dict:
    need_gpu(options, "only a GPU's ratio is judged")
    flash, math = (measure(route, size, mask) for route in ("flash", "math"))
    found = {
        direction: math[f"{direction}_ms"] / flash[f"{direction}_ms"]
        for direction in ("forward", "backward")
        if f"{direction}_ms" in flash
    }
    if size in ("large", "xlarge", "gqa"):
        require(found["forward"] >= _LEAST_SPEEDUP, f"flash is {found['forward']:.2f} times math")
    return found


@cache
def _published() -> dict:
    return tomllib.loads((files("strix_validate.tiers") / "published.toml").read_text())


def _beside_published(measure: Callable[..., dict], size: str, options: RunOptions) -> dict:
    need_gpu(options, "only a GPU is compared")
    here = measure("flash", size, "causal")
    found = {f"{name}_tflops": here[f"{name}_tflops"] for name in ("forward", "backward")}
    with contextlib.suppress(CannotRun):
        library = measure("flash-attn", size, "causal")
        found |= {f"flash_attn_{n}_tflops": library[f"{n}_tflops"] for n in ("forward", "backward")}
    for i, run_ in enumerate(_published()["run"]):
        found[f"published_{i}"] = run_["software"]
        for direction in ("forward", "backward"):
            rate = operations(size, True, direction) / run_[direction][size] / 1e9
            found[f"published_{i}_{direction}_tflops"] = rate
    return found


def _compare_timers(options: RunOptions) -> Result:
    need_gpu(options, "only a GPU has do_bench")
    from triton.testing import do_bench

    flash = sdpa.ROUTES["flash"]
    found, wrong = {}, []
    sizes = [name for name in _published()["run"][0]["forward"]
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


def _time_whole(
    options: RunOptions, shape: tuple[int, ...], function: Callable, dtype=torch.float16
) -> Timing:
    need_gpu(options, "only a GPU's speed is of interest")
    tensors = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2)]
    return timed(lambda: function(*tensors), "cuda")


def _copy(options: RunOptions) -> dict:
    found = _time_whole(options, (1 << 28,), lambda to, x: to.copy_(x))
    return {"copy_gbps": 2 * 512 * 2**20 / found.median / 1e6}


def _product(options: RunOptions) -> dict:
    rate = 2 * 4096**3 / _time_whole(options, (4096, 4096), torch.mm).median / 1e9
    peak = _peak(options.device)
    return {"product_tflops": rate} | ({"product_of_peak": rate / peak} if peak else {})


def _product_fp32(options: RunOptions) -> dict:
    timing = _time_whole(options, (4096, 4096), torch.mm, torch.float32)
    return {"product_fp32_tflops": 2 * 4096**3 / timing.median / 1e9}


def _host_copy(options: RunOptions) -> dict:
    need_gpu(options, "only a GPU's speed is of interest")
    pinned = torch.zeros(_COPIED, dtype=torch.uint8).pin_memory()
    there = pinned.to("cuda")
    copies = {"to_gpu": lambda: there.copy_(pinned), "from_gpu": lambda: pinned.copy_(there)}
    return {
        f"{name}_gbps": _COPIED / timed(copy, "cuda").median / 1e6 for name, copy in copies.items()
    }


#: Bytes of a copy from and to the host.
_COPIED = 256 * 2**20
_WHOLE: dict[Check, Body] = {
    Check("bench/timer", "the timer agrees with triton.testing.do_bench within 5 %",
        "times of launches instead of kernels, because synchronisation is missing: "
        "https://triton-lang.org/main/python-api/generated/triton.testing.do_bench.html",
    ): _compare_timers,
    Check("bench/copy", "bytes that a copy of 512 MiB reads and writes in a second",
        "memory in one channel, or at a lower clock: what decoding waits for"): _copy,
    Check("bench/product", "the rate of a product of 4096 by 4096 fp16 matrices",
        "a library without kernels for this GPU, which is 5 to 10 times slower: "
        "https://github.com/ROCm/legacy-rocm-build/issues/4748"): _product,
    Check("bench/product-fp32", "the rate of a product of 4096 by 4096 fp32 matrices",
        "a library that is 20 times slower in fp32 than another one: "
        "https://github.com/ROCm/legacy-rocm-build/issues/5807"): _product_fp32,
    Check("bench/host-copy", "bytes that a copy of 256 MiB to and from the GPU moves in a second",
        "models that load slowly from pinned memory, which is the GPU's own here: "
        "https://llm-tracker.info/_TOORG/Strix-Halo"): _host_copy,
}  # fmt: skip
