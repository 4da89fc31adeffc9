# SPDX-License-Identifier: BSD-3-Clause
"""Check that this machine has the disk and memory that a build needs."""

import shutil
from collections.abc import Iterable, Mapping

from forge.processes import GIB_PER_JOB, max_jobs, memory_gib
from forge.project import Project
from forge.recipes.cost import Cost

# The assumed cost of a recipe that states none.
UNKNOWN = Cost(
    download=0,
    disk=0,
    memory=GIB_PER_JOB,
    cpu_hours=0,
)
GIB = 2**30


def preflight(
    project: Project,
    costs: Mapping[str, Cost],
) -> tuple[list[str], str]:
    """Compare the cost of builds with this machine.

    Args:
        project: The checkout; the builds use its disk.
        costs: By recipe, in the order of the builds.

    Returns:
        Lines to print (one per recipe and one for the total), and a description of the disk or
        memory that the machine lacks, or "".
    """
    if not costs:
        return [], ""
    lines = []
    for name, cost in costs.items():
        lines.append(
            f"{name}: {cost.download:g} GiB to download, "
            f"{cost.disk:g} GiB of disk, "
            f"{cost.memory:g} GiB of memory per job, "
            f"{cost.cpu_hours:g} CPU hours"
        )
    download = sum(cost.download for cost in costs.values())
    cpu_hours = sum(cost.cpu_hours for cost in costs.values())
    memory_per_job = max(cost.memory for cost in costs.values())
    disk = download + _peak_disk(costs.values())
    # The build folder may be on another disk; before the first build it does not exist.
    folder = project.build
    if not folder.exists():
        folder = project.root
    free_disk = shutil.disk_usage(folder).free / GIB
    memory = memory_gib()
    lines.append(
        f"in all: {download:.1f} GiB to download, "
        f"{disk:.1f} GiB of disk with it ({free_disk:.0f} free), "
        f"{max_jobs()} jobs in {memory:.0f} GiB of memory, "
        f"{cpu_hours:.1f} CPU hours"
    )
    lacks = ""
    if disk > free_disk:
        lacks = f"{disk:.1f} GiB of disk in {folder}; {free_disk:.1f} GiB are free"
    elif memory_per_job > memory:
        lacks = f"{memory_per_job:g} GiB of memory for one job; {memory:.1f} GiB are available"
    return lines, lacks


def _peak_disk(costs: Iterable[Cost]) -> float:
    """Return the largest amount of disk, in GiB, that consecutive builds use at one time.

    Downloads are not counted. The folder of a build is removed before the next build begins, but
    its packages stay.
    """
    peak = 0.0
    packages = 0.0
    for cost in costs:
        peak = max(peak, packages + cost.disk)
        packages += cost.kept
    return peak


def fits(costs: Iterable[Cost], project: Project) -> bool:
    """Return whether memory and disk suffice to run these builds at the same time."""
    builds = list(costs)
    memory = max_jobs() * sum(cost.memory for cost in builds)
    disk = sum(cost.disk for cost in builds)
    free_disk = shutil.disk_usage(project.build).free / GIB
    return memory <= memory_gib() and disk <= free_disk
