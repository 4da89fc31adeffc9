# SPDX-License-Identifier: BSD-3-Clause
"""Time calls on a GPU or a CPU."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from strix_validate.triton import launches

#: Minimum number of timed calls, and the maximum on a GPU.
_MIN_REPEATS = 5
_MAX_REPEATS = 500
#: Bytes that a GPU overwrites before each call. Its cache is smaller, so afterwards it has no input
#: of the call.
_CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Timing:
    """The times of repeated calls.

    Attributes:
        median: The median, in milliseconds.
        low: The 10th percentile, in milliseconds.
        high: The 90th percentile, in milliseconds.
        repeats: Number of calls.
        kernels: The kernels that ran, see :func:`launches.describe`; empty on a CPU, or if the
            caller did not ask for them.
    """

    median: float
    low: float
    high: float
    repeats: int
    kernels: str = ""

    def pack(self) -> dict[str, Tensor]:
        """Return the fields as tensors, the form in which a child process returns results."""
        numbers = [self.median, self.low, self.high, self.repeats]
        kernels = list(self.kernels.encode())
        return {
            "timing": torch.tensor(numbers),
            "kernels": torch.tensor(kernels, dtype=torch.uint8),
        }

    @classmethod
    def unpack(cls, tensors: dict[str, Tensor]) -> "Timing":
        """Return the timing that pack turned into tensors."""
        median, low, high, repeats = tensors["timing"].tolist()
        kernels = bytes(tensors["kernels"].tolist()).decode()
        return cls(median, low, high, int(repeats), kernels)


def time_call(
    function: Callable[[], object],
    device: str,
    budget_ms: float = 300,
    with_kernels: bool = True,
) -> Timing:
    """Measure how long a call takes.

    After a warm-up, the call is repeated as often as the budget allows, at least 5 times, and at
    most 500 times on a GPU. On a GPU, the GPU's own events measure the time. The GPU overwrites its
    cache before each call, so that the call reads its inputs from memory. Meanwhile the host
    launches the call's kernels, so that the time includes few launches or none.

    Args:
        function: The call.
        device: "cpu", or torch's name of a GPU.
        budget_ms: The time that all timed calls may take, in milliseconds. The warm-up is not
            included.
        with_kernels: Whether to name the kernels that ran on a GPU, which takes the profiler a
            second.
    """
    if device == "cpu":
        return _summarise(_time_on_cpu(function, budget_ms))
    kernels = launches.describe(function) if with_kernels else ""
    cache_filler = torch.empty(_CACHE_BYTES // 4, dtype=torch.int32, device=device)
    estimate = statistics.median(_time_on_gpu(function, _MIN_REPEATS, cache_filler))
    repeats = int(budget_ms / max(estimate, 1e-3))
    repeats = max(_MIN_REPEATS, min(_MAX_REPEATS, repeats))
    _time_on_gpu(function, max(3, repeats // 4), cache_filler)
    times = _time_on_gpu(function, repeats, cache_filler)
    return replace(_summarise(times), kernels=kernels)


def _time_on_cpu(function: Callable[[], object], budget_ms: float) -> list[float]:
    """Return the times of calls in milliseconds."""
    function()
    times: list[float] = []
    while len(times) < _MIN_REPEATS or sum(times) < budget_ms:
        begin = time.perf_counter()
        function()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def _time_on_gpu(
    function: Callable[[], object],
    repeats: int,
    cache_filler: Tensor,
) -> list[float]:
    """Return the times of calls in milliseconds; the cache filler is overwritten before each."""
    events = []
    for _ in range(repeats):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        events.append((begin, end))
    for begin, end in events:
        cache_filler.zero_()
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def _summarise(times: list[float]) -> Timing:
    # With few repeats, the exclusive method returns percentiles below the shortest time.
    low, *_, high = statistics.quantiles(times, n=10, method="inclusive")
    return Timing(statistics.median(times), low, high, len(times))
