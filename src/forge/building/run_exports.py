# SPDX-License-Identifier: BSD-3-Clause
"""Run exports of conda-forge's packages, from the run_exports.json of each subdir."""

import io
import json
from functools import cached_property
from typing import Any

import rattler
import zstandard

from forge import limits, network
from forge.limits import Limited
from forge.project import SUBDIRS

# The run exports of a package: the match specs of each kind, such as weak, strong or noarch.
Exports = dict[str, list[str]]


class RunExports:
    """The run exports of a channel's packages.

    Attributes:
        channel: The channel's address.
    """

    def __init__(self, channel: str) -> None:
        self.channel = channel

    def read(self, record: rattler.RepoDataRecord) -> Exports:
        """Return the run exports of a package; empty if the channel states none."""
        by_file_name = self._by_subdir.get(record.subdir, {})
        return by_file_name.get(record.file_name, {})

    @cached_property
    def _by_subdir(self) -> dict[str, dict[str, Exports]]:
        exports = {}
        for subdir in SUBDIRS:
            url = f"{self.channel}/{subdir}/run_exports.json.zst"
            exports[subdir] = _download(url)
        return exports


def _download(url: str) -> dict[str, Exports]:
    """Return the run exports by package file name; empty if the file cannot be downloaded."""
    compressed = io.BytesIO()
    limited = Limited(
        compressed,
        limits.INDEX,
        f"{url} has more than {limits.INDEX} bytes",
    )
    try:
        network.download(network.client(), url, limited)
    except RuntimeError:
        # The file is optional. Without it, the run exports of conda-forge's packages are not known,
        # and packages of the preview lack the requirements that these run exports would add.
        return {}
    compressed.seek(0)
    decompressor = zstandard.ZstdDecompressor()
    with decompressor.stream_reader(compressed) as stream:
        data: dict[str, Any] = json.loads(stream.read(limits.INDEX))
    exports = {}
    for key in ("packages", "packages.conda"):
        for file_name, entry in data.get(key, {}).items():
            exports[file_name] = entry.get("run_exports", {})
    return exports
