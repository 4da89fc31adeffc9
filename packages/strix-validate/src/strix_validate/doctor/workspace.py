# SPDX-License-Identifier: BSD-3-Clause
"""The pixi workspace that an environment belongs to, as far as its manifest says where it looks."""

import tomllib
from pathlib import Path
from typing import Any

from strix_validate.json_file import small_text


def channels(prefix: Path) -> list[str]:
    """Return the channels of the workspace with an environment, the first to be asked first.

    Empty for an environment of something else than pixi, and for a manifest that cannot be read.
    """
    if prefix.parent.name != "envs" or prefix.parents[1].name != ".pixi":
        return []
    folder = prefix.parents[2]
    own = _workspace(_toml(folder / "pixi.toml"))
    pixi = _table(_table(_toml(folder / "pyproject.toml"), "tool"), "pixi")
    listed = (own or _workspace(pixi)).get("channels", [])
    if not isinstance(listed, list):
        return []
    # a channel may also be a table with a priority
    return [str(c.get("channel", "")) if isinstance(c, dict) else str(c) for c in listed]


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
