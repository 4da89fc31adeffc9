# SPDX-License-Identifier: BSD-3-Clause
"""Jobs: ending their processes, even those that a killed build left, and following their logs."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from forge import processes
from forge.building import jobs
from forge.errors import Failed, ForgeError
from forge.processes import (
    SESSION,
    end_job,
    find_output_holders,
    job_processes,
    kill_leftovers,
    max_jobs,
)
from forge.project import Project


@pytest.mark.parametrize("linked", [False, True])
def test_only_processes_of_a_job_are_killed(tmp_path: Path, linked: bool) -> None:
    """Only the processes of a job are killed, and not a user's shell in the staging folder.

    The path of the folder may have a link.
    """
    staging = tmp_path / "staging"
    (staging / "pkg").mkdir(parents=True)
    sleep = ["sleep", "infinity"]
    job = subprocess.Popen(sleep, cwd=staging / "pkg", start_new_session=True)
    shell = subprocess.Popen(sleep, cwd=staging / "pkg", start_new_session=True)
    (staging / "pkg" / SESSION).write_text(str(job.pid))
    if linked:
        (tmp_path / "link").symlink_to(staging)
        staging = tmp_path / "link"
    try:
        kill_leftovers(staging)
        assert job.wait() == -9
        assert shell.poll() is None
    finally:
        for child in (job, shell):
            child.kill()
            child.wait()


WAITS = """
import subprocess, sys
script = subprocess.Popen(["sh", "-c", sys.argv[1]], stdout=subprocess.PIPE)
script.stdout.read()
"""


@pytest.mark.parametrize(
    "script",
    ["sleep infinity & exit", "setsid sleep infinity & exit", "cd /; sleep infinity & exit"],
)
def test_what_a_script_leaves_behind(script: str) -> None:
    """A process that a script left is found, in any session and any folder.

    It keeps the script's output open, and the engine waits for the end of this output.
    """
    job = subprocess.Popen([sys.executable, "-c", WAITS, script])
    try:
        holders = find_output_holders(job.pid)
        while not holders:
            assert job.poll() is None, "the process must be found before the job ends"
            time.sleep(0.05)
            holders = find_output_holders(job.pid)
        (process,) = holders
        assert b"sleep" in Path(f"/proc/{process}/cmdline").read_bytes()
        os.kill(process, signal.SIGKILL)
        assert job.wait() == 0
    finally:
        job.kill()
        job.wait()


def test_a_script_that_runs_is_left_alone() -> None:
    script = "sleep infinity & read line; kill $!"
    job = subprocess.Popen([sys.executable, "-c", WAITS, script], stdin=subprocess.PIPE)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    while job.poll() is None and children.read_text() == "":
        time.sleep(0.05)
    assert find_output_holders(job.pid) is None
    job.communicate(b"\n")
    assert job.returncode == 0


WAITS_FOR_EVER = "touch runs; while :; do sleep 0.05; done"
RUNS = """
import subprocess, sys
subprocess.run(["bash", "-c", sys.argv[1]])
"""


@pytest.mark.parametrize(
    ("script", "grace"),
    [
        # A compiler ends at SIGTERM. As under ninja, the compiler has its own process group.
        (f'set -m; (trap "echo ended > words; exit" TERM; {WAITS_FOR_EVER}) & wait', 60),
        # A process that ignores SIGTERM is killed, and so is one that starts at SIGTERM.
        (f'trap "" TERM; {WAITS_FOR_EVER}', 1),
        (f'trap "sleep infinity" TERM; {WAITS_FOR_EVER}', 1),
    ],
)
def test_the_end_of_a_job(
    script: str, grace: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes of a job are ended. The engine is the last, because scripts write to it."""
    monkeypatch.setattr(processes, "GRACE_SECONDS", grace)
    command = [sys.executable, "-c", RUNS, script]
    engine = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    while not (tmp_path / "runs").exists():
        time.sleep(0.05)
    end_job(engine, tmp_path)
    assert engine.returncode in (0, -signal.SIGKILL)
    assert [*job_processes(engine.pid, tmp_path)] == []
    assert (tmp_path / "words").exists() == script.startswith("set -m")


