# SPDX-License-Identifier: BSD-3-Clause
"""Measure the speed of attention and of layers of experts in fp16: torch, flash-attn and vLLM.

Only the operations of matrix products count, and a multiply-add counts as two. For B sequences of S
tokens, H heads and head dim D, a forward pass has 4·B·H·D·pairs operations (q k^T and weights·v),
where pairs is S·S, or S·(S+1)/2 with a causal mask, or S for a decoding step. A backward pass has
2.5 times as many: five products instead of two, because the scores are recomputed. The script in
https://github.com/lhl/strix-halo-testing counts twice as many operations. Decoding is bound by
memory, so the rate at which keys and values are read is recorded too.
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
    PLACEHOLDER,
    Body,
    CannotRun,
    Check,
    Result,
    RunOptions,
    Size,
    make_result,
    need_gpu,
    require,
)
from strix_validate.layers.table import MODELS
from strix_validate.tiers import Tier, machine_speed, run_each
from strix_validate.timing import Timing, time_call
from strix_validate.triton import modes as triton_modes
from strix_validate.vllm import attention as vllm_attention
from strix_validate.vllm import experts
from strix_validate.vllm import source as vllm_source
from strix_validate.vllm.source import VllmCall


@dataclass(frozen=True)
class Work:
    """The sizes of a call of attention.

    Attributes:
        batch: Number of sequences.
        heads: Number of query heads.
        seqlen: Number of keys of a sequence.
        head_dim: Size of a head.
        kv_heads: Number of heads of keys and values; 0 for as many as query heads.
        queries: Number of queries of a sequence; 0 for as many as keys.
    """

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    kv_heads: int = 0
    queries: int = 0

    def shapes(self) -> list[tuple[int, int, int, int]]:
        """Return the shapes of q, k, v and grad_out, each (batch, heads, tokens, head_dim)."""
        q = (self.batch, self.heads, self.queries or self.seqlen, self.head_dim)
        k = (self.batch, self.kv_heads or self.heads, self.seqlen, self.head_dim)
        return [q, k, k, q]

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values in fp16."""
        kv_heads = self.kv_heads or self.heads
        return 4 * self.batch * kv_heads * self.seqlen * self.head_dim


#: A layer of Llama-3.1-8B. The sizes "gqa" and "decode" have its head dim and numbers of heads.
_LAYER = MODELS["Llama-3.1-8B"].layers.attention[0]
#: The sizes of attention to measure, by name. published.toml has times of the first five sizes.
SIZES = {
    "tiny": Work(1, 1, 128, 64),
    "small": Work(2, 4, 512, 64),
    "medium": Work(4, 8, 1024, 64),
    "large": Work(8, 16, 2048, 64),
    "xlarge": Work(16, 16, 4096, 64),
    "large128": Work(8, 16, 2048, 128),
    "gqa": Work(
        batch=4,
        heads=_LAYER.heads,
        seqlen=2048,
        head_dim=_LAYER.head_dim,
        kv_heads=_LAYER.kv_heads,
    ),
    "decode": Work(
        batch=16,
        heads=_LAYER.heads,
        seqlen=4096,
        head_dim=_LAYER.head_dim,
        kv_heads=_LAYER.kv_heads,
        queries=1,
    ),
}
MASKS = {"causal": True, "full": False}
#: The layer of experts that is measured.
_EXPERTS = MODELS["Qwen3-30B-A3B"].experts_by_format()[""]
#: Numbers of tokens for which the experts are measured: a decoding batch, and a prefill.
_TOKENS = {"decode": 16, "prefill": 2048}
#: The measured implementations of attention: torch's backends, the package flash-attn, and vLLM's
#: kernel with its paged cache.
_ROUTES = ("flash", "efficient", "math", "flash-attn", "vllm")
#: Sizes at which the math backend is slow. They are measured only on a GPU, in runs of size full or
#: stress.
_LARGE = ("large", "xlarge", "large128", "gqa")
#: Minimum ratio of flash attention's speed to the math backend's speed, in a forward pass. It
#: applies to the sizes in _LARGE, where the scores fill memory.
_MIN_SPEEDUP = 1.5
#: Allowed relative difference between the times that time_call and triton.testing.do_bench measure
#: for the same call.
_TIMER_TOLERANCE = 0.05
#: For a call that takes at most this many milliseconds, the difference between these two timers is
#: recorded, but not judged. Both timers overwrite the GPU's cache before a call, and the host
#: launches the call's kernels meanwhile. In such a short call, this does not hide all launches, so
#: the times of both timers include some of them. torch launches a backward pass from another
#: thread; the launch took up to 0.14 ms on an H200's host.
_LAUNCHES = 0.2
#: Operations of a pass, relative to a forward pass.
_DIRECTION_FACTORS = {"forward": 1.0, "backward": 2.5}


