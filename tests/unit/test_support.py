# SPDX-License-Identifier: BSD-3-Clause
"""The tests' support code: mutants, servers, copies of the checkout, and checks of packages."""

import errno
import http.server
import json
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import mutants, project, servers, small_channel
from support.contents import find_faults
from support.mutants import SEED, Tally, texts, trees
from support.pixi import require
from support.project import CHECKOUT, commit, copy_checkout, python_files
from support.servers import served

from forge.errors import ForgeError

VALID = {"name": "x", "list": [1, 2, {"deep": "y"}]}


def test_the_seed_is_drawn_only_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORGE_SEED", raising=False)
    assert runpy.run_path(mutants.__file__)["SEED"] == "1"
    monkeypatch.setenv("FORGE_SEED", "7")
    assert runpy.run_path(mutants.__file__)["SEED"] == "7"


def test_another_seed_gives_others(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(texts(b"a\nb\n", 1, 50))
    monkeypatch.setattr(mutants, "SEED", f"{SEED}1")
    assert list(texts(b"a\nb\n", 1, 50)) != before


def test_the_same_seed_gives_the_same_mutants() -> None:
    assert list(map(repr, trees(VALID, 1, 50))) == list(map(repr, trees(VALID, 1, 50)))
    assert list(texts(b"a\nb\n", 1, 50)) == list(texts(b"a\nb\n", 1, 50))


def test_mutants_differ_from_what_is_valid() -> None:
    changed = sum(mutant != VALID for mutant in trees(VALID, 1, 200))
    assert changed > 180
    assert VALID == {"name": "x", "list": [1, 2, {"deep": "y"}]}


def test_a_traceback_is_no_outcome() -> None:
    tally = Tally("json", lambda *_: None)
    with pytest.raises(ValueError) as raised:
        tally.give(lambda: json.loads("{"), bool, "{")
    assert f"FORGE_SEED={SEED}" in raised.value.__notes__[0], (
        "the note must have the seed, with which a user repeats the run"
    )


def test_wrong_content_and_endless_messages_are_found() -> None:
    def endless() -> None:
        raise ForgeError("x " * 5_000)

    tally = Tally("any", lambda *_: None)
    with pytest.raises(AssertionError, match="wrong content"):
        tally.give(lambda: 1, lambda result: result == 2, "1")
    with pytest.raises(AssertionError, match="bad message"):
        tally.give(endless, bool, "x")


@pytest.mark.parametrize(
    ("usage", "message"),
    [((mutants.SLOWEST + 1, 0), "more than 20 s"), ((0, mutants.LARGEST + 1), "more than 2097152")],
)
def test_a_reader_that_hangs_or_takes_all_memory_is_found(
    usage: tuple[float, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usages = iter([(0, 0), usage])
    monkeypatch.setattr(mutants, "_measure_usage", lambda: next(usages))
    with pytest.raises(AssertionError, match=message):
        Tally("any", lambda *_: None).give(lambda: 1, bool, "1")


def test_programs_that_a_reader_runs_count() -> None:
    start, _ = mutants._measure_usage()
    start_of_this_process = time.process_time()
    subprocess.run([sys.executable, "-c", "b'x' * (256 << 20)"], check=True)
    end, peak = mutants._measure_usage()
    assert end - start > time.process_time() - start_of_this_process
    assert peak > 256 << 10


# A loopback address that only this test uses, so that no other program takes the port of the test's
# first server before its second server starts.
ADDRESS = "127.77.1.1"


def test_a_port_that_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock has the packages of the current server, not of an earlier one at the same port."""
    ports: list[int] = []
    bind = http.server.HTTPServer.server_bind

    def bind_same_port(server: http.server.HTTPServer) -> None:
        server.server_address = (ADDRESS, ports[0] if ports else 0)
        bind(server)
        ports.append(server.server_port)

    monkeypatch.setattr(servers.Server, "server_bind", bind_same_port)
    for version in ("1.0", "2.0"):
        channel = small_channel.make(tmp_path / version / "c", "alpha", "beta", version=version)
        for file in channel.rglob("repodata*"):
            # If the file's time is 0, rattler asks the server whether its cached index is valid.
            os.utime(file, (0, 0))
        with served(channel) as url:
            url = url.replace("127.0.0.1", ADDRESS)
            app = small_channel.workspace(tmp_path / version / "app", url)
            app.lock()
        assert f"/noarch/alpha-{version}-" in app.lock_file.read_text()
    assert ports == ports[:1] * 2


def test_no_test_has_a_web_server_of_another_kind() -> None:
    pattern = re.compile(r"HTTPServer\(\(")
    names = [file.name for file in python_files("tests") if pattern.search(file.read_text())]
    assert names == []


def test_nothing_that_a_copy_changes_is_the_checkouts(tmp_path: Path) -> None:
    """Outside of build/, a copy shares only packages with the checkout.

    Nothing changes a package in place.
    """
    root = tmp_path / "copy"
    copy_checkout(root)
    names = {path.relative_to(root).parts[0] for path in root.iterdir()}
    assert {"src", "recipes", "pyproject.toml", "forge", "build"} <= names
    assert ".git" not in names
    assert {path.name for path in (root / "build").iterdir()} == {"host-base", "sources"}
    for path in root.rglob("*"):
        is_outside_build = path.is_file() and "build" not in path.relative_to(root).parts[:1]
        if is_outside_build and path.stat().st_nlink > 1:
            assert path.suffix == ".conda"
    packages = {file.name for file in (CHECKOUT / "channel").glob("*/*.conda")}
    assert {file.name for file in (root / "channel").glob("*/*.conda")} == packages
    assert not (root / "channel" / ".lock").exists()


def test_a_copy_on_another_filesystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages are copied if hard links are impossible, for example if /tmp is on another disk."""

    def hardlink_to(self: Path, _: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(self))

    small = tmp_path / "small"
    package = small / "channel/noarch/alpha-1-0.conda"
    package.parent.mkdir(parents=True)
    package.write_text("alpha")
    commit(small)
    monkeypatch.setattr(project, "CHECKOUT", small)
    monkeypatch.setattr(Path, "hardlink_to", hardlink_to)
    copy_checkout(tmp_path / "copy")
    assert (tmp_path / "copy" / package.relative_to(small)).read_text() == "alpha"
    assert package.stat().st_nlink == 1


def test_without_pixi_it_is_a_skip_or_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("FORGE_REQUIRE_PIXI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="pixi is not on PATH"):
        require("pixi")
    monkeypatch.setenv("FORGE_REQUIRE_PIXI", "1")
    with pytest.raises(pytest.fail.Exception, match="FORGE_REQUIRE_PIXI is set"):
        require("pixi")


@pytest.mark.parametrize(
    ("build", "file", "fault"),
    [
        ({"files": ["lib/*.so"]}, "lib/a.so", ""),
        ({"files": ["lib/*.so"]}, "bin/a", "bin/a is not among its `files`"),
        ({"files": {"include": ["lib/"], "exclude": ["lib/*.h"]}}, "lib/a.so", ""),
        ({"files": {"include": ["lib/"], "exclude": ["lib/*.h"]}}, "lib/a.h", "lib/a.h is not"),
        # Without `include`, all files but the excluded ones are included.
        ({"files": {"exclude": ["**/csrc/**"]}}, "x/a.py", ""),
        ({"files": {"exclude": ["**/csrc/**"]}}, "x/csrc/a.c", "x/csrc/a.c is not"),
        ({"noarch": "python"}, "lib/python3.12/site-packages/a.py", "is for one Python"),
        ({"script": ""}, "bin/a", "no script makes its 1 files, such as bin/a"),
    ],
)
def test_files_that_a_recipe_does_not_name(build: dict[str, Any], file: str, fault: str) -> None:
    package: Any = SimpleNamespace(info=())
    faults = find_faults(package, {"build": {"script": "make"} | build}, {file})
    assert fault in "".join(faults)
    assert bool(fault) == bool(faults)
