# SPDX-License-Identifier: BSD-3-Clause
"""The command line: where options may stand, options for other programs, exit codes."""

import io
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from support.commands import expect_error
from support.project import CHECKOUT, MiniProject, drive, driver, driver_environment
from typer.main import get_command
from typer.testing import CliRunner

from forge.bases import BaseName
from forge.building.display import Display
from forge.cli import main
from forge.cli.context import Context, ForgeCommand, ForgeGroup, OptionalPackages
from forge.conda.location import Location
from forge.envs.workspace import Workspace
from forge.errors import ForgeError


@pytest.fixture(autouse=True)
def no_base_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORGE_BASE", raising=False)


@pytest.fixture
def contexts() -> tuple[typer.Typer, list[Context]]:
    """A command line like the real one, and the contexts that its one command received."""
    app = typer.Typer(cls=ForgeGroup)
    received: list[Context] = []

    @app.callback()
    def options() -> None:
        pass

    @app.command(cls=ForgeCommand)
    def show(context: typer.Context, words: OptionalPackages = None) -> None:
        received.append(context.obj)

    return app, received


@pytest.mark.parametrize(
    "line",
    [
        "--base host --output x --variant a=1 --variant b=2 show word",
        "show --base host --output x --variant a=1 --variant b=2 word",
        "show word --base=host --output=x --variant=a=1 --variant=b=2",
        "--base host --variant a=1 show --output x word --variant b=2",
        "--base conda-forge --output y --variant a=1 show --base host --output x --variant b=2",
    ],
)
def test_shared_options_before_and_after_the_command(
    contexts: tuple[typer.Typer, list[Context]], line: str
) -> None:
    app, received = contexts
    assert CliRunner().invoke(app, line.split()).exit_code == 0
    (forge,) = received
    assert forge.base_name == BaseName.HOST
    assert forge.output == Path("x")
    assert forge.variants == ["a=1", "b=2"]