def count_operations(size: str, causal: bool, direction: str) -> float:
    """Count the operations of one "forward" or "backward" call; see the module's docstring."""
    work = SIZES[size]
    queries = work.queries or work.seqlen
    pairs = queries * (queries + 1) // 2 if causal else queries * work.seqlen
    forward = 4 * work.batch * work.heads * work.head_dim * pairs
    return forward * _DIRECTION_FACTORS[direction]


def _cases() -> Iterator[tuple[str, str, str]]:
    """Yield route, size and mask of each measurement."""
    for size, work in SIZES.items():
        for mask, route in product(MASKS, _ROUTES):
            # A decoding step has one query, which sees all keys, so it has no causal case.
            if work.queries and mask == "causal":
                continue
            # For prompts, vLLM's attention is measured with a causal mask only.
            if not work.queries and mask == "full" and route == "vllm":
                continue
            yield route, size, mask


def checks() -> list[Check]:
    """List one check for each measurement and comparison."""
    return list(bodies(dict))


def bodies(measure: Callable[..., dict]) -> dict[Check, Body]:
    """Return each check with its function.

    Args:
        measure: Takes a route, a size and a mask, and returns the measurements. Checks that compare
            measurements call it too.
    """
    cases = list(_cases())
    functions: dict[Check, Body] = {}
    for route, size, mask in cases:
        check = Check(
            f"bench/{route}/{size}-{mask}",
            f"{route}, q and k of shapes {SIZES[size].shapes()[:2]}, {mask} mask: time and rate of "
            "each pass",
            "published numbers that are wrong: a speed-up that was claimed but not measured, or a "
            "rate computed from twice as many operations as there are: "
            "https://github.com/lhl/strix-halo-testing",
        )
        functions[check] = partial(_call_measure, measure, (route, size, mask))
    for route, size, mask in cases:
        if route != "flash":
            continue
        check = Check(
            f"bench/speedup/{size}-{mask}",
            f"speed of torch's flash attention relative to its math backend, {size} {mask}",
            "a torch that silently runs math instead of flash attention: "
            "https://github.com/ROCm/TheRock/issues/1364",
        )
        functions[check] = partial(_speedup, measure, size, mask)
    published = _published()
    for mask in MASKS:
        for size in published["run"][0][mask]["forward"]:
            check = Check(
                f"bench/published/{size}-{mask}",
                f"flash attention, {size} {mask}, compared with published times of gfx1151",
                f"a build that is slower than others for the same chip: {published['source']}",
            )
            functions[check] = partial(_beside_published, measure, size, mask)
    for name, tokens in _TOKENS.items():
        check = Check(
            f"bench/experts/{name}",
            f"vLLM's two matrix products of a layer of {_EXPERTS.experts} experts, for {tokens} "
            "tokens",
            "tiles that were never tuned for this GPU: https://github.com/ROCm/vllm/pull/972",
        )
        functions[check] = partial(_mixture, tokens)
    functions[_TIMER] = _compare_timers
    return functions | machine_speed.CHECKS


def _call_measure(
    measure: Callable[..., dict],
    case: tuple[str, str, str],
    options: RunOptions,
) -> dict:
    del options  # `measure` has the options already, so this argument is not needed
    return measure(*case)


def applies(check: Check, options: RunOptions) -> bool:
    """Return False for a size that takes too long on this device or in this size of run."""
    if check in machine_speed.CHECKS or check == _TIMER:
        return True
    size = check.id.rsplit("/", 1)[-1].split("-")[0]
    if options.device == "cuda":
        return options.size.includes(Size.FULL) or size not in _LARGE
    return size in ("tiny", "small")


def run(selected: list[Check], options: RunOptions) -> Iterator[Result]:
    """Yield one result per selected check."""
    # measurements are cached, because checks that compare them use them again
    measure = cache(partial(_measure, options))
    yield from run_each(selected, options, bodies(measure))


def _measure(options: RunOptions, route: str, size: str, mask: str) -> dict:
    work = SIZES[size]
    causal = MASKS[mask]
    device = options.device
    if route in ("flash-attn", "vllm") and device != "cuda":
        raise CannotRun(f"only a GPU's {route} is measured")
    measured: dict = {}
    if route == "vllm":
        times = RouteTimes(_time_vllm(work, options))
    else:
        times = time_torch(route, work, causal, device)
    if times.memory_mib is not None:
        measured["memory_mib"] = times.memory_mib
    peak = machine_speed.peak(device)
    for direction, timing in (("forward", times.forward), ("backward", times.backward)):
        if timing is None:
            continue
        rate = count_operations(size, causal, direction) / timing.median / 1e9
        measured |= {
            f"{direction}_ms": timing.median,
            f"{direction}_low_ms": timing.low,
            f"{direction}_high_ms": timing.high,
            f"{direction}_repeats": timing.repeats,
            f"{direction}_tflops": rate,
        }
        if timing.kernels:
            measured[f"{direction}_kernels"] = timing.kernels
        if peak:
            measured[f"{direction}_of_peak"] = rate / peak
    if work.queries:
        measured["cache_gbps"] = work.cache_bytes / times.forward.median / 1e6
    if peak:
        measured["peak_tflops"] = peak
    return measured


