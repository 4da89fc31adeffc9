# SPDX-License-Identifier: BSD-3-Clause
"""A Python package index in a folder: NAME/FILE, as the simple API lists it."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

from packaging.utils import canonicalize_name


def add_wheel(index: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> Path:
    """Make a wheel of one empty module, and put it where clients look for it."""
    module, folder = name.replace("-", "_"), index / canonicalize_name(name)
    info = f"{module}-{version}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    wheel = ["Wheel-Version: 1.0", "Generator: test", "Root-Is-Purelib: true", "Tag: py3-none-any"]
    files = {
        f"{module}.py": "",
        f"{info}/METADATA": "\n".join([*metadata, "", ""]),
        f"{info}/WHEEL": "\n".join([*wheel, ""]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        record = ""
        for file, text in files.items():
            archive.writestr(file, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
            record += f"{file},sha256={digest.rstrip(b'=').decode()},{len(text)}\n"
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return path


def needs_torch(index: Path) -> Path:
    """A package like those that people put on top of ours, and PyPI's torch and triton for it."""
    add_wheel(index, "torch", "2.99.0", ("triton==3.99.0",))
    add_wheel(index, "triton", "3.99.0")
    return add_wheel(index, "needs-torch", "1.0", ("torch>=2", "triton"))
