# SPDX-License-Identifier: BSD-3-Clause
"""The mutation harness itself: it repeats, it changes things, and it fails on a bad reader."""

import json
import runpy
import subprocess
import sys
import time

import pytest
from support import mutants
from support.mutants import SEED, Tally, texts, trees

from forge.errors import ForgeError

VALID = {"name": "x", "list": [1, 2, {"deep": "y"}]}


def test_the_seed_is_drawn_only_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORGE_SEED", raising=False)
    assert runpy.run_path(mutants.__file__)["SEED"] == "1"
    monkeypatch.setenv("FORGE_SEED", "7")
    assert runpy.run_path(mutants.__file__)["SEED"] == "7"


def test_another_seed_gives_others(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(texts(b"a\nb\n", 1, 50))
    monkeypatch.setattr(mutants, "SEED", f"{SEED}1")
    assert list(texts(b"a\nb\n", 1, 50)) != before


def test_the_same_seed_gives_the_same_mutants() -> None:
    assert list(map(repr, trees(VALID, 1, 50))) == list(map(repr, trees(VALID, 1, 50)))
    assert list(texts(b"a\nb\n", 1, 50)) == list(texts(b"a\nb\n", 1, 50))


def test_mutants_differ_from_what_is_valid() -> None:
    changed = sum(mutant != VALID for mutant in trees(VALID, 1, 200))
    assert changed > 180
    assert VALID == {"name": "x", "list": [1, 2, {"deep": "y"}]}


def test_a_traceback_is_no_outcome() -> None:
    tally = Tally("json", lambda *_: None)
    with pytest.raises(ValueError) as raised:
        tally.give(lambda: json.loads("{"), bool, "{")
    assert f"FORGE_SEED={SEED}" in raised.value.__notes__[0], "nobody could repeat it"


def test_wrong_content_and_endless_messages_are_found() -> None:
    def endless() -> None:
        raise ForgeError("x " * 5_000)

    tally = Tally("any", lambda *_: None)
    with pytest.raises(AssertionError, match="wrong content"):
        tally.give(lambda: 1, lambda result: result == 2, "1")
    with pytest.raises(AssertionError, match="bad message"):
        tally.give(endless, bool, "x")


@pytest.mark.parametrize(
    ("used", "says"),
    [((mutants.SLOWEST + 1, 0), "more than 20 s"), ((0, mutants.LARGEST + 1), "more than 2097152")],
)
def test_a_reader_that_hangs_or_takes_all_memory_is_found(
    used: tuple[float, int], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(((0, 0), used))
    monkeypatch.setattr(mutants, "_used", lambda: next(now))
    with pytest.raises(AssertionError, match=says):
        Tally("any", lambda *_: None).give(lambda: 1, bool, "1")


def test_programs_that_a_reader_runs_count() -> None:
    start, own = mutants._used()[0], time.process_time()
    subprocess.run([sys.executable, "-c", "b'x' * (256 << 20)"], check=True)
    seconds, most = mutants._used()
    assert seconds - start > time.process_time() - own and most > 256 << 10
