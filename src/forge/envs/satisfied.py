# SPDX-License-Identifier: BSD-3-Clause
"""Whether a lock satisfies its manifest: what `pixi install --locked` asks before it installs."""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path

from rattler import LockFile, MatchSpec, RepoDataRecord

from forge.envs.manifest import PLATFORM, Manifest
from forge.errors import ForgeError


def read_lock(path: Path) -> LockFile:
    """A lock file. Raises ForgeError if it is invalid, e.g. with merge-conflict markers."""
    try:
        return LockFile.from_path(path)
    except Exception as error:
        raise ForgeError(f"{path} is not a lock file: {error}") from None


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
        if len(environment.platforms()) != 1:
            names = ", ".join(solved.name for solved in environment.platforms()) or "none"
            yield f"{name}: locked for other platforms than {platform.name}: {names}"
            continue
        (solved,) = environment.platforms()
        if (solved.name, str(solved.subdir), sorted(solved.virtual_packages)) != (
            platform.name, PLATFORM, sorted(platform.lines)
        ):  # fmt: skip
            yield f"{name}: locked for the platform {solved.name} {solved.virtual_packages}"
        records = environment.conda_repodata_records_for_platform(solved) or []
        for line in sorted(set(_packages(declared[name], records, platform.promised))):
            yield f"{name}: {line}"


def _packages(
    specs: list[str], records: list[RepoDataRecord], promised: dict[str, str]
) -> Iterator[str]:
    """Requirements that no locked package satisfies, and packages that nothing requires."""
    by_name = {record.name.normalized: record for record in records}
    reached, todo = set(), [(spec, "pixi.toml") for spec in specs]
    while todo:
        text, source = todo.pop()
        spec = MatchSpec(text)
        name = spec.name.normalized if spec.name else text.split()[0]
        record = by_name.get(name)
        if name.startswith("__"):
            if name not in promised:
                yield f"{text} (of {source}) is not promised by the platform"
        elif record is None or not spec.matches(record):
            yield f"{text} (of {source}) is not locked"
        elif name not in reached:
            reached.add(name)
            todo += [(depends, record.file_name) for depends in record.depends]
    for name in by_name.keys() - reached:
        yield f"{name} is locked, but nothing requires it"
