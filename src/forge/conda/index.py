# SPDX-License-Identifier: BSD-3-Clause
"""Reading an index, repodata.json, and what is wrong with what it says."""

import json
import re
from typing import Any
from urllib.parse import unquote

from forge.conda.package import is_plain

SHA256 = re.compile("[0-9a-f]{64}")
FILE_NAME = re.compile(r"[A-Za-z0-9_][\w.+!*-]*(\.conda|\.tar\.bz2)", re.ASCII)


def parse(raw: bytes) -> dict[str, Any]:
    """Parse repodata.json; returns {} for anything of another shape."""
    try:
        data = json.loads(raw)
        packages = [data.get(key, {}) for key in ("packages", "packages.conda")]
        whole = (
            all(isinstance(key, str) for table in packages for key in {**table})
            and all(isinstance(record, dict) for table in packages for record in table.values())
            and not {*packages[0]} & {*packages[1]}  # solvers read both
        )
    except (ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        return {}
    return data if whole else {}


def records(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Map each file name of an index to its record."""
    return {**data.get("packages", {}), **data.get("packages.conda", {})}


def fault(file: str, record: dict[str, Any]) -> str:
    """Name the fault of a record, or "": with it a file is taken for another, or not checked."""
    if not FILE_NAME.fullmatch(file):
        return "is not the name of a package file"
    sha256, size = record.get("sha256"), record.get("size")
    if not (isinstance(sha256, str) and SHA256.fullmatch(sha256) and type(size) is int):
        return "its record has no sha256 or no size, so it cannot be checked"
    if not is_plain(str(record.get("python_site_packages_path") or "lib")):
        return "its record puts Python's packages outside a prefix"
    parts = [record.get(key) for key in ("name", "version", "build")]
    says = "-".join(part if isinstance(part, str) else "?" for part in parts)
    stem, dot, _ = file.rpartition(".conda" if file.endswith(".conda") else ".tar.bz2")
    if says != stem:
        return f"calls itself {ascii(says)[1:-1]:.200}{dot}: it was renamed"
    return ""


def is_of(url: str, channel: str) -> bool:
    """Return whether a URL is SUBDIR/FILE of a channel."""
    below = unquote(url).removeprefix(f"{unquote(channel.rstrip('/'))}/")
    return below != unquote(url) and len(parts := below.split("/")) == 2 and ".." not in parts
