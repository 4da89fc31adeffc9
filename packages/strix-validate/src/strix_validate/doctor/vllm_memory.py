# SPDX-License-Identifier: BSD-3-Clause
"""Compute the memory that vLLM may use on Strix Halo, and the flags of `vllm serve` for it.

The driver gives HIP one of two pools. If GTT may map more than the BIOS carve-out, the pool is the
system's memory, up to TTM's limit of pages. Otherwise, the pool is the carve-out (amdgpu_ttm_init,
amdgpu_amdkfd_get_local_mem_info).
"""

import math
from dataclasses import dataclass

from strix_validate.doctor import parameters
from strix_validate.doctor.containers import read_available_memory
from strix_validate.doctor.tree import Tree

GIB = 2**30
#: Bytes of a page of memory.
PAGE = 4096
#: Bytes of the system's memory that the GPU should not use.
SPARE = 4 * GIB
#: Bytes that vLLM needs besides weights and KV cache: activations, graphs, and HIP itself. vLLM
#: prints the size that it measures.
OVERHEAD = 4 * GIB
#: vLLM's default for --gpu-memory-utilization; no larger share is suggested.
UTILIZATION = 0.92


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that vLLM may use.

    Attributes:
        total: Bytes that HIP reports as the GPU's total.
        usable: Bytes of the total that vLLM may take now.
        is_shared: Whether the pool is the system's memory rather than a carve-out.
    """

    total: int
    usable: int
    is_shared: bool

    @property
    def utilization(self) -> float:
        """The value of --gpu-memory-utilization.

        It is the usable share of the total, rounded down to hundredths, and at most UTILIZATION.
        """
        hundredths = math.floor(100 * self.usable / self.total)
        return min(UTILIZATION, hundredths / 100)

    def cache_gib(self, weights: int) -> int:
        """Return the size of the KV cache that fits besides a model, in whole GiB.

        Args:
            weights: Bytes of the model's weights.

        Returns:
            The size; less than 1 if there is no room for a cache.
        """
        cache = self.total * self.utilization - weights - OVERHEAD
        return math.floor(cache / GIB)

    def flags(self, weights: int) -> str:
        """Return the flags of `vllm serve` for a model, or "" if it does not fit.

        Args:
            weights: Bytes of the model's weights, or 0 if unknown.
        """
        cache = self.cache_gib(weights)
        if cache < 1:
            return ""
        share = f"--gpu-memory-utilization {self.utilization:.2f}"
        if weights:
            return f"{share} --kv-cache-memory-bytes {cache}G"
        return f"{share} (doctor --model-gib adds --kv-cache-memory-bytes)"


def read_memory_budget(tree: Tree) -> MemoryBudget | None:
    """Return the memory that the tree's GPU may use, or None if a number cannot be read."""
    carve_out = tree.number(f"{tree.gpu_folder}/mem_info_vram_total")
    gtt = tree.number(f"{tree.gpu_folder}/mem_info_gtt_total")
    available = read_available_memory(tree)
    if carve_out is None or gtt is None or available is None:
        return None
    if carve_out >= gtt:
        used = tree.number(f"{tree.gpu_folder}/mem_info_vram_used") or 0
        return MemoryBudget(carve_out, max(carve_out - used, 0), is_shared=False)
    used = tree.number(f"{tree.gpu_folder}/mem_info_gtt_used") or 0
    pages = parameters.read_pages_limit(tree)
    total = pages * PAGE if pages else gtt
    usable = min(min(total, gtt) - used, available - SPARE)
    return MemoryBudget(total, max(usable, 0), is_shared=True)
