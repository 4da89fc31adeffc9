# SPDX-License-Identifier: BSD-3-Clause
"""Stacks from a channel that a web server serves: locks, installs from them, what is refused."""

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

POSITIONS = 20  # in each of three packages


class Flipping(QuietHandler):
    """/flip/N/FILE is the channel with the lowest bit of byte N of FILE wrong.

    /cut/N is the channel whose server hangs up in the middle of each package N times.
    """

    hung_up: ClassVar[Counter[str]] = Counter()

    def do_GET(self) -> None:
        if self.path.startswith("/cut/"):
            times, self.path = self.path.removeprefix("/cut/").split("/", 1)
            return self.cut(int(times), f"/{self.path}")
        if not self.path.startswith("/flip/"):
            return super().do_GET()
        position, file, path = self.path.removeprefix("/flip/").split("/", 2)
        if not path.endswith(file):
            self.path = f"/{path}"
            return super().do_GET()
        body = bytearray(Path(self.directory, path).read_bytes())
        body[int(position)] ^= 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the installer hangs up at the first nonsense
            self.wfile.write(body)
        return None

    def cut(self, times: int, path: str) -> None:
        self.path, key = path, f"{times} {path}"
        if not path.endswith(".conda") or self.hung_up[key] == times:
            return super().do_GET()
        self.hung_up[key] += 1
        body = Path(self.directory, path[1:]).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])
        return None


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "channel"
    return make(folder, "alpha", "gamma", "beta", depends=["alpha", "gamma >=1"])


@pytest.fixture(scope="module")
def url(channel: Path) -> Iterator[str]:
    with served(channel, Flipping) as address:
        yield address


def stack(root: Path, text: str = MANIFEST) -> tuple[MiniProject, Path]:
    """A project with one stack, in whose conda-forge there is nothing; and the stack's copy."""
    project = MiniProject(root / "project")
    nothing = make(root / "conda-forge")
    project.stack("app", text=text.replace('"conda-forge"', f'"{nothing.as_uri()}"'))
    return project, project.root / "build" / "stacks" / "app"


BASE = {"FORGE_BASE": "conda-forge"}


def test_lock_and_install_through_a_web_server(url: str, tmp_path: Path) -> None:
    """The commands, on an empty package cache; a second install gives the same tree."""
    project, copy = stack(tmp_path)
    project.forge("lock", "app", FORGE_CHANNEL=url, **BASE)
    lock = (copy / "pixi.lock").read_text()
    assert f"- conda: {url}/noarch/gamma-1.0-h1234567_0.conda" in lock
    assert f"    - url: {url}/\n" in lock
    trees, cache = [], tmp_path / "cache"
    for _ in range(2):
        shutil.rmtree(cache, ignore_errors=True)
        shutil.rmtree(copy / ".pixi", ignore_errors=True)
        project.forge("install", "app", RATTLER_CACHE_DIR=str(cache))
        assert len(list(cache.glob("pkgs/*-1.0-h1234567_0*"))) >= 3, "the cache was not used"
        trees.append(digest_tree(copy / ".pixi/envs/default", copy))
    assert trees[0] == trees[1]
    (copy / ".pixi/envs/default/share/beta").write_text("changed")
    assert digest_tree(copy / ".pixi/envs/default", copy) != trees[0]
    show = project.forge("run", "app", "--", "sh", "-c", 'echo "$CONDA_PREFIX"')
    assert show.stdout.strip() == str(copy / ".pixi/envs/default")


def positions(file: Path) -> list[int]:
    size = file.stat().st_size
    return sorted({size * i // (POSITIONS - 1) for i in range(POSITIONS - 1)} | {size - 1})


def test_every_flipped_byte_is_found(url: str, channel: Path, tmp_path: Path) -> None:
    """One bit wrong in what the server sends: nothing of that package is installed."""
    good = workspace(tmp_path / "good", url)
    good.lock()

    def install(file: Path, position: int) -> tuple[str, str]:
        flipped = f"{url}/flip/{position}/{file.name}"
        chosen = workspace(tmp_path / file.stem / str(position), flipped)
        chosen.lock_file.write_text(good.lock_file.read_text().replace(url, flipped))
        with pytest.raises(Failed) as error:
            chosen.install("default", chosen.folder / "cache")
        assert not (chosen.prefix("default") / "share" / file.name.split("-")[0]).exists()
        return f"{flipped}/noarch/{file.name}: ", str(error.value)

    todo = [(file, n) for file in channel.glob("noarch/*.conda") for n in positions(file)]
    assert len(todo) >= 50
    with ThreadPoolExecutor(4) as pool:
        for flipped, message in pool.map(lambda work: install(*work), todo):
            assert message.startswith(flipped) and "\n" not in message, message
    assert good.install("default", tmp_path / "cache") == 3


def test_a_download_that_breaks_in_the_middle_is_repeated(url: str, tmp_path: Path) -> None:
    """Twice; a server that never sends the rest is an error that names the package."""
    for times in (2, 3):
        chosen = workspace(tmp_path / str(times), f"{url}/cut/{times}")
        chosen.lock()
        if times == 2:
            assert chosen.install("default", chosen.folder / "cache") == 3
        else:
            with pytest.raises(NotAttempted, match=r"cut/3/noarch/.*cannot be read"):
                chosen.install("default", chosen.folder / "cache")
    assert {2, 3} <= set(Flipping.hung_up.values()), "the server hung up"


def test_a_good_copy_in_the_cache_is_used(url: str, tmp_path: Path) -> None:
    """Nothing is downloaded then, so nothing that the server sends can matter."""
    good = workspace(tmp_path / "good", url)
    good.lock()
    good.install("default", tmp_path / "cache")
    wrong = f"{url}/flip/99/.conda"
    chosen = workspace(tmp_path / "other", wrong)
    chosen.lock_file.write_text(good.lock_file.read_text().replace(url, wrong))
    assert chosen.install("default", tmp_path / "cache") == 3
    trees = [digest_tree(w.prefix("default") / "share", tmp_path) for w in (good, chosen)]
    assert trees[0] == trees[1]


def test_a_missing_package_is_named(url: str, tmp_path: Path) -> None:
    chosen = workspace(tmp_path / "app", url)
    chosen.lock()
    text = chosen.lock_file.read_text()
    chosen.lock_file.write_text(text.replace("noarch/alpha-1.0", "noarch/alpha-9.9"))
    missing = r"/noarch/alpha-9\.9-h1234567_0\.conda: .*404"
    with pytest.raises(Failed, match=missing):
        chosen.install("default", tmp_path / "cache")
    chosen.lock_file.write_text(text)
    chosen.install("default", tmp_path / "cache")
    if not (child := os.fork()):  # `run` becomes the command
        chosen.run("default", ["false"])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_silent_channel_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotAttempted, match=r"does not answer: .*127\.0\.0\.1:9/.*refused") as error:
        workspace(tmp_path, "http://127.0.0.1:9").lock()
    assert "\n" not in str(error.value)
