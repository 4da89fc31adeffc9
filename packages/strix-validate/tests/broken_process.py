# SPDX-License-Identifier: BSD-3-Clause
"""Four checks for a child process that does not import torch.

$FAULT names the fault of the second check. The other three checks pass.
"""

import os
import signal
import time
from pathlib import Path

from strix_validate.checks import Check

CHECKS = [Check(f"here/{n}", "", "") for n in range(4)]


def checks():
    """Return the checks, each with its function."""

    def crash(options):
        os.kill(os.getpid(), signal.SIGSEGV)

    def hang(options):
        Path(os.environ["MARK"]).touch()
        time.sleep(1000)

    def slow(options):  # runs until the parent process's time limit is over
        mark = Path(os.environ["MARK"])
        mark.touch()
        while mark.exists():
            time.sleep(0.05)
        return {}

    def fail(options):
        raise ValueError("wrong")

    faults = {"crash": crash, "hang": hang, "slow": slow, "fail": fail}
    functions = {check: lambda options: {} for check in CHECKS}
    functions[CHECKS[1]] = faults[os.environ["FAULT"]]
    return functions