@dataclass(frozen=True)
class RouteTimes:
    """Times and memory of one route.

    Attributes:
        forward: Time of the forward pass.
        backward: Time of the backward pass; None if it was not measured.
        memory_mib: Peak GPU memory of the passes in MiB; None if it was not measured.
    """

    forward: Timing
    backward: Timing | None = None
    memory_mib: float | None = None


def time_torch(route: str, work: Work, causal: bool, device: str) -> RouteTimes:
    """Time torch or flash-attn: forward, and also backward unless the work is decoding."""
    *leaves, grad_out = _make_tensors(route, work, device)
    for leaf in leaves:
        leaf.requires_grad_(not work.queries)
    function = _function(route)
    options = {"is_causal": causal, "enable_gqa": bool(work.kv_heads)}
    on_gpu = device == "cuda"
    memory_mib = None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        memory_before = torch.cuda.memory_allocated()
    try:
        # sdpa.call raises CannotRun if the backend refuses the call
        out, operators = sdpa.call(function, *leaves, **options)
        ran = sdpa.find_backend(operators)
        require(route not in sdpa.BACKENDS or ran == route, f"{ran} ran, not {route}")

        def differentiate() -> object:
            return torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

        if not work.queries:
            differentiate()
        if on_gpu:
            memory_mib = (torch.cuda.max_memory_allocated() - memory_before) / 2**20
        with torch.no_grad():
            forward = time_call(lambda: function(*leaves, **options), device)
        backward = None
        if not work.queries:
            backward = time_call(differentiate, device)
        return RouteTimes(forward, backward, memory_mib)
    except torch.cuda.OutOfMemoryError as error:
        raise CannotRun("the GPU is out of memory") from error
    finally:
        out = None  # this frees the output before the cache is emptied
        if on_gpu:
            torch.cuda.empty_cache()


def _make_tensors(route: str, work: Work, device: str) -> list[Tensor]:
    """Return q, k, v and grad_out in the route's layout."""
    generator = torch.Generator(device).manual_seed(0)
    tensors = []
    for shape in work.shapes():
        x = torch.randn(
            shape,
            generator=generator,
            device=device,
            dtype=torch.float16,
        )
        if route == "flash-attn":
            x = x.transpose(1, 2).contiguous()
        tensors.append(x)
    return tensors


def _function(route: str) -> Callable:
    """Return the route's function, which takes the arguments of torch's attention.

    The function of flash-attn takes tensors in flash-attn's own layout.
    """
    if route != "flash-attn":
        return sdpa.ROUTES[route]
    try:
        from flash_attn import flash_attn_func
    except ModuleNotFoundError as error:
        raise CannotRun("flash_attn is not installed") from error

    def function(q, k, v, is_causal, enable_gqa):
        del enable_gqa  # flash_attn_func compares the numbers of heads itself
        return flash_attn_func(q, k, v, causal=is_causal)

    return function


def timed_launch(rows: Tensor, *, launch: Callable, **launch_options) -> dict[str, Tensor]:
    """Time a launch, and return the packed timing instead of the launch's results."""
    timing = time_call(lambda: launch(rows=rows, **launch_options), rows.device.type)
    return timing.pack()


def _time_vllm(work: Work, options: RunOptions) -> Timing:
    lengths = ((work.queries or work.seqlen, work.seqlen),) * work.batch
    call, _ = vllm_attention.paged_attention(
        lambda *shape: torch.randn(shape).half(),
        lengths=lengths,
        heads=work.heads,
        kv_heads=work.kv_heads or work.heads,
        head_dim=work.head_dim,
    )
    launch_options = {"launch": call.launch, **call.options}
    call = replace(call, launch=timed_launch, options=launch_options)
    return _time_in_child(call, options)


def _time_in_child(call: VllmCall, options: RunOptions) -> Timing:
    """Return the timing of a call. Its launch, such as timed_launch, returns a packed timing."""
    call = replace(call, source=vllm_source.find(options.vllm))
    (answer,) = triton_modes.run([call], "native").calls
    require(answer.error is None, ": ".join(answer.error or ()))
    return Timing.unpack(answer.tensors)


