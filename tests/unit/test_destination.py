# SPDX-License-Identifier: BSD-3-Clause
"""Where `--to` leads, and that no credential is accepted or shown on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge.channel import uploads
from forge.channel.uploads import ServerChannel, destination
from forge.conda.location import Location
from forge.errors import ForgeError

TOKEN = "pfx-s3cr3t-t0k3n-0123456789"


@pytest.mark.parametrize(
    "to",
    [
        f"https://user:{TOKEN}@prefix.dev/demo",
        f"https://{TOKEN}@anaconda.org/demo",
        f"https://anaconda.org/t/{TOKEN}/demo",
        f"https://prefix.dev/demo?token={TOKEN}",
        f"s3://key:{TOKEN}@bucket/prefix",
    ],
    ids=["password", "user", "conda token", "query", "s3"],  # pytest would show the token
)
def test_credentials_in_urls(to: str) -> None:
    """Refused wherever a channel is named, in words that do not repeat them."""
    for reader in (destination, Location):
        with pytest.raises(ForgeError, match="carries a credential") as error:
            reader(to)
        assert TOKEN not in str(error.value)


def test_a_folder_named_as_a_token_would_be_is_none() -> None:
    assert Location("file:///srv/t/channel").folder == Path("/srv/t/channel")


@pytest.mark.parametrize(
    "to",
    ["http://[::1/x", "https://h:99999/x", f"https://me:{TOKEN}/x"],
    ids=["bracket", "port", "password"],
)
def test_damaged_urls(to: str) -> None:
    """The last one has lost its host, so that the password stands where a port would."""
    for reader in (destination, Location):
        with pytest.raises(ForgeError, match="malformed channel URL") as error:
            reader(to)
        assert TOKEN not in str(error.value)


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("", "is empty"),
        ("https://prefix.dev", "is not a folder, https"),
        ("https://prefix.dev/a/b", "is not a folder, https"),
        ("https://example.org/channel", "is not a folder, https"),
        ("http://prefix.dev/channel", "is not a folder, https"),
        ("ftp://example.org/channel", "is not a folder, https"),
        ("s3://bucket/channel", "aws s3 sync"),
    ],
)
def test_other_destinations(to: str, message: str) -> None:
    with pytest.raises(ForgeError, match=message):
        destination(to)


def test_destinations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert destination("https://prefix.dev/a") == ServerChannel("prefix.dev", "a")
    assert destination("https://anaconda.org/b/") == ServerChannel("anaconda.org", "b")
    assert destination("out") == tmp_path / "out"
    assert destination((tmp_path / "my out").as_uri()) == tmp_path / "my out"


@pytest.mark.parametrize(
    ("key", "identity", "attested"),
    [("", "token", True), ("key", "token", False), ("", "", False)],
)
def test_attestation_where_there_is_an_identity(
    monkeypatch: pytest.MonkeyPatch, key: str, identity: str, attested: bool
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        uploads, "upload_package_to_prefix", lambda *_, **options: asked.update(options)
    )
    monkeypatch.delenv(uploads.IDENTITY, raising=False)
    if identity:
        monkeypatch.setenv(uploads.IDENTITY, identity)
    ServerChannel("prefix.dev", "mine")._upload(Path("a.conda"), key or None)
    assert asked == {"api_key": key or None, "generate_attestation": attested}
