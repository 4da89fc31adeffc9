# SPDX-License-Identifier: BSD-3-Clause
"""The package test that compares the cost of AOTriton's images with a committed list."""

import json
from pathlib import Path

import pytest
from support import aotriton_tree
from support.project import CHECKOUT
from support.recipe_checks import load, run

pytest.importorskip("elftools", reason="the package checks read ELF files with pyelftools")

kernel_costs = load("checks", "kernel_costs")
SCRIPT = CHECKOUT / "recipes/aotriton/image_costs.py"
TENSOR = "\uff0a"
PROBLEM = "bf16@16_64_F_F_3_0"
FACTS = {
    "vgprs": 248,
    "sgprs": 60,
    "vgpr_spills": 0,
    "sgpr_spills": 0,
    "scratch": 0,
    "lds": 4096,
    "waves_per_simd": {"registers": 5, "lds": 16, "bound": 5},
    "classes": {"wmma": 40, "valu": 900},
}
# A mock of the functions of strix_emulate that image_costs.py calls. The code of a kernel is the
# JSON of the facts that describe_kernel returns.
EMULATOR = """\
import json, os
from check_images import kernels
class DisassemblerError(Exception):
    pass
def find_disassembler():
    if os.environ.get("NO_LLVM"):
        raise DisassemblerError("install libLLVM")
def load(path):
    return [json.loads(kernel.code) for kernel in kernels(path.read_bytes())]
def decode_kernel(kernel):
    return [kernel]
def describe_kernel(kernel, instructions):
    return kernel if instructions else kernel | {"classes": {}}
"""


@pytest.fixture
def emulator(tmp_path: Path) -> Path:
    """A folder with the mock of strix_emulate."""
    file = tmp_path / "stand-in/strix_emulate.py"
    file.parent.mkdir()
    file.write_text(EMULATOR)
    return tmp_path / "stand-in"


def write_image(folder: Path, tile: str = "2_2_32_32_True_1", problem: str = PROBLEM, **facts):
    """Write an image of one forward kernel below the folder; return the folder."""
    name = f"attn_fwd-Sig-F__{TENSOR}{problem}__P__{tile}__CO__wave2_warp4_stg1--Arch_gfx1151"
    file = folder / f"amd-gfx115x/flash/attn_fwd/FONLY__{TENSOR}{problem}___gfx1151.aks2"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(aotriton_tree.image((name, 4096, json.dumps(FACTS | facts).encode())))
    return folder


def check(tmp_path: Path, emulator: Path, images: Path, **environment: str) -> tuple[int, str]:
    """Compare images with a list of one kernel, whose cost is that of FACTS.

    Returns:
        The exit status and the output.
    """
    kernel_list = tmp_path / "kernels.tsv"
    done = run(SCRIPT, "write", kernel_list, write_image(tmp_path / "old"), path=emulator)
    assert done.returncode == 0, done.stderr
    done = run(SCRIPT, "check", kernel_list, images, path=emulator, **environment)
    return done.returncode, done.stdout + done.stderr


def test_what_is_listed(tmp_path: Path, emulator: Path) -> None:
    status, output = check(tmp_path, emulator, tmp_path / "old")
    assert status == 0
    assert output.splitlines()[2] == "0 images are not in the list and were not measured"
    (kernel,) = kernel_costs.read_list(tmp_path / "kernels.tsv")
    assert kernel.name == "attn_fwd D64" and kernel.problem == PROBLEM
    assert kernel.configuration == "2_2_32_32_True_1 wave2_warp4_stg1"
    assert kernel.costs == (248, 60, 0, 0, 0, 4096, 5, 40)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"scratch": 24, "vgpr_spills": 5}, "scratch 0 -> 24, vgpr_spills 0 -> 5"),
        ({"waves_per_simd": {"registers": 4, "lds": 16, "bound": 4}}, "waves 5 -> 4"),
        ({"classes": {"valu": 900}}, "wmma 40 -> 0"),
    ],
)
def test_a_dearer_kernel_fails(tmp_path: Path, emulator: Path, facts: dict, message: str) -> None:
    status, output = check(tmp_path, emulator, write_image(tmp_path / "new", **facts))
    assert status == 1
    assert f"attn_fwd D64 2_2_32_32_True_1 wave2_warp4_stg1: {message}; for {PROBLEM}" in output


def test_a_dearer_tile_fails(tmp_path: Path, emulator: Path) -> None:
    images = write_image(tmp_path / "new", tile="2_2_64_32_False_1", scratch=24)
    status, output = check(tmp_path, emulator, images)
    assert status == 1
    assert "2_2_64_32_False_1 wave2_warp4_stg1 (listed: 2_2_32_32_True_1" in output


def test_a_lost_image_fails(tmp_path: Path, emulator: Path) -> None:
    images = write_image(tmp_path / "new", problem="fp16@16_64_F_F_3_0")
    status, output = check(tmp_path, emulator, images)
    assert status == 1 and f"attn_fwd D64: no kernel for {PROBLEM}" in output


def test_other_images_are_not_counted(tmp_path: Path, emulator: Path) -> None:
    """Images whose problem is not in the list are not compared, but the output has their number.

    The list has the problems of the smallest set of kernels, and a package may have a larger set.
    """
    images = write_image(tmp_path / "new")
    write_image(images, problem="fp32@16_64_F_F_3_0", scratch=4000)
    status, output = check(tmp_path, emulator, images)
    assert status == 0 and "1 images are not in the list and were not measured" in output


def test_without_a_disassembler(tmp_path: Path, emulator: Path) -> None:
    """All costs except matrix instructions are compared, and the output says so."""
    images = write_image(tmp_path / "new")
    status, output = check(tmp_path, emulator, images, NO_LLVM="1")
    assert status == 0 and output.startswith("SKIPPED, matrix instructions were not counted: ")
    images = write_image(tmp_path / "new", scratch=24)
    status, output = check(tmp_path, emulator, images, NO_LLVM="1")
    assert status == 1 and "scratch 0 -> 24; for" in output


def test_the_committed_list() -> None:
    """The list is sorted as by the action `write`. Attention kernels have WMMA instructions."""
    kernels = kernel_costs.read_list(CHECKOUT / "recipes/aotriton/kernels.tsv")
    assert kernels == sorted(set(kernels))
    attention = [kernel for kernel in kernels if "preprocess" not in kernel.name]
    assert attention and all(kernel.cost("wmma") for kernel in attention)
