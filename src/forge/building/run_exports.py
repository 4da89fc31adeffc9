# SPDX-License-Identifier: BSD-3-Clause
"""What conda-forge's packages export to what is built against them, from its run_exports.json."""

import io
import json
from functools import cached_property
from typing import Any

import rattler
import zstandard

from forge import limits, network
from forge.limits import Limited
from forge.project import SUBDIRS

Exports = dict[str, list[str]]  # by kind: weak, strong, noarch


class RunExports:
    """The run exports of a channel's packages; none for packages of which it states none."""

    def __init__(self, channel: str) -> None:
        self.channel = channel

    def of(self, record: rattler.RepoDataRecord) -> Exports:
        """Return the run exports of a package."""
        return self._by_subdir.get(record.subdir, {}).get(record.file_name, {})

    @cached_property
    def _by_subdir(self) -> dict[str, dict[str, Exports]]:
        address = f"{self.channel}/{{}}/run_exports.json.zst"
        return {subdir: _read(address.format(subdir)) for subdir in SUBDIRS}


def _read(url: str) -> dict[str, Exports]:
    """Return the run exports by file name; an empty mapping where the channel has no such file."""
    packed = io.BytesIO()
    limited = Limited(packed, limits.INDEX, f"{url} has more than {limits.INDEX} bytes")
    try:
        network.download(network.client(), url, limited)
    except RuntimeError:  # a channel need not have it: a requirement less is known
        return {}
    packed.seek(0)
    with zstandard.ZstdDecompressor().stream_reader(packed) as stream:
        data: dict[str, Any] = json.loads(stream.read(limits.INDEX))
    entries = {**data.get("packages", {}), **data.get("packages.conda", {})}
    return {name: entry.get("run_exports", {}) for name, entry in entries.items()}
