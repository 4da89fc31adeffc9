# SPDX-License-Identifier: BSD-3-Clause
"""The loads of the GPU, and the comparison of their results.

There are up to four loads: attention, a product of matrices, copies of memory, and requests to the
server of a tiny model. The inputs of a load are the same in every step.

Before the first step, the CPU computes the results of attention and of the product in float64. If
the first few results of a tensor are equal, each later result must equal the first one bit for bit,
except the last result of a step. This last result, and every result of a tensor whose first results
differ, must agree with float64 within the bound of a correct kernel. Copies must equal their
source. To judge the server's answers, they are sent back to the server as prompts: its prefill must
agree with the tokens that it generated.
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

#: Approximate seconds of a step. Progress is reported, and the next load can begin, only between
#: steps.
STEP_SECONDS = 0.5
#: Number of results that must be equal for a tensor to be compared bit for bit; also the number of
#: timed calls, from which the number of calls in a step follows.
_PROBES = 8
#: Number of concurrent requests, and number of tokens that each generates.
REQUESTS = 32
_TOKENS = 24


@dataclass(frozen=True)
class Step:
    """The outcome of a step.

    Attributes:
        work: Operations, bytes or requests.
        results: Number of results that were compared.
        changed: Number of results that differ from the first one or, in a copy, from the source;
            None if no result is compared bit for bit.
        error: The largest error as a share of its bound; None for a NaN, an infinity or a fault.
        fault: The description of a fault that the other fields do not show.
    """

    work: float
    results: int
    changed: int | None
    error: float | None
    fault: str = ""


class Load(Protocol):
    """A load.

    Attributes:
        name: Its name.
        description: The load in words.
        unit: The unit of its rate.
        scale: The work per second that is one unit of the rate.
    """

    name: str
    description: str
    unit: str
    scale: float

    def prepare(self) -> None:
        """Prepare steps: allocate tensors, compute the reference, or make one round of requests."""

    def step(self) -> Step:
        """Run for about half a second, or one round of requests, and compare every result."""


class TensorLoad:
    """A call with fixed inputs whose results have a reference in float64.

    Args:
        device: torch's name of the device.
        name: See Load.
        description: See Load.
        work: The operations of a call.
    """

    unit = "tflops"
    scale = 1e12

    def __init__(self, device: str, name: str, description: str, work: float) -> None:
        self.device = device
        self.name = name
        self.description = description
        self._work = work

    def inputs(self) -> None:
        """Draw the inputs."""
        raise NotImplementedError

    def call(self) -> dict[str, Tensor]:
        """Return the results, computed on the device."""
        raise NotImplementedError

    def expected(self, dtype: reference.Precision) -> dict[str, Tensor]:
        """Return the results, computed in a precision on the CPU."""
        raise NotImplementedError

    def prepare(self) -> None:
        """See Load."""
        self.inputs()
        exact = self.expected(torch.float64)
        rounded = self.expected(torch.float16)
        terms = self.expected(reference.TERMS)
        self._bounds = comparison.bounds(exact, rounded, terms, torch.float16)
        self._exact = {name: tensor.to(self.device) for name, tensor in exact.items()}
        self._first = self.call()
        self._repeats = _count_repeats(self.call, self.device)
        probes = [self.call() for _ in range(_PROBES)]
        #: Names of tensors that are the same in each call. On NVIDIA's GPUs, dq is not, because the
        #: order of its summation varies.
        self._fixed = []
        for name in exact:
            if not any(self._differs(probe, [name]) for probe in probes):
                self._fixed.append(name)
        self._names = cycle(exact)

    def _differs(self, results: dict[str, Tensor], names: list[str]) -> Tensor:
        """Return a tensor on the device: whether a named result differs from its first value."""
        differences = [(results[name] != self._first[name]).any() for name in names]
        return torch.stack(differences).any()

    def _error(self, results: dict[str, Tensor], names: Iterable[str]) -> Tensor:
        """Return a tensor on the device: the largest error as a share of its bound.

        The result is NaN if a tensor has a NaN.
        """
        shares = []
        for name in names:
            errors = (results[name].double() - self._exact[name]).abs()
            shares.append(errors.amax() / self._bounds[name])
        return torch.stack(shares).amax()

    def step(self) -> Step:
        """See Load.

        For a tensor that varies from call to call, each result is compared with float64. For other
        tensors, each result but the step's last is compared with the first one, and the last with
        float64. Comparisons on the GPU may be wrong, so the CPU also compares the last result of
        one tensor. The tensors take turns from step to step.

        All results but the last are overwritten with NaN. Otherwise, if the next call gets the same
        memory and its kernel writes nothing, the right numbers would still be there.
        """
        changes = []
        errors = []
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
        shares.append(self._compare_on_cpu(results))
        is_finite = all(map(math.isfinite, shares))
        error = max(shares) if is_finite else None
        changed = sum(change.item() for change in changes) if self._fixed else None
        number = self._repeats + 1
        return Step(self._work * number, number, changed, error)

    def _compare_on_cpu(self, results: dict[str, Tensor]) -> float:
        """Compare a tensor on the CPU; return its largest error as a share of its bound.

        Each call compares the next tensor.
        """
        name = next(self._names)
        result = results[name].cpu()
        exact = self._exact[name].cpu().expand_as(result)
        return comparison.max_error(result, exact) / self._bounds[name]


def _count_repeats(call: Callable, device: str) -> int:
    """Return how many calls fill a step: 1 to 1000."""
    begin = time.perf_counter()
    for _ in range(_PROBES):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / _PROBES
    repeats = int(STEP_SECONDS / max(seconds, 1e-6))
    return max(1, min(1000, repeats))


class AttentionLoad(TensorLoad):
    """Causal attention, forward and backward, with the kernels that torch selects.

    The batch repeats one sequence, so that the reference is computed for one sequence only.
    """

    def __init__(self, device: str) -> None:
        if device == "cpu":
            self._copies = 2
            num_heads = 2
            seqlen = 64
            head_dim = 16
        else:
            self._copies = 32
            num_heads = 4
            seqlen = 2048
            head_dim = 64
        self._shape = (1, num_heads, seqlen, head_dim)
        pairs = seqlen * (seqlen + 1) // 2
        # A forward pass has two products, and a backward pass five. A multiply-add is two
        # operations.
        work = 14 * self._copies * num_heads * head_dim * pairs
        q_shape = (self._copies, *self._shape[1:])
        description = f"causal attention in float16, forward and backward, q {q_shape}"
        super().__init__(device, "attention", description, work)

    def inputs(self) -> None:
        """See TensorLoad."""
        generator = torch.Generator().manual_seed(0)
        self._inputs = [torch.randn(self._shape, generator=generator).half() for _ in range(4)]
        batches = [x.to(self.device).repeat(self._copies, 1, 1, 1) for x in self._inputs]
        *self._leaves, self._grad_out = batches
        for leaf in self._leaves:
            leaf.requires_grad_()

    def call(self) -> dict[str, Tensor]:
        """See TensorLoad."""
        out = sdpa.ROUTES["default"](*self._leaves, is_causal=True)
        dq, dk, dv = torch.autograd.grad(out, self._leaves, self._grad_out)
        return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}

    def expected(self, dtype: reference.Precision) -> dict[str, Tensor]:
        """See TensorLoad."""
        return reference.attention(*self._inputs, causal="top-left", dtype=dtype)


class ProductLoad(TensorLoad):
    """A product of square matrices."""

    def __init__(self, device: str) -> None:
        self._size = 4096 if device == "cuda" else 64
        description = f"product of {self._size} by {self._size} matrices in float16"
        super().__init__(device, "product", description, 2 * self._size**3)

    def inputs(self) -> None:
        """See TensorLoad."""
        generator = torch.Generator().manual_seed(0)
        shape = (self._size, self._size)
        self._inputs = [torch.randn(shape, generator=generator).half() for _ in range(2)]
        self._x, self._weight = (x.to(self.device) for x in self._inputs)

    def call(self) -> dict[str, Tensor]:
        """See TensorLoad."""
        return {"out": torch.mm(self._x, self._weight.T)}

    def expected(self, dtype: reference.Precision) -> dict[str, Tensor]:
        """See TensorLoad."""
        return reference.layer(*self._inputs)(dtype)


class CopyLoad:
    """Copies from the host's memory to the GPU, on the GPU, and back, compared bit for bit."""

    name = "copy"
    unit = "gbps"
    scale = 1e9

    def __init__(self, device: str) -> None:
        self.device = device
        mib = 256 if device == "cuda" else 4
        self._numbers = mib * 2**20 // 4
        self.description = f"copies of {mib} MiB: host to GPU, on the GPU, and back"

    def prepare(self) -> None:
        """See Load."""
        generator = torch.Generator().manual_seed(0)
        self._origin = torch.randint(
            -(2**31),
            2**31 - 1,
            (self._numbers,),
            generator=generator,
            dtype=torch.int32,
        )
        self._back = torch.zeros_like(self._origin)
        if self.device == "cuda":
            self._origin = self._origin.pin_memory()
            self._back = self._back.pin_memory()
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
        changed = sum(difference.item() for difference in differences)
        changed += not torch.equal(self._back, self._origin)
        results = self._repeats + 2
        # Each copy reads and writes four bytes per number.
        return Step(8 * self._numbers * results, results, changed, error=0.0)


