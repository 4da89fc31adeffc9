# SPDX-License-Identifier: BSD-3-Clause
"""Random kernels of fixed numbers give on the emulator what they give on the host (see `fuzz`)."""

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
    """Of few: a workflow draws 10,000 each night, and these are enough for the fault below."""
    assert list(map(str, fuzz.differences(find_clang(), range(4), ENGINES))) == []


def test_a_number_is_always_the_same_kernel() -> None:
    assert fuzz.source(range(3, 5)) == fuzz.source(range(3, 5)) != fuzz.source(range(4, 6))


def test_a_fault_is_found(monkeypatch) -> None:
    """Exclusive or that is wrong in one bit."""
    wrong = ("u32", ("u32", "u32"), lambda a, b: a ^ b ^ 1)
    monkeypatch.setitem(operations.TABLE, "v_xor_b32", wrong)
    monkeypatch.setattr(program, "_TRAITS", {})
    difference = next(fuzz.differences(find_clang(), range(4), ("numpy",)))
    assert "by numpy" in str(difference)
    assert "on the host" in str(difference)
    assert not difference.fault


def test_llvms_faults_are_told_from_ours() -> None:
    """At 792 it is all four levels, at 885 -O0, at 9603 all others."""
    for number, operand, levels in ((792, "MINUEND", 4), (885, "DIVIDEND", 1), (9603, "LESSER", 3)):
        differences = fuzz.differences(find_clang(), range(number, number + 1), ENGINES[-1:])
        assert [x.fault for x in differences] == [fuzz.FAULTS[operand]] * levels


def test_a_share_is_executed_in_all_ways(monkeypatch) -> None:
    """The others by C alone, at -O0 without checks."""
    done = []

    def execute(_kernel, number, _expected, options) -> None:
        done.append((number, options.native, options.checks))

    monkeypatch.setattr(fuzz, "execute", execute)
    assert not list(fuzz.differences(find_clang(), range(3), ("numpy", "C"), 2))
    whole = [(0, False, True), (0, True, True), (2, False, True), (2, True, True)]
    assert done[:5] == [*whole[:2], (1, True, False), *whole[2:]]
    assert done[5:] == [*whole[:2], (1, True, True), *whole[2:]] * 3


def test_as_a_command() -> None:
    find_clang()
    command = [sys.executable, str(Path(fuzz.__file__)), "--seed", "3", "--count", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("1 kernels at -O0, -O1, -O2, -O3 by ")
