# SPDX-License-Identifier: BSD-3-Clause
"""Mutated indexes, logs, notes, packages and records: right content, or one message."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zstandard
from support.conda_packages import file, link, package, repacked, statement
from support.mutants import Tally, texts, trees
from support.static_channel import BUILD, Source, restored, unzstd

from forge.channel import revisions, verify
from forge.channel.publish import StaticChannel
from forge.conda import index, provenance, pypi
from forge.conda.local import Channel, Record
from forge.conda.location import Location
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
    StaticChannel(root / "out").publish(source, [f"beta-1.0-{BUILD}"])
    return root


@pytest.fixture
def published(channel: Path) -> Iterator[Path]:
    with restored(channel):
        yield channel / "out"


def dumps(mutant: Any) -> bytes:
    return json.dumps(mutant).encode()


def verified(location: Location) -> tuple[dict[str, dict], list[str]]:
    found, lines = verify.channel(location)
    assert all("\n" not in line and len(line) < 1000 and line.isascii() for line in lines)
    return found.records, lines


def test_repodata(published: Path, record_property: Property) -> None:
    """A changed index is found, or it means the same."""
    path, tally = published / "noarch/repodata.json", Tally("repodata.json", record_property)
    whole = path.read_bytes()
    location = Location(published)
    right = verify.read_index(location).records
    mutants = [*map(dumps, trees(json.loads(whole), 1, 80)), *texts(whole, 2, 40)]
    for mutant in mutants:
        path.write_bytes(mutant)
        tally.give(
            lambda: verified(location),
            lambda result: bool(result[1]) or result[0].keys() == right.keys(),
            mutant,
        )
    assert sum(tally.outcomes.values()) == 120


def test_compressed_forms(published: Path, record_property: Property) -> None:
    """Damaged bytes of each: found, or of no meaning."""
    location = Location(published)
    for seed, name in enumerate(("noarch/repodata.json.zst", f"noarch/{verify.SHARDS}")):
        path, tally = published / name, Tally(name.split("/")[1], record_property)
        whole = path.read_bytes()
        for mutant in texts(whole, seed, 40):
            path.write_bytes(mutant)
            tally.give(
                lambda: verified(location)[1],
                lambda lines, m=mutant, n=name, w=whole: (
                    bool(lines) or meaning(n, m) == meaning(n, w)
                ),
                mutant,
            )
        path.write_bytes(whole)


def meaning(name: str, raw: bytes) -> Any:
    return {**index.parse(name, raw), "info": None}


def packed(mutant: Any) -> bytes | None:
    """As msgpack; None for what it cannot hold."""
    try:
        return zstandard.compress(msgpack.packb(mutant))
    except (ValueError, OverflowError, UnicodeEncodeError, TypeError):
        return None


def test_shards(published: Path, record_property: Property) -> None:
    """Shards whose digests are right and whose content is not, and lists of them."""
    tally, path = Tally("shards", record_property), published / "noarch" / verify.SHARDS
    location = Location(published)
    shards = msgpack.unpackb(unzstd(path.read_bytes()))
    shard = published / "noarch/shards" / f"{shards['shards']['alpha'].hex()}.msgpack.zst"
    valid = msgpack.unpackb(unzstd(shard.read_bytes()))
    for mutant in filter(None, map(packed, trees(valid, 3, 60))):
        digest = hashlib.sha256(mutant).digest()
        (shard.parent / f"{digest.hex()}.msgpack.zst").write_bytes(mutant)
        new = {**shards, "shards": {**shards["shards"], "alpha": digest}}
        path.write_bytes(zstandard.compress(msgpack.packb(new)))
        same = verify._essence(index.parse("x.msgpack.zst", mutant)) == verify._essence(valid)
        tally.give(lambda: verified(location)[1], lambda f, s=same: bool(f) or s, mutant)
    for mutant in filter(None, map(packed, trees(shards, 4, 50))):
        path.write_bytes(mutant)
        same = meaning("x.msgpack.zst", mutant).get("shards") == shards["shards"]
        tally.give(lambda: verified(location)[1], lambda f, s=same: bool(f) or s, mutant)


def test_local_index(channel: Path, tmp_path: Path, record_property: Property) -> None:
    tally, valid = Tally("local index", record_property), channel / "channel/noarch/repodata.json"
    path, local = tmp_path / "noarch/repodata.json", Channel(tmp_path)
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
        local = Channel(tmp_path)
        tally.give(
            lambda local=local: (local.digest_of(record), local.tests_of(record)),
            lambda r: isinstance(r[0], dict | None) and isinstance(r[1], int | None),
            mutant,
        )


def test_log(published: Path, record_property: Property) -> None:
    tally, path = Tally("revisions log", record_property), published / revisions.LOG
    whole = path.read_bytes()
    valid, location = json.loads(whole), Location(published)
    for mutant in [*map(dumps, trees(valid, 9, 100)), *texts(whole, 10, 50)]:
        path.write_bytes(mutant)
        tally.give(
            lambda: revisions.read(location),
            lambda log: all(
                index.FILE_NAME.fullmatch(file.split("/", 1)[1])
                for entry in log.revisions
                for file in (*entry.added, *entry.yanked, *entry.restored)
            ),
            mutant,
        )  # fmt: skip


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
        verdict = provenance.verify(built, None)
        assert all(len(line) < 2000 and "\n" not in line for line in verdict.wrong)


@pytest.mark.parametrize("single", [False, True])
def test_archive(single: bool, tmp_path: Path, record_property: Property) -> None:
    built = package(tmp_path, MEMBERS, single=single)
    tally, whole = Tally(f"package {built.suffix}", record_property), built.read_bytes()
    held = Package(built).payload
    for mutant in texts(whole, 14, 120):
        built.write_bytes(mutant)

        tally.give(
            lambda: safe(built),
            lambda p: provenance.verify(built, None).wrong or p.payload == held,
            mutant,
        )
    built.write_bytes(b"")
    with pytest.raises(ForgeError):
        Package(built).require_safe()


def test_record(tmp_path: Path, record_property: Property) -> None:
    """A record that is read has the shape that the comparison needs."""
    tally, path = Tally("provenance", record_property), tmp_path / "a.provenance.json"
    built = package(tmp_path, MEMBERS)
    entry = {"uri": "u", "digest": {"sha256": "0" * 64}, "annotations": {"kind": "source"}}
    valid = statement(variant={"python": "3.12"})
    valid["predicate"]["buildDefinition"]["resolvedDependencies"] = [entry]
    valid["predicate"]["runDetails"]["metadata"] = {"startedOn": "x"}
    for mutant in [*map(dumps, trees(valid, 15, 100)), *texts(dumps(valid), 16, 50)]:
        path.write_bytes(mutant)
        tally.give(
            lambda: provenance.verify(built, provenance.read(path)).wrong,
            lambda wrong: all(isinstance(line, str) and len(line) < 2000 for line in wrong),
            mutant,
        )
