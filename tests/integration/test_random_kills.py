# SPDX-License-Identifier: BSD-3-Clause
"""After a kill at a random moment and `forge clean`, a command completes and leaves nothing behind.

A kill ends the process group of a command. The command "stop" is a build that is not killed: it
runs with `--stop-after`, and its time is up at the random moment.

A moment is the number N of a system call that faults.c counts. The calls of the driver, of
rattler-build, of build scripts and of pixi are counted together. N is drawn at random, with the
seed FORGE_SEED, from 1 to the number of calls in a run that is not killed.
"""

import itertools
import math
import os
import random
import re
import shutil
import signal
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
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

# Cases: a command, and "pixi" if the command runs with pixi. With FORGE_KILLS=60, at least sixty
# kills are distributed over all cases. If FORGE_KILLS is no number, a selection of the cases is
# killed once each.
KILLS = os.environ.get("FORGE_KILLS", "")
if KILLS.isdecimal():
    commands = ("build", "publish", "install", "lock")
    CASES = [*itertools.product(commands, ("", "pixi")), ("stop", "")]
    KILLS_PER_CASE = math.ceil(int(KILLS) / len(CASES))
else:
    CASES = [("build", ""), ("publish", ""), ("install", "pixi"), ("lock", "pixi"), ("stop", "")]
    KILLS_PER_CASE = 1
NEVER = 1 << 30  # A number of calls that no command reaches.
FOLDERS = ("build", "cache", "channel", "home", "public", "stacks", "tmp")

STAGES = """\
source checks/stages.sh
make() {{ touch object; }}
install() {{ mkdir -p "$PREFIX/share"; cp object "$PREFIX/share/{name}"; }}
run_stages make
install
end_stages
"""


def list_paths(root: Path) -> set[str]:
    """Return the paths of all files and folders. Links are not followed.

    The name of an index's shard is the hash of its content, which includes the time at which the
    channel was published. So the names of shards are replaced.
    """
    paths = set()
    for name in FOLDERS:
        for folder, folders, files in os.walk(root / name):
            paths |= {os.path.relpath(f"{folder}/{n}", root) for n in [*folders, *files]}
    return {re.sub("/shards/[0-9a-f]+", "/shards/X", path) for path in paths}


def read_files(root: Path, *patterns: str) -> dict[str, bytes]:
    contents = {}
    for pattern in patterns:
        for file in root.glob(pattern):
            if file.is_file():
                contents[str(file.relative_to(root))] = file.read_bytes()
    return contents


@dataclass
class State:
    """The state of a world before or after a command.

    Attributes:
        paths: The paths of all files and folders.
        lock: The content of the lock.
        prefix: The contents of the files at the top of the environment.
    """

    paths: set[str]
    lock: dict[str, bytes]
    prefix: dict[str, bytes]

    @classmethod
    def read(cls, root: Path) -> "State":
        lock = read_files(root, "build/stacks/app/pixi.lock")
        prefix = read_files(root, "build/stacks/app/.pixi/envs/default/*")
        return cls(list_paths(root), lock, prefix)


@dataclass
class Case:
    """A command, and what it does when it is not killed.

    Attributes:
        world: The world that the command works on.
        command: The command.
        variables: Environment variables of the command.
        template: A copy of the world before the command.
        counts: A file to which faults.c writes the number of calls.
        before: The world before the command.
        after: The world after the command and `forge clean`.
        num_calls: The number of calls of the command that faults.c counts.
    """

    world: World
    command: str
    variables: dict[str, str]
    template: Path
    counts: Path
    before: State = field(init=False)
    after: State = field(init=False)
    num_calls: int = field(init=False)

    def __post_init__(self) -> None:
        reset(self.template, self.world.root)
        self.before = State.read(self.world.root)
        done = self.run(self.command, NEVER)
        assert done.code == 0, done.output
        self.num_calls = struct.unpack("ii", self.counts.read_bytes())[0]
        done = self.run("clean")
        assert done.code == 0 and "removed" not in done.output, done.output
        self.after = State.read(self.world.root)

    def run(self, command: str, call: int = 0) -> Ended:
        """Run a command. If `call` is not 0, kill its process group at the call of that number.

        faults.c counts the calls. In the case "stop", the signal is SIGALRM.
        """
        self.counts.write_bytes(bytes(8))
        if not call:
            return self.world.run(command, FAULT="", FAULT_COUNT="", **self.variables)
        is_alarm = self.command == "stop" and call != NEVER
        fault = f"any:{call}:{-signal.SIGALRM if is_alarm else KILL}:{self.world.root}"
        count = str(self.counts)
        return self.world.run(command, fault, FAULT=fault, FAULT_COUNT=count, **self.variables)

    def kill(self, call: int) -> None:
        """Kill the command at a call, check all files, and require that a second run completes."""
        root = self.world.root
        reset(self.template, root)
        done = self.run(self.command, call)
        if self.command == "stop":
            # The driver handles SIGALRM only within the time box. Elsewhere the signal ends the
            # process.
            expected_codes = (NOT_FINISHED, -signal.SIGALRM)
        else:
            expected_codes = (-signal.SIGKILL,)
        assert done.code in expected_codes and "Traceback" not in done.output, done
        if done.code == NOT_FINISHED:
            assert processes_in(root / "build") == []
        wait_for_engines(root)
        done = self.run("clean")
        assert done.code == 0 and "Traceback" not in done.output, done.output
        self.require_safe()
        done = self.run(self.command)
        assert done.code == 0, done.output
        assert self.run("clean").output == ""
        assert State.read(root) == self.after

    def require_safe(self) -> None:
        """Require that nothing was lost or left behind, after a kill and `forge clean`."""
        root = self.world.root
        now = State.read(root)
        unknown = now.paths - self.before.paths - self.after.paths
        # Packages that are built and not yet tested may stay. A stopped build may stay, too.
        for path in root.glob("build/staging/*/*"):
            if path.name.startswith("whole-") or path.name == "stopped.json":
                unknown = {name for name in unknown if not name.startswith("build/staging/")}
        assert unknown == set(), "the killed command must leave none of these paths behind"
        missing = (self.before.paths & self.after.paths) - now.paths
        assert all("/.pixi/envs/" in name for name in missing), (
            "the killed command must lose no other files"
        )
        patterns = ("channel/*/*.conda", "public/*/*.conda")
        packages = read_files(self.template, *patterns)
        assert read_files(root, *patterns).items() >= packages.items()
        assert now.lock in (self.before.lock, self.after.lock)
        assert now.prefix in ({}, self.before.prefix, self.after.prefix)
        if (root / "public").exists():
            view((root / "public").as_uri())


