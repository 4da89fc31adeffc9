# SPDX-License-Identifier: BSD-3-Clause
"""`./forge` passes a command line to the driver unchanged, with pixi or without it."""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from support.commands import is_accepted
from support.project import CHECKOUT
from typer.main import get_command

from forge.cli.main import app

COMMANDS = get_command(app).commands
LISTS = ("requirements.txt", "requirements-dev.txt")
MANIFEST = tomllib.loads((CHECKOUT / "pixi.toml").read_text())
TASKS = MANIFEST["feature"]["bare"]["tasks"]


FORMS = [
    "--base host plan",
    "--variant k=v build-all",
    "plan --base=host",
    "lint",
    "test -m unit",
    "",
    "run attention -- tool --flag 'two words' '$HOME' '*' '{{x}}'",
]
# The output of pixi 0.77 if a channel does not answer.
NO_ANSWER = """\
 WARN a warning of pixi's own
Error:   \u00d7 failed to fetch a package
  \u251c\u2500\u25b6 error sending request
"""


@pytest.fixture
def pixi(tmp_path: Path) -> dict[str, str]:
    """Environment variables with a mock of pixi in PATH. It prints its arguments, one per line.

    `pixi install` prints the file pixi.error, and fails if the file has lines.
    """
    install = 'test "$1" != install || { cat "$0.error" >&2; exit "$(wc -l <"$0.error")"; }'
    (tmp_path / "pixi").write_text(f'#!/bin/sh\n{install}\nprintf "%s\\n" "$@"\n')
    (tmp_path / "pixi.error").touch()
    (tmp_path / "pixi").chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin"}


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A checkout in which no environment is installed."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("forge", "pixi.toml", "pyproject.toml", *LISTS):
        shutil.copy(CHECKOUT / name, folder)
    return folder


def launch(
    words: list[str], environment: dict[str, str], root: Path = CHECKOUT
) -> subprocess.CompletedProcess[str]:
    command = [root / "forge", *words]
    return subprocess.run(command, text=True, capture_output=True, check=False, env=environment)


def expected(words: list[str]) -> str:
    """Return the output of the mock of pixi for a command line of the driver."""
    root = str(CHECKOUT)
    environment = "dev" if words[:1] in (["test"], ["lint"]) else "default"
    pixi = ["run", "--as-is", "-e", environment, "--manifest-path", f"{root}/pixi.toml"]
    return "\n".join([*pixi, "--", "python", f"{root}/src/forge", *words, ""])


@pytest.mark.parametrize("value", ["", "0"])
def test_pixi_is_used_unless_it_is_turned_off(pixi: dict[str, str], value: str) -> None:
    done = launch(["plan"], pixi | {"FORGE_NO_PIXI": value, "FORGE_PYTHON_BIN": "/bin/false"})
    assert done.stdout == expected(["plan"])


@pytest.mark.parametrize("line", FORMS)
def test_a_line_reaches_the_driver(pixi: dict[str, str], line: str) -> None:
    words = shlex.split(line)
    done = launch(words, pixi)
    assert done.stdout == expected(words)
    assert done.returncode == 0


def test_behind_a_link(pixi: dict[str, str], tmp_path: Path) -> None:
    """Run through a link, the launcher finds its checkout and creates nothing beside the link."""
    (tmp_path / "linked").symlink_to(CHECKOUT / "forge")
    command = [tmp_path / "linked", "plan"]
    done = subprocess.run(command, text=True, capture_output=True, check=True, env=pixi)
    assert done.stdout == expected(["plan"])
    assert {path.name for path in tmp_path.iterdir()} == {"pixi", "pixi.error", "linked"}


@pytest.mark.parametrize("on_path", [True, False])
def test_help_and_version_need_no_environment(
    pixi: dict[str, str], empty: Path, on_path: bool
) -> None:
    """`--help` and `--version` are read from files of the checkout. The launcher starts nothing."""
    (empty.parent / "pixi.error").write_text(NO_ANSWER)
    environment = pixi if on_path else {"PATH": "/usr/bin:/bin"}
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    before = sorted(empty.rglob("*"))
    tasks = {name: task for name, task in TASKS.items() if name in COMMANDS}
    help_lines = [f"  {name}: {task['description']}" for name, task in tasks.items()]

    done = launch(["--version"], environment, empty)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"strix-forge {project['version']}"]

    done = launch(["--help"], environment, empty)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1:-1] == help_lines
    assert sorted(empty.rglob("*")) == before


