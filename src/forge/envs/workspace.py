# SPDX-License-Identifier: BSD-3-Clause
"""One workspace: its lock, and the environments that are installed from it."""

import asyncio
import os
import re
import shlex
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

import rattler
from rattler import LockChannel, LockFile, LockPlatform, RepoDataRecord, SourceConfig
from rattler.shell import ActivationVariables, activate

from forge.bases import CONDA_FORGE
from forge.channel.local import HOST_BOUND
from forge.envs.bindings import Subdir
from forge.envs.manifest import PLATFORM, Manifest
from forge.envs.records import Records
from forge.errors import BuildFailed, ForgeError, NotAttempted
from forge.files import sha256_file
from forge.project import SUBDIRS


@dataclass(frozen=True)
class Workspace:
    """A manifest that `forge lock` calls `name`, with its lock and environments in `folder`.

    `replace` maps channels as written to the URLs to use, `records` such a URL to records that
    stand for its index.
    """

    name: str
    manifest: Manifest
    folder: Path
    replace: dict[str, str]
    records: dict[str, Records] = field(default_factory=dict)

    @property
    def lock_file(self) -> Path:
        return self.folder / "pixi.lock"

    def prefix(self, environment: str) -> Path:
        return self.folder / ".pixi" / "envs" / environment

    def channels(self) -> list[str]:
        """The channels as URLs, in the manifest's order."""
        result, folder = [], self.manifest.path.parent
        for channel in self.manifest.data["workspace"]["channels"]:
            url = channel if "://" in channel else (folder / channel).resolve().as_uri()
            result.append(self.replace.get(channel, url))
        return result

    def package_names(self, channel: str) -> set[str]:
        """The names in a channel, as the manifest writes it, that is served where `replace` says.

        Raises NotAttempted when it does not answer, BuildFailed when its index cannot be read.
        """
        url = self.replace.get(channel, channel)
        try:
            names = asyncio.run(self._gateway().names([self.records.get(url, url)], SUBDIRS))
        except Exception as error:
            raise _failure(f"{url} cannot be read", error) from None
        return {name.normalized for name in names}

    def lock(self, without: Set[str] = frozenset(), keep: bool = False) -> dict[str, int]:
        """Solve every environment, write the lock, and return package counts by environment.

        Requirements of a name in `without` are left out; with `keep` what is locked already stays
        wherever the manifest allows it. Raises NotAttempted when a channel does not answer,
        BuildFailed when an environment does not solve, ForgeError when the lock lies beside its
        manifest, for every machine, and names something of this one; an older lock then stays.
        """
        declared, urls = self.manifest.platform(), self.channels()
        platform = LockPlatform(declared.name, Subdir(PLATFORM), declared.lines)
        lock, counts, sources = LockFile([platform]), {}, [self.records.get(u, u) for u in urls]
        locked = self._locked_environments() if keep and self.lock_file.exists() else {}
        for environment, specs in self.manifest.environments(without).items():
            kept = _packages(locked[environment]) if environment in locked else []
            try:
                records = self._solve(sources, specs, kept)
            except Exception as error:
                where = f"{self.manifest.path}: environment {environment} does not solve"
                raise _failure(where, error) from None
            if self.folder == self.manifest.path.parent:
                self._require_portable(records)
            # what was locked is written as it was: an index may leave out what a lock states
            same = {(record.url, record.sha256): record for record in kept}
            lock.set_channels(environment, [LockChannel(f"{url.rstrip('/')}/") for url in urls])
            for record in sorted(records, key=lambda r: (r.subdir, r.name.normalized)):
                record = same.get((record.url, record.sha256), record)
                lock.add_conda_package(environment, platform, record)
            counts[environment] = len(records)
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.lock_file.with_name(".pixi.lock.partial")
        lock.to_path(partial)
        partial.replace(self.lock_file)
        return counts

    def _gateway(self) -> rattler.Gateway:
        # rattler takes "304 Not Modified" without a date for an error when it asks for a part of an
        # index (shards), and Python's own web server answers so. Only conda-forge's index is large.
        whole = SourceConfig(sharded_enabled=False)
        small = [url for url in self.channels() if url != CONDA_FORGE]
        return rattler.Gateway(per_channel_config=dict.fromkeys(small, whole))

    def _solve(
        self, sources: Sequence[Any], specs: list[str], kept: list[RepoDataRecord]
    ) -> list[RepoDataRecord]:
        """The newest packages of `sources`, or those of `kept` where they will do."""
        solution = rattler.solve(
            sources, specs, self._gateway(), platforms=SUBDIRS, locked_packages=kept,
            virtual_packages=self.manifest.platform().virtual_packages(),
        )  # fmt: skip
        return asyncio.run(solution)

    def _require_portable(self, records: list[RepoDataRecord]) -> None:
        must = f"{self.lock_file} must be portable, but"
        for url in [*self.channels(), *(record.url for record in records)]:
            if not url.startswith(("https://", "http://")):
                raise ForgeError(f"{must} {url} is on this machine only: serve it (--channel URL)")
        for record in records:
            if str(record.build).startswith(HOST_BOUND):
                raise ForgeError(f"{must} {record.url} was built on the host base (--channel URL)")

    def _locked_environments(self) -> dict[str, rattler.Environment]:
        try:
            return dict(LockFile.from_path(self.lock_file).environments())
        except Exception as error:  # for example marks of a merge
            raise ForgeError(f"{self.lock_file} is not a lock file: {error}") from None

    def locked(self, environment: str) -> list[RepoDataRecord]:
        """The packages of an environment. Raises ForgeError when there is no lock to read."""
        if not self.lock_file.exists():
            raise ForgeError(f"stack {self.name} is not locked: run forge lock {self.name}")
        locked = self._locked_environments().get(environment)
        if locked is None or not locked.platforms():
            raise ForgeError(f"{self.lock_file} has no environment {environment!r}")
        return _packages(locked)

    def outdated(self, without: Set[str] = frozenset()) -> list[str]:
        """How the lock fails to satisfy the manifest, as lines; empty when it satisfies it.

        Requirements of a name in `without` need not be locked. Raises ForgeError like locked.
        """
        if not self.lock_file.exists():
            return [f"{self.lock_file} does not exist"]
        locked, platform = self._locked_environments(), self.manifest.platform()
        declared, problems = self.manifest.environments(without), []
        expected = [(platform.name, PLATFORM, sorted(platform.lines))]
        for name in sorted(declared.keys() | locked.keys()):
            if name not in declared or name not in locked:
                where = "not locked" if name in declared else "not in pixi.toml"
                problems.append(f"environment {name} is {where}")
                continue
            urls = [str(channel).rstrip("/") for channel in locked[name].channels()]
            if urls != [channel.rstrip("/") for channel in self.channels()]:
                problems.append(f"{name}: locked for the channels {', '.join(urls)}")
            solved = locked[name].platforms()
            there = [(p.name, str(p.subdir), sorted(p.virtual_packages)) for p in solved]
            if there != expected:
                problems.append(f"{name}: locked for other platforms than {platform.name}: {there}")
                continue
            records = _packages(locked[name])
            try:  # what is locked is the only source
                needed = {record.url for record in self._solve([], declared[name], records)}
            except Exception as error:
                problems.append(f"{name}: what is locked does not satisfy it: {error}".strip())
                continue
            unneeded = sorted(r.name.normalized for r in records if r.url not in needed)
            problems += [f"{name}: {n} is locked, but nothing requires it" for n in unneeded]
        return problems

    def install(self, environment: str, cache: Path | None = None) -> int:
        """Install from the lock, checking hashes; returns the number of packages.

        `cache` takes the place of rattler's own package cache. Raises ForgeError when there is no
        lock, BuildFailed when a package differs from it or cannot be fetched.
        """
        records, prefix = self.locked(environment), self.prefix(environment)
        for record in records:  # rattler takes its cache's copy for a file that was changed
            path, sha256 = _local_file(record.url), (record.sha256 or b"").hex()
            if path and not path.exists():
                raise BuildFailed(f"{path} is locked but missing: run forge lock {self.name}")
            if path and sha256_file(path) != sha256:
                advice = f"If it was rebuilt run forge lock {self.name}; else it was tampered with"
                raise BuildFailed(f"{path} differs from its locked sha256 {sha256}. {advice}")
        try:
            asyncio.run(rattler.install(records, prefix, cache_dir=cache, show_progress=False))
        except Exception as error:
            file = re.match(r"failed to fetch (\S+)", str(error))
            urls = [record.url for record in records if file and record.file_name == file[1]]
            what = urls[0] if urls else f"cannot install into {prefix}"
            advice = "Run the same command again; if it persists, contact the channel's operator"
            raise BuildFailed(f"{what}: {_one_line(error)}. {advice}") from None
        return len(records)

    def run(self, environment: str, command: list[str]) -> NoReturn:
        """Become a command in the installed environment, activated: it gets signals itself.

        Raises ForgeError when something else than the lock is installed, or only part of it.
        """
        prefix = self.prefix(environment)
        if not (prefix / "conda-meta").is_dir():
            which = self.name if environment == "default" else f"{self.name} -e {environment}"
            raise ForgeError(f"stack {which} is not installed: run forge install {which}")
        installed = {file.stem for file in (prefix / "conda-meta").glob("*.json")}
        names = {record.file_name for record in self.locked(environment)}
        if installed != {name.removesuffix(".conda").removesuffix(".tar.bz2") for name in names}:
            why = f"is not what {self.lock_file} names (locked anew, or installed in part)"
            raise ForgeError(f"{prefix} {why}: run forge install {self.name}")
        script = activate(prefix, ActivationVariables(None, os.get_exec_path())).script
        # the caller's own PYTHONPATH would put its modules before the environment's
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        line = f"{script}\nexec {shlex.join(command)}"
        os.execvpe("bash", ["bash", "-c", line], clean)


def _packages(locked: rattler.Environment) -> list[RepoDataRecord]:
    return locked.conda_repodata_records_for_platform(locked.platforms()[0]) or []


def _local_file(url: str) -> Path | None:
    """The file of this machine that a record's URL names: `file://`, or a bare path."""
    if url.startswith("file:"):
        return Path(unquote(urlsplit(url).path))
    return Path(url) if url.startswith("/") else None


def _failure(what: str, error: Exception) -> ForgeError:
    """NotAttempted for a server that does not answer, or not as it should; else BuildFailed."""
    if "error sending request" in str(error) or "HTTP status" in str(error):
        return NotAttempted(f"{what}, a channel does not answer: {_one_line(error)}")
    return BuildFailed(f"{what}: {error}")


def _one_line(error: Exception) -> str:
    return "; ".join(line.removeprefix("Caused by: ") for line in str(error).splitlines())
