# SPDX-License-Identifier: BSD-3-Clause
"""If a system call fails, or the driver is killed at a system call, nothing is lost.

A test selects a call by its kind, a part of its path, and its number (support/faults.c).
"""

import errno
import os
import signal
from collections.abc import Iterator

import pytest
from support import pixi
from support.faults import KILL, reset
from support.world import ALPHA, World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A project, a channel and the process that runs commands."""
    world = World(tmp_path_factory.mktemp("faults"))
    with world.forks:
        yield world


# For each fault: the command; the kind and the number of the call that fails; the call's error; and
# a part of the call's path.
FAULTS = [
    ("publish", "open", 1, "ENOSPC", "/public/noarch/.partial-gamma"),
    ("publish", "write", 1, "ENOSPC", "/public/noarch/.partial-gamma"),
    ("publish", "fsync", 1, "EIO", "/public/noarch/.partial-gamma"),
    ("publish", "rename", 1, "EXDEV", "/public/noarch/gamma"),
    ("publish", "mkdir", 1, "ENOSPC", "/public/.forge-"),
    ("publish", "link", 1, "EXDEV", "/noarch/alpha"),
    ("publish", "write", 3, "ENOSPC", "patch-0-0.conda"),
    ("publish", "fsync", 1, "EIO", "/.tmp/repodata.json."),
    ("publish", "rename", 1, "EIO", "/public/withdrawn.json"),
    ("publish", "rename", 1, "ESTALE", "/public/noarch/repodata.json"),
    ("publish", "rename", 1, "EIO", "/public/noarch/shards"),
    ("publish", "flock", 1, "ESTALE", "/channel/.lock"),
    ("publish", "flock", 1, "EIO", "/public/.lock"),
    ("publish", "open", 1, "ESTALE", "/public/.lock"),
    ("publish", "write", 1, "ENOSPC", "/package/info/index.json"),
    ("publish", "mkdir", 1, "EIO", "/cache/pkgs/.forge-"),
    ("publish", "write", 1, "ENOSPC", "/.partial-withdrawn.json"),
    ("withdraw", "rename", 1, "EIO", "/public/withdrawn.json"),
    ("withdraw", "rename", 1, "EIO", "/public/linux-64/repodata.json.zst"),
    ("withdraw", "fsync", 1, "EIO", "/.tmp/repodata.json."),
    ("withdraw", "mkdir", 1, "ENOSPC", "/public-withdrawn"),
    ("withdraw", "write", 1, "ENOSPC", "/public-withdrawn/noarch/.partial-"),
    ("withdraw", "unlink", 1, "EIO", f"/public/noarch/{ALPHA}.conda"),
    ("lock", "open", 1, "ENOSPC", ".partial-pixi.toml"),
    ("lock", "write", 1, "ENOSPC", ".partial-pixi.lock"),
    ("lock", "fsync", 1, "EIO", ".partial-pixi.lock"),
    ("lock", "rename", 1, "ESTALE", "/stacks/app/pixi.lock"),
    ("lock", "open", 2, "ENOSPC", "/pixi.lock"),
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
]


@pytest.mark.parametrize(("command", "kind", "number", "name", "part"), FAULTS)
def test_a_call_that_fails(
    command: str, kind: str, number: int, name: str, part: str, world: World
) -> None:
    """The driver ends with one clear message. The next run succeeds, and nothing is lost."""
    code = getattr(errno, name)
    reset(world.template, world.root)
    done = world.run(command, f"{kind}:{number}:{code}:{part}")
    assert done.code in (1, 2, 3), done
    assert os.strerror(code) in done.output or f"os error {code}" in done.output, done.output
    for text in ("Traceback", "bug in forge", "panicked"):
        assert text not in done.output
    assert len(done.output) < 2000, done.output
    assert done.output.count("\nerror: ") <= 1, done.output
    world.require_whole()
    world.require_done(command)


def test_a_record_that_rattler_does_not_see_fail(world: World) -> None:
    """The installation fails if a record in conda-meta is empty.

    rattler does not report that it could not write the record. It fails later in the same
    installation, when it reads the records of the prefix.
    """
    reset(world.template, world.root)
    done = world.run("install", f"write:1:{errno.ENOSPC}:/conda-meta/prefix_record_")
    assert done.code == 1, done
    assert "cannot install into" in done.output, done
    world.require_whole()
    world.require_done("install")


# By default, only one in five kills is tried. With FORGE_KILLS, all kills are tried.
STEP = 1 if os.environ.get("FORGE_KILLS") else 5
# The command, and the number of the call at which the driver is killed. Only calls of the kinds in
# faults.c are counted: publish has about 600 of these calls, install 150 and lock 28.
KILLS = [("publish", number) for number in range(20, 600, 39)[::STEP]]
KILLS += [("install", number) for number in range(4, 124, 8)[::STEP]]
KILLS += [("lock", number) for number in range(1, 28, 3)[::STEP]]


@pytest.mark.parametrize(("command", "call"), KILLS)
def test_a_kill(command: str, call: int, world: World) -> None:
    """After a kill nothing is lost, and the next run succeeds."""
    reset(world.template, world.root)
    done = world.run(command, f"any:{call}:{KILL}:{world.root}")
    assert done.code == -signal.SIGKILL, done
    world.require_whole()
    world.require_done(command)


PIXI_KILLS = [
    "lock open:1",
    "install any:5",
    "install any:25",
    "install any:75",
    "lock write:1",
    "install any:15",
    "install any:40",
    "install any:55",
    "install any:90",
]


@pytest.mark.parametrize("kill", PIXI_KILLS[::STEP])
def test_a_kill_of_pixi(kill: str, world: World) -> None:
    """A kill of pixi is reported, and the next run of the driver succeeds.

    The test removes the lock beforehand, because pixi does not write a lock that is up to date.
    """
    pixi.require("pixi")
    variables = {"FORGE_NO_PIXI": "", "PIXI_CACHE_DIR": f"{world.root}/cache"}
    command, call = kill.split()
    part = "/pixi.lock" if command == "lock" else str(world.root)
    reset(world.template, world.root)
    lock = world.root / "build/stacks/app/pixi.lock"
    if command == "lock":
        lock.unlink()
    done = world.run(command, FAULT=f"{call}:{KILL}:{part}", **variables)
    # The driver itself survives and reports the kill.
    assert done.code not in (0, -signal.SIGKILL), done
    if command == "install":
        world.require_whole()
    world.require_done(command, FAULT="", **variables)
    assert lock.read_text().count("conda: ") == 4, (
        "the lock must name each of the two packages twice"
    )
