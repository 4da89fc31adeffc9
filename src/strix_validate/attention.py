# SPDX-License-Identifier: BSD-3-Clause
"""Checks that attention gives the right output and gradients, each route forced by name."""

import importlib.util
import math
import re
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from strix_validate import flash, gpu_free, reference
from strix_validate.report import Check, Result, State

SDPA = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Shape:
    """Of a call of torch's scaled_dot_product_attention, and the bug that it would catch.

    usual: every fused backend of a GPU has it in half precision, so that a refusal is a failure.
    """

    name: str
    why: str
    batch: int = 1
    heads: int = 4
    kv_heads: int = 4
    seqlen_q: int = 128
    seqlen_k: int = 128
    head_dim: int = 64
    causal: bool = False
    usual: bool = True


_NAN_D72 = (
    "NaN in fp16 and bf16 at head dim 72 on gfx1151 (SAM 2.1): "
    "https://github.com/ROCm/aotriton/pull/179"
)
_RACE_D80 = (
    "kernels of another chip: NaN at head dim 80, causal: "
    "https://github.com/ROCm/aotriton/issues/183"
)
SHAPES = (
    Shape("full", "a wrong scale or a head mixed up with another", batch=2),
    Shape("causal", "a mask off by one", causal=True),
    Shape("ragged", "keys read behind the last one", seqlen_q=113, seqlen_k=113, causal=True),
    Shape("cross", "seqlen_q taken for seqlen_k", seqlen_q=70, seqlen_k=133),
    Shape(
        "cross-causal",
        "causal aligned bottom-right, as in flash-attn, where torch says top-left",
        seqlen_q=70,
        seqlen_k=133,
        causal=True,
        usual=False,
    ),
    Shape("gqa", "a wrong key/value head", heads=8, kv_heads=2, causal=True, usual=False),
    Shape("d72", _NAN_D72, batch=2, head_dim=72),
    Shape("d80", _RACE_D80, head_dim=80, causal=True),
    Shape("d128", "LDS or tile sizes of the largest usual head dim", head_dim=128, causal=True),
)


def checks() -> Iterator[tuple[Check, str]]:
    """Every check that some machine can run, and the kind of device that it belongs to.

    The kind is "any", or for flash-attn "gpu" or "cpu", which have different dtypes.
    """
    for route, shape, dtype in _sdpa_cases():
        yield _sdpa_check(route, shape, dtype), "any"
    for kind in ("gpu", "cpu"):
        for case in _flash_cases(kind):
            yield _flash_check(kind, case), kind


def run(device: str, wanted: Callable[[str], bool]) -> list[Result]:
    """Results of the wanted checks.

    Args:
        device: "cuda" (also torch's name for a ROCm GPU) or "cpu".
        wanted: of a check's id.
    """
    missing_gpu = device == "cuda" and not torch.cuda.is_available()
    results = []
    for route, shape, dtype in _sdpa_cases():
        check = _sdpa_check(route, shape, dtype)
        if wanted(check.id):
            results.append(
                Result(check, State.SKIPPED, "torch sees no GPU")
                if missing_gpu
                else _run_sdpa(check, route, shape, dtype, device)
            )
    kind = "gpu" if device == "cuda" else "cpu"
    cases = {_flash_check(kind, case): case for case in _flash_cases(kind)}
    cases = {check: case for check, case in cases.items() if wanted(check.id)}
    if missing_gpu:
        results += [Result(check, State.SKIPPED, "torch sees no GPU") for check in cases]
    elif importlib.util.find_spec("flash_attn") is None:
        results += [Result(check, State.SKIPPED, "flash_attn is not installed") for check in cases]
    elif cases:
        results += _run_flash(cases, kind)
    return results


def compare(
    check: Check,
    actual: dict[str, Tensor],
    expected: Callable[[torch.dtype], dict[str, Tensor]],
    dtype: torch.dtype,
) -> Result:
    """Passed if every expected tensor is within :func:`reference.bounds` of the exact one."""
    exact = expected(torch.float64)
    bounds = reference.bounds(exact, expected(dtype), dtype)
    errors = {name: reference.max_error(actual[name], value) for name, value in exact.items()}
    # Not "error > bound", which is false for NaN.
    wrong = [name for name, error in errors.items() if not error <= bounds[name]]
    measured = {
        name: {"error": error if math.isfinite(error) else None, "bound": bounds[name]}
        for name, error in errors.items()
    }
    if wrong:
        return Result(check, State.FAILED, f"wrong: {', '.join(wrong)}", measured)
    return Result(check, State.PASSED, "", measured)


