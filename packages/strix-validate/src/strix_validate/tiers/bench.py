# SPDX-License-Identifier: BSD-3-Clause
"""The speed of each scaled_dot_product_attention backend, in one run; fp16.

Operations are those of the matrix products, with a multiply-add counted as two: forward
4·B·H·D·pairs (q k^T and weights·v), backward 2.5 times that (five products instead of two, because
the scores are recomputed). pairs is S·S, causal S·(S+1)/2. The well-known script for this chip
counts them double.
"""

import statistics
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch

from strix_validate import sdpa
from strix_validate.checks import CannotRun, Check, Options, Result, Size, State, require
from strix_validate.tiers import run_each

#: (batch, heads, seqlen, head_dim) of the published table.
SIZES = {
    "tiny": (1, 1, 128, 64),
    "small": (2, 4, 512, 64),
    "medium": (4, 8, 1024, 64),
    "large": (8, 16, 2048, 64),
    "xlarge": (16, 16, 4096, 64),
}
MASKS = {"causal": True, "full": False}
ROUTES = ("flash", "efficient", "math")
#: fp16 operations per clock of one compute unit's or multiprocessor's matrix units. gfx1151:
#: 16x16x16 WMMA, 512 (RDNA 3 ISA guide); NVIDIA: dense, from the data sheets of A100 and H100.
OPERATIONS_PER_CLOCK = {"gfx1151": 512, "gfx1100": 512, "sm_80": 2048, "sm_90": 4096}
#: Where scores fill memory, flash attention is at least this much faster than math.
LEAST_SPEEDUP = 1.5
#: Two measurements of the same call may differ by this much.
TIMER_TOLERANCE = 0.05
#: Milliseconds below which overwriting the cache no longer hides a call's kernel launches, so that
#: either timer sees some of them: measured, but not judged.
LAUNCHES = 0.1


@dataclass(frozen=True)
class Timing:
    """Milliseconds: median, and the 10th and 90th percentile of the repeats."""

    median: float
    low: float
    high: float
    repeats: int


def operations(size: str, causal: bool, direction: str) -> float:
    """Of one "forward" or "backward" call; see the module."""
    batch, heads, seqlen, head_dim = SIZES[size]
    pairs = seqlen * (seqlen + 1) // 2 if causal else seqlen * seqlen
    forward = 4 * batch * heads * head_dim * pairs
    return forward * {"forward": 1.0, "backward": 2.5}[direction]


def peak_tflops(arch: str, units: int, clock_mhz: float) -> float | None:
    """10^12 fp16 operations per second at this clock, None for an unknown chip."""
    per_clock = OPERATIONS_PER_CLOCK.get(arch.split(":")[0])
    return units * per_clock * clock_mhz / 1e6 if per_clock and clock_mhz else None


def checks() -> list[Check]:
    measured = [
        Check(
            f"bench/{route}/{size}-{mask}",
            f"{route} {SIZES[size]} {mask}: forward and backward",
            "a speed-up claimed but not measured, or measured with twice the operations: "
            "https://github.com/lhl/strix-halo-testing",
        )
        for size in SIZES
        for mask in MASKS
        for route in ROUTES
    ]
    ratios = [
        Check(
            f"bench/speedup/{size}-{mask}",
            f"flash : math, {size} {mask}",
            "flash attention that is silently math: https://github.com/ROCm/TheRock/issues/1364",
        )
        for size in SIZES
        for mask in MASKS
    ]
    published = [
        Check(
            f"bench/published/{size}",
            f"{size} causal, beside published gfx1151 times",
            f"a build slower than others for the same chip: {_published()['source']}",
        )
        for size in SIZES
    ]
    timer = Check(
        "bench/timer",
        "the timer agrees with triton.testing.do_bench within 5 %",
        "times of launches instead of kernels, because synchronisation is missing: "
        "https://triton-lang.org/main/python-api/generated/triton.testing.do_bench.html",
    )
    return [*measured, *ratios, *published, timer]


def applies(check: Check, options: Options) -> bool:
    """A CPU, which would take minutes for the large sizes, runs only the small ones."""
    kind, rest = check.id.split("/")[1], check.id.rsplit("/", 1)[-1].split("-")[0]
    if options.device == "cuda":
        return options.size.holds(Size.FULL) or rest not in ("large", "xlarge")
    return kind == "timer" or rest in ("tiny", "small")


def run(wanted: list[Check], options: Options) -> Iterator[Result]:
    """See strix_validate.tiers."""
    if options.device == "cuda" and not torch.cuda.is_available():
        yield from (Result(check, State.SKIPPED, "torch sees no GPU") for check in wanted)
        return
    # ratios reuse the measurements
    measure = cache(lambda route, size, mask: _measure(route, size, mask, options.device))
    yield from run_each(wanted, options, {check.id: _body(check, measure) for check in wanted})


