# SPDX-License-Identifier: BSD-3-Clause
"""Mutated indexes, notes, lists and packages: right content, or one message."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.conda_packages import file, link, package, repacked
from support.mutants import Tally, texts, trees
from support.static_channel import BUILD, Source, require_whole

from forge.channel import publish
from forge.channel.publish import PublishedChannel, Withdrawal
from forge.conda import pypi
from forge.conda.local import LocalChannel, Record
from forge.conda.package import Package
from forge.errors import ForgeError

Property = Callable[[str, object], None]
ALPHA = f"alpha-1.0-{BUILD}.conda"


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mutants")
    source = Source(root / "channel")
    source.make("alpha", depends=["beta"])
    source.make("beta")
    PublishedChannel(root / "out").publish(source)
    PublishedChannel(root / "out").withdraw([f"beta-1.0-{BUILD}"], "broken")
    return root


def dumps(mutant: Any) -> bytes:
    return json.dumps(mutant).encode()


def test_published_index(channel: Path, record_property: Property) -> None:
    """A publish names what is wrong, or makes an index that is whole."""
    tally = Tally("published repodata.json", record_property)
    target, path = channel / "out", channel / "out/noarch/repodata.json"
    whole, source = path.read_bytes(), Source(channel / "channel")

    def publish_again() -> bool:
        PublishedChannel(target).publish(source)
        require_whole(target)
        return True

    for mutant in [*map(dumps, trees(json.loads(whole), 1, 20)), *texts(whole, 2, 10)]:
        path.write_bytes(mutant)
        tally.give(publish_again, bool, mutant)
    path.write_bytes(whole)


def test_withdrawals(channel: Path, record_property: Property) -> None:
    """No name in the list becomes a path outside the channel."""
    tally = Tally("withdrawn.json", record_property)
    path = channel / "out" / publish.WITHDRAWN
    whole = path.read_bytes()

    def are_names(entries: list[Withdrawal]) -> bool:
        return all(entry.file.startswith("noarch/") and ".." not in entry.file for entry in entries)

    for mutant in [*map(dumps, trees(json.loads(whole), 9, 80)), *texts(whole, 10, 40)]:
        path.write_bytes(mutant)
        tally.give(PublishedChannel(channel / "out").withdrawals, are_names, mutant)
    path.write_bytes(whole)


def test_local_index(channel: Path, tmp_path: Path, record_property: Property) -> None:
    tally, valid = Tally("local index", record_property), channel / "channel/noarch/repodata.json"
    path, local = tmp_path / "noarch/repodata.json", LocalChannel(tmp_path)
    path.parent.mkdir()
    whole = valid.read_bytes()
    for mutant in [*map(dumps, trees(json.loads(whole), 5, 80)), *texts(whole, 6, 40)]:
        path.write_bytes(mutant)
        tally.give(
            local.records,
            lambda found: all(
                r.file_name in (ALPHA, ALPHA.replace("alpha", "beta")) for r in found
            ),
            mutant,
        )


def test_note(tmp_path: Path, record_property: Property) -> None:
    """What is damaged is unknown: never a digest or a number of tests of another kind."""
    tally, record = (
        Tally("note", record_property),
        Record("a", "1", "h0123456_0", "noarch", "0" * 64, 1),
    )
    path = tmp_path / "forge" / f"{record.dist}.json"
    path.parent.mkdir()
    valid = {"digest": {"recipe": "x"}, "tests": 1, "sha256": record.sha256}
    for mutant in [*map(dumps, trees(valid, 7, 60)), *texts(dumps(valid), 8, 40)]:
        path.write_bytes(mutant)
        local = LocalChannel(tmp_path)
        tally.give(
            lambda local=local: (local.read_digest(record), local.read_test_count(record)),
            lambda r: isinstance(r[0], dict | None) and isinstance(r[1], int | None),
            mutant,
        )


def test_names(record_property: Property) -> None:
    tally = Tally("names on PyPI", record_property)
    for mutant in [*map(dumps, trees({"a": "b", "c": None}, 11, 40))]:
        tally.give(
            lambda m=mutant: pypi.parse(m, "x"),
            lambda n: all(isinstance(v, str | None) for v in n.values()),
            mutant,
        )


MEMBERS = [file("lib/x", b"text" * 50), link("lib/y", "x"), file("bin/z")]


def safe(built: Path) -> Package:
    package = Package(built)
    package.require_safe()
    return package


@pytest.mark.parametrize("name", ["index.json", "paths.json"])
def test_info(name: str, tmp_path: Path, record_property: Property) -> None:
    """Where it passes, every listed path is plain and a member."""
    tally, valid = Tally(f"info/{name}", record_property), package(tmp_path / "valid", MEMBERS)
    content = Package(valid).info[name]
    payload = Package(valid).payload.keys()
    built = tmp_path / valid.name
    for mutant in [*map(dumps, trees(json.loads(content), 12, 60)), *texts(content, 13, 30)]:
        repacked(valid, built, lambda _, n, old, m=mutant: m if n == f"info/{name}" else old)

        tally.give(
            lambda: safe(built), lambda p: p.listed.keys() == payload == p.payload.keys(), mutant
        )


@pytest.mark.parametrize("single", [False, True])
def test_archive(single: bool, tmp_path: Path, record_property: Property) -> None:
    built = package(tmp_path, MEMBERS, single=single)
    tally, whole = Tally(f"package {built.suffix}", record_property), built.read_bytes()
    held = Package(built).payload
    for mutant in texts(whole, 14, 120):
        built.write_bytes(mutant)

        tally.give(
            lambda: safe(built),
            lambda p: p.payload == held,
            mutant,
        )
    built.write_bytes(b"")
    with pytest.raises(ForgeError):
        Package(built).require_safe()
