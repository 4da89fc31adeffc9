# SPDX-License-Identifier: BSD-3-Clause
"""Package test: commands that each take one core for a while, side by side under pytest-xdist."""

import subprocess

import pytest

NOTHING_CHECKED = 3
COMPILED = ("d128-causal-gqa", "d80", "varlen", "decode")
EMULATED = ("d64-causal-float16", "varlen-bfloat16", "varlen-no-keys-d72")


def select_checks(tier: str, names: tuple[str, ...]) -> str:
    """Return the command that runs some checks of a tier."""
    options = " ".join(f"--only {tier}/{name}" for name in names)
    return f"strix-validate {tier} {options}"


COMMANDS = {
    # forward and backward for gfx1151 from the real call path, read back from the code objects
    "compiled": select_checks("kernels", COMPILED),
    # the same code objects through Triton's driver and a HIP runtime, as on a machine with a GPU
    "on a device": "strix-emulate device -- python hip_device.py",
    # other tiles take effect
    "tuned": "strix-validate tune Llama-3.2-1B --dry-run --only *forward*",
    # numbers of the same kernels in Triton's interpreter; refusals of what would be wrong
    "interpreted": "strix-validate attention --only flash-attn",
    # and executed under emulation
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
