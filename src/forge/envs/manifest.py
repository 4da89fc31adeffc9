# SPDX-License-Identifier: BSD-3-Clause
"""What of a stack's pixi.toml the driver reads: channels, dependencies, features.

pixi knows more. A key that would change what is solved, and is not read here, is refused by name.
"""

import re
import tomllib
from collections.abc import Container, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from rattler import MatchSpec, VersionSpec

from forge.conda.location import refuse_credentials
from forge.errors import ForgeError, redacted
from forge.files import read_text

# The keys that are read, and those of pixi that say nothing about what is solved or installed here:
# platforms are this machine's, tasks and PyPI's packages pixi's alone.
TOP = {"workspace", "dependencies", "feature", "environments", "tasks", "tool",
       "pypi-exclude-newer", "pypi-dependencies"}  # fmt: skip
WORKSPACE = {
    "name", "channels", "channel-priority", "platforms", "requires-pixi", "version", "description",
    "authors", "license", "license-file", "readme", "homepage", "repository", "documentation",
    "conda-pypi-map",
}  # fmt: skip
FEATURE = {"dependencies", "tasks", "pypi-dependencies", "platforms"}
ENVIRONMENT = {"features", "no-default-feature"}
DEPENDENCY = {"version", "build"}

PLATFORM = "linux-64"
ENVIRONMENT_NAME = re.compile(r"[a-z0-9-]+")  # pixi's own; it is a folder's name
PACKAGE_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Manifest:
    """A pixi.toml: its channels, environment name -> match specs, and which pixis it is for."""

    path: Path
    channels: list[str]
    environments: dict[str, list[str]]
    requires_pixi: str

    @classmethod
    def load(cls, path: Path) -> "Manifest":
        """Read a manifest. Raises ForgeError when it is not one that is solved here as by pixi."""
        try:
            data = known(tomllib.loads(read_text(path)), TOP, "top level")
            tomli_w.dumps(data)  # nested so deeply that it cannot be written for this machine
            workspace = known(data.get("workspace"), WORKSPACE, "workspace")
            if workspace.get("channel-priority", "strict") != "strict":
                raise ForgeError("channel-priority is not strict; nothing else is supported")
            channels = names(workspace.get("channels"), "[workspace] channels")
            for channel in channels:
                refuse_credentials(channel)
            requires_pixi = str(workspace.get("requires-pixi", "*"))
            try:
                VersionSpec(requires_pixi)
            except Exception as error:
                raise ForgeError(f"requires-pixi {requires_pixi!r:.40}: {error!s:.200}") from None
            return cls(path, channels, _environments(data), requires_pixi)
        except (ValueError, RecursionError) as error:  # of tomllib, of 5000 digits
            raise ForgeError(f"{path} is not TOML: {error}") from None
        except ForgeError as error:
            raise ForgeError(f"{path}: {error}") from None

    def localized(self, instead: Mapping[str, str], without: Set[str], python: str = "") -> str:
        """Return the text for this machine: with other channels, without some requirements.

        `instead` maps channels to those to use; `python` takes the place of the manifest's own.
        """
        data = tomllib.loads(read_text(self.path))
        workspace = data["workspace"]
        workspace["channels"] = [instead.get(channel, channel) for channel in self.channels]
        by_channel = workspace.get("conda-pypi-map")
        if isinstance(by_channel, dict):
            renamed = {instead.get(name, name): value for name, value in by_channel.items()}
            workspace["conda-pypi-map"] = renamed
        for table in (data, *data.get("feature", {}).values()):
            table.pop("pypi-dependencies", None)  # pixi would ask a server for PyPI's names
            kept = [(k, v) for k, v in table.get("dependencies", {}).items() if k not in without]
            table["dependencies"] = {k: (k == "python" and python) or v for k, v in kept}
        return tomli_w.dumps(data)


def _environments(data: dict[str, Any]) -> dict[str, list[str]]:
    """Map each environment's name to what all its features require."""
    tables = known(data.get("feature", {}), None, "feature")
    if "default" in tables:
        raise ForgeError("[feature.default] is the name of the top level's own")
    for name, table in tables.items():
        _require_this_platform(table, data["workspace"], f"feature.{name:.40}")
    features = {"default": _specs(data, "top level")} | {
        name: _specs(known(table, FEATURE, f"feature.{name:.40}"), f"feature.{name:.40}")
        for name, table in tables.items()
    }
    found = {}
    tables = {"default": [], **known(data.get("environments", {}), None, "environments")}
    for name, value in tables.items():
        where = f"environments.{name:.40}"
        if not ENVIRONMENT_NAME.fullmatch(name):
            raise ForgeError(f"{where!a}: names have lower-case letters, digits, dashes only")
        table = {"features": value} if isinstance(value, list) else value
        wanted = known(table, ENVIRONMENT, where).get("features", [])
        used = names(wanted, f"{where} features", features)
        used = used if table.get("no-default-feature") is True else [*used, "default"]
        found[name] = [*dict.fromkeys(spec for feature in used for spec in features[feature])]
    return found


def _require_this_platform(table: Any, workspace: dict[str, Any], where: str) -> None:
    """Require that the platforms of a feature, if it names any, are this machine's kind."""
    declared = {PLATFORM} | {
        str(platform.get("name"))
        for platform in workspace.get("platforms", [])
        if isinstance(platform, dict) and platform.get("platform") == PLATFORM
    }
    if isinstance(table, dict) and "platforms" in table:
        for name in names(table["platforms"], f"{where}.platforms"):
            if name not in declared:
                reason = f"is no {PLATFORM} platform of the workspace; use pixi itself"
                raise ForgeError(f"[{where}] platforms: {name:.40} {reason}")


def _specs(table: dict[str, Any], where: str) -> list[str]:
    pypi = f"{where}.pypi-dependencies".removeprefix("top level.")
    known(table.get("pypi-dependencies", {}), {"torch"}, pypi)  # our pytorch is torch
    wanted = known(table.get("dependencies", {}), None, f"{where}.dependencies")
    return [match_spec(name, value) for name, value in wanted.items()]


def names(value: Any, where: str, defined: Container[str] | None = None) -> list[str]:
    """Return a list of names if it is one, of those that are defined; else raise ForgeError."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ForgeError(f"{where} is not a list of names: {value!r:.80}")
    for name in value:
        if defined is not None and name not in defined:
            raise ForgeError(f"{where}: {name:.40} is not defined")
    return value


def known(table: Any, keys: Set[str] | None, where: str) -> dict[str, Any]:
    """Return a table if it is one and has no other than these keys; else raise ForgeError."""
    if not isinstance(table, dict):
        raise ForgeError(f"[{where}] is missing or no table")
    for key in table.keys() - (table.keys() if keys is None else keys):
        raise ForgeError(f"[{where}] {key:.40} is not supported here; use pixi itself")
    return table


def match_spec(package: str, value: Any) -> str:
    """Turn a pixi dependency, maybe of one build, into a match spec. Raises ForgeError."""
    where = redacted(f"{package:.40} = {value!r}")[:120]
    table = {"version": value} if isinstance(value, str) else known(value, DEPENDENCY, where)
    try:
        if not PACKAGE_NAME.fullmatch(package):
            raise ValueError("no package has such a name")
        words = package, table.get("version", "*"), table.get("build", "")
        return str(MatchSpec(" ".join(words).strip()))
    except Exception as error:
        raise ForgeError(f"{where} is not a valid requirement: {error}"[:300]) from None
