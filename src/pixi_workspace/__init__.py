# SPDX-License-Identifier: BSD-3-Clause
"""`pixi lock`, `pixi install` and `pixi run` for one pixi.toml, on machines without pixi.

Over py-rattler: the same solver, lock format (version 7) and installer that pixi uses. Reads
channels, dependencies, features and environments; tasks and PyPI dependencies are pixi's alone.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rattler
from rattler import (
    BuildString,
    GenericVirtualPackage,
    LockChannel,
    LockFile,
    LockPlatform,
    MatchSpec,
    PackageName,
    RepoDataRecord,
    Version,
)
from rattler.shell import ActivationVariables, activate

from forge_store.project import BuildFailed, ForgeError, sha256_file

PLATFORM = "linux-64"
# pixi's own defaults for linux-64: a lock must not depend on the machine that wrote it.
VIRTUAL_PACKAGES = ["__unix=0=0", "__linux=4.18", "__glibc=2.28", "__archspec=0=x86_64"]


@dataclass(frozen=True)
class Workspace:
    """A pixi.toml, with its lock and environments in `folder`.

    `replace` maps channels as written, or local ones as absolute paths, to the URLs to use.
    """

    manifest: Path
    data: dict[str, Any]
    folder: Path
    replace: dict[str, str]

    @classmethod
    def load(cls, manifest: Path, folder: Path, replace: dict[str, str]) -> Workspace:
        """Read a manifest. Raises ForgeError when it is not one."""
        try:
            data = tomllib.loads(manifest.read_text())
            _ = data["workspace"]["channels"], data["dependencies"]
        except tomllib.TOMLDecodeError as error:
            raise ForgeError(f"{manifest} is not TOML: {error}") from None
        except KeyError as error:
            raise ForgeError(f"{manifest} lacks {error}") from None
        return cls(manifest, data, folder, replace)

    @property
    def name(self) -> str:
        return self.manifest.parent.name

    @property
    def lock_file(self) -> Path:
        return self.folder / "pixi.lock"

    def prefix(self, environment: str) -> Path:
        return self.folder / ".pixi" / "envs" / environment

    def environments(self) -> dict[str, list[str]]:
        """Environment name -> its requirements as match specs, features merged."""
        features = self.data.get("feature", {})
        result = {}
        for name, value in {"default": [], **self.data.get("environments", {})}.items():
            merged = dict(self.data["dependencies"])
            for feature in value if isinstance(value, list) else value.get("features", []):
                if feature not in features:
                    raise ForgeError(f"{self.manifest}: {name} names no feature {feature}")
                merged |= features[feature].get("dependencies", {})
            result[name] = [match_spec(package, value) for package, value in merged.items()]
        return result

    def channels(self) -> list[str]:
        """The channels as URLs, in the manifest's order."""
        result = []
        for channel in self.data["workspace"]["channels"]:
            path = str((self.manifest.parent / channel).resolve())
            url = channel if "://" in channel else Path(path).as_uri()
            result.append(self.replace.get(channel, self.replace.get(path, url)))
        return result

    def lock(self, leave_out: Callable[[str], bool]) -> tuple[dict[str, int], list[str]]:
        """Solve every environment and write the lock.

        Returns package counts by environment, and the requirements that `leave_out` dropped.
        Raises BuildFailed when an environment does not solve; an older lock then stays.
        """
        platform = LockPlatform(PLATFORM, None, VIRTUAL_PACKAGES)
        lock, counts, left_out = LockFile([platform]), {}, set()
        for environment, specs in self.environments().items():
            dropped = {spec for spec in specs if leave_out(spec.split()[0])}
            left_out |= {spec.split()[0] for spec in dropped}
            records = self._solve(environment, [spec for spec in specs if spec not in dropped])
            channels = [LockChannel(url.rstrip("/") + "/") for url in self.channels()]
            lock.set_channels(environment, channels)
            for record in sorted(records, key=lambda r: (r.subdir, r.name.normalized)):
                lock.add_conda_package(environment, platform, record)
            counts[environment] = len(records)
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.lock_file.with_name(".pixi.lock.partial")
        lock.to_path(partial)
        partial.replace(self.lock_file)
        return counts, sorted(left_out)

    def _solve(self, environment: str, specs: list[str]) -> list[RepoDataRecord]:
        virtual = []
        for text in VIRTUAL_PACKAGES:
            name, version, build = [*text.split("="), "0"][:3]
            virtual.append(
                GenericVirtualPackage(PackageName(name), Version(version), BuildString(build))
            )
        platforms = [PLATFORM, "noarch"]
        try:
            return asyncio.run(
                rattler.solve(self.channels(), specs, platforms=platforms, virtual_packages=virtual)
            )
        except Exception as error:
            where = f"{self.manifest}, environment {environment},"
            raise BuildFailed(f"{where} does not solve: {error}") from None

    def install(self, environment: str) -> int:
        """Install from the lock, checking hashes; returns the number of packages.

        Raises ForgeError when there is no lock, BuildFailed when a package differs from it.
        """
        records, prefix = self.locked(environment), self.prefix(environment)
        for record in records:
            path = Path(record.url.removeprefix("file://"))
            if not path.is_absolute():
                continue  # the installer checks what it downloads
            if not path.exists():
                raise BuildFailed(f"{path} is locked but missing: run forge lock {self.name}")
            if sha256_file(path) != record.sha256.hex():
                raise BuildFailed(
                    f"{path} differs from its locked sha256 {record.sha256.hex()}. "
                    f"If it was rebuilt run forge lock {self.name}; else it was tampered with"
                )
        try:
            asyncio.run(rattler.install(records, prefix, show_progress=False))
        except Exception as error:
            raise BuildFailed(f"cannot install into {prefix}: {error}") from None
        return len(records)

    def locked(self, environment: str) -> list[RepoDataRecord]:
        """The packages of a locked environment. Raises ForgeError when there is no such lock."""
        if not self.lock_file.exists():
            raise ForgeError(f"stack {self.name} is not locked: run forge lock {self.name}")
        try:
            locked = LockFile.from_path(self.lock_file).environment(environment)
        except Exception as error:
            raise ForgeError(f"{self.lock_file} is not a lock file: {error}") from None
        if locked is None:
            raise ForgeError(f"{self.lock_file} has no environment {environment!r}")
        return locked.conda_repodata_records_for_platform(locked.platforms()[0])

    def run(self, environment: str, command: list[str]) -> int:
        """Run a command in the installed environment, activated; returns its exit status."""
        prefix = self.prefix(environment)
        if not (prefix / "conda-meta").is_dir():
            raise ForgeError(f"stack {self.name} is not installed: run forge install {self.name}")
        path = os.environ.get("PATH", os.defpath).split(os.pathsep)
        script = activate(prefix, ActivationVariables(None, path)).script
        # the caller's own PYTHONPATH would put its modules before the environment's
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        line = f"{script}\nexec {shlex.join(command)}"
        return subprocess.run(["bash", "-c", line], env=clean, check=False).returncode


def match_spec(package: str, value: str | dict[str, str]) -> str:
    """A pixi dependency as a match spec: `"1.2"` means `1.2.*`, a table may name a build."""
    version = value if isinstance(value, str) else value.get("version", "*")
    build = "" if isinstance(value, str) else value.get("build", "")
    if version[:1] not in "<>=!~*" and "*" not in version:
        version += ".*"
    return str(MatchSpec(f"{package} {version} {build}".strip()))
