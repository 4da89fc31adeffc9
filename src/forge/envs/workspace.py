# SPDX-License-Identifier: BSD-3-Clause
"""Lock a workspace, and install and run its environments, on a machine without pixi."""

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

# Each of the files MARKS in a prefix marks a complete installation, except for a PIXI_STATE whose
# content is in UNFINISHED. This module writes INSTALLED_FROM, and pixi writes the other two. Older
# versions of pixi write only conda-meta/pixi.
INSTALLED_FROM = "conda-meta/installed-from"
PIXI_STATE = "conda-meta/.pixi-environment-fingerprint"
MARKS = [INSTALLED_FROM, PIXI_STATE, "conda-meta/pixi"]
# The contents of PIXI_STATE before pixi has installed anything, and while it is installing.
UNFINISHED = (b"", b"pixi:installing!")
# Parts of the error messages for a server that does not answer, or answers incorrectly.
NO_ANSWER = re.compile("error sending request|HTTP status|error decoding response|timed out")


class LockedInPart(Failed):
    """A lock was written, but some environments of the workspace cannot be solved today."""


@dataclass(frozen=True)
class Workspace:
    """The folder of a pixi.toml.

    Attributes:
        name: The name of the workspace in messages.
        folder: The folder.
        say: Called with a line to print if another process is working in the folder.
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
        """The pixi.toml of this workspace."""
        return Manifest.load(self.folder / "pixi.toml")

    @cached_property
    def channel_urls(self) -> list[str]:
        """The URLs of the manifest's channels."""
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
            file: The path of the new lock; `lock_file` by default.

        Returns:
            The number of packages in each environment.

        Raises:
            LockedInPart: Some environments cannot be solved. The lock has the other environments.
                For an environment that cannot be solved, it keeps the packages of an older lock,
                if there are any.
            Failed: No environment can be solved, or rattler fails. An older lock stays.
            NotAttempted: A channel does not answer. An older lock stays.
            ForgeError: A package cannot be checked, or the lock cannot be written. An older lock
                stays.
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
        """Raise ForgeError if the workspace has no lock."""
        if not self.lock_file.exists():
            raise ForgeError(f"stack {self.name} is not locked: run ./forge lock {self.name}")

    def _words(self, environment: str) -> str:
        """Return the words that name an environment on the command line of `forge install`."""
        return self.name if environment == "default" else f"{self.name} -e {environment}"

    def require_installed(self, environment: str) -> None:
        """Raise ForgeError unless an environment is installed, at least in part."""
        if not (self.prefix(environment) / "conda-meta").is_dir():
            stack = self._words(environment)
            raise ForgeError(f"stack {stack} is not installed: run ./forge install {stack}")

    def locked(self, environment: str) -> list[RepoDataRecord]:
        """List the locked packages of an environment.

        Raises:
            ForgeError: There is no lock, or it does not have the environment or cannot be trusted.
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

        An interrupted installation is removed and made again, because its records may be damaged.
        An installation by pixi is also removed first.

        Args:
            environment: The name of the environment.
            packages: A package cache to use in place of rattler's.

        Returns:
            The number of packages.

        Raises:
            ForgeError: The lock is missing or cannot be trusted, `cache.fill` fails, rattler fails,
                or INSTALLED_FROM cannot be written.
        """
        records = self.locked(environment)
        prefix = self.prefix(environment)
        packages = packages or cache_folder()
        mark = prefix / INSTALLED_FROM
        with hold(self.folder / ".pixi", "installing into", self.say):
            is_complete = mark.exists() and not (prefix / PIXI_STATE).exists()
            cache.fill(packages, records)
            # Remove the marks of a complete installation before any file of the prefix changes.
            for name in MARKS:
                (prefix / name).unlink(missing_ok=True)
            if not is_complete:
                shutil.rmtree(prefix, ignore_errors=True)
            try:
                asyncio.run(rattler.install(records, prefix, packages, show_progress=False))
            except Exception as error:
                raise Failed(f"cannot install into {prefix}: {one_line(str(error))}") from None
            write_text(mark, sha256_file(self.lock_file))
        return len(records)

    def find_leftovers(self) -> Iterator[Path]:
        """Yield the leftovers of a killed `lock` or `install`, for the caller to remove.

        The caller has to hold the lock of the workspace. A prefix that pixi did not finish is
        removed here before it is yielded, because it may be removed only while pixi's lock of that
        prefix is held.
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
            command: The command and its arguments.

        Raises:
            ForgeError: The environment is not installed, or does not match the lock.
        """
        self.require_installed(environment)
        self.require_locked()
        prefix = self.prefix(environment)
        mark = prefix / INSTALLED_FROM
        if not mark.exists() or mark.read_text() != sha256_file(self.lock_file):
            reason = f"does not match {self.lock_file} (locked again, or not installed completely)"
            raise ForgeError(f"{prefix} {reason}: run ./forge install {self._words(environment)}")
        variables = ActivationVariables(None, os.get_exec_path())
        script = f"{activate(prefix, variables).script}\nexec {shlex.join(command)}"
        os.execvpe("bash", ["bash", "-c", script], variables_for_commands())


def variables_for_commands() -> dict[str, str]:
    """Return the environment variables for a command that runs in an environment.

    PYTHONPATH and PYTHONHOME are left out. With them, Python would find the caller's modules, and
    those of the driver, before the environment's.
    """
    variables = dict(os.environ)
    variables.pop("PYTHONPATH", None)
    variables.pop("PYTHONHOME", None)
    return variables


def _yield_unfinished(prefix: Path) -> Iterator[Path]:
    """Yield a prefix if pixi began to install into it and did not finish."""
    if (prefix / PIXI_STATE).read_bytes() in UNFINISHED:
        yield prefix


def _make_gateway(channel_urls: list[str]) -> rattler.Gateway:
    """Return a gateway that reads conda-forge's index in shards, and other indexes as a whole.

    rattler treats "304 Not Modified" without `Last-Modified` as an error when it requests a shard,
    and Python's web server answers in this way. Shards are worthwhile only for the large index of
    conda-forge.
    """
    unsharded = SourceConfig(sharded_enabled=False)
    config = {url: unsharded for url in channel_urls if url != CONDA_FORGE}
    return rattler.Gateway(per_channel_config=config, client=network.make_solver_client())


def _make_error(failure: str, error: Exception, channel_urls: list[str]) -> ForgeError:
    """Return NotAttempted if a wrong or missing answer of a server is the cause, else Failed."""
    channels = " or ".join(channel_urls)
    if NO_ANSWER.search(str(error)):
        reason = "does not answer, or answers with an error"
        return NotAttempted(f"{failure}: {channels} {reason}: {one_line(str(error))}")
    if "panicked" in str(error):
        # rattler panics for an invalid URL and for status 304.
        reason = "sends an answer that rattler cannot read: look at its repodata.json"
        return NotAttempted(f"{failure}: {channels} {reason}")
    return Failed(f"{failure}: {error}".strip())
