# SPDX-License-Identifier: BSD-3-Clause
"""What of a pixi.toml solves and installs: channels, platforms, environments and features.

pixi knows more. A key that would change what is solved, installed or run, and that is not read
here, is refused by its name.
"""

import re
import tomllib
from collections.abc import Container, Set
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rattler import GenericVirtualPackage, MatchSpec, PackageName, Version

from forge.conda.attestations import Publisher
from forge.conda.location import refuse_credentials
from forge.envs.bindings import BuildString
from forge.errors import ForgeError
from forge.files import read_text

PLATFORM = "linux-64"
# pixi's own assumptions about linux-64: a lock must not depend on the machine that wrote it.
ASSUMED = {"__unix": "0=0", "__linux": "4.18", "__glibc": "2.28", "__archspec": "0=x86_64"}

# The keys that are read, and those of pixi that say nothing about what is solved, installed or run:
# tasks are run by pixi alone.
TOP = {
    "workspace", "dependencies", "feature", "environments", "tasks", "tool", "pypi-exclude-newer",
}  # fmt: skip
WORKSPACE = {
    "name", "channels", "channel-priority", "platforms", "requires-pixi", "version", "description",
    "authors", "license", "license-file", "readme", "homepage", "repository", "documentation",
    "conda-pypi-map",
}  # fmt: skip
FEATURE = {"channels", "dependencies", "platforms", "tasks"}
ENVIRONMENT = {"features", "no-default-feature"}
DEPENDENCY = {"version", "build"}
TOOL = "strix-forge"  # of the tables of other programs, the one that pixi leaves to us
PUBLISHER = {"identity", "issuer", "target", "trusted-root"}

ENVIRONMENT_NAME = re.compile(r"[a-z0-9-]+")  # pixi's own; it is a folder's name
PACKAGE_NAME = re.compile(r"[A-Za-z0-9_.-]+")
AMD_GPU = re.compile(r"gfx([1-9]\d?)([0-9a-f])([0-9a-f])")
VIRTUAL_PACKAGE = re.compile(r"(__\w+)=(\d{1,9}(\.[0-9A-Za-z]{1,9})*(=[\w.]+)?)", re.ASCII)


@dataclass(frozen=True)
class Platform:
    """A platform of a workspace: its name in locks, and the virtual packages that it promises."""

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
class Environment:
    """What is required, from which channels, on which platforms, by a feature or by several."""

    specs: list[str]
    channels: list[str]
    platforms: list[Platform]


@dataclass(frozen=True)
class Manifest:
    """A pixi.toml that the driver can lock, install and run as pixi does.

    Requirements of a name in `without` are left out; those in `also` every environment has as well.
    """

    path: Path
    data: dict[str, Any]
    without: Set[str] = frozenset()
    also: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: Path) -> "Manifest":
        """Read a manifest. Raises ForgeError when it is not one that we can lock as pixi does."""
        try:
            manifest = cls(path, tomllib.loads(read_text(path)))
            known(manifest.data, TOP, "top level")
            workspace = known(manifest.data.get("workspace"), WORKSPACE, "workspace")
            if workspace.get("channel-priority", "strict") != "strict":
                raise ForgeError("channel-priority is not strict; nothing else is supported")
            manifest.environments(), manifest.publishers(), manifest.pypi_names()
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ForgeError(f"{path} is not TOML: {error}") from None
        except ForgeError as error:
            raise ForgeError(f"{path}: {error}") from None
        return manifest

    @property
    def channels(self) -> list[str]:
        """The channels as the manifest has them, those of features too."""
        return [*dict.fromkeys(chain(*(e.channels for e in self._features().values())))]

    def publishers(self) -> dict[str, Publisher]:
        """Channel, as the manifest has it -> who must have attested its packages."""
        tools = known(self.data.get("tool", {}), None, "tool")
        ours = known(tools.get(TOOL, {}), {"publishers"}, f"tool.{TOOL}")
        found = {}
        for channel, table in known(ours.get("publishers", {}), None, "publishers").items():
            keys = known(table, PUBLISHER, f"publishers.{channel:.80}")
            if channel not in self.channels:
                raise ForgeError(f"publishers: {channel:.80} is none of the channels")
            if "identity" not in keys or not all(isinstance(v, str) for v in keys.values()):
                raise ForgeError(f"publishers: {channel:.80} needs an identity, all values text")
            words = {"target": channel} | {k.replace("-", "_"): v for k, v in keys.items()}
            if "trusted_root" in words:
                words["trusted_root"] = str(self.path.parent / words["trusted_root"])
            found[channel] = Publisher(**words)
        return found

    def platforms(self) -> dict[str, Platform]:
        """The platforms by name, as pixi reads them: what is declared, then what pixi assumes."""
        entries = self.data["workspace"].get("platforms")
        if not isinstance(entries, list) or not entries:
            raise ForgeError(f"platforms is no list of entries for {PLATFORM}")
        found: dict[str, Platform] = {}
        for entry in entries:
            table = {"name": entry} if isinstance(entry, str) else entry
            declared = dict(known(table, None, "platforms"))
            name = declared.pop("name", "")
            if declared.pop("platform", name) != PLATFORM:
                raise ForgeError(f"platforms: {entry!r:.200} is not for {PLATFORM}")
            promised = _promised(declared)
            name = str(name or (promised or PLATFORM))
            if name in found or (promised and name == PLATFORM):
                raise ForgeError(f"platforms: {entry!r:.200} needs another name")
            # pixi's own names in locks
            rich = sum(platform.name != PLATFORM for platform in found.values())
            locked_as = PLATFORM if name == PLATFORM else f"p{rich + 1}"
            found[name] = Platform(locked_as, promised | ASSUMED | promised)
        return found

    def pypi_names(self) -> dict[str, dict[str, Any]]:
        """Channel -> conda name -> name on PyPI, where the table stands in the manifest itself."""
        tables = known(self.data["workspace"].get("conda-pypi-map", {}), None, "conda-pypi-map")
        return {
            channel: known(table["mapping"], None, f"conda-pypi-map.{channel:.40}")
            for channel, table in tables.items()
            if isinstance(table, dict) and "mapping" in table
        }

    def environments(self) -> dict[str, Environment]:
        """Environment name -> what all its features say of it; their channels come first."""
        features = self._features()
        result, environments = {}, known(self.data.get("environments", {}), None, "environments")
        for name, value in {"default": [], **environments}.items():
            where = f"environments.{name:.40}"
            if not ENVIRONMENT_NAME.fullmatch(name):
                raise ForgeError(f"{where!a}: names have lower-case letters, digits, dashes only")
            table = known(
                {"features": value} if isinstance(value, list) else value, ENVIRONMENT, where
            )
            used = names(table.get("features", []), f"{where} features", features)
            used = used if table.get("no-default-feature") is True else [*used, "default"]
            parts = [features[feature] for feature in used]
            # each once, in order
            specs = dict.fromkeys(chain(*(part.specs for part in parts), self.also))
            channels = dict.fromkeys(chain(*(part.channels for part in parts)))
            on = [p for p in self.platforms().values() if all(p in q.platforms for q in parts)]
            if not on:
                raise ForgeError(f"{where}: its features have no platform in common")
            result[name] = Environment([*specs], [*channels], on)
        return result

    def _features(self) -> dict[str, Environment]:
        """What each feature says, or the workspace for it; "default" is the top level."""
        platforms, channels = self.platforms(), self.data["workspace"].get("channels")
        tables = known(self.data.get("feature", {}), None, "feature")
        if "default" in tables:
            raise ForgeError("[feature.default] is the name of the top level's own")
        tables = {"default": {"dependencies": self.data.get("dependencies", {})}, **tables}
        whole, found = {"channels": channels, "platforms": [*platforms], "dependencies": {}}, {}
        for name, table in tables.items():
            where = f"feature.{name:.40}"
            said = whole | known(table, FEATURE, where)
            wanted = known(said["dependencies"], None, f"{where}.dependencies")
            specs = [match_spec(n, value) for n, value in wanted.items() if n not in self.without]
            channels = names(said["channels"], f"[{where}] channels")
            for channel in channels:
                refuse_credentials(channel)
            on = names(said["platforms"], f"[{where}] platforms", platforms)
            found[name] = Environment(specs, channels, [platforms[platform] for platform in on])
        return found


