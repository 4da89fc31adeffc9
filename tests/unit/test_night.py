# SPDX-License-Identifier: BSD-3-Clause
"""docs/night.py with a mock of `./forge`: its steps, refusals, and what it says.

With the real driver, killed, it runs in tests/integration/test_night.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from strix_validate.doctor import hardware
from support.project import CHECKOUT

STACKS = ("attention", "vllm")
FORGE = """#!{python}
import json, os, pathlib, sys, time
root = pathlib.Path(__file__).parent
words = sys.argv[5:] if sys.argv[1] == "--base" else sys.argv[1:]
if words[0] == "plan":
    print("alpha: 0 GiB to download, 1 GiB of disk, 1 GiB of memory per job, 6 CPU hours")
    print("beta: 0 GiB to download, 1 GiB of disk, 1 GiB of memory per job, 1.5 CPU hours")
    print("in all: 0 GiB to download, 2 GiB of disk with it, 1 jobs in 1 GiB, 7.5 CPU hours")
if (trouble := os.environ.get("TROUBLE", "")) and words[0] == "plan":
    print(trouble)
    sys.exit(3)
print("working on", *words, flush=True)
with (root / "begun").open("a") as begun:  # a test that waits for it may kill the night at once
    begun.write(" ".join(words[:2]) + "\\n")
time.sleep(float(os.environ.get("WORK", "0")))
if os.environ.get("FAILS") in words:
    sys.exit(1)
if words[0] == "build-all":
    print("[1/2] alpha 1.0: building (not in the channel)")
    print("[1/2] alpha 1.0: testing")
    print("[2/2] beta 1.0: building (not in the channel)")
    index = pathlib.Path(sys.argv[4], "noarch", "repodata.json")
    index.parent.mkdir(parents=True, exist_ok=True)
    index.write_text(os.environ.get("BUILT", ""))
    print("package  version  build  state          seconds")
    print("gamma    1.0      h_0    not attempted  0.0")
if words[0] == "lock":
    lock = root / "build/stacks" / words[1] / "pixi.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.write_text(os.environ.get("LOCKED", ""))
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


# `python -c KILLED N SCRIPT WORDS`
KILLED = """
import os, runpy, signal, sys
left = int(sys.argv[1])
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


class Owner:
    """A machine with a GPU, the script, and a driver that only pretends."""

    def __init__(self, folder: Path) -> None:
        self.root, self.to = folder / "clone", folder / "night"
        (self.root / "docs").mkdir(parents=True)
        for stack in STACKS:
            (self.root / "stacks" / stack).mkdir(parents=True)
            (self.root / "stacks" / stack / "pixi.toml").touch()
        shutil.copy(CHECKOUT / "docs/night.py", self.root / "docs")
        forge = self.root / "forge"
        forge.write_text(FORGE.format(python=sys.executable))
        forge.chmod(0o755)
        node = folder / "kfd/1"
        node.mkdir(parents=True)
        node.joinpath("properties").write_text("gfx_target_version 110501\n")
        (folder / "device").touch()
        self.replace("(6, 18, 4)", "(1, 0, 0)")  # tests may run on an older kernel
        self.replace("/sys/class/kfd/kfd/topology/nodes", str(folder / "kfd"))
        self.replace("/dev/kfd", str(folder / "device"))

    def replace(self, old: str, new: str) -> None:
        """Have the script find another machine."""
        script = self.root / "docs/night.py"
        assert old in script.read_text()
        script.write_text(script.read_text().replace(old, new))

    def words(self, *options: str) -> list[str]:
        return [sys.executable, str(self.root / "docs/night.py"), "--to", str(self.to), *options]

    def night(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        known = os.environ | environment
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
    assert "alpha 1.0" in page and page.count("7 passed, 0 failed, 1 skipped") == 2
    assert len(page.splitlines()) < 40 and "failed (" not in page
    assert "**Not built**: gamma (not attempted)" in page
    assert {"night/state.json", "night/logs/build.log", "night/evidence/vllm/record.json"} <= {
        *files
    }
    sources, build = owner.begun().index("sources fetch"), owner.begun().index("build-all --yes")
    assert sources < build
    count = len(owner.begun())
    assert owner.night().returncode == 0 and len(owner.begun()) == count, "nothing is done twice"


def test_the_time_left_is_said(owner: Owner) -> None:
    """Of 7.5 hours on this machine's cores 1.5 are left after alpha, at the pace of alpha."""
    first, second = re.findall(r"== build: about ([\d.]+) hours left", owner.night().stdout)
    assert float(first) == pytest.approx(7.5 / len(os.sched_getaffinity(0)), abs=0.06)
    assert float(second) == 0.0, "alpha took no time, for six hours"


