# SPDX-License-Identifier: BSD-3-Clause
"""Whether a lock does for its manifest: what `pixi install --locked` asks before it installs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rattler import LockFile, MatchSpec, RepoDataRecord

from forge.envs.manifest import PLATFORM, Manifest
from forge.errors import ForgeError


def read_lock(path: Path) -> LockFile:
    """A lock file. Raises ForgeError when it is none, such as one with marks of a merge."""
    try:
        return LockFile.from_path(path)
    except Exception as error:
        raise ForgeError(f"{path} is not a lock file: {error}") from None


def unsatisfied(
    manifest: Manifest, channels: list[str], lock_file: Path, left_out: Callable[[str], bool]
) -> list[str]:
    """What is wrong with the lock, one line each: environments, channels, platform, packages.

    Requirements whose name `left_out` accepts need not be locked. Raises ForgeError when it is no lock file.
    """
    locked = dict(read_lock(lock_file).environments())
    wanted, platform, problems = manifest.environments(), manifest.platform(), []
    for name in sorted(set(wanted) ^ set(locked)):
        problems.append(f"environment {name} is {'not locked' if name in wanted else 'not wanted'}")
    for name in sorted(set(wanted) & set(locked)):
        environment = locked[name]
        there = [str(channel).rstrip("/") for channel in environment.channels()]
        if there != [channel.rstrip("/") for channel in channels]:
            problems.append(f"{name}: locked for the channels {', '.join(there)}")
        if len(environment.platforms()) != 1:
            names = ", ".join(found.name for found in environment.platforms()) or "none"
            problems.append(f"{name}: locked for other platforms than {platform.name}: {names}")
            continue
        (solved,) = environment.platforms()
        if (solved.name, str(solved.subdir), sorted(solved.virtual_packages)) != (
            platform.name, PLATFORM, sorted(platform.lines)
        ):  # fmt: skip
            problems.append(
                f"{name}: locked for the platform {solved.name} {solved.virtual_packages}"
            )
        specs = [spec for spec in wanted[name] if not left_out(spec.split()[0])]
        records = environment.conda_repodata_records_for_platform(solved)
        problems += [f"{name}: {line}" for line in _packages(specs, records, platform.promised)]
    return problems


def _packages(
    specs: list[str], records: list[RepoDataRecord], promised: dict[str, str]
) -> list[str]:
    """Requirements that no locked package meets, and packages that nothing requires."""
    by_name = {record.name.normalized: record for record in records}
    problems, reached, todo = [], set(), [(spec, "pixi.toml") for spec in specs]
    while todo:
        text, source = todo.pop()
        spec = MatchSpec(text)
        name = spec.name.normalized if spec.name else text.split()[0]
        if name.startswith("__"):
            if name not in promised:
                problems.append(f"{text} (of {source}) is not promised by the platform")
            continue
        record = by_name.get(name)
        if record is None or not spec.matches(record):
            problems.append(f"{text} (of {source}) is not locked")
        elif name not in reached:
            reached.add(name)
            todo += [(depends, record.file_name) for depends in record.depends]
    problems += [
        f"{name} is locked, but nothing requires it" for name in sorted(set(by_name) - reached)
    ]
    return sorted(set(problems))
