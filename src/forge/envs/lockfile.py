# SPDX-License-Identifier: BSD-3-Clause
"""pixi.lock: written as pixi writes it, and read without believing what cannot be checked."""

import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import unquote

import rattler
from rattler import CondaLockedBinaryPackage, LockChannel, LockFile, LockPlatform, RepoDataRecord

from forge.conda.index import fault, is_of
from forge.envs.bindings import Subdir
from forge.envs.manifest import ASSUMED, PLATFORM, Platform
from forge.errors import ForgeError
from forge.files import require_file, write_text
from forge.project import SUBDIRS

# an environment, its channels, a platform, and its packages there
Solved = tuple[str, list[str], Platform, list[RepoDataRecord]]


def _promised(lines: Iterable[str]) -> set[str]:
    """The virtual packages of a lock beyond pixi's assumptions, whatever wrote it.

    rattler_virtual_packages 8 renders a build string of 0, as in __amdgpu=0=0; pixi 0.77 does not.
    """
    plain = {line.removesuffix("=0") if line.count("=") == 2 else line for line in lines}
    return plain - {f"{name}={value}".replace("=0=0", "=0") for name, value in ASSUMED.items()}


def read(path: Path) -> dict[str, rattler.Environment]:
    """The locked environments by name. Raises ForgeError for anything but a lock file."""
    require_file(path)
    try:
        return dict(LockFile.from_path(path).environments())
    except Exception as error:  # for example marks of a merge
        raise ForgeError(f"{path} is not a lock file: {error!s:.300}") from None


def records(locked: rattler.Environment, platform: Platform) -> list[RepoDataRecord]:
    """The packages of an environment for a platform, whatever the lock calls it.

    Raises ForgeError when it is not locked for that platform, or with a package that is none of a
    channel: from PyPI, or built from source.
    """
    own = _promised(platform.lines)
    same = [
        p
        for p in locked.platforms()
        if str(p.subdir) == PLATFORM and _promised(p.virtual_packages) == own
    ]
    if len(same) != 1:
        there = "; ".join(f"{p.subdir} {' '.join(p.virtual_packages)}" for p in locked.platforms())
        raise ForgeError(
            f"locked for {there or 'no platform':.300}, but not for what pixi.toml declares"
        )
    found = []
    for package in locked.packages(same[0]) or []:
        if not isinstance(package, CondaLockedBinaryPackage):
            raise ForgeError(
                f"{package.name} comes from PyPI or source: forge installs conda packages, pixi all"
            )
        found.append(package.repo_data_record())
    return found


def require_checkable(records: Iterable[RepoDataRecord], channels: list[str]) -> None:
    """Raise ForgeError for a record that is wrong, or of a file outside the channels."""
    for record in records:
        subdir, name = ["", *unquote(record.url).split("/")][-2:]
        if why := fault(name, json.loads(record.to_json())):
            raise ForgeError(f"{record.url} {why}")
        if subdir not in SUBDIRS or not any(is_of(record.url, c) for c in channels):
            raise ForgeError(f"{record.url} is not in {' or '.join(channels)}")


def write(path: Path, solved: Sequence[Solved]) -> None:
    """Write a lock file. Raises ForgeError when that fails; an older one then stays."""
    lines = {platform.name: platform.lines for _, _, platform, _ in solved}
    targets = {name: LockPlatform(name, Subdir(PLATFORM), own) for name, own in lines.items()}
    lock = LockFile([*targets.values()])
    for environment, channels, platform, records in solved:
        lock.set_channels(environment, [LockChannel(f"{url.rstrip('/')}/") for url in channels])
        for record in sorted(records, key=lambda r: (r.subdir, r.name.normalized)):
            record.indexed_timestamp = None  # pixi leaves it out
            lock.add_conda_package(environment, targets[platform.name], record)
    with tempfile.TemporaryDirectory(prefix="forge-lock-") as folder:
        try:
            lock.to_path(Path(folder, "pixi.lock"))
            write_text(path, Path(folder, "pixi.lock").read_text())
        except Exception as error:  # a full disk
            raise ForgeError(f"cannot write {path}: {error}") from None
