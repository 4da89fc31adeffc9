# SPDX-License-Identifier: BSD-3-Clause
"""Execute gfx1151 code objects of flash-attn, vLLM and other packages under emulation.

This needs no GPU. strix-emulate executes the instructions that the real call path compiles, in the
forward pass and, where a call has one, in the backward pass. If a check passes, the results were
correct under emulation. This proves nothing about timing or about a real gfx1151.
"""

from collections.abc import Iterator
from dataclasses import replace

from strix_validate.checks import Check, Result, RunOptions, State
from strix_validate.numerics.comparison import compare
from strix_validate.tiers import Tier
from strix_validate.triton import modes as triton_modes
from strix_validate.triton.call import Call
from strix_validate.triton_packages import package_checks


def checks() -> list[Check]:
    """List one check for each call."""
    return package_checks.checks("emulated")


def run(selected: list[Check], options: RunOptions) -> Iterator[Result]:
    """Yield one result per selected check.

    This needs libLLVM, triton, and the checked packages or vLLM's source. It needs no GPU.
    """
    yield from package_checks.run("emulated", selected, options, "emulate", judge)


def judge(
    check: Check,
    call: Call,
    expected,
    answer: triton_modes.CallAnswer,
) -> Result:
    """Fail a call that raised an exception, returned a wrong number, or executed no kernel.

    LLVM can drop a wait that a barrier needs. A check is skipped if its call is correct only after
    the emulator has put such waits back. skips.toml names the checks for which this is expected.
    """
    if answer.error:
        return Result(check, State.FAILED, ": ".join(answer.error))
    if not answer.executed:
        return Result(check, State.FAILED, "no kernel was executed")
    result = compare(check, answer.tensors, expected, call.dtype)
    kernels = {}
    seconds = 0.0
    lost_waits = []
    for number, kernel in enumerate(answer.executed):
        kernels[f"{number}-{kernel.name}"] = {
            "code": kernel.code,
            "wave_instructions": kernel.wave_instructions,
        }
        seconds += kernel.seconds
        if kernel.lost_wait:
            lost_waits.append(kernel.lost_wait)
    if lost_waits and result.state is State.PASSED:
        reason = f"LLVM dropped a wait. {lost_waits[0]}"
        result = replace(result, state=State.SKIPPED, reason=reason)
    measured = result.measured | {"kernels": kernels}
    return replace(result, measured=measured, seconds=seconds)


TIER = Tier(checks, run)
