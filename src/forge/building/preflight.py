# SPDX-License-Identifier: BSD-3-Clause
"""Estimate what a build needs and check that this machine has it."""

import shutil
from collections.abc import Iterable
from typing import Any

import yaml

from forge.bases import Base
from forge.files import read_text
from forge.processes import GIB_PER_JOB, max_jobs, memory_gib
from forge.project import Project


def costs(project: Project, base: Base) -> dict[str, dict[str, Any]]:
    """Read the figures of recipes/costs.yaml by recipe, for the variants of a base."""
    file = project.root / "recipes" / "costs.yaml"
    result: dict[str, dict[str, Any]] = {}
    for key, figures in (yaml.safe_load(read_text(file)) if file.exists() else {}).items():
        name, _, variant = key.rpartition(" ") if "=" in key else (key, "", "")
        wanted, _, value = variant.partition("=")
        if not variant or base.variants[wanted][0] == value:
            result[name] = result.get(name, {}) | figures
    for figures in result.values():
        for key, more in figures.pop("further_python", {}).items():
            figures[key] += more * (len(base.variants["python"]) - 1)
    return result


def preflight(project: Project, base: Base, names: list[str]) -> tuple[list[str], str]:
    """List the costs, a line per recipe and one for all; and say what is lacking, or nothing."""
    known = costs(project, base)
    chosen = {name: known[name] for name in names if name in known}
    if not chosen:
        return [], ""
    lines = [
        f"{name}: {cost['download']:g} GiB to download, {cost['disk']:g} GiB of disk, "
        f"{cost['memory']:g} GiB of memory per job, {cost['cpu_hours']:g} CPU hours"
        for name, cost in chosen.items()
    ]
    download, hours = (sum(c[key] for c in chosen.values()) for key in ("download", "cpu_hours"))
    disk = kept = 0.0  # a build's folder goes before the next begins; packages stay
    for cost in chosen.values():
        disk, kept = max(disk, kept + cost["disk"]), kept + cost.get("kept", 0)
    folder = project.build if project.build.exists() else project.root
    free, memory = shutil.disk_usage(folder).free / 2**30, memory_gib()
    job = max(cost["memory"] for cost in chosen.values())
    lines.append(
        f"in all: {download:.1f} GiB to download, {download + disk:.1f} GiB of disk with it "
        f"({free:.0f} free), {max_jobs()} jobs in {memory:.0f} GiB of memory, {hours:.1f} CPU hours"
    )
    if download + disk > free:
        return lines, f"{download + disk:.1f} GiB of disk in {folder}; {free:.1f} GiB are free"
    if job > memory:
        return lines, f"{job:g} GiB of memory for one job; there are {memory:.1f}"
    return lines, ""


def fits(known: dict[str, Any], names: Iterable[str], project: Project) -> bool:
    """Decide whether memory and disk suffice to build these side by side."""
    chosen = [known.get(name, {"memory": GIB_PER_JOB, "disk": 0}) for name in names]
    memory, disk = (sum(cost[key] for cost in chosen) for key in ("memory", "disk"))
    free = shutil.disk_usage(project.build).free / 2**30
    return bool(memory * max_jobs() <= memory_gib() and disk <= free)