@pytest.mark.parametrize(("name", "counts"), [("PREFIX", True), ("PWD", False), ("OLDPWD", False)])
def test_a_person_works_in_the_folder_of_a_job(name: str, counts: bool, tmp_path: Path) -> None:
    """A daemon of a job is recognized by its environment variables other than PWD and OLDPWD.

    A person's editor may have the job's folder in these two variables, and must not be killed.
    """
    variables = {name: str(tmp_path / "bld")}
    with subprocess.Popen(["/bin/sleep", "600"], env=variables) as process:
        try:
            assert [*job_processes(-1, tmp_path)] == [process.pid] * counts
        finally:
            process.kill()


@pytest.fixture
def limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that replaces the control groups of this process.

    Its arguments are the content of /proc/self/cgroup, and files of /sys/fs/cgroup with their
    content.
    """
    monkeypatch.setattr(processes, "PROC", tmp_path / "proc")
    monkeypatch.setattr(processes, "CONTROL_GROUPS", tmp_path / "cgroup")

    def write(groups: str, files: dict[str, str]) -> None:
        for path, text in {"proc/self/cgroup": groups, **files}.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(os.fsencode(f"{text}\n"))

    return write


@pytest.mark.parametrize(("gib", "jobs_allowed"), [(64, 8), (7, 3), (1, 1)])
@pytest.mark.usefixtures("limit")
def test_compilers_share_the_memory(
    gib: int, jobs_allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one compiler for each 2 GiB of memory, at least one, and at most one per core.

    MAX_JOBS overrides this.
    """
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(processes, "memory_gib", lambda: gib)
    assert max_jobs() == jobs_allowed
    monkeypatch.setenv("MAX_JOBS", "5")
    assert max_jobs() == 5
    for value in ("0", "-1", "two", "1.5", "²", "9" * 5000):
        monkeypatch.setenv("MAX_JOBS", value)
        with pytest.raises(ForgeError, match="is not a positive whole number"):
            max_jobs()


