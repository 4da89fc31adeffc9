# SPDX-License-Identifier: BSD-3-Clause
"""Records of a channel that do not come from its present index: files on disk, an old revision."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import zstandard
from rattler import Channel, PackageName, RepoDataRecord, SparseRepoData

from forge.channel import revisions
from forge.channel.location import Location
from forge.envs.bindings import Subdir
from forge.errors import ForgeError
from forge.project import SUBDIRS


class Records:
    """The records of one channel, given as the text of its repodata: a source for the solver.

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
            if plain.is_file():
                repodata[subdir] = plain.read_bytes()
            elif packed.is_file():
                repodata[subdir] = unpack(packed.read_bytes(), packed)
            else:
                raise ForgeError(f"{folder} holds no records: there is no {packed} and no {plain}")
        return cls(channel, repodata)

    # What rattler asks of a source of records (its protocol RepoDataSource)
    async def fetch_package_records(
        self, platform: Subdir, name: PackageName
    ) -> list[RepoDataRecord]:
        data = self._data.get(str(platform))
        return data.load_records(name) if data else []

    def package_names(self, platform: Subdir) -> list[str]:
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
        known = ", ".join(map(str, sorted(log))) or "none"
        raise ForgeError(f"{channel} has no revision {revision}; it has: {known}")
    try:
        time = datetime.fromisoformat(log[revision].time).astimezone(UTC)
    except ValueError:
        raise ForgeError(
            f"{channel}, revision {revision}: {log[revision].time!r} is no time"
        ) from None
    repodata = {}
    for subdir in SUBDIRS:
        name = revisions.index_path(revision, subdir)
        packed = location.read(name)
        if packed is None:
            raise ForgeError(f"{channel}/{name} is not there; forge channel verify looks further")
        repodata[subdir] = unpack(packed, f"{channel}/{name}")
        try:
            known = json.loads(repodata[subdir])["packages.conda"].values()
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ForgeError(f"{channel}/{name} is damaged; take it back from a copy") from None
        for record in known:
            stamp = record.get("indexed_timestamp", record.get("timestamp", 0))
            time = max(time, datetime.fromtimestamp(stamp / 1000, UTC))
    return Records(channel, repodata), time


def unpack(packed: bytes, name: str | Path) -> bytes:
    """zstd-compressed bytes, unpacked."""
    try:
        return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed)).read()
    except zstandard.ZstdError as error:
        raise ForgeError(f"{name} is damaged: {error}") from None
