# SPDX-License-Identifier: BSD-3-Clause
"""pixi.lock: read without believing what cannot be checked, and written for this machine."""

from collections.abc import Iterable, Mapping
from itertools import accumulate, chain
from pathlib import Path

import rattler
from rattler import CondaLockedBinaryPackage, LockChannel, LockFile, LockPlatform, RepoDataRecord

from forge.conda.index import file_of, is_of
from forge.errors import ForgeError
from forge.files import read_text
from forge.project import SUBDIRS

PLATFORM = "linux-64"
DEEPEST = 50  # its parser takes minutes for thousands


def read(path: Path) -> dict[str, rattler.Environment]:
    """Read the locked environments by name. Raises ForgeError for anything but a lock file."""
    try:
        brackets = (c for c in read_text(path) if c in "[]{}")
        if max(accumulate((c in "[{") * 2 - 1 for c in brackets), default=0) > DEEPEST:
            raise ValueError("its lists are nested too deeply")
        return dict(LockFile.from_path(path).environments())
    except Exception as error:  # for example marks of a merge
        raise ForgeError(f"{path} is not a lock file: {error!s:.300}") from None


def records(locked: rattler.Environment) -> list[RepoDataRecord]:
    """List the packages of an environment on its only platform, whatever pixi calls that.

    Raises ForgeError for several platforms, and for a package of PyPI or built from source.
    """
    platforms = locked.platforms()
    if [str(platform.subdir) for platform in platforms] != [PLATFORM]:
        raise ForgeError(f"is locked for other platforms than {PLATFORM}: use pixi itself")
    found = []
    for package in locked.packages(platforms[0]) or []:
        if not isinstance(package, CondaLockedBinaryPackage):
            why = "comes from PyPI or source: forge installs conda packages, pixi all"
            raise ForgeError(f"{package.name} {why}")
        found.append(package.repo_data_record())
    return found


def conda_packages(path: Path) -> list[RepoDataRecord]:
    """List the packages of all environments that come from channels, whatever else is locked."""
    every = (e.packages(p) or [] for e in read(path).values() for p in e.platforms())
    binary = (p for p in chain(*every) if isinstance(p, CondaLockedBinaryPackage))
    return [package.repo_data_record() for package in binary]


def require_checkable(records: Iterable[RepoDataRecord], channels: list[str]) -> None:
    """Raise ForgeError for a record that is wrong, or of a file outside the channels."""
    for record in records:
        file_of(record)
        if record.subdir not in SUBDIRS or not any(is_of(record.url, c) for c in channels):
            raise ForgeError(f"{record.url} is not in {' or '.join(channels)}")


def write(path: Path, channels: list[str], solved: Mapping[str, list[RepoDataRecord]]) -> None:
    """Write a lock file. Raises ForgeError when that fails."""
    platform = LockPlatform(PLATFORM)
    lock = LockFile([platform])
    for environment, packages in solved.items():
        lock.set_channels(environment, [LockChannel(f"{url.rstrip('/')}/") for url in channels])
        for record in sorted(packages, key=lambda r: (r.subdir, r.name.normalized)):
            lock.add_conda_package(environment, platform, record)
    try:
        lock.to_path(path)
    except Exception as error:  # a full disk
        raise ForgeError(f"cannot write {path}: {error}") from None
