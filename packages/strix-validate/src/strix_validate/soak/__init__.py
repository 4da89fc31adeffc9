# SPDX-License-Identifier: BSD-3-Clause
"""Load the GPU for an hour, and record every second what it does.

command.py is the recorder. Everything that may hang with the GPU runs in a child process: the loads
in worker.py, the readings of sensors in telemetry.py.
"""

__all__ = [
    "advice",
    "command",
    "kernel_log",
    "loads",
    "processes",
    "recorder",
    "story",
    "telemetry",
    "verdicts",
    "worker",
]
