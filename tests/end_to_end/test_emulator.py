# SPDX-License-Identifier: BSD-3-Clause
"""Run the emulator and the validator in an installed stack."""

import json
from pathlib import Path

import pytest
from support.project import CHECKOUT, drive


def test_without_a_disassembler_nothing_is_claimed(emulated_stack: Path) -> None:
    """Without a disassembler, `strix-validate emulated` skips its check and exits with 3.

    Package tests take the exit status 3 for "not checked", so a wrong result must not give that
    status. If there is a disassembler, flash-attn's package test executes the kernels.
    """
    words = ["run", "attention", "-e", "emulated", "--", "strix-validate", "emulated", "--json"]
    words += ["--only", "emulated/gqa-causal"]
    done = drive(emulated_stack, *words, STRIX_EMULATE_LIBLLVM="/nowhere/libLLVM.so")
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["summary"]["skipped"] == 1


# A program like those in bug reports, with its tensors on the device `cuda`. For each command line
# argument, the program launches a kernel that reads this number of values.
PROGRAM = """
import sys, torch, triton, triton.language as tl

@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, at < n), at < n)

for length in map(int, sys.argv[1:]):
    x = torch.arange(1, 101, dtype=torch.float32, device="cuda")
    y = torch.zeros(100, device="cuda")
    compiled = double[(1,)](x, y, length, BLOCK=128)
    print(compiled.metadata.target.arch, length, "wrong:", int((y != 2 * x).sum()), flush=True)
"""


def test_a_reports_program_runs_on_the_device(emulated_stack: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    script = CHECKOUT / "tools/emulate_report.py"
    words = ["strix-emulate", "device", "--", "python", str(script), str(program)]
    words += ["100", "50", "101"]
    done = drive(emulated_stack, "run", "attention", "-e", "emulated", "--", *words)
    if done.returncode == 3:  # no libLLVM
        pytest.skip(done.stderr)
    output = done.stdout + done.stderr
    assert "gfx1151 100 wrong: 0\n" in output and "gfx1151 50 wrong: 50\n" in output
    # One kernel reads past the end of its tensor. The read causes a trap, and the emulated device
    # ends the program.
    assert done.returncode == 1 and "trap in double" in output and "101 wrong:" not in output
