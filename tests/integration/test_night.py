# SPDX-License-Identifier: BSD-3-Clause
"""tools/night.py with the real driver: five recipes, two stacks, a conda-forge on loopback.

Stand-ins are the recipes, the validator, and conda-forge, which has one package. It is killed at
fixed points: before the n-th change or command of the script, or in the middle of a package's
script, of its test, or of the validator.
"""

import asyncio
import fcntl
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rattler.index import index_fs
from support import small_channel, stand_in
from support.kills import needs_time
from support.night import KILLED, Machine, read_archive
from support.project import CHECKOUT, MiniProject
from support.servers import Revalidating, served

from forge.bases import CONDA_FORGE
from forge.files import sha256_file

# the first time the night ends in the middle of this, and that ends this
KILL = 'if mkdir "{mark}.done" 2>/dev/null; then kill -9 $(cat "{pid}"); exec sleep 600; fi\n'
INSTALL = 'mkdir -p "$PREFIX/share"\ntouch "$PREFIX/share/{name}"\n'
VALIDATOR = """\
mkdir -p "$PREFIX/bin"
cat > "$PREFIX/bin/strix-validate" <<'END'
#!/bin/sh
# strix-validate run --evidence FOLDER
test -e "$CONDA_PREFIX/share/alpha" && mkdir -p "$3" || exit 1
. "%s"
echo '{{"summary": {{"passed": 7, "failed": 0, "skipped": 1}}}}' > "$3/record.json"
END
chmod +x "$PREFIX/bin/strix-validate"
"""
COST = {"download": 0, "disk": 0.01, "memory": 0.1, "cpu_hours": 6}


class Owner:
    """A clone with a driver, a home folder, a GPU as the kernel lists it, and what is asked for."""

    def __init__(self, root: Path, conda_forge: str, requests: list[str]) -> None:
        self.machine, self.requests = Machine(root), requests
        self.root = self.machine.clone
        self.to, self.marks = self.root / "build/night", root / "marks"
        self.home, self.pid = root / "home", root / "pid"
        self.marks.mkdir()
        self.project = MiniProject(self.root)
        (self.root / "build/sources").unlink()  # of this clone alone
        shutil.copy(CHECKOUT / "LICENSE", root)
        driver = CHECKOUT / "src/forge"
        (self.root / "forge").write_text(f'#!/bin/sh\nexec {sys.executable} {driver} "$@"\n')
        (self.root / "forge").chmod(0o755)
        stand_in.write_mirrors(self.home, {CONDA_FORGE: conda_forge})
        self.recipes(root, conda_forge)

    def killing(self, name: str) -> Path:
        """A script that kills the night once."""
        script = self.marks / name
        script.write_text(KILL.format(mark=script, pid=self.pid))
        return script

    def recipes(self, root: Path, conda_forge: str) -> None:
        """alpha needs conda-forge, beta alpha; broken fails, and lost needs it."""
        archive = root / "web/alpha-1.0.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(root / "LICENSE", "alpha/LICENSE")
        source = f"[{{url: {conda_forge}/{archive.name}, sha256: {sha256_file(archive)}}}]"
        building = f"sh {self.killing('alpha-builds')}\n{INSTALL}"
        self.add("alpha", ["lib"], script=building, source=source, extra={"cost": COST})
        self.add("beta", ["alpha"], script=INSTALL, test=f"sh {self.killing('beta-tests')}")
        self.add("broken", [], script='test -e "$RECIPE_DIR/mended" || exit 1\n' + INSTALL)
        self.add("lost", ["broken"], script=INSTALL)
        self.add("strix-validate", [], script=VALIDATOR % self.killing("validates"))
        for stack, names in {"one": ["alpha", "beta"], "two": ["alpha", "lost"]}.items():
            self.project.stack(stack, *names, "strix-validate")

    def add(self, name: str, run: list[str], **more: Any) -> None:
        folder = self.project.recipe(name, run, **more)
        shutil.copy(CHECKOUT / "LICENSE", folder)
        recipe = folder / "recipe.yaml"
        licence = "license: BSD-3-Clause\n  license_file: LICENSE"
        recipe.write_text(recipe.read_text().replace("license: BSD-3-Clause", licence))

    def night(self, killed_before: int = 0, *words: str) -> subprocess.CompletedProcess[str]:
        script = [str(killed_before), str(self.machine.script), *words]
        environment = stand_in.clean_environment(self.home) | {
            "FORGE_ROOT": str(self.root),
            "NIGHT_PID": str(self.pid),
            "PATH": self.project.environment["PATH"],
        }
        done = subprocess.run(
            [sys.executable, "-c", KILLED, *script],
            env=environment,
            text=True,
            capture_output=True,
            check=False,
        )
        for lock in (self.root / "build/.lock", self.to / "packages/.lock"):
            if lock.exists():  # the driver ends with its night, but not at once
                with lock.open() as held:
                    fcntl.flock(held, fcntl.LOCK_EX)
        return done


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    requests: list[str] = []

    class Noting(Revalidating):
        def log_request(self, *_: object) -> None:
            requests.append(self.path)

    web = tmp_path / "web"
    small_channel.package(web, "lib", "1.0")
    for version, build in (("3.12.1", "0_cpython"), ("3.13.1", "0_cp313")):  # the base's
        small_channel.package(web, "python", version, build)
    (web / "linux-64").mkdir()
    asyncio.run(index_fs(web, write_zst=True, write_shards=False))
    with served(web, Noting) as url:
        yield Owner(tmp_path, url, requests)


