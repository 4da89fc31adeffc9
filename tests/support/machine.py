# SPDX-License-Identifier: BSD-3-Clause
"""A machine for one job of a workflow: a folder with a disk of limited size, and its processes."""

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
# `sudo rm -rf` of what GitHub's image brings, in this machine's image
SUDO = """\
#!/bin/sh
test "$1 $2" = "rm -rf" || { echo "sudo: only rm -rf is known, and not $*" >&2; exit 1; }
shift 2
for path; do rm -rf "$MACHINE/image$path"; done
"""
GH = f'#!/bin/sh\nexec {sys.executable} {MOCK_GH} "$@"\n'


class Lost(Exception):
    """The machine is gone, or was taken away because the job's time is up."""


class Full(Exception):
    """The disk is full."""


class Machine:
    """A new machine, at the same path as the one before; a context manager.

    Where this process may mount a loop device, the disk is one. Elsewhere `check` compares what the
    folder holds with its size, after each step.

    Attributes:
        folder: All of it; `work` is the checkout's, `temp` for files of steps.
        size: Bytes of the disk, or 0 for no limit.
        hold: A folder outside it. A script that finds HOLD/POINT makes HOLD/POINT.reached and
            waits: there it is stopped.
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
        # discard: what a job removes is free for others, too
        mount = ["mount", "-o", "loop,discard", disk, self.folder]
        commands = (make, mount) if os.geteuid() == 0 and shutil.which("mkfs.ext4") else ()
        done = [subprocess.run(c, capture_output=True, check=False).returncode for c in commands]
        self.is_mounted = bool(done) and not any(done)
        if not self.is_mounted:
            disk.unlink()

    def program(self, name: str, text: str) -> None:
        """Write a program that steps find in PATH."""
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def check(self) -> None:
        """Raise Full if the folder holds more than its disk would."""
        if self.size and not self.is_mounted:
            used = sum(path.lstat().st_size for path in self.folder.rglob("*"))
            if used > self.size:
                raise Full(f"No space left on device: {used} bytes of {self.size}")

    def run(
        self, script: str, environment: Mapping[str, str], log: Path, stop: str, deadline: float
    ) -> int:
        """Run a step's script as GitHub does; returns its exit code.

        Args:
            script: Of bash.
            environment: All of its variables.
            log: Gets what it prints.
            stop: What happens once it has reached a point of `hold`: "kill" takes the machine away,
                "late" does so because the job's time is up, "time" lets the driver's time box end
                there.
            deadline: Of time.monotonic().

        Raises:
            Lost: The machine was taken away.
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
        """Yield its processes, whatever session they are in, and if with another environment."""
        mark = b"MACHINE=%s\0" % bytes(self.folder)
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_marked = mark in (entry / "environ").read_bytes()
                if is_marked or (entry / "cwd").readlink().is_relative_to(self.folder):
                    yield int(entry.name)

    def end_time_box(self) -> None:
        """Send the driver the signal of --stop-after, as if its time were up."""
        for process in self.processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
                if b"--stop-after" in words and b"python" in words[0]:
                    os.kill(process, signal.SIGALRM)

    def kill(self) -> None:
        """End all that runs, at once."""
        while processes := list(self.processes()):
            for process in processes:
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
