# SPDX-License-Identifier: BSD-3-Clause
"""Load the GPU for an hour (a soak), and record its state every second.

command.py and recorder.py are the recorder. Everything that may hang with the GPU runs in a child
process. worker.py runs the loads, and telemetry.py reads the sensors.
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
