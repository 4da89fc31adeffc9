# SPDX-License-Identifier: BSD-3-Clause
"""Read the kernel's messages of faults while the loads run, if this user may read them."""

import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path

#: Messages about a failure of the GPU, its driver, the memory or other hardware, or a hung task.
_FAULTS = re.compile(
    r"(amdgpu|amdkfd|\[drm).*(ring \S+ timeout|GPU reset|page fault|MES.*failed|device wedged"
    r"|SMU.*(No response|failed)|\*ERROR\*)"
    r"|NVRM: Xid|AMD-Vi.*(IO_PAGE_FAULT|Event logged)|Out of memory: Killed|oom-kill:"
    r"|Hardware Error|Machine check|blocked for more than \d+ seconds",
    re.I,
)
#: Matches names of processes. They are private to the user, so they are removed from messages.
_PROCESS = re.compile(r"\b(process|thread|task) (\S+ pid \d+|\d+ \([^)]*\)|\S+:\d+)", re.I)
KMSG = Path("/dev/kmsg")


class KernelLog:
    """The kernel's messages since this object was created.

    Attributes:
        absent: The reason why the messages cannot be read, or "".
    """

    def __init__(self) -> None:
        self.absent = ""
        self._journal: subprocess.Popen | None = None
        self._incomplete = b""
        try:
            self._file = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)
            self._incomplete = self._read_record()
        except OSError as error:
            self._follow_journal(error)

    def _follow_journal(self, error: OSError) -> None:
        """Read the journal instead of /dev/kmsg; members of systemd-journal or adm may read it."""
        program = shutil.which("journalctl")
        if not program or not _has_lines(program):
            self.absent = (
                f"{KMSG}: {error.strerror}, and the journal shows no messages of the kernel: run "
                "as root, or join the group systemd-journal (adm on Debian and Ubuntu)"
            )
            return
        self._journal = subprocess.Popen(
            [
                program,
                "--dmesg",
                "--follow",
                "--lines=0",
                "--output=cat",
                "--quiet",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._file = self._journal.stdout.fileno()  # type: ignore[union-attr]
        os.set_blocking(self._file, False)

    def _read_record(self) -> bytes:
        """Return a record of /dev/kmsg, or a part of the journal; empty if there is no more."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self._file, 1 << 16)
        return b""

    def faults(self) -> list[str]:
        """Return the messages of faults that came since the last call."""
        if self.absent:
            return []
        while True:
            try:
                part = self._read_record()
            except BrokenPipeError:
                # The ring buffer was overwritten. Its older records are lost, so read on.
                continue
            if not part:
                break
            self._incomplete += part
        *lines, self._incomplete = self._incomplete.split(b"\n")
        return select_faults([line.decode(errors="replace") for line in lines])

    def close(self) -> None:
        """Stop reading."""
        if self._journal:
            self._journal.kill()
            self._journal.wait()
        elif not self.absent:
            os.close(self._file)


def _has_lines(journalctl: str) -> bool:
    """Return whether the journal shows this user any message of the kernel."""
    command = [journalctl, "--dmesg", "--lines=1", "--output=cat", "--quiet"]
    try:
        process = subprocess.run(command, capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return bool(process.stdout)


def select_faults(lines: list[str]) -> list[str]:
    """Return the messages of faults among lines of /dev/kmsg or the journal.

    The names of processes are removed.
    """
    faults = []
    for line in lines:
        # /dev/kmsg has numbers before a message: 6,1234,5678901234,-;message
        message = re.sub(r"^\d+,\d+,\d+,[^;]*;", "", line)
        if _FAULTS.search(message):
            faults.append(_PROCESS.sub(r"\1 …", message).strip())
    return faults