class ServerLoad:
    """Concurrent requests to a tiny model's server. The server's own prefill judges the answers.

    If two tokens are almost equally likely, either may be generated, because the order of summation
    depends on the batch.
    """

    name = "server"
    unit = "requests_per_s"
    scale = 1.0

    def __init__(self, url: str, model: str) -> None:
        self.description = f"vllm serve, a tiny model, {REQUESTS} requests at a time"
        self._server = Endpoint(url, model)
        self._prompts = make_prompts()

    def prepare(self) -> None:
        """See Load."""
        self.step()

    def step(self) -> Step:
        """See Load.

        judge_together returns the means of two kinds of differences. The error is the larger mean,
        each as a share of its bound.
        """
        try:
            measured = judges.judge_together(self._server, self._prompts, REQUESTS, _TOKENS)
        except CheckFailed as error:
            return Step(REQUESTS, REQUESTS, None, None, str(error))
        shares = []
        for value in measured.values():
            if isinstance(value, dict):
                shares.append(value["error"] / value["bound"])
        return Step(REQUESTS, REQUESTS, None, max(shares))


def make_prompts() -> list[list[int]]:
    """Return prompts as token ids of the tiny model; all differ, and have several lengths."""
    prompts = []
    for number in range(REQUESTS):
        middle = range(3, 35 + 2 * number)
        prompts.append([29 + 13 * number, *middle, 5 + number])
    return prompts


def make_loads(device: str, url: str = "", model: str = "") -> list[Load]:
    """Return the loads that this machine can run, in the order of their turns."""
    loads: list[Load] = [AttentionLoad(device), ProductLoad(device), CopyLoad(device)]
    if url:
        loads.append(ServerLoad(url, model))
    return loads


def need_gpu_memory(device: str, gib: float = 8) -> None:
    """Raise CannotRun if the loads do not fit into the free memory of the GPU."""
    if device != "cuda":
        return
    free, _ = torch.cuda.mem_get_info()
    if free < gib * 2**30:
        raise CannotRun(f"the loads need {gib:.0f} GiB of free GPU memory")
