# SPDX-License-Identifier: BSD-3-Clause
"""Where `--to` leads, and that no credential is accepted or shown on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from forge.cli.main import app
from forge.conda.location import Location
from forge.errors import ForgeError

TOKEN = "pfx-s3cr3t-t0k3n-0123456789"


def publish(to: str) -> None:
    """Run the command as far as its destination."""
    if error := CliRunner().invoke(app, ["publish", "--to", to]).exception:
        raise error


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
    for reader in (publish, Location):
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
    for reader in (publish, Location):
        with pytest.raises(ForgeError, match="malformed channel URL") as error:
            reader(to)
        assert TOKEN not in str(error.value)


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("", "is empty"),
        ("https://prefix.dev/channel", "is not a directory: publish to one"),
        ("ftp://example.org/channel", "is neither a folder nor"),
        ("s3://bucket/channel", "is neither a folder nor"),
    ],
)
def test_other_destinations(to: str, message: str) -> None:
    with pytest.raises(ForgeError, match=message):
        publish(to)