def _sdpa_cases() -> Iterator[tuple[str, Shape, torch.dtype]]:
    for route in SDPA:
        for shape in SHAPES:
            for dtype in DTYPES:
                yield route, shape, dtype


def _sdpa_check(route: str, shape: Shape, dtype: torch.dtype) -> Check:
    name = str(dtype).removeprefix("torch.")
    return Check(
        f"sdpa/{route}/{shape.name}-{name}",
        f"torch SDPA {SDPA[route].name}: {shape.name} {name}",
        shape.why,
    )


def _run_sdpa(check: Check, route: str, shape: Shape, dtype, device: str) -> Result:
    generator = torch.Generator().manual_seed(zlib.crc32(shape.name.encode()))

    def randn(heads: int, seqlen: int) -> Tensor:
        size = (shape.batch, heads, seqlen, shape.head_dim)
        return torch.randn(size, generator=generator).to(dtype)

    q, grad_out = (randn(shape.heads, shape.seqlen_q) for _ in range(2))
    k, v = (randn(shape.kv_heads, shape.seqlen_k) for _ in range(2))
    leaves = [x.to(device).requires_grad_() for x in (q, k, v)]
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            # One backend only: torch would else take another without a word.
            with sdpa_kernel(SDPA[route]):
                out = torch.nn.functional.scaled_dot_product_attention(
                    *leaves, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads
                )
            grads = torch.autograd.grad(out, leaves, grad_out.to(device))
        except Exception as error:  # any exception is a result: a failure or a refusal
            fused_on_gpu = device == "cuda" and dtype != torch.float32 and shape.usual
            may_refuse = route != "math" and not fused_on_gpu
            said = [str(warning.message) for warning in reasons]
            return _not_computed(check, error, said, may_refuse)
    actual = {"out": out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    causal = "top-left" if shape.causal else None

    def expected(precision):
        return reference.attention(q, k, v, grad_out, causal=causal, dtype=precision)

    return compare(check, actual, expected, dtype)


def _not_computed(check: Check, error: Exception, said: list[str], may_refuse: bool) -> Result:
    """Skipped if torch lacks the backend and may; failed where this stack is built to have it."""
    message = str(error)
    if not message.startswith(("No available kernel", "No viable backend")):
        return Result(check, State.FAILED, f"{type(error).__name__}: {message}")
    # torch says why in warnings, also for the backends that were not asked for.
    why = [re.sub(r"\(Triggered internally.*?\)", "", text).strip() for text in said]
    why = [text for text in why if not text.endswith(("runtime disabled.", "not used because:"))]
    state = State.SKIPPED if may_refuse else State.FAILED
    return Result(check, state, " ".join(["refused by torch:", message, *why]))


def _flash_cases(kind: str) -> Iterator[flash.Case]:
    # flash-attn takes half precision only; the kernels take float32, too, where it shows more. The
    # interpreter computes bfloat16 dot products wrongly.
    pairs = {
        "gpu": (torch.float16, torch.bfloat16),
        "cpu": (torch.float32, torch.float16),
    }
    for dtype in pairs[kind]:
        yield from flash.cases(dtype)


def _flash_check(kind: str, case: flash.Case) -> Check:
    route = {"gpu": "gpu", "cpu": "interpreter"}[kind]
    where = {"gpu": "flash-attn", "cpu": "flash-attn (Triton interpreter)"}[kind]
    return Check(f"flash-attn/{route}/{case.name}", f"{where}: {case.title}", case.why)


def _run_flash(cases: dict[Check, flash.Case], kind: str) -> list[Result]:
    calls = [case.call for case in cases.values()]
    try:
        if kind == "gpu":
            answers = [gpu_free.answer(call, "cuda") for call in calls]
            answers = gpu_free.Answers(flash.backend(), answers)
        else:
            answers = gpu_free.run(calls, "interpret")
    except (ImportError, gpu_free.ChildError) as error:
        return [Result(check, State.FAILED, str(error)) for check in cases]
    results = [
        judge(check, case, answer)
        for (check, case), answer in zip(cases.items(), answers.calls, strict=True)
    ]
    kernels = f"flash-attn's kernels: {answers.backend}"
    return [replace(result, reason=f"{kernels}. {result.reason}".strip()) for result in results]


def judge(check: Check, case: flash.Case, answer: gpu_free.Answer) -> Result:
    """Passed if the answer is right, or refused where that is allowed."""
    if answer.error is None:
        return compare(check, answer.tensors, case.expected, case.call.tensors["q"].dtype)
    kind, message = answer.error
    if case.may_refuse and kind == "NotImplementedError":
        return Result(check, State.PASSED, f"Refused, which is right: {message}")
    return Result(check, State.FAILED, f"{kind}: {message}")
