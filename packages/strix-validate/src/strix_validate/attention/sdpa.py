# SPDX-License-Identifier: BSD-3-Clause
"""torch's scaled_dot_product_attention, one backend at a time, compared with the reference."""

import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from strix_validate.attention import sdpa_pairs
from strix_validate.attention.sdpa_shapes import HALVES, SHAPES, Problem, SdpaShape
from strix_validate.checks import CannotRun, Check, Result, RunOptions, State, seed_of
from strix_validate.numerics import comparison, reference

BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
#: dv and dk: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, cpu_flash_attention_backward.
_CPU_SUMS = "torch's flash attention on the CPU keeps the sums of dk and dv in 16 bits"
#: Part of the name of a fused backend's operator; everything else is math.
_FUSED = {
    "flash": "_flash_attention",
    "efficient": "_efficient_attention",
    "cudnn": "_cudnn_attention",
}
#: By AOTriton's set of kernels, HIP's errors where it has none: its library refuses what no kernel
#: of the set is for; only sample's knows kernels that the set has not.
_LEFT_OUT = {
    "core": ("hipErrorNotSupported",),
    "sample": ("hipErrorNotSupported", "hipErrorInvalidHandle"),
}
#: How messages of torch begin that refuse arguments.
_REFUSALS = ("No available kernel", "No viable backend", "invalid dtype for bias")
Route = Callable[..., Tensor]


def forced(backend: SDPBackend) -> Route:
    """Return scaled_dot_product_attention by one backend, where torch falls back silently."""

    def route(*args, **options):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(*args, **options)

    return route


#: By name; "default" is what a plain call gets.
ROUTES: dict[str, Route] = {
    **{name: forced(backend) for name, backend in BACKENDS.items()},
    "default": torch.nn.functional.scaled_dot_product_attention,
}


@cache
def checks() -> dict[Check, tuple[str, SdpaShape, torch.dtype]]:
    """Return one check for each shape, data type and route."""
    return {
        Check(
            f"sdpa/{route}/{shape.name}-{name}", f"torch SDPA {route}: {shape.name} {name}",
            shape.why,
        ): (route, shape, dtype)
        for shape in (*SHAPES, *sdpa_pairs.shapes())
        for dtype, name in ((each, str(each).removeprefix("torch.")) for each in shape.dtypes)
        for route in ROUTES
    }  # fmt: skip


def run(wanted: set[Check], options: RunOptions) -> Iterator[Result]:
    """Yield one result per wanted check; all routes get the same inputs."""
    problem: Any = None
    for check, (route, shape, dtype) in checks().items():
        if check not in wanted:
            continue
        if options.device == "cpu" and route in ("flash", "default") and _sums_show(shape, dtype):
            yield Result(check, State.SKIPPED, _CPU_SUMS)
            continue
        if shape.gib > _free_gib(options.device):
            yield Result(check, State.SKIPPED, f"{shape.gib} GiB of memory are not free")
            continue
        begin = perf_counter()
        if problem is None or (problem.shape, problem.dtype) != (shape, dtype):
            problem = Problem(shape, dtype, options.device)
        result = run_one(check, ROUTES[route], problem)
        yield replace(result, seconds=perf_counter() - begin)


def kernel_set(prefix: Path) -> str:
    """Return the set of AOTriton's kernels in a conda prefix: "core", "sample", or "" for all."""
    builds = [file.stem for file in prefix.glob("conda-meta/aotriton-images-*.json")]
    return next((name for name in _LEFT_OUT for build in builds if f"_{name}_" in build), "")


def unless_left_out(result: Result, kernels: str) -> Result:
    """Return the result; skipped if it failed because the set of kernels has none for it."""
    errors = _LEFT_OUT.get(kernels, ())
    if result.state is not State.FAILED or not any(error in result.reason for error in errors):
        return result
    reason = f"AOTriton's set {kernels} has no kernel for it"
    return replace(result, state=State.SKIPPED, reason=reason)


def _sums_show(shape: SdpaShape, dtype: torch.dtype) -> bool:
    """Return whether sums in 16 bits exceed a bound: with some inputs also those over a group."""
    return shape.sink == "query" or (dtype in HALVES and shape.heads > shape.kv_heads)


def _free_gib(device: str) -> float:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] / 2**30
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def run_one(check: Check, route: Route, problem: Problem) -> Result:
    """Compare a route's output with and without gradients, and the gradients.

    A refusal is a skip, or a pass where allowed.
    """
    try:
        answer = _answer(route, problem)
    except CannotRun as refusal:
        if problem.shape.may_refuse and not isinstance(refusal, NoBackend):
            return Result(check, State.PASSED, f"Refused, which is correct: {refusal}")
        return Result(check, State.SKIPPED, str(refusal))
    except Exception as error:  # any other exception is a failure
        return Result(check, State.FAILED, f"{type(error).__name__}: {error}")
    expected = problem.expected
    if problem.shape.dropout:
        keep = _kept_weights(answer.tensors["out"], problem.shape)
        expected = cache(partial(problem.expect, keep=keep))
    result = _judge(check, answer.tensors, expected, problem)
    if result.state is State.PASSED and answer.again:
        again = _judge(check, answer.again, expected, problem)
        if again.state is State.FAILED:
            result = replace(again, reason=f"second backward: {again.reason}")
    name = check.id.split("/")[1]
    fault = wrong_operator(name, answer.operators) or wrong_operator(name, answer.without)
    measured = result.measured | {"operator": kind_of(answer.operators)}
    if fault:
        return Result(check, State.FAILED, f"{fault}. {result.reason}".strip(), measured)
    return Result(check, result.state, result.reason, measured)


