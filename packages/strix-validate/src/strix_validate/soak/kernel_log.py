# SPDX-License-Identifier: BSD-3-Clause
"""What the kernel says while the loads run, where this user may read it."""

import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path

#: Lines that say that the GPU, its driver or the memory failed.
_FAULTS = re.compile(
    r"(amdgpu|amdkfd|\[drm).*(ring \S+ timeout|GPU reset|page fault|MES.*failed|device wedged"
    r"|SMU.*(No response|failed)|\*ERROR\*)"
    r"|NVRM: Xid|AMD-Vi.*(IO_PAGE_FAULT|Event logged)|Out of memory: Killed|oom-kill:"
    r"|Hardware Error|Machine check|blocked for more than \d+ seconds",
    re.I,
)
#: Names of processes, which are the user's own business.
_PROCESS = re.compile(r"\b(process|thread|task) (\S+ pid \d+|\d+ \([^)]*\)|\S+:\d+)", re.I)
KMSG = Path("/dev/kmsg")


class KernelLog:
    """The kernel's messages from now on; `absent` is the reason where they cannot be read."""

    def __init__(self) -> None:
        self.absent = ""
        self._journal: subprocess.Popen | None = None
        self._rest = b""
        try:
            self._file = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)
            self._rest = self._read_record()
        except OSError as error:
            self._follow_journal(error)

    def _follow_journal(self, error: OSError) -> None:
        """Read the journal instead, where a group of this user's may."""
        program = shutil.which("journalctl")
        if not program or not _has_lines(program):
            self.absent = (
                f"{KMSG}: {error.strerror}, and the journal shows none: run as root, or join the "
                "group systemd-journal (adm on Debian and Ubuntu)"
            )
            return
        command = [program, "--dmesg", "--follow", "--lines=0", "--output=cat", "--quiet"]
        self._journal = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._file = self._journal.stdout.fileno()  # type: ignore[union-attr]
        os.set_blocking(self._file, False)

    def _read_record(self) -> bytes:
        """Return a record, or part of the journal; nothing where there is no more."""
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
            except BrokenPipeError:  # the ring buffer went round: records were lost
                continue
            if not part:
                break
            self._rest += part
        *whole, self._rest = self._rest.split(b"\n")
        return select_faults([line.decode(errors="replace") for line in whole])

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
        return bool(subprocess.run(command, capture_output=True, timeout=20).stdout)
    except (OSError, subprocess.TimeoutExpired):
        return False


def select_faults(lines: list[str]) -> list[str]:
    """Return the messages of faults among lines of /dev/kmsg or the journal, without processes."""
    messages = (re.sub(r"^\d+,\d+,\d+,[^;]*;", "", line) for line in lines)
    return [
        _PROCESS.sub(r"\1 …", message).strip() for message in messages if _FAULTS.search(message)
    ]
