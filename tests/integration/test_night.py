# SPDX-License-Identifier: BSD-3-Clause
"""tools/night.py completes a night with the real driver, although it is killed several times.

The tests have five small recipes, of which one is a validator, and two stacks. conda-forge is a
server on loopback. tools/night.py is killed at fixed points: before one of its own changes or
commands, or while a build script, a package test or the validator runs.
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

# A line of a script that kills tools/night.py when the line runs for the first time. The script
# then sleeps until the driver ends, which stops the script.
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
    """The owner of a machine with the GPU, who starts tools/night.py in a clone.

    Attributes:
        machine: The simulated machine.
        requests: The paths that were requested from conda-forge.
        root: The clone.
        output: The folder of the night.
        marks: A folder for the scripts that kill tools/night.py.
        home: The owner's home folder.
        pid: A file with the process id of the night.
        project: The clone, as a project.
    """

    def __init__(self, root: Path, conda_forge: str, requests: list[str]) -> None:
        self.machine = Machine(root)
        self.requests = requests
        self.root = self.machine.clone
        self.output = self.root / "build/night"
        self.marks = root / "marks"
        self.home = root / "home"
        self.pid = root / "pid"
        self.marks.mkdir()
        self.project = MiniProject(self.root)
        (self.root / "build/sources").unlink()  # gives the clone its own sources
        shutil.copy(CHECKOUT / "LICENSE", root)
        driver = CHECKOUT / "src/forge"
        (self.root / "forge").write_text(f'#!/bin/sh\nexec {sys.executable} {driver} "$@"\n')
        (self.root / "forge").chmod(0o755)
        stand_in.write_mirrors(self.home, {CONDA_FORGE: conda_forge})
        self.write_recipes(root, conda_forge)

    def write_killer(self, name: str) -> Path:
        """Write a script that kills tools/night.py when the script runs for the first time."""
        script = self.marks / name
        script.write_text(KILL.format(mark=script, pid=self.pid))
        return script

    def write_recipes(self, root: Path, conda_forge: str) -> None:
        """Write the recipes and the stacks.

        beta requires alpha, which requires a package of conda-forge. lost requires broken, whose
        build fails.
        """
        archive = root / "web/alpha-1.0.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(root / "LICENSE", "alpha/LICENSE")
        source = f"[{{url: {conda_forge}/{archive.name}, sha256: {sha256_file(archive)}}}]"
        script = f"sh {self.write_killer('alpha-builds')}\n{INSTALL}"
        self.add_recipe("alpha", ["lib"], script=script, source=source, extra={"cost": COST})
        test = f"sh {self.write_killer('beta-tests')}"
        self.add_recipe("beta", ["alpha"], script=INSTALL, test=test)
        self.add_recipe("broken", [], script='test -e "$RECIPE_DIR/mended" || exit 1\n' + INSTALL)
        self.add_recipe("lost", ["broken"], script=INSTALL)
        self.add_recipe("strix-validate", [], script=VALIDATOR % self.write_killer("validates"))
        self.project.stack("one", "alpha", "beta", "strix-validate")
        self.project.stack("two", "alpha", "lost", "strix-validate")

    def add_recipe(self, name: str, run: list[str], **options: Any) -> None:
        """Write a recipe whose package has a license file. MiniProject.recipe gets `options`."""
        folder = self.project.recipe(name, run, **options)
        shutil.copy(CHECKOUT / "LICENSE", folder)
        recipe = folder / "recipe.yaml"
        license_lines = "license: BSD-3-Clause\n  license_file: LICENSE"
        recipe.write_text(recipe.read_text().replace("license: BSD-3-Clause", license_lines))

    def run_night(self, killed_before: int = 0) -> subprocess.CompletedProcess[str]:
        """Run tools/night.py, and wait until its driver has ended.

        Args:
            killed_before: The number of the change or command before which tools/night.py is
                killed. 0 if it is not killed in this way.
        """
        environment = stand_in.clean_environment(self.home) | {
            "FORGE_ROOT": str(self.root),
            "NIGHT_PID": str(self.pid),
            "PATH": self.project.environment["PATH"],
        }
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(killed_before), str(self.machine.script)],
            env=environment,
            text=True,
            capture_output=True,
            check=False,
        )
        # The driver releases its locks when it ends, some time after tools/night.py was killed.
        for file in (self.root / "build/.lock", self.output / "packages/.lock"):
            if file.exists():
                with file.open() as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)
        return done


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    requests: list[str] = []

    class RecordingHandler(Revalidating):
        def log_request(self, *_: object) -> None:
            requests.append(self.path)

    web = tmp_path / "web"
    small_channel.package(web, "lib", "1.0")
    # The conda-forge base builds packages for these versions of Python.
    for version, build in (("3.12.1", "0_cpython"), ("3.13.1", "0_cp313")):
        small_channel.package(web, "python", version, build)
    (web / "linux-64").mkdir()
    asyncio.run(index_fs(web, write_zst=True, write_shards=False))
    with served(web, RecordingHandler) as url:
        yield Owner(tmp_path, url, requests)


# The number of the change or command before which tools/night.py is killed. 0 means that a build
# script, a package test or the validator kills it. Two changes reserve room on the disk, and the
# first archive takes 4 more. Each step takes 7 changes and commands: 2 for the log, 1 for the
# command, and 4 for the archive.
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
    """After seven kills, a last run of tools/night.py completes the archive.

    A failed package costs only the packages that require it.
    """
    for point, number in KILLS.items():
        done = owner.run_night(number)
        assert done.returncode == -signal.SIGKILL, f"{point}: {done.stdout}{done.stderr}"
        if point != "before the first archive":
            assert "night/README.md" in read_archive(owner.output)
    done = owner.run_night()
    assert done.returncode == 1, done.stdout + done.stderr
    files = read_archive(owner.output)
    failed = re.findall(r"(?m)^\| (\S+) \| -?[1-9]", files["night/README.md"])
    assert failed == ["commit", "build", "lock-two"], files["night/README.md"]
    assert re.search(r"(?m)^broken +1\.0 .* failed +", files["night/build.log"])
    assert re.search(r"(?m)^lost +1\.0 .* not attempted +", files["night/build.log"])
    assert "exit 1" in files["night/packages/broken.log"]
    assert '"passed": 7' in files["night/evidence/one/record.json"]
    published = {path.name.split("-1.0")[0] for path in owner.output.glob("channel/*/*.conda")}
    assert published == {"alpha", "beta", "strix-validate"}
    assert len(list(owner.marks.glob("*.done"))) == 3, (
        "each of the three scripts must kill tools/night.py"
    )
    assert owner.requests.count("/alpha-1.0.tar.gz") == 1, "the source must be fetched only once"

    (owner.root / "recipes/broken/mended").touch()
    done = owner.run_night()
    assert done.returncode == 0, done.stdout + done.stderr
    files = read_archive(owner.output)
    assert {"night/evidence/one/record.json", "night/evidence/two/record.json"} <= files.keys()
    assert len(list(owner.output.glob("channel/*/*.conda"))) == 5


def test_a_machine_that_is_too_small(owner: Owner) -> None:
    """A machine with too little disk is refused before anything is fetched or built.

    unit/test_night.py tests a machine without a GPU.
    """
    recipe = owner.root / "recipes/alpha/recipe.yaml"
    recipe.write_text(recipe.read_text().replace('"disk": 0.01', '"disk": 9999999'))
    assert owner.run_night().returncode == 1
    files = read_archive(owner.output)
    assert "not started: needs 9999999.0 GiB of disk in " in files["night/build.log"]
    assert files.keys() == {f"night/{name}" for name in ("README.md", "build.log", "commit.log")}
    assert all("/repodata" in path or path.endswith(".zst") for path in owner.requests)
    assert not (owner.root / "build/sources").exists()
