# SPDX-License-Identifier: BSD-3-Clause
"""Stacks from a channel that a web server serves: locks, installs from them, what is refused."""

import contextlib
import json
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
from support.static_channel import Source

from forge.bases import PUBLISHED
from forge.channel import StaticChannel
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


def mock_of_pixi(project: MiniProject, command: str) -> dict[str, str]:
    """An environment with a pixi on PATH that does this, whatever it is asked for."""
    (mock := project.root / "bin/pixi").parent.mkdir()
    mock.write_text(f"#!/bin/sh\n{command}\n")
    mock.chmod(0o755)
    return {"FORGE_NO_PIXI": "", "PATH": f"{mock.parent}:{project.environment['PATH']}"}


def test_what_nobody_attested_is_not_installed(url: str, tmp_path: Path) -> None:
    """Where the stack says who publishes the channel, whatever address that has; nor by pixi."""
    who = f'[tool.strix-forge.publishers."{PUBLISHED}"]\nidentity = "https://github.com/us/x"\n'
    project, copy = stack(tmp_path, MANIFEST + who)
    project.forge("lock", "app", FORGE_CHANNEL=url, **BASE)
    pixi = mock_of_pixi(project, f"touch {tmp_path}/asked")
    for own in ({}, pixi):
        error = project.forge("install", "app", code=1, **own).stderr
        assert "no attestations are advertised" in error and "/noarch/alpha-1.0" in error
    assert not (copy / ".pixi/envs").exists() and not (tmp_path / "asked").exists()
    manifest = project.root / "stacks/app/pixi.toml"
    manifest.write_text(manifest.read_text().replace(who, ""))
    project.forge("install", "app", **pixi)
    assert (tmp_path / "asked").exists(), "it was there to be asked"


def test_a_channel_that_lost_revisions(channel: Path, tmp_path: Path) -> None:
    """By lock and install, until that is accepted."""
    here = tmp_path / "channel"
    shutil.copytree(channel, here)
    entry = {
        "revision": 1,
        "added": [],
        "yanked": [],
        "restored": [],
        "time": "2026-01-01T00:00:00",
    }
    log = here / "revisions/log.json"
    log.parent.mkdir()
    two = {"serial": 2, "revisions": [entry, entry | {"revision": 2}]}
    log.write_text(json.dumps(two))
    project, _ = stack(tmp_path)
    with served(here) as url:
        project.forge("lock", "app", FORGE_CHANNEL=url, **BASE)
        log.write_text(json.dumps(two | {"revisions": [entry]}))
        for words in (["lock", "app", "--channel", url], ["install", "app"]):
            error = project.forge(*words, code=1, **BASE).stderr
            assert "has 1 revisions (serial 2), and not the 2" in error
        project.forge("install", "app", "--accept-older")


class Fickle(QuietHandler):
    """Shows an index as it is, and from the second time on as it was, below /was."""

    asked: ClassVar[Counter[str]] = Counter()

    def do_GET(self) -> None:
        self.asked[self.path] += 1
        was = "repodata" in self.path and self.asked[self.path] > 1
        self.path = f"/{'was' if was else 'is'}{self.path}"
        super().do_GET()


def test_another_index_for_the_solver_than_for_the_check(tmp_path: Path) -> None:
    """It would give a yanked build to a fresh lock: the lock stays as it was."""
    source = Source(tmp_path / "source")
    builds = [source.make(name) for name in ("alpha", "beta")]
    StaticChannel(tmp_path / "is").publish(source)
    shutil.copytree(tmp_path / "is", tmp_path / "was")
    StaticChannel(tmp_path / "is").publish(None, [builds[0]])
    project, copy = stack(tmp_path)
    with served(tmp_path, Fickle) as url:
        error = project.forge("lock", "app", code=1, FORGE_CHANNEL=url, **BASE).stderr
    assert "alpha-1.0-h1234567_0.conda was locked, and is yanked, or not in the index" in error
    assert not (copy / "pixi.lock").exists()


def test_a_lock_that_pixi_wrote_is_held_against_the_index(tmp_path: Path) -> None:
    """A yanked build in it: the lock stays as it was."""
    source = Source(tmp_path / "source")
    builds = [source.make(name) for name in ("alpha", "beta")]
    StaticChannel(tmp_path / "channel").publish(source)
    project, copy = stack(tmp_path)
    with served(tmp_path / "channel") as url:
        project.forge("lock", "app", FORGE_CHANNEL=url, **BASE)
        (lock := copy / "pixi.lock").rename(tmp_path / "made")
        StaticChannel(tmp_path / "channel").publish(None, [builds[0]])
        pixi = mock_of_pixi(project, f"cp {tmp_path}/made ${{3%/*}}/pixi.lock")
        error = project.forge("lock", "app", code=1, FORGE_CHANNEL=url, **BASE, **pixi).stderr
    assert "alpha-1.0-h1234567_0.conda was locked, and is yanked, or not in the index" in error
    assert not lock.exists()


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