def test_a_failure_does_not_end_the_night(owner: Owner) -> None:
    done = owner.night(FAILS="vllm")
    assert done.returncode == 1
    page = owner.archived()["night/README.md"]
    assert "| lock-vllm | failed (1): logs/lock-vllm.log" in page and page.count("7 passed") == 1
    assert owner.night().returncode == 0, "what failed is tried again"
    assert owner.archived()["night/README.md"].count("7 passed") == 2


def test_what_a_second_night_builds_is_published_and_locked(owner: Owner) -> None:
    """It was not: publish had succeeded with what the first one had."""
    assert owner.night(FAILS="build-all", BUILT="alpha").returncode == 1
    before = owner.begun()
    assert owner.night(BUILT="alpha and beta", LOCKED="both").returncode == 0
    again = owner.begun()[len(before) :]
    assert [line.split()[0] for line in again] == [
        "plan", "build-all", "publish", "channel",
        "lock", "install", "run", "lock", "install", "run",
    ]  # fmt: skip


def test_an_unchanged_lock_is_not_validated_again(owner: Owner) -> None:
    owner.night(BUILT="alpha")
    state = owner.to / "state.json"
    ended = json.loads(state.read_text())
    ended["build"]["code"] = 1
    state.write_text(json.dumps(ended))
    before = owner.begun()
    assert owner.night(BUILT="alpha and beta").returncode == 0
    again = [line.split()[0] for line in owner.begun()[len(before) :]]
    assert again == ["plan", "build-all", "publish", "channel", "lock", "lock"]


def test_a_step_of_other_sources_is_taken_again(owner: Owner) -> None:
    """After `git pull`."""

    def git(*words: str) -> None:
        named = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", "-C", owner.root, *named, *words], check=True, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "-m", "one")
    assert owner.night().returncode == 0
    before = owner.begun()
    git("commit", "--allow-empty", "-m", "two")
    assert owner.night().returncode == 0
    assert owner.begun()[len(before) :] == ["plan", "sources fetch", "build-all --yes"]


@pytest.mark.parametrize(
    ("remote", "says"),
    [
        (
            "https://github.com/a/b-c.git",
            "https://github.com/a/b-c/issues/new?template=evidence.yml",
        ),
        ("git@github.com:a/b", "https://github.com/a/b/issues/new?template=evidence.yml"),
        ("/srv/copy", "the issue form `evidence` of the repository that this clone is from"),
    ],
)
def test_the_line_that_opens_an_issue(owner: Owner, remote: str, says: str) -> None:
    subprocess.run(["git", "-C", owner.root, "init", "-q"], check=True)
    subprocess.run(["git", "-C", owner.root, "remote", "add", "origin", remote], check=True)
    assert f"Give it: open {says}\n" in owner.night().stdout


