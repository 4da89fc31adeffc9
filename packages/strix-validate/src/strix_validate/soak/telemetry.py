# SPDX-License-Identifier: BSD-3-Clause
"""Read the GPU's sensors once a second: `python -m strix_validate.soak.telemetry`.

This runs in a process of its own, because reading a file of amdgpu may block while the GPU is
reset. Each line of output is a JSON object with some of COLUMNS, or with "absent", the reason why
there is no reading.
"""

import json
import re
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator

from strix_validate.doctor.tree import Tree

#: The numbers of a reading. A reading may also have the key limited_by with a text.
COLUMNS = (
    "temperature_c",
    "clock_mhz",
    "memory_clock_mhz",
    "power_w",
    "busy_percent",
    "gpu_memory_mib",
)
_MIB = 2**20
#: The size of struct gpu_metrics_v3_0 (kgd_pp_interface.h of the kernel), which Strix Halo's driver
#: writes, and the offset of its throttling counters.
_METRICS_SIZE = 264
_RESIDENCY_OFFSET = 228
#: The limit that each throttling counter of gpu_metrics_v3_0 counts, in the struct's order.
_RESIDENCIES = (
    "PROCHOT",
    "sustained power",
    "fast power limit",
    "slow power limit",
    "CPU temperature",
    "GPU temperature",
    "SoC temperature",
)
#: nvidia-smi's names of COLUMNS, in the same order.
_NVIDIA = (
    "temperature.gpu",
    "clocks.sm",
    "clocks.mem",
    "power.draw",
    "utilization.gpu",
    "memory.used",
)


def read_amd(tree: Tree) -> dict[str, float]:
    """Read the sensors of amdgpu below the GPU's folder of sysfs; leave out absent ones."""
    folder = tree.gpu_folder
    hwmon = f"{folder}/hwmon/hwmon*"
    clock = _read_first(tree, f"{hwmon}/freq1_input", 1e6)
    if clock is None:
        clock = _read_level(tree, f"{folder}/pp_dpm_sclk")
    power = _read_first(tree, f"{hwmon}/power1_average", 1e6)
    if power is None:
        power = _read_first(tree, f"{hwmon}/power1_input", 1e6)
    values = {
        "temperature_c": _read_first(tree, f"{hwmon}/temp1_input", 1e3),
        "clock_mhz": clock,
        "memory_clock_mhz": _read_level(tree, f"{folder}/pp_dpm_mclk"),
        "power_w": power,
        "busy_percent": _read_first(tree, f"{folder}/gpu_busy_percent", 1),
        "gpu_memory_mib": _read_gpu_memory(tree),
    }
    return {name: round(value, 1) for name, value in values.items() if value is not None}


def _read_gpu_memory(tree: Tree) -> float | None:
    """Return the used memory of carve-out and GTT together, in MiB."""
    carve_out = tree.number(f"{tree.gpu_folder}/mem_info_vram_used") or 0
    gtt = tree.number(f"{tree.gpu_folder}/mem_info_gtt_used") or 0
    used = carve_out + gtt
    return used / _MIB if used else None


def _read_first(tree: Tree, pattern: str, divisor: float) -> float | None:
    """Return the first number in the files that match a pattern, divided by the divisor."""
    for file in tree.glob(pattern):
        number = tree.number(str(file.relative_to(tree.root)))
        if number is not None:
            return number / divisor
    return None


def _read_level(tree: Tree, name: str) -> float | None:
    """Return the clock that a table of levels marks with an asterisk: "1: 2900Mhz *"."""
    match = re.search(r"(\d+)\s*Mhz\s*\*", tree.read(name) or "", re.I)
    return float(match[1]) if match else None


def read_throttle_counters(metrics: bytes) -> tuple[int, ...]:
    """Return the counters of throttling in gpu_metrics; empty for another version of the struct."""
    if len(metrics) < _METRICS_SIZE:
        return ()
    if struct.unpack_from("<HBB", metrics) != (_METRICS_SIZE, 3, 0):
        return ()
    return struct.unpack_from(f"<{len(_RESIDENCIES)}I", metrics, _RESIDENCY_OFFSET)


def name_limits(before: tuple[int, ...], after: tuple[int, ...]) -> str:
    """Return the names of the limits whose counters rose between two readings."""
    if len(before) != len(after):
        return ""
    rows = zip(_RESIDENCIES, before, after, strict=False)
    return ", ".join(name for name, old, new in rows if new > old)


def _read_amd_each_second(tree: Tree) -> Iterator[dict]:
    file = tree.path(f"{tree.gpu_folder}/gpu_metrics")
    counters: tuple[int, ...] = ()
    while True:
        before = counters
        try:
            counters = read_throttle_counters(file.read_bytes())
        except OSError:
            counters = ()
        reading: dict = read_amd(tree)
        limits = name_limits(before, counters)
        if limits:
            reading["limited_by"] = limits
        yield reading
        time.sleep(1)


def parse_nvidia(line: str) -> dict[str, float]:
    """Return the numbers in a line of nvidia-smi, which writes "[N/A]" for missing ones."""
    reading = {}
    for name, text in zip(COLUMNS, line.split(","), strict=False):
        if re.fullmatch(r"\s*\d+(\.\d+)?\s*", text):
            reading[name] = float(text)
    return reading


def _read_nvidia_each_second() -> Iterator[dict]:
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(_NVIDIA)}",
        "--format=csv,noheader,nounits",
        "--id=0",
        "-lms",
        "1000",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            yield parse_nvidia(line)
    yield {"absent": f"nvidia-smi ended with status {process.returncode}"}


def readings(tree: Tree) -> Iterator[dict]:
    """Yield a reading each second, from amdgpu's files or else from nvidia-smi."""
    if tree.gpu_folder:
        yield from _read_amd_each_second(tree)
    elif shutil.which("nvidia-smi"):
        yield from _read_nvidia_each_second()
    else:
        yield {"absent": "no sensors: no amdgpu below /sys/class/drm, and no nvidia-smi"}


def resident_mib(tree: Tree, pid: int) -> float | None:
    """Return the resident memory of a process in MiB, or None if it does not run."""
    match = re.search(r"^VmRSS:\s+(\d+) kB", tree.read(f"proc/{pid}/status") or "", re.M)
    return int(match[1]) / 1024 if match else None


if __name__ == "__main__":
    for reading in readings(Tree()):
        print(json.dumps(reading), flush=True)
