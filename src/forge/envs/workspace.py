# SPDX-License-Identifier: BSD-3-Clause
"""One workspace: its lock, and the environments that are installed from it."""

import asyncio
import contextlib
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import rattler
from rattler import RepoDataRecord, SourceConfig
from rattler.shell import ActivationVariables, activate

from forge import network
from forge.bases import CONDA_FORGE
from forge.conda import pypi
from forge.conda.index import is_of
from forge.conda.local import HOST_BOUND
from forge.conda.package import cache_folder
from forge.envs import cache, lockfile
from forge.envs.machine import require_machine
from forge.envs.manifest import Environment, Manifest, Platform
from forge.envs.repodata import Records, purls_of, with_purls
from forge.errors import BuildFailed, ForgeError, NotAttempted, redacted
from forge.files import read_text, write_text
from forge.locks import hold
from forge.project import SUBDIRS

Packages = list[RepoDataRecord]


@dataclass(frozen=True)
class Workspace:
    """A manifest that `forge lock` calls `name`, with its lock and environments in `folder`.

    `replace` maps channels as written to the URLs to use, `records` such a URL to records that
    stand for its index. `say` gets a line when another process must be waited for.
    """

    name: str
    manifest: Manifest
    folder: Path
    replace: dict[str, str]
    records: dict[str, Records] = field(default_factory=dict)
    say: Callable[[str], None] = print

    @property
    def lock_file(self) -> Path:
        """The pixi.lock of this workspace."""
        return self.folder / "pixi.lock"

    def prefix(self, environment: str) -> Path:
        """Where an environment is installed."""
        return self.folder / ".pixi" / "envs" / environment

    def channels(self, of: Environment | None = None) -> list[str]:
        """The channels of an environment, or of all, as URLs in the manifest's order."""
        return [self._url(channel) for channel in (of or self.manifest).channels]

    def _url(self, channel: str) -> str:
        if channel in self.replace or "://" in channel:
            return self.replace.get(channel, channel)
        if channel.startswith(("/", "./", "../")):
            return (self.manifest.path.parent / channel).resolve().as_uri()
        return CONDA_FORGE.replace("conda-forge", channel)

    def package_names(self, channel: str) -> set[str]:
        """The names in a channel, as the manifest writes it, that is served where `replace` says.

        Raises NotAttempted when it does not answer, BuildFailed when its index cannot be read.
        """
        url = self.replace.get(channel, channel)
        try:
            names = asyncio.run(self._gateway().names([self.records.get(url, url)], SUBDIRS))
        except Exception as error:
            raise _failure(f"{url} cannot be read", error, url) from None
        return {name.normalized for name in names}

    def lock(self, keep: bool = False) -> dict[str, int]:
        """Solve every environment on its platforms, write the lock, and return package counts.

        With `keep` what is locked already stays wherever the manifest allows it. Raises
        NotAttempted when a channel does not answer, BuildFailed when an environment does not solve,
        ForgeError when a package could not be checked, or the lock lies beside its manifest, for
        every machine, and names something of this one; an older lock then stays.
        """
        wanted = [(n, e, p) for n, e in self.manifest.environments().items() for p in e.platforms]
        locked = lockfile.read(self.lock_file) if keep and self.lock_file.exists() else {}
        solved, counts = list[lockfile.Solved](), Counter[str]()
        for name, environment, platform in wanted:
            kept, urls = [], self.channels(environment)
            with contextlib.suppress(ForgeError, KeyError):  # of another platform: nothing to keep
                kept = lockfile.records(locked[name], platform)
            try:
                sources = [self.records.get(url, url) for url in urls]
                records = self._solve(sources, environment.specs, platform, kept)
            except Exception as error:
                where = f"{self.manifest.path}: environment {name} does not solve"
                raise _failure(where, error, *urls) from None
            if self.folder == self.manifest.path.parent:
                self._require_portable(records)
            lockfile.require_checkable(records, urls)
            self._require_attested(records)
            # what was locked is written as it was: an index may leave out what a lock states
            same = {(record.url, record.sha256): record for record in kept}
            records = [same.get((r.url, r.sha256)) or self._named(r) for r in records]
            solved.append((name, urls, platform, records))
            counts[name] += len(records)
        with hold(self.folder / ".pixi", "locking", self.say):
            lockfile.write(self.lock_file, solved)
            if self.folder != self.manifest.path.parent:
                write_text(self.folder / "pixi.toml", self._localized())
        return counts

    def _named(self, record: RepoDataRecord) -> RepoDataRecord:
        """With its name on PyPI, if the manifest knows it and the channel's index does not.

        pixi itself looks only when something of PyPI's is required; a lock without it is kept then.
        """
        for channel, names in self.manifest.pypi_names().items():
            purls = pypi.purls(record.file_name, names)
            if is_of(record.url, self._url(channel)) and not set(purls) <= purls_of(record):
                return with_purls(record, purls)
        return record

    def _localized(self) -> str:
        """The manifest with the channels in use, for pixi, without the requirements left out."""
        text = read_text(self.manifest.path)
        for channel in self.manifest.channels:
            text = text.replace(json.dumps(channel), json.dumps(self._url(channel)))
        left_out, lines = self.manifest.without, text.splitlines(keepends=True)
        return "".join(line for line in lines if line.partition("=")[0].strip() not in left_out)

    def _gateway(self) -> rattler.Gateway:
        # rattler takes "304 Not Modified" without a date for an error when it asks for a part of an
        # index (shards), and Python's own web server answers so. Only conda-forge's index is large.
        whole = SourceConfig(sharded_enabled=False)
        config = dict.fromkeys((url for url in self.channels() if url != CONDA_FORGE), whole)
        return rattler.Gateway(per_channel_config=config, client=network.for_indexes())

    def _solve(self, sources: Any, specs: list[str], on: Platform, kept: Packages) -> Packages:
        """The newest packages of `sources`, or those of `kept` where they will do."""
        return asyncio.run(rattler.solve(
            sources, specs, self._gateway(), platforms=SUBDIRS, locked_packages=kept,
            virtual_packages=on.virtual_packages(),
        ))  # fmt: skip

    def _require_attested(self, records: Packages, anew: bool = False) -> None:
        """Raise Refused for a package whose channel's publisher, if declared, did not attest it.

        Locks do not say where attestations are: then the channel's index is asked `anew`.
        """
        for channel, publisher in self.manifest.publishers().items():
            url = self._url(channel)
            mine = [record for record in records if is_of(record.url, url)]
            if url.startswith("file:") or not mine:  # what was built here is attested later
                continue
            if anew:
                names = {record.name.normalized for record in mine}
                asked = self._gateway().query([url], SUBDIRS, names, recursive=False)
                served = {r.url: r for r in chain(*asyncio.run(asked))}
                mine = [served.get(r.url, r) for r in mine]
            publisher.require(mine)

    def _require_portable(self, records: Packages) -> None:
        must = f"{self.lock_file} must be portable, but"
        for url in [*self.channels(), *(record.url for record in records)]:
            if not url.startswith(("https://", "http://")):
                raise ForgeError(f"{must} {url} is on this machine only: serve it (--channel URL)")
        for record in records:
            if str(record.build).startswith(HOST_BOUND):
                raise ForgeError(f"{must} {record.url} was built on the host base (--channel URL)")

    def locked(self, environment: str, platform: Platform | None = None) -> Packages:
        """An environment's packages, on its only platform if `platform` names none.

        Raises ForgeError when there is no lock to believe.
        """
        if not self.lock_file.exists():
            raise ForgeError(f"stack {self.name} is not locked: run forge lock {self.name}")
        locked = lockfile.read(self.lock_file).get(environment)
        declared = self.manifest.environments().get(environment)
        if locked is None or declared is None:
            raise ForgeError(f"{self.lock_file} or pixi.toml has no environment {environment!r}")
        if not platform and len(declared.platforms) > 1:
            raise ForgeError(f"{environment} is for several platforms: pixi install chooses one")
        try:
            records = lockfile.records(locked, platform or declared.platforms[0])
            lockfile.require_checkable(records, self.channels(declared))
        except ForgeError as error:
            raise ForgeError(f"{self.lock_file}: {environment}: {error}") from None
        return records

    def outdated(self) -> list[str]:
        """How the lock fails to satisfy the manifest, as lines; empty when it satisfies it.

        Raises ForgeError like locked.
        """
        if not self.lock_file.exists():
            return [f"{self.lock_file} does not exist"]
        locked = lockfile.read(self.lock_file)
        declared, problems = self.manifest.environments(), []
        for name in sorted(declared.keys() | locked.keys()):
            if name not in declared or name not in locked:
                where = "not locked" if name in declared else "not in pixi.toml"
                problems.append(f"environment {name} is {where}")
                continue
            urls = [str(channel).rstrip("/") for channel in locked[name].channels()]
            if urls != [channel.rstrip("/") for channel in self.channels(declared[name])]:
                problems.append(f"{name}: locked for the channels {', '.join(urls)}")
                continue
            if len(locked[name].platforms()) > len(declared[name].platforms):
                problems.append(f"{name}: locked for other platforms as well")
            for platform in declared[name].platforms:
                try:  # what is locked is the only source
                    records = self.locked(name, platform)
                    solved = self._solve([], declared[name].specs, platform, records)
                except ForgeError as error:
                    problems.append(str(error))
                    continue
                except Exception as error:
                    problems.append(f"{name}: what is locked does not satisfy it: {error}".strip())
                    continue
                needed = {record.url for record in solved}
                unneeded = sorted(r.name.normalized for r in records if r.url not in needed)
                problems += [f"{name}: {n} is locked, but nothing requires it" for n in unneeded]
        return [f"{redacted(problem):.1500}" for problem in problems]

    def install(self, environment: str, packages: Path | None = None) -> int:
        """Install from the lock, checking every package; returns their number.

        `packages` takes the place of rattler's own package cache. Raises ForgeError when there is
        no lock, or for a machine that the packages do not run on, BuildFailed when a package
        differs from it or cannot be fetched, Refused for one that could write outside the prefix.
        """
        records, prefix = self.locked(environment), self.prefix(environment)
        require_machine(records)
        self._require_attested(records, anew=True)
        packages = packages or cache_folder()

        with hold(self.folder / ".pixi", "installing into", self.say):
            cache.fill(packages, records)
            try:
                asyncio.run(rattler.install(records, prefix, packages, show_progress=False))
            except Exception as error:
                raise BuildFailed(f"cannot install into {prefix}: {_one_line(error)}") from None
        return len(records)

    def run(self, environment: str, command: list[str]) -> NoReturn:
        """Become a command in the installed environment, activated: it gets signals itself.

        Raises ForgeError when something else than the lock is installed, or only part of it.
        """
        prefix = self.prefix(environment)
        if not (prefix / "conda-meta").is_dir():
            which = self.name if environment == "default" else f"{self.name} -e {environment}"
            raise ForgeError(f"stack {which} is not installed: run forge install {which}")
        wanted = {(r.name.normalized, (r.sha256 or b"").hex()) for r in self.locked(environment)}
        if _installed(prefix) != wanted:
            why = f"is not what {self.lock_file} names (locked anew, or installed in part)"
            raise ForgeError(f"{prefix} {why}: run forge install {self.name}")
        script = activate(prefix, ActivationVariables(None, os.get_exec_path())).script
        # the caller's own PYTHONPATH would put its modules before the environment's
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        line = f"{script}\nexec {shlex.join(command)}"
        os.execvpe("bash", ["bash", "-c", line], clean)


def _installed(prefix: Path) -> set[tuple[str, str]]:
    """Name and sha256 of what is installed; what cannot be read equals nothing."""
    found = set()
    for file in (prefix / "conda-meta").glob("*.json"):
        try:
            record = json.loads(file.read_bytes())
            found.add((record["name"], record["sha256"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            found.add((file.name, "unreadable"))
    return found


def _failure(what: str, error: Exception, *urls: str) -> ForgeError:
    """NotAttempted for a server that does not answer, or not as it should; else BuildFailed."""
    if re.search("error sending request|HTTP status|error decoding response|timed out", str(error)):
        return NotAttempted(f"{what}, {' or '.join(urls)} does not answer: {_one_line(error)}")
    if "panicked" in str(error):  # of rattler: an address that is none, an answer of 304
        why = "a channel answers what rattler cannot read; forge channel verify says what"
        return NotAttempted(f"{what}: {why}")
    return BuildFailed(f"{what}: {error}".strip())


def _one_line(error: Exception) -> str:
    lines = (line.removeprefix("Caused by: ") for line in str(error).splitlines())
    return "; ".join(lines)
