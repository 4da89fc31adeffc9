# SPDX-License-Identifier: BSD-3-Clause
"""Estimate what a build needs and check that this machine, and conda-forge, have it."""

import asyncio
import itertools
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import rattler
import yaml
from rattler import MatchSpec
from rattler.exceptions import SolverError

from forge import network
from forge.bases import CONDA_FORGE, Base
from forge.conda.package import cache_folder, scratch
from forge.envs.workspace import solve
from forge.files import read_text, write_text
from forge.processes import GIB_PER_JOB, max_jobs, memory_gib
from forge.project import SUBDIRS, Project
from forge.recipes.plan import RecipeSet, Step
from forge.recipes.recipe import package_name


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


def unsolvable(recipes: RecipeSet, steps: list[Step], theirs: str = CONDA_FORGE) -> str:
    """Find what conda-forge lacks of what the steps require, else what does not solve; or nothing.

    In one line. Each recipe is solved for each Python; our packages are records without files that
    require what their recipe does. Raises what the bindings raise if conda-forge does not answer.
    """
    required = itertools.chain(*(s for step in steps for s in step.recipe.requirements.values()))
    specs = {s: package_name(s) for s in required if not s.startswith("__")}
    specs = {spec: name for spec, name in sorted(specs.items()) if name not in recipes.owner}
    gateway = rattler.Gateway(client=network.for_indexes())
    query = gateway.query([theirs], SUBDIRS, set(specs.values()), recursive=False)
    found: dict[str, list[rattler.RepoDataRecord]] = {}
    for record in itertools.chain(*asyncio.run(query)):
        found.setdefault(record.name.normalized, []).append(record)
    missing = [s for s, n in specs.items() if not any(map(MatchSpec(s).matches, found.get(n, ())))]
    if missing:
        return f"conda-forge has no {'; '.join(missing)}"
    with scratch(cache_folder()) as folder:
        for subdir in SUBDIRS:
            packages = {
                output.file_name: {
                    "name": output.name, "version": output.version, "build": output.build,
                    "build_number": output.number, "subdir": subdir,
                    "depends": step.recipe.requirements["run"],
                }
                for step in steps for output in step.outputs if output.subdir == subdir
            }  # fmt: skip
            text = json.dumps({"packages": {}, "packages.conda": packages})
            write_text(Path(folder, subdir, "repodata.json"), text)
        for step, python in itertools.product(steps, recipes.base.variants["python"]):
            names = [output.name for output in step.outputs]
            try:
                solve([Path(folder).as_uri(), theirs], [*names, f"python {python}"], gateway)
            except SolverError as error:
                why = " ".join(str(error).split())
                return f"{step.recipe.name} does not solve with python {python}: {why:.800}"
    return ""
