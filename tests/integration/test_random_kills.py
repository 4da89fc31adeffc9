# SPDX-License-Identifier: BSD-3-Clause
"""Commands whose process group is killed at drawn moments, and what `forge clean` makes of it.

Also builds whose time is up then (`--stop-after`): "stop".

A moment is the N-th call that changes a file, counted over the driver, rattler-build, its scripts
and pixi together; N is drawn by FORGE_SEED, between the first and the last of an unkilled run.
"""

import os
import random
import re
import shutil
import signal
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import pixi
from support.faults import KILL, Ended, reset
from support.mutants import SEED
from support.project import MiniProject, processes_in
from support.recipe_checks import RECIPES
from support.static_channel import Source, view
from support.world import World

from forge.channel.publish import PublishedChannel
from forge.cli.time_box import NOT_FINISHED

# FORGE_KILLS=60 draws sixty in all, of each command with pixi and without
CASES = [(name, how) for name in ("build", "publish", "install", "lock") for how in ("", "pixi")]
CASES.append(("stop", ""))
KILLS = os.environ.get("FORGE_KILLS", "")
CASES = CASES if KILLS.isdecimal() else [CASES[n] for n in (0, 2, 5, 7, 8)]
EACH = -(-int(KILLS) // len(CASES)) if KILLS.isdecimal() else 1
NEVER = 1 << 30  # the number of a call that does not come
PLACES = ("build", "cache", "channel", "home", "public", "stacks", "tmp")

STAGES = """\
source checks/stages.sh
make() {{ touch object; }}
install() {{ mkdir -p "$PREFIX/share"; cp object "$PREFIX/share/{name}"; }}
run_stages make
install
end_stages
"""


def listing(root: Path) -> set[str]:
    """What is there; links are not followed.

    The record in a shard has the time of its publish, and a shard is named by its content.
    """
    found = set()
    for name in PLACES:
        for place, folders, files in os.walk(root / name):
            found |= {os.path.relpath(f"{place}/{n}", root) for n in [*folders, *files]}
    return {re.sub("/shards/[0-9a-f]+", "/shards/X", name) for name in found}


def contents(root: Path, *patterns: str) -> dict[str, bytes]:
    files = (f for pattern in patterns for f in root.glob(pattern) if f.is_file())
    return {str(file.relative_to(root)): file.read_bytes() for file in files}


@dataclass
class Case:
    """A command with what there was before it, and after one that nobody killed."""

    world: World
    command: str
    own: dict[str, str]
    template: Path
    counts: Path

    def run(self, command: str, call: int = 0) -> Ended:
        """Run a command; kill its process group at a call."""
        number = -signal.SIGALRM if self.command == "stop" and call != NEVER else KILL
        fault = f"any:{call}:{number}:{self.world.root}" if call else ""
        self.counts.write_bytes(bytes(8))
        return self.world.run(
            command, fault, FAULT=fault, FAULT_COUNT=str(self.counts) if call else "", **self.own
        )

    def unkilled(self) -> None:
        """Have the listings before and after, and the number of calls between them."""
        reset(self.template, self.world.root)
        self.before = listing(self.world.root)
        self.held = self.contents()
        done = self.run(self.command, NEVER)
        assert done.code == 0, done.output
        self.calls = struct.unpack("ii", self.counts.read_bytes())[0]
        done = self.run("clean")
        assert done.code == 0 and "removed" not in done.output, done.output
        self.after, self.made = listing(self.world.root), self.contents()

    def contents(self) -> list[dict[str, bytes]]:
        """The lock, and the files of the environment: each must be the old or the new."""
        root, prefix = self.world.root, "build/stacks/app/.pixi/envs/default"
        return [contents(root, "build/stacks/app/pixi.lock"), contents(root, f"{prefix}/*")]

    def kill(self, call: int) -> None:
        """Kill the command at a call, look at what is left, and have the same command end."""
        root = self.world.root
        reset(self.template, root)
        done = self.run(self.command, call)
        # outside of the time box SIGALRM ends the process, as SIGKILL does
        ends = {"stop": (NOT_FINISHED, -signal.SIGALRM)}.get(self.command, (-signal.SIGKILL,))
        assert done.code in ends and "Traceback" not in done.output, done
        if done.code == NOT_FINISHED:
            assert processes_in(root / "build") == []
        wait_for_engines(root)
        first = self.run("clean")
        assert first.code == 0 and "Traceback" not in first.output, first.output
        now = listing(root)
        # built and not yet tested, or stopped
        progress = {f for f in now if f.startswith("build/staging/")}
        kept = root.glob("build/staging/*/*")
        if not any(f.name.startswith("whole-") or f.name == "stopped.json" for f in kept):
            progress = set()
        assert now - self.before - self.after - progress == set(), "left behind"
        lost = (self.before & self.after) - now
        assert all("/.pixi/envs/" in name for name in lost), "lost"
        packages = ("channel/*/*.conda", "public/*/*.conda")
        whole = contents(self.template, *packages)
        assert contents(root, *packages).items() >= whole.items()
        lock, prefix = self.contents()
        assert lock in (self.held[0], self.made[0])
        assert prefix in ({}, self.held[1], self.made[1])
        if (root / "public").exists():
            view((root / "public").as_uri())
        done = self.run(self.command)
        assert done.code == 0, done.output
        assert self.run("clean").output == ""
        assert listing(root) == self.after and self.contents() == self.made


def wait_for_engines(root: Path) -> None:
    """The kernel kills a driver's engine after the driver, and not at once."""

    def lives(entry: Path) -> bool:
        try:
            words = (entry / "cmdline").read_bytes()
            return b"forge.building.engine" in words and bytes(root) in words
        except OSError:
            return False

    while any(map(lives, Path("/proc").glob("[0-9]*"))):
        time.sleep(0.05)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, host_base: None) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("kills"))
    with made.forks:
        yield made


