# SPDX-License-Identifier: BSD-3-Clause
"""Package test: vLLM counts an APU's memory correctly, and accepts the doctor's flags.

    python check_memory.py [--source DIR] [CASE...]

The doctor is the command `strix-validate doctor`. HIP, the kernel driver and the system's memory
are mocks. MemorySnapshot, request_memory and the platform are vLLM's own. No GPU is needed.
check_detection.py describes the option --source.
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
from check_detection import ROCM, STRIX_HALO, load_functions, make_nodes, select_platform
from strix_validate import testing

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A machine, and the values that vLLM must compute on it. Sizes are in GiB.

    Attributes:
        carve_out: The memory that the firmware reserves for the GPU.
        gtt: The system memory that the GPU may use.
        pages: TTM's page limit.
        memory: The system memory.
        available: The available system memory.
        hip: The free and the total memory that HIP returns.
        free: The free memory that vLLM must compute.
        default_fits: Whether vLLM must accept its default utilization.
        weights: The size of a model's weights.
        model_fits: Whether the doctor must print flags for the model.
    """

    carve_out: float
    gtt: float
    pages: float
    memory: float
    available: float
    hip: tuple[float, float]
    free: float
    default_fits: bool
    weights: int
    model_fits: bool = True

    @property
    def is_shared(self) -> bool:
        return self.carve_out < self.gtt


CASES = {
    "512 MiB and 96 GiB of GTT": Case(
        carve_out=0.5,
        gtt=96,
        pages=96,
        memory=125,
        available=118,
        hip=(96, 96),
        free=96,
        default_fits=True,
        weights=40,
    ),
    # the carve-out does not belong to the system memory, so the available 55 GiB do not matter
    "64 GiB carved out": Case(
        carve_out=64,
        gtt=31,
        pages=31,
        memory=62,
        available=55,
        hip=(63, 64),
        free=63,
        default_fits=True,
        weights=40,
    ),
    "GTT below the model": Case(
        carve_out=0.5,
        gtt=62,
        pages=62,
        memory=125,
        available=118,
        hip=(62, 62),
        free=62,
        default_fits=True,
        weights=70,
        model_fits=False,
    ),
    "the system uses most": Case(
        carve_out=0.5,
        gtt=120,
        pages=120,
        memory=125,
        available=40,
        hip=(119, 120),
        free=40,
        default_fits=False,
        weights=20,
    ),
    # If only amdgpu.gttsize is raised, and not ttm.pages_limit, HIP reports more free memory than
    # total memory.
    "page limit below GTT": Case(
        carve_out=0.5,
        gtt=128,
        pages=62,
        memory=125,
        available=118,
        hip=(120, 62),
        free=62,
        default_fits=True,
        weights=40,
    ),
}


def make_host(root: Path, case: Case) -> None:
    """Make the files of /sys and /proc that vLLM's platform and the doctor read."""
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
    """Replace functions of torch and psutil by functions that return the case's memory sizes."""
    free, total = (int(gib * GIB) for gib in case.hip)
    torch.accelerator.get_memory_info = lambda device: (free, total)
    torch.accelerator.memory_stats = lambda device: {}
    torch.accelerator.memory_reserved = lambda device: 0
    memory = types.SimpleNamespace(available=int(case.available * GIB))
    psutil.virtual_memory = lambda: memory


def measure(name: str, root: str, source: Path | None) -> list[str]:
    """Compare vLLM's values in this process with the case, and return a line for each fault.

    Args:
        name: The name of the case.
        root: A folder that replaces the root folder of the machine.
        source: The unpacked sdist of vLLM; None if vLLM is installed.
    """
    case = CASES[name]
    platform = select_platform(f"{root}/sys/class", "lists", True, source)
    if type(platform).__name__ != ROCM:
        return [f"the platform is {platform}"]
    opened = []
    properties = types.SimpleNamespace(is_integrated=1, total_memory=0)

    def get_device_properties(device: object) -> object:
        opened.append(device)
        return properties

    torch.cuda.get_device_properties = get_device_properties
    total = platform.get_device_total_memory()
    faults = ["reading the total memory initializes HIP"] if opened else []
    fake_machine(case)
    from vllm.utils import mem_utils

    snapshot = mem_utils.MemorySnapshot(device="cuda:0")
    # pairs of vLLM's value and the expected value
    comparisons = {
        "total": (total, max(case.carve_out, case.gtt) * GIB),
        "integrated": (platform.is_integrated_gpu(0), case.is_shared),
        "free": (snapshot.free_memory, case.free * GIB),
        # vLLM chooses default batch sizes by this capability: gfx115x (11.5) gets the small ones,
        # as GB10 (12.1, NVIDIA's DGX Spark) does
        "capability": (platform.is_device_capability((11, 5)), True),
        "default fits": (fits(snapshot, 0.92, mem_utils), case.default_fits),
    }
    for name, (value, expected) in comparisons.items():
        if value != expected:
            faults.append(f"{name}: {value}, not {expected}")
    memory = testing.read_memory_budget(Path(root))
    if memory is None or memory.total != snapshot.total_memory:
        return [*faults, f"the doctor reads {memory}, but HIP's total is {snapshot.total_memory}"]
    flags = memory.flags(case.weights * GIB)
    if bool(flags) != case.model_fits:
        return [*faults, f"the doctor's flags for a model of {case.weights} GiB: {flags}"]
    if flags:
        faults += find_flag_faults(flags, snapshot, case.weights * GIB, mem_utils)
    return faults


def find_flag_faults(
    flags: str,
    snapshot: object,
    weights: int,
    mem_utils: types.ModuleType,
) -> Iterator[str]:
    """Yield a line for each of the doctor's flags that vLLM refuses or that needs too much memory.

    Args:
        flags: The doctor's flags.
        snapshot: vLLM's count of the memory.
        weights: The size of the model, in bytes.
        mem_utils: vLLM's module of that name.
    """
    parse = load_functions(
        "utils/argparse_utils",
        {"human_readable_int"},
        re=re,
        argparse=argparse,
    ).human_readable_int
    _, utilization, _, cache = flags.split()
    if not fits(snapshot, float(utilization), mem_utils):
        yield f"the doctor's --gpu-memory-utilization {utilization} is refused"
    required = weights + parse(cache) + testing.OVERHEAD
    if required > snapshot.total_memory * float(utilization):
        yield f"the doctor's --kv-cache-memory-bytes {cache} exceeds the memory that vLLM may use"


def fits(snapshot: object, utilization: float, mem_utils: types.ModuleType) -> bool:
    """Return whether vLLM accepts a utilization when it starts."""
    worker = load_functions(
        "v1/worker/utils",
        {"request_memory"},
        math=math,
        format_gib=mem_utils.format_gib,
        logger=logging.getLogger(),
    )
    config = types.SimpleNamespace(gpu_memory_utilization=utilization)
    try:
        worker.request_memory(snapshot, config)
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
        for name in options.cases or CASES:
            with tempfile.TemporaryDirectory() as root:
                make_host(Path(root), CASES[name])
                try:
                    faults = pool.apply(measure, (name, root, options.source))
                except Exception as error:
                    faults = [f"{type(error).__name__}: {error}"]
            print(f"{name}: {'; '.join(faults) or 'ok'}", flush=True)
            failed += bool(faults)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