@pytest.mark.usefixtures("limit")
def test_the_memory_of_this_machine() -> None:
    total = re.search(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert processes.memory_gib() == pytest.approx(int(total[1]) / 2**20, rel=0.1)


IN_CONTAINER = {"cgroup/memory.max": str(6 << 30), "cgroup/cpu.max": "250000 100000"}
OF_PARENT = {
    "cgroup/a.slice/memory.max": str(8 << 30),
    "cgroup/a.slice/cpu.max": "400000 100000",
    "cgroup/a.slice/b.scope/memory.max": "max",
    "cgroup/a.slice/b.scope/cpu.max": "max 100000",
}


@pytest.mark.parametrize(
    ("groups", "files", "gib", "jobs_allowed"),
    [
        ("0::/", {}, 64, 8),
        ("0::/", IN_CONTAINER, 6, 3),
        ("0::/", {"cgroup/cpu.max": "150000 100000"}, 64, 2),
        ("0::/a\udce9", {"cgroup/a\udce9/memory.max": str(4 << 30)}, 4, 2),
        ("0::/a.slice/b.scope", OF_PARENT, 8, 4),
        ("0::/a.slice/b.scope", {"cgroup/a.slice/b.scope/memory.max": str(1 << 40)}, 64, 8),
        ("5:cpu:/c\n4:memory:/c", {"cgroup/memory/c/memory.limit_in_bytes": str(1 << 30)}, 1, 1),
        ("4:memory:/docker/c", {"cgroup/memory/memory.limit_in_bytes": str(4 << 30)}, 4, 2),
    ],
)
def test_control_groups_limit_memory_and_compilers(
    groups: str,
    files: dict[str, str],
    gib: int,
    jobs_allowed: int,
    limit: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The smallest limit applies: of the machine, a container, a systemd unit or its parents."""
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**24}.get)
    limit(groups, files)
    assert processes.memory_gib() == gib
    assert max_jobs() == jobs_allowed


def run_job(
    code: str,
    handle_line: Callable[[str], None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    action: str = "test",
) -> None:
    """Run Python code as a job. `handle_line` gets each line of its output."""
    command = [sys.executable, "-c", code]
    start = subprocess.Popen
    monkeypatch.setattr(jobs.subprocess, "Popen", lambda _, **options: start(command, **options))
    project = Project(folder, folder / "channel", folder / "build")
    jobs.run_job(project, 1, handle_line, Event(), {"action": action}, folder / "log")


@pytest.mark.parametrize(("action", "content"), [("build", "now\n"), ("test", "earlier\nnow\n")])
def test_a_test_adds_to_the_log_of_its_build(
    action: str, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.write_text("earlier\n")
    run_job("print('now')", lambda _: None, tmp_path, monkeypatch, action)
    assert log.read_text() == content


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_job_that_a_signal_ends_has_failed(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is ended by a signal has failed.

    The kernel may kill a package test that uses too much memory. Such a test must not count as
    passed.
    """
    code = f"import os; os.kill(os.getpid(), {int(number)})"
    with pytest.raises(Failed, match=f"test failed .killed by signal {int(number)};"):
        run_job(code, lambda _: None, tmp_path, monkeypatch)


def test_each_line_of_a_job_is_given_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of a job's output, including the last one, is passed on once."""
    code = "import time; print('a\\nb', flush=True); time.sleep(0.5); print('c')"
    lines: list[str] = []
    run_job(code, lines.append, tmp_path, monkeypatch)
    assert lines == ["a", "b", "c"]


def test_a_stagings_output_is_said_once_whenever_it_is_looked_for(tmp_path: Path) -> None:
    """The output of a staging is passed on once, at whatever moments the follower reads the files.

    For each output, rattler-build replaces the log by an empty file, deletes this file, and writes
    a copy of the staging's log. The script of the output appends to the copy.
    """
    staging = b"+ make\n"
    first = b"+ one\n"
    second = b"+ two\n"
    # Moments at which the follower may read, each with the content of the script's own log. The
    # copy of the staging's log exists from the first moment "copy" on.
    moments = [("script", b""), ("script", staging)]
    moments += [("copy", b""), ("copy", b""), ("copy", staging[:3]), ("copy", staging + first)]
    moments += [("copy", b""), ("copy", staging + second)]
    for number, reads in enumerate(itertools.product((True, False), repeat=len(moments) - 1)):
        output = tmp_path / str(number)
        log = output / "log"
        script = output / "bld/rattler-build_staged_1/work/conda_build.log"
        copied = output / "build_cache/staging_0/work_dir/conda_build.log"
        for folder in (script.parent, copied.parent):
            folder.mkdir(parents=True)
        lines: list[str] = []
        follower = jobs.LogFollower(output, log, lines.append)
        for (kind, text), is_read in zip(moments, (*reads, True), strict=True):
            if kind == "copy" and not copied.exists():
                copied.write_bytes(staging)
            if not text:
                script.unlink(missing_ok=True)
            script.write_bytes(text)
            if is_read:
                follower.copy_new()
        # The follower misses the first output's log if the next log replaces it before any read.
        has_first_output = any(reads[3:6])
        expected = staging + first + second if has_first_output else staging + second
        assert log.read_bytes() == expected, reads
        assert "".join(lines) == expected.decode().replace("\n", "")


def test_what_an_output_leaves_goes_once_the_next_one_begins(tmp_path: Path) -> None:
    """The work folder of an output is removed when the next output begins, after its log is read.

    Each of several outputs may have gigabytes. The names of the folders do not show their order.
    """
    log = tmp_path / "log"
    lines: list[str] = []
    follower = jobs.LogFollower(tmp_path, log, lines.append)
    folders = [tmp_path / "bld" / name for name in ("rattler-build_z_1", "rattler-build_a_1")]
    for folder in folders:
        for part in ("work", "host_env_placehold"):
            (folder / part).mkdir(parents=True)
            (folder / part / "large").write_text("large")
        (folder / "work/conda_build.log").write_text(f"+ {folder.name}\n")
        follower.update()
        assert folder.is_dir()
    assert not folders[0].exists() and (folders[1] / "host_env_placehold/large").exists()
    assert lines == ["+ rattler-build_z_1", "+ rattler-build_a_1"]
