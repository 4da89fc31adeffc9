# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's kernels from the recipe's sdist, with its patches, in a stack without vLLM."""

import json
import re
import subprocess
import tarfile
from pathlib import Path

import pytest
from support.project import FILTER, drive

#: Of each tier one check of each kind of kernel and of what makes it other code: a real head's
#: tiles, wide heads (LDS), an FP8 cache, bfloat16, quantized weights. The test of vLLM's package,
#: where it can be built, has all of them.
TIERS = {
    "kernels": ("prefill-d128", "decode-d128", "prefill-d512", "moe-prefill", "awq", "mla-decode"),
    "attention": (
        "prefill", "decode-sinks", "decode-alibi", "prefill-fp8-kv", "reshape-and-cache",
        "rms-norm-eps", "rope-interleaved", "moe-int4-zeros", "awq", "w4a16", "conv1d",
        "gdn-prefill", "gated-norm", "mla-decode", "merge-states", "penalties", "lora-one-slice",
    ),
    "emulated": (
        "prefill", "decode-bfloat16", "prefill-fp8-kv-bfloat16", "reshape-and-cache", "rms-norm",
        "rope", "moe", "moe-int4", "w4a16-bfloat16", "top-k-top-p",
    ),
}  # fmt: skip


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


@pytest.mark.parametrize("tier", TIERS)
def test_kernels_of_the_sdist(emulated_stack: Path, source: Path, tier: str) -> None:
    names = {f"{tier}/vllm-{name}" for name in TIERS[tier]}
    words = ["run", "attention", "-e", "emulated", "--", "strix-validate", tier, "--json"]
    words += [word for name in sorted(names) for word in ("--only", name)]
    done = drive(emulated_stack, *words, "--vllm-source", str(source))
    record = json.loads(done.stdout)
    if tier == "emulated" and done.returncode == 3:
        pytest.skip(record["checks"][0]["reason"])
    assert done.returncode == 0, done.stdout + done.stderr
    states = {check["id"]: check["state"] for check in record["checks"]}
    assert states == dict.fromkeys(names, "passed"), done.stdout
