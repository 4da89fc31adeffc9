# SPDX-License-Identifier: BSD-3-Clause
"""Read the channels, dependencies, features and environments of a stack's pixi.toml.

pixi reads more keys. If a key is not read here but could change what is solved, the manifest is
refused, and the message names the key.
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
from forge.errors import ForgeError, redact
from forge.files import read_text

# The allowed keys. Some keys are read. The other keys cannot change what is solved or installed
# here, because the platform is always this machine's, and only pixi uses tasks and packages from
# PyPI.
TOP_LEVEL_KEYS = {
    "workspace",
    "dependencies",
    "feature",
    "environments",
    "tasks",
    "tool",
    "pypi-exclude-newer",
    "pypi-dependencies",
}
WORKSPACE_KEYS = {
    "name",
    "channels",
    "channel-priority",
    "platforms",
    "requires-pixi",
    "version",
    "description",
    "authors",
    "license",
    "license-file",
    "readme",
    "homepage",
    "repository",
    "documentation",
    "conda-pypi-map",
}
FEATURE_KEYS = {"dependencies", "tasks", "pypi-dependencies", "platforms"}
ENVIRONMENT_KEYS = {"features", "no-default-feature"}
DEPENDENCY_KEYS = {"version", "build"}

PLATFORM = "linux-64"
# The form that pixi requires of an environment's name. This is also the name of its folder.
ENVIRONMENT_NAME = re.compile(r"[a-z0-9-]+")
PACKAGE_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Manifest:
    """A pixi.toml.

    Attributes:
        path: The file.
        channels: The channels as written in the file: names or URLs.
        environments: The match specs of each environment, by its name.
        requires_pixi: The allowed versions of pixi, as a version spec.
    """

    path: Path
    channels: list[str]
    environments: dict[str, list[str]]
    requires_pixi: str

    @classmethod
    def load(cls, path: Path) -> "Manifest":
        """Read a manifest.

        Raises:
            ForgeError: The file is not a manifest, a channel has credentials, or pixi could solve
                the manifest differently than forge.
        """
        text = read_text(path)
        try:
            return cls._parse(path, tomllib.loads(text))
        # tomllib raises TOMLDecodeError, which is a ValueError. It raises another ValueError for a
        # number of 5000 digits, for example.
        except (ValueError, RecursionError) as error:
            raise ForgeError(f"{path} is not TOML: {error}") from None
        except ForgeError as error:
            raise ForgeError(f"{path}: {error}") from None

    @classmethod
    def _parse(cls, path: Path, data: dict[str, Any]) -> "Manifest":
        require_table(data, TOP_LEVEL_KEYS, "top level")
        # This raises if the nesting is too deep for `localize` to write it.
        tomli_w.dumps(data)
        workspace = require_table(data.get("workspace"), WORKSPACE_KEYS, "workspace")
        if workspace.get("channel-priority", "strict") != "strict":
            raise ForgeError("channel-priority is not strict; nothing else is supported")
        channels = require_names(workspace.get("channels"), "[workspace] channels")
        for channel in channels:
            refuse_credentials(channel)
        requires_pixi = str(workspace.get("requires-pixi", "*"))
        try:
            VersionSpec(requires_pixi)
        except Exception as error:
            raise ForgeError(f"requires-pixi {requires_pixi!r:.40}: {error!s:.200}") from None
        return cls(path, channels, _read_environments(data), requires_pixi)

    def localize(
        self,
        replacements: Mapping[str, str],
        excluded: Set[str],
        python: str = "",
    ) -> str:
        """Return the manifest's text for this machine.

        Args:
            replacements: Channels to replace, with their replacements.
            excluded: Names of packages whose requirements are left out.
            python: The version that replaces the manifest's requirement of Python; empty to keep
                the requirement.
        """
        data = tomllib.loads(read_text(self.path))
        workspace = data["workspace"]
        workspace["channels"] = [replacements.get(channel, channel) for channel in self.channels]
        names_by_channel = workspace.get("conda-pypi-map")
        if isinstance(names_by_channel, dict):
            workspace["conda-pypi-map"] = {
                replacements.get(channel, channel): names
                for channel, names in names_by_channel.items()
            }
        for table in (data, *data.get("feature", {}).values()):
            # With this table, pixi would access PyPI.
            table.pop("pypi-dependencies", None)
            dependencies = {}
            for package, requirement in table.get("dependencies", {}).items():
                if package in excluded:
                    continue
                is_replaced = package == "python" and python
                dependencies[package] = python if is_replaced else requirement
            table["dependencies"] = dependencies
        return tomli_w.dumps(data)


def _read_environments(data: dict[str, Any]) -> dict[str, list[str]]:
    """Return the requirements of each environment, by its name."""
    features = _read_features(data)
    environments = {}
    tables = {
        "default": [],
        **require_table(data.get("environments", {}), None, "environments"),
    }
    for name, value in tables.items():
        where = f"environments.{name:.40}"
        if not ENVIRONMENT_NAME.fullmatch(name):
            raise ForgeError(f"{where!a}: a name has only lower-case letters, digits and dashes")
        table = {"features": value} if isinstance(value, list) else value
        table = require_table(table, ENVIRONMENT_KEYS, where)
        selected = require_names(table.get("features", []), f"{where} features", features)
        if table.get("no-default-feature") is not True:
            selected = [*selected, "default"]
        specs = []
        for feature in selected:
            specs += features[feature]
        environments[name] = list(dict.fromkeys(specs))
    return environments


def _read_features(data: dict[str, Any]) -> dict[str, list[str]]:
    """Return the requirements of each feature by name. `default` is the manifest's top level."""
    tables = require_table(data.get("feature", {}), None, "feature")
    if "default" in tables:
        raise ForgeError("[feature.default]: this name is reserved for the top level")
    for name, table in tables.items():
        _require_this_platform(table, data["workspace"], f"feature.{name:.40}")
    features = {"default": _read_specs(data, "top level")}
    for name, value in tables.items():
        where = f"feature.{name:.40}"
        table = require_table(value, FEATURE_KEYS, where)
        features[name] = _read_specs(table, where)
    return features


