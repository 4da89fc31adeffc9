# SPDX-License-Identifier: BSD-3-Clause
"""Reading mutated files of a channel gives correct content or one error message.

The files are indexes, notes, lists of withdrawals and packages.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.conda_packages import file, link, package, repack
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
    """A folder with a local channel, `channel`, and its published channel, `out`."""
    root = tmp_path_factory.mktemp("mutants")
    source = Source(root / "channel")
    source.make("alpha", depends=["beta"])
    source.make("beta")
    PublishedChannel(root / "out").publish(source)
    PublishedChannel(root / "out").withdraw([f"beta-1.0-{BUILD}"], "broken")
    return root


def dumps(mutant: Any) -> bytes:
    return json.dumps(mutant).encode()


def mutate_json(content: bytes, stream: int, trees_count: int, texts_count: int) -> list[bytes]:
    """Return mutants of a JSON file: first some with changed values, then some with damaged text.

    Args:
        content: The file.
        stream: The random stream of the mutants with changed values (support.mutants). Those with
            damaged text use the next stream.
        trees_count: The number of mutants with changed values.
        texts_count: The number of mutants with damaged text.
    """
    mutants = [dumps(tree) for tree in trees(json.loads(content), stream, trees_count)]
    mutants += texts(content, stream + 1, texts_count)
    return mutants


def test_published_index(channel: Path, record_property: Property) -> None:
    """Publishing into a channel with a mutated index fails, or makes a complete index."""
    tally = Tally("published repodata.json", record_property)
    target = channel / "out"
    path = target / "noarch/repodata.json"
    valid = path.read_bytes()
    source = Source(channel / "channel")

    def publish_again() -> bool:
        PublishedChannel(target).publish(source)
        require_whole(target)
        return True

    for mutant in mutate_json(valid, 1, 20, 10):
        path.write_bytes(mutant)
        tally.give(publish_again, bool, mutant)
    path.write_bytes(valid)


def test_withdrawals(channel: Path, record_property: Property) -> None:
    """No name in a mutated list of withdrawals leads outside the channel."""
    tally = Tally("withdrawn.json", record_property)
    path = channel / "out" / publish.WITHDRAWN
    valid = path.read_bytes()

    def are_names(entries: list[Withdrawal]) -> bool:
        return all(entry.file.startswith("noarch/") and ".." not in entry.file for entry in entries)

    for mutant in mutate_json(valid, 9, 80, 40):
        path.write_bytes(mutant)
        tally.give(PublishedChannel(channel / "out").withdrawals, are_names, mutant)
    path.write_bytes(valid)


def test_local_index(channel: Path, tmp_path: Path, record_property: Property) -> None:
    tally = Tally("local index", record_property)
    path = tmp_path / "noarch/repodata.json"
    local = LocalChannel(tmp_path)
    path.parent.mkdir()
    valid = (channel / "channel/noarch/repodata.json").read_bytes()
    names = {ALPHA, ALPHA.replace("alpha", "beta")}

    def are_packages(records: list[Record]) -> bool:
        return all(record.file_name in names for record in records)

    for mutant in mutate_json(valid, 5, 80, 40):
        path.write_bytes(mutant)
        tally.give(local.records, are_packages, mutant)


def test_note(tmp_path: Path, record_property: Property) -> None:
    """Values that are read from a mutated note of a package have the right types.

    The digest is a dict or None, and the number of tests is an int or None.
    """
    tally = Tally("note", record_property)
    record = Record("a", "1", "h0123456_0", "noarch", "0" * 64, 1)
    path = tmp_path / "forge" / f"{record.dist}.json"
    path.parent.mkdir()
    valid = {"digest": {"recipe": "x"}, "tests": 1, "sha256": record.sha256}

    def read() -> tuple[object, object]:
        local = LocalChannel(tmp_path)
        return local.read_digest(record), local.read_test_count(record)

    def has_right_types(result: tuple[object, object]) -> bool:
        digest, count = result
        return isinstance(digest, dict | None) and isinstance(count, int | None)

    for mutant in mutate_json(dumps(valid), 7, 60, 40):
        path.write_bytes(mutant)
        tally.give(read, has_right_types, mutant)


def test_names(record_property: Property) -> None:
    tally = Tally("names on PyPI", record_property)
    for tree in trees({"a": "b", "c": None}, 11, 40):
        mutant = dumps(tree)
        tally.give(
            lambda mutant=mutant: pypi.parse(mutant, "x"),
            lambda names: all(isinstance(name, str | None) for name in names.values()),
            mutant,
        )


MEMBERS = [file("lib/x", b"text" * 50), link("lib/y", "x"), file("bin/z")]


def read_safe(built: Path) -> Package:
    """Read a package. Raises Refused if it is not safe to install."""
    package = Package(built)
    package.require_safe()
    return package


@pytest.mark.parametrize("name", ["index.json", "paths.json"])
def test_info(name: str, tmp_path: Path, record_property: Property) -> None:
    """If a package with mutated info is accepted, its list of paths has exactly its members."""
    tally = Tally(f"info/{name}", record_property)
    valid = package(tmp_path / "valid", MEMBERS)
    content = Package(valid).info[name]
    payload = Package(valid).payload.keys()
    built = tmp_path / valid.name

    def has_members(result: Package) -> bool:
        return result.listed.keys() == payload == result.payload.keys()

    for mutant in mutate_json(content, 12, 60, 30):

        def replace(_: str, member: str, old: bytes, mutant: bytes = mutant) -> bytes:
            return mutant if member == f"info/{name}" else old

        repack(valid, built, replace)
        tally.give(lambda: read_safe(built), has_members, mutant)


@pytest.mark.parametrize("single", [False, True])
def test_archive(single: bool, tmp_path: Path, record_property: Property) -> None:
    built = package(tmp_path, MEMBERS, single=single)
    tally = Tally(f"package {built.suffix}", record_property)
    valid = built.read_bytes()
    payload = Package(built).payload
    for mutant in texts(valid, 14, 120):
        built.write_bytes(mutant)
        tally.give(lambda: read_safe(built), lambda result: result.payload == payload, mutant)
    built.write_bytes(b"")
    with pytest.raises(ForgeError):
        Package(built).require_safe()
