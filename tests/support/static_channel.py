# SPDX-License-Identifier: BSD-3-Clause
"""Channels that tests publish, and clients that read the published channel."""

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
from support.conda_packages import repack

from forge.conda.local import LocalChannel
from forge.files import sha256_file
from forge.project import SUBDIRS

BUILD = "h1234567_0"
# A rendered recipe with a few of the parts that rattler-build writes.
RENDERED = """\
recipe: {}
build_configuration:
  packaging_settings: {archive_type: conda, compression_level: 1}
  variant: {content_digest: conda-forge-0}
  timestamp: 2026-01-01 00:00:00
system_tools: {rattler-build: 0.73.0}
"""


class Source(LocalChannel):
    """A channel in the driver's format, with packages of one file.

    Unless a test gives another build string, they do not count as built on the host base.
    """

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
        **arguments: object,
    ) -> str:
        """Build a package of one file, add it, and return NAME-VERSION-BUILD.

        Args:
            tests: The number of tests that the channel's note gives the package.
            licensed: Whether the package has a license and its text.
            text: The content of the file; the name of the package by default.
            file: The path of the file; the name of the package by default.
            exports: The package's run_exports.
            arguments: Further arguments of `assemble_package`.
        """
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
        about: dict[str, object] = {}
        if licensed:
            about = {"license": "MIT", "license_files": [work / "LICENSE"]}
        package = assemble_package(
            name,
            version,
            subdir,
            build,
            work / subdir,
            files_dir=work / "files",
            noarch="generic" if subdir == "noarch" else None,
            recipe_dir=work / "recipe",
            **about | arguments,
        )
        if exports:
            # assemble_package adds info/run_exports.json to paths.json. No build of a recipe does.
            repack(package.path, package.path, _remove_info_paths)
        self.add({package.path: tests}, {"content": name})
        shutil.rmtree(work / "files")
        return f"{name}-{version}-{build}"


def _remove_info_paths(_: str, name: str, content: bytes) -> bytes:
    """Remove the paths below info/ from paths.json; leave other files as they are."""
    if name != "info/paths.json":
        return content
    data = json.loads(content)
    data["paths"] = [path for path in data["paths"] if not path["_path"].startswith("info/")]
    return json.dumps(data).encode()


def require_whole(target: Path) -> None:
    """Require that every form of the index has exactly the packages of the folder."""
    packages = {str(path.relative_to(target)): path for path in target.glob("*/*.conda")}
    digests = {name: sha256_file(path) for name, path in packages.items()}
    assert indexed(target.as_uri()) == [digests] * 3


def without_purls(channel: Path) -> None:
    """Rewrite the index without purls and in one form only, like those that other tools write."""
    for file in channel.glob("*/repodata.json"):
        data = json.loads(file.read_bytes())
        for record in data["packages.conda"].values():
            record.pop("purls", None)
        file.write_text(json.dumps(data))
        for outdated_form in {*file.parent.glob("repodata_*"), *file.parent.glob("*.zst")}:
            outdated_form.unlink()


def tree(folder: Path) -> dict[str, bytes]:
    """Return the content of each file below a folder, by its relative path."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=300) as answer:
        return answer.read()


def unzstd(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(data)


def indexed(url: str) -> list[dict[str, str]]:
    """Read the three forms of the index: plain, compressed and sharded.

    Returns:
        For each form the sha256 of each package, by SUBDIR/FILE.
    """
    plain: dict[str, str] = {}
    packed: dict[str, str] = {}
    sharded: dict[str, str] = {}
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
            for name, record in records.items():
                sharded[f"{subdir}/{name}"] = record["sha256"].hex()
    return [plain, packed, sharded]


def view(url: str) -> int:
    """Read the index in its three forms, and every file that each names, as a client would.

    Returns:
        The number of files read.

    Raises:
        Exception: A file is missing, incomplete or different from its record.
    """
    files: set[tuple[str, str]] = set()
    for digests in indexed(url):
        files |= digests.items()
    for name, sha256 in files:
        assert hashlib.sha256(fetch(f"{url}/{name}")).hexdigest() == sha256, name
    return len(files)


def solve(url: str, cache: Path, *specs: str, sharded: bool = True, zst: bool = True) -> set[str]:
    """Solve specs with rattler from one channel, and return NAME-VERSION-BUILD of each package.

    `sharded` and `zst` choose the form of the index that rattler reads.
    """
    config = SourceConfig(sharded_enabled=sharded, zstd_enabled=zst, cache_action="no-cache")
    gateway = Gateway(cache_dir=cache, default_config=config)
    solution = rattler.solve(
        [ChannelName(url)],
        list(specs),
        gateway=gateway,
        platforms=["linux-64", "noarch"],
        virtual_packages=VirtualPackage.detect(),
    )
    records = asyncio.run(solution)
    return {record.file_name.removesuffix(".conda") for record in records}


def flip(path: Path) -> None:
    """Flip one bit in the last byte of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