def test_where_pixi_cannot_make_its_environment(pixi: dict[str, str], tmp_path: Path) -> None:
    """If pixi cannot make its environment, the launcher goes on as with FORGE_NO_PIXI=1.

    One line of its output has the reason.
    """
    (tmp_path / "pixi.error").write_text(NO_ANSWER)
    done = launch(["plan", "--help"], pixi | {"FORGE_PYTHON_BIN": "/bin/false"})
    *_, reason, last = done.stderr.splitlines()
    assert reason.endswith("without pixi, as with FORGE_NO_PIXI=1: failed to fetch a package")
    assert done.returncode == 2
    assert "CPython 3.11" in last, (
        "without a Python, the last line must name the one that is required"
    )


@pytest.fixture
def unserved(empty: Path) -> dict[str, str]:
    """Environment variables without pixi and with a package index that does not answer."""
    python = {"PATH": "/usr/bin:/bin", "FORGE_PYTHON_BIN": sys._base_executable}
    return python | {"PIP_INDEX_URL": "http://127.0.0.1:1/simple", "PIP_RETRIES": "1"}


def test_no_network_is_one_line(unserved: dict[str, str], empty: Path) -> None:
    """If the package index does not answer, the last line of the output states this.

    pip itself would report that there is no matching distribution.
    """
    done = launch(["plan"], unserved, empty)
    first, last = done.stderr.splitlines()
    assert done.returncode == 3
    assert "(once)" in first
    assert "reaches no package index" in last


# A mock of Python. `-m venv` copies the mock into the environment, and `-m pip` appends the name of
# the installed list to the file $INSTALLED. Both append $TMPDIR to a file in the environment.
PYTHON = """\
#!/bin/sh
case "$1 $2" in
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "$TMPDIR" >"$3/tmpdirs" ;;
"-m pip") for last; do :; done; echo "${last##*/}" >>"$INSTALLED"
    echo "$TMPDIR" >>"${0%/bin/*}/tmpdirs" ;;
esac
"""


def test_what_builds_and_what_lints_are_two_lists(empty: Path, tmp_path: Path) -> None:
    """A build installs no linter. Linters are installed once, when a command first needs them."""
    python = tmp_path / "python"
    installed = tmp_path / "installed"
    python.write_text(PYTHON)
    python.chmod(0o755)
    environment = {
        "PATH": "/usr/bin:/bin",
        "FORGE_PYTHON_BIN": str(python),
        "INSTALLED": str(installed),
        "TMPDIR": str(tmp_path),
    }
    commands = [("plan", 1), ("build-all", 1), ("lint", 2), ("test", 2), ("plan", 2)]
    for command, count in commands:
        assert launch([command], environment, empty).returncode == 0
        assert installed.read_text().split() == [*LISTS[:count]]
    # venv and pip put temporary files into the environment, because /tmp may be small.
    (venv,) = empty.glob("build/venv-*/")
    assert (venv / "tmpdirs").read_text().splitlines() == [str(venv)] * 3


# A mock of Python whose `-m venv` waits until the file $GO exists. Its `-c` runs a real Python.
SLOW_PYTHON = f"""\
#!/bin/sh
case "$1 $2" in
-c*) exec {shlex.quote(sys.executable)} "$@" ;;
"-m venv") echo venv >>"$MADE"; until [ -e "$GO" ]; do sleep 0.05; done
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
esac
"""


def test_two_first_commands_make_one_environment(empty: Path, tmp_path: Path) -> None:
    """The second command waits for the first one, and does not delete its environment."""
    python = tmp_path / "python"
    go = tmp_path / "go"
    environments = tmp_path / "made"
    python.write_text(SLOW_PYTHON)
    python.chmod(0o755)
    variables = {
        "PATH": "/usr/bin:/bin",
        "FORGE_PYTHON_BIN": str(python),
        "GO": str(go),
        "MADE": str(environments),
    }

    command = [empty / "forge", "plan"]
    messages = []
    with (
        subprocess.Popen(command, env=variables, text=True, stderr=subprocess.PIPE) as first,
        subprocess.Popen(command, env=variables, text=True, stderr=subprocess.PIPE) as second,
    ):
        for process in (first, second):
            assert process.stderr is not None
            messages.append(process.stderr.readline())
        go.touch()
    assert (first.returncode, second.returncode) == (0, 0)
    making, waiting = sorted(messages)
    assert "making a private Python environment" in making
    assert "waiting for another forge" in waiting
    assert environments.read_text().split() == ["venv"]


