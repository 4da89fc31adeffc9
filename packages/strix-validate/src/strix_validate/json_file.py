# SPDX-License-Identifier: BSD-3-Clause
"""Read small files of unknown origin, such as a model's JSON or the record of an earlier run."""

import errno
import json
from pathlib import Path
from typing import Any

from strix_validate import limits


def read_small_file(file: Path) -> bytes:
    """Read a file.

    Raises:
        OSError: The file cannot be read, is not a regular file, or has more than limits.FILE bytes.
    """
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file")
    with file.open("rb") as stream:
        # Files in /proc report a size of 0, and files in /sys one of 4096 bytes. Their real size is
        # known only after reading.
        data = stream.read(limits.FILE + 1)
    if len(data) > limits.FILE:
        raise OSError(errno.EFBIG, f"it has more than {limits.FILE} bytes")
    return data


def read_small_text(file: Path) -> str | None:
    """Return a file's text without blanks, newlines and NULs at its ends; None if unreadable."""
    try:
        data = read_small_file(file)
    except OSError:
        return None
    return data.decode(errors="replace").strip("\0\n ")


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        ValueError: The file holds no JSON object, cannot be read, is not a regular file, or has
            more than limits.FILE bytes.
    """
    try:
        value = json.loads(read_small_file(file))
    except (OSError, ValueError, RecursionError) as error:
        message = getattr(error, "strerror", None) or error
        raise ValueError(f"{file}: {message!s:.200}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: not a JSON object")
    return value
