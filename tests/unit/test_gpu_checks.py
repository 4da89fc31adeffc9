# SPDX-License-Identifier: BSD-3-Clause
"""Package tests use the GPU where KFD names a gfx1151, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.recipe_checks import RECIPES

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


@pytest.mark.parametrize(
    "program", ["pytorch/test_with_gpu", "amdsmi/check_library", "torchvision/check_ops",
                "torchaudio/check_ops", "bitsandbytes/check_numbers"]
)  # fmt: skip
def test_package_tests_ask_kfd(program: str) -> None:
    text = (RECIPES / f"{program}.py").read_text()
    assert "if reason := why_skipped():" in text
    assert "conv2d" not in text, "MIOpen's open fault would cost a build of hours"
