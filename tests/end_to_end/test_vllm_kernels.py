# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's kernels from the recipe's sdist, with its patches, in a stack without vLLM."""

import json
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from support.project import FILTER, drive

#: Of each tier one check of each kind of kernel and of what makes it other code: a real head's
#: tiles, wide heads (LDS), an FP8 cache, bfloat16, quantized weights. The test of vLLM's package,
#: where it can be built, has all of them.
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
    recipe = (emulated_stack / "recipes" / "vllm" / "recipe.yaml").read_text()
    version = re.search(r'version: "(.+)"', recipe)[1]
    drive(emulated_stack, "sources", "fetch", "vllm")
    found = list((emulated_stack / "build" / "sources").glob(f"*/vllm-{version}.tar.gz"))
    if not found:
        pytest.skip(f"the sdist of vllm {version} cannot be fetched")
    folder = tmp_path_factory.mktemp("source")
    root = f"vllm-{version}"
    with tarfile.open(found[0]) as archive:
        read = [m for m in archive if m.name.startswith((f"{root}/vllm/", f"{root}/PKG-INFO"))]
        archive.extractall(folder, read, **FILTER)
    for patch in re.findall(r"- \.\./\.\./(patches/vllm/\S+)", recipe):
        words = ["git", "apply", "--include=vllm/*", str(emulated_stack / patch)]
        subprocess.run(words, cwd=folder / root, check=True)
    return folder / root


@pytest.fixture(scope="module")
def checks(emulated_stack: Path, source: Path) -> list[dict[str, Any]]:
    """What the validator says of all of them: one run, for each start takes seconds."""
    words = ["run", "attention", "-e", "emulated", "--", "strix-validate", "run", "--json"]
    words += ["--device", "cpu", "--size", "quick", "--vllm-source", str(source)]
    for tier, names in TIERS.items():
        words += ["--tier", tier]
        words += [word for name in names for word in ("--only", f"{tier}/vllm-{name}")]
    done = drive(emulated_stack, *words)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return json.loads(done.stdout)["checks"]


@pytest.mark.parametrize("tier", TIERS)
def test_kernels_of_the_sdist(checks: list[dict[str, Any]], tier: str) -> None:
    found = {check["id"]: check for check in checks if check["id"].startswith(f"{tier}/")}
    states = {name: check["state"] for name, check in found.items()}
    if tier == "emulated" and {*states.values()} == {"skipped"}:
        pytest.skip(next(iter(found.values()))["reason"])
    names = {f"{tier}/vllm-{name}" for name in TIERS[tier]}
    assert states == dict.fromkeys(names, "passed"), found
