# SPDX-License-Identifier: BSD-3-Clause
"""docs/night.py with the real driver: five recipes, two stacks, a conda-forge on loopback.

Stand-ins are the recipes and conda-forge, which has one package.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rattler.index import index_fs
from support import small_channel, stand_in
from support.project import CHECKOUT, MiniProject
from support.servers import Revalidating, served

from forge.bases import CONDA_FORGE, PUBLISHED
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
# the first time the night ends in the middle of this, and the driver ends this
KILL = 'if mkdir "{mark}.done" 2>/dev/null; then kill -9 $(cat "{pid}"); sleep 600; fi\n'
INSTALL = 'mkdir -p "$PREFIX/share"\ntouch "$PREFIX/share/{name}"\n'
VALIDATOR = """\
mkdir -p "$PREFIX/bin"
cat > "$PREFIX/bin/strix-validate" <<'END'
#!/bin/sh
# strix-validate run --evidence FOLDER
test -e "$CONDA_PREFIX/share/alpha" && mkdir -p "$3" || exit 1
%s
echo '{{"summary": {{"passed": 7, "failed": 0, "skipped": 1}}}}' > "$3/record.json"
END
chmod +x "$PREFIX/bin/strix-validate"
"""
STACK = f"""\
[workspace]
name = "NAME"
channels = ["{PUBLISHED}", "conda-forge"]
platforms = ["linux-64"]
[dependencies]
"""
COSTS = "alpha: {download: 0, disk: 0.01, memory: 0.1, cpu_hours: 6}\n"


class Owner:
    """A clone with a driver, a home folder, a GPU as the kernel lists it, and what is asked for."""

    def __init__(self, root: Path, conda_forge: str, requests: list[str]) -> None:
        self.root, self.requests = root / "clone", requests
        self.to, self.marks = self.root / "build/night", root / "marks"
        self.home, self.pid = root / "home", root / "pid"
        self.marks.mkdir()
        self.project = MiniProject(self.root)
        (self.root / "build/sources").unlink()  # of this clone alone
        (self.root / "docs").mkdir()
        shutil.copy(CHECKOUT / "docs/night.py", self.root / "docs")
        shutil.copy(CHECKOUT / "LICENSE", root)
        driver = CHECKOUT / "src/forge"
        (self.root / "forge").write_text(f'#!/bin/sh\nexec {sys.executable} {driver} "$@"\n')
        (self.root / "forge").chmod(0o755)
        stand_in.write_mirrors(self.home, {CONDA_FORGE: conda_forge})
        self.machine(root)
        self.recipes(root, conda_forge)

    def machine(self, root: Path) -> None:
        """A GPU, and a kernel that is new enough."""
        (root / "kfd/1").mkdir(parents=True)
        (root / "kfd/1/properties").write_text("gfx_target_version 110501\n")
        (root / "device").touch()
        for old, new in {
            "(6, 18, 4)": "(1, 0, 0)",
            "/sys/class/kfd/kfd/topology/nodes": str(root / "kfd"),
            "/dev/kfd": str(root / "device"),
        }.items():
            script = self.root / "docs/night.py"
            script.write_text(script.read_text().replace(old, new))

    def killing(self, name: str) -> str:
        """A command that kills the night once."""
        script = self.marks / name
        script.write_text(KILL.format(mark=script, pid=self.pid))
        return f"sh {script}"

    def recipes(self, root: Path, conda_forge: str) -> None:
        """alpha needs conda-forge, beta alpha; broken fails, and lost needs it."""
        archive = root / "web/alpha-1.0.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(root / "LICENSE", "alpha/LICENSE")
        source = f"[{{url: {conda_forge}/{archive.name}, sha256: {sha256_file(archive)}}}]"
        building = f"{self.killing('alpha-builds')}\n{INSTALL}"
        self.add("alpha", ["lib"], script=building, source=source)
        testing = f"[\"sh -c '{self.killing('beta-tests').strip()}'\"]"
        self.add("beta", ["alpha"], script=INSTALL)
        recipe = self.root / "recipes/beta/recipe.yaml"
        recipe.write_text(recipe.read_text().replace("['test -n ok']", testing))
        self.add("broken", [], script='test -e "$RECIPE_DIR/mended" || exit 1\n' + INSTALL)
        self.add("lost", ["broken"], script=INSTALL)
        self.add("strix-validate", [], script=VALIDATOR % self.killing("validates"))
        (self.root / "recipes/costs.yaml").write_text(COSTS)
        for stack, names in {"one": ["alpha", "beta"], "two": ["alpha", "lost"]}.items():
            folder = self.root / "stacks" / stack
            folder.mkdir(parents=True)
            wanted = "".join(f'{name} = "*"\n' for name in [*names, "strix-validate"])
            (folder / "pixi.toml").write_text(STACK.replace("NAME", stack) + wanted)

    def add(self, name: str, run: list[str], **more: str) -> None:
        folder = self.project.recipe(name, run, **more)
        shutil.copy(CHECKOUT / "LICENSE", folder)
        recipe = folder / "recipe.yaml"
        licence = "license: BSD-3-Clause\n  license_file: LICENSE"
        recipe.write_text(recipe.read_text().replace("license: BSD-3-Clause", licence))

    def night(self, killed_before: int = 0, *words: str) -> subprocess.CompletedProcess[str]:
        script = [str(killed_before), str(self.root / "docs/night.py"), *words]
        environment = self.project.environment | {"HOME": str(self.home)}
        environment = stand_in.clean_environment(self.home) | {
            "FORGE_ROOT": str(self.root), "NIGHT_PID": str(self.pid), "PATH": environment["PATH"],
        }  # fmt: skip
        return subprocess.run(
            [sys.executable, "-c", NIGHT, *script], env=environment, text=True,
            capture_output=True, check=False,
        )  # fmt: skip

    def archived(self) -> dict[str, str]:
        with tarfile.open(self.to / "night.tar.gz") as tar:
            files = {m.name: tar.extractfile(m) for m in tar.getmembers()}
            return {name: file.read().decode() for name, file in files.items() if file}


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


@pytest.mark.parametrize("lacks", ["conda-forge", "disk", "memory", "GPU"])
def test_what_is_missing_is_one_line_before_anything_is_spent(owner: Owner, lacks: str) -> None:
    costs = owner.root / "recipes/costs.yaml"
    if lacks == "conda-forge":
        stand_in.write_mirrors(owner.home, {CONDA_FORGE: "http://127.0.0.1:1"})
    if lacks == "disk":
        costs.write_text(costs.read_text().replace("disk: 0.01", "disk: 9999999"))
    if lacks == "memory":
        costs.write_text(costs.read_text().replace("memory: 0.1", "memory: 99999"))
    if lacks == "GPU":
        shutil.rmtree(owner.root.parent / "kfd")
    says = {
        "conda-forge": "whether conda-forge has all that is needed is not known: .+",
        "disk": "a build would not start: it needs 9999999.0 GiB of disk in .+; .+ GiB are free",
        "memory": "a build would not start: it needs 99999 GiB of memory for one job; .+",
        "GPU": "no gfx1151 GPU: the kernel driver lists none. --without-gpu builds without .+",
    }
    done = owner.night()
    assert done.returncode == 3, done.stdout + done.stderr
    assert re.fullmatch(f"night: not started: {says[lacks]}\n", done.stderr)
    assert all("/repodata" in path or path.endswith(".zst") for path in owner.requests)
    left = [path.name for path in owner.to.rglob("*") if path.is_file()]
    assert sorted(left) == [".lock", ".step"]
    assert not (owner.root / "build/sources").exists()
