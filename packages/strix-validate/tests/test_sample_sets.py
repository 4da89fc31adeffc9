# SPDX-License-Identifier: BSD-3-Clause
"""Every kernel of the sets `sample`, compiled for other GPUs of the family and executed as they.

With SAMPLE_SETS=1, in an environment with the packages, and with VLLM_SOURCE; minutes for each.
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
    found = json.loads(done.stdout)
    lacking = [name for name in found["looked up"] if not found["executed"].get(name)]
    assert found["looked up"] and not lacking and not found["faults"]
    calls = found["calls"].items()
    assert not {name: said for name, said in calls if said["error"] or said["wrong"]}
    print(
        f"{library} as {gpu}: {len(found['looked up'])} kernels, {len(calls)} calls, "
        f"{sum(said['compared'] for _, said in calls)} of them compared, "
        f"{sum(found['executed'].values())} wave-instructions"
    )
