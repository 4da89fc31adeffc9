# SPDX-License-Identifier: BSD-3-Clause
"""Describe the machine and the environment for a record, without host names and user names.

In the reasons of a record, $PREFIX stands for the environment's folder, and ~ for the user's.
"""

import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path

from strix_validate.json_file import read_json_object
from strix_validate.reporting.record import Device, Host, Package

#: Python distributions whose versions a record lists.
_PACKAGES = (
    "strix-validate",
    "torch",
    "triton",
    "flash-attn",
    "amd-aiter",
    "vllm",
    "transformers",
)
_GIB = 2**30


def read_versions() -> dict[str, str | None]:
    """Return the version of each package in _PACKAGES, or None if it is not installed."""
    installed: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return installed


def list_packages(prefix: Path = Path(sys.prefix)) -> list[Package]:
    """Return the environment's conda packages, sorted by name.

    The list is empty outside of a conda environment. A package whose entry cannot be read is named
    after the entry's file, and has the version "unreadable".
    """
    result = []
    for file in sorted((prefix / "conda-meta").glob("*.json")):
        try:
            result.append(_read_package(file))
        except ValueError:
            result.append(
                Package(
                    name=file.stem,
                    version="unreadable",
                    build="unreadable",
                )
            )
    return result


def _read_package(file: Path) -> Package:
    entry = read_json_object(file)
    keys = ("name", "version", "build", "sha256")
    return Package(**{key: entry.get(key) for key in keys})


def describe_host() -> Host:
    """Describe the running machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    distribution = "unknown"
    if Path("/etc/os-release").exists():
        release = platform.freedesktop_os_release()
        distribution = release.get("PRETTY_NAME", distribution)
    return Host(
        kernel=shorten_release(platform.release()),
        distribution=distribution,
        glibc=platform.libc_ver()[1],
        cpu=_read_cpu(),
        cores=os.cpu_count() or 0,
        memory_gib=round(memory / _GIB, 1),
        python=platform.python_version(),
    )


def shorten_release(release: str) -> str:
    """Return a kernel's release without the name of a custom kernel.

    A distribution's build number stays: 6.17.0-19-generic, 6.18.9-200.fc43.x86_64.
    """
    match = re.match(r"\d+\.\d+(\.\d+)?(-\d[\w.~-]*)?", release)
    return match[0] if match else "unknown"


def resolve_device(device: str) -> str:
    """Return the device for a value of --device.

    "auto" becomes "cuda" if torch finds a GPU, and "cpu" otherwise.
    """
    if device != "auto":
        return device
    try:
        import torch
    except ModuleNotFoundError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def describe_device(device: str) -> Device:
    """Describe the device that checks run on.

    Args:
        device: "cuda", "cpu" or "none". For "none", torch is not imported.
    """
    no_device = Device(type="none", architecture=platform.machine())
    if device == "none":
        return no_device
    try:
        import torch
    except ModuleNotFoundError:
        return no_device
    if device == "cuda" and torch.cuda.is_available():
        return _describe_gpu()
    cpu = Device(type="cpu", architecture=platform.machine(), **_describe_build())
    if device == "cuda":
        # A GPU was requested, but is absent.
        return cpu.model_copy(update={"type": "none"})
    return cpu


def _describe_build() -> dict:
    """Return the fields build and toolkit of Device, for the installed torch."""
    import torch

    if torch.version.hip:
        return {"build": "rocm", "toolkit": torch.version.hip}
    if torch.version.cuda:
        return {"build": "cuda", "toolkit": torch.version.cuda}
    return {"build": "cpu", "toolkit": ""}


def _describe_gpu() -> Device:
    import torch

    properties = torch.cuda.get_device_properties(0)
    architecture = getattr(properties, "gcnArchName", None)
    if not torch.version.hip:
        architecture = f"sm_{properties.major}{properties.minor}"
    return Device(
        type="gpu",
        name=properties.name,
        architecture=architecture,
        units=properties.multi_processor_count,
        clock_mhz=getattr(properties, "clock_rate", 0) // 1000,
        memory_gib=round(properties.total_memory / _GIB, 1),
        **_describe_build(),
    )


def shorten(text: str) -> str:
    """Return the text with $PREFIX and ~ in place of this environment's and this user's folder.

    A system path stays, because it names nobody, and because commands in the text must keep
    working. Examples are the prefix "/usr", and "/", which Docker uses as the home folder of a user
    that the image does not know.
    """
    for path, short in ((sys.prefix, "$PREFIX"), (str(Path.home()), "~")):
        if path not in ("/", "/usr", "/usr/local"):
            text = re.sub(rf"{re.escape(path)}(?![\w-])", short, text)
    return text


def _read_cpu() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