def _judge(
    check: Check,
    tensors: dict[str, Tensor],
    expected: Callable[[reference.Precision], dict[str, Tensor]],
    problem: Problem,
) -> Result:
    """Compare tensors with those of their names; inference is another output."""
    if problem.compared:
        tensors = {name: x[problem.compared] for name, x in tensors.items()}

    def own(dtype: reference.Precision) -> dict[str, Tensor]:
        found = expected(dtype)
        return {name: found["out" if name == "inference" else name] for name in tensors}

    return comparison.compare(check, tensors, own, problem.dtype)


@dataclass(frozen=True)
class _Answer:
    """What a route gives.

    Attributes:
        tensors: out and the gradients; inference, the output without gradients, where it differs.
        again: the gradients of a second backward pass, where these differ.
        operators: names of the operators that ran, with gradients.
        without: the same, without gradients.
    """

    tensors: dict[str, Tensor]
    again: dict[str, Tensor]
    operators: list[str]
    without: list[str]


def _answer(route: Route, problem: Problem) -> _Answer:
    """Call a route with and without gradients, and compute the gradients that the shape needs."""
    shape, options = problem.shape, problem.options | {}
    *inputs, grad_out = problem.inputs
    tensors = [
        x.detach().requires_grad_(name in shape.needs)
        for name, x in zip("qkv", inputs, strict=True)
    ]
    leaves = {f"d{name}": x for name, x in zip("qkv", tensors, strict=True) if x.requires_grad}
    if "m" in shape.needs:
        mask = problem.options["attn_mask"].detach().requires_grad_()
        leaves["dmask"] = options["attn_mask"] = mask
    torch.manual_seed(seed_of(shape.name))  # of dropout
    out, operators = call(route, *tensors, **options)
    rounds = []
    for is_last in (False, True) if shape.again else (True,):
        rounds.append(_gradients(out, leaves, grad_out, retain_graph=not is_last))
    with torch.no_grad():
        inference, without = call(route, *tensors, **options)
    actual = {"out": out.detach(), **rounds[0]}
    # another call drops other weights
    if not shape.dropout and not torch.equal(inference, out):
        actual["inference"] = inference
    differs = any(not torch.equal(x, rounds[0][name]) for name, x in rounds[-1].items())
    return _Answer(actual, rounds[-1] if differs else {}, operators, without)


def _gradients(
    out: Tensor, leaves: dict[str, Tensor], grad_out: Tensor, *, retain_graph: bool
) -> dict[str, Tensor]:
    """Return the gradients by name; without leaves there are none."""
    if not leaves:
        return {}
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out, retain_graph=retain_graph)
    return dict(zip(leaves, grads, strict=True))


def _kept_weights(out: Tensor, shape: SdpaShape) -> Tensor:
    """Return what dropout multiplied each weight by: the first lanes of out are the weights."""
    return (out[..., : shape.seqlen_k] != 0).cpu().double() / (1 - shape.dropout)


def call(route: Route, *args: Tensor, **options) -> tuple[Tensor, list[str]]:
    """Call a route; return its result and the names of the operators that ran.

    Raises:
        CannotRun: torch has no such backend, or none that takes these arguments.
    """
    with warnings.catch_warnings(record=True) as said, _Operators() as operators:
        warnings.simplefilter("always")
        try:
            return route(*args, **options), operators.names
        except RuntimeError as error:
            message = str(error)
            if not message.startswith(_REFUSALS):
                raise
            kind = NoBackend if message.startswith("No viable backend") else CannotRun
            raise kind(refusal(message, said)) from error


def refusal(message: str, said: list[warnings.WarningMessage]) -> str:
    """Return torch's refusal in one line. Its warnings give reasons, also for other backends."""
    why = [re.sub(r"\(Triggered internally.*?\)", "", str(warning.message)) for warning in said]
    why = [text.strip() for text in why]
    why = [text for text in why if not text.endswith(("runtime disabled.", "not used because:"))]
    return " ".join(["refused by torch:", message, *dict.fromkeys(why)])


def kind_of(operators: list[str]) -> str:
    """Return the backend whose operator ran: "flash", "efficient", "cudnn", or else "math"."""
    for kind, part in _FUSED.items():
        if any(part in name for name in operators):
            return kind
    return "math"


def wrong_operator(route: str, operators: list[str]) -> str:
    """Describe the fault if another backend ran than the named one; return "" otherwise."""
    ran = kind_of(operators)
    if route in BACKENDS and ran != route:
        return f"{route} was asked for and {ran} ran"
    return ""


class NoBackend(CannotRun):
    """The backend does not exist for this device, whatever the arguments."""


class _Operators(TorchDispatchMode):
    """Collects the name of each operator that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **kwargs or {})
