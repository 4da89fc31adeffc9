# SPDX-License-Identifier: BSD-3-Clause
"""Compare a result with the reference; the allowed error follows from correct kernels' errors."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from strix_validate.checks import Check, Result, State
from strix_validate.numerics.reference import TERMS, Precision

#: Allowed error in units of the rounding error of a correct kernel; see :func:`bounds`.
FACTORS = {
    torch.float32: 10.0,
    torch.float16: 4.0,
    torch.bfloat16: 4.0,
}

#: Allowed root mean square error, in the unit that :func:`rms_bounds` computes.
RMS_FACTORS = {
    torch.float32: 10.0,
    torch.float16: 3.0,
    torch.bfloat16: 3.0,
}

#: Allowed mean signed error of a large tensor, in the unit of :func:`rms_bounds`. In float32, it is
#: as large as the allowed root mean square error.
DRIFT_FACTORS = {
    torch.float32: 10.0,
    torch.float16: 0.5,
    torch.bfloat16: 0.5,
}

#: Names of results that have no bound for the mean signed error. In fla, the error of a gate's
#: gradient is a sum over all later tokens, so the errors of a correct kernel can all have one sign.
WITHOUT_DRIFT = ("dg",)

#: Allowed error of an element, in units of half the dtype's eps times the size of its terms.
LOCAL_FACTORS = {
    torch.float32: 100.0,
    torch.float16: 4.0,
    torch.bfloat16: 4.0,
}


def max_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference; infinite for a NaN, an infinity or a wrong shape."""
    if actual.shape != expected.shape:
        return float("inf")
    error = _subtract(actual, expected).abs()
    if not bool(error.isfinite().all()):
        return float("inf")
    return error.max().item()


