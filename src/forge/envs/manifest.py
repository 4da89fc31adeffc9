# SPDX-License-Identifier: BSD-3-Clause
"""What of a pixi.toml solves and installs: channels, one platform, environments and features."""

import tomllib
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rattler import GenericVirtualPackage, MatchSpec, PackageName, Version

from forge.envs.bindings import BuildString
from forge.errors import ForgeError
from forge.files import read_text

PLATFORM = "linux-64"
# pixi's own assumptions about linux-64: a lock must not depend on the machine that wrote it.
ASSUMED = {"__unix": "0=0", "__linux": "4.18", "__glibc": "2.28", "__archspec": "0=x86_64"}


@dataclass(frozen=True)
class Platform:
    """A platform of a workspace: its name and the virtual packages that it promises, by name."""

    name: str
    promised: dict[str, str]

    @property
    def lines(self) -> list[str]:
        """As a lock file states them."""
        return [f"{name}={value}" for name, value in self.promised.items()]

    def virtual_packages(self) -> list[GenericVirtualPackage]:
        """As the solver takes them."""
        split = [(name, *value.partition("=")) for name, value in self.promised.items()]
        return [
            GenericVirtualPackage(PackageName(name), Version(version), BuildString(build or "0"))
            for name, version, _, build in split
        ]


@dataclass(frozen=True)
class Manifest:
    """A pixi.toml. Tasks, activation and PyPI dependencies are pixi's alone."""

    path: Path
    data: dict[str, Any]

    @classmethod
    def load(cls, path: Path) -> "Manifest":
        """Read a manifest. Raises ForgeError when it is not one that we can lock as pixi does."""
        try:
            data = tomllib.loads(read_text(path))
            workspace = data["workspace"]
            _ = data["dependencies"], workspace["channels"], workspace["platforms"]
        except tomllib.TOMLDecodeError as error:
            raise ForgeError(f"{path} is not TOML: {error}") from None
        except KeyError as error:
            raise ForgeError(f"{path} lacks {error}") from None
        if workspace.get("channel-priority", "strict") != "strict":
            raise ForgeError(f"{path}: channel-priority is not strict; nothing else is supported")
        return cls(path, data)

    def platform(self) -> Platform:
        """The platform, as pixi reads it: what is declared first, then what pixi assumes."""
        where, platforms = f"{self.path}, platforms:", self.data["workspace"]["platforms"]
        if len(platforms) != 1:
            raise ForgeError(f"{where} there are {len(platforms)} of them, but one is supported")
        (entry,) = platforms
        declared = {"name": entry, "platform": entry} if isinstance(entry, str) else dict(entry)
        name, subdir = declared.pop("name", None), declared.pop("platform", None)
        if subdir != PLATFORM or not name:
            raise ForgeError(f"{where} needs a name, and platform {PLATFORM!r}: it has {entry}")
        for key, value in declared.items():
            if not key.startswith("__") or not isinstance(value, str):
                raise ForgeError(f"{where} {key} is not supported; write __NAME = VERSION")
        return Platform(name, declared | ASSUMED | declared)

    def environments(self, without: Set[str] = frozenset()) -> dict[str, list[str]]:
        """Environment name -> its requirements as match specs, features merged.

        Requirements of a name in `without` are left out.
        """
        features, result = self.data.get("feature", {}), {}
        for name, value in {"default": [], **self.data.get("environments", {})}.items():
            table = {"features": value} if isinstance(value, list) else value
            merged = {} if table.get("no-default-feature") else dict(self.data["dependencies"])
            for feature in table.get("features", []):
                if feature not in features:
                    raise ForgeError(f"{self.path}: {name} uses undefined feature {feature}")
                merged |= features[feature].get("dependencies", {})
            result[name] = [match_spec(p, v) for p, v in merged.items() if p not in without]
        return result

    def names(self) -> set[str]:
        """The names of all requirements."""
        return {spec.split()[0] for specs in self.environments().values() for spec in specs}


def match_spec(package: str, value: str | dict[str, str]) -> str:
    """A pixi dependency as a match spec: `"1.2"` means `1.2.*`, a table may name a build.

    Raises ForgeError if it is invalid.
    """
    table = {"version": value} if isinstance(value, str) else value
    version = table.get("version", "*")
    if version[:1] not in "<>=!~*" and "*" not in version:
        version += ".*"
    try:
        return str(MatchSpec(f"{package} {version} {table.get('build', '')}".strip()))
    except Exception as error:
        raise ForgeError(f"{package} = {value!r} is not a valid requirement: {error}") from None
