# SPDX-License-Identifier: BSD-3-Clause
"""Stacks: what `pixi lock`, `pixi install` and `pixi run` do with stacks/NAME/pixi.toml.

On the conda-forge base the lock is `stacks/NAME/pixi.lock`, where pixi looks for it. On the
embedded base it holds this machine's packages, so it lies under `build/` with the environment.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rattler
from rattler import (
    BuildString,
    GenericVirtualPackage,
    LockFile,
    MatchSpec,
    PackageName,
    Version,
)
from rattler.lock import LockChannel, LockPlatform
from rattler.shell import ActivationVariables, activate

from strix_forge.bases import Base
from strix_forge.channel import Channel
from strix_forge.project import BuildFailed, ForgeError, Project, sha256_file
from strix_forge.recipes import RecipeSet

PLATFORM = "linux-64"
# pixi's own defaults for linux-64: a lock must not depend on the machine that wrote it.
VIRTUAL_PACKAGES = ["__unix=0=0", "__linux=4.18", "__glibc=2.28", "__archspec=0=x86_64"]


@dataclass(frozen=True)
class Stack:
    """One pixi workspace below stacks/, seen from one base."""

    name: str
    manifest: Path
    data: dict[str, Any]
    project: Project
    base: Base

    @classmethod
    def load(cls, project: Project, base: Base, name: str) -> Stack:
        """Read stacks/NAME/pixi.toml. Raises ForgeError when it is missing or wrong."""
        manifest = project.root / "stacks" / name / "pixi.toml"
        if not manifest.is_file():
            known = ", ".join(sorted(p.parent.name for p in project.root.glob("stacks/*/pixi.toml")))
            raise ForgeError(f"there is no stack {name!r}; there are: {known}")
        try:
            data = tomllib.loads(manifest.read_text())
            _ = data["workspace"]["channels"], data["dependencies"]
        except tomllib.TOMLDecodeError as error:
            raise ForgeError(f"{manifest} is not TOML: {error}") from None
        except KeyError as error:
            raise ForgeError(f"{manifest} lacks {error}") from None
        return cls(name, manifest, data, project, base)

    @property
    def folder(self) -> Path:
        """Where lock and environments of this base live."""
        if self.base.folder is None:
            return self.manifest.parent
        return self.project.build / "stacks" / self.name

    @property
    def lock_file(self) -> Path:
        return self.folder / "pixi.lock"

    def prefix(self, environment: str) -> Path:
        return self.folder / ".pixi" / "envs" / environment

    def environments(self) -> dict[str, list[str]]:
        """Environment name -> its requirements as match specs, features merged."""
        features = self.data.get("feature", {})
        declared = {"default": [], **self.data.get("environments", {})}
        result = {}
        for name, value in declared.items():
            listed = value if isinstance(value, list) else value.get("features", [])
            merged = dict(self.data["dependencies"])
            for feature in listed:
                if feature not in features:
                    raise ForgeError(f"{self.manifest}: environment {name} names no feature {feature}")
                merged |= features[feature].get("dependencies", {})
            result[name] = [_spec(package, value) for package, value in merged.items()]
        return result

    def channels(self) -> list[str]:
        """The manifest's channels in order; on the embedded base its channel is conda-forge."""
        result = []
        for channel in self.data["workspace"]["channels"]:
            if channel in ("conda-forge", "https://conda.anaconda.org/conda-forge"):
                result.append(self.base.channel)
            elif "://" in channel:
                result.append(channel)
            else:
                path = (self.manifest.parent / channel).resolve()
                ours = path == self.project.root / "channel"
                result.append((self.project.channel if ours else path).as_uri())
        return result

    def lock(self, recipes: RecipeSet) -> tuple[dict[str, int], list[str]]:
        """Solve every environment and write the lock; returns package counts and what was left out.

        On the embedded base a requirement on one of our recipes that was never built is left out
        (its source needs a host that is out of reach); the caller says so.
        """
        channels = self.channels()
        left_out: list[str] = []
        available = self._available(channels[0])
        platform = LockPlatform(PLATFORM, None, VIRTUAL_PACKAGES)
        lock = LockFile([platform])
        solved = {}
        for environment, specs in self.environments().items():
            kept = []
            for spec in specs:
                name = spec.split()[0]
                unbuilt = name in recipes.owner and name not in available
                if unbuilt and self.base.folder is not None:
                    left_out.append(name)
                else:
                    kept.append(spec)
            records = self._solve(environment, channels, kept)
            lock.set_channels(environment, [LockChannel(_slash(channel)) for channel in channels])
            for record in sorted(records, key=lambda r: (r.subdir, r.name.normalized)):
                lock.add_conda_package(environment, platform, record)
            solved[environment] = len(records)
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.lock_file.with_name(".pixi.lock.partial")
        lock.to_path(partial)
        partial.replace(self.lock_file)
        return solved, sorted(set(left_out))

    def _available(self, channel: str) -> set[str]:
        if not channel.startswith("file://"):
            return set()
        return {record.name for record in Channel(Path(channel[7:])).records()}

    def _solve(self, environment: str, channels: list[str], specs: list[str]) -> list[Any]:
        virtual = [_virtual(text) for text in VIRTUAL_PACKAGES]
        try:
            return asyncio.run(
                rattler.solve(
                    channels, specs, platforms=[PLATFORM, "noarch"], virtual_packages=virtual
                )
            )
        except Exception as error:
            raise BuildFailed(
                f"stack {self.name}, environment {environment}, does not solve: {error}"
            ) from None

    def install(self, environment: str) -> int:
        """Install from the lock, checking hashes; returns the number of packages.

        Raises ForgeError when there is no lock, BuildFailed when a package differs from it.
        """
        records = self._locked(environment)
        prefix = self.prefix(environment)
        for record in records:
            if record.url.startswith("file://"):
                path = Path(record.url[7:])
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

    def _locked(self, environment: str) -> list[Any]:
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
        """Run a command inside the installed environment, activated; returns its exit status."""
        prefix = self.prefix(environment)
        if not (prefix / "conda-meta").is_dir():
            raise ForgeError(
                f"stack {self.name} is not installed: run forge install {self.name}"
            )
        path = os.environ.get("PATH", os.defpath).split(os.pathsep)
        script = activate(prefix, ActivationVariables(None, path)).script
        # PYTHONPATH and its like would let the driver's own modules into the environment
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        line = f"{script}\nexec {shlex.join(command)}"
        return subprocess.run(["bash", "-c", line], env=clean, check=False).returncode


def _spec(package: str, value: Any) -> str:
    """A pixi dependency (string or table) as a match spec."""
    if isinstance(value, str):
        version, build = value, ""
    else:
        version, build = value.get("version", "*"), value.get("build", "")
    version = version if version[:1] in "<>=!~*" or "*" in version else f"{version}.*"
    return str(MatchSpec(f"{package} {version} {build}".strip()))


def _virtual(text: str) -> GenericVirtualPackage:
    name, version, build = (text.split("=") + ["0"])[:3]
    return GenericVirtualPackage(PackageName(name), Version(version), BuildString(build))


def _slash(url: str) -> str:
    return url if url.endswith("/") else f"{url}/"