def build_template(world: World, in_stages: bool) -> dict[str, str]:
    """A project in which alpha is built, and beta is not, which is built with it, or in stages."""
    shutil.rmtree(world.root)
    project = MiniProject(world.root)
    for name in ("home", "tmp"):
        (world.root / name).mkdir()
    project.recipe("alpha")
    own = {"FORGE_BASE": "host"}
    done = world.forks("build-all", **own)
    assert done.code == 0, done.output
    if in_stages:
        source = f"[{{path: {RECIPES / 'checks'}, target_directory: checks}}]"
        test = "test -f $PREFIX/share/beta"
        recipe = project.recipe("beta", test=test, source=source, script=STAGES) / "recipe.yaml"
    else:
        recipe = project.recipe("beta") / "recipe.yaml"
    needs = "requirements:\n  host: [alpha]\n"
    recipe.write_text(recipe.read_text().replace("requirements:\n", needs))
    return own


def stack_template(world: World, command: str, own: dict[str, str]) -> None:
    """A stack that is locked and installed, and a newer package; `lock`ed where that comes next."""
    reset(world.template, world.root)
    if command == "publish":
        return
    for word in ("lock", "install"):
        assert world.run(word, **own).code == 0
    source = Source(world.root / "channel")
    source.make("beta", "2.0")
    PublishedChannel(world.public).publish(source)
    if command == "install":
        assert world.run("lock", **own).code == 0


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(
    request: pytest.FixtureRequest, world: World, tmp_path_factory: pytest.TempPathFactory
) -> Case:
    command, with_pixi = request.param
    if with_pixi:
        pixi.require("pixi")
    own = {"FORGE_NO_PIXI": "1"}
    if with_pixi:
        own = {"FORGE_NO_PIXI": "", "PIXI_CACHE_DIR": f"{world.root}/cache"}
    if command in ("build", "stop"):
        own |= build_template(world, in_stages=command == "stop")
    else:
        own["FORGE_BASE"] = "conda-forge"
        stack_template(world, command, own)
    folder = tmp_path_factory.mktemp("case")
    shutil.copytree(world.root, folder / "template", symlinks=True)
    made = Case(world, command, own, folder / "template", folder / "counts")
    made.unkilled()
    return made


@pytest.mark.parametrize("number", range(EACH))
def test_a_drawn_kill(case: Case, number: int, tmp_path: Path) -> None:
    """FORGE_KILLS=60 draws sixty; FORGE_SEED=N draws others."""
    drawn = random.Random(f"{SEED} {case.command} {case.own['FORGE_NO_PIXI']} {number}")
    call = drawn.randint(1, case.calls)
    print(f"{case.command} killed at call {call} of {case.calls}")
    case.kill(call)
