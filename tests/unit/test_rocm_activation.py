# SPDX-License-Identifier: BSD-3-Clause
"""The activation scripts of the rocm-sdk packages: they restore what they changed."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from support.project import CHECKOUT

RECIPE = CHECKOUT / "recipes" / "rocm-sdk"


@pytest.mark.parametrize("shell", ["bash", "sh"])
@pytest.mark.parametrize("had", [{}, {"ROCM_PATH": "/mine", "CMAKE_PREFIX_PATH": "/a;b c"}])
def test_activation_restores_what_it_changed(tmp_path: Path, shell: str, had: dict) -> None:
    """Also under `set -eu`, and with a sysroot, for which the compiler gets flags."""
    prefix = tmp_path / "a prefix"
    (prefix / "x86_64-conda-linux-gnu/sysroot").mkdir(parents=True)
    scripts = [
        RECIPE / "activation" / f"{part}-{when}.sh"
        for part, when in [
            ("core", "activate"), ("devel", "activate"),
            ("devel", "deactivate"), ("core", "deactivate"),
        ]
    ]  # fmt: skip
    sources = [f'. "{script}"\nenv -0 > {tmp_path}/{n}' for n, script in enumerate(scripts)]
    start = {"PATH": os.environ["PATH"], "HOME": "/home/me", "CONDA_PREFIX": str(prefix)} | had
    program = "set -eu\n" + "\n".join(sources)
    subprocess.run([shell, "-c", program], env=start, check=True)
    seen = [_environment(tmp_path / str(n)) for n in range(4)]
    assert seen[0]["AMD_COMGR_CACHE_DIR"].startswith("/home/me/.cache/comgr/rocm-")
    assert seen[0]["ROCPROFILER_QUEUE_INTERPOSITION"] == "0"
    assert seen[0]["MIOPEN_FIND_MODE"] == "FAST"
    rocm = f"{prefix}/opt/rocm"
    assert seen[1]["ROCM_PATH"] == rocm and seen[1]["PATH"].startswith(f"{rocm}/bin:")
    assert seen[1]["CMAKE_PREFIX_PATH"].endswith(had.get("CMAKE_PREFIX_PATH", rocm))
    for name in ("HIPCC_COMPILE_FLAGS_APPEND", "HIPCC_LINK_FLAGS_APPEND"):
        assert seen[1][name] == (
            f"--gcc-toolchain={prefix} --gcc-triple=x86_64-conda-linux-gnu "
            f"--sysroot={prefix}/x86_64-conda-linux-gnu/sysroot"
        )
    forbidden = {"HSA_OVERRIDE_GFX_VERSION", "LD_LIBRARY_PATH", "HIP_VISIBLE_DEVICES"}
    assert not forbidden & set(seen[1])
    assert seen[3] == start


def _environment(file: Path) -> dict[str, str]:
    pairs = dict(p.split("=", 1) for p in file.read_text().split("\0") if p)
    return {k: v for k, v in pairs.items() if k not in ("PWD", "SHLVL", "_", "OLDPWD")}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AMD_COMGR_CACHE_DIR", "/mine"),
        ("ROCPROFILER_QUEUE_INTERPOSITION", "1"),
        ("MIOPEN_FIND_MODE", "NORMAL"),
    ],
)
def test_users_own_value_stays(name: str, value: str) -> None:
    scripts = [RECIPE / "activation" / f"core-{w}.sh" for w in ("activate", "deactivate")]
    program = "set -eu\n" + "".join(f'. "{script}"\necho "${name}"\n' for script in scripts)
    start = {"HOME": "/home/me", name: value}
    done = subprocess.run(["sh", "-c", program], env=start, capture_output=True, text=True)
    assert done.stdout.split() == [value, value], done.stderr


def test_a_value_of_another_project_is_not_set() -> None:
    """docs/rocm.md says why: without them MIOpen has too few solvers on gfx1151."""
    texts = "".join(file.read_text() for file in (RECIPE / "activation").iterdir())
    assert "MIOPEN_DEBUG" not in texts
    table = (CHECKOUT / "docs/rocm.md").read_text()
    for name in re.findall(r"^_rocm_sdk_default (\w+)", texts, flags=re.M):
        assert f"| `{name}" in table, f"{name} is not in docs/rocm.md"


def test_the_stack_says_what_to_do_if_a_convolution_hangs() -> None:
    text = (CHECKOUT / "stacks/attention/README.md").read_text()
    for name in (
        "MIOPEN_FIND_MODE=FAST",
        "MIOPEN_DEBUG_CONV_WINOGRAD=0",
        "strix-validate libraries",
    ):
        assert name in text
