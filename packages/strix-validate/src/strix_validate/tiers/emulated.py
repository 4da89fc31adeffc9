# SPDX-License-Identifier: BSD-3-Clause
"""gfx1151 code objects of flash-attn and vLLM, executed under emulation on any machine.

strix-emulate executes the instructions that the real call path compiles, forward and backward. A
pass means "executed under emulation"; it says nothing about timing or a real gfx1151.
"""

from collections.abc import Iterator
from dataclasses import replace

from strix_validate.checks import Check, Result, RunOptions, State
from strix_validate.numerics.comparison import compare
from strix_validate.triton import modes as triton_modes
from strix_validate.triton.call import Call
from strix_validate.triton_packages import package_checks


def checks() -> list[Check]:
    """List one check for each call."""
    return package_checks.checks("emulated")


def run(wanted: list[Check], options: RunOptions) -> Iterator[Result]:
    """See strix_validate.tiers. Needs a package or vLLM's source, a libLLVM, and no GPU."""
    yield from package_checks.run("emulated", wanted, options, "emulate", judge)


def judge(check: Check, call: Call, expected, answer: triton_modes.CallAnswer) -> Result:
    """Fail a call for an exception, such as a trap, a wrong number, or if no kernel was executed.

    Skipped if all is correct once the waits are back that LLVM dropped; skips.toml says where that
    is known.
    """
    if answer.error:
        return Result(check, State.FAILED, ": ".join(answer.error))
    if not answer.executed:
        return Result(check, State.FAILED, "no kernel was executed")
    result = compare(check, answer.tensors, expected, call.dtype)
    kernels = {
        f"{number}-{done.name}": {"code": done.code, "wave_instructions": done.wave_instructions}
        for number, done in enumerate(answer.executed)
    }
    seconds = sum(done.seconds for done in answer.executed)
    lost = [done.lost_wait for done in answer.executed if done.lost_wait]
    if lost and result.state is State.PASSED:
        result = replace(result, state=State.SKIPPED, reason=f"LLVM dropped a wait. {lost[0]}")
    return replace(result, measured=result.measured | {"kernels": kernels}, seconds=seconds)
