# SPDX-License-Identifier: BSD-3-Clause
"""Child processes that may hang with the GPU. Their output can be read without waiting."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path


class LineProcess:
    """A Python process in its own process group, which `stop` ends.

    Ctrl-C on the terminal does not reach this process; its parent decides when it ends.
    """

    def __init__(self, arguments: Sequence[str | Path], log: Path) -> None:
        """Start Python.

        Args:
            arguments: The arguments of Python.
            log: The file to which standard error is appended.
        """
        path = os.pathsep.join(filter(None, sys.path))
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                # Without -P, the process would import libraries from the current folder.
                [sys.executable, "-P", *arguments],
                env=os.environ | {"PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                start_new_session=True,
            )
        self._output = self._process.stdout.fileno()  # type: ignore[union-attr]
        os.set_blocking(self._output, False)
        self.pid = self._process.pid
        self._incomplete = b""

    def lines(self) -> list[str]:
        """Return the complete lines that were written since the last call."""
        while True:
            try:
                part = os.read(self._output, 1 << 16)
            except BlockingIOError:
                break
            if not part:
                break
            self._incomplete += part
        *lines, self._incomplete = self._incomplete.split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def wait_for_lines(self, limit: float) -> list[str]:
        """Wait for output, and return its complete lines.

        Return an empty list if the output is an incomplete line, or if the output was closed.

        Args:
            limit: Seconds to wait.

        Raises:
            TimeoutError: There is no output within the limit.
        """
        ready, _, _ = select.select([self._output], [], [], limit)
        if not ready:
            raise TimeoutError(f"no answer in {limit:.0f} s")
        return self.lines()

    def lines_until_end(self, limit: float) -> Iterator[str]:
        """Yield the complete lines that are written until the process ends.

        Args:
            limit: Seconds to wait for a line.

        Raises:
            TimeoutError: Nothing is written within the limit.
        """
        while True:
            is_over = self.status() is not None
            lines = self.wait_for_lines(limit)
            yield from lines
            if is_over and not lines:
                return
            if not lines:
                # Wait, because the line is incomplete, or the output ended before the process.
                time.sleep(0.05)

    def status(self) -> int | None:
        """Return the exit status, negative for a signal, or None while the process runs."""
        return self._process.poll()

    def kernel_state(self) -> str:
        """Return the state of the process from /proc, such as "D in amdgpu_fence_wait", or ""."""
        folder = Path("/proc", str(self.pid))
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2]
            letter = fields.split()[0]
            function = (folder / "wchan").read_text().strip("0\n")
        except (OSError, IndexError):
            return ""
        return f"{letter} in {function}" if function else letter

    def stop(self, limit: float = 10.0) -> bool:
        """End the process and its children; return False if it cannot be killed.

        Standard input is closed, so that the process can end by itself. If it does not, it is
        killed. A process that waits inside a driver ignores even SIGKILL; 5 seconds later, it is
        abandoned.

        Args:
            limit: Seconds within which the process may end by itself.
        """
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            return False
        return True
