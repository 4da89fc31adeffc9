# SPDX-License-Identifier: BSD-3-Clause
"""Check vLLM's kernels from the recipe's patched sdist in a stack that does not have vLLM."""

import json
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.project import FILTER, drive

# Names of checks by tier of the validator. There is a check for each kind of kernel, and a check
# for each property that changes a kernel's code: the tiles of a real head dimension, the LDS of
# wide heads, an FP8 cache, bfloat16, quantized weights. The package test of vLLM runs all checks.
TIERS = {
    "kernels": ("prefill-d128", "decode-d128", "prefill-d512", "moe-prefill", "awq", "mla-decode"),
    "attention": (
        "prefill",
        "decode-sinks",
        "decode-alibi",
        "prefill-fp8-kv",
        "reshape-and-cache",
        "rms-norm-eps",
        "rope-interleaved",
        "moe-int4-zeros",
        "awq",
        "w4a16",
        "conv1d",
        "gdn-prefill",
        "gated-norm",
        "mla-decode",
        "merge-states",
        "penalties",
        "lora-one-slice",
    ),
    "emulated": (
        "prefill",
        "decode-bfloat16",
        "prefill-fp8-kv-bfloat16",
        "reshape-and-cache",
        "rms-norm",
        "rope",
        "moe",
        "moe-int4",
        "w4a16-bfloat16",
        "top-k-top-p",
    ),
}


@pytest.fixture(scope="module")
def source(emulated_stack: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of vLLM's patched Python sources."""
    recipe = (emulated_stack / "recipes" / "vllm" / "recipe.yaml").read_text()
    (version,) = yaml.safe_load((emulated_stack / "variants.yaml").read_text())["vllm"]
    drive(emulated_stack, "sources", "fetch", "vllm")
    sdists = list((emulated_stack / "build" / "sources").glob(f"*/vllm-{version}.tar.gz"))
    if not sdists:
        pytest.skip(f"the sdist of vllm {version} cannot be fetched")
    folder = tmp_path_factory.mktemp("source")
    top = f"vllm-{version}"
    with tarfile.open(sdists[0]) as archive:
        members = [m for m in archive if m.name.startswith((f"{top}/vllm/", f"{top}/PKG-INFO"))]
        archive.extractall(folder, members, **FILTER)
    for patch in re.findall(r"- \.\./\.\./(patches/vllm/\S+)", recipe):
        words = ["git", "apply", "--include=vllm/*", str(emulated_stack / patch)]
        subprocess.run(words, cwd=folder / top, check=True)
    return folder / top


@pytest.fixture(scope="module")
def checks(emulated_stack: Path, source: Path) -> list[dict[str, Any]]:
    """The validator's results for all tiers, from one run, because each start takes seconds."""
    words = ["run", "attention", "-e", "emulated", "--", "strix-validate", "run", "--json"]
    words += ["--device", "cpu", "--size", "quick", "--vllm-source", str(source)]
    for tier, names in TIERS.items():
        words += ["--tier", tier]
        for name in names:
            words += ["--only", f"{tier}/vllm-{name}"]
    done = drive(emulated_stack, *words)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return json.loads(done.stdout)["checks"]


@pytest.mark.parametrize("tier", TIERS)
def test_kernels_of_the_sdist(checks: list[dict[str, Any]], tier: str) -> None:
    checks = [check for check in checks if check["id"].startswith(f"{tier}/")]
    states = {check["id"]: check["state"] for check in checks}
    if tier == "emulated" and {*states.values()} == {"skipped"}:
        pytest.skip(checks[0]["reason"])
    ids = {f"{tier}/vllm-{name}" for name in TIERS[tier]}
    assert states == dict.fromkeys(ids, "passed"), checks
