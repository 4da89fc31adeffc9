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
from forge.conda.scratch import cache_folder
from forge.conda.solve import explain, solve
from forge.envs import lockfile
from forge.envs.manifest import Manifest
from forge.errors import Failed, ForgeError, NotAttempted, one_line
from forge.files import hold, remove_if_unlocked, sha256_file, write_text

# Files in a prefix that say that all of it is installed: ours, pixi's, and an older pixi's.
INSTALLED_FROM = "conda-meta/installed-from"
PIXI_STATE = "conda-meta/.pixi-environment-fingerprint"
MARKS = [INSTALLED_FROM, PIXI_STATE, "conda-meta/pixi"]
# What PIXI_STATE has while pixi installs.
UNFINISHED = (b"", b"pixi:installing!")
# Errors of a server that does not answer, or not as it should.
NO_ANSWER = re.compile("error sending request|HTTP status|error decoding response|timed out")


class LockedInPart(Failed):
    """A lock was written, but not all of its environments solve today."""


@dataclass(frozen=True)
class Workspace:
    """The folder of a pixi.toml.

    Attributes:
        name: What messages call it.
        folder: The folder.
        say: Prints a line while another process works in the folder.
    """

    name: str
    folder: Path
    say: Callable[[str], None] = print

    @property
    def lock_file(self) -> Path:
        """The pixi.lock of this workspace."""
        return self.folder / "pixi.lock"

    def prefix(self, environment: str) -> Path:
        """Return the folder in which an environment is installed."""
        return self.folder / ".pixi" / "envs" / environment

    @cached_property
    def manifest(self) -> Manifest:
        """Its pixi.toml."""
        return Manifest.load(self.folder / "pixi.toml")

    @cached_property
    def channel_urls(self) -> list[str]:
        """The URLs of its channels."""
        urls = []
        for channel in self.manifest.channels:
            if "://" in channel:
                urls.append(channel)
            else:
                urls.append(CONDA_FORGE.replace("conda-forge", channel))
        return urls

    def lock(self, file: Path | None = None) -> dict[str, int]:
        """Solve every environment for this machine and write the lock.

        Args:
            file: Where the lock is written, if not to `lock_file`.

        Returns:
            The number of packages in each environment.

        Raises:
            LockedInPart: Some environments do not solve. The lock has the others, and of these what
                an older lock has.
            Failed: No environment solves; an older lock stays.
            NotAttempted: A channel does not answer; an older lock stays.
            ForgeError: A package could not be checked; an older lock stays.
        """
        solved = {}
        reasons = []
        gateway = _make_gateway(self.channel_urls)
        for name, specs in self.manifest.environments.items():
            where = f"{self.manifest.path}: environment {name} does not solve"
            try:
                solved[name] = solve(self.channel_urls, specs, gateway)
            except SolverError as error:
                reason = explain(self.channel_urls, specs, gateway) or one_line(str(error))
                reasons.append(f"{where}: {reason}")
                with contextlib.suppress(ForgeError):
                    solved[name] = self.locked(name)
            except Exception as error:
                raise _make_error(where, error, self.channel_urls) from None
            else:
                lockfile.require_checkable(solved[name], self.channel_urls)
        if len(reasons) == len(self.manifest.environments):
            raise Failed("; ".join(reasons))
        lockfile.write(file or self.lock_file, self.channel_urls, solved)
        if reasons:
            raise LockedInPart("; ".join(reasons))
        return {name: len(records) for name, records in solved.items()}

    def require_locked(self) -> None:
        """Raise ForgeError when there is no lock."""
        if not self.lock_file.exists():
            raise ForgeError(f"stack {self.name} is not locked: run forge lock {self.name}")

    def locked(self, environment: str) -> list[RepoDataRecord]:
        """List the locked packages of an environment.

        Raises:
            ForgeError: There is no lock, or none that can be trusted.
        """
        self.require_locked()
        locked = lockfile.read(self.lock_file).get(environment)
        if locked is None:
            raise ForgeError(f"{self.lock_file} has no environment {environment!r}")
        try:
            records = lockfile.records(locked)
            lockfile.require_checkable(records, self.channel_urls)
        except ForgeError as error:
            raise ForgeError(f"{self.lock_file}: {environment}: {error}") from None
        return records

    def install(self, environment: str, packages: Path | None = None) -> int:
        """Install an environment from the lock, and check every package.

        An installation that was interrupted is made anew, because its records may be damaged.

        Args:
            environment: The name of the environment.
            packages: A package cache to use in place of rattler's.

        Returns:
            The number of packages.

        Raises:
            ForgeError: There is no lock; or as cache.fill.
        """
        records = self.locked(environment)
        prefix = self.prefix(environment)
        packages = packages or cache_folder()
        mark = prefix / INSTALLED_FROM
        with hold(self.folder / ".pixi", "installing into", self.say):
            is_whole = mark.exists() and not (prefix / PIXI_STATE).exists()
            cache.fill(packages, records)
            for name in MARKS:  # before anything in the prefix changes
                (prefix / name).unlink(missing_ok=True)
            if not is_whole:
                shutil.rmtree(prefix, ignore_errors=True)
            try:
                asyncio.run(rattler.install(records, prefix, packages, show_progress=False))
            except Exception as error:
                raise Failed(f"cannot install into {prefix}: {one_line(str(error))}") from None
            write_text(mark, sha256_file(self.lock_file))
        return len(records)

    def find_leftovers(self) -> Iterator[Path]:
        """Yield what a killed `lock` or `install` left behind. The caller holds their lock.

        A prefix in which pixi was installing is already removed, with pixi's own lock held.
        """
        for prefix in self.folder.glob(".pixi/envs/*/"):
            yield from remove_if_unlocked(prefix / PIXI_STATE, _yield_unfinished(prefix))
            if prefix.exists() and not any((prefix / name).exists() for name in MARKS):
                yield prefix
        yield from self.folder.glob(".partial-*")

    def run(self, environment: str, command: list[str]) -> NoReturn:
        """Replace this process by a command in an environment.

        Args:
            environment: The name of the environment.
            command: The words of the command.

        Raises:
            ForgeError: The environment is not installed, or is not what the lock names.
        """
        prefix = self.prefix(environment)
        stack = self.name if environment == "default" else f"{self.name} -e {environment}"
        if not (prefix / "conda-meta").is_dir():
            raise ForgeError(f"stack {stack} is not installed: run forge install {stack}")
        self.require_locked()
        mark = prefix / INSTALLED_FROM
        if not mark.exists() or mark.read_text() != sha256_file(self.lock_file):
            reason = f"does not match {self.lock_file} (locked again, or installed in part)"
            raise ForgeError(f"{prefix} {reason}: run forge install {stack}")
        variables = ActivationVariables(None, os.get_exec_path())
        script = f"{activate(prefix, variables).script}\nexec {shlex.join(command)}"
        environ = dict(os.environ)
        # The caller's own modules would come before those of the environment.
        environ.pop("PYTHONPATH", None)
        environ.pop("PYTHONHOME", None)
        os.execvpe("bash", ["bash", "-c", script], environ)


