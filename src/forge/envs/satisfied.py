# SPDX-License-Identifier: BSD-3-Clause
"""Whether a lock satisfies its manifest: what `pixi install --locked` asks before it installs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import rattler
from rattler import LockFile, PackageName, RepoDataRecord

from forge.envs.bindings import ALL_SUBDIRS
from forge.envs.manifest import PLATFORM, Manifest
from forge.errors import ForgeError


def read_lock(path: Path) -> LockFile:
    """A lock file. Raises ForgeError if it is invalid, e.g. with merge-conflict markers."""
    try:
        return LockFile.from_path(path)
    except Exception as error:
        raise ForgeError(f"{path} is not a lock file: {error}") from None


class Locked:
    """The packages of a lock as the only source of the solver."""

    def __init__(self, records: list[RepoDataRecord]) -> None:
        self.records = records

    async def fetch_package_records(self, platform: Any, name: PackageName) -> list[RepoDataRecord]:
        return [r for r in self.records if r.subdir == str(platform) and r.name == name]

    def package_names(self, platform: Any) -> list[str]:
        return [r.name.normalized for r in self.records if r.subdir == str(platform)]


def unsatisfied(
    manifest: Manifest, channels: list[str], lock_file: Path, without: Set[str]
) -> Iterator[str]:
    """What is wrong with the lock, one line each: environments, channels, platform, packages.

    Requirements of a name in `without` need not be locked. Raises ForgeError like read_lock.
    """
    locked = dict(read_lock(lock_file).environments())
    declared, platform = manifest.environments(without), manifest.platform()
    for name in sorted(declared.keys() ^ locked.keys()):
        yield f"environment {name} is {'not locked' if name in declared else 'not in pixi.toml'}"
    for name in sorted(declared.keys() & locked.keys()):
        environment = locked[name]
        urls = [str(channel).rstrip("/") for channel in environment.channels()]
        if urls != [channel.rstrip("/") for channel in channels]:
            yield f"{name}: locked for the channels {', '.join(urls)}"
        solved = environment.platforms()
        platforms = [(p.name, str(p.subdir), sorted(p.virtual_packages)) for p in solved]
        if platforms != [(platform.name, PLATFORM, sorted(platform.lines))]:
            yield f"{name}: locked for other platforms than {platform.name}: {platforms}"
            continue
        records = environment.conda_repodata_records_for_platform(solved[0]) or []
        solution = rattler.solve(
            [Locked(records)], declared[name], rattler.Gateway(), platforms=ALL_SUBDIRS,
            virtual_packages=platform.virtual_packages(),
        )  # fmt: skip
        try:
            needed = {record.name.normalized for record in asyncio.run(solution)}
        except Exception as error:
            yield f"{name}: what is locked does not satisfy it: {str(error).strip()}"
            continue
        for package in sorted({record.name.normalized for record in records} - needed):
            yield f"{name}: {package} is locked, but nothing requires it"