def test_the_archive_names_no_user_and_holds_the_end_of_long_logs(owner: Owner) -> None:
    log = owner.root / "build/logs/torch.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"first\n" + b"x" * (3 << 20) + b"\nthe error\n")
    owner.night()
    with tarfile.open(owner.to / "night.tar.gz") as tar:
        assert {(m.uname, m.gname, m.uid, m.gid) for m in tar.getmembers()} == {("", "", 0, 0)}
    text = owner.archived()["night/build-logs/torch.log"]
    assert len(text) == 2 << 20 and text.endswith("\nthe error\n")


def test_the_new_home_knows_the_owners_mirrors(owner: Owner, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".pixi").mkdir(parents=True)
    (home / ".pixi/config.toml").write_text("[mirrors]\n")
    assert owner.night(HOME=str(home)).returncode == 0
    assert (owner.to / "home/.pixi/config.toml").read_text() == "[mirrors]\n"


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
    owner.replace("/kfd", "/nothing")
    done = owner.night()
    assert done.returncode == 3 and owner.begun() == ["plan"]
    (line,) = done.stderr.splitlines()
    assert line.startswith("night: not started: no gfx1151 GPU") and "--without-gpu" in line
    assert owner.night("--without-gpu").returncode == 0
    page = owner.archived()["night/README.md"]
    assert "nothing was validated" in page and "none ran on the GPU" in page


def test_a_gpu_that_its_owner_may_not_open(owner: Owner, tmp_path: Path) -> None:
    """For root every file is open: here it is not there."""
    (tmp_path / "device").unlink()
    done = owner.night()
    assert done.returncode == 3
    assert "is closed to you: join the groups render and video" in done.stderr


def test_old_kernel(owner: Owner) -> None:
    owner.replace("(1, 0, 0)", "(99, 0, 0)")
    done = owner.night()
    assert done.returncode == 3 and "night: not started: kernel " in done.stderr
    assert "needs 99.0.0 or newer" in done.stderr


def test_kernel_and_gpu_are_the_doctors() -> None:
    text = (CHECKOUT / "docs/night.py").read_text()
    assert f"\nKERNEL = {hardware.KERNEL}\n" in text


def test_ten_kills(owner: Owner) -> None:
    """SIGKILL before the n-th command or rename of the script: it ends with the archive."""
    for before in (1, 2, 3, 4, 5, 6, 5, 6, 7, 8):
        words = [sys.executable, "-c", KILLED, str(before), *owner.words()[1:]]
        killed = subprocess.run(words, capture_output=True, text=True, check=False)
        assert killed.returncode == -9, killed.stdout + killed.stderr
        if (owner.to / "state.json").exists():
            json.loads((owner.to / "state.json").read_text())  # never half written
        assert not (owner.to / "night.tar.gz").exists()
    assert owner.night().returncode == 0
    page = owner.archived()["night/README.md"]
    assert page.count("7 passed, 0 failed") == 2 and "failed (" not in page


def test_two_nights_at_once(owner: Owner) -> None:
    first = subprocess.Popen(
        owner.words(), env=os.environ | {"WORK": "600"}, stdout=subprocess.DEVNULL
    )
    while not (owner.root / "begun").exists():
        time.sleep(0.01)
    second = owner.night()
    first.kill()
    first.wait()
    assert second.returncode == 2 and "another one works in" in second.stderr


def test_a_step_ends_with_its_night(owner: Owner) -> None:
    """A step that went on would hold the driver's lock, and the next night would fail at it."""
    environment = os.environ | {"WORK": "600"}
    night = subprocess.Popen(owner.words(), env=environment, stdout=subprocess.DEVNULL)
    while not (owner.root / "begun").exists():
        time.sleep(0.01)
    (child,) = Path(f"/proc/{night.pid}/task/{night.pid}/children").read_text().split()
    night.kill()
    night.wait()
    for _ in range(15_000):  # half of the time that it would take
        if (
            not Path(f"/proc/{child}/cmdline").exists()
            or not Path(f"/proc/{child}/cmdline").read_bytes()
        ):
            break
        time.sleep(0.02)
    else:
        pytest.fail("the step still runs")
