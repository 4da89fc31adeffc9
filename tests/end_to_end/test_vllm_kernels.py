# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's kernels from the recipe's sdist, with its patches, in a stack without vLLM."""

import json
import re
import subprocess
import tarfile
from pathlib import Path

import pytest
from support.project import FILTER, driver, driver_environment

#: Tier, its checks here, and how many kernels or comparisons they come to at least.
TIERS = {
    "kernels": ("kernels/vllm-*", 14),
    "attention": ("attention/vllm-*", 10),
    "emulated": ("emulated/vllm-*", 6),
}


@pytest.fixture(scope="module")
def source(attention_stack: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = (attention_stack / "recipes" / "vllm" / "recipe.yaml").read_text()
    version = re.search(r'version: "(.+)"', recipe)[1]
    words = driver(attention_stack, "sources", "fetch", "vllm")
    subprocess.run(words, env=driver_environment(attention_stack), check=False)
    found = list((attention_stack / "build" / "sources").glob(f"*/vllm-{version}.tar.gz"))
    if not found:
        pytest.skip(f"the sdist of vllm {version} cannot be fetched")
    folder = tmp_path_factory.mktemp("source")
    root = f"vllm-{version}"
    with tarfile.open(found[0]) as archive:
        read = [m for m in archive if m.name.startswith((f"{root}/vllm/", f"{root}/PKG-INFO"))]
        archive.extractall(folder, read, **FILTER)
    for patch in re.findall(r"- \.\./\.\./(patches/vllm/\S+)", recipe):
        words = ["git", "apply", "--include=vllm/*", str(attention_stack / patch)]
        subprocess.run(words, cwd=folder / root, check=True)
    return folder / root


@pytest.mark.parametrize("tier", TIERS)
def test_kernels_of_the_sdist(attention_stack: Path, source: Path, tier: str) -> None:
    pattern, least = TIERS[tier]
    words = ["run", "attention", "--", "strix-validate", tier, "--json", "--only", pattern]
    done = subprocess.run(
        driver(attention_stack, *words, "--vllm-source", str(source)),
        env=driver_environment(attention_stack), text=True, capture_output=True, check=False,
    )  # fmt: skip
    record = json.loads(done.stdout)
    if tier == "emulated" and done.returncode == 3:
        pytest.skip(record["checks"][0]["reason"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(len(check["measured"]) for check in record["checks"]) >= least
