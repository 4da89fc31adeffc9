# SPDX-License-Identifier: BSD-3-Clause
"""A real pixi on a channel that we published: install, withdraw, update, damage."""

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
    """alpha 1.0, then 2.0; beta needs it."""
    source, target = Source(tmp_path / "local"), tmp_path / "published"
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
    """Somebody's workspace that takes beta from one channel."""

    def __init__(self, folder: Path, channel: str) -> None:
        self.folder, self.pixi = folder, Pixi(folder / "home", {})
        (folder / "pixi.toml").write_text(
            f'[workspace]\nname = "w"\nchannels = ["{channel}"]\nplatforms = ["linux-64"]\n'
            '[dependencies]\nbeta = "*"\n'
        )

    def __call__(self, *words: str, code: int = 0) -> str:
        return self.pixi(*words, cwd=self.folder, code=code)

    def locked(self) -> str:
        return (self.folder / "pixi.lock").read_text()

    def installed(self) -> set[str]:
        return {
            file.stem for file in (self.folder / ".pixi/envs/default/conda-meta").glob("*.json")
        }


def test_install_withdraw_update(published: Path, url: str, tmp_path: Path) -> None:
    """A lock that names a withdrawn build installs from the cache alone; an update leaves it."""
    workspace = Workspace(tmp_path, url)
    workspace("install")
    assert workspace.installed() == {f"alpha-2.0-{BUILD}", f"beta-1.0-{BUILD}"}
    assert (tmp_path / ".pixi/envs/default/alpha").read_text() == "alpha"
    PublishedChannel(published).withdraw([f"alpha-2.0-{BUILD}"], "wrong numbers")
    workspace("clean")
    workspace("install", "--locked")
    assert f"alpha-2.0-{BUILD}" in workspace.installed()
    workspace("clean")
    workspace("clean", "cache", "--yes")
    assert f"alpha-2.0-{BUILD}.conda" in workspace("install", "--locked", code=1)
    workspace("update")
    workspace("install", "--locked")
    assert workspace.installed() == {f"alpha-1.0-{BUILD}", f"beta-1.0-{BUILD}"}


def test_a_file_cut_short(published: Path, url: str, tmp_path: Path) -> None:
    """Nothing of it is installed, the message names it, and the next install goes on."""
    workspace, file = Workspace(tmp_path, url), published / f"noarch/alpha-2.0-{BUILD}.conda"
    workspace("lock")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert f"alpha-2.0-{BUILD}.conda" in workspace("install", "--locked", code=1)
    assert not (tmp_path / ".pixi/envs/default/alpha").exists()
    file.write_bytes(whole)
    workspace("install", "--locked")
    assert len(workspace.installed()) == 2
