# SPDX-License-Identifier: BSD-3-Clause
"""A disk that fails at one call, and a driver that is killed at one: nothing is lost, all is said.

The calls are fixed: the N-th of a kind whose path contains some text (support/faults.c).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import pixi
from support.faults import KILL, Ended, Forks, library, reset
from support.project import CHECKOUT
from support.small_channel import MANIFEST
from support.static_channel import Source, findings, view

from forge.channel import revisions
from forge.channel.publish import StaticChannel
from forge.conda.location import Location

ALPHA = "alpha-1.0-h1234567_0"
COMMANDS = {
    "publish": ["publish", "--to", "{}/public"],
    "yank": ["channel", "yank", "{}/public", ALPHA],
    "lock": ["lock", "app", "--channel", "{}/public"],
    "install": ["install", "app"],
    "channel verify": ["channel", "verify", "{}/public"],
    "verify": ["verify", f"{{}}/channel/noarch/{ALPHA}.conda"],
}


class World:
    """A project with a channel, what is published of it, a stack that is locked, and a home."""

    def __init__(self, folder: Path) -> None:
        self.root, self.template = folder / "world", folder / "template"
        self.public = self.root / "public"
        self._make()
        root = str(self.root)
        own = {"FORGE_ROOT": root, "FORGE_BASE": "conda-forge", "FORGE_NO_PIXI": "1"}
        own |= {"HOME": f"{root}/home", "TMPDIR": f"{root}/tmp", "COLUMNS": "500"}
        own |= {"RATTLER_CACHE_DIR": f"{root}/cache"}
        self.forks = Forks(library(folder), own)
        self.template = self.root  # until it has a lock
        assert self.run("lock").code == 0
        self.template = folder / "template"
        shutil.copytree(self.root, self.template)

    def _make(self) -> None:
        self.root.mkdir()
        shutil.copy(CHECKOUT / "variants.yaml", self.root)
        shutil.copytree(CHECKOUT / "bases", self.root / "bases")
        for name in ("recipes", "home", "tmp", "stacks/app"):
            (self.root / name).mkdir(parents=True)
        text = re.sub("(?m)^platforms = .*", 'platforms = ["linux-64"]', MANIFEST)  # any pixi's
        text = text.replace(', "conda-forge"', "")
        (self.root / "stacks/app/pixi.toml").write_text(text)
        source = Source(self.root / "channel")
        for name in ("alpha", "beta"):
            source.make(name)
        StaticChannel(self.public).publish(source)
        source.make("gamma")

    def run(self, command: str, fault: str = "", **environment: str) -> Ended:
        words = (word.format(self.root) for word in COMMANDS[command])
        return self.forks(*words, fault=fault, **environment)

    def require_whole(self, memory: Path) -> None:
        """Whatever became of a command: clients see a whole channel; lock and packages are kept."""
        assert view(self.public.as_uri()) >= 2
        revisions.require_current(Location(self.public), memory)
        for name in ("build/stacks/app/pixi.lock", "channel/noarch/*.conda"):
            for file in self.template.glob(name):
                now = self.root / file.relative_to(self.template)
                assert now.read_bytes() == file.read_bytes()

    def require_done(self, command: str, **environment: str) -> None:
        """The same command again comes to its end, to the result that it always has, and cleans."""
        done = self.run(command, **environment)
        assert done.code == 0, done.said
        assert findings(self.public) == []
        if command == "publish":
            assert (self.public / "noarch/gamma-1.0-h1234567_0.conda").exists()
        if command == "yank":
            assert (
                f"noarch/{ALPHA}.conda"
                in revisions.state(revisions.read(Location(self.public)).revisions)[1]
            )
        if command == "install":
            prefix = self.root / "build/stacks/app/.pixi/envs/default"
            assert [(prefix / name).read_text() for name in ("alpha", "beta")] == ["alpha", "beta"]
        for name in (".partial-*", ".staging", ".forge-*"):
            assert list(self.root.rglob(name)) == []
        assert list((self.root / "tmp").iterdir()) == []


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("faults"))
    with made.forks:
        yield made


# command, kind of the call, which of them, what it says, part of its path
FAULTS = [
    ("publish", "open", 1, "ENOSPC", "/public/.staging/partial"),
    ("publish", "write", 1, "ENOSPC", "/public/.staging/partial"),
    ("publish", "fsync", 1, "EIO", "/public/.staging/partial"),
    ("publish", "rename", 1, "EXDEV", "/public/noarch/gamma"),
    ("publish", "rename", 1, "EIO", "/public/forge/gamma"),
    ("publish", "mkdir", 1, "ENOSPC", "/public/.staging"),
    ("publish", "link", 1, "EXDEV", "/public/.staging/noarch/alpha"),
    ("publish", "write", 3, "ENOSPC", "patch-0-0.conda"),
    ("publish", "fsync", 1, "EIO", "/.tmp/repodata.json."),
    ("publish", "rename", 1, "EIO", "/public/revisions/log.json"),
    ("publish", "rename", 2, "EIO", "/public/revisions/log.json"),
    ("publish", "rename", 1, "ESTALE", "/public/noarch/repodata.json"),
    ("publish", "rename", 1, "EIO", "/public/noarch/shards"),
    ("publish", "flock", 1, "ESTALE", "/channel/.lock"),
    ("publish", "flock", 1, "EIO", "/public/.lock"),
    ("publish", "open", 1, "ESTALE", "/public/.lock"),
    ("publish", "write", 1, "ENOSPC", "/package/info/index.json"),
    ("publish", "mkdir", 1, "EIO", "/cache/pkgs/.forge-"),
    ("publish", "write", 1, "ENOSPC", "/public/.staging/log.json"),
    ("publish", "open", 1, "EIO", "/public/.staging/run_exports.json"),
    ("yank", "rename", 1, "EIO", "/public/linux-64/repodata.json.zst"),
    ("yank", "write", 1, "ENOSPC", "/public/.staging/repodata.json.zst"),
    ("lock", "open", 1, "ENOSPC", ".partial-pixi.toml"),
    ("lock", "write", 1, "ENOSPC", ".partial-pixi.lock"),
    ("lock", "fsync", 1, "EIO", ".partial-pixi.lock"),
    ("lock", "rename", 1, "ESTALE", "/stacks/app/pixi.lock"),
    ("lock", "open", 1, "ENOSPC", "/stacks/app/.made-pixi.lock"),
    ("lock", "write", 1, "EIO", "/stacks/app/.made-pixi.lock"),
    ("lock", "unlink", 1, "EIO", "/stacks/app/.made-pixi.lock"),
    ("lock", "flock", 1, "EIO", "/.pixi/.lock"),
    ("lock", "unlink", 1, "EIO", ".partial-pixi.lock"),
    ("install", "mkdir", 1, "ENOSPC", "/cache/pkgs/.forge-"),
    ("install", "flock", 1, "ESTALE", "/cache/pkgs/.forge.lock"),
    ("install", "write", 1, "ENOSPC", "/package/alpha"),
    ("install", "rename", 1, "EXDEV", "/cache/pkgs/alpha"),
    ("install", "write", 1, "ENOSPC", f"/cache/pkgs/{ALPHA}.lock"),
    ("install", "mkdir", 1, "ENOSPC", "/envs/default/conda-meta"),
    ("install", "fsync", 1, "EIO", "/conda-meta/prefix_record_"),
    ("install", "open", 1, "ENOSPC", "/conda-meta/prefix_record_"),
    ("install", "rename", 1, "EIO", "/conda-meta/installed-from"),
    ("install", "fsync", 1, "EIO", "/conda-meta/.partial-installed-from"),
    ("install", "unlink", 1, "EIO", "/conda-meta/installed-from"),
    ("channel verify", "mkdir", 1, "ENOSPC", "/cache/pkgs/.forge-"),
    ("verify", "write", 1, "ENOSPC", "/package/alpha"),
]


@pytest.mark.parametrize(("command", "kind", "number", "name", "part"), FAULTS)
def test_a_call_that_fails(
    command: str, kind: str, number: int, name: str, part: str, world: World, tmp_path: Path
) -> None:
    """One clear message, an exit code, nothing lost, and the next run completes it."""
    code = getattr(errno, name)
    reset(world.template, world.root)
    done = world.run(command, f"{kind}:{number}:{code}:{part}")
    assert done.code in (1, 2, 3), done
    assert os.strerror(code) in done.said or f"os error {code}" in done.said, done.said
    assert not any(bad in done.said for bad in ("Traceback", "fault of forge", "panicked"))
    assert len(done.said) < 2000 and done.said.count("\nerror: ") <= 1, done.said
    world.require_whole(tmp_path / "seen.json")
    world.require_done(command)


def test_a_record_that_rattler_does_not_see_fail(world: World, tmp_path: Path) -> None:
    """It says nothing of a record without content, and can read no prefix that has one."""
    reset(world.template, world.root)
    done = world.run("install", f"write:1:{errno.ENOSPC}:/conda-meta/prefix_record_")
    assert done.code == 1 and "cannot install into" in done.said, done
    world.require_whole(tmp_path / "seen.json")
    world.require_done("install")


# the call that changes a file, of some 600, 150 and 28, at which the driver is killed
KILLS = {"publish": range(20, 600, 39), "install": range(4, 124, 8), "lock": range(1, 28, 3)}
EVERY = 1 if os.environ.get("FORGE_KILLS") else 5


@pytest.mark.parametrize(
    ("command", "call"), [(name, n) for name, calls in KILLS.items() for n in calls[::EVERY]]
)
def test_a_kill(command: str, call: int, world: World, tmp_path: Path) -> None:
    """FORGE_KILLS=all tries all of them."""
    reset(world.template, world.root)
    done = world.run(command, f"any:{call}:{KILL}:{world.root}")
    assert done.code == -signal.SIGKILL, done
    world.require_whole(tmp_path / "seen.json")
    world.require_done(command)


PIXI_KILLS = ["lock open:1", "install any:5", "install any:25", "install any:75",
              "lock write:1", "install any:15", "install any:40", "install any:55",
              "install any:90"]  # fmt: skip


@pytest.mark.parametrize("kill", PIXI_KILLS[::EVERY])
def test_a_kill_of_pixi(kill: str, world: World, tmp_path: Path) -> None:
    """The lock is not there before: pixi writes it in place, so that a kill there loses it."""
    pixi.require("pixi")
    own = {"FORGE_NO_PIXI": "", "PIXI_CACHE_DIR": f"{world.root}/cache"}
    command, call = kill.split()
    part = "/stacks/app/pixi.lock" if command == "lock" else str(world.root)
    reset(world.template, world.root)
    lock = world.root / "build/stacks/app/pixi.lock"
    if command == "lock":
        lock.unlink()
    done = world.run(command, FAULT=f"{call}:{KILL}:{part}", **own)
    assert done.code not in (0, -signal.SIGKILL), done  # the driver itself lives, and says so
    if command == "install":
        world.require_whole(tmp_path / "seen.json")
    world.require_done(command, FAULT="", **own)
    assert lock.read_text().count("conda: ") == 4, "two packages, each named twice"
