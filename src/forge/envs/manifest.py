# SPDX-License-Identifier: BSD-3-Clause
"""What of a pixi.toml solves and installs: channels, one platform, environments and features.

pixi knows more. A key that would change what is solved, installed or run, and that is not read
here, is refused by its name.
"""

import re
import tomllib
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rattler import GenericVirtualPackage, MatchSpec, PackageName, Version

from forge.channel.attestations import Publisher
from forge.channel.location import refuse_credentials
from forge.envs.bindings import BuildString
from forge.errors import ForgeError
from forge.files import read_text

PLATFORM = "linux-64"
# pixi's own assumptions about linux-64: a lock must not depend on the machine that wrote it.
ASSUMED = {"__unix": "0=0", "__linux": "4.18", "__glibc": "2.28", "__archspec": "0=x86_64"}

# The keys that are read, and those of pixi that say nothing about what is solved, installed or run:
# tasks are run by pixi alone.
TOP = {
    "workspace",
    "dependencies",
    "feature",
    "environments",
    "tasks",
    "tool",
    "pypi-exclude-newer",
}
WORKSPACE = {
    "name", "channels", "channel-priority", "platforms", "requires-pixi", "version", "description",
    "authors", "license", "license-file", "readme", "homepage", "repository", "documentation",
    "conda-pypi-map",
}  # fmt: skip
FEATURE = {"dependencies", "tasks"}
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
            manifest.channels(), manifest.platform(), manifest.environments()
            manifest.publishers(), manifest.pypi_names()
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ForgeError(f"{path} is not TOML: {error}") from None
        except ForgeError as error:
            raise ForgeError(f"{path}: {error}") from None
        return manifest

    def channels(self) -> list[str]:
        """The channels as the manifest has them. Raises ForgeError for a credential in one."""
        channels = self.data["workspace"].get("channels")
        if not isinstance(channels, list) or not all(isinstance(c, str) for c in channels):
            raise ForgeError("channels is not a list of names, URLs and folders")
        for channel in channels:
            refuse_credentials(channel)
        return channels

    def publishers(self) -> dict[str, Publisher]:
        """Channel, as the manifest has it -> who must have attested its packages."""
        tools = known(self.data.get("tool", {}), None, "tool")
        ours = known(tools.get(TOOL, {}), {"publishers"}, f"tool.{TOOL}")
        found = {}
        for channel, table in known(ours.get("publishers", {}), None, "publishers").items():
            keys = known(table, PUBLISHER, f"publishers.{channel:.80}")
            if channel not in self.channels():
                raise ForgeError(f"publishers: {channel:.80} is none of the channels")
            if "identity" not in keys or not all(isinstance(v, str) for v in keys.values()):
                raise ForgeError(f"publishers: {channel:.80} needs an identity, all values text")
            words = {"target": channel} | {k.replace("-", "_"): v for k, v in keys.items()}
            if "trusted_root" in words:
                words["trusted_root"] = str(self.path.parent / words["trusted_root"])
            found[channel] = Publisher(**words)
        return found

    def platform(self) -> Platform:
        """The platform, as pixi reads it: what is declared first, then what pixi assumes."""
        platforms = self.data["workspace"].get("platforms")
        if not isinstance(platforms, list) or len(platforms) != 1:
            raise ForgeError(f"platforms needs exactly one entry, for {PLATFORM}")
        entry = {"name": platforms[0]} if isinstance(platforms[0], str) else platforms[0]
        declared = dict(known(entry, None, "platforms"))
        name = declared.pop("name", "")
        if declared.pop("platform", name) != PLATFORM:
            raise ForgeError(f"platforms: {entry!r:.200} is not for {PLATFORM}, the one supported")
        promised = _amd_gpu(declared.pop("amdgpu", None)) | dict(sorted(declared.items()))
        for key, value in promised.items():
            if not isinstance(value, str) or not VIRTUAL_PACKAGE.fullmatch(f"{key}={value}"):
                what = f"{key:.40} = {value!r:.40}"
                raise ForgeError(f"platforms: {what} is not supported; write amdgpu or __NAME")
        if "__amdgpu_arch" in promised and "__amdgpu" not in promised:
            raise ForgeError('platforms: __amdgpu_arch requires __amdgpu; write amdgpu = "gfxN"')
        if promised and name == PLATFORM:
            raise ForgeError(f"platforms: {name} with virtual packages needs another name")
        # pixi's own names in locks
        usual = not promised and name in ("", PLATFORM)
        return Platform(PLATFORM if usual else "p1", promised | ASSUMED | promised)

    def pypi_names(self) -> dict[str, dict[str, Any]]:
        """Channel -> conda name -> name on PyPI, where the table stands in the manifest itself."""
        tables = known(self.data["workspace"].get("conda-pypi-map", {}), None, "conda-pypi-map")
        return {
            channel: known(table["mapping"], None, f"conda-pypi-map.{channel:.40}")
            for channel, table in tables.items()
            if isinstance(table, dict) and "mapping" in table
        }

    def environments(self) -> dict[str, list[str]]:
        """Environment name -> its requirements as match specs, those of all its features."""
        features = {"default": self._specs(self.data, "top level")}
        for name, table in known(self.data.get("feature", {}), None, "feature").items():
            where = f"feature.{name:.40}"
            if name in features:
                raise ForgeError(f"[{where}] is the name of the top level's own")
            features[name] = self._specs(known(table, FEATURE, where), where)
        result, environments = {}, known(self.data.get("environments", {}), None, "environments")
        for name, value in {"default": [], **environments}.items():
            where = f"environments.{name:.40}"
            if not ENVIRONMENT_NAME.fullmatch(name):
                raise ForgeError(f"{where!a}: names have lower-case letters, digits, dashes only")
            table = known(
                {"features": value} if isinstance(value, list) else value, ENVIRONMENT, where
            )
            used = table.get("features", [])
            if not isinstance(used, list) or any(str(feature) not in features for feature in used):
                raise ForgeError(f"{where} uses an undefined feature: {used!r:.80}")
            used = used if table.get("no-default-feature") is True else ["default", *used]
            # each once, in order
            wanted = (spec for feature in used for spec in features[feature])
            result[name] = list(dict.fromkeys([*wanted, *self.also]))
        return result

    def _specs(self, table: dict[str, Any], where: str) -> list[str]:
        dependencies = known(table.get("dependencies", {}), None, f"{where}.dependencies")
        return [match_spec(n, value) for n, value in dependencies.items() if n not in self.without]


def known(table: Any, keys: Set[str] | None, where: str) -> dict[str, Any]:
    """A table, if it is one and has no other than these keys. Raises ForgeError."""
    if not isinstance(table, dict):
        raise ForgeError(f"[{where}] is missing or no table")
    for key in table.keys() - (table.keys() if keys is None else keys):
        raise ForgeError(f"[{where}] {key:.40} is not supported here; use pixi itself")
    return table


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
