# SPDX-License-Identifier: BSD-3-Clause
"""A workspace on a machine without pixi: its lock, and the environments installed from it."""

import asyncio
import contextlib
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import rattler
from rattler import RepoDataRecord, SourceConfig
from rattler.exceptions import SolverError
from rattler.shell import ActivationVariables, activate

from forge import network
from forge.bases import CONDA_FORGE
from forge.conda import cache
from forge.conda.package import cache_folder
from forge.envs import lockfile
from forge.envs.manifest import Manifest
from forge.envs.solver import explain, solve
from forge.errors import Failed, ForgeError, NotAttempted, one_line
from forge.files import hold, sha256_file, swept, write_text

# what says of a prefix that all is installed: our file, pixi's, and an older pixi's
MARKS = [f"conda-meta/{n}" for n in ("installed-from", ".pixi-environment-fingerprint", "pixi")]
STATE = MARKS[1]
BEGUN = b"", b"pixi:installing!"  # what pixi's says before that


class LockedInPart(Failed):
    """A lock was written, but not all of its environments solve today."""


@dataclass(frozen=True)
class Workspace:
    """The folder of a pixi.toml, called `name`; `say` gets a line when it must be waited for."""

    name: str
    folder: Path
    say: Callable[[str], None] = print

    @property
    def lock_file(self) -> Path:
        """The pixi.lock of this workspace."""
        return self.folder / "pixi.lock"

    def prefix(self, environment: str) -> Path:
        """Return where an environment is installed."""
        return self.folder / ".pixi" / "envs" / environment

    @cached_property
    def manifest(self) -> Manifest:
        """Its pixi.toml."""
        return Manifest.load(self.folder / "pixi.toml")

    @cached_property
    def channels(self) -> list[str]:
        """Its channels as URLs."""
        named = self.manifest.channels
        return [c if "://" in c else CONDA_FORGE.replace("conda-forge", c) for c in named]

    def lock(self, file: Path | None = None) -> dict[str, int]:
        """Solve every environment for this machine and write the lock; returns their sizes.

        Raises:
            LockedInPart: Some environments do not solve. The lock has what an older one has of
                them, and the others.
            Failed: None solves; an older lock stays.
            NotAttempted: A channel does not answer; an older lock stays.
            ForgeError: A package could not be checked; an older lock stays.
        """
        solved, reasons, gateway = {}, [], _gateway(self.channels)
        for name, specs in self.manifest.environments.items():
            try:
                solved[name] = solve(self.channels, specs, gateway)
            except Exception as error:
                where = f"{self.manifest.path}: environment {name} does not solve"
                if not isinstance(error, SolverError):
                    raise _failure(where, error, self.channels) from None
                reason = explain(self.channels, specs, gateway) or one_line(str(error))
                reasons.append(f"{where}: {reason}")
                with contextlib.suppress(ForgeError):
                    solved[name] = self.locked(name)
                continue
            lockfile.require_checkable(solved[name], self.channels)
        if len(reasons) == len(self.manifest.environments):
            raise Failed("; ".join(reasons))
        lockfile.write(file or self.lock_file, self.channels, solved)
        if reasons:
            raise LockedInPart("; ".join(reasons))
        return {name: len(records) for name, records in solved.items()}

    def require_locked(self) -> None:
        """Raise ForgeError when there is no lock."""
        if not self.lock_file.exists():
            raise ForgeError(f"stack {self.name} is not locked: run forge lock {self.name}")

    def locked(self, environment: str) -> list[RepoDataRecord]:
        """List an environment's packages. Raises ForgeError when there is no lock to believe."""
        self.require_locked()
        locked = lockfile.read(self.lock_file).get(environment)
        if locked is None:
            raise ForgeError(f"{self.lock_file} has no environment {environment!r}")
        try:
            records = lockfile.records(locked)
            lockfile.require_checkable(records, self.channels)
        except ForgeError as error:
            raise ForgeError(f"{self.lock_file}: {environment}: {error}") from None
        return records

    def install(self, environment: str, packages: Path | None = None) -> int:
        """Install from the lock, checking every package; returns their number.

        `packages` replaces rattler's cache. An installation that did not end, whose records may be
        damaged, is made anew. Raises ForgeError without a lock, and what cache.fill does.
        """
        records, prefix = self.locked(environment), self.prefix(environment)
        packages = packages or cache_folder()
        with hold(self.folder / ".pixi", "installing into", self.say):
            begun = not self._mark(environment).exists() or (prefix / STATE).exists()
            cache.fill(packages, records)
            for name in MARKS:  # before anything of it changes
                (prefix / name).unlink(missing_ok=True)
            if begun:
                shutil.rmtree(prefix, ignore_errors=True)
            try:
                asyncio.run(rattler.install(records, prefix, packages, show_progress=False))
            except Exception as error:
                raise Failed(f"cannot install into {prefix}: {one_line(str(error))}") from None
            write_text(self._mark(environment), sha256_file(self.lock_file))
        return len(records)

    def left(self) -> Iterator[Path]:
        """List what a killed `lock` or `install` left, for whoever holds the lock file of both."""
        for prefix in self.folder.glob(".pixi/envs/*/"):
            state = prefix / STATE  # which a live pixi holds
            yield from swept(state, (prefix for _ in "1" if state.read_bytes() in BEGUN))
            if not any((prefix / name).exists() for name in MARKS):
                yield prefix
        yield from self.folder.glob(".partial-*")

    def _mark(self, environment: str) -> Path:
        """Return the file that holds the lock's sha256 once all of that lock is installed."""
        return self.prefix(environment) / MARKS[0]

    def run(self, environment: str, command: list[str]) -> NoReturn:
        """Become a command in the environment. Raises ForgeError if that is not the lock's."""
        prefix = self.prefix(environment)
        if not (prefix / "conda-meta").is_dir():
            which = self.name if environment == "default" else f"{self.name} -e {environment}"
            raise ForgeError(f"stack {which} is not installed: run forge install {which}")
        self.require_locked()
        mark = self._mark(environment)
        if not mark.exists() or mark.read_text() != sha256_file(self.lock_file):
            why = f"is not what {self.lock_file} names (locked anew, or installed in part)"
            raise ForgeError(f"{prefix} {why}: run forge install {self.name}")
        script = activate(prefix, ActivationVariables(None, os.get_exec_path())).script
        # the caller's own PYTHONPATH would put its modules before the environment's
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        line = f"{script}\nexec {shlex.join(command)}"
        os.execvpe("bash", ["bash", "-c", line], clean)


def _gateway(channels: list[str]) -> rattler.Gateway:
    # rattler takes "304 Not Modified" without a date for an error when it asks for a part of an
    # index (shards), and Python's own web server answers so. Only conda-forge's index is large.
    whole = SourceConfig(sharded_enabled=False)
    config = dict.fromkeys((url for url in channels if url != CONDA_FORGE), whole)
    return rattler.Gateway(per_channel_config=config, client=network.for_indexes())


def _failure(what: str, error: Exception, urls: list[str]) -> ForgeError:
    """Return NotAttempted for a server that does not answer, or not as it should; else Failed."""
    if re.search("error sending request|HTTP status|error decoding response|timed out", str(error)):
        return NotAttempted(f"{what}, {' or '.join(urls)} does not answer: {one_line(str(error))}")
    if "panicked" in str(error):  # of rattler: an address that is none, an answer of 304
        reason = "answers what rattler cannot read: look at its repodata.json"
        return NotAttempted(f"{what}: {' or '.join(urls)} {reason}")
    return Failed(f"{what}: {error}".strip())
