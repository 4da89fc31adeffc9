# SPDX-License-Identifier: BSD-3-Clause
"""Reading an index, repodata.json, and what is wrong with what it says."""

import json
import re
from typing import Any
from urllib.parse import unquote, urlsplit

from rattler import RepoDataRecord

from forge.conda.package import is_plain
from forge.errors import ForgeError

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


def file_of(record: RepoDataRecord) -> tuple[str, str]:
    """Return the URL of the folder that holds a record's file, and the name of that file.

    Whatever is written or read for a record is named by this: `file_name` and other fields are what
    a lock or an index claims. Raises ForgeError for a record that contradicts its URL or has no
    hash.
    """
    try:
        subdir, name = split_url(record.url)[1][-2:]
        reason = fault(name, json.loads(record.to_json()))
        if not reason and record.file_name != name:
            reason = f"calls its file {record.file_name!a:.200}, which is not the name in its URL"
        if not reason and record.subdir != subdir:
            reason = f"is not in a folder {record.subdir!a:.80}, as its record says"
    except ValueError as error:
        reason = str(error)
    if reason:
        advice = "Lock again; if that is refused too, the channel's index is wrong"
        raise ForgeError(f"{record.url} {reason}. {advice}")
    return record.url.rpartition("/")[0], name


def split_url(url: str) -> tuple[str, list[str]]:
    """Return the server of a URL, with its scheme, and the parts of its path.

    Raises ValueError unless every reader takes the URL for the same file.
    """
    parts = urlsplit(url)
    path = [unquote(part) for part in parts.path.split("/")[1:]]
    if parts.query or parts.fragment or "?" in url or "#" in url or not url.isprintable():
        raise ValueError("has a query, a fragment or a control character in its URL")
    if len(path) < 2 or any(
        part in ("", ".", "..") or not part.isprintable() or "/" in part or "\\" in part
        for part in path
    ):
        raise ValueError("is no plain URL: its path has an empty part, a dot, or a slash in a part")
    return f"{parts.scheme}://{parts.netloc}", path


def is_of(url: str, channel: str) -> bool:
    """Return whether a URL is SUBDIR/FILE of a channel."""
    try:
        server, path = split_url(url)
        channel_server, channel_path = split_url(f"{channel.rstrip('/')}/SUBDIR/FILE")
    except ValueError:
        return False
    return (server, path[:-2]) == (channel_server, channel_path[:-2])
