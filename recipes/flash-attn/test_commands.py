# SPDX-License-Identifier: BSD-3-Clause
"""Package test: run several commands. pytest-xdist runs them in parallel, as each uses one core."""

import subprocess

import pytest

NOTHING_CHECKED = 3
COMPILED = ("d128-causal-gqa", "d80", "varlen", "decode")
EMULATED = ("d64-causal-float16", "varlen-bfloat16", "varlen-no-keys-d72")


def select_checks(tier: str, names: tuple[str, ...]) -> str:
    """Return the strix-validate command that runs some checks of one of its tiers."""
    options = " ".join(f"--only {tier}/{name}" for name in names)
    return f"strix-validate {tier} {options}"


COMMANDS = {
    # compile kernels for gfx1151 through flash-attn's functions, and check the code objects
    "compiled": select_checks("kernels", COMPILED),
    # run flash-attn with Triton's driver and a HIP runtime, as on a machine with a GPU
    "on a device": "strix-emulate device -- python hip_device.py",
    # compile a kernel with other tiles, and check that the tiles take effect
    "tuned": "strix-validate tune Llama-3.2-1B --dry-run --only *forward*",
    # check results in Triton's interpreter, and that unsupported calls are refused
    "interpreted": "strix-validate attention --only flash-attn",
    # execute the kernels under emulation
    "emulated": select_checks("emulated", EMULATED),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_passes(name):
    done = subprocess.run(COMMANDS[name].split(), text=True, capture_output=True)
    print(done.stdout, done.stderr)
    if done.returncode == NOTHING_CHECKED and name in ("on a device", "emulated"):
        pytest.skip("no disassembler, nothing was executed")
    if done.returncode:
        pytest.fail(f"exit status {done.returncode}")
