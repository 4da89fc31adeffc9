# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's own count of an APU's memory, and whether the flags that the doctor prints fit it.

    python check_memory.py [--source DIR] [CASE...]

HIP, the kernel driver and the system's memory are mocks; MemorySnapshot, request_memory and the
platform are vLLM's. No GPU is needed. --source is as in check_detection.py.
"""

import argparse
import logging
import math
import multiprocessing
import re
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from check_detection import ROCM, STRIX_HALO, functions, make_nodes, select_platform
from strix_validate import testing

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A machine in GiB, and what vLLM must make of it."""

    carve_out: float
    gtt: float
    pages: float  # TTM's limit
    memory: float
    available: float
    hip: tuple[float, float]  # free and total
    free: float  # as vLLM must count it
    default_fits: bool  # vLLM's default utilization
    weights: int
    model_fits: bool = True

    @property
    def is_shared(self) -> bool:
        return self.carve_out < self.gtt


CASES = {
    "512 MiB and 96 GiB of GTT": Case(0.5, 96, 96, 125, 118, (96, 96), 96, True, 40),
    # the carve-out is not the system's: 55 available GiB say nothing about it
    "64 GiB carved out": Case(64, 31, 31, 62, 55, (63, 64), 63, True, 40),
    "GTT below the model": Case(0.5, 62, 62, 125, 118, (62, 62), 62, True, 70, False),
    "the system uses most": Case(0.5, 120, 120, 125, 40, (119, 120), 40, False, 20),
    # seen with amdgpu.gttsize raised and ttm.pages_limit not: more free than in all
    "page limit below GTT": Case(0.5, 128, 62, 125, 118, (120, 62), 62, True, 40),
}


def make_host(root: Path, case: Case) -> None:
    """The files that vLLM's platform and the doctor read."""
    make_nodes(root / "sys/class", [STRIX_HALO + "simd_count 80\ndrm_render_minor 128\n"])
    for card in ("card1", "renderD128"):
        device = root / "sys/class/drm" / card / "device"
        device.mkdir(parents=True)
        (device / "mem_info_vram_total").write_text(f"{int(case.carve_out * GIB)}\n")
        (device / "mem_info_gtt_total").write_text(f"{int(case.gtt * GIB)}\n")
    parameters = root / "sys/module/ttm/parameters"
    parameters.mkdir(parents=True)
    (parameters / "pages_limit").write_text(f"{int(case.pages * GIB) // 4096}\n")
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(
        f"MemTotal: {int(case.memory * 2**20)} kB\nMemAvailable: {int(case.available * 2**20)} kB\n"
    )


def fake_machine(case: Case) -> None:
    """HIP's and psutil's answers."""
    free, total = (int(gib * GIB) for gib in case.hip)
    torch.accelerator.get_memory_info = lambda device: (free, total)
    torch.accelerator.memory_stats = lambda device: {}
    torch.accelerator.memory_reserved = lambda device: 0
    memory = types.SimpleNamespace(available=int(case.available * GIB))
    psutil.virtual_memory = lambda: memory


def measure(name: str, root: str, source: Path | None) -> list[str]:
    """What is wrong in this process, with `root` for the machine's files."""
    case = CASES[name]
    platform = select_platform(f"{root}/sys/class", "lists", True, source)
    if type(platform).__name__ != ROCM:
        return [f"the platform is {platform}"]
    opened = []
    properties = types.SimpleNamespace(is_integrated=1, total_memory=0)
    torch.cuda.get_device_properties = lambda device: opened.append(device) or properties
    total = platform.get_device_total_memory()
    wrong = ["HIP is opened for the total"] if opened else []
    fake_machine(case)
    from vllm.utils import mem_utils

    snapshot = mem_utils.MemorySnapshot(device="cuda:0")
    said = {
        "total": (total, max(case.carve_out, case.gtt) * GIB),
        "integrated": (platform.is_integrated_gpu(0), case.is_shared),
        "free": (snapshot.free_memory, case.free * GIB),
        # GB10's and gfx115x's tier of default batch sizes
        "capability": (platform.is_device_capability((11, 5)), True),
        "default fits": (fits(snapshot, 0.92, mem_utils), case.default_fits),
    }
    wrong += [f"{what}: {found}, not {right}" for what, (found, right) in said.items()
              if found != right]  # fmt: skip
    found = testing.memory_of(Path(root))
    if found is None or found.total != snapshot.total_memory:
        return [*wrong, f"the doctor reads {found}, HIP's total is {snapshot.total_memory}"]
    flags = found.flags(case.weights * GIB)
    if bool(flags) != case.model_fits:
        return [*wrong, f"the doctor's flags for a model of {case.weights} GiB: {flags}"]
    if flags:
        wrong += refused(flags, snapshot, case.weights * GIB, mem_utils)
    return wrong


def refused(
    flags: str, snapshot: object, weights: int, mem_utils: types.ModuleType
) -> Iterator[str]:
    """Which of the doctor's flags vLLM does not accept, or cannot keep."""
    parse = functions(
        "utils/argparse_utils", {"human_readable_int"}, re=re, argparse=argparse
    ).human_readable_int
    _, utilization, _, cache = flags.split()
    if not fits(snapshot, float(utilization), mem_utils):
        yield f"the doctor's --gpu-memory-utilization {utilization} is refused"
    if weights + parse(cache) + testing.OVERHEAD > snapshot.total_memory * float(utilization):
        yield f"the doctor's --kv-cache-memory-bytes {cache} is more than vLLM would take"


def fits(snapshot: object, utilization: float, mem_utils: types.ModuleType) -> bool:
    """Whether vLLM's start accepts a utilization."""
    worker = functions(
        "v1/worker/utils",
        {"request_memory"},
        math=math,
        format_gib=mem_utils.format_gib,
        logger=logging.getLogger(),
    )
    try:
        worker.request_memory(snapshot, types.SimpleNamespace(gpu_memory_utilization=utilization))
    except ValueError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    options = parser.parse_args()
    failed = 0
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for case in options.cases or CASES:
            with tempfile.TemporaryDirectory() as root:
                make_host(Path(root), CASES[case])
                try:
                    wrong = pool.apply(measure, (case, root, options.source))
                except Exception as error:
                    wrong = [f"{type(error).__name__}: {error}"]
            print(f"{case}: {'; '.join(wrong) or 'ok'}", flush=True)
            failed += bool(wrong)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
