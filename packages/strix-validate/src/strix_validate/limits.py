# SPDX-License-Identifier: BSD-3-Clause
"""How much of each kind of foreign input is read, and the readers that keep to it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from strix_validate.checks import CheckFailed

#: Bytes of a small file: the largest known config.json has some hundred thousand, an index of
#: weights millions.
FILE = 1 << 24
#: Bytes of a whole answer of a server: log probabilities of a prompt are the longest.
ANSWER = 1 << 26
#: Characters of a line and of an event of a stream, and of all of a stream.
EVENT, STREAM = 1 << 22, 1 << 28
#: Bytes of an answer that is an error, of which a part is shown.
ERROR = 1 << 16
#: Bytes at the begin of a log that are searched, and at its end that are shown.
LOG, TAIL = 1 << 26, 1 << 16


def read_answer(answer: BinaryIO, origin: str) -> bytes:
    """Read all of an answer.

    Raises:
        CheckFailed: it has more than ANSWER bytes.
    """
    data = answer.read(ANSWER + 1)
    if len(data) > ANSWER:
        raise CheckFailed(f"{origin} sent more than {ANSWER} bytes, as no answer has: is it vLLM?")
    return data


def read_lines(stream: TextIO, origin: str) -> Iterator[str]:
    """Yield the lines of a stream of events.

    Raises:
        CheckFailed: an event, up to its empty line, has more than EVENT characters, or all of them
            more than STREAM.
    """
    read = pending = 0
    while line := stream.readline(EVENT + 1):
        read += len(line)
        pending = pending + len(line) if line.strip() else 0
        for what, size, limit in (("an event", pending, EVENT), ("a stream", read, STREAM)):
            if size > limit:
                raise CheckFailed(f"{origin} sent {what} of more than {limit} characters")
        yield line


def read_log(file: Path) -> str:
    """Return the text of a log, up to LOG bytes of its begin."""
    with file.open("rb") as stream:
        return stream.read(LOG).decode(errors="replace")


def last_lines(file: Path, number: int) -> str:
    """Return the last lines of a log as one, of its last TAIL bytes."""
    with file.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL))
        text = stream.read(TAIL).decode(errors="replace")
    return " | ".join(text.strip().splitlines()[-number:])
