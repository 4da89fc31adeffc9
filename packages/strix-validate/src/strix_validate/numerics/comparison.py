# SPDX-License-Identifier: BSD-3-Clause
"""How far a result may be from the reference: as far as correct kernels are."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from strix_validate.checks import Check, Result, State
from strix_validate.numerics.reference import TERMS, Precision

#: Allowed error in units of the rounding error of a correct kernel; see :func:`bounds`.
FACTORS = {torch.float32: 10.0, torch.float16: 4.0, torch.bfloat16: 4.0}

#: Allowed root mean square error in the same units; see :func:`rms_bounds`.
RMS_FACTORS = {torch.float32: 10.0, torch.float16: 3.0, torch.bfloat16: 3.0}

#: Allowed mean signed error in the same units; in float32 no less than the root mean square error.
DRIFT_FACTORS = {torch.float32: 10.0, torch.float16: 0.5, torch.bfloat16: 0.5}

#: Allowed error of an element in units of half the dtype's eps and of the size of its terms.
LOCAL_FACTORS = {torch.float32: 100.0, torch.float16: 4.0, torch.bfloat16: 4.0}


def max_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference; infinite for a NaN, an infinity or another shape."""
    if actual.shape != expected.shape:
        return float("inf")
    error = (actual.detach().to(expected.device).double() - expected.double()).abs()
    return error.max().item() if bool(error.isfinite().all()) else float("inf")


def bounds(
    exact: dict[str, Tensor],
    rounded: dict[str, Tensor],
    terms: dict[str, Tensor],
    dtype: torch.dtype,
    factor: float | None = None,
) -> dict[str, float]:
    """Return the largest error that each tensor may have, of :func:`max_error`.

    The yardstick is the error of a correct kernel of the dtype under test, on the same inputs: see
    `attention`; docs/validate.md says why. In half precision a result may be 4 times as far off:
    correct kernels came to 3.1 times (torch's on the CPU, grouped heads, bfloat16), and
    flash-attention's own tests allow 2 and 3 times the larger error of attention that rounds every
    intermediate (tests/test_flash_attn.py, test_flash_attn_output). In float32, where the kernels'
    fast exp2 shows, they came to 4 times, hence 10.

    The floor, eps(dtype) / 2 * max|exact|, is the rounding of the result alone: the yardstick can
    be exact by chance, for example with a single key. The gradients share their floor: over one key
    those of q and k cancel to zero, and their terms, of the size of v's, do not. Where one of them
    is computed alone, eps(float32) * max|terms| is left, the rounding of the sums.

    lse is stored in float32 in any dtype. Its error is that of the sum of weights in parts of the
    sum: a kernel that rounds them first, or takes as good an exp as they need, is half an eps off.

    Args:
        exact, rounded, terms: tensors of `attention` in float64, dtype, and of TERMS.
        factor: instead of the dtype's in FACTORS.

    Raises:
        ValueError: the yardstick is not finite; every result would be within such a bound.
    """
    half_ulp = torch.finfo(dtype).eps / 2
    size = {name: value.abs().max().item() for name, value in exact.items()}
    gradients = [name for name in ("dq", "dk", "dv") if name in exact]
    size |= dict.fromkeys(gradients, max((size[name] for name in gradients), default=0.0))
    found = {}
    for name, value in exact.items():
        sums = torch.finfo(torch.float32).eps * terms[name].abs().max().item()
        floor = max(half_ulp * size[name], sums)
        found[name] = (factor or FACTORS[dtype]) * max(max_error(rounded[name], value), floor)
    if "lse" in exact:
        least = torch.finfo(torch.float32).eps / 2 * size["lse"]
        float32 = FACTORS[torch.float32] * max(max_error(rounded["lse"], exact["lse"]), least)
        found["lse"] = max(half_ulp, float32)
    if not all(map(math.isfinite, found.values())):
        raise ValueError("the reference is not finite in the dtype under test")
    return found


def rms(x: Tensor) -> float:
    """Return the root mean square of the elements, 0 without elements."""
    return x.detach().double().square().mean().sqrt().item() if x.numel() else 0.0


def rms_error(actual: Tensor, expected: Tensor) -> float:
    """Return the root mean square of the differences; infinite where :func:`max_error` is."""
    error = actual.detach().to(expected.device).double() - expected.double()
    return rms(error) if bool(error.isfinite().all()) else float("inf")


