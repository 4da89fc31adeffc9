# SPDX-License-Identifier: BSD-3-Clause
"""A real pixi uses a published channel, even after a withdrawal and with a damaged file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pixi import Pixi
from support.servers import Revalidating, served
from support.static_channel import BUILD, Source

from forge.channel.publish import PublishedChannel

pytestmark = pytest.mark.pixi


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A published channel with alpha 1.0 and 2.0, and with beta, which requires alpha."""
    source = Source(tmp_path / "local")
    target = tmp_path / "published"
    source.make("alpha")
    source.make("beta", depends=["alpha"])
    PublishedChannel(target).publish(source)
    source.make("alpha", version="2.0")
    PublishedChannel(target).publish(source)
    return target


@pytest.fixture
def url(published: Path) -> Iterator[str]:
    with served(published, Revalidating) as address:
        yield address


class Workspace:
    """A user's workspace, which requires beta from one channel."""

    def __init__(self, folder: Path, channel: str) -> None:
        self.folder = folder
        self.pixi = Pixi(folder / "home", {})
        (folder / "pixi.toml").write_text(
            f'[workspace]\nname = "w"\nchannels = ["{channel}"]\nplatforms = ["linux-64"]\n'
            '[dependencies]\nbeta = "*"\n'
        )

    def __call__(self, *words: str, code: int = 0) -> str:
        return self.pixi(*words, cwd=self.folder, code=code)

    def list_installed(self) -> set[str]:
        """Return NAME-VERSION-BUILD of each installed package."""
        records = (self.folder / ".pixi/envs/default/conda-meta").glob("*.json")
        return {record.stem for record in records}


def test_install_withdraw_update(published: Path, url: str, tmp_path: Path) -> None:
    """A lock that names a withdrawn build installs only while pixi's cache has that build.

    `pixi update` replaces the withdrawn build in the lock.
    """
    workspace = Workspace(tmp_path, url)
    workspace("install")
    assert workspace.list_installed() == {f"alpha-2.0-{BUILD}", f"beta-1.0-{BUILD}"}
    assert (tmp_path / ".pixi/envs/default/alpha").read_text() == "alpha"
    PublishedChannel(published).withdraw([f"alpha-2.0-{BUILD}"], "wrong numbers")
    workspace("clean")
    workspace("install", "--locked")
    assert f"alpha-2.0-{BUILD}" in workspace.list_installed()
    workspace("clean")
    workspace("clean", "cache", "--yes")
    assert f"alpha-2.0-{BUILD}.conda" in workspace("install", "--locked", code=1)
    workspace("update")
    workspace("install", "--locked")
    assert workspace.list_installed() == {f"alpha-1.0-{BUILD}", f"beta-1.0-{BUILD}"}


def test_a_file_cut_short(published: Path, url: str, tmp_path: Path) -> None:
    """pixi installs no file of a truncated package, and pixi's message names the package's file.

    When the file is complete again, the next install succeeds.
    """
    workspace = Workspace(tmp_path, url)
    file = published / f"noarch/alpha-2.0-{BUILD}.conda"
    workspace("lock")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    assert f"alpha-2.0-{BUILD}.conda" in workspace("install", "--locked", code=1)
    assert not (tmp_path / ".pixi/envs/default/alpha").exists()
    file.write_bytes(content)
    workspace("install", "--locked")
    assert len(workspace.list_installed()) == 2
