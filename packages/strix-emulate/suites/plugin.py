# SPDX-License-Identifier: BSD-3-Clause
"""A plugin of pytest for suites.py. It runs torch on the emulated device, and records outcomes."""

import ctypes
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

#: Errors of HIP after which the device executes nothing more, each with the outcome of the case
#: that causes it. The error 2 means that the emulator is out of memory, 700 a trap other than
#: abort(), 719 abort(), 801 an unsupported call, and 999 a fault of the emulator.
_LASTING = {2: "error", 700: "trapped", 719: "error", 801: "refused", 999: "error"}
#: Part of Triton's messages about a type that the GPU does not support.
_REFUSES = "not supported in this architecture"
#: Matches files whose assertions compare results: tests, and torch's and numpy's helpers for tests.
_COMPARES = re.compile(r"/tests?/|/(torch|numpy)/(_numpy/)?testing/|/test_\w+\.py$")


def pytest_addoption() -> None:
    """Let torch use the emulated device, if this process was started with one.

    pytest calls this hook before it loads a conftest.py, which may use the device.
    """
    if "STRIX_EMULATE_PYTHON" in os.environ:
        from strix_emulate import torch_device

        torch_device.install()


@pytest.hookimpl(trylast=True)  # behind pytest's own -k
def pytest_collection_modifyitems(session, config, items) -> None:
    """Write the names of all cases to a file, or keep only the cases that suites.py names."""
    if "SUITES_NAMES" in os.environ:
        Path(os.environ["SUITES_NAMES"]).write_text("\n".join(item.nodeid for item in items))
    if "SUITES_CASES" in os.environ:
        chosen = set(Path(os.environ["SUITES_CASES"]).read_text().splitlines())
        items[:] = [item for item in items if item.nodeid in chosen]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Record that a case begins, and let an alarm end the process if the case takes too long."""
    _record(item.nodeid, "started")
    signal.alarm(int(os.environ.get("SUITES_SECONDS", "0")))
    try:
        return (yield)
    finally:
        signal.alarm(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Record the outcome of a case, and stop if the next case needs a new process.

    After an error of _LASTING, a new process is needed, because the device executes nothing more.
    After any other failure, it is needed because pytest keeps the tensors of the failed case, which
    can fill the device's memory.
    """
    report = yield
    if report.when == "call" or report.outcome != "passed":
        _record(item.nodeid, _outcome(call, report))
        if report.outcome == "failed":
            # Print it now: a later case may end the process before pytest prints its summary.
            print(f"\n{item.nodeid}\n{report.longreprtext}", file=sys.__stderr__, flush=True)
        if report.outcome == "failed" or _lost():
            item.session.shouldstop = "the next case needs a new process"
    return report


def _outcome(call, report) -> str:
    if report.outcome in ("passed", "skipped"):
        return report.outcome
    if _lost():
        return _lost()
    error = call.excinfo.value
    if isinstance(error, AssertionError):
        place = str(call.excinfo.traceback[-1].path)
        return "wrong" if _COMPARES.search(place) else "error"
    refused = isinstance(error, NotImplementedError) or _REFUSES in str(error)
    return "refused" if refused else "error"


def _lost() -> str:
    """Return the case's outcome if the device executes nothing more, else an empty string."""
    if "STRIX_EMULATE_PYTHON" not in os.environ:
        return ""
    return _LASTING.get(ctypes.CDLL("libamdhip64.so.7").hipDeviceSynchronize(), "")


def _record(name: str, outcome: str) -> None:
    if "SUITES_OUTCOMES" in os.environ:
        with Path(os.environ["SUITES_OUTCOMES"]).open("a") as file:
            file.write(json.dumps([name, outcome]) + "\n")
