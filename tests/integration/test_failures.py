# SPDX-License-Identifier: BSD-3-Clause
"""After bad input or a failure there is one clear message, and no finished work is lost."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.project import SCRIPT, MiniProject, processes_in

from forge.files import sha256_file
from forge.processes import kill_leftovers

INSTALL = 'mkdir -p "$PREFIX/share"\ntouch "$PREFIX/share/{name}"\n'
# A line of a script that waits at most ten minutes until a condition is true.
WAIT = "for _ in $(seq 6000); do {} && break; sleep 0.1; done\n"


def test_failing_script(project: MiniProject) -> None:
    project.recipe("alpha", script="seq 100\nsleep 1\necho $CPU_COUNT, the cause >&2\nexit 7\n")
    project.recipe("beta", run=["alpha"])
    project.recipe("delta")
    done = project.forge("build-all", code=1, MAX_JOBS="1")  # builds one recipe at a time
    log = project.root / "build" / "logs" / "alpha.log"
    assert str(log) in done.stdout and "\n1, the cause" in log.read_text()
    log_lines = [line for line in done.stdout.splitlines() if line.startswith("  | ")]
    assert len(log_lines) == 40 and any("the cause" in line for line in log_lines)
    assert "Script failed" in log_lines[-1], "the engine's error must be the last line"
    assert "not attempted: beta: " in done.stderr and project.packages() == set()

    done = project.forge("build-all", "--continue-on-failure", code=1)
    assert "not attempted: beta: needs alpha" in done.stderr
    assert {p.split("-")[0] for p in project.packages()} == {"delta"}


def test_a_source_with_another_hash_ends_the_run(project: MiniProject) -> None:
    data = project.root / "data.bin"
    data.write_bytes(b"data")
    project.recipe("alpha", source=f'[{{url: "{data.as_uri()}", sha256: "{"0" * 64}"}}]')
    project.recipe("delta")
    done = project.forge("build-all", code=1)
    assert "not attempted: delta: alpha failed" in done.stderr and project.packages() == set()
    project.forge("build-all", "--continue-on-failure", code=1)
    assert {p.split("-")[0] for p in project.packages()} == {"delta"}


def test_what_the_base_cannot_build_is_refused_before_anything_is_built(
    project: MiniProject,
) -> None:
    """A recipe is refused before any build if the base lacks one of its requirements.

    An earlier driver first built the recipe's other requirements for an hour, and only then printed
    the reason that `plan` had printed at once.
    """
    project.recipe("alpha")
    project.recipe("beta", run=["alpha", "nowhere"])
    done = project.forge("build", "beta", code=3)
    assert "not started: beta: the host base has no nowhere" in done.stderr
    assert project.packages() == set()
    done = project.forge("build-all")
    assert "[1/1] alpha 1.0: built" in done.stdout, "recipes that are not attempted must not count"


def wait_for_other(own: Path, other: Path) -> str:
    """Return lines of a script that make a file, and fail unless another file appears."""
    return f"touch {own}; {WAIT.format(f'test -e {other}')}test -e {other}\n"


def test_two_are_built_and_tested_side_by_side(project: MiniProject, tmp_path: Path) -> None:
    """Two recipes are built at the same time, then tested at the same time.

    Each of the two build scripts waits for the other script, and each of the two tests waits for
    the other test. A recipe that requires both packages is built after them.
    """
    for name, other in (("alpha", "beta"), ("beta", "alpha")):
        script = wait_for_other(tmp_path / f"{name}-script", tmp_path / f"{other}-script")
        test = wait_for_other(tmp_path / f"{name}-test", tmp_path / f"{other}-test")
        project.recipe(name, script=script + INSTALL, test=test.replace("\n", "; ").strip("; "))
    project.recipe("gamma", run=["alpha", "beta"])
    done = project.forge("build-all", MAX_JOBS="2")
    assert "[3/3] gamma 1.0: built" in done.stdout
    assert {p.split("-")[0] for p in project.packages()} == {"alpha", "beta", "gamma"}


def test_what_runs_beside_a_failure_is_finished(project: MiniProject, tmp_path: Path) -> None:
    """The build and the test of beta finish although alpha fails while beta is built."""
    log = project.root / "build/logs/alpha.log"
    mark = tmp_path / "beta"
    project.recipe("alpha", script=WAIT.format(f"test -e {mark}") + "exit 1\n")
    test = WAIT.format(f"grep -q 'Script failed' {log}").strip()
    project.recipe("beta", script=f"touch {mark}\n{INSTALL}", test=test)
    project.recipe("gamma", run=["beta"])
    done = project.forge("build-all", code=1, MAX_JOBS="2")
    assert {p.split("-")[0] for p in project.packages()} == {"beta"}
    assert "not attempted: gamma: alpha failed" in done.stderr


def test_environment_of_a_test_that_does_not_solve(project: MiniProject) -> None:
    """The driver prints the reason why the environment of a test does not solve.

    rattler-build prints only that the environment cannot be set up.
    """
    recipe = project.recipe("alpha") / "recipe.yaml"
    test = "tests:\n  - {script: ['true'], requirements: {run: [python <3]}}"
    recipe.write_text(recipe.read_text().replace("tests:", test))
    done = project.forge("build-all", code=1)
    assert "python <3" in done.stdout and "its environment (alpha ==" in done.stdout


def test_test_packages_makes_no_base_where_nothing_was_built(tmp_path: Path) -> None:
    """`test-packages` reports an unbuilt package without making the host base first."""
    project = MiniProject(tmp_path)
    project.recipe("alpha")
    (project.root / "build" / "host-base").unlink()
    done = project.forge("test-packages", "alpha", code=3)
    assert "alpha: not in the channel; run: ./forge build alpha" in done.stdout + done.stderr
    assert not (project.root / "build" / "host-base").exists()


def test_test_packages_fails_on_a_package_that_no_longer_passes(
    project: MiniProject, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    mark.touch()
    project.recipe("alpha", test=f"test -f {mark}")
    project.recipe("unbuilt", script="exit 1\n")
    project.forge("build", "alpha")
    project.forge("test-packages", "alpha")
    assert "unbuilt" in project.forge("test-packages", "unbuilt", code=3).stderr
    mark.unlink()
    project.forge("test-packages", "alpha", code=1)


def test_finished_build_is_only_tested_again(project: MiniProject, tmp_path: Path) -> None:
    """If only the test of a package has failed, the next run does not build the package again.

    The build may have taken hours, and the test may have failed for a reason outside of the
    package.
    """
    count = tmp_path / "count"
    script = f"echo run >> {count}\n{INSTALL}"
    project.recipe("alpha", script=script, test=f"test -f {tmp_path}/now")
    done = project.forge("build-all", code=1)
    assert "test failed" in done.stdout and project.packages() == set()
    names = {path.name for path in (project.root / "build/staging/alpha").iterdir()}
    assert "noarch" in names and not names & {"bld", "build_cache", "src_cache"}
    (tmp_path / "now").touch()
    project.forge("build-all")
    assert count.read_text() == "run\n" and len(project.packages()) == 1


def test_a_package_test_that_hangs_costs_its_package(project: MiniProject) -> None:
    """If a test exceeds its time limit, its processes are killed, and the next package is built."""
    test = "true & (trap '' TERM; sleep infinity) & sleep infinity"
    cost = {"download": 0, "disk": 0, "memory": 0.1, "cpu_hours": 1, "test_hours": 0.001}
    project.recipe("alpha", test=test, extra={"cost": cost})
    project.recipe("beta")
    done = project.forge("build-all", "--continue-on-failure", code=1)
    (package,) = (project.root / "build/staging/alpha").glob("noarch/*.conda")
    limit = f"alpha: test failed (test 1 of 1: {package.name}, limit 0.001 hours: it took longer)"
    assert f"{limit}; the last lines of {project.root}/build/logs/alpha.log:" in done.stdout
    assert len(project.packages()) == 1 and processes_in(project.root) == []


def wait_for_file(path: Path, child: subprocess.Popen) -> None:
    """Wait until a process has made a file, and require that it is still running."""
    while not path.exists():
        assert child.poll() is None, f"the process ended without making {path}"
        time.sleep(0.05)


@pytest.fixture
def slow_build(project: MiniProject, tmp_path: Path) -> Iterator[subprocess.Popen]:
    """A running `build-all` that has built alpha. The scripts of beta and gamma do not end."""
    marks = [tmp_path / "beta", tmp_path / "gamma"]
    project.recipe("alpha")
    for mark in marks:
        script = f'echo started > "{mark}"; sleep infinity; {INSTALL}'
        project.recipe(mark.name, run=["alpha"], script=script)
    child = subprocess.Popen(
        project.command("build-all"),
        env=project.environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    for mark in marks:
        wait_for_file(mark, child)
    yield child
    child.kill()
    child.wait()
    kill_leftovers(project.root / "build/staging")


def test_second_build_is_turned_away(project: MiniProject, slow_build: subprocess.Popen) -> None:
    error = project.forge("build-all", code=2).stderr
    assert f"process {slow_build.pid} is building into {project.channel}" in error
    # `plan` only reads, so it is not refused.
    assert project.to_build() == {"beta", "gamma"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_killed_build_is_completed(
    project: MiniProject, slow_build: subprocess.Popen, number: signal.Signals
) -> None:
    slow_build.send_signal(number)
    slow_build.wait(600)
    if number != signal.SIGKILL:
        assert slow_build.returncode == 130
        assert "interrupted" in slow_build.stderr.read()
    assert {p.split("-")[0] for p in project.packages()} == {"alpha"}
    assert project.to_build() == {"beta", "gamma"}

    for name in ("beta", "gamma"):
        script = project.root / "recipes" / name / "build.sh"
        script.write_text(script.read_text().replace("sleep infinity", ":"))
    project.forge("build-all")
    assert {p.split("-")[0] for p in project.packages()} == {"alpha", "beta", "gamma"}
    assert processes_in(project.root) == [], "no process of the killed build may still run"


def test_an_index_that_is_not_of_the_packages(project: MiniProject) -> None:
    """Commands that only read report a damaged index.

    The next build writes the index again, and builds missing packages.
    """
    project.recipe("alpha")
    project.forge("build-all")
    (file,) = project.channel.glob("noarch/*.conda")
    index = file.with_name("repodata.json")
    text = index.read_text()
    index.write_text(text[: len(text) // 2])
    error = project.forge("plan", code=2).stderr
    assert str(index) in error and "build-all" in error
    assert "up to date" in project.forge("build-all").stdout
    # This is the state after a kill between the copy of a package and the update of the index.
    index.write_text('{"packages": {}, "packages.conda": {}}')
    partial = file.with_name(".partial-alpha.conda")
    partial.write_text("half")
    assert "up to date" in project.forge("build-all").stdout
    assert project.packages() == {file.name} and not partial.exists()
    file.unlink()
    assert "alpha 1.0: built" in project.forge("build-all").stdout
    assert project.packages() == {file.name} and project.to_build() == set()


Mount = Callable[[str, str], Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """A function that mounts a small file system at NAME with OPTIONS, and returns its folder.

    Only root may mount. The tests run as root in CI, and are skipped for other users.
    """
    folders = []

    def mount_tmpfs(name: str, options: str) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
        folders.append(folder)
        return folder

    yield mount_tmpfs
    for folder in folders:
        subprocess.run(["umount", folder], check=True)


def test_read_only_channel(project: MiniProject, mount: Mount) -> None:
    project.recipe("alpha")
    folder = mount("readonly", "ro")
    error = project.forge("build-all", "--output", str(folder), code=2).stderr
    assert str(folder) in error and "another folder" in error and "Traceback" not in error


def test_full_build_folder(project: MiniProject, mount: Mount) -> None:
    """On a full disk a build ends with one message, and completes once there is room."""
    script = 'mkdir -p "$PREFIX/share"\nhead -c 3000000 /dev/urandom > "$PREFIX/share/{name}"\n'
    project.recipe("alpha", script=script)
    shared = {link.name: link.resolve() for link in (project.root / "build").iterdir()}
    folder = mount("build", "size=2m")
    for name, target in shared.items():
        (folder / name).symlink_to(target)
    done = project.forge("build-all", code=1)
    output = done.stdout + done.stderr
    # On the full disk, either the engine fails first, or the driver, which writes the log.
    of_driver = f"cannot write {folder / 'logs/alpha.log'}: No space left on device. Fix that"
    of_engine = f"(No space left on device: {folder / 'staging/alpha'})"
    assert of_driver in output or of_engine in output
    assert "Traceback" not in output and project.packages() == set()
    subprocess.run(["mount", "-o", "remount,size=50m", folder], check=True)
    project.forge("build-all")
    assert len(project.packages()) == 1


def test_no_room_for_a_source(project: MiniProject, mount: Mount, tmp_path: Path) -> None:
    """The message names the file for which there is no room, and no part of the file stays.

    The message names no logs, because no build has started.
    """
    data = tmp_path / "data.bin"
    data.write_bytes(os.urandom(3_000_000))
    sha256 = sha256_file(data)
    project.recipe("alpha", source=f'[{{url: "{data.as_uri()}", sha256: "{sha256}"}}]')
    (project.root / "build" / "sources").unlink()
    folder = mount("build/sources", "size=1m")
    done = project.forge("build-all", code=1)
    partial = folder / sha256 / "data.bin.partial"
    assert f"cannot write {partial}: No space left on device" in done.stdout
    assert not partial.exists() and "logs:" not in done.stdout
    subprocess.run(["mount", "-o", "remount,size=10m", folder], check=True)
    assert "logs:" in project.forge("build-all").stdout and len(project.packages()) == 1


def test_live_display_on_a_terminal(project: MiniProject) -> None:
    """On a terminal, the driver redraws a line for each build. The exit code is the usual one."""
    import pty

    project.recipe("alpha", script="echo working on it\nsleep 1\nexit 1\n")
    command = f"exec {' '.join(project.command('build-all'))}"
    chunks = []

    def read(descriptor: int) -> bytes:
        chunks.append(os.read(descriptor, 4096))
        return chunks[-1]

    with pytest.MonkeyPatch.context() as patch:
        for key, value in project.environment.items():
            patch.setenv(key, value)
        patch.setenv("TERM", "xterm")
        status = os.waitstatus_to_exitcode(pty.spawn(["sh", "-c", command], read))
    screen = b"".join(chunks).decode(errors="replace")
    assert status == 1 and "working on it" in screen and "\x1b[" in screen


def test_a_script_that_leaves_a_process_or_a_pipe_behind(project: MiniProject) -> None:
    """The driver does not wait for a process that keeps the output open, or for a pipe.

    The build script of beta replaces its own log by the pipe.
    """
    project.recipe("alpha", script=f"{INSTALL}sleep infinity &\n")
    project.recipe("beta", script=f"rm conda_build.log\nmkfifo conda_build.log\n{INSTALL}")
    project.forge("build-all")
    assert len(project.packages()) == 2
    assert processes_in(project.root) == []


def test_a_named_pipe_in_a_package(project: MiniProject) -> None:
    """A package with a named pipe fails, because rattler-build would wait for data in the pipe."""
    script = 'mkdir -p "$PREFIX/share"\nmkfifo "$PREFIX/share/{name}"\n'
    project.recipe("alpha", script=script)
    done = project.forge("build-all", code=1)
    assert "alpha: its script made a named pipe, alpha, which no package may" in done.stdout
    assert project.packages() == set() and processes_in(project.root) == []


def test_one_bad_recipe_source_or_patch_fails_alone(project: MiniProject, tmp_path: Path) -> None:
    """A bad recipe, source or patch stops only its recipe and the recipes that require it."""
    (project.root / "build" / "sources").unlink()
    archive = tmp_path / "demo-1.0.tar.gz"
    archive.write_bytes(b"an error page")
    source = f"[{{url: 'http://upstream.invalid/{archive.name}', sha256: {sha256_file(archive)}}}]"
    project.recipe("archive", source=source)
    project.forge("sources", "add", str(archive))
    (project.recipe("alpha") / "recipe.yaml").write_bytes(b"\xff")
    project.recipe("beta", run=["alpha"])
    assert "alpha/recipe.yaml" in project.forge("build-all", code=2).stderr
    recipe = project.recipe("leaves", source="[{path: files, patches: [a.patch]}]")
    (recipe / "files").mkdir()
    (recipe / "files" / "text").write_text("one\n")
    (recipe / "a.patch").write_text("--- /dev/null\n+++ b/../../../out\n@@ -0,0 +1 @@\n+x\n")
    project.recipe("zeta")
    staging = project.root / "build" / "staging" / "yota"
    staging.parent.mkdir(exist_ok=True)
    staging.write_text("a file where a folder has to be")
    project.recipe("yota")
    done = project.forge("build-all", "--continue-on-failure", code=1, TMPDIR="/nowhere")
    assert {p.split("-")[0] for p in project.packages()} == {"zeta"}
    assert "failed: alpha: " in done.stderr and "not attempted: beta: needs alpha" in done.stderr
    assert "-1.0.tar.gz cannot be unpacked" in done.stdout
    assert "a.patch: it names" in done.stdout
    assert "staging/yota" in done.stdout and "Traceback" not in done.stdout + done.stderr
    assert not list((project.root / "build" / "logs").glob("leaves.log"))
    assert max(map(len, done.stdout.splitlines())) > 80, "the lines of the table must not be cut"
    assert "hostbound_h" in done.stdout.partition("package ")[2]


def test_only_what_is_named_is_built(project: MiniProject) -> None:
    """With `--only`, a recipe is not built if a package that it requires is missing or outdated.

    Another machine is expected to build the required package.
    """
    project.recipe("alpha")
    project.recipe("beta", run=["alpha"])
    project.recipe("gamma", run=["beta"])
    reason = "not started: {}: needs {}, and --only builds only the named packages"
    for name, needs in (("beta", "alpha"), ("gamma", "beta")):
        done = project.forge("build", "--only", name, code=3)
        assert reason.format(name, needs) in done.stderr and project.packages() == set()
    project.forge("build", "--only", "alpha", "beta")
    project.forge("build", "--only", "gamma")
    before = project.packages()
    project.recipe("alpha", script="echo changed >/dev/null\n" + SCRIPT)
    done = project.forge("build", "--only", "gamma", code=3)
    assert reason.format("gamma", "beta") in done.stderr and project.packages() == before
