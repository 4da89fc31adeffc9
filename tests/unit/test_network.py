# SPDX-License-Identifier: BSD-3-Clause
"""The driver follows pixi's configuration of the network."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.project import CHECKOUT
from support.servers import QuietHandler, served
from support.small_channel import read

from forge import bases, network
from forge.bases import CONDA_FORGE, BaseName
from forge.conda.location import Location
from forge.errors import ForgeError
from forge.project import Project

MIRRORED = "https://conda-forge.invalid/conda-forge"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder, and a checkout without a configuration."""
    for name in ("XDG_CONFIG_HOME", "PIXI_HOME", network.AUTH_FILE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FORGE_ROOT", str(tmp_path / "checkout"))
    return tmp_path


def configure(path: Path, text: str) -> None:
    """Write a file and its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def mirrors(url: str, channel: str = MIRRORED) -> str:
    """Return the configuration that makes `url` the mirror of a channel."""
    return f'[mirrors]\n"{channel}" = ["{url}"]\n'


class Private(QuietHandler):
    """A handler that requires a token. /garbage is not answered in HTTP, /slow not at all."""

    def do_GET(self) -> None:
        if self.path == "/garbage":
            self.wfile.write(b"garbage\r\n\r\n")
        elif self.path == "/slow":
            self.rfile.read(1)  # This returns when the client closes the connection.
        elif self.headers["Authorization"] == "Bearer secret":
            super().do_GET()
        else:
            self.send_error(401)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server with the handler Private."""
    folder = tmp_path_factory.mktemp("served")
    for name in ("file", "noarch/repodata.json.zst"):
        configure(folder / name, "content")
    (folder / "empty").touch()
    with served(folder, Private) as address:
        yield address


def write_credentials(home: Path, url: str) -> Path:
    """Write the server's token into a file of credentials, and return the file."""
    file = home / "credentials.json"
    host = url.removeprefix("http://").partition(":")[0]
    file.write_text(json.dumps({host: {"BearerToken": "secret"}}))
    return file


def test_a_channel_is_read_from_its_mirror_with_credentials(
    home: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(home / ".pixi/config.toml", mirrors(url))
    with pytest.raises(ForgeError, match="401"):
        read(Location(MIRRORED, retries=0), "file")
    monkeypatch.setenv(network.AUTH_FILE, str(write_credentials(home, url)))
    assert read(Location(f"{MIRRORED}/", retries=0), "file") == b"content"


def test_the_file_that_pixis_configuration_names_holds_the_credentials(
    home: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(network.AUTH_FILE, "")
    monkeypatch.delenv(network.AUTH_FILE)
    write_credentials(home, url)
    setting = 'authentication-override-file = "~/credentials.json"\n'
    configure(home / ".config/pixi/config.toml", 'authentication-override-file = "/none"\n')
    configure(home / ".pixi/config.toml", setting + mirrors(url))
    assert read(Location(MIRRORED, retries=0), "file") == b"content"


def test_conda_forge_is_probed_at_its_mirror(
    home: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(network.AUTH_FILE, str(write_credentials(home, url)))
    configure(home / ".config/pixi/config.toml", mirrors(url, CONDA_FORGE))
    assert bases.choose(BaseName.AUTO) == (
        "conda-forge",
        "base: conda-forge (the server answers)",
    )
    assert bases.load(Project.at(CHECKOUT), BaseName.CONDA_FORGE).channel_url == url
    with_credential = mirrors("https://user:word@x.invalid/y", CONDA_FORGE)
    configure(home / ".config/pixi/config.toml", with_credential)
    with pytest.raises(ForgeError, match="carries a credential"):
        bases.load(Project.at(CHECKOUT), BaseName.CONDA_FORGE)


@pytest.mark.parametrize("path", ["garbage", "slow", "missing", "empty"])
def test_what_does_not_answer_is_said_in_one_line(
    home: Path, url: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(network.AUTH_FILE, str(write_credentials(home, url)))
    reason = network.find_outage(f"{url}/{path}", 1)
    assert reason
    assert "\n" not in reason
    assert not network.find_outage(f"{url}/file", 300)


def test_the_later_file_and_the_longer_prefix_win(home: Path) -> None:
    configure(home / ".config/pixi/config.toml", mirrors("https://a.invalid/x"))
    assert network.mirrored(MIRRORED) == "https://a.invalid/x"
    configure(home / ".pixi/config.toml", mirrors("https://b.invalid"))
    assert network.mirrored(f"{MIRRORED}/noarch") == "https://b.invalid/noarch"
    text = mirrors("https://c.invalid", "https://conda-forge.invalid/")
    configure(home / "checkout/.pixi/config.toml", text)
    assert network.mirrored(MIRRORED) == "https://b.invalid"
    assert network.mirrored("https://conda-forge.invalid/conda-forge-2") == (
        "https://c.invalid/conda-forge-2"
    )
    assert network.mirrored("https://other.invalid/x") == "https://other.invalid/x"
    # Only the beginning of a URL is replaced.
    assert network.mirrored(f"{MIRRORED}/{MIRRORED}") == f"https://b.invalid/{MIRRORED}"


@pytest.mark.parametrize("fault", ["no JSON", "a folder", "HOME is a file"])
def test_credentials_that_cannot_be_read_are_one_message(
    home: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = home / "file"
    if fault == "a folder":
        path.mkdir()
    else:
        path.write_text("no JSON")
    variable = "HOME" if fault == "HOME is a file" else network.AUTH_FILE
    monkeypatch.setenv(variable, str(path))
    with pytest.raises(ForgeError, match=rf"credentials.*RATTLER_AUTH_FILE.*HOME.*{path}"):
        network.client()


@pytest.mark.parametrize(
    "text",
    [
        "[mirrors",
        "mirrors = 1",
        '[mirrors]\n"x" = ["https://y"]',
        '[mirrors]\n"https://x" = 1',
        '[mirrors]\n"https://x" = "https://y"',
        '[mirrors]\n"https://x" = ["file:///y"]',
        '[mirrors]\n"https://x" = [1]',
        "authentication-override-file = 1",
    ],
)
def test_a_configuration_that_cannot_be_read_is_named(home: Path, text: str) -> None:
    configure(home / ".pixi/config.toml", text)
    with pytest.raises(ForgeError, match=r"\.pixi/config\.toml is not a pixi configuration"):
        network.client()


def test_a_solver_asks_an_index_twice(home: Path) -> None:
    """A solver requests an index at most twice.

    A solver shows no progress, so it would seem to hang during further attempts. Downloads are
    attempted more often.
    """
    requests: list[str] = []

    class Busy(QuietHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_error(503)

    with served(home, Busy) as address, pytest.raises(RuntimeError, match="503"):
        network.download(network.make_solver_client(), f"{address}/repodata.json", io.BytesIO())
    assert len(requests) == 2
