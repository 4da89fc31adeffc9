# SPDX-License-Identifier: BSD-3-Clause
"""Zip headers that lie, in every way: no package is judged by one content, installed with another.

Each package is given to our check, and to rattler's installer by a URL as pixi gives it. Either
the check refuses it, or what is installed is what was judged.
"""

import asyncio
import hashlib
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
# what rattler installs, and no check may pass
TAKEN = {"an archive that the directory calls metadata.json", "1 before", "another archive behind"}
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
    """One member as its two headers have it; `lies` are fields of one, `LOCAL_` or `CENTRAL_`."""

    name: bytes
    content: bytes
    lies: dict[str, Any]
    before: bytes = b""
    after: bytes = b""


def parts() -> list[Part]:
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
        file(f"info/{n}.json", json.dumps(v).encode())
        for n, v in {"index": about, "paths": paths}.items()
    ]
    return [
        Part(b"metadata.json", b'{"conda_pkg_format_version": 2}', {}),
        Part(f"pkg-{STEM}.tar.zst".encode(), zstandard.compress(tar(HONEST)), {}),
        Part(f"info-{STEM}.tar.zst".encode(), zstandard.compress(tar(info)), {}),
    ]


def zipped(members: list[Part], comment: bytes = b"", tail: bytes = b"") -> bytes:
    out, directory = b"", b""
    for part in members:
        out += part.before
        say = {
            "flags": 0,
            "method": 0,
            "crc": zlib.crc32(part.content),
            "packed": len(part.content),
            "size": len(part.content),
            "name": part.name,
            "extra": b"",
            "offset": len(out),
        }
        for kind in ("local", "central"):
            own = say | {k[len(kind) + 1 :]: v for k, v in part.lies.items() if k.startswith(kind)}
            fields = (
                own["flags"],
                own["method"],
                0,
                0,
                own["crc"],
                own["packed"],
                own["size"],
                len(own["name"]),
                len(own["extra"]),
            )
            if kind == "local":
                out += struct.pack("<4s5H3I2H", b"PK\3\4", 20, *fields)
                out += own["name"] + own["extra"] + part.content + part.after
            else:
                more = struct.pack("<HHHII", 0, 0, 0, 0, own["offset"])
                directory += struct.pack("<4s6H3I2H", b"PK\1\2", 20, 20, *fields) + more
                directory += own["name"] + own["extra"]
    end = struct.pack(
        "<4s4H2IH",
        b"PK\5\6",
        0,
        0,
        len(members),
        len(members),
        len(directory),
        len(out),
        len(comment),
    )
    return out + directory + end + comment + tail


def lies() -> Iterator[tuple[str, bytes]]:
    """A name and the bytes of each package."""
    yield "honest", zipped(parts())
    evil = zipped([Part(b"evil.tar.zst", EVIL, {})])
    entry = evil[: 30 + len(b"evil.tar.zst") + len(EVIL)]
    for place, part in enumerate(parts()):
        values = {
            "flags": (1, 8, 0x800),
            "method": (8, 93),
            "crc": (0, 7),
            "packed": (0, 20, 1 << 30),
            "size": (0, 20, 1 << 30),
            "name": (b"aaaaa.tar.zst", b"metadata.json", b"x"),
            "extra": (struct.pack("<HHQQ", 1, 16, 9, 9), b"xx\1\0y"),
        }
        for side in ("local", "central"):
            for field, wrong in values.items():
                for value in wrong:
                    changed = parts()
                    changed[place] = part._replace(lies={f"{side}_{field}": value})
                    yield f"{place} {side} {field} {value!r:.20}", zipped(changed)
        for side in ("before", "after"):
            changed = parts()
            changed[place] = part._replace(**{side: entry})
            yield f"{place} {side}", zipped(changed)
        changed = parts()
        changed[place] = part._replace(content=part.content + part.content)
        yield f"{place} twice in one member", zipped(changed)
    deflated = zlib.compress(EVIL)[2:-4]
    bomb = {"local_method": 8, "central_method": 8, "local_packed": len(deflated)}
    yield (
        "deflated, ends early",
        zipped([parts()[0]._replace(content=deflated + entry, lies=bomb), *parts()[1:]]),
    )
    # hole 2: the directory says metadata.json, the header before the member an archive
    named = {"local_name": b"aaaaa.tar.zst"}
    hole = [*parts()[1:], Part(b"metadata.json", EVIL, named)]
    yield "an archive that the directory calls metadata.json", zipped(hole)
    decoy = [*parts(), Part(f"pkg-{STEM}.tar.zst".encode(), DECOY, {})]
    yield "a second payload", zipped(decoy)
    # a reader that goes on after the first zstd frame sees another file
    first, second = tar([file("share/alpha", b"touch evil")])[:1024], tar(HONEST)
    frames = parts()
    frames[1] = frames[1]._replace(content=zstandard.compress(first) + zstandard.compress(second))
    yield "two frames", zipped(frames)
    yield "a comment", zipped(parts(), comment=b"PK\5\6 x")
    yield "bytes behind", zipped(parts(), tail=b"x")
    yield "another archive behind", zipped(parts()) + evil
    yield "another archive before", evil + zipped(parts())


def test_what_is_judged_is_what_is_installed(tmp_path: Path) -> None:
    channel = small_channel.make(tmp_path / "www" / "channel", "alpha", "beta")
    chosen = small_channel.workspace(tmp_path / "home", channel.as_uri())
    chosen.lock()
    record = next(r for r in chosen.locked("default") if r.name.normalized == "alpha")
    outcomes: dict[str, str] = {}
    with served(channel) as url:
        for number, (name, content) in enumerate(lies()):
            built = channel / "noarch" / f"{STEM}.conda"
            built.write_bytes(content)
            judged = None
            try:
                checked = Package(built)
                checked.require_safe()
                judged = {n: sha256_file(checked.folder / n) for n in checked.payload}
            except ForgeError as error:
                assert "\n" not in str(error) and REFUSED.get(name, "") in str(error)
            assert judged is None or name not in REFUSED
            if judged is None and name not in TAKEN:
                continue
            record.url = f"{url}/noarch/{built.name}"
            record.sha256 = bytes.fromhex(sha256_file(built))
            prefix = tmp_path / f"prefix-{number}"
            try:
                cache = tmp_path / f"cache-{number}"
                asyncio.run(rattler.install([record], prefix, cache, show_progress=False))
            except Exception:
                installed = None
            else:
                installed = {
                    str(f.relative_to(prefix)): hashlib.sha256(f.read_bytes()).hexdigest()
                    for f in prefix.rglob("*")
                    if f.is_file() and f.name != "CACHEDIR.TAG" and "conda-meta" not in f.parts
                }
            assert judged is None or judged == installed, name
            outcomes[name] = f"{bool(judged)} {bool(installed)}"
    assert outcomes["honest"] == "True True"
    assert number > 90
    # the installer takes these, and they are refused
    assert {outcomes[name] for name in TAKEN} == {"False True"}
