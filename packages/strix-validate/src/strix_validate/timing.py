# SPDX-License-Identifier: BSD-3-Clause
"""Time calls on a GPU or a CPU."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from strix_validate.triton import launches


@dataclass(frozen=True)
class Timing:
    """The times of repeated calls.

    Attributes:
        median, low, high: Milliseconds: the median, the 10th and the 90th percentile.
        repeats: Number of calls.
        kernels: What ran, see :func:`launches.describe`; empty on a CPU.
    """

    median: float
    low: float
    high: float
    repeats: int
    kernels: str = ""

    def pack(self) -> dict[str, Tensor]:
        """Return the fields as tensors, as what a call in a child process returns."""
        return {
            "timing": torch.tensor([self.median, self.low, self.high, self.repeats]),
            "kernels": torch.tensor(list(self.kernels.encode()), dtype=torch.uint8),
        }

    @classmethod
    def unpack(cls, tensors: dict[str, Tensor]) -> "Timing":
        """Return what was packed."""
        median, low, high, repeats = tensors["timing"].tolist()
        kernels = bytes(tensors["kernels"].tolist()).decode()
        return cls(median, low, high, int(repeats), kernels)


def timed(
    function: Callable[[], object], device: str, budget_ms: float = 300, named: bool = True
) -> Timing:
    """Time one call, over as many calls as the budget allows, at least 5, after a warm-up.

    A GPU is timed with its own events. Each call follows an overwriting of the cache, so that data
    come from memory and the launch is hidden.

    Args:
        named: Find out which kernels ran, which takes the profiler a second.
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

    kernels = launches.describe(function) if named else ""
    estimate = statistics.median(times_of(5))
    repeats = max(5, min(500, int(budget_ms / max(estimate, 1e-3))))
    times_of(max(3, repeats // 4))
    return replace(_timing(times_of(repeats)), kernels=kernels)


def _timing(times: list[float]) -> Timing:
    # inclusive: of few repeats the other method gives times below the least one
    low, *_, high = statistics.quantiles(times, n=10, method="inclusive")
    return Timing(statistics.median(times), low, high, len(times))
