# SPDX-License-Identifier: BSD-3-Clause
"""Compare torch's scaled_dot_product_attention, by each backend, with the reference."""

import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from strix_validate.attention import sdpa_pairs
from strix_validate.attention.sdpa_cases import CASES, HALVES, SdpaCase
from strix_validate.attention.sdpa_problem import Problem
from strix_validate.checks import CannotRun, Check, Result, RunOptions, State, derive_seed
from strix_validate.numerics import comparison, reference

BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
#: Reason to skip a check if the rounding errors of torch's sums of dk and dv can exceed its bound.
#: torch computes these sums in cpu_flash_attention_backward
#: (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
_CPU_SUMS = "torch's flash attention on the CPU keeps the sums of dk and dv in 16 bits"
#: Part of the operator names of each fused backend. A call without such an operator was computed by
#: the math backend.
_FUSED = {
    "flash": "_flash_attention",
    "efficient": "_efficient_attention",
    "cudnn": "_cudnn_attention",
}
#: For each of AOTriton's sets of kernels, the errors that mean "this set has no kernel for the
#: call". AOTriton's library returns hipErrorNotSupported for a call that it knows no kernel for. If
#: it was built with the set "sample", it also knows kernels that are not in the package. The launch
#: of such a kernel gives hipErrorInvalidHandle.
_LEFT_OUT = {
    "core": ("hipErrorNotSupported",),
    "sample": ("hipErrorNotSupported", "hipErrorInvalidHandle"),
}
#: The beginnings of the messages with which torch refuses a call.
_REFUSALS = ("No available kernel", "No viable backend", "invalid dtype for bias")
#: Endings of those warnings of torch that do not explain a refusal.
_EMPTY_WARNINGS = ("runtime disabled.", "not used because:")
#: A way to call scaled_dot_product_attention: by one backend, or with torch's choice of backend.
Route = Callable[..., Tensor]
_Expected = Callable[[reference.Precision], dict[str, Tensor]]


def force_backend(backend: SDPBackend) -> Route:
    """Return scaled_dot_product_attention restricted to one backend.

    Without the restriction, torch may silently choose another backend.
    """

    def route(*args, **options):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(*args, **options)

    return route


#: Ways to call attention, by name. "default" is a plain call, for which torch chooses the backend.
ROUTES: dict[str, Route] = {name: force_backend(backend) for name, backend in BACKENDS.items()}
ROUTES["default"] = torch.nn.functional.scaled_dot_product_attention


@cache
def checks() -> dict[Check, tuple[str, SdpaCase, torch.dtype]]:
    """Return one check for each case, data type and route."""
    listed = {}
    for case in (*CASES, *sdpa_pairs.cases()):
        for dtype in case.dtypes:
            dtype_name = str(dtype).removeprefix("torch.")
            for route in ROUTES:
                check = Check(
                    f"sdpa/{route}/{case.name}-{dtype_name}",
                    f"torch SDPA {route}: {case.name} {dtype_name}",
                    case.catches,
                )
                listed[check] = (route, case, dtype)
    return listed


def run(selected: set[Check], options: RunOptions) -> Iterator[Result]:
    """Yield one result per selected check. All routes of a case get the same inputs.

    Args:
        selected: The checks to run.
        options: Options of the run.
    """
    problem: Problem | None = None
    for check, (route, case, dtype) in checks().items():
        if check not in selected:
            continue
        is_flash = route in ("flash", "default")
        if options.device == "cpu" and is_flash and _can_sums_exceed_bound(case, dtype):
            yield Result(check, State.SKIPPED, _CPU_SUMS)
            continue
        if case.gib > _measure_free_gib(options.device):
            yield Result(check, State.SKIPPED, f"{case.gib} GiB of memory are not free")
            continue
        begin = perf_counter()
        if problem is None or (problem.case, problem.dtype) != (case, dtype):
            problem = Problem(case, dtype, options.device)
        result = run_one(check, ROUTES[route], problem)
        yield replace(result, seconds=perf_counter() - begin)


def read_kernel_set(prefix: Path) -> str:
    """Return the set of AOTriton's kernels in a conda prefix: "core", "sample", or "" otherwise."""
    builds = [file.stem for file in prefix.glob("conda-meta/aotriton-images-*.json")]
    for name in _LEFT_OUT:
        if any(f"_{name}_" in build for build in builds):
            return name
    return ""


