# SPDX-License-Identifier: BSD-3-Clause
"""Measure the rate of copies with a stub of the HIP library, which is fast, slow or broken."""

import shutil
import subprocess
import sys

import hosts
import pytest
from strix_validate.checks import Severity, State
from strix_validate.doctor import copies, copy_rate
from test_doctor import examine

#: The HIP functions that copy_rate.py calls. A copy takes SECONDS if its source is writable memory,
#: as with the faulty Linux kernels. The stub reads from /proc/self/maps whether memory is writable.
HIP = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int hipMalloc(void **pointer, size_t size) { *pointer = malloc(size); return STATUS; }
int hipDeviceSynchronize(void) { return 0; }
int hipMemcpy(void *to, const void *from, size_t size, int kind) {
    if (kind != 1) return 1;
    char line[512], mode[5];
    unsigned long begin, end;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx %4s", &begin, &end, mode) == 3 &&
            begin <= (unsigned long)from && (unsigned long)from < end && mode[1] == 'w')
            sleep(SECONDS);
    fclose(maps);
    memcpy(to, from, size);
    return 0;
}
"""
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler to build the stub")


def make_stub(tmp_path, seconds=0, status=0):
    library = tmp_path / "libamdhip64.so"
    source = tmp_path / "hip.c"
    source.write_text(HIP)
    words = [f"-DSECONDS={seconds}", f"-DSTATUS={status}", "-shared", "-fPIC", "-o"]
    subprocess.run([COMPILER, *words, library, source], check=True)
    return library


@needs_compiler
def test_a_kernel_that_stalls_in_writable_memory(tmp_path):
    rates = copies.measure(make_stub(tmp_path, seconds=1))
    assert rates["writable"] / 1e9 < copies.SLOW
    assert rates["writable"] < copy_rate.SIZE
    assert rates["read_only"] > rates["writable"]


@needs_compiler
def test_a_library_without_a_gpu(tmp_path):
    with pytest.raises(copies.NotMeasured, match="hipMalloc failed with status 100"):
        copies.measure(make_stub(tmp_path, status=100))


def test_a_library_that_does_not_load(tmp_path):
    file = tmp_path / "libamdhip64.so"
    file.write_text("no library")
    with pytest.raises(copies.NotMeasured, match="libamdhip64.so"):
        copies.measure(file)


def test_a_copy_that_does_not_end(tmp_path, monkeypatch):
    """With the faulty Linux kernels, copies are so slow that the measurement needs a time limit."""
    monkeypatch.setattr(copies, "TIMEOUT", 0.001)
    rates = copies.measure(tmp_path / "none.so")
    assert rates["writable"] == copy_rate.SIZE / 0.001


def test_why_nothing_was_measured(tmp_path):
    hosts.make(tmp_path, {})
    result = examine(tmp_path, measure_copies=None)["copies"]
    assert result.state is State.SKIPPED
    reason = "copies were not measured: the doctor reads a copy of a machine's files"
    assert result.measured["own_reason"] == reason

    (tmp_path / "home/user/env/lib/libamdhip64.so.7").unlink()
    result = examine(tmp_path)["copies"]
    assert "no libamdhip64.so was found" in result.measured["own_reason"]


def test_the_environments_library_comes_first(tmp_path):
    files = {"opt/rocm-7.2/lib/libamdhip64.so": "", f"{hosts.SITE}/torch/lib/libamdhip64.so": ""}
    used = []

    def measure(library):
        used.append(str(library.relative_to(tmp_path)))
        raise copies.NotMeasured("crashed")

    result = examine(hosts.make(tmp_path, files), measure_copies=measure)["copies"]
    assert used == [f"{hosts.SITE}/torch/lib/libamdhip64.so"]
    assert result.state is State.SKIPPED
    assert "crashed" in result.measured["own_reason"]


@pytest.mark.parametrize(("rate", "severity"), [(0.19e9, Severity.WARNING), (0.21e9, None)])
def test_the_bound(rate, severity, tmp_path):
    hosts.make(tmp_path, {})
    result = examine(tmp_path, measure_copies=lambda library: {"writable": rate})["copies"]
    assert result.severity is severity
    assert result.measured == {"writable_gbps": rate / 1e9}


def test_the_program_alone(tmp_path):
    done = subprocess.run(
        [sys.executable, "-I", copy_rate.__file__, tmp_path / "none.so"], capture_output=True
    )
    assert done.returncode
    assert b"none.so" in done.stderr