def test_ctrl_c_while_the_environment_is_made(unserved: dict[str, str], empty: Path) -> None:
    # pip waits for the answer of a server that never answers.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        settings = {"PIP_INDEX_URL": index, "PIP_TIMEOUT": "600"}
        child = subprocess.Popen(
            [empty / "forge", "plan"],
            env=unserved | settings,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        while not [*empty.glob("build/venv-*/pyvenv.cfg")] and child.poll() is None:
            time.sleep(0.01)
        os.killpg(child.pid, signal.SIGINT)
        _, messages = child.communicate()
    assert child.returncode == 130, messages
    assert "Traceback" not in messages
    assert "interrupted" in messages, messages


def test_without_pixi_the_python_must_do(pixi: dict[str, str]) -> None:
    unfit = {"FORGE_PYTHON_BIN": "/bin/false"}
    for environment in ({"PATH": "/usr/bin:/bin"}, pixi | {"FORGE_NO_PIXI": "1"}):
        done = launch(["plan"], environment | unfit)
        assert done.returncode == 2
        assert "CPython 3.11" in done.stderr
        assert not done.stdout


def test_tasks_are_commands_of_the_driver() -> None:
    """Each task is a command of the driver and passes all arguments on, since it has no `args`."""
    for name, task in TASKS.items():
        assert set(task) == {"cmd", "description"}
        assert task["description"]
        program, *words = shlex.split(task["cmd"])
        assert program == "./forge"
        assert is_accepted(words)
        assert words == [name] or name not in COMMANDS


@pytest.mark.parametrize(("cwd", "is_inside"), [(CHECKOUT, True), (Path("/"), False)])
def test_paths_are_the_caller_s(
    pixi: dict[str, str], tmp_path: Path, cwd: Path, is_inside: bool
) -> None:
    """A path is relative to INIT_CWD if the launcher runs in the root of the checkout.

    pixi runs a task there and sets INIT_CWD. Elsewhere, another program may have set INIT_CWD.
    """
    (tmp_path / "pixi").write_text('#!/bin/sh\ntest "$1" = install || pwd\n')
    done = subprocess.run(
        [CHECKOUT / "forge", "plan"],
        cwd=cwd,
        env=pixi | {"INIT_CWD": str(tmp_path)},
        text=True,
        capture_output=True,
        check=True,
    )
    expected_folder = tmp_path if is_inside else cwd
    assert done.stdout.strip() == str(expected_folder)


def test_the_driver_finds_its_root_from_anywhere(tmp_path: Path) -> None:
    """The driver needs neither PYTHONPATH nor FORGE_ROOT. It ignores the caller's modules."""
    (tmp_path / "typer.py").write_text("raise RuntimeError")
    command = [sys.executable, CHECKOUT / "src" / "forge", "patches", "check", "--base", "host"]
    environment = {key: value for key, value in os.environ.items() if "FORGE" not in key}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [*command, "--help"],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_checkout_that_cannot_be_written(tmp_path: Path) -> None:
    """The message names the folder, and not a missing package.

    Here a file in the place of the folder `build` prevents writing, as missing permissions would.
    """
    shutil.copy(CHECKOUT / "forge", tmp_path)
    for name in LISTS:
        (tmp_path / name).touch()
    (tmp_path / "build").write_text("in the way")
    environment = os.environ | {"FORGE_NO_PIXI": "1", "FORGE_PYTHON_BIN": sys.executable}
    done = subprocess.run(
        [tmp_path / "forge", "plan"], env=environment, text=True, capture_output=True
    )
    assert done.returncode == 2
    assert not done.stdout
    assert done.stderr.splitlines()[-1].startswith(f"forge: cannot write to {tmp_path}/build")
    assert "python3-venv" not in done.stderr


def test_ci_builds_on_the_host_base(tmp_path: Path) -> None:
    """A build of all packages on conda-forge would take more than a day."""
    # With this user id, .ci/run installs no packages of the system.
    for name, line in {"forge": 'echo "$1 $FORGE_BASE $FORGE_NO_PIXI"', "id": "echo 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".ci").mkdir()
    shutil.copy(CHECKOUT / ".ci/run", tmp_path / ".ci")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        [tmp_path / ".ci/run"], env=environment, text=True, capture_output=True, check=True
    )
    commands = ("build-all", "lint", "status", "test")
    assert sorted(done.stdout.splitlines()) == [f"{command} host 1" for command in commands]
