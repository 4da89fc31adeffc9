# SPDX-License-Identifier: BSD-3-Clause
"""The publishing commands."""

from pathlib import Path

import pytest
from support.project import MiniProject
from support.servers import served
from support.static_channel import Source, flip
from typer.testing import CliRunner

from forge.cli.main import app
from forge.errors import ForgeError


def test_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """publish, and channel yank and verify: what they print and how they exit."""
    project, target = MiniProject(tmp_path / "project"), tmp_path / "out"
    monkeypatch.setenv("FORGE_ROOT", str(project.root))
    dist = Source(project.channel).make("alpha")

    def said(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, words)
        if isinstance(done.exception, ForgeError):
            assert done.exception.exit_code == code
            return str(done.exception)
        assert done.exit_code == code, done.output
        return done.output

    def publish(to: str = str(target), code: int = 0) -> str:
        return said("publish", "--to", to, code=code)

    assert "revision 1: 1 added" in publish()
    assert "nothing new" in publish(target.as_uri())
    page = project.root / "docs/channel_page.py"  # publish and yank run it
    page.parent.mkdir()
    page.write_text('import sys\nopen(sys.argv[1] + "/index.html", "a").write("line\\n")\n')
    publish()
    assert len((target / "index.html").read_text().splitlines()) == 1
    page.write_text('raise SystemExit("no page, because")\n')
    assert f"{target} is published, but its page is not" in publish(code=1)
    assert "no page, because" in capfd.readouterr().err
    page.unlink()

    def channel(*words: str, code: int = 0) -> str:
        return said("channel", *words, code=code)

    assert "is not a published channel" in channel("yank", str(target.parent), dist, code=2)
    assert "revision 2: 1 yanked" in channel("yank", str(target), dist)
    assert "nothing new" in channel("yank", str(target), dist)
    assert "revision 3: 1 restored" in channel("yank", str(target), dist, "--restore")
    assert "1 packages, 0 findings" in channel("verify", str(target))
    with served(target) as url:
        assert "does not list files" in channel("verify", url)
    flip(target / f"noarch/{dist}.conda")
    assert f"noarch/{dist}.conda: has sha256" in channel("verify", str(target), code=1)
    assert "nothing was checked" in channel("verify", str(target.parent), code=3)
