# SPDX-License-Identifier: BSD-3-Clause
"""Package tests use the GPU where KFD names a gfx1151, and nowhere else."""

import re
from pathlib import Path

import pytest
from support.recipe_checks import RECIPES

from checks import gpu
from checks.gpu import why_skipped

CPU, GFX1151, GFX1100 = (f"simd_count 1\ngfx_target_version {v}\n" for v in (0, 110501, 110000))


@pytest.mark.parametrize(
    ("nodes", "device", "reason"),
    [
        ([CPU, GFX1151], True, ""),
        ([CPU, GFX1100, GFX1151], True, ""),
        ([CPU, GFX1100], True, "only: 110000"),
        ([CPU], True, "only: none"),
        ([], True, "only: none"),
        ([CPU, GFX1151], False, "cannot be opened"),
    ],
)
def test_gfx1151_alone(tmp_path: Path, nodes: list[str], device: bool, reason: str) -> None:
    for number, text in enumerate(nodes):
        file = tmp_path / "nodes" / str(number) / "properties"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    if device:
        (tmp_path / "kfd").touch()
    said = why_skipped(tmp_path / "nodes", tmp_path / "kfd")
    assert reason in said and bool(reason) == bool(said)


def test_an_emulated_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one whatever KFD says, and the GPU that `strix-emulate device` was asked for."""
    nowhere = tmp_path / "none"
    monkeypatch.setenv("STRIX_EMULATE_TARGET", "gfx1151")
    assert not why_skipped(nowhere, nowhere)
    monkeypatch.setattr(gpu, "ARCH", "gfx1150")
    assert "is a gfx1151, not a gfx1150" in why_skipped(nowhere, nowhere)
    monkeypatch.setenv("STRIX_EMULATE_TARGET", "gfx1150")
    assert not why_skipped(nowhere, nowhere)


@pytest.mark.parametrize(
    "program", ["pytorch/test_with_gpu", "amdsmi/check_library", "torchvision/check_ops",
                "torchaudio/check_ops", "bitsandbytes/check_numbers"]
)  # fmt: skip
def test_package_tests_ask_kfd(program: str) -> None:
    text = (RECIPES / f"{program}.py").read_text()
    assert "if reason := why_skipped():" in text
    assert "conv2d" not in text, "MIOpen's open fault would cost a build of hours"


@pytest.mark.parametrize("recipe", ["bitsandbytes", "pytorch", "torchaudio", "torchvision", "vllm"])
def test_what_cannot_be_built_here_proves_itself_under_emulation(recipe: str) -> None:
    """By its package test, which installs the emulated device and its C."""
    text = (RECIPES / recipe / "recipe.yaml").read_text()
    emulated = re.findall(r"- strix-emulate device --no-checks -- (\S+) (\S+)", text)
    assert emulated
    for program, argument in emulated:
        assert program == "strix-validate" or f"- python {argument}\n" in text
    assert {"strix-emulate-hip", "strix-emulate-native"} <= set(
        re.findall(r"- (strix-emulate-\w+)\n", text)
    )
