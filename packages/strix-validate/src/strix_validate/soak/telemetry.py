# SPDX-License-Identifier: BSD-3-Clause
"""What the GPU's sensors say, once a second: `python -m strix_validate.soak.telemetry`.

A process of its own, since a file of amdgpu may block while the GPU is being reset. Each line is a
JSON object with some of COLUMNS, or with "absent", the reason why there is no reading.
"""

import json
import re
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator

from strix_validate.doctor.tree import Tree

#: Numbers of a reading. limited_by is a text beside them.
COLUMNS = (
    "temperature_c",
    "clock_mhz",
    "memory_clock_mhz",
    "power_w",
    "busy_percent",
    "gpu_memory_mib",
)
_MIB = 2**20
#: struct gpu_metrics_v3_0 of the kernel's kgd_pp_interface.h, which Strix Halo has: its size, and
#: where its counters of throttling are; what each one counts.
_METRICS_SIZE, _RESIDENCY_OFFSET = 264, 228
_RESIDENCIES = (
    "PROCHOT",
    "sustained power",
    "fast power limit",
    "slow power limit",
    "CPU temperature",
    "GPU temperature",
    "SoC temperature",
)
#: Of nvidia-smi, in the order of COLUMNS.
_NVIDIA = "temperature.gpu,clocks.sm,clocks.mem,power.draw,utilization.gpu,memory.used"


def read_amd(tree: Tree) -> dict[str, float]:
    """Read the sensors of amdgpu below the GPU's folder of sysfs; leave out what is not there."""
    folder = tree.gpu_folder
    hwmon = f"{folder}/hwmon/hwmon*"
    memory = [tree.number(f"{folder}/mem_info_{kind}_used") for kind in ("vram", "gtt")]
    clock = _first(tree, f"{hwmon}/freq1_input", 1e6)
    power = _first(tree, f"{hwmon}/power1_average", 1e6)
    values = {
        "temperature_c": _first(tree, f"{hwmon}/temp1_input", 1e3),
        "clock_mhz": _level(tree, f"{folder}/pp_dpm_sclk") if clock is None else clock,
        "memory_clock_mhz": _level(tree, f"{folder}/pp_dpm_mclk"),
        "power_w": _first(tree, f"{hwmon}/power1_input", 1e6) if power is None else power,
        "busy_percent": _first(tree, f"{folder}/gpu_busy_percent", 1),
        "gpu_memory_mib": sum(filter(None, memory)) / _MIB if any(memory) else None,
    }
    return {name: round(value, 1) for name, value in values.items() if value is not None}


def _first(tree: Tree, pattern: str, divisor: float) -> float | None:
    """Return the number in the first file of a pattern, in the unit that the divisor gives."""
    numbers = (tree.number(str(file.relative_to(tree.root))) for file in tree.glob(pattern))
    number = next((number for number in numbers if number is not None), None)
    return None if number is None else number / divisor


def _level(tree: Tree, name: str) -> float | None:
    """Return the clock that a table of levels marks with an asterisk: "1: 2900Mhz *"."""
    match = re.search(r"(\d+)\s*Mhz\s*\*", tree.read(name) or "", re.I)
    return float(match.group(1)) if match else None


def throttle_counters(metrics: bytes) -> tuple[int, ...]:
    """Return the counters of throttling in gpu_metrics, none for another version of it."""
    if len(metrics) < _METRICS_SIZE:
        return ()
    if struct.unpack_from("<HBB", metrics) != (_METRICS_SIZE, 3, 0):
        return ()
    return struct.unpack_from(f"<{len(_RESIDENCIES)}I", metrics, _RESIDENCY_OFFSET)


def name_limits(before: tuple[int, ...], after: tuple[int, ...]) -> str:
    """Name the limits whose counters rose between two readings."""
    if len(before) != len(after):
        return ""
    rows = zip(_RESIDENCIES, before, after, strict=False)
    return ", ".join(name for name, old, new in rows if new > old)


def _amd_readings(tree: Tree) -> Iterator[dict]:
    counters: tuple[int, ...] = ()
    while True:
        before = counters
        try:
            counters = throttle_counters(tree.path(f"{tree.gpu_folder}/gpu_metrics").read_bytes())
        except OSError:
            counters = ()
        limits = name_limits(before, counters)
        yield read_amd(tree) | ({"limited_by": limits} if limits else {})
        time.sleep(1)


def parse_nvidia(line: str) -> dict[str, float]:
    """Return the numbers of a line of nvidia-smi; it writes "[N/A]" for what a GPU has not."""
    reading = {}
    for name, text in zip(COLUMNS, line.split(","), strict=False):
        if re.fullmatch(r"\s*\d+(\.\d+)?\s*", text):
            reading[name] = float(text)
    return reading


def _nvidia_readings() -> Iterator[dict]:
    layout = "--format=csv,noheader,nounits"
    command = ["nvidia-smi", f"--query-gpu={_NVIDIA}", layout, "--id=0", "-lms", "1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield from (parse_nvidia(line) for line in process.stdout or ())
    yield {"absent": f"nvidia-smi ended with status {process.returncode}"}


def readings(tree: Tree) -> Iterator[dict]:
    """Yield a reading each second: of amdgpu's files, else of nvidia-smi."""
    if tree.gpu_folder:
        yield from _amd_readings(tree)
    elif shutil.which("nvidia-smi"):
        yield from _nvidia_readings()
    else:
        yield {"absent": "no sensors: no amdgpu below /sys/class/drm, and no nvidia-smi"}


def resident_mib(tree: Tree, pid: int) -> float | None:
    """Return the memory of a process in MiB, or None without it."""
    match = re.search(r"^VmRSS:\s+(\d+) kB", tree.read(f"proc/{pid}/status") or "", re.M)
    return int(match.group(1)) / 1024 if match else None


if __name__ == "__main__":
    for reading in readings(Tree()):
        print(json.dumps(reading), flush=True)
