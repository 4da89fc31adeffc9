# SPDX-License-Identifier: BSD-3-Clause
"""Records of a channel that do not come from its present index: files on disk, an old revision."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import zstandard
from rattler import Channel, PackageName, RepoDataRecord, SparseRepoData

from forge.channel import revisions
from forge.channel.location import Location
from forge.errors import ForgeError
from forge.project import SUBDIRS


class Records:
    """The records of one channel from the text of its repodata: a source for the solver.

    The records' URLs are the channel's, wherever the text comes from.
    """

    def __init__(self, channel: str, repodata: Mapping[str, bytes]) -> None:
        self.channel = channel
        self._data: dict[str, SparseRepoData] = {}
        # rattler maps the files into memory, so that they may go as soon as they are read
        with tempfile.TemporaryDirectory(prefix="forge-records-") as folder:
            for subdir, text in repodata.items():
                file = Path(folder, f"{subdir}.json")
                file.write_bytes(text)
                try:
                    self._data[subdir] = SparseRepoData(Channel(channel), subdir, file)
                except Exception as error:
                    raise ForgeError(f"repodata of {channel}/{subdir}: {error}") from None

    @classmethod
    def on_disk(cls, channel: str, folder: Path) -> Records:
        """From FOLDER/SUBDIR/repodata.json or repodata.json.zst."""
        repodata = {}
        for subdir in SUBDIRS:
            plain, packed = (folder / subdir / f"repodata.json{end}" for end in ("", ".zst"))
            if not (plain.is_file() or packed.is_file()):
                raise ForgeError(f"{folder} holds no records: there is no {packed} and no {plain}")
            data = plain if plain.is_file() else packed
            repodata[subdir] = unpack(data.read_bytes(), str(data))
        return cls(channel, repodata)

    # What rattler asks of a source of records (its protocol RepoDataSource)
    async def fetch_package_records(self, platform: Any, name: PackageName) -> list[RepoDataRecord]:
        data = self._data.get(str(platform))
        return data.load_records(name) if data else []

    def package_names(self, platform: Any) -> list[str]:
        data = self._data.get(str(platform))
        return data.package_names() if data else []


def at_revision(channel: str, revision: int) -> tuple[Records, datetime]:
    """The channel's records as they were at a revision, and until when others' records count.

    That is the revision's time, or when its last record was indexed: a publish does that later.
    Raises ForgeError when the channel has no such revision, NotAttempted when it does not answer.
    """
    location = Location(channel)
    log = {entry.revision: entry for entry in revisions.read(location)}
    if revision not in log:
        numbers = ", ".join(map(str, sorted(log))) or "none"
        raise ForgeError(f"{channel} has no revision {revision}; it has: {numbers}")
    repodata, until = {}, log[revision].time
    try:
        times = [datetime.fromisoformat(until).astimezone(UTC)]
    except ValueError:
        raise ForgeError(f"{channel}, revision {revision}: {until!r} is not a time") from None
    for subdir in SUBDIRS:
        name = revisions.index_path(revision, subdir)
        if (packed := location.read(name)) is None:
            raise ForgeError(f"{channel}/{name} is missing; see forge channel verify")
        repodata[subdir] = unpack(packed, f"{channel}/{name}")
        try:
            for record in json.loads(repodata[subdir])["packages.conda"].values():
                stamp = record.get("indexed_timestamp", record.get("timestamp", 0))
                times.append(datetime.fromtimestamp(stamp / 1000, UTC))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ForgeError(f"{channel}/{name} is damaged; restore it from a copy") from None
    return Records(channel, repodata), max(times)


def unpack(data: bytes, name: str) -> bytes:
    """JSON that may be compressed with zstd. Raises ForgeError when that is damaged."""
    if name.endswith("json"):
        return data
    try:
        return zstandard.ZstdDecompressor().decompressobj().decompress(data)
    except zstandard.ZstdError as error:
        raise ForgeError(f"{name} is damaged: {error}") from None
