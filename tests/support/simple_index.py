# SPDX-License-Identifier: BSD-3-Clause
"""A Python package index in a folder, with the files NAME/FILE, served with the simple API."""

import hashlib
import io
import json
from pathlib import Path

from packaging.utils import canonicalize_name
from support.servers import QuietHandler
from support.wheels import write_wheel

# Packages that people install beside torch, and their requirements. A workspace with one of them
# can be locked with our torch.
ADDED = {
    "accelerate": ("numpy>=1.17", "torch>=2.0.0"),
    "diffusers": ("numpy",),
    "lightning": ("torch<4.0,>=2.1.0", "torchmetrics"),
    "peft": ("numpy", "torch>=1.13.0", "accelerate>=0.21.0"),
    "sentence-transformers": ("torch>=1.11.0", "numpy"),
    "torchao": (),
    "torchmetrics": ("torch>=2.0.0,<3", "numpy>1.20.0"),
    "trl": ("accelerate>=0.1",),
}
# A workspace with one of these packages cannot be locked without our torchvision. With xformers or
# unsloth it can never be locked, because they need wheels for CUDA.
REFUSED = {
    "timm": ("torch", "torchvision"),
    "open-clip-torch": ("torch>=2.0", "torchvision", "timm"),
    "xformers": ("numpy", "torch==2.99.0"),
    "unsloth": ("torch<3,>=2.4.0", "torchvision", "xformers", "triton>=3.0.0"),
}
ALWAYS = ("timm", "open-clip-torch")  # Each of their releases requires torchvision.
NEW, OLD = "1.0", "0.0.1"


class SimpleIndex(QuietHandler):
    """A handler that lists the folder of a project in JSON like PyPI, with times of upload."""

    def list_directory(self, path: str) -> io.BytesIO:
        files = [
            {
                "filename": file.name,
                "url": file.name,
                "hashes": {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()},
                "upload-time": "2026-01-01T00:00:00Z",
            }
            for file in sorted(Path(path).glob("*.whl"))
        ]
        data = {"meta": {"api-version": "1.1"}, "name": Path(path).name, "files": files}
        text = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/vnd.pypi.simple.v1+json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        return io.BytesIO(text)


def add_wheel(index: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> Path:
    """Add a wheel with one empty module to the index, and return it."""
    files = {f"{name.replace('-', '_')}.py": ""}
    return write_wheel(index / canonicalize_name(name), name, version, files, requires)


def popular(index: Path, *others: str) -> None:
    """Add wheels to the index: PyPI's torch with its requirements, ADDED, REFUSED and `others`."""
    for name in {*others} - {"torch", "triton", "torchvision", *ADDED, *REFUSED}:
        add_wheel(index, name, "99.0")
    add_wheel(index, "numpy", "2.0")
    add_wheel(index, "nvidia-cublas", "13.0")
    add_wheel(index, "triton", "3.99.0")
    add_wheel(index, "torch", "2.13.0", ("triton==3.99.0", "nvidia-cublas"))
    add_wheel(index, "torch", "2.99.0", ("triton==3.99.0", "nvidia-cublas"))
    add_wheel(index, "torchvision", "0.28.0", ("torch==2.13.0",))
    add_wheel(index, "torchvision", "0.99.0", ("torch==2.99.0",))
    for name, requires in (ADDED | REFUSED).items():
        # The old release of most packages does not require torch yet.
        add_wheel(index, name, OLD, requires if name in ALWAYS else ())
        add_wheel(index, name, NEW, requires)
