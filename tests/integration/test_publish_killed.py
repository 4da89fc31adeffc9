# SPDX-License-Identifier: BSD-3-Clause
"""A publisher that is killed: no client sees a half index, and the next publish completes it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
import urllib.error
from pathlib import Path

import pytest
from support.servers import served
from support.static_channel import BUILD, Source, findings, solve, view

from forge.channel import places, verify
from forge.channel import publish as static
from forge.channel.local import Channel
from forge.channel.publish import StaticChannel
from forge.project import SUBDIRS


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path / "channel")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out"


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the publisher runs after it."""


def test_killed_at_every_step(
    source: Source, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before each of its renames in turn: views stay whole, the next runs complete it."""
    first = source.make("alpha")
    StaticChannel(target).publish(source)
    real, steps = static._move, 0

    def move(origin: str | Path, destination: Path) -> None:
        nonlocal steps
        if steps == 0:
            monkeypatch.setattr(StaticChannel, "_clean", lambda _: None)
            raise Killed
        steps -= 1
        real(origin, destination)

    clean, seen = StaticChannel._clean, set()
    for at in range(100):
        source.make("beta", f"{at}.0")
        yank = ((), [first]) if at % 2 else ([first], ())
        steps = at
        monkeypatch.setattr(static, "_move", move)
        with contextlib.suppress(Killed):
            StaticChannel(target).publish(source, *yank)
        finished, steps = steps > 0, 0
        monkeypatch.setattr(static, "_move", real)
        monkeypatch.setattr(StaticChannel, "_clean", clean)
        view(target.as_uri())
        seen |= set(verify.read_index(places.Folder(target)).records)
        if finished:
            break
        if at % 4 == 3:  # otherwise the next one has more than one killed publish to complete
            StaticChannel(target).publish(None)  # takes nothing in, so what was copied is orphan
            assert all("orphan" in finding for finding in findings(target))
        assert seen <= set(verify.read_index(places.Folder(target)).records), "never taken back"
    assert findings(target) == [] and not (target / ".staging").exists()
    assert 15 < at < 40, "a publish of one package has some twenty renames"


def publish_elsewhere(source: str, target: str) -> None:
    """What the killed child runs."""
    StaticChannel(Path(target)).publish(Channel(Path(source)))
    os._exit(0)  # py-rattler sometimes aborts while Python shuts down


def test_killed_at_random_moments(source: Source, target: Path, tmp_path: Path) -> None:
    """SIGKILL at 20 moments while a client looks all the time and never sees anything but whole."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["forge.channel.publish"])
    arguments = (str(source.folder), str(target))
    dice, killed, views, broken = random.Random(5), 0, 0, []
    source.make("alpha")
    for _ in range(2):  # the second time measures, without the fork server's start
        source.make("alpha", f"{_}.5")
        start = time.monotonic()
        child = context.Process(target=publish_elsewhere, args=arguments)
        child.start()
        child.join()
        seconds = time.monotonic() - start
    stop = threading.Event()

    def look(url: str) -> None:
        nonlocal views
        forms = [{}, {"sharded": False}, {"sharded": False, "zst": False}]
        while not stop.is_set():
            try:
                view(url)
                solve(url, tmp_path / "cache", "alpha", **forms[views % 3])
                views += 1
            except Exception as error:
                broken.append(error)

    with served(target) as url:
        client = threading.Thread(target=look, args=(url,))
        client.start()
        for round_ in range(20):
            source.make("beta", f"{round_}.0", subdir=SUBDIRS[round_ % 2])
            child = context.Process(target=publish_elsewhere, args=arguments)
            child.start()
            time.sleep(dice.uniform(0, seconds))
            child.kill()
            child.join()
            killed += child.exitcode == -signal.SIGKILL
        stop.set()
        client.join()
        assert broken == [] and views >= 10
        assert killed >= 10
        StaticChannel(target).publish(source)
        assert findings(target) == [] and view(url) >= 22
        assert not (target / ".staging").exists() and not list(target.rglob(".partial*"))

        # the client does notice what it is there to notice
        (target / "noarch" / f"alpha-1.0-{BUILD}.conda").unlink()
        with pytest.raises(urllib.error.HTTPError):
            view(url)