def _yield_unfinished(prefix: Path) -> Iterator[Path]:
    """Yield a prefix if pixi began to install into it and did not finish."""
    if (prefix / PIXI_STATE).read_bytes() in UNFINISHED:
        yield prefix


def _make_gateway(channel_urls: list[str]) -> rattler.Gateway:
    """Return a gateway that reads conda-forge's index in parts, and the others as a whole.

    When rattler asks for a part of an index (shards), it takes "304 Not Modified" without a date
    for an error, and Python's own web server answers so. Only conda-forge's index is large.
    """
    whole = SourceConfig(sharded_enabled=False)
    config = {url: whole for url in channel_urls if url != CONDA_FORGE}
    return rattler.Gateway(per_channel_config=config, client=network.make_solver_client())


def _make_error(failure: str, error: Exception, channel_urls: list[str]) -> ForgeError:
    """Return NotAttempted for a server that does not answer, or not as it should; else Failed."""
    channels = " or ".join(channel_urls)
    if NO_ANSWER.search(str(error)):
        return NotAttempted(f"{failure}, {channels} does not answer: {one_line(str(error))}")
    if "panicked" in str(error):  # rattler does for an invalid address, and for an answer of 304
        reason = "answers what rattler cannot read: look at its repodata.json"
        return NotAttempted(f"{failure}: {channels} {reason}")
    return Failed(f"{failure}: {error}".strip())
