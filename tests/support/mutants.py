# SPDX-License-Identifier: BSD-3-Clause
"""Mutations of foreign data by a seed, and the tally of what a reader made of them.

A test takes valid data, mutates it, and gives each mutant to the reader. Two outcomes are allowed:
success with the right content, or one error of the kind that the reader raises (`Tally.refusal`)
whose message is short; both soon. The closing lines of a run add up what every such test recorded
(tests/conftest.py). The tests inside our packages use this file as well.

The seed is fixed, so that no run fails by chance. FORGE_SEED=N takes another: mutants of one seed
prove that seed alone, hence CONTRIBUTING.md has a command for many, and a workflow draws new ones.
"""

import copy
import os
import random
from collections.abc import Callable, Iterator
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

SEED = os.environ.get("FORGE_SEED") or "1"
# What stands in for a value: other types, other sizes, and texts that mean something to a path.
STRANGE: tuple[Any, ...] = (
    None, True, 0, -1, 2**63, 1e308, "", "\x00", "..", "../../x", "/etc/passwd", "a" * 70_000,
    "\ud800", "\u202e", [], {}, [[]], {"": None}, ["../x"], {"../x": {}},
)  # fmt: skip
# of nesting: as much as json.dumps and deepcopy take, and more than a parser of texts takes
TREE_DEPTH, TEXT_DEPTH = 60, 20_000
SLOWEST = 20  # CPU seconds for one mutant, whatever else runs: beyond it a reader hangs
LARGEST = 2 << 20  # KiB of memory that one mutant may add to the most that the process had
LONGEST = 2_000  # characters of a message; a reader must not repeat what it was given


def trees(valid: Any, stream: int, count: int) -> Iterator[Any]:
    """`count` copies of a JSON-like value, each with one to three places changed.

    `stream` is a number that tells the mutants of one test from those of another.
    """
    rng = random.Random(f"{SEED} {stream}")
    for _ in range(count):
        mutant = [copy.deepcopy(valid)]
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            _change(mutant, rng)
        yield mutant[0]


def texts(valid: bytes, stream: int, count: int) -> Iterator[bytes]:
    """`count` copies of a file, cut, flipped, repeated, with lines lost or with foreign bytes."""
    rng = random.Random(f"{SEED} {stream}")
    for _ in range(count):
        yield rng.choice((_cut, _flip, _repeat, _drop_line, _insert))(valid, rng)


def _change(root: list[Any], rng: random.Random) -> None:
    places = list(_places(root))
    container, key = rng.choice(places)
    kind = rng.randrange(6)
    if kind == 0 and len(places) > 1 and container is not root:
        del container[key]
    elif kind == 1:
        other, its_key = rng.choice(places)
        container[key] = copy.deepcopy(other[its_key])
    elif kind == 2 and isinstance(container, dict):
        container[rng.choice(("../../x", "", "\x00", "x" * 300))] = container.pop(key)
    elif kind == 3:
        deep: Any = []
        for _ in range(TREE_DEPTH):
            deep = [deep]
        container[key] = rng.choice((deep, [container[key]], {"x": container[key]}))
    else:
        container[key] = copy.deepcopy(rng.choice(STRANGE))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) below a value."""
    todo = [value]
    while todo:
        container = todo.pop()
        keys = container.keys() if isinstance(container, dict) else range(len(container))
        for key in keys:
            yield container, key
            if isinstance(container[key], dict | list):
                todo.append(container[key])


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _flip(data: bytes, rng: random.Random) -> bytes:
    result = bytearray(data)
    for _ in range(rng.choice((1, 4, 64))):
        result[rng.randrange(len(result))] = rng.randrange(256)
    return bytes(result)


def _repeat(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    part = data[start : start + rng.randrange(1, 4096)]
    return data[:start] + part * rng.choice((2, 3, 40)) + data[start:]


def _drop_line(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


def _insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    strange = (
        b"\x00",
        b"\xff\xfe",
        b"../../",
        b"\r\n",
        b"[" * TEXT_DEPTH,
        b"{" * TEXT_DEPTH,
        b"%n" * 99,
    )
    return data[:at] + rng.choice(strange) + data[at:]


def _used() -> tuple[float, int]:
    """CPU seconds and the most KiB so far, of this process and of the programs that it ran."""
    both = getrusage(RUSAGE_SELF), getrusage(RUSAGE_CHILDREN)
    return sum(use.ru_utime + use.ru_stime for use in both), sum(use.ru_maxrss for use in both)


class Tally:
    """Outcomes of one reader's mutants. `record` is pytest's record_property."""

    refusal: type[Exception]  # what readers raise for bad input, set in a conftest.py

    def __init__(self, reader: str, record: Callable[[str, object], None]) -> None:
        self.reader, self.outcomes = reader, {"accepted": 0, "refused": 0}
        record("mutants", (reader, self.outcomes))  # of plain types: it passes between workers

    def give(self, read: Callable[[], Any], right: Callable[[Any], bool], what: object) -> None:
        """Read one mutant. `right` says whether the result of a success has the right content.

        Raises AssertionError for any other outcome and notes the seed; `what` describes the mutant.
        """
        (start, before), result, message = _used(), None, ""
        try:
            result = read()
        except self.refusal as error:
            message = str(error) or "none"
        except BaseException as error:
            error.add_note(self._of(what))
            raise
        seconds, most = _used()
        if seconds - start > SLOWEST:
            raise AssertionError(f"more than {SLOWEST} s: {self._of(what)}")
        if most - before > LARGEST:
            raise AssertionError(f"more than {LARGEST} KiB: {self._of(what)}")
        if message == "none" or len(message) > LONGEST or "Traceback" in message:
            raise AssertionError(f"a bad message, {message!r:.500}: {self._of(what)}")
        if not (message or right(result)):
            raise AssertionError(f"wrong content accepted: {self._of(what)}")
        self.outcomes["refused" if message else "accepted"] += 1

    def _of(self, what: object) -> str:
        return f"{self.reader}, FORGE_SEED={SEED}: {what!r:.500}"
