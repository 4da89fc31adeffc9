# SPDX-License-Identifier: BSD-3-Clause
"""tools/night.py leaves an archive in all circumstances. Here `./forge` is a mock.

tests/integration/test_night.py runs it with the real driver and kills it.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support import faults
from support.kills import needs_time
from support.night import KILLED, Machine, read_archive

STACKS = ("attention", "vllm")
# The mock of ./forge. A step with the word $FAILS fails, a step with the word $ENDLESS does not
# end, and with $FILLS the build fills the disk.
FORGE = """#!/bin/sh
# forge --base conda-forge --output PACKAGES WORDS: prints its environment, with secrets
root=$(dirname "$0")
packages=$4
shift 4
echo "$1 $2" >> "$root/begun"
echo "working on $*"
env
echo "fetching https://joe:$PASSWORD_OF_JOE@mirror.org/simple, password: hunter2"
case " $* " in *" ${ENDLESS:-nothing} "*) exec sleep 600 ;; esac
case " $* " in *" ${FAILS:-nothing} "*) echo "Traceback (most recent call last):"; exit 1 ;; esac
if [ "$1" = build-all ]; then
    mkdir -p "$packages/noarch"
    touch "$packages/noarch/alpha-1.0-h0_0.conda"
    [ -z "$FILLS" ] || cat /dev/zero > "$packages/fill" || exit 1
elif [ "$1" = run ]; then
    for records; do :; done
    mkdir -p "$records"
    printf '{"url": "https://joe:%s@mirror.org/"}' "$PASSWORD_OF_JOE" > "$records/1.json"