def _subtract(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the error of each element, in float64 on the device of the expected tensor."""
    return actual.detach().to(expected.device).double() - expected.double()


def bounds(
    exact: dict[str, Tensor],
    rounded: dict[str, Tensor],
    terms: dict[str, Tensor],
    dtype: torch.dtype,
    factor: float | None = None,
) -> dict[str, float]:
    """Return the largest :func:`max_error` that each tensor may have.

    The bound's unit is the error of `rounded`, which a correct kernel of the dtype under test
    computes from the same inputs. docs/validate.md gives the reasons.

    In half precision, 4 units are allowed. Correct kernels came to 3.1 units (torch's on the CPU,
    grouped heads, bfloat16). flash-attention's own tests allow 2 or 3 times the error of attention
    that rounds every intermediate; this error is larger than a unit (tests/test_flash_attn.py,
    test_flash_attn_output). In float32, 10 units are allowed: the error of the kernels' fast exp2
    shows there, and correct kernels came to 4 units.

    The unit is at least eps(dtype) / 2 * max|exact|, the rounding of the result alone, because the
    error of a correct kernel can be zero by chance, for example with a single key. This minimum is
    the same for dq, dk and dv: with one key, dq and dk are zero, because their terms cancel, but
    these terms are as large as those of dv. The unit is also at least
    eps(float32) * max|terms|, the rounding of the sums. Without this second minimum, the minimum
    would be zero if such a gradient were computed alone.

    lse is stored in float32 for any dtype. Its error is the relative error of the sum of weights. A
    kernel that rounds the weights before it sums them, or whose exp is only as precise as the
    dtype, is off by half an eps of the dtype, so that much is always allowed.

    Args:
        exact: Results in float64.
        rounded: Results of a correct kernel of the dtype.
        terms: Sums of the magnitudes of the terms; see TERMS.
        dtype: Dtype under test.
        factor: Replaces the dtype's factor in FACTORS, except for lse.

    Raises:
        ValueError: `rounded` or `exact` is not finite, so that every result would pass.
    """
    half_eps = torch.finfo(dtype).eps / 2
    sizes = {name: value.abs().max().item() for name, value in exact.items()}
    gradients: list[str] = [name for name in ("dq", "dk", "dv") if name in exact]
    largest_gradient = max((sizes[name] for name in gradients), default=0.0)
    for name in gradients:
        sizes[name] = largest_gradient
    if factor is None:
        factor = FACTORS[dtype]
    limits: dict[str, float] = {}
    for name, value in exact.items():
        rounding_of_sums = torch.finfo(torch.float32).eps * terms[name].abs().max().item()
        minimum = max(half_eps * sizes[name], rounding_of_sums)
        limits[name] = factor * max(max_error(rounded[name], value), minimum)
    if "lse" in exact:
        minimum = torch.finfo(torch.float32).eps / 2 * sizes["lse"]
        unit = max(max_error(rounded["lse"], exact["lse"]), minimum)
        limits["lse"] = max(half_eps, FACTORS[torch.float32] * unit)
    if not all(map(math.isfinite, limits.values())):
        raise ValueError("the reference is not finite in the dtype under test")
    return limits


def rms(x: Tensor) -> float:
    """Return the root mean square of the elements; 0 without elements."""
    if not x.numel():
        return 0.0
    return x.detach().double().square().mean().sqrt().item()


def rms_error(actual: Tensor, expected: Tensor) -> float:
    """Return the root mean square of the differences; infinite for a NaN or an infinity."""
    error = _subtract(actual, expected)
    if not bool(error.isfinite().all()):
        return float("inf")
    return rms(error)


def drift(actual: Tensor, expected: Tensor) -> float:
    """Return the absolute value of the mean error or, if larger, of the mean error towards zero.

    The errors of a kernel that truncates instead of rounding have one sign, so their mean is large.
    The errors of correct kernels cancel. The result is 0 for a NaN or an infinity.
    """
    error = _subtract(actual, expected)
    if not error.numel() or not bool(error.isfinite().all()):
        return 0.0
    mean = error.mean().item()
    towards_zero = (error * expected.double().sign()).mean().item()
    return max(abs(mean), abs(towards_zero))


def rms_bounds(
    exact: dict[str, Tensor],
    rounded: dict[str, Tensor],
    terms: dict[str, Tensor],
    dtype: torch.dtype,
) -> dict[str, float]:
    """Return the largest :func:`rms_error` that each tensor may have; see docs/validate.md.

    The unit of the bound is the error of `rounded`, the results of a correct kernel of the dtype.
    The unit is at least the error of storing the result. Such errors are uniformly distributed up
    to eps / 2 * |exact|, so their root mean square is eps / 2 * rms(exact) / sqrt(3). The unit is
    also at least eps(float32) * rms(terms), the rounding of the sums. This second minimum is needed
    for exact values of zero, which are stored without error.

    Args:
        exact: Results in float64.
        rounded: Results of a correct kernel of the dtype.
        terms: Sums of the magnitudes of the terms; see TERMS.
        dtype: Dtype under test.
    """
    limits = {}
    for name, value in exact.items():
        storing = torch.finfo(dtype).eps / 2 * rms(value) / math.sqrt(3)
        rounding_of_sums = torch.finfo(torch.float32).eps * rms(terms[name])
        unit = max(rms_error(rounded[name], value), storing, rounding_of_sums)
        limits[name] = RMS_FACTORS[dtype] * unit
    return limits


def local_error(actual: Tensor, expected: Tensor, terms: Tensor, dtype: torch.dtype) -> float:
    """Return the largest error of an element, in units of half the dtype's eps times its terms.

    Correct kernels came to 2.4 units in half precision. In float32 they came to 31 units, because
    the rounding of the scores matters there, and its error grows with the scores. Weights below
    fp16's smallest normal number, 6e-5, lose more than half an eps when they are rounded. To allow
    for this, 8 steps of the subnormal numbers are added to the unit.
    """
    error = _subtract(actual, expected).abs()
    limits = torch.finfo(dtype)
    unit = limits.eps / 2 * terms + 8 * limits.smallest_normal * limits.eps
    return (error / unit).max().item()


@dataclass(frozen=True)
class _Errors:
    """The errors of one tensor, and their bounds.

    Attributes:
        maximum: Largest error; infinite for a NaN, an infinity or a wrong shape.
        local: Largest error of an element in units of its own terms.
        rms: Root mean square error.
        drift: Mean signed error.
        bound: Bound of maximum.
        local_bound: Bound of local.
        rms_bound: Bound of rms.
        drift_bound: Bound of drift.
    """

    maximum: float
    local: float
    rms: float
    drift: float
    bound: float
    local_bound: float
    rms_bound: float
    drift_bound: float

    def are_within_bounds(self, *, of_elements_only: bool) -> bool:
        """Return whether the errors are within their bounds.

        Args:
            of_elements_only: Ignore the bounds of the mean errors.
        """
        # "error <= bound", because "not error > bound" is true for NaN
        if not (self.maximum <= self.bound and self.local <= self.local_bound):
            return False
        if of_elements_only:
            return True
        return self.rms <= self.rms_bound and self.drift <= self.drift_bound

    def measured(self) -> dict:
        """Return the numbers for a record; None stands for one that is not finite."""
        return {
            "error": self.maximum if math.isfinite(self.maximum) else None,
            "bound": self.bound,
            "local": self.local if math.isfinite(self.local) else None,
            "rms": self.rms,
            "rms_bound": self.rms_bound,
            "drift": self.drift,
        }


def _measure(
    actual: Tensor,
    exact: Tensor,
    terms: Tensor,
    dtype: torch.dtype,
    bound: float,
    rms_bound: float,
) -> _Errors:
    maximum = max_error(actual, exact)
    local = 0.0
    mean_square = 0.0
    signed = 0.0
    if math.isfinite(maximum):
        local = local_error(actual, exact, terms.abs(), dtype)
        mean_square = rms_error(actual, exact)
        signed = drift(actual, exact)
    # The mean error of few elements can be large by chance, so the factor is larger for a small
    # tensor.
    drift_factor = DRIFT_FACTORS[dtype] + 4 / math.sqrt(max(exact.numel(), 1))
    return _Errors(
        maximum=maximum,
        local=local,
        rms=mean_square,
        drift=signed,
        bound=bound,
        local_bound=LOCAL_FACTORS[dtype],
        rms_bound=rms_bound,
        drift_bound=drift_factor * rms_bound / RMS_FACTORS[dtype],
    )


def compare(
    check: Check,
    actual: dict[str, Tensor],
    expected: Callable[[Precision], dict[str, Tensor]],
    dtype: torch.dtype,
    factor: float | None = None,
) -> Result:
    """Return a pass if every expected tensor, and every element, is within its bounds.

    Each tensor has a bound from :func:`bounds`. Unless a factor is given, it also has a bound from
    :func:`rms_bounds`, and one for :func:`drift`. The bound for drift is a share of the bound from
    :func:`rms_bounds`. The share is larger for a tensor of few elements. The results in
    WITHOUT_DRIFT have no bound for drift. Each element has a bound of LOCAL_FACTORS in units of its
    own terms. Without a bound for each element, a kernel could leave out a small gradient
    altogether.

    The record of the result includes the dtype and the size of the largest terms, from which the
    bounds follow.

    Args:
        check: The check that the result is for.
        actual: Tensors under test by name.
        expected: Returns the correct tensors by name, for a precision.
        dtype: Dtype under test.
        factor: Replaces the dtype's factor in FACTORS.
    """
    exact = expected(torch.float64)
    terms = expected(TERMS)
    rounded = expected(dtype)
    limits = bounds(exact, rounded, terms, dtype, factor)
    rms_limits = rms_bounds(exact, rounded, terms, dtype)
    sizes = [x.abs().max().item() for x in (*exact.values(), *terms.values()) if x.numel()]
    scale = {
        "dtype": str(dtype).removeprefix("torch."),
        "size": max(sizes, default=0.0),
    }
    wrong_tensors = []
    measured = {}
    for name, value in exact.items():
        errors = _measure(
            actual[name],
            value,
            terms[name],
            dtype,
            limits[name],
            rms_limits[name],
        )
        if name in WITHOUT_DRIFT:
            errors = replace(errors, drift_bound=math.inf)
        if not errors.are_within_bounds(of_elements_only=factor is not None):
            wrong_tensors.append(name)
        measured[name] = errors.measured() | scale
    if wrong_tensors:
        return Result(check, State.FAILED, f"wrong: {', '.join(wrong_tensors)}", measured)
    return Result(check, State.PASSED, "", measured)
