# SPDX-License-Identifier: BSD-3-Clause
"""A path on the command line is relative to the caller's working folder."""

import hashlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from support import small_channel
from support.project import CHECKOUT, MiniProject
from typer.testing import CliRunner

from forge.cli import upkeep
from forge.cli.context import SHARED_OPTIONS, ForgeCommand
from forge.cli.main import app

ARCHIVE = "https://upstream.invalid/a.tar.gz"


@dataclass
class Call:
    """The files for one call of a command.

    Attributes:
        project: The project.
        folder: A folder outside of the project.
        path: The path of that folder, relative to the caller's working folder.
    """

    project: MiniProject
    folder: Path
    path: str


# Each of these functions prepares a command that has a path as an argument. It returns the command
# line, and a text that the output has if the command has found the path.


def add(call: Call) -> tuple[list[str], str]:
    (call.folder / "a.tar.gz").write_bytes(b"source")
    digest = hashlib.sha256(b"source").hexdigest()
    call.project.recipe("alpha", source=f"{{url: '{ARCHIVE}', sha256: '{digest}'}}")
    (call.project.root / "build/sources").unlink()
    return ["sources", "add", f"{call.path}/a.tar.gz"], f"{call.path}/a.tar.gz is {ARCHIVE}"


def verify(call: Call) -> tuple[list[str], str]:
    name = small_channel.package(call.folder, "alpha", "1.0")
    words = ["verify", f"{call.path}/noarch/{name}"]
    return words, f"{name}: no recipe of this checkout yields this package"


def publish(call: Call) -> tuple[list[str], str]:
    words = ["publish", "--to", call.path, "--withdraw", "alpha-1.0-0", "--reason", "wrong"]
    return words, str(call.folder)


def output(call: Call) -> tuple[list[str], str]:
    words = ["publish", "--to", f"{call.path}/public", "--output", call.path]
    return words, f"nothing is published: {call.folder} holds no packages"


def validated(call: Call) -> tuple[list[str], str]:
    (call.folder / "files").write_text("no line of sha256sum\n")
    words = ["publish", "--to", f"{call.path}/public", "--validated", f"{call.path}/files"]
    return words, f"{call.path}/files, line 1"


def compare(call: Call) -> tuple[list[str], str]:
    words = ["compare", call.path, call.path]
    return words, f"{call.path} and {call.path} have no package of kernels in common"


def lock(call: Call) -> tuple[list[str], str]:
    small_channel.make(call.folder, "alpha")
    base = call.project.root / "build/host-base"
    base.unlink()
    small_channel.make(base)
    call.project.stack("app", "alpha")
    return ["lock", "app", "--channel", call.path], "default: 1 packages"


# For each command with a parameter that is a path, the function that prepares a call.
PATH_PARAMETERS: dict[tuple[str, str], Callable[[Call], tuple[list[str], str]]] = {
    ("sources add", "files"): add,
    ("verify", "files"): verify,
    ("publish", "to"): publish,
    ("publish", "validated"): validated,
    ("compare", "old"): compare,
    ("compare", "new"): compare,
    ("lock", "channel"): lock,
    ("every command", "output"): output,
}


def list_path_parameters(function: Callable[..., Any]) -> Iterator[str]:
    """Yield each parameter whose type is a path, or which the help shows as DIR or URL."""
    for name, parameter in inspect.signature(function).parameters.items():
        options = getattr(parameter.annotation, "__metadata__", ())
        is_path_in_help = any(option.metavar in ("DIR", "URL") for option in options)
        if "Path" in str(parameter.annotation) or is_path_in_help:
            yield name


