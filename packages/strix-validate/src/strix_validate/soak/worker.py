# SPDX-License-Identifier: BSD-3-Clause
"""Load the GPU: `python -m strix_validate.soak.worker OPTIONS`, with options as JSON.

The loads take turns. A turn consists of steps of about half a second or, for the server, of one
round of requests each. If standard input is closed during a turn, the process ends after the
current step, so that no running kernel is killed. It writes one JSON object per line to standard
output:

    {"device": ..., "name": "cuda"}              once: the device that torch opened
    {"unable": "torch sees no GPU"}              no load can run; the process ends
    {"prepare": "product", "description": ..., "unit": ...}
                                                 the preparation of the load begins
    {"turn": 3, "load": "product"}               the load begins its turn
    {"step": 41, "load": "product", "rate": ..., "work": ..., "results": ..., "changed": ...,
     "error": ..., "fault": ""}                  a step ended; see loads.Step
    {"failed": "RuntimeError: ..."}              an exception was raised; the process ends
"""

import json
import os
import select
import sys
import time
from dataclasses import asdict
from itertools import count, cycle
from typing import TYPE_CHECKING, TextIO

from strix_validate.checks import CannotRun
from strix_validate.doctor import host

if TYPE_CHECKING:
    from strix_validate.soak.loads import Load


def _write(report: TextIO, **fields: object) -> None:
    report.write(json.dumps(fields) + "\n")
    report.flush()


def _is_input_closed() -> bool:
    """Return whether the recorder ended, or closed its end of standard input."""
    ready, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(ready)


def _take_turns(report: TextIO, loads: "list[Load]", turn_seconds: float) -> None:
    """Run the loads in turn until standard input is closed."""
    numbers = count(1)
    for turn, load in enumerate(cycle(loads)):
        _write(report, turn=turn, load=load.name)
        turn_begin = time.perf_counter()
        while time.perf_counter() - turn_begin < turn_seconds:
            if _is_input_closed():
                return
            begin = time.perf_counter()
            step = load.step()
            seconds = time.perf_counter() - begin
            _write(
                report,
                step=next(numbers),
                load=load.name,
                rate=step.work / load.scale / seconds,
                **asdict(step),
            )


def main(arguments: str) -> None:
    """Open the device and run the loads.

    Args:
        arguments: A JSON object with "device", and with "turn_seconds", "url" and "model" for the
            loads. Without "turn_seconds", only the device is described.
    """
    options = json.loads(arguments)
    # Libraries print to standard output, which is reserved for the recorder.
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    device = host.resolve_device(options["device"])
    description = host.describe_device(device)
    _write(report, device=description.model_dump(), name=device)
    if "turn_seconds" not in options:
        return
    if description.type == "none":
        _write(report, unable="torch sees no GPU")
        return
    try:
        from strix_validate.soak import loads

        loads.need_gpu_memory(device)
        turns = loads.make_loads(device, options["url"], options["model"])
        for load in turns:
            _write(report, prepare=load.name, description=load.description, unit=load.unit)
            load.prepare()
        _take_turns(report, turns, options["turn_seconds"])
    except CannotRun as reason:
        _write(report, unable=str(reason))
    except Exception as error:
        # A GPU library may raise any exception, and each exception is a result of the soak.
        message = f"{type(error).__name__}: {error}"
        _write(report, failed=message[:500])


if __name__ == "__main__":
    main(sys.argv[1])
