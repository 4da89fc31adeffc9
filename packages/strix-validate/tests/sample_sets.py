# SPDX-License-Identifier: BSD-3-Clause
"""Execute the calls of a set `sample`, with every candidate, as the GPU that gpu_arch names.

    python sample_sets.py LIBRARY

Prints, as JSON, which kernels the calls looked up; the wave-instructions of those that were
executed; what is wrong with their files; and of each call its error, whether its numbers were
compared, and what is wrong with them. They are random, but zeros where nothing is expected: such
calls write to one place from several programs. Of a launch of too many workgroups the first
ones are executed, and its call is not compared.
"""

import copy
import inspect
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

from strix_validate import GPUS, TARGET
from strix_validate.checks import Check
from strix_validate.numerics.comparison import compare
from strix_validate.precompiled.flash_calls import FLASH_SETS, has_aiter
from strix_validate.precompiled.vllm_calls import vllm_set
from strix_validate.tiers import kernels
from strix_validate.triton import emulation, modes, stand_in
from strix_validate.triton.call import DeferredCall, defer
from strix_validate.triton.cases import Case, make
from strix_validate.triton_packages import fla, liger, sage
from triton.runtime.cache import _base32

SETS = {
    "flash-attn": lambda: FLASH_SETS["sample"](),
    "vllm": lambda: vllm_set("sample", Path(os.environ["VLLM_SOURCE"])),
    "fla-core": lambda: map(defer, *zip(*fla.SHIPPED["sample"], strict=True)),
    "liger-kernel": lambda: map(defer, *zip(*liger.SHIPPED["sample"], strict=True)),
    "sageattention": lambda: map(defer, *zip(*sage.SHIPPED["sample"], strict=True)),
}
#: Workgroups of a launch; sageattention's are long, liger's and aiter's short.
MOST = dict.fromkeys(SETS, 32) | {"sageattention": 2, "liger-kernel": 2048}
if has_aiter():
    MOST["flash-attn"] = 2048


class Executed:
    """What was executed; whole: of the call that runs, whether each launch was."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.instructions: dict[str, int] = {}
        self.faults: dict[str, list[str]] = {}
        self.whole: list[bool] = []

    def __call__(self, launch: stand_in.InterceptedLaunch) -> None:
        name, asm = launch.compiled.name, launch.compiled.asm
        lds = launch.compiled.metadata.shared
        about = modes.CompiledKernel(name, asm["hsaco"], asm["amdgcn"], lds)
        if wrong := kernels.find_faults(kernels.inspect(about)):
            self.faults[name] = wrong
        if launch.is_warmup:
            return
        grid = launch.workgroups()
        self.whole.append(math.prod(grid) <= self.most)
        while math.prod(grid) > self.most:
            grid = tuple(x // 2 if x == max(grid) else x for x in grid)
        done, _ = emulation.execute(replace(launch, grid=grid))
        key = f"{name} {_base32(launch.compiled.hash)}"
        self.instructions[key] = self.instructions.get(key, 0) + done.executed

    def make(self, each: DeferredCall) -> dict:
        self.whole.clear()
        call, expected = make(each.name, Case(each.build, "", each.dtype))
        # a copy: some change their tensors, from which the expected ones are computed
        call = copy.deepcopy(replace(call, **each.change)) if expected else each
        answer = modes.answer(call, "cpu")
        if answer.error or not expected or not all(self.whole):
            return {"error": answer.error, "compared": False, "wrong": ""}

        def returned(kind) -> dict:
            return {name: x for name, x in expected(kind).items() if name in answer.tensors}

        result = compare(Check("", "", ""), answer.tensors, returned, call.dtype)
        return {"error": None, "compared": bool(result.measured), "wrong": result.reason}


def divide_rows() -> None:
    """Have liger divide a norm's rows among the GPU's processors, as it does where it finds one.

    Elsewhere one workgroup does all of them, 32,768 in more than five CPU minutes.
    """
    from liger_kernel.ops import rms_norm

    source = inspect.getsource(rms_norm.rms_norm_backward)
    alone = "sm_count = 1\n"
    assert alone in source
    exec(source.replace(alone, f"sm_count = {GPUS[TARGET]}\n"), vars(rms_norm))


def main(library: str) -> None:
    looked_up: set[str] = set()
    executed, calls = Executed(MOST[library]), list(SETS[library]())
    stand_in.install(all_candidates=True)
    stand_in.watch(lambda lookup: looked_up.add(f"{lookup.name} {lookup.key}"))
    stand_in.intercept(executed)
    calls[0].prepare()
    if library == "liger-kernel":
        divide_rows()
    said = {call.name: executed.make(call) for call in calls}
    found = {"looked up": sorted(looked_up), "executed": executed.instructions}
    print(json.dumps(found | {"faults": executed.faults, "calls": said}))


if __name__ == "__main__":
    main(sys.argv[1])
