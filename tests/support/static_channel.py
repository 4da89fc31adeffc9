# SPDX-License-Identifier: BSD-3-Clause
"""Channels to publish in tests, and clients that look at what is published."""

import asyncio
import hashlib
import json
import shutil
import urllib.request
from pathlib import Path

import msgpack
import rattler
import zstandard
from rattler import Channel as ChannelName
from rattler import Gateway, SourceConfig, VirtualPackage
from rattler_build import assemble_package
from support.conda_packages import repacked

from forge.conda.local import LocalChannel
from forge.files import sha256_file
from forge.project import SUBDIRS

BUILD = "h1234567_0"
# the least that rattler-build leaves in a package
RENDERED = """\
recipe: {}
build_configuration:
  packaging_settings: {archive_type: conda, compression_level: 1}
  variant: {content_digest: conda-forge-0}
  timestamp: 2026-01-01 00:00:00
system_tools: {rattler-build: 0.73.0}
"""


class Source(LocalChannel):
    """A channel as the driver leaves it, with packages that are bound to no host."""

    def make(
        self,
        name: str,
        version: str = "1.0",
        subdir: str = "noarch",
        tests: int = 1,
        licensed: bool = True,
        build: str = BUILD,
        text: str = "",
        file: str = "",
        exports: dict[str, list[str]] | None = None,
        **more: object,
    ) -> str:
        """Build a package of one file and add it; returns NAME-VERSION-BUILD."""
        work = self.folder.parent / "work"
        (work / subdir).mkdir(parents=True, exist_ok=True)
        path = work / "files" / (file or name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text or name)
        if exports:
            (work / "files/info").mkdir()
            (work / "files/info/run_exports.json").write_text(json.dumps(exports))
        (work / "LICENSE").write_text("Permission is hereby granted\n")
        (work / "recipe").mkdir(exist_ok=True)
        (work / "recipe" / "recipe.yaml").write_text(f"package: {name}\n")
        (work / "recipe" / "rendered_recipe.yaml").write_text(RENDERED)
        about = {"license": "MIT", "license_files": [work / "LICENSE"]} if licensed else {}
        package = assemble_package(
            name, version, subdir, build, work / subdir, files_dir=work / "files",
            noarch="generic" if subdir == "noarch" else None, recipe_dir=work / "recipe",
            **about | more,
        )  # fmt: skip
        if exports:  # it lists them with the files to install, as no build does
            repacked(package.path, package.path, _unlisted)
        self.add({package.path: tests}, {"content": name})
        shutil.rmtree(work / "files")
        return f"{name}-{version}-{build}"


def _unlisted(_: str, name: str, content: bytes) -> bytes:
    if name != "info/paths.json":
        return content
    data = json.loads(content)
    data["paths"] = [path for path in data["paths"] if not path["_path"].startswith("info/")]
    return json.dumps(data).encode()


def require_whole(target: Path) -> None:
    """Every form of the index names exactly the packages that are there, as they are."""
    packages = {str(path.relative_to(target)): path for path in target.glob("*/*.conda")}
    digests = {name: sha256_file(path) for name, path in packages.items()}
    assert indexed(target.as_uri()) == [digests] * 3


def without_purls(channel: Path) -> None:
    """The index as another tool writes it."""
    for file in channel.glob("*/repodata.json"):
        data = json.loads(file.read_bytes())
        for record in data["packages.conda"].values():
            record.pop("purls", None)
        file.write_text(json.dumps(data))
        for other in {*file.parent.glob("repodata_*"), *file.parent.glob("*.zst")}:
            other.unlink()


def tree(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=300) as answer:
        return answer.read()


def unzstd(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(data)


def indexed(url: str) -> list[dict[str, str]]:
    """The sha256 of each package, by SUBDIR/FILE, in the three forms of the index."""
    plain, packed, sharded = {}, {}, {}
    for subdir in SUBDIRS:
        base = f"{url}/{subdir}"
        texts = [fetch(f"{base}/repodata.json"), unzstd(fetch(f"{base}/repodata.json.zst"))]
        for text, digests in zip(texts, (plain, packed), strict=True):
            records = json.loads(text)["packages.conda"]
            digests |= {f"{subdir}/{name}": record["sha256"] for name, record in records.items()}
        shards = msgpack.unpackb(unzstd(fetch(f"{base}/repodata_shards.msgpack.zst")))
        for digest in shards["shards"].values():
            raw = fetch(f"{base}/shards/{digest.hex()}.msgpack.zst")
            assert hashlib.sha256(raw).digest() == digest
            records = msgpack.unpackb(unzstd(raw))["packages.conda"]
            sharded |= {f"{subdir}/{name}": r["sha256"].hex() for name, r in records.items()}
    return [plain, packed, sharded]


def view(url: str) -> int:
    """One look of a client: the index in its three forms, and every file that each names.

    Returns how many files it read; raises for anything that is missing, half there or different.
    """
    named = {item for digests in indexed(url) for item in digests.items()}
    for name, sha256 in named:
        assert hashlib.sha256(fetch(f"{url}/{name}")).hexdigest() == sha256, name
    return len(named)


def solve(url: str, cache: Path, *specs: str, sharded: bool = True, zst: bool = True) -> set[str]:
    """What rattler takes for `specs` from a channel, through one form of its index."""
    config = SourceConfig(sharded_enabled=sharded, zstd_enabled=zst, cache_action="no-cache")
    gateway = Gateway(cache_dir=cache, default_config=config)
    records = asyncio.run(
        rattler.solve(
            [ChannelName(url)], list(specs), gateway=gateway, platforms=["linux-64", "noarch"],
            virtual_packages=VirtualPackage.detect(),
        )
    )  # fmt: skip
    return {record.file_name.removesuffix(".conda") for record in records}


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
