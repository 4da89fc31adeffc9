# SPDX-License-Identifier: BSD-3-Clause
"""The doctor's check of the rate of copies to the GPU, which reveals faulty Linux kernels."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from strix_validate.checks import CannotRun, Result
from strix_validate.doctor import copy_rate, hardware
from strix_validate.doctor._verdicts import Fix, fine, need_gpu, warning
from strix_validate.doctor.interpreter import find_interpreter
from strix_validate.doctor.tree import Tree

#: GB/s below which a copy is slow. With good Linux kernels, copies from a writable mapping ran at
#: 1.1 to 1.9 GB/s on a gfx1100, and large copies ran at 11 GB/s on a gfx1151. With a faulty Linux
#: kernel, copies from a writable mapping ran at 0.002 GB/s. The numbers are from issues 6523 and
#: 6530 of ROCm/legacy-rocm-build.
SLOW = 0.2
#: Time limit of the measurement in seconds. With a faulty kernel, the copy takes 8 s.
TIMEOUT = 90


class NotMeasured(Exception):
    """No rate was measured; the message is the reason."""


def measure(library: Path) -> dict[str, float]:
    """Measure the rate of copies in a process of its own.

    Args:
        library: Path of libamdhip64.so.

    Returns:
        Bytes per second by kind of source mapping: "read_only" and "writable". If the process takes
        longer than TIMEOUT, the result has only "writable", with an upper bound.

    Raises:
        NotMeasured: HIP does not work on this machine, or the process crashed.
    """
    command = [sys.executable, "-I", copy_rate.__file__, str(library)]
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"writable": copy_rate.SIZE / TIMEOUT}
    except OSError as error:
        raise NotMeasured(str(error)) from error
    try:
        rates = json.loads(process.stdout.splitlines()[-1])
        return {kind: float(rate) for kind, rate in rates.items()}
    except (ValueError, IndexError, AttributeError, TypeError):
        output = process.stderr.strip() or f"exit status {process.returncode}"
        last_line = output.splitlines()[-1]
        raise NotMeasured(f"{library.name}: {last_line:.200}") from None


def find_hip_libraries(tree: Tree) -> Iterator[Path]:
    """Yield the HIP libraries of the environment, then those of the system."""
    python = find_interpreter(tree)
    if python:
        for place in python.places:
            for folder in ("torch/lib", "_rocm_sdk_core/lib"):
                yield from sorted(place.path.glob(f"{folder}/libamdhip64.so*"))
        for folder in ("lib", "opt/rocm/lib"):
            yield from sorted(python.prefix.glob(f"{folder}/libamdhip64.so*"))
    for folder in ("opt/rocm*/lib", "usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib"):
        yield from tree.glob(f"{folder}/libamdhip64.so*")


def copies(tree: Tree) -> Result:
    """Copies from host memory to the GPU run at the usual rate. Some Linux kernels stall for a
    second per 2 MiB of a writable mapping, and models take minutes to load:
    https://github.com/ROCm/legacy-rocm-build/issues/6523"""
    need_gpu(tree)
    rates = _measure_copies(tree)
    measured = {f"{kind}_gbps": round(rate / 1e9, 3) for kind, rate in rates.items()}
    slowest = min(rates.values()) / 1e9
    if slowest >= SLOW:
        return fine(**measured)
    message = f"copies to the GPU run at {slowest:.3f} GB/s; 1 to 12 GB/s are usual"
    if hardware.find_kernel_fault(tree):
        message += ": this is a known fault of the kernel"
        return warning(message, "see doctor/kernel", **measured)
    message += f": kernel {tree.release} may have a fault that doctor/kernels.toml does not list"
    fix = "boot another kernel; until then load models without mmap"
    return warning(message, Fix(fix, needs_reboot=True), **measured)


def _measure_copies(tree: Tree) -> dict[str, float]:
    """Return bytes per second by kind of source mapping.

    Raises:
        CannotRun: The rates cannot be measured here.
    """
    measure_copies = tree.measure_copies or measure
    if not (tree.is_live or tree.measure_copies):
        raise CannotRun("copies were not measured: the doctor reads a copy of a machine's files")
    library = next(find_hip_libraries(tree), None)
    if library is None:
        raise CannotRun("copies were not measured: no libamdhip64.so was found")
    try:
        return measure_copies(library)
    except NotMeasured as reason:
        raise CannotRun(f"copies were not measured: {reason}") from reason
