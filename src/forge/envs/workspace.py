# SPDX-License-Identifier: BSD-3-Clause
"""One workspace: its lock, and the environments that are installed from it."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from urllib.parse import unquote, urlsplit

import rattler
from rattler import LockChannel, LockFile, LockPlatform, RepoDataRecord, SourceConfig
from rattler.shell import ActivationVariables, activate

from forge.bases import CONDA_FORGE
from forge.channel.local import HOST_BOUND
from forge.envs.bindings import Subdir
from forge.envs.manifest import PLATFORM, Manifest
from forge.envs.records import Records
from forge.envs.satisfied import read_lock, unsatisfied
from forge.errors import BuildFailed, ForgeError, NotAttempted
from forge.files import sha256_file
from forge.project import SUBDIRS


@dataclass(frozen=True)
class Workspace:
    """A pixi.toml, with its lock and environments in `folder`.

    `replace` maps channels as written, or local ones as absolute paths, to the URLs to use.
    `records` maps such a URL to records that stand for its index, and `until` is the time after
    which nothing counts. A lock beside its manifest is for every machine; one elsewhere may name
    paths of this machine.
    """

    manifest: Manifest
    folder: Path
    replace: dict[str, str]
    name: str
    records: dict[str, Records] = field(default_factory=dict)
    until: datetime | None = None

    @classmethod
    def load(
        cls,
        manifest: Path,
        folder: Path,
        replace: dict[str, str],
        *,
        name: str = "",
        records: dict[str, Records] | None = None,
        until: datetime | None = None,
    ) -> Workspace:
        """Read a manifest; `name` is what `forge lock` calls it, if not its folder's name.

        Raises ForgeError when it is not a manifest.
        """
        name = name or manifest.parent.name
        return cls(Manifest.load(manifest), folder, replace, name, records or {}, until)

    @property
    def lock_file(self) -> Path:
        return self.folder / "pixi.lock"

    @property
    def is_portable(self) -> bool:
        """Whether its lock is for every machine: it lies where pixi reads it."""
        return self.folder == self.manifest.path.parent

    def prefix(self, environment: str) -> Path:
        return self.folder / ".pixi" / "envs" / environment

    def channels(self) -> list[str]:
        """The channels as URLs, in the manifest's order."""
        result = []
        for channel in self.manifest.written_channels:
            path = (self.manifest.path.parent / channel).resolve()
            url = channel if "://" in channel else path.as_uri()
            result.append(self.replace.get(channel, self.replace.get(str(path), url)))
        return result

    def package_names(self, channel: str) -> set[str]:
        """The names in a channel, as the manifest writes it, that is served where `replace` says.

        Raises NotAttempted when it does not answer, BuildFailed when its index cannot be read.
        """
        channel = self.replace.get(channel, channel)
        sources = [self.records.get(channel, channel)]
        try:
            names = asyncio.run(self._gateway().names(sources, SUBDIRS))
        except Exception as error:
            failure = NotAttempted if _no_answer(str(error)) else BuildFailed
            raise failure(f"{channel} cannot be read: {_one_line(error)}") from None
        return {name.normalized for name in names}

    def lock(
        self, leave_out: Callable[[str], bool] = lambda _: False, keep: bool = False
    ) -> tuple[dict[str, int], list[str]]:
        """Solve every environment and write the lock.

        With `keep` what is locked already stays wherever the manifest allows it. Returns package
        counts by environment, and the requirements that `leave_out` dropped. Raises NotAttempted
        when a channel does not answer, BuildFailed when an environment does not solve, ForgeError
        when the lock would not do for every machine and has to; an older lock then stays.
        """
        declared = self.manifest.platform()
        platform = LockPlatform(declared.name, Subdir(PLATFORM), declared.lines)
        lock, counts, left_out = LockFile([platform]), {}, set()
        for environment, specs in self.manifest.environments().items():
            dropped = {spec for spec in specs if leave_out(spec.split()[0])}
            left_out |= {spec.split()[0] for spec in dropped}
            kept = self._already_locked(environment) if keep else []
            specs = [spec for spec in specs if spec not in dropped]
            records = self._solve(environment, specs, kept)
            if self.is_portable:
                self._require_portable(records)
            lock.set_channels(
                environment, [LockChannel(f"{u.rstrip('/')}/") for u in self.channels()]
            )
            for record in sorted(records, key=lambda r: (r.subdir, r.name.normalized)):
                lock.add_conda_package(environment, platform, record)
            counts[environment] = len(records)
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.lock_file.with_name(".pixi.lock.partial")
        lock.to_path(partial)
        partial.replace(self.lock_file)
        return counts, sorted(left_out)

    def _gateway(self) -> rattler.Gateway:
        """Asks for whole indices, but of conda-forge for the part that is needed.

        rattler takes "304 Not Modified" without a date for an error when it asks for a part
        (shards), and Python's own web server answers so. Channels other than conda-forge are small.
        """
        whole = SourceConfig(sharded_enabled=False)
        small = [url for url in self.channels() if url != CONDA_FORGE]
        return rattler.Gateway(per_channel_config=dict.fromkeys(small, whole))

    def _solve(
        self, environment: str, specs: list[str], kept: list[RepoDataRecord]
    ) -> list[RepoDataRecord]:
        try:
            records = asyncio.run(
                rattler.solve(
                    [self.records.get(url, url) for url in self.channels()],
                    specs,
                    self._gateway(),
                    platforms=SUBDIRS,
                    virtual_packages=self.manifest.platform().virtual_packages(),
                    locked_packages=kept,
                    exclude_newer=self.until,
                )
            )
        except Exception as error:
            where, reason = f"{self.manifest.path}, environment {environment},", str(error)
            if _no_answer(reason):
                raise NotAttempted(
                    f"{where} is not solved, a channel does not answer: {_one_line(reason)}"
                ) from None
            raise BuildFailed(f"{where} does not solve: {reason}") from None
        # what was locked is written as it was: an index may leave out what a lock states
        same = {(record.url, record.sha256): record for record in kept}
        return [same.get((record.url, record.sha256), record) for record in records]

    def _require_portable(self, records: list[RepoDataRecord]) -> None:
        for url in [*self.channels(), *(record.url for record in records)]:
            if not url.startswith(("https://", "http://")):
                raise ForgeError(
                    f"{self.lock_file} is for every machine, but {url} is of this one alone: "
                    "name the URL that the channel is served at with --channel"
                )
        for record in records:
            if str(record.build).startswith(HOST_BOUND):
                raise ForgeError(
                    f"{self.lock_file} is for every machine, but {record.url} was made on the "
                    "host base and is not: serve packages of the conda-forge base"
                )

    def locked(self, environment: str) -> list[RepoDataRecord]:
        """The packages of an environment. Raises ForgeError when there is no lock to read."""
        if not self.lock_file.exists():
            raise ForgeError(f"stack {self.name} is not locked: run forge lock {self.name}")
        locked = read_lock(self.lock_file).environment(environment)
        if locked is None or not locked.platforms():
            raise ForgeError(f"{self.lock_file} has no environment {environment!r}")
        return locked.conda_repodata_records_for_platform(locked.platforms()[0])

    def _already_locked(self, environment: str) -> list[RepoDataRecord]:
        if not self.lock_file.exists():
            return []
        known = {name for name, _ in read_lock(self.lock_file).environments()}
        return self.locked(environment) if environment in known else []

    def outdated(self, leave_out: Callable[[str], bool] = lambda _: False) -> list[str]:
        """What the lock does not do for the manifest, as lines; empty when it satisfies it.

        Requirements that `leave_out` drops are not asked for.
        """
        if not self.lock_file.exists():
            return [f"{self.lock_file} does not exist"]
        return unsatisfied(self.manifest, self.channels(), self.lock_file, leave_out)

    def install(self, environment: str, cache: Path | None = None) -> int:
        """Install from the lock, checking hashes; returns the number of packages.

        `cache` takes the place of rattler's own package cache. Raises ForgeError when there is no
        lock, BuildFailed when a package differs from it or cannot be had.
        """
        records, prefix = self.locked(environment), self.prefix(environment)
        for record in records:
            path = local_file(record.url)
            if path is None:
                continue  # the installer checks what it downloads
            if not path.exists():
                raise BuildFailed(f"{path} is locked but missing: run forge lock {self.name}")
            if sha256_file(path) != record.sha256.hex():
                raise BuildFailed(
                    f"{path} differs from its locked sha256 {record.sha256.hex()}. "
                    f"If it was rebuilt run forge lock {self.name}; else it was tampered with"
                )
        try:
            asyncio.run(rattler.install(records, prefix, cache_dir=cache, show_progress=False))
        except Exception as error:
            raise BuildFailed(self._why_not_installed(prefix, records, str(error))) from None
        return len(records)

    def _why_not_installed(self, prefix: Path, records: list[RepoDataRecord], error: str) -> str:
        """The installer's chain of causes as one line with the file, the reason and what to do."""
        reason = error.rsplit("Caused by: ", 1)[-1].strip()
        fetched = re.match(r"failed to fetch (\S+)", error)
        urls = [record.url for record in records if fetched and record.file_name == fetched[1]]
        if not urls:
            return f"cannot install into {prefix}: {_one_line(error)}"
        if _no_answer(error):
            return f"{urls[0]} cannot be fetched: {reason}. Run the same command again"
        reason = re.sub(r" to \S+", "", reason)  # a path in the cache, gone by now
        return (
            f"{urls[0]} is not the file that {self.lock_file} names, or came incomplete: {reason}. "
            "Nothing of it was installed; if it stays so, tell who serves the channel"
        )

    def run(self, environment: str, command: list[str]) -> int:
        """Run a command in the installed environment, activated; returns its exit status.

        Raises ForgeError when the lock is not what is installed: an installation that broke off
        leaves some packages without the others.
        """
        prefix = self.prefix(environment)
        if not (prefix / "conda-meta").is_dir():
            which = self.name if environment == "default" else f"{self.name} -e {environment}"
            raise ForgeError(f"stack {which} is not installed: run forge install {which}")
        installed = {file.stem for file in (prefix / "conda-meta").glob("*.json")}
        wanted = {record.file_name.removesuffix(".conda") for record in self.locked(environment)}
        if installed != {name.removesuffix(".tar.bz2") for name in wanted}:
            raise ForgeError(
                f"{prefix} is not what {self.lock_file} names (locked anew, or installed in part): "
                f"run forge install {self.name}"
            )
        path = os.environ.get("PATH", os.defpath).split(os.pathsep)
        script = activate(prefix, ActivationVariables(None, path)).script
        # the caller's own PYTHONPATH would put its modules before the environment's
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        line = f"{script}\nexec {shlex.join(command)}"
        return subprocess.run(["bash", "-c", line], env=clean, check=False).returncode


def local_file(url: str) -> Path | None:
    """The file of this machine that a record's URL names: `file://`, or a bare path."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(url) if url.startswith("/") else None


def _no_answer(error: str) -> bool:
    """Whether rattler's words are of a server that does not answer, or not as it should."""
    return "error sending request" in error or "HTTP status" in error


def _one_line(error: object) -> str:
    return "; ".join(line.removeprefix("Caused by: ") for line in str(error).splitlines())
