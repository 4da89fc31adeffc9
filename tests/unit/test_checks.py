# SPDX-License-Identifier: BSD-3-Clause
"""`forge lint` reports the outcome of each linter and of its own check of versions."""

import subprocess
from pathlib import Path

import pytest
from support.project import MiniProject
from typer.testing import CliRunner

from forge.cli import upkeep
from forge.cli.main import app


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ({}, 0),
        ({"mypy": 1}, 1),
        ({"zizmor": None}, 3),
        ({"ruff": 1, "zizmor": None}, 1),
    ],
)
def test_lint_says_what_each_linter_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcomes: dict[str, int | None], code: int
) -> None:
    """Each linter's exit code is reported. The outcome None means that a linter is missing."""
    project = MiniProject(tmp_path / "project")
    project.recipe("alpha")
    ran: list[list[str]] = []

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        # This git lists no tracked file, like the real one in an unpacked archive.
        if words[0] == "git":
            return subprocess.CompletedProcess(words, 0, "")
        ran.append(words)
        outcome = outcomes.get(words[0], 0)
        if outcome is None:
            raise FileNotFoundError
        return subprocess.CompletedProcess(words, outcome)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("FORGE_ROOT", str(project.root))
    done = CliRunner().invoke(app, ["lint", "--base", "conda-forge"])
    assert done.exit_code == code, done.output
    commands: list[list[str]] = []
    for line in upkeep.LINTERS:
        command: list[str] = []
        for word in line.split():
            # A word of a command may be a pattern of file names.
            command += upkeep.expand_pattern(word, project.root)
        commands.append(command)
    assert ran == commands
    (shellcheck,) = [command for command in ran if command[0] == "shellcheck"]
    assert "recipes/alpha/build.sh" in shellcheck
    assert "versions: clean" in done.output
    for name, outcome in outcomes.items():
        message = "not run: not installed" if outcome is None else "findings"
        assert name in done.output
        assert message in done.output


def test_versions_that_do_not_go_together_are_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = MiniProject(tmp_path / "project")
    project.recipe("alpha")
    project.recipe("beta", run=["alpha >=2"])
    monkeypatch.setattr(
        subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, 0, "")
    )
    monkeypatch.setenv("FORGE_ROOT", str(project.root))
    done = CliRunner().invoke(app, ["lint"])
    assert done.exit_code == 1
    assert "versions: findings" in done.output
    assert "recipes/beta requires alpha >=2, but ours is 1.0" in done.output
