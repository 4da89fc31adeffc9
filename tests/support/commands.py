# SPDX-License-Identifier: BSD-3-Clause
"""Helpers that parse or run a command line of the driver in this process."""

from typer.testing import CliRunner

from forge.cli.main import app
from forge.errors import ForgeError


def is_accepted(words: list[str]) -> bool:
    """Return whether the driver accepts a command line.

    The words after `run` and `test` are left out, because the driver passes them on to another
    program. --help is added, so that the command only parses its options.
    """
    stops = [words.index(stop) + 1 for stop in ("run", "test") if stop in words]
    words = words[: min(stops, default=None)]
    # An option at the end of the line would take --help as its value. Give it another value.
    value = ["x"] if words[-1].startswith("-") else []
    return CliRunner().invoke(app, [*words, *value, "--help"]).exit_code == 0


def expect_error(*words: str, **environment: str) -> ForgeError:
    """Run a command that has to fail, and return its error."""
    done = CliRunner().invoke(app, words, env=environment)
    assert isinstance(done.exception, ForgeError), done.output
    return done.exception
