# SPDX-License-Identifier: BSD-3-Clause
"""Statistics of a kernel and of a launch: instructions by class, memory traffic, occupancy."""

import re
from collections import Counter
from dataclasses import asdict

from strix_emulate.code.decode import Instruction
from strix_emulate.code.kernel import Kernel
from strix_emulate.code.target import Target
from strix_emulate.instructions.vmem import is_memory
from strix_emulate.launches import Launch
from strix_emulate.run.program import BLOCK_ENDS, NO_EFFECT, WAITS, supported_mnemonics

_PREFIXES = {
    "ds_": "lds",
    "scratch_": "scratch",
    "s_load": "smem",
    "buffer_": "vmem",
    "global_": "vmem",
    "flat_": "vmem",
    "v_": "valu",
    "s_": "salu",
}
#: Operations of one v_wmma_*_16x16x16_*: 16**3 products and as many sums.
_WMMA_FLOPS = 2 * 16**3
#: Matches the bits per lane at the end of a memory instruction's name, such as global_load_b128.
_LANE_BITS = re.compile(r"_[a-z](\d+)$")


def classify(ins: Instruction) -> str:
    """Return the class of an instruction: valu, vopd, wmma, salu, lds, vmem, scratch, smem, ..."""
    name = ins.name
    if ins.pair:
        return "vopd"
    if name.startswith("v_wmma"):
        return "wmma"
    if name == "s_barrier":
        return "barrier"
    if name in WAITS:
        return "wait"
    if name in NO_EFFECT or name == "s_sendmsg":
        return "hint"
    if name in BLOCK_ENDS:
        return "branch"
    for prefix, kind in _PREFIXES.items():
        if name.startswith(prefix):
            return kind
    return "unknown"


def describe_kernel(kernel: Kernel, instructions: list[Instruction]) -> dict:
    """Return the static facts of a kernel, ready for JSON.

    "lds" is in bytes per workgroup, "scratch" in bytes per lane.
    """
    classes = Counter(classify(ins) for ins in instructions)
    lds = kernel.lds + kernel.launch_lds
    target = kernel.target
    return {
        "kernel": kernel.name,
        "target": target.name,
        "instructions": len(instructions),
        "classes": dict(sorted(classes.items())),
        "wmma_share": round(classes["wmma"] / max(1, len(instructions)), 4),
        "vgprs": kernel.vgprs,
        "sgprs": kernel.sgprs,
        "vgpr_spills": kernel.vgpr_spills,
        "sgpr_spills": kernel.sgpr_spills,
        "lds": lds,
        "scratch": kernel.scratch,
        "threads": kernel.max_threads,
        "wave": kernel.width,
        "waves_per_simd": occupancy(
            target,
            kernel.vgprs,
            lds,
            kernel.max_threads,
            kernel.width,
        ),
        "unsupported": _unsupported_names(instructions),
    }


def _unsupported_names(instructions: list[Instruction]) -> list[str]:
    supported_names = supported_mnemonics()
    names = set()
    for ins in instructions:
        if not ins.pair and ins.name not in supported_names and not is_memory(ins.name):
            names.add(ins.name)
    return sorted(names)


def occupancy(
    target: Target, vgprs: int, lds: int, threads: int, width: int = 32
) -> dict[str, int]:
    """Return how many waves fit on a SIMD: by their registers, by their LDS, and by both."""
    # The registers of a wave64 have twice the size, so a SIMD has half as many of them.
    granule = target.granule * 32 // width
    registers = target.registers * 32 // width
    allocated = -(-vgprs // granule) * granule
    by_registers = min(target.waves, registers // allocated)
    waves = -(-threads // width)
    by_lds = target.waves
    if lds:
        by_lds = min(by_lds, target.lds_of_processor // lds * waves // target.simds)
    return {"registers": by_registers, "lds": by_lds, "bound": min(by_registers, by_lds)}


def count_lane_bytes(ins: Instruction) -> int:
    """Return the bytes that a vector memory instruction moves per lane, or 0 for any other one."""
    if classify(ins) not in ("vmem", "scratch"):
        return 0
    bits = _LANE_BITS.search(ins.name)
    return int(bits.group(1)) // 8 if bits else 0


def measure_traffic(launch: Launch) -> dict:
    """Return the memory traffic of a launch's vector instructions, and its matrix operations.

    Each instruction counts as if all lanes were active.

    Returns:
        A dict with these keys.
        memory_bytes: Bytes that global, flat and buffer instructions moved.
        scratch_bytes: Bytes that scratch instructions moved.
        flops: Operations of the matrix instructions, including those on integers.
        bytes_per_flop: memory_bytes / flops, if there are any flops.
        scratch_bytes_per_iteration: scratch_bytes, if there are any, divided by how often waves
            entered the hot block. The hot block is the block that waves entered most often. If
            some blocks have matrix instructions, only these blocks are considered.
    """
    moved: Counter[str] = Counter()
    matrix_instructions = 0
    trips = 0
    matrix_trips = 0
    for block in launch.blocks.values():
        kinds = Counter(classify(step.instruction) for step in block.steps)
        for step in block.steps:
            lane_bytes = count_lane_bytes(step.instruction)
            moved[classify(step.instruction)] += lane_bytes * launch.kernel.width * block.entered
        matrix_instructions += kinds["wmma"] * block.entered
        trips = max(trips, block.entered)
        if kinds["wmma"]:
            matrix_trips = max(matrix_trips, block.entered)
    flops = matrix_instructions * _WMMA_FLOPS
    traffic: dict[str, float] = {
        "memory_bytes": moved["vmem"],
        "scratch_bytes": moved["scratch"],
        "flops": flops,
    }
    if flops:
        traffic["bytes_per_flop"] = round(moved["vmem"] / flops, 4)
    if moved["scratch"]:
        per_iteration = moved["scratch"] / (matrix_trips or trips)
        traffic["scratch_bytes_per_iteration"] = round(per_iteration, 1)
    return traffic


def describe_launch(launch: Launch) -> dict:
    """Return a launch's wave-instructions by class, its traffic and cores, ready for JSON."""
    classes: Counter[str] = Counter()
    for block in launch.blocks.values():
        for step in block.steps:
            classes[classify(step.instruction)] += block.entered
        if block.end is not None:
            classes[classify(block.end)] += block.entered
    total = sum(classes.values())
    facts: dict = {
        "kernel": launch.kernel.name,
        "executed": total,
        "classes": dict(sorted(classes.items())),
        "wmma_share": round(classes["wmma"] / max(1, total), 4),
        **measure_traffic(launch),
        "cpu_seconds": round(launch.seconds, 3),
        "cores": launch.cores,
    }
    if launch.one_core_reason:
        facts["one_core"] = launch.one_core_reason
    if launch.disabled_checks:
        facts["not_checked"] = sorted(launch.disabled_checks)
    if launch.notes:
        facts["notes"] = [asdict(note) for note in launch.notes]
    return facts