fi
"""
SECRETS = {"PASSWORD_OF_JOE": "s3/cret words", "HF_TOKEN": "hf_0123456789abcdef"}
SECRETS |= {"PIP_INDEX_URL": "https://ann:sesame@mirror.org/simple"}
STEPS = ["commit", "build", "publish"]
STEPS += [f"{step}-{stack}" for stack in STACKS for step in ("lock", "install", "validate")]


class Owner:
    """A machine with a GPU, a clone with tools/night.py, and a mock of the driver."""

    def __init__(self, folder: Path) -> None:
        self.machine, self.to = Machine(folder), folder / "night"
        self.root, self.replace = self.machine.clone, self.machine.replace
        self.replace("sleep(0.1)", "sleep(0.01)")
        for name in (
            *(f"stacks/{stack}/pixi.toml" for stack in STACKS),
            "recipes/alpha/recipe.yaml",
        ):
            (self.root / name).parent.mkdir(parents=True)
            (self.root / name).touch()
        forge = self.root / "forge"
        forge.write_text(FORGE)
        forge.chmod(0o755)

    def words(self, *options: str) -> list[str]:
        return [str(self.machine.script), "--to", str(self.to), *options]

    def night(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run([sys.executable, *self.words(*options)], **environment)

    def run(self, words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
        variables = os.environ | SECRETS | environment
        return subprocess.run(words, env=variables, capture_output=True, text=True, check=False)

    def begun(self) -> list[str]:
        """Return the first two words of each command that the mock of the driver got."""
        return (self.root / "begun").read_text().splitlines()

    def results(self) -> dict[str, str]:
        """Return the exit code of each step, as the page in the archive states it."""
        rows = read_archive(self.to)["night/README.md"].partition("| --- |")[2].splitlines()[1:]
        return {row.split(" | ")[0].strip("| "): row.split(" | ")[1] for row in rows}


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(tmp_path)


def test_a_night(owner: Owner) -> None:
    """tools/night.py runs each step and packs all logs. A second run repeats each step."""
    log = owner.root / "build/logs/alpha.log"
    log.parent.mkdir(parents=True)
    log.write_text("compiled\n")
    done = owner.night()
    assert done.returncode == 0, done.stdout + done.stderr
    stacks = [f"{word} {stack}" for stack in STACKS for word in ("lock", "install", "run")]
    commands = ["build-all --yes", "publish --to", *stacks]
    assert owner.begun() == commands
    assert [*owner.results()] == STEPS
    # `commit` fails with 128, because the clone is no git repository.
    assert {*owner.results().values()} - {"0"} == {"128"}
    names = {"README.md", *(f"{name}.log" for name in STEPS), "packages/alpha.log"}
    names |= {f"evidence/{stack}/1.json" for stack in STACKS}
    assert read_archive(owner.to).keys() == {f"night/{name}" for name in names}
    with tarfile.open(owner.to / "night.tar.gz") as tar:
        assert {(m.uname, m.gname, m.uid, m.gid) for m in tar.getmembers()} == {("", "", 0, 0)}
    assert (
        str(owner.to / "night.tar.gz") in done.stdout and "working on install vllm" in done.stdout
    )
    assert owner.night().returncode == 0 and owner.begun() == [*commands, *commands]


@pytest.mark.parametrize(
    ("fails", "steps"),
    [
        ("build-all", STEPS[:2]),  # If the build fails, there is nothing to publish.
        ("publish", STEPS),
        (
            "lock attention",
            [name for name in STEPS if name not in ("install-attention", "validate-attention")],
        ),
        ("install vllm", STEPS[:-1]),
        ("strix-validate", STEPS),
    ],
)
def test_a_step_that_fails(fails: str, steps: list[str], owner: Owner) -> None:
    """After a step that fails, only the steps that need it are left out.

    The page in the archive has the traceback.
    """
    assert owner.night(FAILS=fails).returncode == 1
    assert [*owner.results()] == steps
    assert "Traceback (most recent call last)" in read_archive(owner.to)["night/README.md"]


@needs_time
def test_thirty_kills(tmp_path: Path) -> None:
    """After a kill there is a complete archive, and the next run succeeds.

    Only a kill before one of the first four operations leaves no archive. To reserve disk space for
    the archive, the script removes a file and writes a file. Then it writes the archive into this
    file and renames it.
    """
    for number in range(1, 61, 2):
        owner = Owner(tmp_path / f"{number}")
        killed = owner.run([sys.executable, "-c", KILLED, str(number), *owner.words()])
        assert killed.returncode == -signal.SIGKILL, number
        assert (owner.to / "night.tar.gz").exists() == (number > 4), number
        if number > 4:
            assert "night/README.md" in read_archive(owner.to)
        done = owner.night()
        assert done.returncode == 0, f"{number}: {done.stdout}{done.stderr}"
        assert [*owner.results()] == STEPS


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_night(owner: Owner, kind: signal.Signals) -> None:
    with begin(owner) as night:
        (child,) = Path(f"/proc/{night.pid}/task/{night.pid}/children").read_text().split()
        night.send_signal(kind)
        assert "interrupted" in night.stdout.read()
    assert night.returncode == 1 and not Path("/proc", child).exists()
    assert "working on build-all" in read_archive(owner.to)["night/build.log"]


def put(owner: Owner, name: str, data: bytes) -> None:
    """Write a file into the folder to which tools/night.py writes."""
    path = owner.to / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def put_pipe(owner: Owner, name: str) -> None:
    (owner.to / name).parent.mkdir(parents=True)
    os.mkfifo(owner.to / name)


def put_circle(owner: Owner, name: str) -> None:
    (owner.to / name).parent.mkdir(parents=True)
    (owner.to / name).symlink_to(name)


DAMAGE: dict[str, Callable[[Owner], None]] = {
    "state of an older night": lambda o: put(o, "state.json", b'{"build": '),
    "index": lambda o: put(o, "channel/noarch/repodata.json", b"\xff\0{"),
    "half a record": lambda o: put(o, "evidence-vllm/0.json", b'{"summary": {"pas'),
    "record of bytes": lambda o: put(o, "evidence-vllm/0.json", bytes(range(256)) * 4000),
    "record that is a folder": lambda o: put(o, "evidence-vllm/0.json/kept", b""),
    "record that is a pipe": lambda o: put_pipe(o, "evidence-vllm/0.json"),
    "log that is a pipe": lambda o: put_pipe(o, "build.log"),
    "log that is a folder": lambda o: put(o, "build.log/kept", b""),
    "half an archive": lambda o: put(o, "night.tar.gz", b"\x1f\x8b\x08"),
    "archive that is a folder": lambda o: put(o, "night.tar.gz/kept", b""),
    "room that is a folder": lambda o: put(o, "night.partial/kept", b""),
    "links in a circle": lambda o: put_circle(o, "publish.log"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder(damage: str, owner: Owner) -> None:
    """A damaged file does not stop tools/night.py. A folder in a file's place is moved aside."""
    DAMAGE[damage](owner)
    done = owner.night()
    assert done.returncode == 0, done.stdout + done.stderr
    assert [*owner.results()] == STEPS
    assert any(owner.to.rglob("kept")) == damage.endswith("folder")


LINKS = ["packages", "channel", "evidence-vllm", "evidence-attention/1.json", "evidence", "logs"]
LINKS += ["night.tar.gz", "night.partial", "README.md", "state.json", *(f"{s}.log" for s in STEPS)]


@pytest.mark.parametrize("symbolic", [True, False])
def test_no_link_is_followed(symbolic: bool, owner: Owner, tmp_path: Path) -> None:
    """tools/night.py writes and packs no file outside of its output folder through a link.

    It does not pack logs of builds through a link, either.
    """
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    for file in (outside / "private", outside / "folder/1.json", outside / "folder/alpha.log"):
        file.write_text("of somebody else")
    for name in LINKS:
        path = owner.to / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if symbolic and not path.parent.is_symlink():
            path.symlink_to(outside / ("private" if "." in name else "folder"))
        elif not symbolic and "." in name:
            path.hardlink_to(outside / "private")
    (owner.root / "build").mkdir()
    if symbolic:
        (owner.root / "build/logs").symlink_to(outside / "folder")
    else:
        (owner.root / "build/logs").mkdir()
        (owner.root / "build/logs/alpha.log").hardlink_to(outside / "private")
    before = {path: path.stat().st_mtime_ns for path in outside.rglob("*")}
    assert owner.night().returncode == 0
    assert before == {path: path.stat().st_mtime_ns for path in outside.rglob("*")}
    files = read_archive(owner.to)
    assert "of somebody else" not in "".join(files.values())
    assert files.keys() >= {f"night/{name}.log" for name in STEPS}
    assert {path.name for path in tmp_path.iterdir()} == {
        "clone",
        "kfd",
        "device",
        "night",
        "outside",
    }


