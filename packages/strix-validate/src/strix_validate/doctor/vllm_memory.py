# SPDX-License-Identifier: BSD-3-Clause
"""The memory that vLLM may use on Strix Halo, and the flags of `vllm serve` that fit it.

The driver gives HIP one of two pools: the BIOS carve-out, or, where GTT may map more than that, the
system's memory up to TTM's limit of pages (amdgpu_ttm_init, amdgpu_amdkfd_get_local_mem_info).
"""

import math
from dataclasses import dataclass

from strix_validate.doctor.containers import available_memory
from strix_validate.doctor.tree import Tree

GIB = 2**30
PAGE = 4096
#: Bytes of the system's memory to keep from the GPU.
SPARE = 4 * GIB
#: Bytes beside weights and KV cache: activations, graphs, HIP's own. vLLM prints what it measures.
OVERHEAD = 4 * GIB
#: vLLM's default for --gpu-memory-utilization, kept as the upper bound.
UTILIZATION = 0.92


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes: what HIP calls its total, and how much of it vLLM may take now."""

    total: int
    usable: int
    is_shared: bool  # the system's memory, not a carve-out

    @property
    def utilization(self) -> float:
        """--gpu-memory-utilization: of the total, rounded down to hundredths."""
        return min(UTILIZATION, math.floor(100 * self.usable / self.total) / 100)

    def cache_gib(self, weights: int) -> int:
        """Return whole GiB of KV cache beside a model of so many bytes; below 1: no room."""
        return math.floor((self.total * self.utilization - weights - OVERHEAD) / GIB)

    def flags(self, weights: int) -> str:
        """Return flags for a model of so many bytes (0: unknown), or nothing if it does not fit."""
        if (cache := self.cache_gib(weights)) < 1:
            return ""
        known = f"--kv-cache-memory-bytes {cache}G"
        unknown = "(--model-gib adds --kv-cache-memory-bytes)"
        return f"--gpu-memory-utilization {self.utilization:.2f} {known if weights else unknown}"


def memory_of(tree: Tree) -> MemoryBudget | None:
    """Return what the tree's GPU may use; None if a number cannot be read."""
    carve_out, gtt = (
        tree.number(f"{tree.gpu_folder}/mem_info_{pool}_total") for pool in ("vram", "gtt")
    )
    available = available_memory(tree)
    if carve_out is None or gtt is None or available is None:
        return None
    pool = "gtt" if carve_out < gtt else "vram"
    used = tree.number(f"{tree.gpu_folder}/mem_info_{pool}_used") or 0
    if pool == "vram":
        return MemoryBudget(carve_out, max(carve_out - used, 0), False)
    pages = tree.number("sys/module/ttm/parameters/pages_limit")
    total = pages * PAGE if pages else gtt
    usable = min(min(total, gtt) - used, available - SPARE)
    return MemoryBudget(total, max(usable, 0), True)
