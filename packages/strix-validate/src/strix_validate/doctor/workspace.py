# SPDX-License-Identifier: BSD-3-Clause
"""The pixi workspace that an environment belongs to, as far as its manifest says where it looks."""

import tomllib
from pathlib import Path
from typing import Any

from strix_validate.json_file import small_text


def channels(prefix: Path) -> list[str]:
    """Return the channels of a pixi environment, the first to be asked first.

    Empty for an environment of something else than pixi, and for a manifest that cannot be read.
    """
    if prefix.parent.name != "envs" or prefix.parents[1].name != ".pixi":
        return []
    folder = prefix.parents[2]
    manifest = _toml(folder / "pixi.toml")
    if not _workspace(manifest):
        manifest = _table(_table(_toml(folder / "pyproject.toml"), "tool"), "pixi")
    own = _channels_of(_workspace(manifest))
    listed: list[tuple[str, int]] = []
    for feature in _features(manifest, prefix.name):
        listed += _channels_of(feature) or own
    by_priority = sorted(listed + own, key=lambda channel: -channel[1])
    return list(dict.fromkeys(name for name, _ in by_priority))


def _features(manifest: dict[str, Any], environment: str) -> list[dict[str, Any]]:
    """Return the tables of an environment's features, without the default one."""
    listed = _table(manifest, "environments").get(environment)
    names = listed.get("features") if isinstance(listed, dict) else listed
    tables = _table(manifest, "feature")
    return [_table(tables, str(name)) for name in _list(names)]


def _channels_of(table: dict[str, Any]) -> list[tuple[str, int]]:
    """Return the channels that a table names, and their priorities."""
    listed = _list(table.get("channels"))
    entries = [entry if isinstance(entry, dict) else {"channel": entry} for entry in listed]
    return [(str(e.get("channel", "")), _number(e.get("priority"))) for e in entries]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _workspace(manifest: dict[str, Any]) -> dict[str, Any]:
    # older manifests call it project
    return _table(manifest, "workspace") or _table(manifest, "project")


def _table(data: dict[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key)
    return value if isinstance(value, dict) else {}


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(small_text(file) or "")
    except (ValueError, RecursionError):
        return {}
