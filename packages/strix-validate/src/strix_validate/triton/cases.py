# SPDX-License-Identifier: BSD-3-Clause
"""Cases: calls of Triton kernels to check, and the results that each call must return.

Three terms have the same meaning for flash-attn, vLLM and the other packages:

- A **case** is a row of a table of checks: a function that builds a call, the fault that the case
  would catch, the dtype, and the smallest size of run that includes the case.
- A **call** is one use of a library's Python function, with its tensors; see
  :mod:`strix_validate.triton.call`.
- **expected** is a function that takes a precision, and computes the tensors that the call must
  return. In float64 they are the reference. In a smaller dtype they are the results of a correct
  kernel of that dtype. For TERMS they are magnitudes; rounding errors are in proportion to them.

:func:`make` builds a call only when its case runs. The call's random numbers depend on the case's
name and on the seed of the run.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from strix_validate import TARGET
from strix_validate.checks import CannotRun, Check, Result, Size, State, derive_seed
from strix_validate.layers.pairs import pairwise
from strix_validate.numerics.reference import Precision
from strix_validate.triton import modes
from strix_validate.triton.call import Call

#: Draws standard normal numbers of a shape, in the dtype under test: randn(*shape).
Randn = Callable[..., Tensor]
#: Computes the tensors that a call must return, by name, for a precision; see the module's
#: docstring.
Expected = Callable[[Precision], dict[str, Tensor]]
#: Builds a call: build(randn) returns the call and its expected function, or None instead of the
#: function if the call is only compiled.
Build = Callable[..., tuple[Any, Any]]
#: Judges an answer: judge(check, call, expected, answer).
Judge = Callable[[Check, Any, Expected, modes.CallAnswer], Result]
#: How each tier runs kernels, for titles of checks.
TIER_TITLES = {
    "kernels": f"compiled for {TARGET}",
    "attention": "in Triton's interpreter or on the GPU",
    "emulated": "executed under emulation",
}


@dataclass(frozen=True)
class Case:
    """A call to check.

    Attributes:
        build: Builds the call and its expected function.
        catches: The fault that the case would catch, with a link where there is one.
        dtype: The dtype of the random numbers.
        size: The smallest run of the tier "attention" that includes the case.
    """

    build: Build
    catches: str
    dtype: torch.dtype = torch.float16
    size: Size = Size.QUICK


@dataclass(frozen=True)
class Candidate:
    """A case that is generated from the layer of a model; see choose.

    Attributes:
        build: Builds the call and its expected function.
        columns: The values that a kernel is compiled or launched for. See :func:`choose`.
        dtype: The dtype of the random numbers.
    """

    build: Build
    columns: tuple[Hashable, ...]
    dtype: torch.dtype = torch.float16


def choose(
    candidates: Mapping[str, Candidate],
    catches: str,
    expensive: Sequence[str] = (),
) -> dict[str, Case]:
    """Return a case for each candidate.

    A full run includes all cases. A quick run includes a few that are not expensive. For any two
    columns, these few contain every pair of values of the inexpensive candidates.

    Args:
        candidates: The candidates by name.
        catches: The fault that each case would catch.
        expensive: Shell patterns of the names of candidates that take too long for a quick run.
    """
    affordable = []
    for name, candidate in candidates.items():
        is_expensive = any(fnmatchcase(name, pattern) for pattern in expensive)
        if not is_expensive:
            affordable.append((name, candidate.columns))
    quick_names = set(pairwise(affordable))
    cases = {}
    for name, candidate in candidates.items():
        size = Size.QUICK if name in quick_names else Size.FULL
        cases[name] = Case(candidate.build, catches, candidate.dtype, size)
    return cases


def make(name: str, case: Case) -> tuple[Any, Expected]:
    """Build a case's call, and the function that computes the tensors that the call must return.

    The function is None if the call is only compiled.

    Args:
        name: The case's name. With the seed of the run, it determines the random numbers.
        case: The case to build.
    """
    generator = torch.Generator().manual_seed(derive_seed(name))

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    return case.build(randn)


def run_calls(
    calls: Mapping[Check, tuple[Call, Expected]],
    mode: modes.Mode,
    judge: Judge,
) -> Iterator[Result]:
    """Make calls of one library in a child process, and yield a result for each check."""
    try:
        answers = modes.run([call for call, _ in calls.values()], mode)
    except (CannotRun, modes.ChildError) as error:
        for check in calls:
            yield describe_missing_answer(check, error)
        return
    for (check, (call, expected)), answer in zip(calls.items(), answers.calls, strict=True):
        result = judge(check, call, expected, answer)
        reason = f"{answers.backend}, {mode}. {result.reason}".strip()
        yield replace(result, reason=reason, seconds=answer.seconds)


def describe_missing_answer(check: Check, error: Exception) -> Result:
    """Return the result of a check without an answer: skipped for CannotRun, otherwise failed."""
    state = State.SKIPPED if isinstance(error, CannotRun) else State.FAILED
    return Result(check, state, str(error))