def _mixture(tokens: int, options: RunOptions) -> dict:
    need_gpu(options, "only a GPU's speed is of interest")
    call, _ = experts.mixture(torch.randn, layer=_EXPERTS, tokens=tokens)
    x = call.tensors["x"].half()
    call = replace(call, launch=experts.time_mixture, tensors={"x": x})
    timing = _time_in_child(call, options)
    pairs = tokens * _EXPERTS.top_k
    # the number of weights of one expert, in both products
    weights = 3 * _EXPERTS.hidden_size * _EXPERTS.intermediate_size
    experts_read = min(pairs, _EXPERTS.experts)
    return {
        "experts_ms": timing.median,
        "experts_tflops": 2 * pairs * weights / timing.median / 1e9,
        "weights_gbps": 2 * experts_read * weights / timing.median / 1e6,
        "kernels": timing.kernels,
    }


def _speedup(
    measure: Callable[..., dict],
    size: str,
    mask: str,
    options: RunOptions,
) -> dict:
    need_gpu(options, "only a GPU's ratio is judged")
    flash = measure("flash", size, mask)
    math = measure("math", size, mask)
    ratios = {}
    for direction in ("forward", "backward"):
        key = f"{direction}_ms"
        if key in flash:
            ratios[direction] = math[key] / flash[key]
    if size in _LARGE:
        forward = ratios["forward"]
        require(
            forward >= _MIN_SPEEDUP,
            f"flash attention is {forward:.2f} times as fast as math, expected at least "
            f"{_MIN_SPEEDUP}",
        )
    return ratios


@cache
def _published() -> dict:
    return tomllib.loads((files("strix_validate.tiers") / "published.toml").read_text())


def _beside_published(
    measure: Callable[..., dict],
    size: str,
    mask: str,
    options: RunOptions,
) -> dict:
    need_gpu(options, "only a GPU is compared")
    rates = ("forward_tflops", "backward_tflops")
    flash = measure("flash", size, mask)
    measured = {name: flash[name] for name in rates}
    with contextlib.suppress(CannotRun):
        package = measure("flash-attn", size, mask)
        for name in rates:
            measured[f"flash_attn_{name}"] = package[name]
    for i, published_run in enumerate(_published()["run"]):
        for direction, times in published_run.get(mask, {}).items():
            rate = count_operations(size, MASKS[mask], direction) / times[size] / 1e9
            measured[f"published_{i}"] = published_run["software"]
            measured[f"published_{i}_{direction}_tflops"] = rate
    return measured


_TIMER = Check(
    "bench/timer",
    "the timer of these checks agrees with triton.testing.do_bench within 5 %, for calls of more "
    "than 0.2 ms",
    "a timer that does not synchronise, and so measures launches instead of kernels: "
    "https://triton-lang.org/main/python-api/generated/triton.testing.do_bench.html",
)


def _compare_timers(options: RunOptions) -> Result:
    need_gpu(options, "only a GPU has do_bench")
    ratios = {}
    faults = []
    for size in _published()["run"][0]["causal"]["forward"]:
        if "large" in size and not options.size.includes(Size.FULL):
            continue
        for direction, function in _flash_calls(SIZES[size]).items():
            timed_ms, do_bench_ms = _time_by_both_timers(function)
            ratio = timed_ms / do_bench_ms
            ratios[f"{size}_{direction}"] = ratio
            if timed_ms > _LAUNCHES and abs(ratio - 1) > _TIMER_TOLERANCE:
                faults.append(
                    f"{size} {direction}: {timed_ms:.4g} ms by this timer, {do_bench_ms:.4g} ms by "
                    "do_bench"
                )
    return make_result(PLACEHOLDER, faults, ratios)


def _flash_calls(work: Work) -> dict[str, Callable[[], object]]:
    """Return a forward and a backward call of causal flash attention by direction."""
    flash = sdpa.ROUTES["flash"]
    tensors = []
    for shape in work.shapes():
        x = torch.randn(shape, device="cuda", dtype=torch.float16)
        tensors.append(x.requires_grad_())
    *leaves, grad_out = tensors
    out = flash(*leaves, is_causal=True)

    def differentiate() -> object:
        return torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

    return {
        "forward": lambda: flash(*leaves, is_causal=True),
        "backward": differentiate,
    }


def _time_by_both_timers(function: Callable[[], object]) -> tuple[float, float]:
    """Return the milliseconds of a call, by time_call and by triton.testing.do_bench.

    Each time is the smallest of five medians, because interruptions only add time.
    """
    from triton.testing import do_bench

    timed_medians = []
    do_bench_medians = []
    for _ in range(5):
        # the timers alternate, so that a change of clocks affects both
        timed_medians.append(time_call(function, "cuda").median)
        do_bench_medians.append(do_bench(function, return_mode="median"))
    return min(timed_medians), min(do_bench_medians)


TIER = Tier(checks, run, applies=applies)