def skip_if_left_out(result: Result, kernels: str) -> Result:
    """Turn a failed result into a skipped one if AOTriton's set lacks the kernel of the call."""
    errors = _LEFT_OUT.get(kernels, ())
    is_left_out = any(error in result.reason for error in errors)
    if result.state is not State.FAILED or not is_left_out:
        return result
    reason = f"AOTriton's set {kernels} has no kernel for this call"
    return replace(result, state=State.SKIPPED, reason=reason)


def _can_sums_exceed_bound(case: SdpaCase, dtype: torch.dtype) -> bool:
    """Return whether errors of the sums in _CPU_SUMS can exceed a correct kernel's bound.

    They do in cases with the sink "query". In 16-bit dtypes, they also do with some inputs if query
    heads share a head of keys, because dk and dv are then sums over several query heads.
    """
    return case.sink == "query" or (dtype in HALVES and case.heads > case.kv_heads)


def _measure_free_gib(device: str) -> float:
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return free / 2**30
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def run_one(check: Check, route: Route, problem: Problem) -> Result:
    """Compare a route's gradients, and its output with and without them, with the expected results.

    If torch refuses the call, the check is skipped. It passes instead if the case allows a refusal
    and the device has the backend.
    """
    try:
        answer = _answer(route, problem)
    except CannotRun as refusal:
        if problem.case.may_refuse and not isinstance(refusal, NoBackend):
            return Result(check, State.PASSED, f"Refused, which is correct: {refusal}")
        return Result(check, State.SKIPPED, str(refusal))
    except Exception as error:  # any other exception is a failure
        return Result(check, State.FAILED, f"{type(error).__name__}: {error}")
    expected = problem.expected
    wrong_share = ""
    if problem.case.dropout:
        keep = _read_dropout(answer.tensors["out"], problem.case)
        expected = cache(partial(problem.expect, keep=keep))
        wrong_share = _describe_wrong_share(keep > 0, problem)
    result = _judge(check, answer.tensors, expected, problem)
    if result.state is State.PASSED and answer.again:
        again = _judge(check, answer.again, expected, problem)
        if again.state is State.FAILED:
            result = replace(again, reason=f"second backward: {again.reason}")
    name = check.id.split("/")[1]
    fault = describe_wrong_operator(name, answer.operators)
    fault = fault or describe_wrong_operator(name, answer.inference_operators) or wrong_share
    measured = result.measured | {"operator": find_backend(answer.operators)}
    if fault:
        return Result(check, State.FAILED, f"{fault}. {result.reason}".strip(), measured)
    return Result(check, result.state, result.reason, measured)


def _judge(
    check: Check,
    tensors: dict[str, Tensor],
    expected: _Expected,
    problem: Problem,
) -> Result:
    """Compare tensors with the expected ones; "inference" is compared with the expected output."""
    if problem.compared:
        tensors = {name: x[problem.compared] for name, x in tensors.items()}

    def expected_tensors(dtype: reference.Precision) -> dict[str, Tensor]:
        results = expected(dtype)
        results = results | {"inference": results["out"]}
        return {name: results[name] for name in tensors}

    return comparison.compare(check, tensors, expected_tensors, problem.dtype)


@dataclass(frozen=True)
class _Answer:
    """The results of a route.

    Attributes:
        tensors: "out" and the gradients. If the output without gradients differs from "out", it is
            included as "inference".
        again: The gradients of a second backward pass if they differ from the first; otherwise
            empty.
        operators: Names of the operators that ran in the call with gradients.
        inference_operators: Names of the operators that ran in the call without gradients.
    """

    tensors: dict[str, Tensor]
    again: dict[str, Tensor]
    operators: list[str]
    inference_operators: list[str]


