# SPDX-License-Identifier: BSD-3-Clause
"""Mutate data that strangers may have written, and count the outcomes of reading the mutants.

Such data are, for example, locks, indexes and archives. A test mutates valid data and passes each
mutant to a reader. Two outcomes are allowed: correct content, or an exception of the type
`Tally.refusal` with a short message. The reader must not take longer than SLOWEST. pytest prints
the sum of all outcomes at the end of a run (tests/conftest.py). The tests inside our packages use
this file too.

The seed is fixed, so that no run fails by chance. FORGE_SEED=N sets another seed. Mutants of one
seed prove nothing about the mutants of another. Therefore CONTRIBUTING.md has a command that tries
many seeds, and a workflow draws new ones.
"""

import copy
import os
import random
from collections.abc import Callable, Iterator
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

SEED = os.environ.get("FORGE_SEED") or "1"
# Values that replace a valid one: other types, other sizes, and strings with a meaning in paths.
STRANGE: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**63,
    1e308,
    "",
    "\x00",
    "..",
    "../../x",
    "/etc/passwd",
    "a" * 70_000,
    "\ud800",
    "\u202e",
    [],
    {},
    [[]],
    {"": None},
    ["../x"],
    {"../x": {}},
)
# Levels of nesting that json.dumps and deepcopy still accept.
TREE_DEPTH = 60
# More levels of nesting than parsers accept.
TEXT_DEPTH = 20_000
# CPU seconds that a reader may take for one mutant. CPU time does not depend on other processes.
SLOWEST = 20
# KiB that one mutant may add to the peak memory of the process.
LARGEST = 2 << 20
# Characters that a message may have. The limit shows that a message does not repeat the input.
LONGEST = 2_000


def trees(valid: Any, stream: int, count: int) -> Iterator[Any]:
    """Yield `count` copies of a JSON-like value, each with one to three places changed.

    Tests pass different numbers as `stream`, so that their mutants differ.
    """
    rng = random.Random(f"{SEED} {stream}")
    for _ in range(count):
        mutant = [copy.deepcopy(valid)]
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            _change(mutant, rng)
        yield mutant[0]


def texts(valid: bytes, stream: int, count: int) -> Iterator[bytes]:
    """Yield `count` copies of a file, each cut, flipped, repeated, or otherwise damaged."""
    rng = random.Random(f"{SEED} {stream}")
    for _ in range(count):
        mutate = rng.choice((_cut, _flip, _repeat, _drop_line, _insert))
        yield mutate(valid, rng)


def _change(root: list[Any], rng: random.Random) -> None:
    """Change one place inside a value: delete, replace, rename or nest it."""
    places = list(_places(root))
    container, key = rng.choice(places)
    kind = rng.randrange(6)
    if kind == 0 and len(places) > 1 and container is not root:
        del container[key]
    elif kind == 1:
        source_container, its_key = rng.choice(places)
        container[key] = copy.deepcopy(source_container[its_key])
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
    """Yield each (container, key) inside a value."""
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


def _measure_usage() -> tuple[float, int]:
    """Return CPU seconds and peak memory in KiB of this process and of its child processes."""
    usages = [getrusage(RUSAGE_SELF), getrusage(RUSAGE_CHILDREN)]
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    peak = sum(usage.ru_maxrss for usage in usages)
    return seconds, peak


class Tally:
    """Counts the outcomes of one reader's mutants.

    Attributes:
        refusal: The exception that readers raise for bad input. A conftest.py sets it.
        reader: The name of the reader.
        outcomes: Number of mutants by outcome.
    """

    refusal: type[Exception]

    def __init__(self, reader: str, record: Callable[[str, object], None]) -> None:
        """Start at zero. `record` is pytest's record_property."""
        self.reader = reader
        self.outcomes = {"accepted": 0, "refused": 0}
        # The values have plain types, because xdist sends them from a worker to the main process.
        record("mutants", (reader, self.outcomes))

    def give(
        self, read: Callable[[], Any], is_correct: Callable[[Any], bool], mutant: object
    ) -> None:
        """Read one mutant and count its outcome.

        Args:
            read: Reads the mutant.
            is_correct: Returns whether the content that was read is correct.
            mutant: The mutant, for messages.

        Raises:
            AssertionError: The outcome is not allowed. The message has the seed.
        """
        start, peak_before = _measure_usage()
        result = None
        message = ""
        try:
            result = read()
        except self.refusal as error:
            message = str(error) or "none"
        except BaseException as error:
            error.add_note(self._describe(mutant))
            raise
        end, peak = _measure_usage()
        if end - start > SLOWEST:
            raise AssertionError(f"more than {SLOWEST} s: {self._describe(mutant)}")
        if peak - peak_before > LARGEST:
            raise AssertionError(f"more than {LARGEST} KiB: {self._describe(mutant)}")
        if message == "none" or len(message) > LONGEST or "Traceback" in message:
            raise AssertionError(f"bad message {message!r:.500}: {self._describe(mutant)}")
        if not (message or is_correct(result)):
            raise AssertionError(f"wrong content accepted: {self._describe(mutant)}")
        self.outcomes["refused" if message else "accepted"] += 1

    def _describe(self, mutant: object) -> str:
        return f"{self.reader}, FORGE_SEED={SEED}: {mutant!r:.500}"
