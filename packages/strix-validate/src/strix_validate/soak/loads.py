# SPDX-License-Identifier: BSD-3-Clause
"""What the GPU is loaded with, and how each result is compared.

Inputs stay the same, so that a result that changes is a fault. A tensor is judged twice: against
float64, computed on the CPU before the first step, within the bound of a correct kernel; and bit
for bit against the first result, where the first few are equal.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

import torch
from torch import Tensor

from strix_validate.attention import sdpa
from strix_validate.checks import CannotRun, CheckFailed
from strix_validate.numerics import comparison, reference
from strix_validate.serving import judges
from strix_validate.serving.endpoint import Endpoint

#: Seconds that a step takes: hangs are noticed, and the next load begins, only between steps.
STEP_SECONDS = 0.5
#: Results that must be equal for a tensor to be compared bit for bit.
_PROBES = 8
#: Requests at a time, and the tokens that each gets.
REQUESTS, _TOKENS = 32, 24


@dataclass(frozen=True)
class Step:
    """The outcome of a step.

    Attributes:
        work: Operations, bytes or requests.
        results: How many were compared.
        changed: How many differ from the first one; None where no tensor is compared bit for bit.
        error: The largest error as a share of its bound; None for a NaN or an infinity.
        fault: What is wrong, where a share does not tell it.
    """

    work: float
    results: int
    changed: int | None
    error: float | None
    fault: str = ""


class Load(Protocol):
    """A load. unit: of its rate, of which a step's work has `scale` in a second."""

    name: str
    what: str
    unit: str
    scale: float

    def prepare(self) -> None:
        """Allocate what steps need, and compute the reference."""

    def step(self) -> Step:
        """Run for about half a second, and compare every result."""


class TensorLoad:
    """A call with fixed inputs whose results have a reference in float64."""

    unit, scale = "tflops", 1e12

    def __init__(self, device: str, name: str, what: str, work: float) -> None:
        self.device, self.name, self.what, self._work = device, name, what, work

    def inputs(self) -> None:
        """Draw the inputs."""
        raise NotImplementedError

    def call(self) -> dict[str, Tensor]:
        """Compute the results, on the device."""
        raise NotImplementedError

    def expected(self, dtype: reference.Precision) -> dict[str, Tensor]:
        """Return the results in a precision, on the CPU."""
        raise NotImplementedError

    def prepare(self) -> None:
        """See Load."""
        self.inputs()
        exact = self.expected(torch.float64)
        rounded, terms = self.expected(torch.float16), self.expected(reference.TERMS)
        self._bounds = comparison.bounds(exact, rounded, terms, torch.float16)
        self._exact = {name: x.to(self.device) for name, x in exact.items()}
        self._first = self.call()
        self._repeats = _count_repeats(self.call, self.device)
        probes = [self.call() for _ in range(_PROBES)]
        #: Names of tensors that are the same each time. NVIDIA's dq is a sum in any order.
        self._fixed = [
            name for name in exact if not any(self._differs(probe, [name]) for probe in probes)
        ]
        self._names = cycle(exact)

    def _differs(self, results: dict[str, Tensor], names: list[str]) -> Tensor:
        """Return whether one of these results differs from the first one, on the device."""
        return torch.stack([(results[name] != self._first[name]).any() for name in names]).any()

    def _error(self, results: dict[str, Tensor], names: Iterable[str]) -> Tensor:
        """Return the largest error as a share of its bound, on the device; a NaN stays one."""
        shares = [
            (results[name].double() - self._exact[name]).abs().amax() / self._bounds[name]
            for name in names
        ]
        return torch.stack(shares).amax()

    def step(self) -> Step:
        """See Load.

        Tensors that are not the same each time have each result compared with float64, the others
        the last one of the step. One of the last ones, in turn, is compared on the CPU as well,
        without trust in the GPU. Results are overwritten: a kernel that writes nothing into memory
        that the next call gets would otherwise leave the right numbers there.
        """
        changes, errors = [], []
        loose = [name for name in self._exact if name not in self._fixed]
        for _ in range(self._repeats):
            results = self.call()
            if self._fixed:
                changes.append(self._differs(results, self._fixed))
            if loose:
                errors.append(self._error(results, loose))
            for result in results.values():
                result.fill_(float("nan"))
        results = self.call()
        errors.append(self._error(results, self._exact))
        shares = torch.stack(errors).tolist()
        name = next(self._names)
        exact = self._exact[name].cpu().expand_as(results[name])
        error = comparison.max_error(results[name].cpu(), exact)
        shares.append(error / self._bounds[name])
        is_finite = all(map(math.isfinite, shares))
        changed = sum(change.item() for change in changes) if self._fixed else None
        number = self._repeats + 1
        return Step(self._work * number, number, changed, max(shares) if is_finite else None)


def _count_repeats(call: Callable, device: str) -> int:
    """Return how many calls fill a step."""
    begin = time.perf_counter()
    for _ in range(_PROBES):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / _PROBES
    return max(1, min(1000, int(STEP_SECONDS / max(seconds, 1e-6))))


