# SPDX-License-Identifier: BSD-3-Clause
"""flash-attn's gfx1151 code objects executed under emulation, on any machine.

The shipped instructions are executed by strix-emulate, a package of its own, in a child process,
because it takes the place of Triton's device. What passes here was executed under emulation; no
gfx1151 machine has said so.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator

from strix_validate.checks import Check, Options, Result, State

_WHY = (
    "a code object whose numbers are wrong although its source is right, a missing wait or a race "
    "between waves: https://github.com/ROCm/aotriton/issues/54"
)
_NOTHING_CHECKED = 3


def _installed() -> bool:
    return importlib.util.find_spec("strix_emulate") is not None


def checks() -> list[Check]:
    """One for each case of strix-emulate; a single one where that is not installed."""
    if not _installed():
        return [Check("emulated", "flash-attn executed under emulation", _WHY)]
    from strix_emulate.attention import cases

    return [
        Check(f"emulated/{case.name}", f"flash-attn executed under emulation: {case.name}", _WHY)
        for case in cases()
    ]


def run(wanted: list[Check], options: Options) -> Iterator[Result]:
    """See strix_validate.tiers. Needs strix_emulate, flash_attn and a libLLVM, and no GPU."""
    del options
    if not wanted:
        return
    if not _installed():
        yield from (Result(c, State.SKIPPED, "strix_emulate is not installed") for c in wanted)
        return
    names = [check.id.removeprefix("emulated/") for check in wanted]
    command = [sys.executable, "-O", "-m", "strix_emulate", "attention", "--json"]
    command += ["--only", ",".join(names)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stderr.strip().rpartition("\n")[2]
    if done.returncode == _NOTHING_CHECKED:
        yield from (Result(check, State.SKIPPED, said) for check in wanted)
        return
    try:
        answers = {answer["case"]["name"]: answer for answer in json.loads(done.stdout)}
    except ValueError:
        fault = f"strix-emulate ended with {done.returncode}: {said}"
        yield from (Result(check, State.FAILED, fault) for check in wanted)
        return
    for check, name in zip(wanted, names, strict=True):
        if name in answers:
            yield judge(check, answers[name])


def judge(check: Check, answer: dict) -> Result:
    """Failed by a trap, by an error above its bound, or if no kernel was executed."""
    pairs = answer["errors"].items()
    faults = [f"{tensor}: {error:.2e} > {bound:.2e}" for tensor, (error, bound) in pairs
              if not error <= bound]  # fmt: skip
    faults += [answer["fault"]] if answer["fault"] else []
    if not (answer["kernels"] and answer["errors"]):
        faults.append("no kernel was executed")
    measured = {tensor: {"error": error, "bound": bound} for tensor, (error, bound) in pairs}
    measured["kernels"] = {
        f"{number}-{name}": {"code": digest, "wave_instructions": executed}
        for number, (name, digest, executed, _) in enumerate(answer["kernels"])
    }
    seconds = sum(kernel[3] for kernel in answer["kernels"])
    state = State.FAILED if faults else State.PASSED
    return Result(check, state, "; ".join(faults), measured, seconds=seconds)
