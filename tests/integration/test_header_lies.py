# SPDX-License-Identifier: BSD-3-Clause
"""Packages whose zip headers lie: our check refuses them, or reads exactly the installed files.

A zip archive describes each member twice: in a local header before the member, and in the central
directory at the end of the archive. rattler installs each package that our check accepts, and the
packages in INSTALLED_BY_RATTLER, which the check must refuse. As pixi does, the test gives rattler
the URL of the package.
"""

import asyncio
import hashlib
import itertools
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import rattler
import zstandard
from support import small_channel
from support.conda_packages import file, list_entries, tar
from support.servers import served

from forge.conda.package import Package
from forge.errors import ForgeError
from forge.files import sha256_file

STEM = "alpha-1.0-h1234567_0"
# Packages that rattler installs and our check must refuse.
INSTALLED_BY_RATTLER = {
    "an archive that the directory calls metadata.json",
    "1 before",
    "another archive behind",
}
# Packages that our check must refuse, each with a part of the check's message.
REFUSED = {
    "0 before": "headers that differ",
    "2 after": "data that belong to no member",
    "bytes behind": "data that belong to no member",
    "a second payload": "other members than",
}
HONEST = [file("share/alpha", b"honest")]
EVIL = zstandard.compress(tar([file("etc/conda/activate.d/evil.sh", b"touch evil")]))
DECOY = zstandard.compress(tar([file("share/alpha", b"decoy")]))


class Part(NamedTuple):
    """A member of a zip archive.

    Attributes:
        name: The name in both headers.
        content: The content, which is stored without compression.
        lies: Wrong fields of the headers, by `local_FIELD` or `central_FIELD`.
        before: Bytes before the member.
        after: Bytes after the member.
    """

    name: bytes
    content: bytes
    lies: dict[str, Any]
    before: bytes = b""
    after: bytes = b""


def make_parts() -> list[Part]:
    """Return the members of an honest package."""
    about = {
        "name": "alpha",
        "version": "1.0",
        "build": "h1234567_0",
        "build_number": 0,
        "depends": [],
        "subdir": "noarch",
        "noarch": "generic",
        "license": "MIT",
        "timestamp": 1,
    }
    paths = {"paths": list_entries(HONEST), "paths_version": 1}
    info = [
        file("info/index.json", json.dumps(about).encode()),
        file("info/paths.json", json.dumps(paths).encode()),
    ]
    return [
        Part(b"metadata.json", b'{"conda_pkg_format_version": 2}', {}),
        Part(f"pkg-{STEM}.tar.zst".encode(), zstandard.compress(tar(HONEST)), {}),
        Part(f"info-{STEM}.tar.zst".encode(), zstandard.compress(tar(info)), {}),
    ]


def pack_common_fields(header: dict[str, Any]) -> bytes:
    """Pack the fields that both headers of a member have."""
    return struct.pack(
        "<4H3I2H",
        header["flags"],
        header["method"],
        0,  # time
        0,  # date
        header["crc"],
        header["packed"],
        header["size"],
        len(header["name"]),
        len(header["extra"]),
    )


def make_zip(members: list[Part], comment: bytes = b"", tail: bytes = b"") -> bytes:
    """Return a zip archive.

    Args:
        members: The members.
        comment: The comment of the archive.
        tail: Bytes after the archive.
    """
    archive = b""
    directory = b""
    for part in members:
        archive += part.before
        header = {
            "flags": 0,
            "method": 0,
            "crc": zlib.crc32(part.content),
            "packed": len(part.content),
            "size": len(part.content),
            "name": part.name,
            "extra": b"",
            "offset": len(archive),
        }
        local = dict(header)
        central = dict(header)
        for key, value in part.lies.items():
            kind, _, field = key.partition("_")
            wrong_header = local if kind == "local" else central
            wrong_header[field] = value
        archive += struct.pack("<4sH", b"PK\3\4", 20) + pack_common_fields(local)
        archive += local["name"] + local["extra"] + part.content + part.after
        directory += struct.pack("<4s2H", b"PK\1\2", 20, 20) + pack_common_fields(central)
        directory += struct.pack("<HHHII", 0, 0, 0, 0, central["offset"])
        directory += central["name"] + central["extra"]
    end = struct.pack(
        "<4s4H2IH",
        b"PK\5\6",
        0,
        0,
        len(members),
        len(members),
        len(directory),
        len(archive),
        len(comment),
    )
    return archive + directory + end + comment + tail


