# SPDX-License-Identifier: BSD-3-Clause
"""A channel of small packages, and a workspace that installs them from it."""

import asyncio
import io
from datetime import UTC, datetime
from pathlib import Path

from rattler.index import index_fs
from rattler_build import assemble_package

from forge.bases import PUBLISHED
from forge.conda.location import Location
from forge.envs.workspace import Workspace

MANIFEST = f"""\
[workspace]
name = "app"
channels = ["{PUBLISHED}", "conda-forge"]
platforms = [{{ name = "strix-halo", platform = "linux-64", amdgpu = "gfx1151" }}]

[dependencies]
alpha = "*"
beta = "*"
"""


def package(
    channel: Path, name: str, version: str, build: str = "h1234567_0", **arguments: list
) -> str:
    """Put a small package into a channel folder and return its file name."""
    content = channel.parent / "content" / name
    (content / "share").mkdir(parents=True, exist_ok=True)
    lines = [f"{name} {number**5:x}\n" for number in range(300)]
    (content / "share" / name).write_text("".join(lines))
    package = assemble_package(
        name,
        version,
        "noarch",
        build,
        channel / "noarch",
        files_dir=content,
        noarch="generic",
        license="MIT",
        timestamp=datetime(2026, 1, 1, tzinfo=UTC),
        **arguments,
    )
    package.path.chmod(0o644)
    return package.path.name


def index(channel: Path) -> None:
    """Write the index of the channel in its three forms: plain, compressed and sharded."""
    (channel / "linux-64").mkdir(exist_ok=True)
    asyncio.run(index_fs(channel, write_zst=True, write_shards=True))


def make(channel: Path, *names: str, version: str = "1.0", **arguments: list) -> Path:
    """Make a channel folder with these packages.

    Args:
        arguments: Further arguments of `assemble_package`, for the last package only.
    """
    (channel / "noarch").mkdir(parents=True, exist_ok=True)
    for name in names:
        is_last = name == names[-1]
        options = arguments if is_last else {}
        package(channel, name, version, **options)
    index(channel)
    return channel


def workspace(folder: Path, channel: str, text: str = "") -> Workspace:
    """Make a workspace of one channel, with `text` at the end of its manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = MANIFEST.replace(f'"{PUBLISHED}", "conda-forge"', f'"{channel}"')
    (folder / "pixi.toml").write_text(manifest + text)
    return Workspace("app", folder)


def read(location: Location, name: str) -> bytes | None:
    """Return the bytes of a file of a channel, or None if there is no such file."""
    content = io.BytesIO()
    if not location.stream(name, content):
        return None
    return content.getvalue()