class AttentionLoad(TensorLoad):
    """Causal attention, forward and backward, by the kernels that torch picks.

    One sequence stands many times in the batch, so that its reference is computed once.
    """

    def __init__(self, device: str) -> None:
        self._copies, heads, length, lanes = 32, 4, 2048, 64
        if device == "cpu":
            self._copies, heads, length, lanes = 2, 2, 64, 16
        self._shape = (1, heads, length, lanes)
        pairs = length * (length + 1) // 2
        # two products forward and five backward, of two operations each
        work = 14 * self._copies * heads * lanes * pairs
        q = (self._copies, *self._shape[1:])
        what = f"causal attention in float16, forward and backward, q {q}"
        super().__init__(device, "attention", what, work)

    def inputs(self) -> None:
        """See TensorLoad."""
        generator = torch.Generator().manual_seed(0)
        self._inputs = [torch.randn(self._shape, generator=generator).half() for _ in range(4)]
        copies = [x.to(self.device).repeat(self._copies, 1, 1, 1) for x in self._inputs]
        *self._leaves, self._grad_out = copies
        for leaf in self._leaves:
            leaf.requires_grad_()

    def call(self) -> dict[str, Tensor]:
        """See TensorLoad."""
        out = sdpa.ROUTES["default"](*self._leaves, is_causal=True)
        gradients = torch.autograd.grad(out, self._leaves, self._grad_out)
        return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}

    def expected(self, dtype: reference.Precision) -> dict[str, Tensor]:
        """See TensorLoad."""
        return reference.attention(*self._inputs, causal="top-left", dtype=dtype)


class ProductLoad(TensorLoad):
    """A product of square matrices."""

    def __init__(self, device: str) -> None:
        self._size = 4096 if device == "cuda" else 64
        what = f"product of {self._size} by {self._size} matrices in float16"
        super().__init__(device, "product", what, 2 * self._size**3)

    def inputs(self) -> None:
        """See TensorLoad."""
        generator = torch.Generator().manual_seed(0)
        self._inputs = [
            torch.randn((self._size, self._size), generator=generator).half() for _ in range(2)
        ]
        self._x, self._weight = (x.to(self.device) for x in self._inputs)

    def call(self) -> dict[str, Tensor]:
        """See TensorLoad."""
        return {"out": torch.mm(self._x, self._weight.T)}

    def expected(self, dtype: reference.Precision) -> dict[str, Tensor]:
        """See TensorLoad."""
        return reference.layer(*self._inputs)(dtype)


class CopyLoad:
    """Copies from the host's memory to the GPU, within it, and back, compared bit for bit."""

    name, unit, scale = "copy", "gbps", 1e9

    def __init__(self, device: str) -> None:
        self.device = device
        self._numbers = (64 if device == "cuda" else 1) * 2**20
        self.what = f"copies of {4 * self._numbers // 2**20} MiB: host to GPU, within it, and back"

    def prepare(self) -> None:
        """See Load."""
        generator = torch.Generator().manual_seed(0)
        self._origin = torch.randint(
            -(2**31), 2**31 - 1, (self._numbers,), generator=generator, dtype=torch.int32
        )
        self._back = torch.zeros_like(self._origin)
        if self.device == "cuda":
            self._origin, self._back = self._origin.pin_memory(), self._back.pin_memory()
        self._source = self._origin.to(self.device, copy=True)
        self._target = torch.zeros_like(self._source)
        self._repeats = _count_repeats(lambda: self._target.copy_(self._source), self.device)

    def step(self) -> Step:
        """See Load."""
        self._source.zero_()
        self._source.copy_(self._origin)
        differences = []
        for _ in range(self._repeats):
            self._target.zero_()
            self._target.copy_(self._source)
            differences.append((self._target != self._source).any())
        self._back.zero_()
        self._back.copy_(self._target)
        changed = sum(each.item() for each in differences)
        changed += not torch.equal(self._back, self._origin)
        results = self._repeats + 2
        return Step(8 * self._numbers * results, results, changed, 0.0)


class ServerLoad:
    """Requests to a server of a tiny model, all at a time, compared with its own prefill.

    Another token at a near tie is no fault: the rows of a batch are summed in other orders.
    """

    name, unit, scale = "server", "requests_per_s", 1.0

    def __init__(self, url: str, model: str) -> None:
        self.what = f"vllm serve, a tiny model, {REQUESTS} requests at a time"
        self._server, self._prompts = Endpoint(url, model), server_prompts()

    def prepare(self) -> None:
        """See Load."""
        self.step()

    def step(self) -> Step:
        """See Load."""
        try:
            measured = judges.judge_together(self._server, self._prompts, REQUESTS, _TOKENS)
        except CheckFailed as error:
            return Step(REQUESTS, REQUESTS, None, None, str(error))
        pairs = [value for value in measured.values() if isinstance(value, dict)]
        return Step(REQUESTS, REQUESTS, None, max(pair["error"] / pair["bound"] for pair in pairs))


def server_prompts() -> list[list[int]]:
    """Return prompts of tokens of the tiny model, which all differ and have several lengths."""
    return [[29 + 13 * i, *range(3, 35 + 2 * i), 5 + i] for i in range(REQUESTS)]


def make_loads(device: str, url: str = "", model: str = "") -> list[Load]:
    """Return the loads that this machine can run, in the order of their turns."""
    loads: list[Load] = [AttentionLoad(device), ProductLoad(device), CopyLoad(device)]
    if url:
        loads.append(ServerLoad(url, model))
    return loads


def need_gpu_memory(device: str, gib: float = 8) -> None:
    """Raise CannotRun where the loads do not fit."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < gib * 2**30:
        raise CannotRun(f"the loads need {gib:.0f} GiB of free GPU memory")
