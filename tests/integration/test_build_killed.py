# SPDX-License-Identifier: BSD-3-Clause
"""A build whose driver is killed, or whose disk fails, at one call: the next one completes it."""

import errno
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faults import Forks, library
from support.project import MiniProject, processes_in

# the call of the driver at which it is killed; what it reads of a log depends on the clock
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
EVERY = 1 if os.environ.get("FORGE_KILLS") else 5
FAULTS = [
    ("rename", "EXDEV", "/noarch/beta"),
    ("fsync", "EIO", "/.partial-beta"),
    ("write", "ENOSPC", "/staging/beta/job.json"),
    ("open", "ENOSPC", "/build/logs/beta.log"),
    ("write", "ENOSPC", "/noarch/.partial-beta"),
]


def built(project: MiniProject) -> dict[str, bytes]:
    return {file.name.split("-")[0]: file.read_bytes() for file in project.channel.rglob("*.conda")}


@pytest.fixture(scope="module")
def begun(host_base: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project in which alpha is built, and beta is not."""
    project = MiniProject(tmp_path_factory.mktemp("begun"))
    project.recipe("alpha")
    project.forge("build-all")
    project.recipe("beta", run=["alpha"])
    return project.root


@pytest.fixture
def project(begun: Path, tmp_path: Path) -> MiniProject:
    """A copy of it, to be killed in."""
    return MiniProject(shutil.copytree(begun, tmp_path / "copy", symlinks=True))


def require_completed(project: MiniProject, before: dict[str, bytes]) -> None:
    assert built(project).items() >= before.items()
    project.forge("build-all")
    assert built(project).keys() == {"alpha", "beta"} and built(project).items() >= before.items()
    assert "built" in project.forge("status").stdout and processes_in(project.root) == []
    left = ("channel/*/.partial-*", "channel/.tmp/*", "build/staging/*")
    assert not [path for name in left for path in project.root.glob(name)]


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with Forks(library(tmp_path_factory.mktemp("library")), {}) as made:
        yield made


@pytest.mark.parametrize("call", KILLS[::EVERY])
def test_a_kill(call: str, project: MiniProject, forks: Forks) -> None:
    before = built(project)
    (temporary := project.root / "tmp").mkdir()
    here = project.environment | {"TMPDIR": str(temporary)}
    done = forks("build-all", fault=call, **here)
    assert done.code == -signal.SIGKILL, done
    require_completed(project, before)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(("kind", "name", "part"), FAULTS)
def test_a_call_that_fails(
    kind: str, name: str, part: str, project: MiniProject, forks: Forks
) -> None:
    before, code = built(project), getattr(errno, name)
    done = forks("build-all", fault=f"{kind}:1:{code}:{part}", **project.environment)
    assert done.code == 1 and os.strerror(code) in done.output, done
    assert "Traceback" not in done.output and "bug in forge" not in done.output
    assert not [*project.channel.glob("*/.partial-*")], "half of a package"
    require_completed(project, before)
