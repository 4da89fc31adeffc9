# SPDX-License-Identifier: BSD-3-Clause
"""Command lines of the driver in this process: those that documents show, and how they end."""

from typer.testing import CliRunner

from forge.cli.main import app
from forge.errors import ForgeError


def understood(words: list[str]) -> bool:
    """Whether the driver knows a line, up to what it passes on; --help keeps it from running."""
    stops = [words.index(stop) + 1 for stop in ("run", "test") if stop in words]
    words = words[: min(stops, default=None)]
    value = ["x"] if words[-1].startswith("-") else []  # or --help would be the last option's
    return CliRunner().invoke(app, [*words, *value, "--help"]).exit_code == 0


def refused(*words: str, **environment: str) -> ForgeError:
    """The error in which a command ends."""
    done = CliRunner().invoke(app, words, env=environment)
    assert isinstance(done.exception, ForgeError), done.output
    return done.exception
