# SPDX-License-Identifier: BSD-3-Clause
"""The local channel: what is damaged is named."""

from __future__ import annotations

from pathlib import Path

import pytest

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
