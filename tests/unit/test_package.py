# SPDX-License-Identifier: BSD-3-Clause
"""Reading packages and records, with packages that are made by hand."""

import json
import random
from pathlib import Path

import pytest
from support.conda_packages import file, package

from forge.conda.package import Package
from forge.errors import ForgeError, Refused


def test_what_info_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = package(tmp_path, [file("a")])
    info = Package(built).info
    assert {"index.json", "paths.json"} <= info.keys() and json.loads(info["index.json"])
    monkeypatch.setattr("forge.limits.INFO", sum(map(len, info.values())))
    assert Package(built).info == info
    monkeypatch.setattr("forge.limits.INFO", sum(map(len, info.values())) - 1)
    with pytest.raises(Refused, match="has more than"):
        _ = Package(built).info


def test_damage_far_into_a_file_is_one_message(tmp_path: Path) -> None:
    """Not only where the archive is opened, but also while a large file is read."""
    built = package(tmp_path, [file("noise", random.Random(1).randbytes(1 << 20))])
    whole = bytearray(built.read_bytes())
    whole[len(whole) // 2] ^= 0xFF
    built.write_bytes(whole)
    # zip's and zstd's checksums are not looked at by every rattler; those of the files are by us
    with pytest.raises(ForgeError, match="cannot be read|has another sha256"):
        Package(built).require_safe()