def is_engine(process: Path, root: Path) -> bool:
    """Return whether a folder of /proc belongs to an engine that builds in `root`."""
    try:
        command = (process / "cmdline").read_bytes()
    except OSError:
        return False
    return b"forge.building.engine" in command and bytes(root) in command


def wait_for_engines(root: Path) -> None:
    """Wait until no engine runs. The engine can outlive its driver for a moment."""
    while any(is_engine(process, root) for process in Path("/proc").glob("[0-9]*")):
        time.sleep(0.05)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, host_base: None) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("kills"))
    with world.forks:
        yield world


def prepare_build(world: World, in_stages: bool) -> dict[str, str]:
    """Make a project in which alpha is built and beta, which requires alpha, is not.

    Returns:
        Environment variables for the command.
    """
    shutil.rmtree(world.root)
    project = MiniProject(world.root)
    for name in ("home", "tmp"):
        (world.root / name).mkdir()
    project.recipe("alpha")
    variables = {"FORGE_BASE": "host"}
    done = world.forks("build-all", **variables)
    assert done.code == 0, done.output
    if in_stages:
        source = f"[{{path: {RECIPES / 'checks'}, target_directory: checks}}]"
        test = "test -f $PREFIX/share/beta"
        recipe = project.recipe("beta", test=test, source=source, script=STAGES) / "recipe.yaml"
    else:
        recipe = project.recipe("beta") / "recipe.yaml"
    requirements = "requirements:\n  host: [alpha]\n"
    recipe.write_text(recipe.read_text().replace("requirements:\n", requirements))
    return variables


def prepare_stack(world: World, command: str, variables: dict[str, str]) -> None:
    """Make an installed stack, and publish a newer package.

    For the command `install`, the newer package is already locked. For the command `publish`, only
    restore the world's template.
    """
    reset(world.template, world.root)
    if command == "publish":
        return
    for earlier_command in ("lock", "install"):
        assert world.run(earlier_command, **variables).code == 0
    source = Source(world.root / "channel")
    source.make("beta", "2.0")
    PublishedChannel(world.public).publish(source)
    if command == "install":
        assert world.run("lock", **variables).code == 0


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(
    request: pytest.FixtureRequest, world: World, tmp_path_factory: pytest.TempPathFactory
) -> Case:
    command, with_pixi = request.param
    if with_pixi:
        pixi.require("pixi")
    variables = {"FORGE_NO_PIXI": "1"}
    if with_pixi:
        variables = {"FORGE_NO_PIXI": "", "PIXI_CACHE_DIR": f"{world.root}/cache"}
    if command in ("build", "stop"):
        variables |= prepare_build(world, in_stages=command == "stop")
    else:
        variables["FORGE_BASE"] = "conda-forge"
        prepare_stack(world, command, variables)
    folder = tmp_path_factory.mktemp("case")
    shutil.copytree(world.root, folder / "template", symlinks=True)
    return Case(world, command, variables, folder / "template", folder / "counts")


@pytest.mark.parametrize("number", range(KILLS_PER_CASE))
def test_a_drawn_kill(case: Case, number: int) -> None:
    """A number in FORGE_KILLS sets the number of kills. FORGE_SEED is the seed of their moments."""
    rng = random.Random(f"{SEED} {case.command} {case.variables['FORGE_NO_PIXI']} {number}")
    call = rng.randint(1, case.num_calls)
    print(f"{case.command} killed at call {call} of {case.num_calls}")
    case.kill(call)
