# SPDX-License-Identifier: BSD-3-Clause
"""docs/night.py with the real driver: five recipes, two stacks, a conda-forge on loopback.

Stand-ins are the recipes, the validator, and conda-forge, which has one package. It is killed at
fixed points: before the n-th command or rename of the script, or in the middle of a package's
script, of its test, or of the validator.
"""

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rattler.index import index_fs
from support import small_channel, stand_in
from support.night import Machine, archived
from support.project import CHECKOUT, MiniProject
from support.servers import Revalidating, served

from forge.bases import CONDA_FORGE
from forge.files import sha256_file

# `python -c NIGHT N SCRIPT WORDS`: SIGKILL before the N-th command or rename of the script
NIGHT = """
import os, runpy, signal, sys
left, path = int(sys.argv[1]), os.environ["NIGHT_PID"]
open(path, "w").write(str(os.getpid()))
def hook(event, _):
    global left
    if event in ("os.rename", "subprocess.Popen"):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
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
COSTS = "alpha: {download: 0, disk: 0.01, memory: 0.1, cpu_hours: 6}\n"


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
        self.add("alpha", ["lib"], script=building, source=source)
        self.add("beta", ["alpha"], script=INSTALL, test=f"sh {self.killing('beta-tests')}")
        self.add("broken", [], script='test -e "$RECIPE_DIR/mended" || exit 1\n' + INSTALL)
        self.add("lost", ["broken"], script=INSTALL)
        self.add("strix-validate", [], script=VALIDATOR % self.killing("validates"))
        (self.root / "recipes/costs.yaml").write_text(COSTS)
        for stack, names in {"one": ["alpha", "beta"], "two": ["alpha", "lost"]}.items():
            self.project.stack(stack, *names, "strix-validate")

    def add(self, name: str, run: list[str], **more: str) -> None:
        folder = self.project.recipe(name, run, **more)
        shutil.copy(CHECKOUT / "LICENSE", folder)
        recipe = folder / "recipe.yaml"
        licence = "license: BSD-3-Clause\n  license_file: LICENSE"
        recipe.write_text(recipe.read_text().replace("license: BSD-3-Clause", licence))

    def night(self, killed_before: int = 0, *words: str) -> subprocess.CompletedProcess[str]:
        script = [str(killed_before), str(self.machine.script), *words]
        environment = stand_in.clean_environment(self.home) | {
            "FORGE_ROOT": str(self.root), "NIGHT_PID": str(self.pid),
            "PATH": self.project.environment["PATH"],
        }  # fmt: skip
        return subprocess.run(
            [sys.executable, "-c", NIGHT, *script], env=environment, text=True,
            capture_output=True, check=False,
        )  # fmt: skip


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


# git, plan, git, sources, note, build, note, publish, note; then lock, note, install, note,
# validate and note of each stack; git, archive. What is done before is left out.
KILLS = {
    "before plan": 2,
    "before the note of sources": 5,
    "in alpha's build script": 0,
    "in beta's test": 0,
    "before the note of build": 5,
    "before publish": 6,
    "before the note of publish": 7,
    "before one is installed": 10,
    "in one's validation": 0,
    "before the archive": 11,
}


def test_a_night_that_is_killed_ten_times(owner: Owner) -> None:
    """It ends with the archive; a package that fails costs what needs it, and no more."""
    said = ""
    for when, before in KILLS.items():
        killed = owner.night(before)
        said += killed.stdout
        assert killed.returncode == -signal.SIGKILL, f"{when}: {killed.stdout}{killed.stderr}"
        if (state := owner.to / "state.json").exists():
            json.loads(state.read_text())  # never half written
        assert not (owner.to / "night.tar.gz").exists()
    done = owner.night()
    assert done.returncode == 1, done.stdout + done.stderr
    files = archived(owner.to)
    page = files["night/README.md"]
    assert "**Published (3)**: alpha 1.0, beta 1.0, strix-validate 1.0\n" in page
    assert "**Not built**: broken (failed), lost (not attempted)\n" in page
    assert "**Checks, one**: 7 passed, 0 failed, 1 skipped\n" in page and "two**" not in page
    failed = re.findall(r"(?m)^\| (\S+) \| failed", page)
    assert failed == ["build", "lock-two"], page
    logs = {"night/logs/build.log", "night/build-logs/broken.log"}
    assert logs | {"night/state.json", "night/evidence/one/record.json"} <= {*files}
    assert len([*owner.marks.glob("*.done")]) == 3, "not every script was killed"
    assert owner.requests.count("/alpha-1.0.tar.gz") == 1, "a source was fetched twice"
    assert re.search(r"== build: about [\d.]+ hours left", said)

    (owner.root / "recipes/broken/mended").touch()
    done = owner.night()
    assert done.returncode == 0, done.stdout + done.stderr
    page = archived(owner.to)["night/README.md"]
    assert "**Published (5)**" in page and "**Not built**: nothing" in page
    assert page.count("7 passed") == 2 and "failed (" not in page
    assert len(page.splitlines()) < 40


@pytest.mark.parametrize("lacks", ["conda-forge", "disk"])
def test_what_is_missing_is_one_line_before_anything_is_spent(owner: Owner, lacks: str) -> None:
    """unit/test_night.py has a machine without a GPU."""
    if lacks == "conda-forge":
        stand_in.write_mirrors(owner.home, {CONDA_FORGE: "http://127.0.0.1:1"})
        says = "whether conda-forge has all that is needed is not known: .+"
    else:
        costs = owner.root / "recipes/costs.yaml"
        costs.write_text(costs.read_text().replace("disk: 0.01", "disk: 9999999"))
        says = "a build would not start: it needs 9999999.0 GiB of disk in .+; .+ GiB are free"
    done = owner.night()
    assert done.returncode == 3, done.stdout + done.stderr
    assert re.fullmatch(f"night: not started: {says}\n", done.stderr)
    assert all("/repodata" in path or path.endswith(".zst") for path in owner.requests)
    left = [path.name for path in owner.to.rglob("*") if path.is_file()]
    assert sorted(left) == [".lock", ".step"]
    assert not (owner.root / "build/sources").exists()
