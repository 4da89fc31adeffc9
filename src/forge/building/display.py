# SPDX-License-Identifier: BSD-3-Clause
"""What a person sees of a run: a live line for each build on a terminal, plain lines elsewhere."""

from collections import defaultdict
from threading import get_ident

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

LARGE = 50 << 20  # bytes


class Display(Progress):
    """Phases of a run, and the last line of what runs; a context manager.

    `verbosity` is 1 to print every line of what runs, -1 to print none but the results.
    """

    verbosity = 0

    def __init__(self, console: Console) -> None:
        super().__init__(
            SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn(),
            TextColumn("{task.fields[line]}", style="dim", markup=False),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self.lines = defaultdict[int, TaskID](lambda: self.add_task("", line=""))  # by thread
        self.tenth = -1

    def say(self, text: str, always: bool = False) -> None:
        """Print a line that stays; a result or an error `always`."""
        if always or self.verbosity >= 0:
            self.console.print(text, highlight=False, markup=False)

    def phase(self, name: str) -> None:
        """Begin a phase, for example `[2/4] flash-attn 2.8.3: testing`, or end it with ""."""
        self.reset(self.lines[get_ident()], description=name, line="", visible=bool(name))
        if self.disable and name:
            self.say(name)

    def line(self, text: str) -> None:
        """Show the last line of the running log."""
        if self.verbosity > 0:
            self.say(text.rstrip())
        self.update(self.lines[get_ident()], line=text.strip()[: max(20, self.console.width // 2)])

    def download(self, name: str, have: int, total: int | None) -> None:
        """Show the bytes of a download; every tenth of a large one where there is no terminal."""
        self.line(f"{name} {have >> 20} of {(total or 0) >> 20 or '?'} MiB")
        tenth = have * 10 // total if total else 0
        if self.disable and total and total > LARGE and tenth != self.tenth:
            self.say(f"  {name}: {have >> 20} of {total >> 20} MiB")
        self.tenth = tenth
