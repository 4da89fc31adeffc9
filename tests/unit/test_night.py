# SPDX-License-Identifier: BSD-3-Clause
"""docs/night.py with a stand-in of `./forge`: its steps, refusals, and ten kills.

The stand-in keeps what it made in files, as the driver does, and counts what it begins.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from support.project import CHECKOUT

FORGE = """#!{python}
import json, os, pathlib, sys, time
root = pathlib.Path(__file__).parent
words = [w for w in sys.argv[1:] if w not in ("--base", "conda-forge")]
if (trouble := os.environ.get("TROUBLE", "")) and words[0] == "plan":
    print(trouble)
    sys.exit(3)
with (root / "begun").open("a") as begun:
    begun.write(" ".join(words[:2]) + "\\n")
print("working on", *words, flush=True)
time.sleep(float(os.environ.get("WORK", "0")))
if os.environ.get("FAILS") in words:
    sys.exit(1)
if words[0] == "publish":
    folder = pathlib.Path(words[2]) / "noarch"
    folder.mkdir(parents=True, exist_ok=True)
    record = {{"name": "alpha", "version": "1.0"}}
    folder.joinpath("repodata.json").write_text(json.dumps({{"packages.conda": {{"a": record}}}}))
if words[0] == "run":
    folder = pathlib.Path(words[-1])
    folder.mkdir(parents=True, exist_ok=True)
    summary = {{"passed": 7, "failed": 0, "skipped": 1}}
    folder.joinpath("record.json").write_text(json.dumps({{"summary": summary}}))
