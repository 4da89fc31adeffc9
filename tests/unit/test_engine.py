# SPDX-License-Identifier: BSD-3-Clause
"""The child process that tests packages: the order of the tests, and the files on the disk."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support import conda_packages
from support.conda_packages import file

from forge.building import engine


@pytest.fixture(autouse=True)
def job_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a job. It is the job's TMPDIR."""
    folder = tmp_path / "job"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def test_tests_are_read_and_nothing_stays_unpacked(tmp_path: Path, job_folder: Path) -> None:
    """Opening a package to read its tests leaves no unpacked files in TMPDIR.

    rattler-build itself would keep them until the Python object of the package is deleted.
    """
    tests = b"- python:\n    imports: [a]\n- python:\n    imports: [b]\n"
    members = [file("info/tests/tests.yaml", tests), file("share/large", bytes(1 << 20))]
    path = conda_packages.package(tmp_path, members)
    package = engine.open_package(str(path))
    assert package.test_count == 2
    assert not list(job_folder.iterdir())
    assert os.environ["TMPDIR"] == str(job_folder)


@dataclass
class Result:
    """A mock of rattler-build's result of one test."""

    success: bool
    output: list[str] = field(default_factory=list)


class Package:
    """A mock of a package with one test."""

    test_count = 1

    def __init__(self, path: str) -> None:
        self.path, self.name = path, Path(path).stem
        self.filename = Path(path).name

    def run_test(self, index: int, channel: list[str]) -> Result:
        EVENTS.append(f"test {self.name}")
        return Result(self.name != "wrong")


EVENTS: list[str] = []


def test_what_passes_is_offered_before_the_next_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages are tested in the given order, and each one that passes is put into the cache.

    A later package may require an earlier one.
    """
    EVENTS.clear()
    monkeypatch.setattr(engine, "open_package", Package)
    monkeypatch.setattr(engine.cache, "offer", lambda path: EVENTS.append(f"offer {path.stem}"))
    packages = ["core.conda", "wrong.conda", "all.conda"]
    with pytest.raises(RuntimeError, match="^failed: wrong test 1$"):
        engine.test(packages, [])
    assert EVENTS == ["test core", "offer core", "test wrong", "test all", "offer all"]
