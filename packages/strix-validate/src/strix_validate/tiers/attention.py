# SPDX-License-Identifier: BSD-3-Clause
"""Attention gives the correct output and gradients: torch's backends, flash-attn and vLLM."""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path

import torch

from strix_validate.attention import behaviour, flash, flash_cases, sdpa
from strix_validate.checks import CannotRun, Check, Result, RunOptions, Size, State
from strix_validate.numerics.comparison import compare
from strix_validate.tiers import run_each
from strix_validate.triton import modes as triton_modes
from strix_validate.triton.call import Call, require
from strix_validate.triton.cases import unanswered
from strix_validate.triton_packages import package_checks

#: flash-attn takes half precision only, but its kernels also take float32, which shows more.
#: Triton's interpreter computes bfloat16 dot products wrongly.
_FLASH = {
    "gpu": ("flash-attn", (torch.float16, torch.bfloat16)),
    "interpreter": ("flash-attn (Triton interpreter)", (torch.float32, torch.float16)),
}


def checks() -> list[Check]:
    """List every check of every size and kind of machine."""
    return [
        *sdpa.checks(),
        *behaviour.checks(),
        *_flash_cases(Size.STRESS),
        *package_checks.checks("attention"),
    ]


def applies(check: Check, options: RunOptions) -> bool:
    """Return False for checks of another size or kind of device."""
    if check.id.startswith("flash-attn/"):
        return check in _flash_cases(options.size, _kind(options))
    if check in behaviour.checks():
        return behaviour.applies(check, options)
    if case := sdpa.checks().get(check):
        return options.size.holds(case[1].size)
    return package_checks.applies(check, options)


def run(wanted: list[Check], options: RunOptions) -> Iterator[Result]:
    """See strix_validate.tiers."""
    chosen = "OMP_NUM_THREADS" in os.environ
    if options.device == "cpu" and options.size is Size.QUICK and not chosen:
        # tensors are small: on busy cores, threads would only wait for each other
        torch.set_num_threads(1)
    bodies = behaviour.checks()
    behaviours = [check for check in wanted if check in bodies]
    found = chain(sdpa.run(set(wanted), options), run_each(behaviours, options, bodies))
    kernels = sdpa.kernel_set(Path(sys.prefix))
    yield from (sdpa.unless_left_out(result, kernels) for result in found)
    cases = _flash_cases(options.size, _kind(options))
    yield from _run_flash({c: cases[c] for c in wanted if c in cases}, _kind(options))
    mode: triton_modes.Mode = "native" if options.device == "cuda" else "interpret"
    yield from package_checks.run("attention", wanted, options, mode, judge_kernels)


def judge_kernels(check: Check, call: Call, expected, answer: triton_modes.CallAnswer) -> Result:
    """Fail a call that raised or whose numbers are out of bounds; see comparison.compare."""
    if answer.error:
        return Result(check, State.FAILED, ": ".join(answer.error))
    return compare(check, answer.tensors, expected, call.dtype)


def _kind(options: RunOptions) -> str:
    return "gpu" if options.device == "cuda" else "interpreter"


@cache
def _flash_cases(size: Size, only: str = "") -> dict[Check, flash_cases.FlashCase]:
    return {
        Check(f"flash-attn/{kind}/{case.name}", f"{where}: {case.title}", case.why): case
        for kind, (where, dtypes) in _FLASH.items()
        if only in ("", kind)
        for dtype in dtypes
        for case in flash_cases.cases(dtype)
        if size.holds(case.size)
    }


def _run_flash(cases: dict[Check, flash_cases.FlashCase], kind: str) -> Iterator[Result]:
    if not cases:
        return
    calls = [case.call for case in cases.values()]
    try:
        require(flash_cases.MODULE)
        if kind == "gpu":
            own = [triton_modes.answer(call, "cuda") for call in calls]
            answers = triton_modes.CallAnswers(f"flash-attn's kernels: {flash.backend()}", own)
        else:
            answers = triton_modes.run(calls, "interpret")
    except (CannotRun, ImportError, triton_modes.ChildError) as error:
        yield from (unanswered(check, error) for check in cases)
        return
    for (check, case), answer in zip(cases.items(), answers.calls, strict=True):
        result = judge(check, case, answer)
        reason = f"{answers.backend}. {result.reason}".strip()
        yield replace(result, reason=reason, seconds=answer.seconds)


def judge(check: Check, case: flash_cases.FlashCase, answer: triton_modes.CallAnswer) -> Result:
    """Return a pass if the answer is correct, or refused where that is allowed."""
    if answer.error is None:
        return compare(check, answer.tensors, case.expected, case.call.dtype)
    kind, message = answer.error
    if kind in case.refusals:
        return Result(check, State.PASSED, f"Refused, which is correct: {message}")
    return Result(check, State.FAILED, f"{kind}: {message}")
