# SPDX-License-Identifier: BSD-3-Clause
"""Compile each kernel of the sets `sample` for other GPUs, and execute it as on those GPUs.

The tests run only with SAMPLE_SETS=1. A library's set needs the library to be installed, except
that vLLM's set needs VLLM_SOURCE instead. Each set takes minutes.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NEEDS = {
    "flash-attn": "flash_attn",
    "vllm": "",
    "fla-core": "fla",
    "liger-kernel": "liger_kernel",
    "sageattention": "sageattention",
}


@pytest.mark.skipif(not os.environ.get("SAMPLE_SETS"), reason="SAMPLE_SETS is not set")
@pytest.mark.parametrize("gpu", ["gfx1150", "gfx1100"])
@pytest.mark.parametrize("library", NEEDS)
def test_every_kernel_of_a_sample_set(library: str, gpu: str) -> None:
    if NEEDS[library] and importlib.util.find_spec(NEEDS[library]) is None:
        pytest.skip(f"{NEEDS[library]} is not installed")
    if library == "vllm" and not os.environ.get("VLLM_SOURCE"):
        pytest.skip("VLLM_SOURCE is not set")
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("sample_sets.py"), library],
        env=os.environ | {"gpu_arch": gpu},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    executed = output["executed"]
    missing_kernels = [name for name in output["looked up"] if not executed.get(name)]
    assert output["looked up"]
    assert not missing_kernels
    assert not output["faults"]
    calls = output["calls"]
    failed_calls = {name: x for name, x in calls.items() if x["error"] or x["wrong"]}
    assert not failed_calls
    print(
        f"{library} as {gpu}: {len(output['looked up'])} kernels, {len(calls)} calls, "
        f"{sum(x['compared'] for x in calls.values())} of them compared, "
        f"{sum(executed.values())} wave-instructions"
    )
