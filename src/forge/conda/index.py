# SPDX-License-Identifier: BSD-3-Clause
"""Read the index of a channel, repodata.json, and find faults in its records."""

import json
import re
from typing import Any
from urllib.parse import unquote, urlsplit

from rattler import RepoDataRecord

from forge.conda.package import is_plain
from forge.errors import ForgeError

SHA256 = re.compile("[0-9a-f]{64}")
FILE_NAME = re.compile(r"[A-Za-z0-9_][\w.+!*-]*(\.conda|\.tar\.bz2)", re.ASCII)
TABLES = ("packages", "packages.conda")


def parse(raw: bytes) -> dict[str, Any]:
    """Parse repodata.json. Return an empty mapping if the content has another structure."""
    try:
        data = json.loads(raw)
        tables = [data.get(key, {}) for key in TABLES]
        is_index = all(_is_table(table) for table in tables)
        # A file name in both `packages` and `packages.conda` would have two records, and solvers
        # would read both.
        is_index = is_index and not set(tables[0]) & set(tables[1])
    except (ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        return {}
    return data if is_index else {}


def _is_table(table: Any) -> bool:
    """Return whether a value maps file names to records."""
    if not isinstance(table, dict):
        return False
    return all(isinstance(record, dict) for record in table.values())


def records(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Map each file name of an index to its record."""
    return {**data.get("packages", {}), **data.get("packages.conda", {})}


def find_fault(file: str, record: dict[str, Any]) -> str:
    """Return the fault of a record as a phrase, or an empty string if there is none.

    With a wrong record, a file could be mistaken for another one, or could not be checked.

    Args:
        file: The name of the package file.
        record: Its record in the index.
    """
    if not FILE_NAME.fullmatch(file):
        return "is not the name of a package file"
    sha256 = record.get("sha256")
    has_sha256 = isinstance(sha256, str) and SHA256.fullmatch(sha256)
    has_size = type(record.get("size")) is int
    if not (has_sha256 and has_size):
        return "its record has no sha256 or no size, so it cannot be checked"
    if not is_plain(str(record.get("python_site_packages_path") or "lib")):
        return "its record's python_site_packages_path is not a plain path inside a prefix"
    parts = []
    for key in ("name", "version", "build"):
        value = record.get(key)
        parts.append(value if isinstance(value, str) else "?")
    stated = "-".join(parts)
    extension = ".conda" if file.endswith(".conda") else ".tar.bz2"
    if stated != file.removesuffix(extension):
        return f"calls itself {ascii(stated)[1:-1]:.200}{extension}: it was renamed"
    return ""


def locate_file(record: RepoDataRecord) -> tuple[str, str]:
    """Return the URL of the folder that has a record's file, and the name of that file.

    Use only these two values to name files that are read or written for a record. `file_name` and
    other fields are not trustworthy, because a lock or an index can state anything.

    Raises:
        ForgeError: The record contradicts its URL, `find_fault` finds a fault in it, or `split_url`
            refuses its URL.
    """
    try:
        _, path = split_url(record.url)
        subdir, name = path[-2:]
        reason = find_fault(name, json.loads(record.to_json()))
        if not reason and record.file_name != name:
            reason = f"calls its file {record.file_name!a:.200}, which is not the name in its URL"
        if not reason and record.subdir != subdir:
            reason = f"names the folder {record.subdir!a:.80}, which is not the one in its URL"
    except ValueError as error:
        reason = str(error)
    if reason:
        advice = "Lock again. If this message comes back, the channel's index is wrong"
        raise ForgeError(f"{record.url} {reason}. {advice}")
    folder = record.url.rpartition("/")[0]
    return folder, name


def split_url(url: str) -> tuple[str, list[str]]:
    """Return the server of a URL, with its scheme, and the parts of its path.

    Raises:
        ValueError: Two programs could take the URL for different files, or the path has no folder.
    """
    parts = urlsplit(url)
    path = [unquote(part) for part in parts.path.split("/")[1:]]
    has_query = parts.query or parts.fragment or "?" in url or "#" in url
    if has_query or not url.isprintable():
        raise ValueError("has a URL with a query, a fragment or an unprintable character")
    if len(path) < 2 or not all(map(_is_plain_part, path)):
        reason = "an empty part, `.`, `..`, a backslash, a quoted slash or an unprintable character"
        raise ValueError(f"has a path without a folder, or with {reason}")
    return f"{parts.scheme}://{parts.netloc}", path


def _is_plain_part(part: str) -> bool:
    """Return whether every program reads this part of a URL's path as the same name."""
    if part in ("", ".", ".."):
        return False
    return part.isprintable() and "/" not in part and "\\" not in part


def is_of(url: str, channel_url: str) -> bool:
    """Return whether a URL is that of a file SUBDIR/FILE in a channel."""
    try:
        server, path = split_url(url)
        channel_server, channel_path = split_url(f"{channel_url.rstrip('/')}/SUBDIR/FILE")
    except ValueError:
        return False
    return server == channel_server and path[:-2] == channel_path[:-2]
