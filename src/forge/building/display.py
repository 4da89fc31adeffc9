# SPDX-License-Identifier: BSD-3-Clause
"""What a person sees of a run: one live line on a terminal, plain lines elsewhere."""

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

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
        self.task = self.add_task("", line="")
        self.tenth = -1

    def say(self, text: str, always: bool = False) -> None:
        """Print a line that stays; a result or an error `always`."""
        if always or self.verbosity >= 0:
            self.console.print(text, highlight=False, markup=False)

    def phase(self, name: str) -> None:
        """Begin a phase, for example `[2/4] flash-attn 2.8.3: testing`."""
        self.reset(self.task, description=name, line="")
        if self.disable:
            self.say(name)

    def line(self, text: str) -> None:
        """Show the last line of the running log."""
        if self.verbosity > 0:
            self.say(text.rstrip())
        self.update(self.task, line=text.strip()[: max(20, self.console.width // 2)])

    def download(self, name: str, have: int, total: int | None) -> None:
        """Show the bytes of a download; every tenth of a large one where there is no terminal."""
        self.line(f"{name} {have >> 20} of {(total or 0) >> 20 or '?'} MiB")
        tenth = have * 10 // total if total else 0
        if self.disable and total and total > LARGE and tenth != self.tenth:
            self.say(f"  {name}: {have >> 20} of {total >> 20} MiB")
        self.tenth = tenth