def _body(check: Check, measure: Callable[..., dict]) -> Callable[[Options], dict]:
    parts = check.id.split("/")
    if parts[1] in ROUTES:
        return lambda options: measure(parts[1], *parts[2].split("-"))
    if parts[1] == "speedup":
        return lambda options: _speedup(options, measure, *parts[2].split("-"))
    if parts[1] == "published":
        return lambda options: _beside_published(options, measure, parts[2])
    return _compare_timers


def _measure(route: str, size: str, mask: str, device: str) -> dict:
    batch, heads, seqlen, head_dim = SIZES[size]
    shape, causal = (batch, heads, seqlen, head_dim), MASKS[mask]
    generator = torch.Generator(device).manual_seed(0)
    tensors = [
        torch.randn(shape, generator=generator, device=device, dtype=torch.float16)
        for _ in range(4)
    ]
    *leaves, grad_out = tensors
    for leaf in leaves:
        leaf.requires_grad_()
    function = sdpa.ROUTES[route]
    found: dict = {}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    try:
        # sdpa.call tells a refusal from an error
        out, operators = sdpa.call(function, *leaves, is_causal=causal)
        require(sdpa.kind_of(operators) == route, f"{sdpa.kind_of(operators)} ran, not {route}")
        torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        if device == "cuda":
            found["memory_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        with torch.no_grad():
            forward = timed(lambda: function(*leaves, is_causal=causal), device)
        backward = timed(
            lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True), device
        )
    except torch.cuda.OutOfMemoryError as error:
        raise CannotRun("the GPU is out of memory") from error
    finally:
        out = None
        if device == "cuda":
            torch.cuda.empty_cache()
    peak = _peak(device)
    for direction, timing in (("forward", forward), ("backward", backward)):
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
    return found | ({"peak_tflops": peak} if peak else {})


def timed(function: Callable[[], object], device: str, budget_ms: float = 300) -> Timing:
    """Time of one call, over as many calls as the budget allows, at least 5, after a warm-up.

    A GPU is timed with its own events. Each call follows an overwriting of the cache, so that data
    come from memory and the launch is hidden.
    """
    if device == "cpu":
        function()
        times = []
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
    low, high = (statistics.quantiles(times, n=10)[i] for i in (0, -1))
    return Timing(statistics.median(times), low, high, len(times))


@cache
def _peak(device: str) -> float | None:
    from strix_validate.host import describe_device

    found = describe_device(device)
    return peak_tflops(found.architecture, found.units, found.clock_mhz)


def _speedup(options: Options, measure: Callable[..., dict], size: str, mask: str) -> dict:
    if options.device != "cuda":
        raise CannotRun("only a GPU's ratio is judged")
    flash, math = (measure(route, size, mask) for route in ("flash", "math"))
    found = {
        direction: math[f"{direction}_ms"] / flash[f"{direction}_ms"]
        for direction in ("forward", "backward")
    }
    if size in ("large", "xlarge"):
        require(found["forward"] >= LEAST_SPEEDUP, f"flash is {found['forward']:.2f} times math")
    return found


@cache
def _published() -> dict:
    return tomllib.loads((files("strix_validate") / "published.toml").read_text())


def _beside_published(options: Options, measure: Callable[..., dict], size: str) -> dict:
    if options.device != "cuda":
        raise CannotRun("only a GPU is compared")
    here = measure("flash", size, "causal")
    found = {f"{name}_tflops": here[f"{name}_tflops"] for name in ("forward", "backward")}
    for i, run_ in enumerate(_published()["run"]):
        found[f"published_{i}"] = run_["software"]
        for direction in ("forward", "backward"):
            rate = operations(size, True, direction) / run_[direction][size] / 1e9
            found[f"published_{i}_{direction}_tflops"] = rate
    return found


def _compare_timers(options: Options) -> Result:
    if options.device != "cuda":
        raise CannotRun("only a GPU has do_bench")
    from triton.testing import do_bench

    flash = sdpa.ROUTES["flash"]
    found, wrong = {}, []
    sizes = [name for name in SIZES if options.size.holds(Size.FULL) or "large" not in name]
    for size in sizes:
        batch, heads, seqlen, head_dim = SIZES[size]
        q, k, v, grad_out = (
            torch.randn(
                batch, heads, seqlen, head_dim, device="cuda", dtype=torch.float16
            ).requires_grad_()
            for _ in range(4)
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
            if ours > LAUNCHES and abs(ours / theirs - 1) > TIMER_TOLERANCE:
                wrong.append(f"{size} {direction}: {ours:.4g} ms, do_bench {theirs:.4g} ms")
    state = State.FAILED if wrong else State.PASSED
    return Result(Check("", "", ""), state, "; ".join(wrong), found)
