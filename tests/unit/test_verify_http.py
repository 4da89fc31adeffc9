# SPDX-License-Identifier: BSD-3-Clause
"""`forge channel verify` over HTTP."""

import json
from pathlib import Path

import pytest
from support.servers import QuietHandler, served
from support.static_channel import Source, flip

from forge.channel import verify
from forge.channel.publish import StaticChannel
from forge.conda.location import Location
from forge.errors import NotAttempted

ALPHA = "noarch/alpha-1.0-h1234567_0.conda"


@pytest.fixture
def published(tmp_path: Path) -> Path:
    source = Source(tmp_path / "channel")
    source.make("alpha", depends=["beta"])
    source.make("beta", subdir="linux-64")
    StaticChannel(tmp_path / "out").publish(source)
    return tmp_path / "out"


def test_verify_over_http(published: Path) -> None:
    """As in a folder; a file that no index lists is not seen."""
    with served(published) as url:
        assert verify.channel(Location(url))[1] == []
        (published / "noarch" / "x-1-0.conda").write_bytes(b"x")
        assert verify.channel(Location(url))[1] == []
        flip(published / ALPHA, 100)
        (published / "linux-64" / verify.SHARDS).unlink()
        index, shards = sorted(verify.channel(Location(url, retries=0))[1])
    assert "missing" in index and f"{ALPHA}: has sha256" in shards


def test_verify_of_what_fails_midway(published: Path) -> None:
    """A server that breaks off or refuses a file is a finding; one that is not there is exit 3."""

    class Refusing(QuietHandler):
        def do_GET(self) -> None:
            if self.path.endswith("beta-1.0-h1234567_0.conda"):
                self.send_error(503)
            elif self.path.endswith(".conda"):
                self.send_response(200)
                self.send_header("Content-Length", "5000")
                self.end_headers()
                self.wfile.write(b"PK")
            else:
                super().do_GET()

    with served(published, Refusing) as url:
        found = verify.channel(Location(url, retries=0))[1]
        assert len(found) == 2 and "503" in str(found) and ALPHA in str(found)
        with pytest.raises(NotAttempted, match="nothing was checked"):
            verify.channel(Location(f"{url}/elsewhere", retries=0))
    with pytest.raises(NotAttempted, match="cannot be read") as error:
        verify.channel(Location(url, retries=0))
    assert error.value.exit_code == 3


def test_token_of_the_store_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rattler's client sends a conda token in the URL, and names that URL in its errors."""

    class Refusing(QuietHandler):
        def do_GET(self) -> None:
            assert "/t/s3cr3t/" in self.path
            self.send_error(403)

    (tmp_path / "auth.json").write_text(json.dumps({"127.0.0.1": {"CondaToken": "s3cr3t"}}))
    monkeypatch.setenv("RATTLER_AUTH_FILE", str(tmp_path / "auth.json"))
    with served(tmp_path, Refusing) as url, pytest.raises(NotAttempted, match="403") as error:
        Location(url, retries=0).read("noarch/repodata.json")
    assert "s3cr3t" not in str(error.value)
