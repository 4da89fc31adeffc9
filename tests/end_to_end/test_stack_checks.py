# SPDX-License-Identifier: BSD-3-Clause
"""The checks of the stacks diffusion and finetune pass, and fail when a fault is planted.

The stacks are installed from the host base. Hugging Face's hub cannot be reached, so code that
requests a file from the hub fails.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from support.project import CHECKOUT, forge

# This program runs the check of the stack twice. In the second run, attention in float32 has a
# wrong softmax scale. The reference is not affected, because it does not compute in float32. Then
# the program runs the check as on a GPU. The CPU stands in for the GPU, and torch's attention for
# flash-attn. The stand-in refuses all dtypes but bfloat16, the only one that the check uses with
# flash-attn. The program also compares the names of diffusers' backends in the table of
# `strix-validate models` with diffusers' own names. Last, it runs image.py with a file in a missing
# folder, with a file without an extension, and with a right one.
DIFFUSION = """
import contextlib, io, json, sys, torch
sys.path.insert(0, sys.argv.pop(1))
sys.argv += ["--device", "cpu"]
import check, image
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from strix_validate.models.table import read_rows
from torch.nn import functional

def run_check():
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = check.main()
    return [status, output.getvalue()]

def wrong_attention(query, *args, **options):
    if query.dtype == torch.float32:
        query = 1.2 * query
    return sdpa(query, *args, **options)

right = run_check()
sdpa = functional.scaled_dot_product_attention
functional.scaled_dot_product_attention = wrong_attention
wrong = run_check()
default, requested = (row.chosen for row in read_rows() if row.of.startswith("attention, "))
active = _AttentionBackendRegistry.get_active_backend()[0].value
names = [default == active, requested in [backend.value for backend in AttentionBackendName]]

def replace_cuda(to):
    def to_cpu(self, *args, **options):
        return to(self, *["cpu" if arg == "cuda" else arg for arg in args], **options)

    return to_cpu

def stand_in(query, key, value, attn_mask=None, scale=None, **options):
    flash_dtypes.append(query.dtype)
    if query.dtype != torch.bfloat16:
        raise RuntimeError(f"flash-attn does not support {query.dtype}")
    return native(query, key, value, attn_mask=attn_mask, scale=scale)

functional.scaled_dot_product_attention = sdpa
torch.Tensor.to = replace_cuda(torch.Tensor.to)
torch.nn.Module.to = replace_cuda(torch.nn.Module.to)
attention_dispatch._CAN_USE_FLASH_ATTN = True
native = _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE]
_AttentionBackendRegistry._backends[AttentionBackendName.FLASH] = stand_in
gpu = []
flash_dtypes = []
for name, error, bound in check.compare_all("cuda"):
    gpu.append([name, len(flash_dtypes) > 0, error <= bound])
    flash_dtypes.clear()

image.load_pipeline = lambda *args: sys.exit("loads the model")
image_statuses = []
for file in ("none/a.png", "a", "a.png"):
    sys.argv[1:] = ["model", "prompt", "-o", file]
    try:
        image.main()
    except SystemExit as error:
        image_statuses.append(error.code)
results = {"right": right, "wrong": wrong, "names": names, "gpu": gpu, "image": image_statuses}
print(json.dumps(results))
"""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


def run_in_stack(name: str, root: Path, *words: str) -> dict[str, Any]:
    """Lock and install a stack, run a Python program in it, and return its last line, as JSON.

    Args:
        name: The stack.
        root: The checkout.
        words: An option of Python, the program, and the program's arguments. The program gets the
            stack's folder as an additional first argument.
    """
    forge("lock", name, root=root)
    forge("install", name, root=root)
    folder = str(root / "stacks" / name)
    printed = forge("run", name, "--", "python", *words[:2], folder, *words[2:], root=root)
    return json.loads(printed.splitlines()[-1])


def test_diffusion(built: Path) -> None:
    result = run_in_stack("diffusion", built, "-c", DIFFUSION)
    status, output = result["right"]
    assert status == 0 and output.count("correct  ") == 8 and "WRONG" not in output
    status, output = result["wrong"]
    assert status == 1 and output.count("WRONG  ") == output.count(", float32,") == 4
    assert result["names"] == [True, True]
    assert len(result["gpu"]) == 9
    for name, uses_flash, is_correct in result["gpu"]:
        assert uses_flash == name.endswith("flash") and is_correct, name
    assert result["image"] == [2, 2, "loads the model"]


def test_finetune(built: Path, tmp_path: Path) -> None:
    program = CHECKOUT / "tests" / "support" / "finetune_faults.py"
    result = run_in_stack("finetune", built, "-u", str(program), str(tmp_path))
    status, output = result["whole"]
    assert status == 0 and output.count("correct  ") == 2 and "WRONG" not in output
    # The host base has no bitsandbytes. docs/evidence/2026-11-23-bitsandbytes-by-hand.md describes
    # a run with PyPI's bitsandbytes.
    assert "SKIPPED  NF4: bitsandbytes is not installed" in output
    assert result["check"].pop("none") == 0
    assert len(result["check"]) == 9 and {*result["check"].values()} == {1}, result["check"]
    messages = result["recipe"]
    before, after = map(float, messages["good"].split("went from ")[1].split(" to "))
    assert after < before - 1 and messages["adapters"] == "14 of 14"
    assert messages["separators"] == ["a\u2028b\x85c", "d"]
    for name, message in {
        "no model": "holds no model: no config.json is in it",
        "no data": "none.jsonl is not a file",
        "no bitsandbytes": "--four-bit needs bitsandbytes, which is not installed",
        "no number": "is not a finite number",
        "empty": "is empty: it needs a JSON object per line",
        "no JSON": "line 2: not a JSON object with text",
        "no object": "line 1: not a JSON object with completion and prompt, or messages, or text",
        "other keys": "line 1: not a JSON object with",
        "mixed": "line 2: not a JSON object with text",
    }.items():
        assert message in messages[name], messages