def make_packages() -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of each package."""
    yield "honest", make_zip(make_parts())
    evil = make_zip([Part(b"evil.tar.zst", EVIL, {})])
    entry = evil[: 30 + len(b"evil.tar.zst") + len(EVIL)]
    for place, part in enumerate(make_parts()):
        values_by_field = {
            "flags": (1, 8, 0x800),
            "method": (8, 93),
            "crc": (0, 7),
            "packed": (0, 20, 1 << 30),
            "size": (0, 20, 1 << 30),
            "name": (b"aaaaa.tar.zst", b"metadata.json", b"x"),
            "extra": (struct.pack("<HHQQ", 1, 16, 9, 9), b"xx\1\0y"),
        }
        for header, field in itertools.product(("local", "central"), values_by_field):
            for value in values_by_field[field]:
                parts = make_parts()
                parts[place] = part._replace(lies={f"{header}_{field}": value})
                yield f"{place} {header} {field} {value!r:.20}", make_zip(parts)
        for side in ("before", "after"):
            parts = make_parts()
            parts[place] = part._replace(**{side: entry})
            yield f"{place} {side}", make_zip(parts)
        parts = make_parts()
        parts[place] = part._replace(content=part.content + part.content)
        yield f"{place} twice in one member", make_zip(parts)
    deflated = zlib.compress(EVIL)[2:-4]
    parts = make_parts()
    lies = {"local_method": 8, "central_method": 8, "local_packed": len(deflated)}
    parts[0] = parts[0]._replace(content=deflated + entry, lies=lies)
    yield "deflated, ends early", make_zip(parts)
    # The local header names an archive, and the central directory names metadata.json.
    hidden = Part(b"metadata.json", EVIL, {"local_name": b"aaaaa.tar.zst"})
    parts = [*make_parts()[1:], hidden]
    yield "an archive that the directory calls metadata.json", make_zip(parts)
    parts = [*make_parts(), Part(f"pkg-{STEM}.tar.zst".encode(), DECOY, {})]
    yield "a second payload", make_zip(parts)
    # A reader that continues after the first zstd frame reads another file than a reader that stops
    # there.
    first = tar([file("share/alpha", b"touch evil")])[:1024]
    second = tar(HONEST)
    parts = make_parts()
    parts[1] = parts[1]._replace(content=zstandard.compress(first) + zstandard.compress(second))
    yield "two frames", make_zip(parts)
    yield "a comment", make_zip(make_parts(), comment=b"PK\5\6 x")
    yield "bytes behind", make_zip(make_parts(), tail=b"x")
    yield "another archive behind", make_zip(make_parts()) + evil
    yield "another archive before", evil + make_zip(make_parts())


def check(name: str, path: Path) -> dict[str, str] | None:
    """Return the sha256 of each file that our check reads, or None if it refuses the package."""
    try:
        package = Package(path)
        package.require_safe()
        return {file: sha256_file(package.folder / file) for file in package.payload}
    except ForgeError as error:
        assert "\n" not in str(error) and REFUSED.get(name, "") in str(error)
        return None


def install(record: rattler.RepoDataRecord, prefix: Path, cache: Path) -> dict[str, str] | None:
    """Return the sha256 of each file that rattler installs, or None if it installs nothing."""
    try:
        asyncio.run(rattler.install([record], prefix, cache, show_progress=False))
    except Exception:
        return None
    digests = {}
    for path in prefix.rglob("*"):
        # rattler writes these files, and they are not in the package.
        is_own_file = path.name == "CACHEDIR.TAG" or "conda-meta" in path.parts
        if path.is_file() and not is_own_file:
            digests[str(path.relative_to(prefix))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests


def test_what_is_judged_is_what_is_installed(tmp_path: Path) -> None:
    channel = small_channel.make(tmp_path / "www" / "channel", "alpha", "beta")
    workspace = small_channel.workspace(tmp_path / "home", channel.as_uri())
    workspace.lock()
    record = next(r for r in workspace.locked("default") if r.name.normalized == "alpha")
    path = channel / "noarch" / f"{STEM}.conda"
    outcomes: dict[str, tuple[bool, bool]] = {}
    with served(channel) as url:
        for number, (name, content) in enumerate(make_packages()):
            path.write_bytes(content)
            checked = check(name, path)
            assert checked is None or name not in REFUSED
            if checked is None and name not in INSTALLED_BY_RATTLER:
                continue
            record.url = f"{url}/noarch/{path.name}"
            record.sha256 = bytes.fromhex(sha256_file(path))
            installed = install(record, tmp_path / f"prefix-{number}", tmp_path / f"cache-{number}")
            assert checked is None or checked == installed, name
            outcomes[name] = (bool(checked), bool(installed))
    assert outcomes["honest"] == (True, True)
    assert number > 90
    for name in INSTALLED_BY_RATTLER:
        assert outcomes[name] == (False, True)
