# SPDX-License-Identifier: BSD-3-Clause
"""After the driver was killed or the disk failed at a system call, the next build does the rest."""

import errno
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faults import Forks, library
from support.project import MiniProject, processes_in

# The system calls at which the driver is killed, in the form CALL:COUNT:0:PATH that faults.c reads.
# Later calls that open or write a log are left out, because their number depends on the clock.
KILLS = [
    "mkdir:1:0:/staging/beta",
    "open:1:0:/beta/session",
    "rename:1:0:/noarch/beta",
    "open:1:0:/staging/beta/job.json",
    "write:1:0:/logs/beta.log",
    "open:1:0:/info/index.json",
    "open:1:0:/beta/whole-conda",
    "unlink:1:0:/staging/beta/bld",
    "open:1:0:/_test-beta/session",
    "open:1:0:/forge/.partial-beta",
    "fsync:1:0:/noarch/.partial-beta",
    "unlink:1:0:/staging/beta/noarch",
    "rename:1:0:/repodata.json",
]
# Unless FORGE_KILLS is set, only every fifth call is tested.
STEP = 1 if os.environ.get("FORGE_KILLS") else 5
# System calls that fail. Each has the name of the call, its error, and a part of its path.
FAULTS = [
    ("rename", "EXDEV", "/noarch/beta"),
    ("fsync", "EIO", "/.partial-beta"),
    ("write", "ENOSPC", "/staging/beta/job.json"),
    ("open", "ENOSPC", "/build/logs/beta.log"),
    ("write", "ENOSPC", "/noarch/.partial-beta"),
]


def read_packages(project: MiniProject) -> dict[str, bytes]:
    """Return the bytes of each package of the channel, by name."""
    return {file.name.split("-")[0]: file.read_bytes() for file in project.channel.rglob("*.conda")}


@pytest.fixture(scope="module")
def template(host_base: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project in which alpha is built, and beta is not."""
    project = MiniProject(tmp_path_factory.mktemp("begun"))
    project.recipe("alpha")
    project.forge("build-all")
    project.recipe("beta", run=["alpha"])
    return project.root


@pytest.fixture
def project(template: Path, tmp_path: Path) -> MiniProject:
    """A copy of the template, for one test."""
    return MiniProject(shutil.copytree(template, tmp_path / "copy", symlinks=True))


def require_completed(project: MiniProject, before: dict[str, bytes]) -> None:
    """Require that the packages of `before` are unchanged, and that a build completes the rest.

    Afterwards there must be no leftovers and no processes.
    """
    assert read_packages(project).items() >= before.items()
    project.forge("build-all")
    packages = read_packages(project)
    assert packages.keys() == {"alpha", "beta"} and packages.items() >= before.items()
    assert "built" in project.forge("status").stdout and processes_in(project.root) == []
    for pattern in ("channel/*/.partial-*", "channel/.tmp/*", "build/staging/*"):
        assert list(project.root.glob(pattern)) == []


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with Forks(library(tmp_path_factory.mktemp("library")), {}) as forks:
        yield forks


@pytest.mark.parametrize("call", KILLS[::STEP])
def test_a_kill(call: str, project: MiniProject, forks: Forks) -> None:
    before = read_packages(project)
    temporary = project.root / "tmp"
    temporary.mkdir()
    environment = project.environment | {"TMPDIR": str(temporary)}
    done = forks("build-all", fault=call, **environment)
    assert done.code == -signal.SIGKILL, done
    require_completed(project, before)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(("call", "error", "path"), FAULTS)
def test_a_call_that_fails(
    call: str, error: str, path: str, project: MiniProject, forks: Forks
) -> None:
    before = read_packages(project)
    code = getattr(errno, error)
    done = forks("build-all", fault=f"{call}:1:{code}:{path}", **project.environment)
    assert done.code == 1 and os.strerror(code) in done.output, done
    assert "Traceback" not in done.output and "bug in forge" not in done.output
    partial_files = list(project.channel.glob("*/.partial-*"))
    assert partial_files == [], "no partial package may stay in the channel"
    require_completed(project, before)
