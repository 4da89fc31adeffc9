# SPDX-License-Identifier: BSD-3-Clause
"""Check that this machine has what a build needs."""

import shutil
from collections.abc import Iterable, Mapping

from forge.processes import GIB_PER_JOB, max_jobs, memory_gib
from forge.project import Project
from forge.recipes.cost import Cost

UNKNOWN = Cost(download=0, disk=0, memory=GIB_PER_JOB, cpu_hours=0)


def preflight(project: Project, costs: Mapping[str, Cost]) -> tuple[list[str], str]:
    """Compare what builds cost with what this machine has.

    Args:
        project: The checkout, whose disk counts.
        costs: By name, in the order of the builds.

    Returns:
        A line for each name and one for all, and what the machine lacks, or "".
    """
    if not costs:
        return [], ""
    lines = [
        f"{name}: {cost.download:g} GiB to download, {cost.disk:g} GiB of disk, "
        f"{cost.memory:g} GiB of memory per job, {cost.cpu_hours:g} CPU hours"
        for name, cost in costs.items()
    ]
    download = sum(cost.download for cost in costs.values())
    cpu_hours = sum(cost.cpu_hours for cost in costs.values())
    memory_per_job = max(cost.memory for cost in costs.values())
    disk = kept = 0.0  # a build's folder goes before the next begins; packages stay
    for cost in costs.values():
        disk = max(disk, kept + cost.disk)
        kept += cost.kept
    disk += download
    folder = project.build if project.build.exists() else project.root
    free = shutil.disk_usage(folder).free / 2**30
    memory = memory_gib()
    lines.append(
        f"in all: {download:.1f} GiB to download, {disk:.1f} GiB of disk with it "
        f"({free:.0f} free), {max_jobs()} jobs in {memory:.0f} GiB of memory, "
        f"{cpu_hours:.1f} CPU hours"
    )
    if disk > free:
        return lines, f"{disk:.1f} GiB of disk in {folder}; {free:.1f} GiB are free"
    if memory_per_job > memory:
        return lines, f"{memory_per_job:g} GiB of memory for one job; there are {memory:.1f}"
    return lines, ""


def fits(costs: Iterable[Cost], project: Project) -> bool:
    """Return whether memory and disk suffice for builds side by side."""
    chosen = list(costs)
    memory = sum(cost.memory for cost in chosen) * max_jobs()
    disk = sum(cost.disk for cost in chosen)
    free = shutil.disk_usage(project.build).free / 2**30
    return memory <= memory_gib() and disk <= free