def _require_this_platform(table: Any, workspace: dict[str, Any], where: str) -> None:
    """Raise ForgeError if a feature names other platforms than this machine's."""
    if not (isinstance(table, dict) and "platforms" in table):
        return
    declared = {PLATFORM}
    for platform in workspace.get("platforms", []):
        if isinstance(platform, dict) and platform.get("platform") == PLATFORM:
            declared.add(str(platform.get("name")))
    for name in require_names(table["platforms"], f"{where}.platforms"):
        if name not in declared:
            reason = f"is not a {PLATFORM} platform of the workspace; use pixi itself"
            raise ForgeError(f"[{where}] platforms: {name:.40} {reason}")


def _read_specs(table: dict[str, Any], where: str) -> list[str]:
    """Return the requirements of a feature as match specs."""
    pypi = f"{where}.pypi-dependencies".removeprefix("top level.")
    # Ignoring torch is safe, because our package pytorch provides it. Other requirements from PyPI
    # are refused.
    require_table(table.get("pypi-dependencies", {}), {"torch"}, pypi)
    dependencies = require_table(table.get("dependencies", {}), None, f"{where}.dependencies")
    return [match_spec(package, value) for package, value in dependencies.items()]


def require_names(value: Any, where: str, defined: Container[str] | None = None) -> list[str]:
    """Return a value if it is a list of names.

    Args:
        value: A value of the manifest.
        where: The key of the value, for error messages.
        defined: The names that the list may have; None for any.

    Raises:
        ForgeError: The value is not such a list.
    """
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ForgeError(f"{where} is not a list of names: {value!r:.80}")
    for name in value:
        if defined is not None and name not in defined:
            raise ForgeError(f"{where}: no feature has the name {name:.40}")
    return value


def require_table(value: Any, keys: Set[str] | None, where: str) -> dict[str, Any]:
    """Return a value if it is a table.

    Args:
        value: A value of the manifest.
        keys: The keys that the table may have; None for any.
        where: The name of the table, for error messages.

    Raises:
        ForgeError: The value is not such a table.
    """
    if not isinstance(value, dict):
        raise ForgeError(f"[{where}] is missing, or is not a table")
    for key in value:
        if keys is not None and key not in keys:
            raise ForgeError(f"[{where}] {key:.40} is not supported here; use pixi itself")
    return value


def match_spec(package: str, value: Any) -> str:
    """Turn a pixi dependency into a match spec.

    Args:
        package: The name of the package.
        value: A version, or a table with no other keys than DEPENDENCY_KEYS.

    Raises:
        ForgeError: The dependency is not a valid requirement.
    """
    where = redact(f"{package:.40} = {value!r}")[:120]
    table = {"version": value} if isinstance(value, str) else value
    table = require_table(table, DEPENDENCY_KEYS, where)
    try:
        if not PACKAGE_NAME.fullmatch(package):
            raise ValueError("no package has such a name")
        words = (package, table.get("version", "*"), table.get("build", ""))
        return str(MatchSpec(" ".join(words).strip()))
    except Exception as error:
        raise ForgeError(f"{where} is not a valid requirement: {error}"[:300]) from None
