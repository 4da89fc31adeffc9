# SPDX-License-Identifier: BSD-3-Clause
"""Unusual circumstances: odd paths, pipes in place of files, an early Ctrl-C, foreign modules."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.project import CHECKOUT, MiniProject
from support.servers import QuietHandler, served
from support.small_channel import workspace

from forge import bases, network
from forge.conda.local import LocalChannel, Record
from forge.envs import lockfile
from forge.envs.workspace import Workspace
from forge.errors import Failed, ForgeError, NotAttempted
from forge.files import copy_whole, read_text, remove_all
from forge.project import Project
from forge.recipes.plan import RecipeSet


@pytest.mark.parametrize("name", ["a:b", "a`id`b", "a$HOME", 'a"b', "a\\b", "a\nb"])
def test_a_checkout_that_no_build_can_be_in(name: str, tmp_path: Path) -> None:
    root = tmp_path / name
    root.mkdir()
    (root / "variants.yaml").touch()
    with pytest.raises(ForgeError, match="move the checkout"):
        Project.at(root)


def test_the_longest_path_of_a_checkout(tmp_path: Path) -> None:
    length = len(f"{tmp_path}/")
    longest = tmp_path / ("x" * (128 - length))
    longer = tmp_path / ("x" * (129 - length))
    for root in (longest, longer):
        root.mkdir()
        (root / "variants.yaml").touch()
    assert Project.at(longest).root == longest
    with pytest.raises(ForgeError, match=r"more than 128 characters.*: move the checkout"):
        Project.at(longer)


def test_an_output_folder_that_is_a_file(tmp_path: Path) -> None:
    """Commands that only read must not report that its packages are not built."""
    (tmp_path / "variants.yaml").touch()
    (tmp_path / "packages").touch()
    with pytest.raises(ForgeError, match="packages is not a folder: name another"):
        Project.at(tmp_path, tmp_path / "packages")
    assert Project.at(tmp_path, tmp_path / "absent").output_folder == tmp_path / "absent"


def test_the_launcher_says_so_too(tmp_path: Path) -> None:
    root = tmp_path / "a:b"
    root.mkdir()
    shutil.copy(CHECKOUT / "forge", root)
    done = subprocess.run([root / "forge", "plan"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "move the checkout" in done.stderr
    assert not done.stdout


def test_a_pipe_is_not_read_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe in the place of a text, a lock, the credentials or a recipe is an error."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv(network.AUTH_FILE, str(pipe))
    readers = [lambda: read_text(pipe), lambda: lockfile.read(pipe), network.client]
    for read in readers:
        with pytest.raises(ForgeError, match="a pipe or a device"):
            read()
    mini = MiniProject(tmp_path)
    mini.recipe("alpha")
    (mini.root / "recipes/beta").mkdir()
    os.mkfifo(mini.root / "recipes/beta/recipe.yaml")
    project = Project.at(mini.root)
    with pytest.raises(ForgeError, match=r"beta/recipe\.yaml is not a file"):
        RecipeSet(project, bases.load(project, "conda-forge"))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        # Nothing is mapped at address 0, so a read of this file fails as that of a failing disk.
        ("/proc/self/mem", "Input/output error"),
        ("/proc/self", "Is a directory"),
        ("/proc/self/absent", "No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_copied_is_named(source: str, reason: str, tmp_path: Path) -> None:
    """The message names the source. The target stays as it is, and nothing is left beside it."""
    target = tmp_path / "target"
    target.write_text("old")
    with pytest.raises(Failed, match=rf"^cannot read {source}: {reason}\. Fix that"):
        copy_whole(Path(source), target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("target", ["../x", "/etc", "a/../../b"])
def test_a_source_stays_in_its_work_folder(target: str, tmp_path: Path) -> None:
    mini = MiniProject(tmp_path)
    (mini.root / "local").mkdir()
    mini.recipe("alpha", source=f'[{{path: ../../local, target_directory: "{target}"}}]')
    project = Project.at(mini.root)
    with pytest.raises(ForgeError, match="is not a plain path inside the source"):
        RecipeSet(project, bases.load(project, "conda-forge"))


INTERRUPTED = """
import os, runpy, signal, sys
class Interrupt:
    def find_spec(name, path, target=None):
        if name == module:
            sys.meta_path.remove(Interrupt)
            os.kill(os.getpid(), signal.SIGINT)
