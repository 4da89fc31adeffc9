# SPDX-License-Identifier: BSD-3-Clause
"""A publisher that is killed: no client sees a half index, and the next publish completes it."""

import contextlib
import urllib.error
from collections.abc import Iterator
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


@contextlib.contextmanager
def killed_before(rename: int) -> Iterator[None]:
    """A publish is killed before one of its renames, if it has so many."""
    real, left = static._move, rename
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):

        def move(origin: Path, destination: Path) -> None:
            nonlocal left
            if left == 0:
                patch.setattr(TemporaryDirectory, "_rmtree", lambda *_, **__: None)
                raise Killed
            left -= 1
            real(origin, destination)

        patch.setattr(static, "_move", move)
        yield


def test_killed_at_every_step(source: Source, target: Path, tmp_path: Path) -> None:
    """Stopped before each of its renames in turn: views stay whole, the next runs complete it."""
    first, seen, finished = source.make("alpha"), set(), None
    StaticChannel(target).publish(source)
    for at in range(100):
        source.make("beta", f"{at}.0")
        yank = ((), [first]) if at % 2 else ([first], ())
        with killed_before(at):
            finished = StaticChannel(target).publish(source, *yank)
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
def test_first_publish_killed(at: int, source: Source, target: Path) -> None:
    """A folder that has no index yet is known again."""
    source.make("alpha")
    with killed_before(at):
        StaticChannel(target).publish(source)
        pytest.fail("it was not killed")
    assert StaticChannel(target).publish(source) and findings(target) == []
