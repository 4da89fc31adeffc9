# SPDX-License-Identifier: BSD-3-Clause
"""Find the pixi workspace that an environment belongs to, and the channels of its manifest."""

import tomllib
from pathlib import Path
from typing import Any

from strix_validate.json_file import read_json_object, read_small_text

#: A channel's name and its priority.
_Channel = tuple[str, int]


def read_channels(prefix: Path) -> list[str]:
    """Return the channels of a pixi environment, the one with the highest priority first.

    The list is empty for an environment that pixi did not make, and for a manifest that cannot be
    read.
    """
    folder, environment = _find_workspace(prefix)
    if folder is None:
        return []
    manifest = _read_toml(folder / "pixi.toml")
    if not _get_workspace(manifest):
        tools = _get_table(_read_toml(folder / "pyproject.toml"), "tool")
        manifest = _get_table(tools, "pixi")
    workspace_channels = _list_channels(_get_workspace(manifest))
    channels: list[_Channel] = []
    for feature in _list_features(manifest, environment):
        channels += _list_channels(feature) or workspace_channels
    channels += workspace_channels
    channels.sort(key=lambda channel: -channel[1])
    return list(dict.fromkeys(name for name, _ in channels))


def _find_workspace(prefix: Path) -> tuple[Path | None, str]:
    """Return the folder of an environment's workspace, or None, and the environment's name."""
    if prefix.parent.name == "envs" and prefix.parents[1].name == ".pixi":
        return prefix.parents[2], prefix.name
    # If the environment is detached, its folder is outside of the workspace. pixi wrote into it to
    # which workspace it belongs.
    try:
        record = read_json_object(prefix / "conda-meta" / "pixi")
    except ValueError:
        return None, ""
    manifest = Path(str(record.get("manifest_path")))
    folder = manifest.parent if manifest.is_absolute() else None
    return folder, str(record.get("environment_name"))


def _list_features(manifest: dict[str, Any], environment: str) -> list[dict[str, Any]]:
    """Return the tables of an environment's features, without the default feature."""
    names = _get_table(manifest, "environments").get(environment)
    if isinstance(names, dict):
        names = names.get("features")
    tables = _get_table(manifest, "feature")
    return [_get_table(tables, str(name)) for name in _as_list(names)]


def _list_channels(table: dict[str, Any]) -> list[_Channel]:
    """Return the channels that a table names, and their priorities."""
    channels = []
    for entry in _as_list(table.get("channels")):
        if not isinstance(entry, dict):
            entry = {"channel": entry}
        priority = entry.get("priority")
        if not isinstance(priority, int):
            priority = 0
        channels.append((str(entry.get("channel", "")), priority))
    return channels


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _get_workspace(manifest: dict[str, Any]) -> dict[str, Any]:
    # Older manifests call the table "project".
    return _get_table(manifest, "workspace") or _get_table(manifest, "project")


def _get_table(data: dict[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key)
    return value if isinstance(value, dict) else {}


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_small_text(file) or "")
    except (ValueError, RecursionError):
        return {}
