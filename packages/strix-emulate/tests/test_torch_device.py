# SPDX-License-Identifier: BSD-3-Clause
"""Any build of torch can use the memory of the emulated device, see device_torch.py."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from device_support import find_compiler, find_library, run_on_device
from strix_emulate import torch_device
from strix_emulate.errors import EmulatorError

torch = pytest.importorskip("torch")
SUITES = Path(__file__).resolve().parents[1] / "suites"


def run(folder: Path, *arguments: str):
    find_compiler()
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler")
    return run_on_device(
        [sys.executable, Path(__file__).with_name("device_torch.py"), *arguments],
        "--log",
        STRIX_EMULATE_HIP=str(find_library(folder / "lib")),
        TRITON_CACHE_DIR=str(folder / "cache"),
        XDG_CACHE_HOME=str(folder / "compiled"),
    )


def test_kernels_compute_on_torchs_tensors(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = json.loads(done.stdout)
    assert answers["equal"] == [True, True, True]
    # The second result is from a custom operator.
    assert answers["device"][:2] == [True, True]
    assert answers["milliseconds"] > 0
    assert answers["arrays"] == [True] * 5
    assert 0 < answers["memory"][0] < answers["memory"][1] == answers["total_memory"]
    assert answers["accelerator"]
    assert answers["pinned"]
    assert answers["registered"] == [True, True]
    assert answers["cleared"]
    assert answers["drawn"]
    assert done.stderr.count("wave-instructions") == 9


def test_a_kernel_that_leaves_its_tensor_traps(tmp_path: Path) -> None:
    """The device knows the ends of tensors, because tensors are in allocations of the device."""
    done = run(tmp_path, "outside")
    assert done.returncode != 0
    assert "trap in add" in done.stderr
    assert "bounds" in done.stderr


def test_the_capability_is_that_of_the_target(tmp_path: Path) -> None:
    code = (
        "from strix_emulate import torch_device\ntorch_device.install()\nimport torch\n"
        "properties = torch.cuda.get_device_properties(0)\n"
        "print(properties.major, properties.minor, *torch.cuda.get_device_capability())"
    )
    variables = {
        "STRIX_EMULATE_HIP": str(find_library(tmp_path / "lib")),
        "XDG_CACHE_HOME": str(tmp_path / "compiled"),
    }
    for target, version in (("gfx1151", "11 5"), ("gfx1100", "11 0")):
        done = run_on_device([sys.executable, "-c", code], "--target", target, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout == f"{version} {version}\n"


@pytest.mark.parametrize("plugin", ["strix_emulate.torch_device", "plugin"])
def test_a_conftest_may_use_the_device(tmp_path: Path, plugin: str) -> None:
    """pytest loads a conftest.py, which may ask for the device, before it configures plugins."""
    find_compiler()
    if not SUITES.is_dir():
        pytest.skip("the runner of other projects' suites is not here")
    (tmp_path / "conftest.py").write_text("import torch\ntorch.cuda.get_device_properties(0)\n")
    (tmp_path / "test_nothing.py").write_text("def test_nothing(): pass\n")
    done = run_on_device(
        [sys.executable, "-m", "pytest", "-q", "-p", plugin, f"--rootdir={tmp_path}", tmp_path],
        STRIX_EMULATE_HIP=str(find_library(tmp_path / "lib")),
        XDG_CACHE_HOME=str(tmp_path / "compiled"),
        PYTHONPATH=os.pathsep.join([str(SUITES), os.environ.get("PYTHONPATH", "")]),
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_program_of_no_device_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRIX_EMULATE_PYTHON", raising=False)
    with pytest.raises(EmulatorError, match="strix-emulate device"):
        torch_device.install()


def test_what_does_not_compile_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(EmulatorError, match="cannot compile the allocator"):
        torch_device.library(torch)
