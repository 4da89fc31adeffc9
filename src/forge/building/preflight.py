# SPDX-License-Identifier: BSD-3-Clause
"""Check that this machine has the disk and memory that a build needs."""

import shutil
from collections.abc import Iterable, Mapping

from forge.processes import GIB_PER_JOB, max_jobs, memory_gib
from forge.project import Project
from forge.recipes.cost import Cost, add_costs

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
        costs: The cost of each recipe by name, in the order of the builds.

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
    total = add_costs(costs.values())
    # The build folder may be on another disk; before the first build it does not exist.
    folder = project.build
    if not folder.exists():
        folder = project.root
    free_disk = shutil.disk_usage(folder).free / GIB
    memory = memory_gib()
    lines.append(
        f"in all: {total.download:.1f} GiB to download, "
        f"{total.disk:.1f} GiB of disk including the downloads ({free_disk:.0f} GiB free), "
        f"{total.cpu_hours:.1f} CPU hours; "
        f"this machine has {memory:.0f} GiB of memory and runs {max_jobs()} jobs at once"
    )
    lacks = ""
    if total.disk > free_disk:
        lacks = f"{total.disk:.1f} GiB of disk in {folder}; {free_disk:.1f} GiB are free"
    elif total.memory > memory:
        lacks = f"{total.memory:g} GiB of memory for one job; there are {memory:.1f}"
    return lines, lacks


def fits(costs: Iterable[Cost], project: Project) -> bool:
    """Return whether memory and disk suffice to run builds of these costs at the same time."""
    builds = list(costs)
    memory = max_jobs() * sum(cost.memory for cost in builds)
    disk = sum(cost.disk for cost in builds)
    free_disk = shutil.disk_usage(project.build).free / GIB
    return memory <= memory_gib() and disk <= free_disk
