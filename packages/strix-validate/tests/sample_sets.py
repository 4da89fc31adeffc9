# SPDX-License-Identifier: BSD-3-Clause
"""Execute the calls of a library's set `sample` as on the GPU $gpu_arch, with every candidate tile.

    python sample_sets.py LIBRARY

The program prints JSON: the kernels that the calls looked up; the wave-instructions of each
executed kernel; faults in the kernels' files; and for each call its error, whether its results were
compared, and what is wrong with these results.

The inputs of a call with expected results are random numbers. The inputs of all other calls are
zeros, because several programs of such a call may write to one place. This is no fault if the
numbers are equal. If a launch has too many workgroups, only the first ones are executed, and the
results of its call are not compared.
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
#: Maximum number of workgroups of a launch that are executed: few for sageattention, whose
#: workgroups take long, and many for liger and aiter, whose workgroups are short.
MAX_WORKGROUPS = dict.fromkeys(SETS, 32) | {"sageattention": 2, "liger-kernel": 2048}
if has_aiter():
    MAX_WORKGROUPS["flash-attn"] = 2048


class Executed:
    """Executes and records launches. `are_complete` tells of each launch whether it ran whole."""

    def __init__(self, max_workgroups: int) -> None:
        self.max_workgroups = max_workgroups
        self.instructions: dict[str, int] = {}
        self.faults: dict[str, list[str]] = {}
        self.are_complete: list[bool] = []

    def __call__(self, launch: stand_in.InterceptedLaunch) -> None:
        name = launch.compiled.name
        asm = launch.compiled.asm
        lds = launch.compiled.metadata.shared
        kernel = modes.CompiledKernel(name, asm["hsaco"], asm["amdgcn"], lds)
        if faults := kernels.find_faults(kernels.inspect(kernel)):
            self.faults[name] = faults
        if launch.is_warmup:
            return
        grid = launch.workgroups()
        self.are_complete.append(math.prod(grid) <= self.max_workgroups)
        while math.prod(grid) > self.max_workgroups:
            largest = max(grid)
            grid = tuple(largest // 2 if x == largest else x for x in grid)
        done, _ = emulation.execute(replace(launch, grid=grid))
        key = f"{name} {_base32(launch.compiled.hash)}"
        self.instructions[key] = self.instructions.get(key, 0) + done.executed

    def make(self, deferred: DeferredCall) -> dict:
        self.are_complete.clear()
        call, expected = make(deferred.name, Case(deferred.build, "", deferred.dtype))
        # The call is copied, because some calls change the tensors that give the expected results.
        call = copy.deepcopy(replace(call, **deferred.change)) if expected else deferred
        answer = modes.answer(call, "cpu")
        if answer.error or not expected or not all(self.are_complete):
            return {"error": answer.error, "compared": False, "wrong": ""}

        def select_expected(kind) -> dict:
            return {name: x for name, x in expected(kind).items() if name in answer.tensors}

        result = compare(Check("", "", ""), answer.tensors, select_expected, call.dtype)
        return {"error": None, "compared": bool(result.measured), "wrong": result.reason}


def divide_rows() -> None:
    """Have liger divide the rows of a norm among workgroup processors, as it does on a GPU.

    Without a GPU, liger gives all 32,768 rows to one workgroup, which takes over five CPU minutes.
    """
    from liger_kernel.ops import rms_norm

    source = inspect.getsource(rms_norm.rms_norm_backward)
    one_processor = "sm_count = 1\n"
    assert one_processor in source
    exec(source.replace(one_processor, f"sm_count = {GPUS[TARGET]}\n"), vars(rms_norm))


def main(library: str) -> None:
    looked_up: set[str] = set()
    executed = Executed(MAX_WORKGROUPS[library])
    calls = list(SETS[library]())
    stand_in.install(all_candidates=True)
    stand_in.watch(lambda lookup: looked_up.add(f"{lookup.name} {lookup.key}"))
    stand_in.intercept(executed)
    calls[0].prepare()
    if library == "liger-kernel":
        divide_rows()
    results = {call.name: executed.make(call) for call in calls}
    output = {
        "looked up": sorted(looked_up),
        "executed": executed.instructions,
        "faults": executed.faults,
        "calls": results,
    }
    print(json.dumps(output))


if __name__ == "__main__":
    main(sys.argv[1])