def _answer(route: Route, problem: Problem) -> _Answer:
    """Call a route with and without gradients, and compute the gradients that the case needs."""
    case = problem.case
    options = dict(problem.options)
    *inputs, grad_out = problem.inputs
    tensors = []
    leaves = {}
    for name, x in zip("qkv", inputs, strict=True):
        tensor = x.detach().requires_grad_(name in case.needs)
        tensors.append(tensor)
        if tensor.requires_grad:
            leaves[f"d{name}"] = tensor
    if "m" in case.needs:
        mask = problem.options["attn_mask"].detach().requires_grad_()
        options["attn_mask"] = mask
        leaves["dmask"] = mask
    torch.manual_seed(derive_seed(case.name))  # the seed determines which weights dropout drops
    out, operators = call(route, *tensors, **options)
    gradients = _compute_gradients(out, leaves, grad_out, retain_graph=case.again)
    again = gradients
    if case.again:
        again = _compute_gradients(out, leaves, grad_out, retain_graph=False)
    with torch.no_grad():
        inference, inference_operators = call(route, *tensors, **options)
    actual = {"out": out.detach(), **gradients}
    # with dropout, the second call drops other weights, so its output is not compared
    if not case.dropout and not torch.equal(inference, out):
        actual["inference"] = inference
    differs = any(not torch.equal(x, gradients[name]) for name, x in again.items())
    return _Answer(actual, again if differs else {}, operators, inference_operators)


def _compute_gradients(
    out: Tensor,
    leaves: dict[str, Tensor],
    grad_out: Tensor,
    *,
    retain_graph: bool,
) -> dict[str, Tensor]:
    """Return the gradients of the leaves by name."""
    if not leaves:
        return {}
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out, retain_graph=retain_graph)
    return dict(zip(leaves, grads, strict=True))


def _read_dropout(out: Tensor, case: SdpaCase) -> Tensor:
    """Return the factor by which dropout multiplied each weight.

    The values of the case begin with an identity matrix, so the first elements of `out` are the
    weights.
    """
    is_kept = out[..., : case.seqlen_k] != 0
    return is_kept.cpu().double() / (1 - case.dropout)


def _describe_wrong_share(is_kept: Tensor, problem: Problem) -> str:
    """Return a message if dropout kept too few or too many weights; otherwise "".

    Without this test, a kernel that drops every weight would pass, because the expected results are
    computed from the kept weights.
    """
    case = problem.case
    weights = problem.expected(torch.float64)["out"][..., : case.seqlen_k]
    # Weights below this limit, such as those of hidden keys, can be zero in the output although
    # dropout kept them.
    is_nonzero = weights > torch.finfo(problem.dtype).tiny
    kept = is_kept[is_nonzero].double()
    share = kept.mean().item()
    deviation = (case.dropout * (1 - case.dropout) / kept.numel()) ** 0.5
    if abs(share - (1 - case.dropout)) < 5 * deviation:
        return ""
    return f"dropout kept {share:.4f} of the weights, expected {1 - case.dropout}"


def call(route: Route, *args: Tensor, **options) -> tuple[Tensor, list[str]]:
    """Call a route; return its result and the names of the operators that ran.

    Raises:
        NoBackend: The backend does not exist on this device.
        CannotRun: torch refuses these arguments.
    """
    with warnings.catch_warnings(record=True) as caught_warnings, _Operators() as operators:
        warnings.simplefilter("always")
        try:
            return route(*args, **options), operators.names
        except RuntimeError as error:
            message = str(error)
            if not message.startswith(_REFUSALS):
                raise
            reason = describe_refusal(message, caught_warnings)
            if message.startswith("No viable backend"):
                raise NoBackend(reason) from error
            raise CannotRun(reason) from error


def describe_refusal(message: str, caught_warnings: list[warnings.WarningMessage]) -> str:
    """Return torch's refusal in one line, with the reasons in its warnings.

    The warnings may include the reasons of backends that were not requested.
    """
    reasons = []
    for warning in caught_warnings:
        text = re.sub(r"\(Triggered internally.*?\)", "", str(warning.message)).strip()
        if not text.endswith(_EMPTY_WARNINGS):
            reasons.append(text)
    return " ".join(["refused by torch:", message, *dict.fromkeys(reasons)])


def find_backend(operators: list[str]) -> str:
    """Return the backend that ran, by its operators: "flash", "efficient", "cudnn" or "math"."""
    for kind, part in _FUSED.items():
        if any(part in name for name in operators):
            return kind
    return "math"


def describe_wrong_operator(route: str, operators: list[str]) -> str:
    """Return a message if the backend that the route names did not run; otherwise ""."""
    used = find_backend(operators)
    if route in BACKENDS and used != route:
        return f"{route} was requested, and {used} ran"
    return ""


class NoBackend(CannotRun):
    """The backend does not exist on this device, so it accepts no arguments at all."""


class _Operators(TorchDispatchMode):
    """Collect the name of each operator that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **kwargs or {})