def list_commands_with_paths(part: typer.Typer, group: str = "") -> Iterator[tuple[str, str]]:
    """Yield each command that has a path as a parameter, and the parameter."""
    for command in part.registered_commands:
        assert command.callback and issubclass(command.cls, ForgeCommand)
        for name in list_path_parameters(command.callback):
            yield f"{group} {command.callback.__name__}".strip(), name
    for inner in part.registered_groups:
        assert inner.typer_instance
        name = inner.name if isinstance(inner.name, str) else ""
        yield from list_commands_with_paths(inner.typer_instance, name)


def test_each_such_command_is_in_the_table() -> None:
    shared = {("every command", name) for name in list_path_parameters(SHARED_OPTIONS.callback)}
    assert shared | set(list_commands_with_paths(app)) == PATH_PARAMETERS.keys()


@pytest.mark.parametrize("place", [".", "recipes", "build/deep/er", ".."])
@pytest.mark.parametrize("case", PATH_PARAMETERS, ids=" ".join)
def test_a_path_is_the_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, str], place: str
) -> None:
    project = MiniProject(tmp_path / "project")
    folder = tmp_path / "folder"
    working_folder = project.root / place
    folder.mkdir()
    working_folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(working_folder)
    words, expected = PATH_PARAMETERS[case](Call(project, folder, os.path.relpath(folder)))
    done = CliRunner().invoke(app, words, env=project.environment)
    assert expected in f"{done.output}{done.exception}"


@pytest.mark.parametrize(
    ("place", "path"),
    [
        (".", "tests/unit/test_network.py"),
        ("tests/unit", "test_network.py"),
        ("docs", "../tests/unit/test_network.py"),
        ("/", str(CHECKOUT / "tests/unit/test_network.py")),
    ],
)
def test_tests_run_from_any_folder(place: str, path: str) -> None:
    """`forge test` runs the tests at a path of the caller with the checkout's configuration."""
    command = [sys.executable, CHECKOUT / "src/forge", "test", "--co", "-q", "-n0", path]
    done = subprocess.run(
        command, cwd=CHECKOUT / place, capture_output=True, text=True, check=False
    )
    names = [line for line in done.stdout.splitlines() if "::" in line]
    assert done.returncode == 0 and len(names) > 5, done.stdout + done.stderr
    assert all(name.startswith("tests/unit/test_network.py::") for name in names)


@pytest.mark.parametrize(
    ("words", "has_path"),
    [
        ([], False),
        (["-k", "network"], False),
        (["-x", "test_a.py::test_one"], True),
        (["--ignore=test_a.py"], True),
        (["test_lost.py"], False),
    ],
)
def test_without_a_path_all_tests_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], has_path: bool
) -> None:
    """Without an existing path among its arguments, pytest runs in the checkout.

    In the caller's folder, it would only run the tests of that folder.
    """
    (tmp_path / "test_a.py").touch()
    monkeypatch.chdir(tmp_path)
    folders: list[Path] = []

    def run(command: list[str], *, cwd: Path, check: bool) -> subprocess.CompletedProcess[str]:
        assert command[-len(words) :] == words or not words
        folders.append(cwd)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(upkeep.subprocess, "run", run)
    assert CliRunner().invoke(app, ["test", *words]).exit_code == 0
    assert folders == [tmp_path if has_path else CHECKOUT]


def test_linters_read_what_git_tracks(tmp_path: Path) -> None:
    """A pattern matches the files that git does not ignore, or all files without a repository."""
    for name in ("packages/a/src/x.c", "packages/a/build/lib/x.c", "packages/a/new.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    pattern = "packages/**/*.[ch]"
    everything = ["packages/a/build/lib/x.c", "packages/a/new.h", "packages/a/src/x.c"]
    assert sorted(upkeep.expand_pattern(pattern, tmp_path)) == everything
    (tmp_path / ".gitignore").write_text("/packages/*/build/\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "packages/a/src/x.c"], cwd=tmp_path, check=True)
    assert sorted(upkeep.expand_pattern(pattern, tmp_path)) == everything[1:]
    assert upkeep.expand_pattern("--strict", tmp_path) == ["--strict"]
