# SPDX-License-Identifier: BSD-3-Clause
"""docs/night.py with a mock of `./forge`: its steps, refusals, and what it says.

With the real driver, killed, it runs in tests/integration/test_night.py.
"""

import fcntl
import json
import os
import re
import select
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from strix_validate.doctor import hardware
from support.night import Machine, archived
from support.project import CHECKOUT

STACKS = ("attention", "vllm")
FORGE = """#!{python}
import json, os, pathlib, signal, sys
root = pathlib.Path(__file__).parent
words = sys.argv[5:] if sys.argv[1] == "--base" else sys.argv[1:]
if words[0] == "plan":
    print("alpha: 0 GiB to download, 1 GiB of disk, 1 GiB of memory per job, 6 CPU hours")
    print("beta: 0 GiB to download, 1 GiB of disk, 1 GiB of memory per job, 1.5 CPU hours")
    print("in all: 0 GiB to download, 2 GiB of disk with it, 1 jobs in 1 GiB, 7.5 CPU hours")
with (root / "begun").open("a") as begun:
    begun.write(" ".join(words[:2]) + "\\n")
print("working on", *words, flush=True)
if os.environ.get("ENDLESS") in words:
    signal.pause()
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
    index = {{"packages.conda": dict.fromkeys(["build_0", "build_1"], record)}}
    folder.joinpath("repodata.json").write_text(json.dumps(index))
if words[0] == "run":
    folder = pathlib.Path(words[-1])
    folder.mkdir(parents=True, exist_ok=True)
    summary = {{"passed": 7, "failed": 0, "skipped": 1}}
    folder.joinpath("record.json").write_text(json.dumps({{"summary": summary}}))
"""


class Owner:
    """A machine with a GPU, the script, and a driver that only pretends."""

    def __init__(self, folder: Path) -> None:
        self.machine, self.to = Machine(folder), folder / "night"
        self.root, self.replace = self.machine.clone, self.machine.replace
        for stack in STACKS:
            (self.root / "stacks" / stack).mkdir(parents=True)
            (self.root / "stacks" / stack / "pixi.toml").touch()
        forge = self.root / "forge"
        forge.write_text(FORGE.format(python=sys.executable))
        forge.chmod(0o755)

    def words(self, *options: str) -> list[str]:
        return [sys.executable, str(self.machine.script), "--to", str(self.to), *options]

    def night(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        known = os.environ | environment
        return subprocess.run(
            self.words(*options), env=known, capture_output=True, text=True, check=False
        )

    def begun(self) -> list[str]:
        return (self.root / "begun").read_text().splitlines()


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(tmp_path)


def test_nothing_is_done_twice(owner: Owner) -> None:
    """integration/test_night.py has what a night says and packs."""
    assert owner.night().returncode == 0
    before = owner.begun()
    assert owner.night().returncode == 0 and owner.begun() == before


def test_the_time_left_is_said(owner: Owner) -> None:
    """Of 7.5 hours on this machine's cores 1.5 are left after alpha, at the pace of alpha."""
    first, second = re.findall(r"== build: about ([\d.]+) hours left", owner.night().stdout)
    assert float(first) == pytest.approx(7.5 / len(os.sched_getaffinity(0)), abs=0.06)
    assert float(second) == 0.0, "alpha took no time, for six hours"


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
    text = archived(owner.to)["night/build-logs/torch.log"]
    assert len(text) == 2 << 20 and text.endswith("\nthe error\n")


def test_the_new_home_knows_the_owners_mirrors(owner: Owner, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".pixi").mkdir(parents=True)
    (home / ".pixi/config.toml").write_text("[mirrors]\n")
    assert owner.night(HOME=str(home)).returncode == 0
    assert (owner.to / "home/.pixi/config.toml").read_text() == "[mirrors]\n"


def test_no_gpu(owner: Owner) -> None:
    owner.replace("/kfd", "/nothing")
    done = owner.night()
    assert done.returncode == 3 and owner.begun() == ["plan"]
    (line,) = done.stderr.splitlines()
    assert line.startswith("night: not started: no gfx1151 GPU") and "--without-gpu" in line
    assert owner.night("--without-gpu").returncode == 0
    page = archived(owner.to)["night/README.md"]
    assert "nothing was validated" in page and "none ran on the GPU" in page


def test_a_gpu_that_its_owner_may_not_open(owner: Owner) -> None:
    """For root every file is open: here it is not there."""
    owner.machine.device.unlink()
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


def begin(owner: Owner) -> subprocess.Popen[str]:
    """A night whose first step does not end; it has begun, and said so."""
    night = subprocess.Popen(
        owner.words(), env=os.environ | {"ENDLESS": "sources"}, stdout=subprocess.PIPE, text=True
    )
    assert any(line == "working on sources fetch\n" for line in night.stdout)
    return night


def test_two_nights_at_once(owner: Owner) -> None:
    with begin(owner) as first:
        second = owner.night()
        first.kill()
    assert second.returncode == 2 and "another one works in" in second.stderr


def test_what_outlives_a_killed_step_does_not_hold_the_next_night(owner: Owner) -> None:
    """A child of the validator's, say: it was waited for without an end."""
    owner.replace("range(60)", "range(1)")
    owner.to.mkdir()
    with (owner.to / ".step").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert owner.night().returncode == 0


def test_a_step_ends_with_its_night(owner: Owner) -> None:
    """A step that went on would hold the driver's lock, and the next night would fail at it."""
    with begin(owner) as night:
        (child,) = Path(f"/proc/{night.pid}/task/{night.pid}/children").read_text().split()
        step = os.pidfd_open(int(child))
        night.kill()
    ended, _, _ = select.select([step], [], [], 120)
    if not ended:
        signal.pidfd_send_signal(step, signal.SIGKILL)
    os.close(step)
    assert ended, "the step still ran"