def test_no_secret_is_packed(owner: Owner) -> None:
    log = owner.root / "build/logs/alpha.log"
    log.parent.mkdir(parents=True)
    log.write_text("X-Token: 1234567\n" + "".join(f"{value}\n" for value in SECRETS.values()))
    assert owner.night().returncode == 0
    text = "".join(read_archive(owner.to).values())
    secrets = ["s3/cret", "cret words", "hf_0123", "sesame", "hunter2", "1234567"]
    assert not [secret for secret in secrets if secret in text]
    assert "fetching https://mirror.org/simple, password: ***" in text and "working on" in text


@pytest.mark.parametrize("call", ["write", "open", "rename", "unlink"])
def test_a_disk_that_is_full_at_one_call(call: str, owner: Owner, tmp_path: Path) -> None:
    library = faults.library(tmp_path)
    for number in (1, 2, 3, 5, 8):
        shutil.rmtree(owner.to, ignore_errors=True)
        fault = f"{call}:{number}:28:{owner.to}/"
        done = owner.night(FAULT=fault, LD_PRELOAD=str(library), FAULT_COUNT="")
        if "not started" in done.stderr:
            assert done.returncode == 3 and "No space left on device" in done.stderr
        else:
            assert "commit" in owner.results(), done.stdout + done.stderr


def test_a_full_disk(owner: Owner) -> None:
    """The archive is complete even if a step fills the disk, because its room was reserved."""
    owner.to.mkdir()
    night = f'mount -t tmpfs -o size=24m tmpfs "{owner.to}" && shift && "$@"'
    night += f'; cp "{owner.to}/night.tar.gz" "{owner.to}.tar.gz" && umount "{owner.to}"'
    unshare = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*unshare, "true"], check=False).returncode:
        pytest.skip("this machine does not allow a user to mount a filesystem")
    done = owner.run(
        [*unshare, "sh", "-c", night, "sh", "", sys.executable, *owner.words()], FILLS="1"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (owner.to.with_name("night.tar.gz")).rename(owner.to / "night.tar.gz")
    assert owner.results()["build"] == "1"
    assert "No space left on device" in read_archive(owner.to)["night/build.log"]


def test_no_room_for_an_archive(owner: Owner, tmp_path: Path) -> None:
    """If the archive cannot be written, no step is started."""
    (tmp_path / "file").touch()
    done = owner.night("--to", str(tmp_path / "file/night"))
    assert done.returncode == 3 and not (owner.root / "begun").exists()
    assert (
        done.stderr == f"night: not started: cannot write {tmp_path}/file/night: Not a directory\n"
    )


def test_the_end_of_a_long_log(owner: Owner) -> None:
    """Only the end of a long log is packed, without its first word, which is cut.

    That word could be the end of a secret, which would not be recognised.
    """
    log = owner.root / "build/logs/alpha.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"sesame" * (1 << 20) + b"\nthe error\n")
    owner.night()
    assert read_archive(owner.to)["night/packages/alpha.log"] == "\nthe error\n"


def test_no_gpu(owner: Owner) -> None:
    owner.replace("/kfd", "/nothing")
    done = owner.night()
    assert done.returncode == 3 and not owner.to.exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith("night: not started: no gfx1151 GPU") and "--without-gpu" in line
    assert owner.night("--without-gpu").returncode == 0
    assert not [name for name in owner.results() if name.startswith("validate")]


def test_a_gpu_that_its_owner_may_not_open(owner: Owner) -> None:
    """A GPU whose device the user may not open is an error, with advice.

    The test removes the device instead, because root may open every file.
    """
    owner.machine.device.unlink()
    done = owner.night()
    assert done.returncode == 3
    assert "cannot be opened: join the groups render and video" in done.stderr


def begin(owner: Owner) -> subprocess.Popen[str]:
    """Start tools/night.py with a build that does not end, and wait until the build has started."""
    night = subprocess.Popen(
        [sys.executable, *owner.words()],
        env=os.environ | {"ENDLESS": "build-all"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert any(line.startswith("working on build-all") for line in night.stdout)
    return night


def test_two_nights_at_once(owner: Owner) -> None:
    with begin(owner) as first:
        second = owner.night()
        first.kill()
    assert second.returncode == 3 and "another night is running in" in second.stderr


def test_a_step_ends_with_its_night(owner: Owner) -> None:
    """A running step ends when tools/night.py is killed.

    Otherwise the step would hold the driver's lock, and the next run of tools/night.py would fail.
    """
    with begin(owner) as night:
        (child,) = Path(f"/proc/{night.pid}/task/{night.pid}/children").read_text().split()
        step = os.pidfd_open(int(child))
        night.kill()
    ended, _, _ = select.select([step], [], [], 120)
    if not ended:
        signal.pidfd_send_signal(step, signal.SIGKILL)
    os.close(step)
    assert ended, "the step must end when tools/night.py is killed"
