# SPDX-License-Identifier: BSD-3-Clause
"""Small files of strangers: a model's JSON, a record, what lies in a copy of a machine."""

import errno
import json
from pathlib import Path
from typing import Any

from strix_validate import limits


def small_file(file: Path) -> bytes:
    """Read a file.

    Raises:
        OSError: it cannot be read, is a pipe, or has more than limits.FILE bytes.
    """
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file")
    with file.open("rb") as stream:  # what /proc and /sys hold has no size
        data = stream.read(limits.FILE + 1)
    if len(data) > limits.FILE:
        raise OSError(errno.EFBIG, f"it has more than {limits.FILE} bytes")
    return data


def small_text(file: Path) -> str | None:
    """Return a text file without blanks at its ends, or None if it cannot be read."""
    try:
        return small_file(file).decode(errors="replace").strip("\0\n ")
    except OSError:
        return None


def json_object(file: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        ValueError: it does not, cannot be read, is a pipe, or has more than limits.FILE bytes.
    """
    try:
        found = json.loads(small_file(file))
    except (OSError, ValueError, RecursionError) as error:
        says = getattr(error, "strerror", None) or error
        raise ValueError(f"{file}: {says!s:.200}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: not a config.json")
    return found