def test_base_from_the_environment(
    contexts: tuple[typer.Typer, list[Context]], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, received = contexts
    monkeypatch.setenv("FORGE_BASE", "conda-forge")
    for line in ("show", "--base host show", "show --base host"):
        assert CliRunner().invoke(app, line.split()).exit_code == 0
    names = [forge.base_name for forge in received]
    assert names == [BaseName.CONDA_FORGE, BaseName.HOST, BaseName.HOST]
    monkeypatch.setenv("FORGE_BASE", "other")
    done = CliRunner().invoke(app, ["show"])
    assert isinstance(done.exception, ForgeError)
    assert "FORGE_BASE='other' is not one of" in str(done.exception)


def test_an_unknown_base_is_a_usage_error(contexts: tuple[typer.Typer, list[Context]]) -> None:
    for line in ("--base other show", "show --base other"):
        done = CliRunner().invoke(contexts[0], line.split())
        output = " ".join(done.output.replace("│", " ").split())
        assert done.exit_code == 2
        assert "'other' is not one of 'auto', 'conda-forge', 'host'" in output


@pytest.mark.parametrize(
    ("line", "environment", "message"),
    [
        ("build nothing", {}, "no recipe nothing; there are: alpha"),
        ("build Alpha", {}, "did you mean alpha?"),
        ("lock nowhere", {}, "no stack 'nowhere'"),
        ("build-all", {"MAX_JOBS": "many"}, "MAX_JOBS"),
        ("build-all --package-format zip:1", {}, "'zip:1' is not conda:LEVEL"),
    ],
)
def test_usage(tmp_path: Path, line: str, environment: dict[str, str], message: str) -> None:
    MiniProject(tmp_path).recipe("alpha")
    words = ["--base", "conda-forge", *line.split()]
    error = expect_error(*words, FORGE_ROOT=str(tmp_path), **environment)
    assert message in str(error)
    assert error.exit_code == 2
    (tmp_path / "variants.yaml").write_text("pytorch: [")
    assert "variants.yaml" in str(expect_error("plan", FORGE_ROOT=str(tmp_path), FORGE_BASE="host"))


def test_an_empty_channel_is_not_the_local_one(tmp_path: Path) -> None:
    """A shell passes an empty value if the variable in `--channel "$VARIABLE"` is not set."""
    mini = MiniProject(tmp_path)
    mini.recipe("alpha")
    mini.stack("app", "alpha")
    words = ("lock", "app", "--base", "conda-forge", "--channel", "")
    error = expect_error(*words, FORGE_ROOT=str(tmp_path), FORGE_NO_PIXI="1")
    assert str(error) == "the channel's name is empty: give a folder or a URL"


def test_a_lock_is_for_one_python(tmp_path: Path) -> None:
    mini = MiniProject(tmp_path)
    mini.recipe("alpha")
    mini.stack("app", "alpha")
    words = ["lock", "app", "--base", "conda-forge", "--channel", str(mini.root / "channel")]
    words += ["--variant", "python=3.12", "--variant", "python=3.13"]
    error = expect_error(*words, FORGE_ROOT=str(tmp_path), FORGE_NO_PIXI="1")
    assert str(error) == "a lock is for one Python: give --variant python=VERSION once"


def test_the_package_format_is_checked_first(tmp_path: Path) -> None:
    """On conda-forge, all environments are solved before a build begins, which takes minutes."""
    MiniProject(tmp_path).recipe("alpha")
    words = ("build", "alpha", "--base", "conda-forge", "--package-format", "conda:0")
    error = expect_error(*words, FORGE_ROOT=str(tmp_path))
    assert "'conda:0' is not conda:LEVEL" in str(error)
    assert not (tmp_path / "channel").exists()


PASSED_ON = {
    "run attention tool --help": ["tool", "--help"],
    "run attention -- tool --base x": ["tool", "--base", "x"],
    "run attention -e default -- tool --variant -- x": ["tool", "--variant", "--", "x"],
    "run attention tool --variant v": ["tool", "--variant", "v"],
    "run --base host -e default attention tool --output o": ["tool", "--output", "o"],
    "run attention -- tool --channel c -e gpu": ["tool", "--channel", "c", "-e", "gpu"],
    "run attention -e default tool -e gpu": ["tool", "-e", "gpu"],
    "run -e gpu attention --environment=default --base host tool": ["tool"],
    "run attention tool -- -k x": ["tool", "--", "-k", "x"],
    "run -- attention tool --help": ["tool", "--help"],
}


@pytest.mark.parametrize("line", PASSED_ON)
def test_options_of_another_program_are_passed_on(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    monkeypatch.setenv("FORGE_NO_PIXI", "1")
    monkeypatch.setattr(Workspace, "require_installed", lambda *_: None)
    monkeypatch.setattr(Workspace, "run", lambda *words: ran.extend(words[1:]))
    done = CliRunner().invoke(main.app, line.split())
    assert done.exit_code == 0, done.output
    assert ran == ["default", PASSED_ON[line]]


def test_pytest_gets_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(words)
        return subprocess.CompletedProcess(words, 5)

    monkeypatch.setattr(subprocess, "run", run)
    done = CliRunner().invoke(main.app, ["test", "-x", "-k", "a or b", "--output", "o", "-n0"])
    assert done.exit_code == 5
    assert ran[0][-6:] == ["-x", "-k", "a or b", "--output", "o", "-n0"]


@pytest.mark.parametrize("line", ["plan", "plan --json", "status", "--help"])
def test_a_closed_pipe_is_no_error(tmp_path: Path, line: str) -> None:
    project = MiniProject(tmp_path / "project")
    for number in range(3):
        project.recipe(f"recipe{number}")
    closed, pipe = os.pipe()
    # Close the reading end before the driver writes anything.
    os.close(closed)
    done = subprocess.run(
        driver(CHECKOUT, "--base", "conda-forge", *line.split()),
        text=True,
        check=False,
        env=driver_environment(project.root),
        stdout=pipe,
        stderr=subprocess.PIPE,
    )
    os.close(pipe)
    # Ignore this line, which may end with the error of a server.
    messages = re.sub(r"could not check whether conda-forge has .*", "", done.stderr)
    assert done.returncode == 0
    assert "error" not in messages.lower()
    assert "Traceback" not in messages


def test_status_lists_each_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = MiniProject(tmp_path)
    project.recipe("alpha")
    project.recipe("beta")
    monkeypatch.setenv("FORGE_ROOT", str(project.root))
    done = CliRunner().invoke(main.app, ["--base", "conda-forge", "status"])
    assert re.fullmatch(r"alpha 1.0 \S+: not built\nbeta 1.0 \S+: not built\n", done.stdout)


def test_no_threads_for_rattler_is_no_panic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver works if TOKIO_WORKER_THREADS is 0, as batch systems set it.

    rattler's runtime would panic with a stack trace.
    """
    monkeypatch.setenv("TOKIO_WORKER_THREADS", "0")
    monkeypatch.setenv("RUST_BACKTRACE", "1")
    project = MiniProject(tmp_path)
    project.stack("app", "alpha")
    words = "lock", "app", "--channel", "http://127.0.0.1:1/c"
    done = project.forge(*words, code=3, FORGE_BASE="conda-forge")
    assert "panicked" not in done.stderr and "bug in forge" not in done.stderr


def test_parts_of_the_command_line_work_alone(tmp_path: Path) -> None:
    """Groups of commands also work as command lines of their own, without shared options."""
    from forge.cli import publishing, upkeep

    for app, name, path in (
        (upkeep.sources_app, "add", tmp_path / "absent"),
        (publishing.app, "verify", tmp_path / "absent"),
        (publishing.app, "verify", tmp_path),
    ):
        done = CliRunner().invoke(app, [name, str(path)])
        assert done.exit_code == 2
        assert "Invalid value" in done.output


def list_commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of a command and of all commands below it."""
    yield words
    for name, command in getattr(group, "commands", {}).items():
        yield from list_commands(command, (*words, name))


@pytest.mark.parametrize("words", list(list_commands(get_command(main.app))), ids=" ".join)
def test_help_names_no_type_of_python(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(main.app, [*words, "--help"], terminal_width=200).stdout
    assert "Usage:" in shown
    assert not re.search(r"<(list|bool|str|int|path|file|dir)\b", shown)


def test_completion_of_a_shell() -> None:
    """The driver completes a word when the shell sets these variables.

    The command `./forge --install-completion` configures the shell to set them.
    """
    variables = {"_FORGE_COMPLETE": "complete_bash", "COMP_WORDS": "forge pl", "COMP_CWORD": "1"}
    assert drive(CHECKOUT, **variables).stdout.split() == ["plan"]


@pytest.mark.parametrize(
    ("option", "output"),
    [([], "a message\n"), (["--quiet"], ""), (["-v"], "a message\na line of a build\n")],
)
def test_verbosity(monkeypatch: pytest.MonkeyPatch, option: list[str], output: str) -> None:
    displays: list[Display] = []

    def make(self: Context, console: Console) -> Display:
        displays.append(Display(Console(file=io.StringIO()), self.verbosity))
        raise ForgeError("the display is not used")

    monkeypatch.setattr(Context, "display", make)
    CliRunner().invoke(main.app, [*option, "sources", "fetch"])
    (display,) = displays
    console = display.console
    display.say("a message")
    display.line("a line of a build")
    display.say("failed", always=True)
    assert console.file.getvalue() == f"{output}failed\n"


@pytest.mark.parametrize(
    "fault", [ValueError("x" * 70_000), type("PanicException", (BaseException,), {})("y")]
)
def test_what_nobody_foresaw_is_one_line_and_a_log(
    fault: BaseException, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def app(**_: object) -> None:
        raise fault

    monkeypatch.setattr(main, "app", app)
    assert main.run() == 1
    output = capfd.readouterr().err.strip()
    assert output.startswith(f"error: {type(fault).__name__}: ")
    assert "\n" not in output
    assert len(output) < 1000
    log = Path(output.rsplit(" ", 1)[1])
    assert "Traceback" in log.read_text()
    log.unlink()


def test_a_user_without_a_home_folder_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a container, a user id may be unknown. Then nothing but HOME names the home folder."""

    def fails(_: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", fails)
    monkeypatch.setattr("sys.argv", ["forge", "clean"])
    assert main.run() == 2
    assert "set HOME to a folder" in capfd.readouterr().err


@pytest.mark.parametrize("host", [":80", "a b", "%zz", "[::1]]", "[::1", "h:x", ""])
def test_a_malformed_url_is_one_message(host: str) -> None:
    for scheme in ("http", "https"):
        with pytest.raises(ForgeError, match="malformed channel URL"):
            Location(f"{scheme}://{host}/c")
    for host in ("h", "a-b.example:8080", "[::1]:80", "127.0.0.1"):
        assert Location(f"https://{host}/c").url.endswith("/c")
