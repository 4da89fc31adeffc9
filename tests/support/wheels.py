# SPDX-License-Identifier: BSD-3-Clause
"""Write wheels file by file, without a build backend."""

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
    """Write a wheel into a folder and return it.

    Args:
        folder: The folder.
        name: The name of the package.
        version: Its version.
        files: The files of the wheel. They may replace METADATA and WHEEL of its .dist-info.
        requires: Its requirements.
        tag: Its tag.
    """
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    contents = {
        f"{info}/METADATA": "\n".join(["Metadata-Version: 2.1", *metadata, ""]),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
    } | dict(files or {})
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{module}-{version}-{tag}.whl"
    record = ""
    with zipfile.ZipFile(path, "w") as archive:
        for file_name, content in contents.items():
            data = content.encode() if isinstance(content, str) else content
            archive.writestr(file_name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
            record += f"{file_name},sha256={digest.rstrip(b'=').decode()},{len(data)}\n"
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return path
