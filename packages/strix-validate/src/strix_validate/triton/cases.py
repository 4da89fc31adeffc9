# SPDX-License-Identifier: BSD-3-Clause
"""Calls of Triton kernels to build, of the same numbers for a seed, and how they are judged."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from strix_validate import TARGET
from strix_validate.checks import CannotRun, Check, Result, Size, State, seed_of
from strix_validate.layers.pairs import pairwise
from strix_validate.numerics.reference import Precision
from strix_validate.triton import modes
from strix_validate.triton.call import Call

#: Normal numbers of a shape, of the dtype under test.
Randn = Callable[..., Tensor]
#: What a call returns by name: in float64, as correct kernels of a dtype do, or its terms' sizes.
Expected = Callable[[Precision], dict[str, Tensor]]
#: Judges an answer: check, call, what it must return, answer.
Judge = Callable[[Check, Any, Expected, modes.CallAnswer], Result]
#: How a tier runs kernels, in titles of checks.
HOW = {
    "kernels": f"compiled for {TARGET}",
    "attention": "in Triton's interpreter or on the GPU",
    "emulated": "executed under emulation",
}


@dataclass(frozen=True)
class Case:
    """A launch to build: build(randn) gives the call and what it must return.

    size: from which on the tier attention has it.
    """

    build: Callable[..., tuple[Any, Any]]
    why: str
    dtype: torch.dtype = torch.float16
    size: Size = Size.QUICK


@dataclass(frozen=True)
class Candidate:
    """A case of a family that is generated from models.

    Attributes:
        build: as of Case.
        columns: the values by which cases are chosen: what a kernel is compiled or launched for.
        dtype: of the case.
    """

    build: Callable[..., tuple[Any, Any]]
    columns: tuple[Hashable, ...]
    dtype: torch.dtype = torch.float16


def choose(
    candidates: Mapping[str, Candidate], why: str, dear: Sequence[str] = ()
) -> dict[str, Case]:
    """Return a case for each candidate; quick has few, which hold each pair of two columns' values.

    Full has all of them.

    Args:
        dear: patterns of names, as of a shell, that quick cannot afford.
    """
    affordable = [
        (name, x.columns)
        for name, x in candidates.items()
        if not any(fnmatchcase(name, pattern) for pattern in dear)
    ]
    quick = set(pairwise(affordable))
    return {
        name: Case(x.build, why, x.dtype, Size.QUICK if name in quick else Size.FULL)
        for name, x in candidates.items()
    }


def make(name: str, case: Case) -> tuple[Any, Expected]:
    """Build the case's call, of the same numbers for a seed, and what it must return."""
    generator = torch.Generator().manual_seed(seed_of(name))
    return case.build(lambda *shape: torch.randn(shape, generator=generator).to(case.dtype))


def answered(
    problems: dict[Check, tuple[Call, Expected]], mode: modes.Mode, judge: Judge
) -> Iterator[Result]:
    """Make one library's calls, and yield the results."""
    try:
        answers = modes.run([call for call, _ in problems.values()], mode)
    except (CannotRun, modes.ChildError) as error:
        yield from (unanswered(check, error) for check in problems)
        return
    for (check, (call, expected)), answer in zip(problems.items(), answers.calls, strict=True):
        result = judge(check, call, expected, answer)
        reason = f"{answers.backend}, {mode}. {result.reason}".strip()
        yield replace(result, reason=reason, seconds=answer.seconds)


def unanswered(check: Check, error: Exception) -> Result:
    """Return it skipped by CannotRun, failed by anything else."""
    state = State.SKIPPED if isinstance(error, CannotRun) else State.FAILED
    return Result(check, state, str(error))
