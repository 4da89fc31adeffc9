# SPDX-License-Identifier: BSD-3-Clause
"""Check attention by torch and flash-attn, and the kernels of vLLM and other packages."""

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
from strix_validate.tiers import Tier, run_each
from strix_validate.triton import modes as triton_modes
from strix_validate.triton.call import Call, require
from strix_validate.triton.cases import describe_missing_answer
from strix_validate.triton_packages import package_checks

#: Title and dtypes of flash-attn's checks, by where its kernels run. The package accepts half
#: precision only. Its kernels also accept float32, in which smaller errors show, so the interpreter
#: runs them in float32 too. The interpreter does not run bfloat16, because it computes dot products
#: of bfloat16 wrongly.
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
    """Return whether a check belongs to a run of this size on this kind of device."""
    if check.id.startswith("flash-attn/"):
        return check in _flash_cases(options.size, _kind(options))
    if check in behaviour.checks():
        return behaviour.applies(check, options)
    sdpa_checks = sdpa.checks()
    if check in sdpa_checks:
        _, shape, _ = sdpa_checks[check]
        return options.size.includes(shape.size)
    return package_checks.applies(check, options)


def run(selected: list[Check], options: RunOptions) -> Iterator[Result]:
    """Yield one result per selected check."""
    is_quick_on_cpu = options.device == "cpu" and options.size is Size.QUICK
    if is_quick_on_cpu and "OMP_NUM_THREADS" not in os.environ:
        # The tensors are small, so threads on busy cores would only wait for each other.
        torch.set_num_threads(1)
    yield from _run_torch(selected, options)
    kind = _kind(options)
    all_cases = _flash_cases(options.size, kind)
    cases = {check: case for check, case in all_cases.items() if check in selected}
    yield from _run_flash(cases, kind)
    mode: triton_modes.Mode = "native" if options.device == "cuda" else "interpret"
    yield from package_checks.run("attention", selected, options, mode, judge_kernels)


def judge_kernels(
    check: Check,
    call: Call,
    expected,
    answer: triton_modes.CallAnswer,
) -> Result:
    """Fail a call that raised an exception or whose numbers are out of bounds; see compare."""
    if answer.error:
        return Result(check, State.FAILED, ": ".join(answer.error))
    return compare(check, answer.tensors, expected, call.dtype)


def _kind(options: RunOptions) -> str:
    return "gpu" if options.device == "cuda" else "interpreter"


@cache
def _flash_cases(size: Size, only_kind: str = "") -> dict[Check, flash_cases.FlashCase]:
    """Return the cases of flash-attn by check.

    Args:
        size: The size of the run.
        only_kind: The key of _FLASH whose cases are returned; "" for all keys.
    """
    cases = {}
    for kind, (where, dtypes) in _FLASH.items():
        if only_kind not in ("", kind):
            continue
        for case in chain.from_iterable(map(flash_cases.cases, dtypes)):
            if size.includes(case.size):
                check_id = f"flash-attn/{kind}/{case.name}"
                cases[Check(check_id, f"{where}: {case.title}", case.catches)] = case
    return cases


def _run_torch(selected: list[Check], options: RunOptions) -> Iterator[Result]:
    """Run the checks of torch's own backends."""
    bodies = behaviour.checks()
    behaviours = [check for check in selected if check in bodies]
    results = chain(
        sdpa.run(set(selected), options),
        run_each(behaviours, options, bodies),
    )
    kernel_set = sdpa.read_kernel_set(Path(sys.prefix))
    for result in results:
        yield sdpa.skip_if_left_out(result, kernel_set)


def _run_flash(cases: dict[Check, flash_cases.FlashCase], kind: str) -> Iterator[Result]:
    """Run the cases of flash-attn, on the GPU or in Triton's interpreter."""
    if not cases:
        return
    calls = [case.call for case in cases.values()]
    try:
        require(flash_cases.MODULE)
        if kind == "gpu":
            gpu_answers = [triton_modes.answer(call, "cuda") for call in calls]
            backend = f"flash-attn's kernels: {flash.backend()}"
            answers = triton_modes.CallAnswers(backend, gpu_answers)
        else:
            answers = triton_modes.run(calls, "interpret")
    except (CannotRun, ImportError, triton_modes.ChildError) as error:
        for check in cases:
            yield describe_missing_answer(check, error)
        return
    for (check, case), answer in zip(cases.items(), answers.calls, strict=True):
        result = judge(check, case, answer)
        reason = f"{answers.backend}. {result.reason}".strip()
        yield replace(result, reason=reason, seconds=answer.seconds)


def judge(
    check: Check,
    case: flash_cases.FlashCase,
    answer: triton_modes.CallAnswer,
) -> Result:
    """Pass a case if its answer is correct, or if the case allows a refusal and gets one."""
    if answer.error is None:
        return compare(check, answer.tensors, case.expected, case.call.dtype)
    kind, message = answer.error
    if kind in case.refusals:
        return Result(
            check,
            State.PASSED,
            f"Refused, which is correct: {message}",
        )
    return Result(check, State.FAILED, f"{kind}: {message}")


TIER = Tier(checks, run, applies=applies)
