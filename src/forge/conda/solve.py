# SPDX-License-Identifier: BSD-3-Clause
"""Solve environments for this machine, and find the requirement that cannot be satisfied.

Channels are listed by priority, and the priority is strict: if the first channel has a package, the
builds of that package in other channels are not considered.
"""

import asyncio
import itertools
import re
from collections.abc import Sequence

import rattler
from rattler import GenericVirtualPackage, MatchSpec, RepoDataRecord
from rattler.exceptions import SolverError

from forge.errors import one_line
from forge.project import SUBDIRS


def parse_package_name(spec: str) -> str:
    """Return the package name of a match spec."""
    words = re.split(r"[\s=<>!~\[]", spec.strip(), maxsplit=1)
    return words[0].rsplit("::", 1)[-1]


def virtual_packages() -> list[GenericVirtualPackage]:
    """Detect virtual packages such as __glibc as pixi does.

    The environment variable CONDA_OVERRIDE_NAME=VERSION replaces the version of `__name`.
    """
    overrides = rattler.VirtualPackageOverrides.from_env()
    # py-rattler 0.25 detects no AMD GPUs.
    detected = rattler.VirtualPackage.detect(overrides)
    return [package.into_generic() for package in detected]


def solve(
    channel_urls: list[str],
    specs: Sequence[str],
    gateway: rattler.Gateway,
) -> list[RepoDataRecord]:
    """Solve an environment for this machine. Errors of the bindings are not caught.

    Args:
        channel_urls: The channels, by priority.
        specs: Match specs.
        gateway: Reads the channels, and caches their records.
    """
    solution = rattler.solve(
        channel_urls,
        specs,
        gateway,
        platforms=SUBDIRS,
        virtual_packages=virtual_packages(),
    )
    return asyncio.run(solution)


def list_missing(
    channel_urls: list[str],
    specs: Sequence[str],
    gateway: rattler.Gateway,
) -> list[str]:
    """List the match specs that no build satisfies, each with its package's newest version."""
    names = {spec: parse_package_name(spec) for spec in specs if not spec.startswith("__")}
    builds = _query(channel_urls, set(names.values()), gateway)
    missing = []
    for spec, name in names.items():
        candidates = builds.get(name, [])
        if any(map(MatchSpec(spec).matches, candidates)):
            continue
        if candidates:
            newest = max(record.version for record in candidates)
            missing.append(f"{spec} (the newest is {newest})")
        else:
            missing.append(spec)
    return missing


def _query(
    channel_urls: list[str],
    names: set[str],
    gateway: rattler.Gateway,
) -> dict[str, list[RepoDataRecord]]:
    """Return the builds of each package in the first channel that has the package."""
    query = gateway.query(channel_urls, SUBDIRS, names, recursive=False)
    builds: dict[str, list[RepoDataRecord]] = {}
    for record in itertools.chain.from_iterable(asyncio.run(query)):
        listed = builds.setdefault(record.name.normalized, [])
        if not listed or listed[0].channel == record.channel:
            listed.append(record)
    return builds


def explain(channel_urls: list[str], specs: Sequence[str], gateway: rattler.Gateway) -> str:
    """Return in one line why match specs cannot be solved together; empty if they can."""
    missing = list_missing(channel_urls, specs, gateway)
    if missing:
        return f"{' or '.join(channel_urls)} has no {'; '.join(missing)}"
    return find_conflict(channel_urls, specs, gateway)


def find_conflict(channel_urls: list[str], specs: Sequence[str], gateway: rattler.Gateway) -> str:
    """Find the first match spec that cannot be solved together with the specs before it.

    Returns:
        One line with the match spec and the reason; empty if all specs can be solved.
    """
    # A bisection: the first `solvable` specs can be solved, the first `unsolvable` specs cannot.
    solvable = 0
    unsolvable = len(specs) + 1
    reason = ""
    while unsolvable - solvable > 1:
        middle = min((solvable + unsolvable) // 2, len(specs))
        try:
            solve(channel_urls, specs[:middle], gateway)
        except SolverError as error:
            unsolvable = middle
            reason = one_line(str(error))
            continue
        if middle == len(specs):
            return ""
        solvable = middle
    return f"{specs[unsolvable - 1]} cannot be installed with the other requirements: {reason}"
