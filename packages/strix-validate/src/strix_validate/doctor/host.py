# SPDX-License-Identifier: BSD-3-Clause
"""The machine and the environment, as far as a record of evidence describes them.

No host or user names and no paths: $PREFIX stands for the environment.
"""

import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path

from strix_validate.json_file import json_object
from strix_validate.reporting.record import Device, Host, Package

_PACKAGES = ("strix-validate", "torch", "triton", "flash-attn", "amd-aiter", "vllm", "transformers")
_GIB = 2**30


def versions() -> dict[str, str | None]:
    """Return the version of each package that matters, None if it is not installed."""
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def packages(prefix: Path = Path(sys.prefix)) -> list[Package]:
    """Return the environment's conda packages, by name; empty outside a conda environment.

    One whose entry cannot be read is named after its file, of the version "unreadable".
    """
    found = []
    for file in sorted((prefix / "conda-meta").glob("*.json")):
        try:
            entry = json_object(file)
            keys = ("name", "version", "build", "sha256")
            found.append(Package(**{key: entry.get(key) for key in keys}))
        except ValueError:
            found.append(Package(name=file.stem, version="unreadable", build="unreadable"))
    return found


def describe_host() -> Host:
    """Describe the running machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    release = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
    return Host(
        kernel=kernel_version(platform.release()),
        distribution=release.get("PRETTY_NAME", "unknown"),
        glibc=platform.libc_ver()[1],
        cpu=_cpu(),
        cores=os.cpu_count() or 0,
        memory_gib=round(memory / _GIB, 1),
        python=platform.python_version(),
    )


def kernel_version(release: str) -> str:
    """Return the release without a custom kernel's own name.

    A distribution's build number stays: 6.17.0-19-generic, 6.18.9-200.fc43.x86_64.
    """
    found = re.match(r"\d+\.\d+(\.\d+)?(-\d[\w.~-]*)?", release)
    return found.group() if found else "unknown"


def device_for(asked: str) -> str:
    """Return "cuda" or "cpu" for "auto", "cpu" without torch, and any other request as it is."""
    if asked != "auto":
        return asked
    try:
        import torch
    except ModuleNotFoundError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def describe_device(device: str) -> Device:
    """Describe the device that checks ran on. For "none", torch is not imported."""
    nothing = Device(type="none", architecture=platform.machine())
    if device == "none":
        return nothing
    try:
        import torch
    except ModuleNotFoundError:
        return nothing
    hip = torch.version.hip
    build = "rocm" if hip else "cuda" if torch.version.cuda else "cpu"
    toolkit = hip or torch.version.cuda or ""
    if device == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        arch = getattr(properties, "gcnArchName", None)
        if not hip:
            arch = f"sm_{properties.major}{properties.minor}"
        return Device(
            type="gpu",
            name=properties.name,
            architecture=arch,
            build=build,
            toolkit=toolkit,
            units=properties.multi_processor_count,
            clock_mhz=getattr(properties, "clock_rate", 0) // 1000,
            memory_gib=round(properties.total_memory / _GIB, 1),
        )
    # requested, but absent
    kind = "none" if device == "cuda" else "cpu"
    return Device(type=kind, architecture=platform.machine(), build=build, toolkit=toolkit)


def shorten(text: str) -> str:
    """Return the text with $PREFIX and ~ for the paths of this environment and user."""
    return text.replace(sys.prefix, "$PREFIX").replace(str(Path.home()), "~")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())
