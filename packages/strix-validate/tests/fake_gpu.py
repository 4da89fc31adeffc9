# SPDX-License-Identifier: BSD-3-Clause
"""A mock of a GPU under load. The test drives its clock, so that an hour takes no time."""

import json
import os
from pathlib import Path

from strix_validate.doctor.tree import Tree
from strix_validate.reporting.record import Device
from strix_validate.soak.recorder import Recorder
from strix_validate.soak.story import Story

GPU = Device(type="gpu", architecture="gfx1151", build="rocm")
LOADS = {"attention": "tflops", "product": "tflops", "copy": "gbps"}
TURN = 15


class Clock:
    """A clock that moves only in wait_until. At `interrupt_at`, Ctrl-C is pressed."""

    def __init__(self, interrupt_at=float("inf")):
        self.seconds = 0.0
        self.interrupt_at = interrupt_at

    def now(self):
        return self.seconds

    def wait_until(self, moment):
        self.seconds = moment
        if moment >= self.interrupt_at:
            raise KeyboardInterrupt


class FakeGpu:
    """A mock of a soak's worker on a GPU. It runs three loads in turn, with two steps per second.

    Each load runs for 15 seconds at a time.

    Args:
        hang_at: The second after which the worker sends nothing.
        die_at: The second from which the process has the exit status `status`.
        last_line: A line that the worker writes when it dies.
        reading: Called with the second and the load. Returns changes to the sensors' reading.
        step: Called with the second, the load and the step's number. Returns changes to the message
            of a correct step.
        prepared_at: The second in which the first turn begins.
    """

    def __init__(
        self,
        clock,
        *,
        hang_at=float("inf"),
        die_at=float("inf"),
        status=-9,
        last_line="",
        reading=None,
        step=None,
        prepared_at=20,
    ):
        self.clock = clock
        self.hang_at = hang_at
        self.die_at = die_at
        self.exit_status = status
        self.last_line = last_line
        self.change = step or (lambda seconds, load, number: {})
        self.read = reading or (lambda seconds, load: {})
        self.prepared_at = prepared_at
        self.pid = os.getpid()
        self.written = 0.0
        self.turn = -1
        self.numbers = dict.fromkeys(LOADS, 0)
        self.sensors = Sensors(self)
        self.begin = [
            {"prepare": n, "description": f"{n} of size", "unit": u} for n, u in LOADS.items()
        ]

    def load_at(self, seconds):
        turn = int(seconds - self.prepared_at) // TURN
        return turn, list(LOADS)[turn % len(LOADS)]

    def lines(self):
        messages = self.begin
        self.begin = []
        end = min(self.clock.seconds, self.hang_at, self.die_at)
        while self.written + 0.5 <= end:
            self.written += 0.5
            if self.written <= self.prepared_at:
                continue
            turn, load = self.load_at(self.written)
            if turn != self.turn:
                self.turn = turn
                messages.append({"turn": turn, "load": load})
            self.numbers[load] += 1
            correct_step = {"rate": 30.0, "results": 40, "changed": 0, "error": 0.2, "fault": ""}
            messages.append(
                {"step": 1, "load": load}
                | correct_step
                | self.change(self.written, load, self.numbers[load])
            )
        lines = [json.dumps(message) for message in messages]
        if self.status() is not None and self.last_line:
            lines.append(self.last_line)
            self.last_line = ""
        return lines

    def status(self):
        return self.exit_status if self.clock.seconds >= self.die_at else None

    def kernel_state(self):
        return "D in amdgpu_fence_wait" if self.clock.seconds >= self.hang_at else "R"


class Sensors:
    """A mock of the process that reads the sensors."""

    def __init__(self, gpu):
        self.gpu = gpu

    def lines(self):
        seconds = self.gpu.clock.seconds
        load = self.gpu.load_at(seconds)[1] if seconds >= self.gpu.prepared_at else ""
        reading = {"temperature_c": 70, "clock_mhz": 2700, "power_w": 110, "gpu_memory_mib": 4000}
        return [json.dumps(reading | self.gpu.read(seconds, load))]


def soak(gpu, *, minutes=60, tree=None, faults=None, keep=lambda row: None, device=GPU):
    """Record a soak of a mock GPU, and return the recorded Story.

    Args:
        gpu: A FakeGpu.
        minutes: The duration.
        tree: The machine's files.
        faults: The faults that the Linux kernel logs, by second.
        keep: A function that is called with each recorded row.
        device: The device that the record names.
    """
    story = Story(device)
    faults = dict(faults or {})

    def kernel_faults():
        due = [seconds for seconds in faults if seconds <= gpu.clock.seconds]
        return [faults.pop(seconds) for seconds in due]

    tree = tree or Tree(Path("/without-a-machine"))
    recorder = Recorder(story, gpu, gpu.sensors, kernel_faults, keep, gpu.clock, tree)
    recorder.run(minutes * 60, 120)
    return story
