# SPDX-License-Identifier: BSD-3-Clause
"""Read pixi.lock without trusting values that cannot be checked, and write it for this machine."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import rattler
from rattler import CondaLockedBinaryPackage, LockChannel, LockFile, LockPlatform, RepoDataRecord

from forge.conda.index import is_of, locate_file
from forge.errors import ForgeError
from forge.files import read_text
from forge.project import SUBDIRS

PLATFORM = "linux-64"
# Maximum nesting of brackets and braces in a lock. rattler's parser takes minutes for thousands of
# levels.
MAX_DEPTH = 50


def read(path: Path) -> dict[str, rattler.Environment]:
    """Return the locked environments by name. Raise ForgeError if the file is not a lock file."""
    try:
        if _measure_depth(read_text(path)) > MAX_DEPTH:
            raise ValueError("its lists are nested too deeply")
        return dict(LockFile.from_path(path).environments())
    except Exception as error:
        # Git may have left conflict markers in the file, for example.
        raise ForgeError(f"{path} is not a lock file: {error!s:.300}") from None


def _measure_depth(text: str) -> int:
    """Return the maximum nesting of square brackets and braces in a text."""
    depth = 0
    deepest = 0
    for character in text:
        if character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


def records(locked: rattler.Environment) -> list[RepoDataRecord]:
    """List the packages of an environment that is locked for PLATFORM and no other platform.

    Raises:
        ForgeError: The environment is not locked for PLATFORM alone, or has a package from PyPI, or
            a package to build from source.
    """
    platforms = locked.platforms()
    if [str(platform.subdir) for platform in platforms] != [PLATFORM]:
        raise ForgeError(f"is locked for other platforms than {PLATFORM}: use pixi itself")
    packages = []
    for package in locked.packages(platforms[0]) or []:
        if not isinstance(package, CondaLockedBinaryPackage):
            reason = "is not a conda package but from PyPI or source: use pixi to install it"
            raise ForgeError(f"{package.name} {reason}")
        packages.append(package.repo_data_record())
    return packages


def require_checkable(records: Iterable[RepoDataRecord], channel_urls: list[str]) -> None:
    """Raise ForgeError if a record is wrong, or if its file is not in one of the channels."""
    for record in records:
        locate_file(record)
        is_in_channel = any(is_of(record.url, channel_url) for channel_url in channel_urls)
        if record.subdir not in SUBDIRS or not is_in_channel:
            raise ForgeError(f"{record.url} is not in {' or '.join(channel_urls)}")


def write(
    path: Path,
    channel_urls: list[str],
    solved: Mapping[str, list[RepoDataRecord]],
) -> None:
    """Write a lock file.

    Args:
        path: The file.
        channel_urls: The URLs of the channels, which are the same for each environment.
        solved: The packages of each environment, by its name.

    Raises:
        ForgeError: The file cannot be written.
    """
    platform = LockPlatform(PLATFORM)
    lock = LockFile([platform])
    channels = [LockChannel(f"{url.rstrip('/')}/") for url in channel_urls]
    for environment, packages in solved.items():
        lock.set_channels(environment, channels)
        for record in sorted(packages, key=_sort_key):
            lock.add_conda_package(environment, platform, record)
    try:
        lock.to_path(path)
    except Exception as error:
        # The disk may be full, for example.
        raise ForgeError(f"cannot write {path}: {error}") from None


def _sort_key(record: RepoDataRecord) -> tuple[str, str]:
    return record.subdir, record.name.normalized
