# SPDX-License-Identifier: BSD-3-Clause
"""The tests' own servers: rattler's cache of a home folder has nothing of an address before."""

import http.server
import os
import re
from pathlib import Path

import pytest
from support import servers, small_channel
from support.project import CHECKOUT
from support.servers import served

ALONE = "127.77.1.1"  # of this machine too; nobody takes a port there between two servers


def test_a_port_that_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is locked is what is served now, not what another test served there before."""
    ports: list[int] = []
    bind = http.server.HTTPServer.server_bind

    def again(server: http.server.HTTPServer) -> None:
        server.server_address = (ALONE, ports[0] if ports else 0)
        bind(server)
        ports.append(server.server_port)

    monkeypatch.setattr(servers.Server, "server_bind", again)
    for version in ("1.0", "2.0"):
        channel = small_channel.make(tmp_path / version / "c", "alpha", "beta", version=version)
        for file in channel.rglob("repodata*"):
            os.utime(file, (0, 0))  # by which rattler asks whether it is another one
        with served(channel) as url:
            url = url.replace("127.0.0.1", ALONE)
            app = small_channel.workspace(tmp_path / version / "app", url)
            app.lock()
        assert f"/noarch/alpha-{version}-" in app.lock_file.read_text()
    assert ports == ports[:1] * 2


def test_no_test_has_a_web_server_of_another_kind() -> None:
    makes = re.compile(r"HTTPServer\(\(")
    found = [f.name for f in CHECKOUT.glob("tests/**/*.py") if makes.search(f.read_text())]
    assert found == []
