# SPDX-License-Identifier: BSD-3-Clause
"""A mock of the machine of one job: a folder on a disk of limited size, and its processes."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

POLL_SECONDS = 0.02
MOCK_GH = Path(__file__).with_name("mock_gh.py")
# A mock of sudo. It knows `rm -rf` only, and removes the paths below this machine's folder `image`,
# which stands for the files of GitHub's image.
SUDO = """\
#!/bin/sh
test "$1 $2" = "rm -rf" || { echo "sudo: unknown command: $*" >&2; exit 1; }
shift 2
for path; do rm -rf "$MACHINE/image$path"; done
"""
GH = f'#!/bin/sh\nexec {sys.executable} {MOCK_GH} "$@"\n'


class Lost(Exception):
    """The machine was lost, or GitHub ended the job because its time is up."""


class Full(Exception):
    """The disk is full."""


class Machine:
    """A context manager that makes and removes a machine. Each machine has the same path.

    The disk is a loop device if this process may mount one. Otherwise `check` compares the size of
    the machine's files with that of the disk after each step.

    Attributes:
        folder: The folder of the machine. Its folder `work` is for the checkout, and `temp` for the
            files that steps get from the runner.
        hold: A folder outside the machine. A script that finds the file HOLD/POINT there writes
            HOLD/POINT.reached and waits. `run` then does what its argument `stop` says.
        size: Bytes of the disk, or 0 for no limit.
    """

    def __init__(self, folder: Path, hold: Path, size: int = 0) -> None:
        self.folder, self.hold, self.size = folder, hold, size
        self.work, self.temp = folder / "work", folder / "temp"
        self.is_mounted = False

    def __enter__(self) -> "Machine":
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        if self.size:
            self._mount()
        for name in ("work", "temp", "home", "bin", "image"):
            (self.folder / name).mkdir()
        self.program("sudo", SUDO)
        self.program("gh", GH)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", self.folder], check=True)
            self.folder.with_suffix(".disk").unlink()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _mount(self) -> None:
        disk = self.folder.with_suffix(".disk")
        with disk.open("wb") as file:
            file.truncate(self.size)
        make = ["mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=0,root_owner", disk]
        # With `discard`, the space of removed files becomes free on the host's disk too.
        mount = ["mount", "-o", "loop,discard", disk, self.folder]
        can_mount = os.geteuid() == 0 and shutil.which("mkfs.ext4")
        codes = []
        for command in (make, mount) if can_mount else ():
            codes.append(subprocess.run(command, capture_output=True, check=False).returncode)
        self.is_mounted = bool(codes) and not any(codes)
        if not self.is_mounted:
            disk.unlink()

    def program(self, name: str, text: str) -> None:
        """Write a program into a folder that is in the PATH of steps."""
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def check(self) -> None:
        """Raise Full if the disk is not a mounted one and the files are larger than the disk."""
        if self.size and not self.is_mounted:
            used = sum(path.lstat().st_size for path in self.folder.rglob("*"))
            if used > self.size:
                raise Full(f"No space left on device: {used} bytes of {self.size}")

    def run(
        self, script: str, environment: Mapping[str, str], log: Path, stop: str, deadline: float
    ) -> int:
        """Run a step's script as GitHub does, and return its exit code.

        Args:
            script: The script, for bash.
            environment: All environment variables of the script.
            log: The file to which the output is appended.
            stop: What to do when the script reaches a point of `hold`. With "kill", the machine is
                lost. With "late", the job's time is up. With "time", the driver's time box ends.
            deadline: The time, of time.monotonic(), at which the job's time is up.

        Raises:
            Lost: The machine was lost, or the job's time is up.
        """
        file = self.temp / "step.sh"
        file.write_text(script)
        with log.open("a") as out:
            child = subprocess.Popen(
                ["bash", "-e", file],
                cwd=self.work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                while child.poll() is None:
                    if time.monotonic() > deadline:
                        raise Lost("the job has exceeded its time")
                    for point in self.hold.glob("*.reached"):
                        point.with_suffix("").unlink()
                        point.unlink()
                        if stop == "kill":
                            raise Lost(f"lost at {point.stem}")
                        if stop == "late":
                            raise Lost(f"out of time at {point.stem}")
                        self.end_time_box()
                    time.sleep(POLL_SECONDS)
            finally:
                if child.poll() is None:
                    self.kill()
                    child.wait()
        return child.returncode

    def processes(self) -> Iterator[int]:
        """Yield the ids of the machine's processes.

        A process belongs to the machine if its variable MACHINE is the machine's folder, or if its
        working folder is inside that folder.
        """
        mark = b"MACHINE=%s\0" % bytes(self.folder)
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_marked = mark in (entry / "environ").read_bytes()
                if is_marked or (entry / "cwd").readlink().is_relative_to(self.folder):
                    yield int(entry.name)

    def end_time_box(self) -> None:
        """Send the driver the signal by which --stop-after ends a build."""
        for process in self.processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
                if b"--stop-after" in words and b"python" in words[0]:
                    os.kill(process, signal.SIGALRM)

    def kill(self) -> None:
        """Kill all processes of the machine."""
        processes = list(self.processes())
        while processes:
            for process in processes:
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
            processes = list(self.processes())