module, folder = sys.argv[1:3]
sys.meta_path.insert(0, Interrupt)
sys.argv[:] = ["forge", "plan", "--base", "host"]
runpy.run_path(folder, run_name="__main__")
"""


@pytest.mark.parametrize(
    "module", ["forge.cli.main", "rattler", "rattler_build", "forge.cli.upkeep"]
)
def test_ctrl_c_at_once_is_silent(module: str) -> None:
    """Ctrl-C during the imports ends the driver with 130 and without a traceback."""
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, module, str(CHECKOUT / "src/forge")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    output = "".join(child.communicate())
    assert child.returncode == 130, output
    assert "Traceback" not in output
    assert len(output.splitlines()) <= 2


def test_a_forge_of_somebody_else_is_not_imported(tmp_path: Path) -> None:
    foreign_package = tmp_path / "forge"
    foreign_package.mkdir()
    (foreign_package / "__init__.py").write_text("raise SystemExit('the wrong forge')")
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"action": "test", "packages": [], "channel": []}))
    print_path = "import os; print(os.environ['PYTHONPATH'])"
    main = CHECKOUT / "src/forge/__main__.py"
    text = main.read_text().partition("from forge.cli.main")[0]
    done = subprocess.run(
        [sys.executable, "-c", f"__file__ = {str(main)!r}\n{text}\n{print_path}"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    path = done.stdout.strip()
    child = subprocess.run(
        [sys.executable, "-P", "-m", "forge.building.engine", str(job)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert child.returncode == 0, child.stderr


@pytest.mark.parametrize(
    ("tests", "count"), [(3, 3), (0, 0), (-1, None), (True, None), ("3", None)]
)
def test_numbers_of_tests_in_a_note(tests: Any, count: int | None, tmp_path: Path) -> None:
    channel = LocalChannel(tmp_path)
    record = Record("alpha", "1.0", "h1234567_0", "noarch", "0" * 64, 1)
    (tmp_path / "forge").mkdir()
    note = {"sha256": record.sha256, "tests": tests}
    (tmp_path / "forge/alpha-1.0-h1234567_0.json").write_text(json.dumps(note))
    assert channel.read_test_count(record) == count


@pytest.mark.parametrize("part", ["x", "a:", "a:/", "'a:", ";key"])
def test_a_message_does_not_repeat_long_names(part: str) -> None:
    """A long name is shortened, and the search for credentials in it does not take minutes."""
    message = str(ForgeError(f"no recipe {part * 20_000}; there are: alpha"))
    assert len(message) < 400
    assert message.startswith(f"no recipe {part}")
    assert message.endswith("are: alpha")


@pytest.mark.parametrize("where", ["a version", "an override", "depends"])
def test_no_control_character_reaches_the_terminal(
    where: str, channel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requirement = ""
    escape = "\x1b[31m"
    if where == "a version":
        requirement = '"gam\\u001bma" = "*"\n'
    elif where == "an override":
        monkeypatch.setenv("CONDA_OVERRIDE_GLIBC", f"2{escape}")
    else:
        for form in channel.glob("noarch/*.zst"):
            form.unlink()
        repodata = channel / "noarch" / "repodata.json"
        data = json.loads(repodata.read_text())
        data["packages.conda"]["alpha-1.0-h1234567_0.conda"]["depends"] = [f"{escape}ghost"]
        repodata.write_text(json.dumps(data))
    with pytest.raises(ForgeError, match=r"\\x1b") as raised:
        workspace(tmp_path / "app", channel.as_uri(), requirement).lock()
    assert "\x1b" not in str(raised.value)


def edited(channel: Path, tmp_path: Path, **info: Any) -> Workspace:
    """Change the `info` of a channel's index, and return a workspace of that channel."""
    path = channel / "noarch/repodata.json"
    data = json.loads(path.read_text())
    data["info"] |= info
    path.write_text(json.dumps(data))
    return workspace(tmp_path / "local", channel.as_uri())


def test_an_address_that_is_none_is_one_message(
    channel: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The driver reports a malformed base_url in an index as an error. rattler panics on it."""
    with pytest.raises(ForgeError, match="look at its repodata.json") as raised:
        edited(channel, tmp_path, base_url="http://[::1").lock()
    assert len(str(raised.value)) < 400
    assert len(capfd.readouterr().err) < 2000, "no stack trace may be printed"


def test_an_empty_requirement_in_a_lock(channel: Path, tmp_path: Path) -> None:
    app = edited(channel, tmp_path)
    app.lock()
    text = app.lock_file.read_text()
    app.lock_file.write_text(text.replace("  license: MIT", '  depends:\n  - ""\n  license: MIT'))
    with contextlib.suppress(ForgeError):
        assert app.install("default", tmp_path / "cache") == 2
    app.lock_file.write_text(f"{text}- conda: ./x.conda\n")
    with pytest.raises(ForgeError, match="is not a lock file"):
        app.locked("default")


def test_an_index_that_is_said_not_to_have_changed(channel: Path, tmp_path: Path) -> None:
    class Unchanged(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(304)
            self.end_headers()

    with (
        served(channel, Unchanged) as url,
        pytest.raises(NotAttempted, match="look at its repodata.json") as raised,
    ):
        workspace(tmp_path / "app", url).lock()
    assert raised.value.exit_code == 3


def test_a_link_to_nothing_that_stays_is_not_called_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to("nothing")

    def refuse(_: Path) -> None:
        raise PermissionError

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        assert remove_all([link]) == []
    assert remove_all([link]) == [link]
