# SPDX-License-Identifier: BSD-3-Clause
"""The mutation harness itself: it repeats, it changes things, and it fails on a bad reader."""

from __future__ import annotations

import json
import runpy
from types import SimpleNamespace

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


def test_a_reader_that_hangs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0, mutants.SLOWEST + 1))
    monkeypatch.setattr(mutants.time, "process_time", lambda: next(clock))
    with pytest.raises(AssertionError, match="more than 20 s"):
        Tally("any", lambda *_: None).give(lambda: 1, bool, "1")


def test_a_reader_that_takes_all_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    most = iter((0, mutants.LARGEST + 1))
    monkeypatch.setattr(mutants, "getrusage", lambda _: SimpleNamespace(ru_maxrss=next(most)))
    with pytest.raises(AssertionError, match="more than 2097152 KiB"):
        Tally("any", lambda *_: None).give(lambda: 1, bool, "1")