def drift(actual: Tensor, expected: Tensor) -> float:
    """Return the mean error, or the one towards zero if larger, each in absolute value.

    It shows rounding by truncation, whose errors have one sign; those of correct kernels cancel.
    0 where :func:`max_error` is infinite.
    """
    error = actual.detach().to(expected.device).double() - expected.double()
    if not (error.numel() and bool(error.isfinite().all())):
        return 0.0
    return max(abs(error.mean().item()), abs((error * expected.double().sign()).mean().item()))


def rms_bounds(
    exact: dict[str, Tensor],
    rounded: dict[str, Tensor],
    terms: dict[str, Tensor],
    dtype: torch.dtype,
) -> dict[str, float]:
    """Return the largest :func:`rms_error` that each tensor may have; docs/validate.md says why.

    The yardstick is the error of a correct kernel of the dtype, see `attention`; at least what
    storing costs, eps / 2 * exact uniformly distributed, which is its root mean square divided by
    sqrt(3); and at least eps(float32) of the terms, the rounding of the sums, which is all there is
    where the exact value is zero.

    Args:
        exact, rounded, terms: tensors of `attention` in float64, dtype, and of TERMS.
    """
    found = {}
    for name, value in exact.items():
        stores = torch.finfo(dtype).eps / 2 * rms(value) / math.sqrt(3)
        sums = torch.finfo(torch.float32).eps * rms(terms[name])
        found[name] = RMS_FACTORS[dtype] * max(rms_error(rounded[name], value), stores, sums)
    return found


def local_error(actual: Tensor, expected: Tensor, terms: Tensor, dtype: torch.dtype) -> float:
    """Return the largest error of an element.

    Its unit is half the dtype's eps, times the size of the element's terms.

    Correct kernels came to 2.4 in half precision and 31 in float32, where the scores' own rounding
    counts, which is that of their size. Weights below fp16's smallest normal number, 6e-5, lose
    more than half an eps; 8 steps of the subnormal numbers are allowed for them.
    """
    error = (actual.detach().to(expected.device).double() - expected.double()).abs()
    kind = torch.finfo(dtype)
    unit = kind.eps / 2 * terms + 8 * kind.smallest_normal * kind.eps
    return (error / unit).max().item()


def compare(
    check: Check,
    actual: dict[str, Tensor],
    expected: Callable[[Precision], dict[str, Tensor]],
    dtype: torch.dtype,
    factor: float | None = None,
) -> Result:
    """Return a pass if every expected tensor is within its bounds, and every element.

    The bounds of a tensor are :func:`bounds` and, unless a factor is given, :func:`rms_bounds`, of
    which a part is also the bound of :func:`drift`, and more of a few elements. Those of an element
    are LOCAL_FACTORS of its own terms: a small gradient may be missing altogether within the rest.

    What is measured has the dtype and the size of the largest terms, from which the bounds follow.
    """
    exact, terms = expected(torch.float64), expected(TERMS)
    rounded = expected(dtype)
    limits = bounds(exact, rounded, terms, dtype, factor)
    rms_limits = rms_bounds(exact, rounded, terms, dtype)
    sizes = [x.abs().max().item() for x in (*exact.values(), *terms.values()) if x.numel()]
    scale = {"dtype": str(dtype).removeprefix("torch."), "size": max(sizes, default=0.0)}
    wrong, measured = [], {}
    for name, value in exact.items():
        error, local, mean, signed = max_error(actual[name], value), 0.0, 0.0, 0.0
        if math.isfinite(error):
            local = local_error(actual[name], value, terms[name].abs(), dtype)
            mean = rms_error(actual[name], value)
            signed = drift(actual[name], value)
        drifts = DRIFT_FACTORS[dtype] + 4 / math.sqrt(max(value.numel(), 1))
        drift_limit = drifts * rms_limits[name] / RMS_FACTORS[dtype]
        # not "error > limit", which is false for NaN
        within = error <= limits[name] and local <= LOCAL_FACTORS[dtype]
        straight = mean <= rms_limits[name] and signed <= drift_limit
        if not (within and (factor is not None or straight)):
            wrong.append(name)
        measured[name] = {
            "error": error if math.isfinite(error) else None,
            "bound": limits[name],
            "local": local if math.isfinite(local) else None,
            "rms": mean,
            "rms_bound": rms_limits[name],
            "drift": signed,
            **scale,
        }
    if wrong:
        return Result(check, State.FAILED, f"wrong: {', '.join(wrong)}", measured)
    return Result(check, State.PASSED, "", measured)
