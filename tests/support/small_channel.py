# SPDX-License-Identifier: BSD-3-Clause
"""A channel of small packages, and a workspace that takes them from it."""

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


def package(channel: Path, name: str, version: str, build: str = "h1234567_0", **more: list) -> str:
    """Put a small package into a channel folder; returns its file name."""
    content = channel.parent / "content" / name
    (content / "share").mkdir(parents=True, exist_ok=True)
    (content / "share" / name).write_text("".join(f"{name} {i**5:x}\n" for i in range(300)))
    made = assemble_package(
        name, version, "noarch", build, channel / "noarch", files_dir=content, noarch="generic",
        license="MIT", timestamp=datetime(2026, 1, 1, tzinfo=UTC), **more,
    )  # fmt: skip
    made.path.chmod(0o644)
    return made.path.name


def index(channel: Path) -> None:
    (channel / "linux-64").mkdir(exist_ok=True)
    asyncio.run(index_fs(channel, write_zst=True, write_shards=True))


def make(channel: Path, *names: str, version: str = "1.0", **more: list) -> Path:
    """A channel folder of packages; `more` is of the last one."""
    (channel / "noarch").mkdir(parents=True, exist_ok=True)
    for name in names:
        package(channel, name, version, **(more if name == names[-1] else {}))
    index(channel)
    return channel


def workspace(folder: Path, channel: str, text: str = "") -> Workspace:
    """A workspace that takes all from one channel, with `text` at the end of its manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pixi.toml").write_text(
        MANIFEST.replace(f'"{PUBLISHED}", "conda-forge"', f'"{channel}"') + text
    )
    return Workspace("app", folder)


def read(location: Location, name: str) -> bytes | None:
    """The bytes of a file of a channel; None if there is no such file."""
    out = io.BytesIO()
    return out.getvalue() if location.stream(name, out) else None
