# SPDX-License-Identifier: BSD-3-Clause
"""A soak's worker, with a fault in torch: `faulty_worker.py FAULT OPTIONS`.

The fault comes in the fourth step of the load `product`: "wrong" computes a wrong number, "hang"
writes the file $HANGS and never returns, "crash" ends the process, and "error" raises an exception.
"""

import os
import sys
import time
from pathlib import Path

import torch
from strix_validate.soak import loads, worker

FAULT, OPTIONS = sys.argv[1:]
step = loads.ProductLoad.step
steps = []
mm = torch.mm


def faulty_step(self):
    steps.append(self)
    if len(steps) == 4:
        if FAULT == "hang":
            Path(os.environ["HANGS"]).touch()
            time.sleep(10**6)
        if FAULT == "crash":
            os.abort()
        if FAULT == "error":
            raise RuntimeError("HIP error: unspecified launch failure")
        torch.mm = lambda *args: mm(*args).index_fill_(1, torch.tensor([3]), 7.0)
    try:
        return step(self)
    finally:
        torch.mm = mm


loads.ProductLoad.step = faulty_step
loads.STEP_SECONDS = 0.02
worker.main(OPTIONS)
