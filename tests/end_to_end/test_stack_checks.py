# SPDX-License-Identifier: BSD-3-Clause
"""Stacks with a check of their own: installed from the host base, correct, and able to fail.

No Hugging Face hub can be reached: what would ask it fails.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from support.project import CHECKOUT, forge

# The check, then with a softmax scale that is off where float32 is computed and not the reference;
# and what strix-validate models says of diffusers, by diffusers' own names.
DIFFUSION = """
import contextlib, io, json, sys, torch
sys.path.insert(0, sys.argv.pop(1))
sys.argv += ["--device", "cpu"]
import check
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from strix_validate.models.table import read_rows
from torch.nn import functional

def said():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = check.main()
    return [status, out.getvalue()]

right, sdpa = said(), functional.scaled_dot_product_attention
functional.scaled_dot_product_attention = lambda query, *kv, **more: sdpa(
    1.2 * query if query.dtype == torch.float32 else query, *kv, **more
)
default, asked = (row.chosen for row in read_rows() if row.of.startswith("attention, "))
own = _AttentionBackendRegistry.get_active_backend()[0].value
names = [default == own, asked in [x.value for x in AttentionBackendName]]
print(json.dumps({"right": right, "wrong": said(), "names": names}))
"""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


def checked(name: str, root: Path, *words: str) -> dict[str, Any]:
    """Install a stack, run a Python program in it, which is told its folder; what that found."""
    forge("lock", name, root=root)
    forge("install", name, root=root)
    words = ("run", name, "--", "python", *words[:2], str(root / "stacks" / name), *words[2:])
    return json.loads(forge(*words, root=root).splitlines()[-1])


def test_diffusion(built: Path) -> None:
    found = checked("diffusion", built, "-c", DIFFUSION)
    status, said = found["right"]
    assert status == 0 and said.count("correct  ") == 8 and "WRONG" not in said
    status, said = found["wrong"]
    assert status == 1 and said.count("WRONG  ") == said.count(", float32,") == 4
    assert found["names"] == [True, True]


def test_finetune(built: Path, tmp_path: Path) -> None:
    faults = CHECKOUT / "tests" / "support" / "finetune_faults.py"
    found = checked("finetune", built, "-u", str(faults), str(tmp_path))
    status, said = found["whole"]
    assert status == 0 and said.count("correct  ") == 2 and "WRONG" not in said
    # the host base has none; docs/evidence/2026-11-23-bitsandbytes-by-hand.md has a run with PyPI's
    assert "SKIPPED  NF4: bitsandbytes is not installed" in said
    assert found["check"].pop("none") == 0
    assert len(found["check"]) == 9 and {*found["check"].values()} == {1}, found["check"]
    told = found["recipe"]
    before, after = map(float, told["good"].split("went from ")[1].split(" to "))
    assert after < before - 1 and told["adapters"] == "14 of 14"
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
        assert part in told[name], told
