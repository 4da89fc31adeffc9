# SPDX-License-Identifier: BSD-3-Clause
"""JSON files of strangers, such as a model's."""

import json
from pathlib import Path
from typing import Any

#: Bytes; the largest known config.json has some hundred thousand, an index of weights millions.
LIMIT = 1 << 24


def json_object(file: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        ValueError: it does not, cannot be read, is a pipe, or has more than LIMIT bytes.
    """
    try:
        if file.exists() and not file.is_file():
            raise ValueError("it is not a regular file")
        if file.stat().st_size > LIMIT:
            raise ValueError(f"it has more than {LIMIT} bytes")
        found = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error!s:.200}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: not a config.json")
    return found
