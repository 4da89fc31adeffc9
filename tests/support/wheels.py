# SPDX-License-Identifier: BSD-3-Clause
"""Wheels, by hand."""

import base64
import hashlib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    files: Mapping[str, str | bytes] | None = None,
    requires: Iterable[str] = (),
    tag: str = "py3-none-any",
) -> Path:
    """A wheel of `files`, which may stand for those of its .dist-info too."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    held = {
        f"{info}/METADATA": "\n".join(["Metadata-Version: 2.1", *metadata, ""]),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
    } | dict(files or {})
    folder.mkdir(parents=True, exist_ok=True)
    path, record = folder / f"{module}-{version}-{tag}.whl", ""
    with zipfile.ZipFile(path, "w") as archive:
        for place, content in held.items():
            data = content.encode() if isinstance(content, str) else content
            archive.writestr(place, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
            record += f"{place},sha256={digest.rstrip(b'=').decode()},{len(data)}\n"
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return path
