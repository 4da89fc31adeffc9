# SPDX-License-Identifier: BSD-3-Clause
"""Reading packages and records, with packages that are made by hand."""

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.conda_packages import file, package, statement

from forge.conda import provenance
from forge.conda.package import Package
from forge.conda.provenance import STATEMENT, dir_hash
from forge.errors import ForgeError, Refused


def test_dir_hash_is_that_of_in_toto(tmp_path: Path) -> None:
    """By the shell command that in-toto's specification of dirHash gives."""
    for name in ("b/z", "a", "b/c/d", "ab"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    shell = "find . -type f | cut -c3- | LC_ALL=C sort | xargs -r sha256sum | sha256sum"
    done = subprocess.run(shell, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert dir_hash(tmp_path) == done.stdout.split()[0]
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.pyc").touch()
    (tmp_path / "x.egg-info").mkdir()
    (tmp_path / "x.egg-info" / "PKG-INFO").touch()
    assert dir_hash(tmp_path) == done.stdout.split()[0]


def test_what_info_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = package(tmp_path, [file("a")])
    info = Package(built).info
    assert {"index.json", "paths.json"} <= info.keys() and json.loads(info["index.json"])
    monkeypatch.setattr("forge.conda.package.INFO_LIMIT", sum(map(len, info.values())))
    assert Package(built).info == info
    monkeypatch.setattr("forge.conda.package.INFO_LIMIT", sum(map(len, info.values())) - 1)
    with pytest.raises(Refused, match="has more than"):
        _ = Package(built).info


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "is not the provenance of a package"),
        ([], "is not the provenance of a package"),
        ({"_type": 1}, "is not the provenance of a package"),
        ({"_type": STATEMENT}, "is not the provenance of a package"),
        (statement(variant=[]), "is not the provenance of a package"),
        (statement(recipe={}), "is not the provenance of a package"),
        (statement() | {"subject": []}, "is not the provenance of a package"),
        (statement() | {"predicateType": "https://slsa.dev/provenance/v0.2"}, "v0.2, not https"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, data: Any, message: str) -> None:
    path = tmp_path / "x.provenance.json"
    path.write_text(json.dumps(statement()))
    assert provenance.read(path) == statement()
    path.write_text(json.dumps(data) if data is not None else "")
    with pytest.raises(ForgeError, match=message):
        provenance.read(path)
    with pytest.raises(ForgeError, match="No such file"):
        provenance.read(tmp_path / "absent")


def test_damage_far_into_a_file_is_one_message(tmp_path: Path) -> None:
    """Not only where the archive is opened, but also while a large file is read."""
    built = package(tmp_path, [file("noise", random.Random(1).randbytes(1 << 20))])
    whole = bytearray(built.read_bytes())
    whole[len(whole) // 2] ^= 0xFF
    built.write_bytes(whole)
    # zip's and zstd's checksums are not looked at by every rattler; those of the files are by us
    with pytest.raises(ForgeError, match="cannot be read|has another sha256"):
        Package(built).require_safe()
