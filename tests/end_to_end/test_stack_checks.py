# SPDX-License-Identifier: BSD-3-Clause
"""Stacks with a check of their own: installed from the host base, correct, and able to fail.

No Hugging Face hub can be reached: what would ask it fails.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.project import CHECKOUT, forge

# a softmax scale that is off, where float32 is computed and not the reference; the U-Net calls it
WRONG_SCALE = """
import runpy, sys, torch
from torch.nn import functional
sdpa = functional.scaled_dot_product_attention
functional.scaled_dot_product_attention = lambda q, *kv, **more: sdpa(
    1.2 * q if q.dtype == torch.float32 else q, *kv, **more
)
sys.argv = [sys.argv[1], "--device", "cpu"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


# what strix-validate models says of diffusers, by diffusers' own names
CHOICES = """
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from strix_validate.models.table import rows
default, asked = (row.chosen for row in rows() if row.of.startswith("attention, "))
own = _AttentionBackendRegistry.get_active_backend()[0].value
print("as diffusers has them", default == own, asked in [x.value for x in AttentionBackendName])
"""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


def install(name: str, root: Path) -> str:
    """Lock and install a stack; returns its check."""
    forge("lock", name, root=root)
    forge("install", name, root=root)
    return str(root / "stacks" / name / "check.py")


def test_diffusion(built: Path) -> None:
    check = install("diffusion", built)
    done = forge("run", "diffusion", "--", "python", check, "--device", "cpu", root=built)
    assert done.count("correct  ") == 8 and "WRONG" not in done
    words = ("run", "diffusion", "--", "python", "-c", WRONG_SCALE, check)
    wrong = forge(*words, code=1, root=built)
    assert "WRONG  U-Net, float32" in wrong
    said = forge("run", "diffusion", "--", "python", "-c", CHOICES, root=built)
    assert "as diffusers has them True True" in said


def test_finetune(built: Path, tmp_path: Path) -> None:
    check = install("finetune", built)
    done = forge("run", "finetune", "--", "python", check, "--device", "cpu", root=built)
    assert done.count("correct  ") == 2 and "WRONG" not in done
    # the host base has none; evidence/2026-11-23-bitsandbytes-by-hand.md has a run with PyPI's
    assert "SKIPPED  NF4: bitsandbytes is not installed" in done
    faults = CHECKOUT / "tests" / "support" / "finetune_faults.py"
    words = ("run", "finetune", "--", "python", str(faults), str(Path(check).parent), str(tmp_path))
    found = json.loads(forge(*words, root=built).splitlines()[-1])
    assert found["check"].pop("none") == 0
    assert len(found["check"]) == 9 and {*found["check"].values()} == {1}, found["check"]
    said = found["recipe"]
    before, after = map(float, said["good"].split("went from ")[1].split(" to "))
    assert after < before - 1 and said["adapters"] == "14 of 14"
    for name, part in {
        "no model": "holds no model: no config.json is in it",
        "no data": "none.jsonl is not a file",
        "no bitsandbytes": "--four-bit needs bitsandbytes, which is not installed",
        "no number": "the loss is not a number from step",
        "empty": "is empty: it needs a JSON object per line",
        "no JSON": "line 2: not a JSON object with text",
        "no object": "line 1: not a JSON object with completion and prompt, or messages, or text",
        "other keys": "line 1: not a JSON object with",
        "mixed": "line 2: not a JSON object with text",
    }.items():
        assert part in said[name], said
