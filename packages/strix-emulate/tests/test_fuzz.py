# SPDX-License-Identifier: BSD-3-Clause
"""Compare random kernels with fixed seeds on the emulator and the host (see fuzz.py)."""

import subprocess
import sys
from pathlib import Path

import fuzz
from device_support import find_clang
from strix_emulate.arithmetic import operations
from strix_emulate.native import library as native
from strix_emulate.run import program

ENGINES = ("numpy", "C") if native.load_library() is not None else ("numpy",)


def test_kernels_agree_with_the_host() -> None:
    """Four kernels are enough for `test_a_fault_is_found`. A nightly workflow compares 10,000."""
    assert list(map(str, fuzz.differences(find_clang(), range(4), ENGINES))) == []


def test_a_number_is_always_the_same_kernel() -> None:
    assert fuzz.source(range(3, 5)) == fuzz.source(range(3, 5)) != fuzz.source(range(4, 6))


def test_a_fault_is_found(monkeypatch) -> None:
    """If the emulator's exclusive OR is wrong in one bit, the comparison finds it."""
    wrong_xor = ("u32", ("u32", "u32"), lambda a, b: a ^ b ^ 1)
    monkeypatch.setitem(operations.TABLE, "v_xor_b32", wrong_xor)
    monkeypatch.setattr(program, "_TRAITS", {})
    difference = next(fuzz.differences(find_clang(), range(4), ("numpy",)))
    assert "by numpy" in str(difference)
    assert "on the host" in str(difference)
    assert not difference.fault


def test_llvms_faults_are_told_from_ours() -> None:
    """Three kernels differ because of LLVM's faults.

    Kernel 792 differs at all four levels of optimisation, kernel 885 at -O0, and kernel 9603 at -O1
    to -O3.
    """
    for number, operand, levels in ((792, "MINUEND", 4), (885, "DIVIDEND", 1), (9603, "LESSER", 3)):
        differences = fuzz.differences(find_clang(), range(number, number + 1), ENGINES[-1:])
        assert [x.fault for x in differences] == [fuzz.FAULTS[operand]] * levels


def test_a_share_is_executed_in_all_ways(monkeypatch) -> None:
    """Of every two kernels, the first is executed by numpy and by C, always with checks.

    The second kernel is executed by C only, and at -O0 without checks.
    """
    done = []

    def execute(_kernel, number, _expected, options) -> None:
        done.append((number, options.native, options.checks))

    monkeypatch.setattr(fuzz, "execute", execute)
    assert not list(fuzz.differences(find_clang(), range(3), ("numpy", "C"), 2))
    all_ways = [(0, False, True), (0, True, True), (2, False, True), (2, True, True)]
    assert done[:5] == [*all_ways[:2], (1, True, False), *all_ways[2:]]
    assert done[5:] == [*all_ways[:2], (1, True, True), *all_ways[2:]] * 3


def test_as_a_command() -> None:
    find_clang()
    command = [sys.executable, str(Path(fuzz.__file__)), "--seed", "3", "--count", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("1 kernels at -O0, -O1, -O2, -O3 by ")