def names(value: Any, where: str, defined: Container[str] | None = None) -> list[str]:
    """A list of names, of those that are defined. Raises ForgeError."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ForgeError(f"{where} is not a list of names: {value!r:.80}")
    for name in value:
        if defined is not None and name not in defined:
            raise ForgeError(f"{where}: {name:.40} is not defined")
    return value


def known(table: Any, keys: Set[str] | None, where: str) -> dict[str, Any]:
    """A table, if it is one and has no other than these keys. Raises ForgeError."""
    if not isinstance(table, dict):
        raise ForgeError(f"[{where}] is missing or no table")
    for key in table.keys() - (table.keys() if keys is None else keys):
        raise ForgeError(f"[{where}] {key:.40} is not supported here; use pixi itself")
    return table


def _promised(declared: dict[str, Any]) -> dict[str, str]:
    """The virtual packages that an entry of platforms promises."""
    own = {"__cuda" if key == "cuda" else key: value for key, value in declared.items()}
    promised = _amd_gpu(own.pop("amdgpu", None)) | dict(sorted(own.items()))
    for key, value in promised.items():
        if not isinstance(value, str) or not VIRTUAL_PACKAGE.fullmatch(f"{key}={value}"):
            what = f"{key:.40} = {value!r:.40}"
            raise ForgeError(f"platforms: {what} is not supported; write amdgpu, cuda or __NAME")
    if "__amdgpu_arch" in promised and "__amdgpu" not in promised:
        raise ForgeError('platforms: __amdgpu_arch requires __amdgpu; write amdgpu = "gfxN"')
    return promised


def _amd_gpu(value: Any) -> dict[str, str]:
    """What `amdgpu` promises: true for a GPU, "gfx1151" for that one (conda/ceps#189)."""
    if value is None:
        return {}
    gpu = AMD_GPU.fullmatch(value) if isinstance(value, str) else None
    if value is not True and not gpu:
        raise ForgeError(f'platforms: amdgpu = {value!r:.40} is neither true nor like "gfx1151"')
    parts = [str(int(part, 16)) for part in gpu.groups()[1:]] if gpu else []
    arch = {"__amdgpu_arch": ".".join([gpu[1], *parts])} if gpu else {}
    return {"__amdgpu": "0"} | arch


def match_spec(package: str, value: Any) -> str:
    """A pixi dependency as a match spec: a version, or a table that may name a build.

    Raises ForgeError if it is invalid.
    """
    where = f"{package:.40} = {value!r:.80}"
    table = {"version": value} if isinstance(value, str) else known(value, DEPENDENCY, where)
    try:
        if not PACKAGE_NAME.fullmatch(package):
            raise ValueError("no package has such a name")
        words = package, table.get("version", "*"), table.get("build", "")
        return str(MatchSpec(" ".join(words).strip()))
    except Exception as error:
        raise ForgeError(f"{where} is not a valid requirement: {error}"[:300]) from None
