# SPDX-License-Identifier: BSD-3-Clause
"""Stacks are locked and installed from a channel on a web server; damaged packages are refused."""

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
from support.project import MiniProject
from support.servers import QuietHandler, served
from support.small_channel import MANIFEST, make, workspace

from forge.errors import Failed, NotAttempted
from forge.files import digest_tree

POSITIONS = 20  # The number of damaged bytes that are tested for each of three packages.


class DamagingHandler(QuietHandler):
    """Serves a channel under three kinds of URLs.

    URLs below / are the undamaged channel. Below /flip/N/FILE, the lowest bit of byte N is wrong in
    files whose path ends with FILE. Below /cut/N, the first N downloads of each package break off
    in the middle.
    """

    # How many downloads have broken off, by the N of /cut/N and the path of the file.
    breaks: ClassVar[Counter[str]] = Counter()

    def do_GET(self) -> None:
        if self.path.startswith("/cut/"):
            times, path = self.path.removeprefix("/cut/").split("/", 1)
            self.serve_with_breaks(int(times), path)
        elif self.path.startswith("/flip/"):
            position, file, path = self.path.removeprefix("/flip/").split("/", 2)
            self.serve_flipped(int(position), file, path)
        else:
            super().do_GET()

    def serve_flipped(self, position: int, file: str, path: str) -> None:
        if not path.endswith(file):
            self.path = f"/{path}"
            super().do_GET()
            return
        body = bytearray(Path(self.directory, path).read_bytes())
        body[position] ^= 1
        self.send_body_headers(len(body))
        # The installer closes the connection when it reads damaged data.
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)

    def serve_with_breaks(self, times: int, path: str) -> None:
        self.path = f"/{path}"
        key = f"{times} {path}"
        if not path.endswith(".conda") or self.breaks[key] == times:
            super().do_GET()
            return
        self.breaks[key] += 1
        body = Path(self.directory, path).read_bytes()
        self.send_body_headers(len(body))
        self.wfile.write(body[: len(body) // 2])

    def send_body_headers(self, length: int) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.end_headers()


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "channel"
    return make(folder, "alpha", "gamma", "beta", depends=["alpha", "gamma >=1"])


@pytest.fixture(scope="module")
def url(channel: Path) -> Iterator[str]:
    with served(channel, DamagingHandler) as address:
        yield address


def test_lock_and_install_through_a_web_server(url: str, tmp_path: Path) -> None:
    """`lock`, `install` and `run` work with a channel on a web server.

    Two installs with an empty package cache make the same files.
    """
    project = MiniProject(tmp_path / "project")
    empty_channel = make(tmp_path / "conda-forge")
    text = MANIFEST.replace('"conda-forge"', f'"{empty_channel.as_uri()}"')
    project.stack("app", text=text)
    copy = project.root / "build" / "stacks" / "app"
    project.forge("lock", "app", FORGE_CHANNEL=url, FORGE_BASE="conda-forge")
    lock = (copy / "pixi.lock").read_text()
    assert f"- conda: {url}/noarch/gamma-1.0-h1234567_0.conda" in lock
    assert f"    - url: {url}/\n" in lock
    digests = []
    cache = tmp_path / "cache"
    for _ in range(2):
        shutil.rmtree(cache, ignore_errors=True)
        shutil.rmtree(copy / ".pixi", ignore_errors=True)
        project.forge("install", "app", RATTLER_CACHE_DIR=str(cache))
        assert len(list(cache.glob("pkgs/*-1.0-h1234567_0*"))) >= 3, (
            "the packages must be in the cache"
        )
        digests.append(digest_tree(copy / ".pixi/envs/default", copy))
    assert digests[0] == digests[1]
    (copy / ".pixi/envs/default/share/beta").write_text("changed")
    assert digest_tree(copy / ".pixi/envs/default", copy) != digests[0]
    done = project.forge("run", "app", "--", "sh", "-c", 'echo "$CONDA_PREFIX"')
    assert done.stdout.strip() == str(copy / ".pixi/envs/default")


def choose_positions(file: Path) -> list[int]:
    """Return positions of bytes that are distributed over a file, from the first to the last."""
    size = file.stat().st_size
    return sorted({size * i // (POSITIONS - 1) for i in range(POSITIONS - 1)} | {size - 1})


def test_every_flipped_byte_is_found(url: str, channel: Path, tmp_path: Path) -> None:
    """If the server sends a package with one wrong bit, no file of the package is installed."""
    good = workspace(tmp_path / "good", url)
    good.lock()

    def install(fault: tuple[Path, int]) -> tuple[str, str]:
        """Run an install that the fault must stop; return the package's URL and the message."""
        file, position = fault
        flipped_url = f"{url}/flip/{position}/{file.name}"
        stack = workspace(tmp_path / file.stem / str(position), flipped_url)
        stack.lock_file.write_text(good.lock_file.read_text().replace(url, flipped_url))
        with pytest.raises(Failed) as error:
            stack.install("default", stack.folder / "cache")
        assert not (stack.prefix("default") / "share" / file.name.split("-")[0]).exists()
        return f"{flipped_url}/noarch/{file.name}: ", str(error.value)

    faults = []
    for file in channel.glob("noarch/*.conda"):
        faults += [(file, position) for position in choose_positions(file)]
    assert len(faults) >= 50
    with ThreadPoolExecutor(4) as pool:
        for start, message in pool.map(install, faults):
            assert message.startswith(start) and "\n" not in message, message
    assert good.install("default", tmp_path / "cache") == 3


def test_a_download_that_breaks_in_the_middle_is_repeated(url: str, tmp_path: Path) -> None:
    """A download is repeated twice. After the third break, an error names the package."""
    stack = workspace(tmp_path / "2", f"{url}/cut/2")
    stack.lock()
    assert stack.install("default", stack.folder / "cache") == 3
    stack = workspace(tmp_path / "3", f"{url}/cut/3")
    stack.lock()
    with pytest.raises(NotAttempted, match=r"cut/3/noarch/.*cannot be read"):
        stack.install("default", stack.folder / "cache")
    assert {2, 3} <= set(DamagingHandler.breaks.values()), (
        "the server must interrupt one download twice and another three times"
    )


def test_a_good_copy_in_the_cache_is_used(url: str, tmp_path: Path) -> None:
    """A package in the cache is not downloaded, so a damaged copy on the server has no effect."""
    good = workspace(tmp_path / "good", url)
    good.lock()
    good.install("default", tmp_path / "cache")
    flipped_url = f"{url}/flip/99/.conda"
    other = workspace(tmp_path / "other", flipped_url)
    other.lock_file.write_text(good.lock_file.read_text().replace(url, flipped_url))
    assert other.install("default", tmp_path / "cache") == 3
    digest = digest_tree(good.prefix("default") / "share", tmp_path)
    assert digest_tree(other.prefix("default") / "share", tmp_path) == digest


def test_a_missing_package_is_named(url: str, tmp_path: Path) -> None:
    """An install fails if the server lacks a locked package, and the message names the package."""
    stack = workspace(tmp_path / "app", url)
    stack.lock()
    text = stack.lock_file.read_text()
    stack.lock_file.write_text(text.replace("noarch/alpha-1.0", "noarch/alpha-9.9"))
    with pytest.raises(Failed, match=r"/noarch/alpha-9\.9-h1234567_0\.conda: .*404"):
        stack.install("default", tmp_path / "cache")
    stack.lock_file.write_text(text)
    stack.install("default", tmp_path / "cache")
    child = os.fork()
    if child == 0:
        stack.run("default", ["false"])  # This call replaces the process.
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_silent_channel_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotAttempted, match=r"not answer, or .*127\.0\.0\.1:9/.*refused") as error:
        workspace(tmp_path, "http://127.0.0.1:9").lock()
    assert "\n" not in str(error.value)