# 4 for the first archive, then 7 for each step: its log (2), the command, the archive and its room
KILLS = {
    "before the first archive": 4,
    "before the build": 15,
    "in alpha's build script": 0,
    "in beta's test": 0,
    "before the archive of the build": 17,
    "before one is installed": 33,
    "in one's validation": 0,
}


@needs_time
def test_a_night_that_is_killed_seven_times(owner: Owner) -> None:
    """It ends with the archive; a package that fails costs what needs it, and no more."""
    for when, before in KILLS.items():
        killed = owner.night(before)
        assert killed.returncode == -signal.SIGKILL, f"{when}: {killed.stdout}{killed.stderr}"
        if when != "before the first archive":
            assert "night/README.md" in read_archive(owner.to)
    done = owner.night()
    assert done.returncode == 1, done.stdout + done.stderr
    files = read_archive(owner.to)
    failed = re.findall(r"(?m)^\| (\S+) \| -?[1-9]", files["night/README.md"])
    assert failed == ["commit", "build", "lock-two"], files["night/README.md"]
    assert re.search(r"(?m)^broken +1\.0 .* failed +", files["night/build.log"])
    assert re.search(r"(?m)^lost +1\.0 .* not attempted +", files["night/build.log"])
    assert "exit 1" in files["night/packages/broken.log"]
    assert '"passed": 7' in files["night/evidence/one/record.json"]
    published = {path.name.split("-1.0")[0] for path in owner.to.glob("channel/*/*.conda")}
    assert published == {"alpha", "beta", "strix-validate"}
    assert len([*owner.marks.glob("*.done")]) == 3, "not every script was killed"
    assert owner.requests.count("/alpha-1.0.tar.gz") == 1, "a source was fetched twice"

    (owner.root / "recipes/broken/mended").touch()
    done = owner.night()
    assert done.returncode == 0, done.stdout + done.stderr
    files = read_archive(owner.to)
    assert {"night/evidence/one/record.json", "night/evidence/two/record.json"} <= files.keys()
    assert len([*owner.to.glob("channel/*/*.conda")]) == 5


def test_a_machine_that_is_too_small(owner: Owner) -> None:
    """Before anything is spent; unit/test_night.py has a machine without a GPU."""
    recipe = owner.root / "recipes/alpha/recipe.yaml"
    recipe.write_text(recipe.read_text().replace('"disk": 0.01', '"disk": 9999999'))
    assert owner.night().returncode == 1
    files = read_archive(owner.to)
    assert "not started: needs 9999999.0 GiB of disk in " in files["night/build.log"]
    assert files.keys() == {f"night/{name}" for name in ("README.md", "build.log", "commit.log")}
    assert all("/repodata" in path or path.endswith(".zst") for path in owner.requests)
    assert not (owner.root / "build/sources").exists()
