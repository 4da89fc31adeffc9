# SPDX-License-Identifier: BSD-3-Clause
"""A publisher that is killed: no client sees a half index, and the next publish completes it."""

import contextlib
import urllib.error
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.static_channel import Source, findings, view

from forge.channel import publish as static
from forge.channel import revisions, verify
from forge.channel.publish import StaticChannel
from forge.conda.location import Location


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the publisher runs after it."""


def test_killed_at_every_step(
    source: Source, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before each of its renames in turn: views stay whole, the next runs complete it."""
    first = source.make("alpha")
    StaticChannel(target).publish(source)
    real, steps = static._move, 0

    def move(origin: str | Path, destination: Path) -> None:
        nonlocal steps
        if steps == 0:
            monkeypatch.setattr(TemporaryDirectory, "_rmtree", lambda *_, **__: None)
            raise Killed
        steps -= 1
        real(origin, destination)

    remove, seen = TemporaryDirectory._rmtree, set()
    for at in range(100):
        source.make("beta", f"{at}.0")
        yank = ((), [first]) if at % 2 else ([first], ())
        steps = at
        monkeypatch.setattr(static, "_move", move)
        with contextlib.suppress(Killed):
            StaticChannel(target).publish(source, *yank)
        finished, steps = steps > 0, 0
        monkeypatch.setattr(static, "_move", real)
        monkeypatch.setattr(TemporaryDirectory, "_rmtree", remove)
        view(target.as_uri())
        for memory in (tmp_path / "kept.json", tmp_path / f"{at}.json"):
            revisions.require_current(Location(target), memory)  # its log and index are a pair
        seen |= set(verify.read_index(Location(target)).records)
        if finished:
            break
        if at % 4 == 3:  # otherwise the next one has more than one killed publish to complete
            StaticChannel(target).publish(None)  # takes nothing in, so what was copied is orphan
            assert all("not in the index" in finding for finding in findings(target))
        assert seen <= set(verify.read_index(Location(target)).records), "never taken back"
    assert findings(target) == [] and not [*target.glob(".forge-*")]
    assert 15 < at < 40, "a publish of one package has some twenty renames"

    # the client does notice what it is there to notice
    (target / "noarch" / f"{first}.conda").unlink()
    with pytest.raises(urllib.error.URLError):
        view(target.as_uri())


@pytest.mark.parametrize("at", range(4))
def test_first_publish_killed(
    at: int, source: Source, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that has no index yet is known again."""
    source.make("alpha")
    real, left = static._move, at

    def move(origin: Path, destination: Path) -> None:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        real(origin, destination)

    monkeypatch.setattr(static, "_move", move)
    with pytest.raises(Killed):
        StaticChannel(target).publish(source)
    monkeypatch.setattr(static, "_move", real)
    assert StaticChannel(target).publish(source) and findings(target) == []
