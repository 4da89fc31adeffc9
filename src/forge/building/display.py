# SPDX-License-Identifier: BSD-3-Clause
"""Progress of a run: a live line for each build on a terminal, plain lines elsewhere."""

from collections import defaultdict
from threading import get_ident

from rich.console import Console
from rich.progress import (
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

LARGE_BYTES = 50 << 20


class Display(Progress):
    """A context manager that shows each build's current phase and last line of output.

    Attributes:
        verbosity: 0 prints messages and results, and without a terminal also phases and the
            progress of large downloads. 1 prints the lines of output, too. -1 prints only results
            and errors.
    """

    def __init__(self, console: Console, verbosity: int = 0) -> None:
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[line]}", style="dim", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.verbosity = verbosity
        self._task_by_thread = defaultdict[int, TaskID](self._add_empty_task)
        self._last_tenth = -1

    def _add_empty_task(self) -> TaskID:
        return self.add_task("", line="")

    def say(self, text: str, always: bool = False) -> None:
        """Print a line that stays.

        Args:
            text: The line.
            always: Print the line even with `--quiet`, because it is a result or an error.
        """
        if always or self.verbosity >= 0:
            self.console.print(text, highlight=False, markup=False)

    def phase(self, name: str) -> None:
        """Show a new phase, such as `[2/4] flash-attn 2.8.3: testing`, or none if `name` is ""."""
        self.reset(
            self._task_by_thread[get_ident()],
            description=name,
            line="",
            visible=bool(name),
        )
        if self.disable and name:
            self.say(name)

    def line(self, text: str) -> None:
        """Show a line of output in place of the previous one. With verbosity 1, print it, too."""
        if self.verbosity > 0:
            self.say(text.rstrip())
        width = max(20, self.console.width // 2)
        task = self._task_by_thread[get_ident()]
        self.update(task, line=text.strip()[:width])

    def download(self, name: str, received: int, total: int | None) -> None:
        """Show the progress of a download; without a terminal, a line per tenth of a large file.

        Args:
            name: The name of the file.
            received: Number of bytes so far.
            total: Size of the file in bytes, or None if the server does not state it.
        """
        mebibytes = received >> 20
        if not total:
            self.line(f"{name} {mebibytes} of ? MiB")
            self._last_tenth = 0
            return
        total_mebibytes = total >> 20
        self.line(f"{name} {mebibytes} of {total_mebibytes or '?'} MiB")
        tenth = received * 10 // total
        is_new_tenth = tenth != self._last_tenth
        if self.disable and total > LARGE_BYTES and is_new_tenth:
            self.say(f"  {name}: {mebibytes} of {total_mebibytes} MiB")
        self._last_tenth = tenth
