# SPDX-License-Identifier: BSD-3-Clause
"""Command lines that documents and workflows show."""

from __future__ import annotations

from typer.testing import CliRunner

from forge.cli.main import app


def understood(words: list[str]) -> bool:
    """Whether the driver knows a line, up to what it passes on; --help keeps it from running."""
    stops = [words.index(stop) + 1 for stop in ("run", "test") if stop in words]
    return CliRunner().invoke(app, [*words[: min(stops, default=None)], "--help"]).exit_code == 0
