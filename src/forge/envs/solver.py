# SPDX-License-Identifier: BSD-3-Clause
"""Solve environments for this machine, and name the requirement that keeps one from being solved.

Channels are listed by priority, which is strict: of a package that the first channel has, no other
channel's builds are considered.
"""

import asyncio
import itertools
from collections.abc import Sequence

import rattler
from rattler import GenericVirtualPackage, MatchSpec, RepoDataRecord
from rattler.exceptions import SolverError

from forge.errors import one_line
from forge.project import SUBDIRS
from forge.recipes.recipe import package_name


def virtual_packages() -> list[GenericVirtualPackage]:
    """Detect glibc, GPUs and so on, as pixi does; CONDA_OVERRIDE_NAME=VERSION pretends another."""
    overrides = rattler.VirtualPackageOverrides.from_env()  # py-rattler 0.25 detects no AMD GPUs
    return [package.into_generic() for package in rattler.VirtualPackage.detect(overrides)]


def solve(
    channels: list[str], specs: Sequence[str], gateway: rattler.Gateway
) -> list[RepoDataRecord]:
    """Solve for this machine. Raises what the bindings raise."""
    machine = virtual_packages()
    asked = rattler.solve(channels, specs, gateway, platforms=SUBDIRS, virtual_packages=machine)
    return asyncio.run(asked)


def list_missing(channels: list[str], specs: Sequence[str], gateway: rattler.Gateway) -> list[str]:
    """List the requirements that no package satisfies, with the newest version of each."""
    names = {spec: package_name(spec) for spec in specs if not spec.startswith("__")}
    query = gateway.query(channels, SUBDIRS, set(names.values()), recursive=False)
    records: dict[str, list[RepoDataRecord]] = {}
    for record in itertools.chain.from_iterable(asyncio.run(query)):
        builds = records.setdefault(record.name.normalized, [])
        if not builds or builds[0].channel == record.channel:  # strict priority
            builds.append(record)
    missing = []
    for spec, name in names.items():
        builds = records.get(name, [])
        if not any(map(MatchSpec(spec).matches, builds)):
            newest = max(builds, key=lambda record: record.version, default=None)
            missing.append(f"{spec} (the newest is {newest.version})" if newest else spec)
    return missing


def explain(channels: list[str], specs: Sequence[str], gateway: rattler.Gateway) -> str:
    """Name what keeps requirements from being solved, in one line; empty if they do solve."""
    missing = list_missing(channels, specs, gateway)
    if missing:
        return f"{' or '.join(channels)} has no {'; '.join(missing)}"
    return find_conflict(channels, specs, gateway)


def find_conflict(channels: list[str], specs: Sequence[str], gateway: rattler.Gateway) -> str:
    """Name the first requirement that does not solve together with those before it, and why.

    Returns one line, or an empty string if all of them solve.
    """
    solvable, unsolvable, reason = 0, len(specs) + 1, ""
    while unsolvable - solvable > 1:
        middle = min((solvable + unsolvable) // 2, len(specs))
        try:
            solve(channels, specs[:middle], gateway)
            if middle == len(specs):
                return ""
            solvable = middle
        except SolverError as error:
            unsolvable, reason = middle, one_line(str(error))
    return f"{specs[unsolvable - 1]} cannot be installed beside the rest: {reason}"
