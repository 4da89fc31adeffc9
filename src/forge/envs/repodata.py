# SPDX-License-Identifier: BSD-3-Clause
"""Records of a channel from files on disk, as a source for the solver."""

import json
import tempfile
from pathlib import Path
from typing import Any

import zstandard
from rattler import Channel, PackageName, RepoDataRecord, SparseRepoData

from forge.errors import ForgeError
from forge.project import SUBDIRS


def purls_of(record: RepoDataRecord) -> set[str]:
    """What a record says that it is elsewhere; the bindings say it as JSON alone."""
    return set(json.loads(record.to_json()).get("purls") or ())


def with_purls(record: RepoDataRecord, purls: list[str]) -> RepoDataRecord:
    """A record that says so; the bindings read it from an index alone."""
    data = json.loads(record.to_json()) | {"purls": purls}
    subdir, base_url = data["subdir"], record.url.rpartition("/")[0]
    index = {"info": {"subdir": subdir, "base_url": f"{base_url}/"}, "packages": {}}
    with tempfile.NamedTemporaryFile("w", prefix="forge-records-") as file:
        json.dump(index | {"packages.conda": {record.file_name: data}}, file)
        file.flush()
        source = SparseRepoData(Channel(data["channel"]), subdir, file.name)
        return source.load_records(PackageName(data["name"]))[0]


class Records:
    """The records of one channel, with its URLs, from FOLDER/SUBDIR/repodata.json or .zst.

    Raises ForgeError when a file is missing or damaged.
    """

    def __init__(self, channel: str, folder: Path) -> None:
        self._data: dict[str, SparseRepoData] = {}
        for subdir in SUBDIRS:
            plain, packed = (folder / subdir / f"repodata.json{end}" for end in ("", ".zst"))
            # rattler maps the file into memory, so that it may go as soon as it is read
            with tempfile.NamedTemporaryFile(prefix="forge-records-") as unpacked:
                try:
                    if not plain.is_file():
                        with packed.open("rb") as file:
                            zstandard.ZstdDecompressor().copy_stream(file, unpacked)
                        unpacked.flush()
                    there = plain if plain.is_file() else unpacked.name
                    self._data[subdir] = SparseRepoData(Channel(channel), subdir, there)
                except FileNotFoundError:
                    missing = f"there is no {packed} and no {plain}"
                    raise ForgeError(f"{folder} holds no records: {missing}") from None
                except Exception as error:  # the bindings and zstandard have many
                    raise ForgeError(f"repodata of {channel}/{subdir}: {error}") from None

    # What rattler asks of a source of records (its protocol RepoDataSource)
    async def fetch_package_records(self, platform: Any, name: PackageName) -> list[RepoDataRecord]:
        """The records of a name in a subdir."""
        return self._data[str(platform)].load_records(name)

    def package_names(self, platform: Any) -> list[str]:
        """The names in a subdir."""
        return self._data[str(platform)].package_names()
