# SPDX-License-Identifier: BSD-3-Clause
"""Reading packages: the limit of the info section, and damage."""

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


def test_a_package_of_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names only the package, not the temporary folder to which it is unpacked."""
    built = package(tmp_path, [file("a"), file("b")])
    monkeypatch.setattr("forge.limits.FILES", 2)
    assert Package(built).payload.keys() == {"a", "b"}
    monkeypatch.setattr("forge.limits.FILES", 1)
    with pytest.raises(Refused) as error:
        _ = Package(built).payload
    assert str(error.value) == f"{built} has more than 1 files: do not install this package"


def test_damage_far_into_a_file_is_one_message(tmp_path: Path) -> None:
    """Damage in the middle of a large file is an error, like damage where the archive begins."""
    built = package(tmp_path, [file("noise", random.Random(1).randbytes(1 << 20))])
    content = bytearray(built.read_bytes())
    content[len(content) // 2] ^= 0xFF
    built.write_bytes(content)
    # Some versions of rattler ignore the checksums of zip and zstd. With them, our own check of the
    # files' sha256 finds the damage.
    with pytest.raises(ForgeError, match="cannot be read|has another sha256"):
        Package(built).require_safe()
