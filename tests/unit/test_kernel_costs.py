# SPDX-License-Identifier: BSD-3-Clause
"""The package test that compares the cost of packaged kernels with a committed list."""

import copy
import csv
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support import conda_packages
from support.project import CHECKOUT, drive
from support.recipe_checks import load, run

from forge.errors import ForgeError
from forge.recipes import kernel_tables

kernel_costs = load("checks", "kernel_costs")
PACKAGES = ("flash-attn", "triton-packages", "vllm")
KERNEL = {
    "name": "attn_fwd",
    "types": {"Q": "*bf16:16", "stride_qm": "i32:16"},
    "constants": {"IS_CAUSAL": "True", "BLOCK_M": "128", "BLOCK_N": "64", "ALIBI": "None"},
    "options": {"num_warps": 8, "num_stages": 1, "waves_per_eu": 2},
    "cost": {
        "vgprs": 248,
        "sgprs": 60,
        "vgpr_spills": 0,
        "sgpr_spills": 0,
        "scratch": 0,
        "lds": 32768,
        "waves": 5,
        "wmma": 128,
    },
}


def write_package(folder: Path, *kernels: dict) -> Path:
    """Write a kernels.json with these kernels."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "kernels.json"
    file.write_text(json.dumps({"kernels": {str(i): k for i, k in enumerate(kernels)}}))
    return file


def check(tmp_path: Path, *kernels: dict) -> tuple[int, str]:
    """Compare these kernels with a list of KERNEL only.

    Returns:
        The exit status and the output.
    """
    kernel_list = tmp_path / "kernels.tsv"
    script = CHECKOUT / "recipes/checks/kernel_costs.py"
    old_package = write_package(tmp_path / "old", KERNEL)
    assert run(script, "write", kernel_list, old_package).returncode == 0
    done = run(script, "check", kernel_list, write_package(tmp_path / "new", *kernels))
    return done.returncode, done.stdout


def change_cost(**cost: int) -> dict:
    """Return KERNEL with other costs."""
    kernel = copy.deepcopy(KERNEL)
    kernel["cost"] |= cost
    return kernel


def change_tile(rows: int, warps: int, **cost: int) -> dict:
    """Return KERNEL with another tile and other costs."""
    kernel = change_cost(**cost)
    kernel["constants"] |= {"BLOCK_M": str(rows)}
    kernel["options"] |= {"num_warps": warps}
    return kernel


def test_the_same_kernels_pass(tmp_path: Path) -> None:
    status, output = check(tmp_path, KERNEL)
    assert status == 0
    file = tmp_path / "kernels.tsv"
    assert f"kernels that cost more than in {file}, and problems without a kernel: 0\n" in output
    assert output.endswith(f"kernels whose problem is not in {file}: 0\n")


def test_cheaper_kernels_pass(tmp_path: Path) -> None:
    assert check(tmp_path, change_cost(vgprs=200, lds=0, waves=7, wmma=160))[0] == 0


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        ({"scratch": 4}, "scratch 0 -> 4"),
        ({"vgpr_spills": 1}, "vgpr_spills 0 -> 1"),
        ({"sgpr_spills": 1}, "sgpr_spills 0 -> 1"),
        ({"vgprs": 256}, "vgprs 248 -> 256"),
        ({"sgprs": 61}, "sgprs 60 -> 61"),
        ({"lds": 32769}, "lds 32768 -> 32769"),
        ({"waves": 4}, "waves 5 -> 4"),
        ({"wmma": 127}, "wmma 128 -> 127"),
    ],
)
def test_each_cost_is_compared(tmp_path: Path, cost: dict[str, int], message: str) -> None:
    status, output = check(tmp_path, change_cost(**cost))
    assert status == 1
    configuration = "BLOCK_M=128 BLOCK_N=64 num_stages=1 num_warps=8 waves_per_eu=2"
    assert f"attn_fwd {configuration}: {message}" in output


def test_an_old_tile_fails(tmp_path: Path) -> None:
    """If a patch brings back one old tile, the check reports both tiles and both costs."""
    status, output = check(tmp_path, change_tile(64, 4, vgpr_spills=34, scratch=140, vgprs=256))
    assert status == 1
    assert "attn_fwd BLOCK_M=64 BLOCK_N=64" in output
    assert "listed: BLOCK_M=128 BLOCK_N=64" in output
    assert "scratch 0 -> 140, vgpr_spills 0 -> 34, vgprs 248 -> 256" in output


def test_a_cheaper_tile_passes(tmp_path: Path) -> None:
    assert check(tmp_path, change_tile(64, 8, vgprs=128))[0] == 0


def test_a_lost_kernel_fails(tmp_path: Path) -> None:
    status, output = check(tmp_path, KERNEL | {"name": "other"})
    assert status == 1
    assert "and problems without a kernel: 1\n" in output
    assert "attn_fwd: no kernel for IS_CAUSAL=True" in output
    assert output.endswith("kernels.tsv: 1\n")


def test_an_unlisted_problem_is_counted_and_passes(tmp_path: Path) -> None:
    unlisted = copy.deepcopy(KERNEL) | {"constants": {"IS_CAUSAL": "False", "BLOCK_M": "128"}}
    unlisted["cost"] = KERNEL["cost"] | {"scratch": 500}
    status, output = check(tmp_path, KERNEL, unlisted)
    assert status == 0 and output.endswith("kernels.tsv: 1\n")


def test_two_packages_are_compared(tmp_path: Path) -> None:
    old, new = (
        write_package(tmp_path / "a", KERNEL),
        write_package(tmp_path / "b", change_cost(lds=0)),
    )
    script = CHECKOUT / "recipes/checks/kernel_costs.py"
    assert run(script, "compare", old, new).returncode == 0
    done = run(script, "compare", new, old)
    assert done.returncode == 1 and "lds 0 -> 32768" in done.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_a_list_is_committed(package: str) -> None:
    """Each list is sorted as by the action `write`, and has kernels with WMMA instructions."""
    file = CHECKOUT / f"recipes/{package}-kernels-gfx1151/kernels.tsv"
    kernels = kernel_costs.read_list(file)
    assert kernels == sorted(set(kernels))
    assert any(kernel.cost("wmma") for kernel in kernels)
    with file.open(newline="") as stream:
        assert next(csv.reader(stream, delimiter="\t"))[3:] == list(kernel_costs.COSTS)


def test_no_listed_attention_kernel_of_flash_attn_spills_forward() -> None:
    file = CHECKOUT / "recipes/flash-attn-kernels-gfx1151/kernels.tsv"
    forward = [k for k in kernel_costs.read_list(file) if "fwd" in k.name]
    assert len(forward) > 10
    assert [k for k in forward if k.cost("scratch")] == []


def test_damaged_lists(tmp_path: Path) -> None:
    kernel_list = tmp_path / "kernels.tsv"
    package = write_package(tmp_path / "p", KERNEL)
    script = CHECKOUT / "recipes/checks/kernel_costs.py"

    def check_damaged(change: Callable[[str], str]) -> str:
        assert run(script, "write", kernel_list, package).returncode == 0
        kernel_list.write_text(change(kernel_list.read_text()))
        done = run(script, "check", kernel_list, package)
        assert done.returncode != 0
        return done.stdout + done.stderr

    assert "kernels.tsv" in check_damaged(lambda text: text.replace("248", "many"))
    assert "kernels.tsv" in check_damaged(lambda text: text.replace("\t128\n", "\n"))


def test_the_page_is_current_and_says_so_if_not() -> None:
    lists = sorted(CHECKOUT.glob("recipes/*/kernels.tsv"))
    text = (CHECKOUT / kernel_tables.PAGE).read_text()
    assert kernel_tables.with_tables(text, lists) == text
    stale = text.replace("`attn_fwd`", "`attn_bwd`")
    assert stale != text and kernel_tables.with_tables(stale, lists) == text
    with pytest.raises(ForgeError, match="no table below '## vllm-kernels-gfx1151'"):
        kernel_tables.with_tables(text.replace("## vllm-kernels-gfx1151", "## another"), lists)


def write_channel(folder: Path, *kernels: dict, build: int = 0) -> Path:
    """Write a package of kernels into a channel."""
    name = "some-kernels-gfx1151"
    content = write_package(folder / "list", *kernels).read_bytes()
    member = conda_packages.file(f"share/triton-kernels/{name}/kernels.json", content)
    conda_packages.package(
        folder / "noarch",
        [member],
        name,
        dist=f"{name}-1-{build}",
        build=str(build),
        build_number=build,
    )
    return folder


def test_two_channels_are_compared(tmp_path: Path) -> None:
    old = write_channel(tmp_path / "old", KERNEL)
    new = write_channel(tmp_path / "new", change_cost(scratch=64))
    done = drive(CHECKOUT, "compare", str(old), str(new))
    assert done.returncode == 1
    assert "some-kernels-gfx1151: some-kernels-gfx1151-1-0.conda compared with" in done.stdout
    assert "scratch 0 -> 64" in done.stdout
    assert drive(CHECKOUT, "compare", str(new), str(old)).returncode == 0
    # The newest build counts, and not the file that was copied last.
    write_channel(new, KERNEL, build=10)
    (file,) = new.glob("*/*-1-10.conda")
    os.utime(file, (0, 0))
    write_channel(new, change_cost(scratch=64), build=9)
    assert drive(CHECKOUT, "compare", str(old), str(new)).returncode == 0


def test_channels_without_kernels(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    old = write_channel(tmp_path / "old", KERNEL)
    done = drive(CHECKOUT, "compare", str(old), str(tmp_path / "empty"))
    assert done.returncode == 2
    assert "have no package of kernels in common" in done.stderr
