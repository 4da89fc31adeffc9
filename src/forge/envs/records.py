# SPDX-License-Identifier: BSD-3-Clause
"""Records of a channel from files on disk, as a source for the solver."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zstandard
from rattler import Channel, PackageName, RepoDataRecord, SparseRepoData

from forge.errors import ForgeError
from forge.project import SUBDIRS


class Records:
    """The records of one channel from its repodata by subdir, with URLs of that channel.

    Raises ForgeError when the repodata is damaged.
    """

    def __init__(self, channel: str, repodata: Mapping[str, bytes]) -> None:
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
    def on_disk(cls, channel: str, folder: Path) -> "Records":
        """From FOLDER/SUBDIR/repodata.json or repodata.json.zst. Raises ForgeError without them."""
        repodata = {}
        for subdir in SUBDIRS:
            plain, packed = (folder / subdir / f"repodata.json{end}" for end in ("", ".zst"))
            unzstd = zstandard.ZstdDecompressor().decompressobj().decompress
            try:
                there = plain.is_file()
                repodata[subdir] = plain.read_bytes() if there else unzstd(packed.read_bytes())
            except FileNotFoundError:
                missing = f"there is no {packed} and no {plain}"
                raise ForgeError(f"{folder} holds no records: {missing}") from None
            except zstandard.ZstdError as error:
                raise ForgeError(f"{packed} is damaged: {error}") from None
        return cls(channel, repodata)

    # What rattler asks of a source of records (its protocol RepoDataSource)
    async def fetch_package_records(self, platform: Any, name: PackageName) -> list[RepoDataRecord]:
        return self._data[str(platform)].load_records(name)

    def package_names(self, platform: Any) -> list[str]:
        return self._data[str(platform)].package_names()
