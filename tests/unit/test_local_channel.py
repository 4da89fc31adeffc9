# SPDX-License-Identifier: BSD-3-Clause
"""The local channel: what is damaged is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.conda_packages import file, package

from forge.channel.local import Channel, Record
from forge.errors import ForgeError


@pytest.mark.parametrize("text", ["{", "[]", '{"packages.conda": {"x.conda": {}}}', "{}"])
def test_index_of_another_shape(tmp_path: Path, text: str) -> None:
    channel = Channel(tmp_path)
    (tmp_path / "noarch").mkdir()
    (tmp_path / "noarch" / "repodata.json").write_text(text)
    with pytest.raises(ForgeError, match=r"repodata.json is damaged"):
        channel.records()


def test_damaged_note_of_a_digest_is_no_note(tmp_path: Path) -> None:
    record = Record("a", "1", "h0123456_0", "noarch", "0" * 64, 1)
    (tmp_path / "forge").mkdir()
    (tmp_path / "forge" / f"{record.dist}.json").write_text("{")
    assert Channel(tmp_path).digest_of(record) is None


def test_what_is_added_can_be_served(tmp_path: Path) -> None:
    """Made by rattler-build with mode 0600; a web server runs as another user."""
    made = package(tmp_path / "noarch", [file("share/a")])
    made.chmod(0o600)
    Channel(tmp_path / "channel").add({made: 1}, {})
    assert (tmp_path / "channel/noarch" / made.name).stat().st_mode & 0o777 == 0o644
