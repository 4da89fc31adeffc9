# SPDX-License-Identifier: BSD-3-Clause
"""Run Triton's unmodified AMD driver on the emulated device, see device_triton.py."""

import json
import sys
from pathlib import Path

from device_support import find_compiler, find_library, run_on_device


def test_tritons_driver_computes(tmp_path: Path) -> None:
    find_compiler()  # Triton compiles its launcher
    done = run_on_device(
        [sys.executable, Path(__file__).with_name("device_triton.py")],
        "--log",
        STRIX_EMULATE_HIP=str(find_library(tmp_path / "lib")),
        TRITON_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout)
    assert results.pop("target") == ["gfx1151", 32]
    assert results.pop("configurations") == 2
    assert results.pop("pointers") == results.pop("autotuned") == 0
    bounds = {"softmax": 1e-7, "matmul": 2e-5}
    assert results.keys() == bounds.keys()
    assert all(results[name] < bound for name, bound in bounds.items()), results
    # Three kernels are launched once. The autotuned kernel is launched three times for each of two
    # configurations, and once more.
    assert done.stderr.count("wave-instructions") >= 3 + 2 * 3 + 1