"""


class Owner:
    """A machine with a GPU, the script, and a driver that only pretends."""

    def __init__(self, folder: Path) -> None:
        self.root, self.to = folder / "clone", folder / "night"
        (self.root / "docs").mkdir(parents=True)
        shutil.copy(CHECKOUT / "docs/night.py", self.root / "docs")
        forge = self.root / "forge"
        forge.write_text(FORGE.format(python=sys.executable))
        forge.chmod(0o755)
        node = folder / "kfd/1"
        node.mkdir(parents=True)
        node.joinpath("properties").write_text("gfx_target_version 110501\n")
        self.environment = os.environ | {"NIGHT_KFD": str(folder / "kfd")}
        # the machine that tests run on may have an older kernel
        text = (self.root / "docs/night.py").read_text()
        (self.root / "docs/night.py").write_text(text.replace("(6, 18, 4)", "(1, 0, 0)"))

    def words(self, *options: str) -> list[str]:
        return [sys.executable, str(self.root / "docs/night.py"), "--to", str(self.to), *options]

    def night(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        known = self.environment | environment
        return subprocess.run(
            self.words(*options), env=known, capture_output=True, text=True, check=False
        )

    def begun(self) -> list[str]:
        return (self.root / "begun").read_text().splitlines()

    def archived(self) -> dict[str, str]:
        with tarfile.open(self.to / "night.tar.gz") as tar:
            files = {m.name: tar.extractfile(m) for m in tar.getmembers() if m.isfile()}
            return {name: file.read().decode() for name, file in files.items() if file}


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(tmp_path)


def test_a_whole_night(owner: Owner) -> None:
    done = owner.night()
    assert done.returncode == 0, done.stderr
    files = owner.archived()
    page = files["night/README.md"]
    assert "alpha 1.0" in page and page.count("7 passed, 0 failed, 1 skipped") == 4
    assert len(page.splitlines()) < 40 and "failed (" not in page
    assert {"night/state.json", "night/logs/build.log", "night/evidence/vllm/record.json"} <= {
        *files
    }
    assert "gh issue create" in done.stdout and "night.tar.gz" in done.stdout
    sources, build = owner.begun().index("sources fetch"), owner.begun().index("build-all --yes")
    assert sources < build
    count = len(owner.begun())
    assert owner.night().returncode == 0 and len(owner.begun()) == count, "nothing is done twice"


def test_a_failure_does_not_end_the_night(owner: Owner) -> None:
    done = owner.night(FAILS="vllm")
    assert done.returncode == 1
    page = owner.archived()["night/README.md"]
    assert "| lock-vllm | failed (1): logs/lock-vllm.log" in page and page.count("7 passed") == 3
    assert owner.night().returncode == 0, "what failed is tried again"
    assert owner.archived()["night/README.md"].count("7 passed") == 4


def test_ten_kills(owner: Owner) -> None:
    """SIGKILL of the night, at times of its step too, at moments that a seed decides."""
    chance, kills = random.Random(45), 0
    slow = owner.environment | {"WORK": "0.03"}
    while kills < 10:
        night = subprocess.Popen(
            owner.words(), env=slow, start_new_session=True, stdout=subprocess.DEVNULL
        )
        time.sleep(chance.uniform(0.05, 0.25))
        if night.poll() is None:
            (os.killpg if kills % 2 else os.kill)(night.pid, signal.SIGKILL)
        night.wait()
        kills += 1
        if (owner.to / "state.json").exists():
            json.loads((owner.to / "state.json").read_text())  # never half written
        if (owner.to / "night.tar.gz").exists():
            assert "night/README.md" in owner.archived()
    assert owner.night().returncode == 0
    page = owner.archived()["night/README.md"]
    assert page.count("7 passed, 0 failed") == 4 and "failed (" not in page
    # what had ended was not begun again: at most one more for each kill
    assert len(owner.begun()) <= 2 + 4 + 3 * 4 + 2 * kills


@pytest.mark.parametrize(
    "trouble",
    [
        "a build would not start: it needs 118 GiB of disk, and there are 20",
        "whether conda-forge has all that is needed is not known: no answer",
    ],
)
def test_trouble_is_one_line_before_anything_is_spent(owner: Owner, trouble: str) -> None:
    done = owner.night(TROUBLE=trouble)
    assert done.returncode == 3
    assert done.stderr.splitlines() == [f"night: not started: {trouble}"]
    assert not (owner.root / "begun").exists() and not (owner.to / "night.tar.gz").exists()


def test_no_gpu(owner: Owner) -> None:
    lost = str(owner.root)
    done = owner.night(NIGHT_KFD=lost)
    assert done.returncode == 3 and owner.begun() == ["plan"]
    (line,) = done.stderr.splitlines()
    assert line.startswith("night: not started: no gfx1151 GPU") and "--without-gpu" in line
    assert owner.night("--without-gpu", NIGHT_KFD=lost).returncode == 0
    page = owner.archived()["night/README.md"]
    assert "nothing was validated" in page and "none ran on the GPU" in page


def test_old_kernel(owner: Owner) -> None:
    script = owner.root / "docs/night.py"
    script.write_text(script.read_text().replace("(1, 0, 0)", "(99, 0, 0)"))
    done = owner.night()
    assert done.returncode == 3 and "night: not started: kernel " in done.stderr


def test_two_nights_at_once(owner: Owner) -> None:
    first = subprocess.Popen(
        owner.words(), env=owner.environment | {"WORK": "1"}, stdout=subprocess.DEVNULL
    )
    while not (owner.root / "begun").exists():
        time.sleep(0.01)
    second = owner.night()
    first.kill()
    first.wait()
    assert second.returncode == 2 and "another one works in" in second.stderr


def test_a_step_ends_with_its_night(owner: Owner) -> None:
    """A step that went on would hold the driver's lock, and the next night would fail at it."""
    environment = owner.environment | {"WORK": "60"}
    night = subprocess.Popen(owner.words(), env=environment, stdout=subprocess.DEVNULL)
    while not (owner.root / "begun").exists():
        time.sleep(0.01)
    time.sleep(0.2)  # it has written what it writes first: no broken pipe ends it
    (child,) = Path(f"/proc/{night.pid}/task/{night.pid}/children").read_text().split()
    night.kill()
    night.wait()
    for _ in range(500):
        if (
            not Path(f"/proc/{child}/cmdline").exists()
            or not Path(f"/proc/{child}/cmdline").read_bytes()
        ):
            break
        time.sleep(0.02)
    else:
        pytest.fail("the step still runs")
