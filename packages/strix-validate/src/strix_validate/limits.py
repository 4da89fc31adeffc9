# SPDX-License-Identifier: BSD-3-Clause
"""Limits on how much of each kind of foreign input is read, and readers that respect them."""

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
#: Characters of a line and of an event of a stream.
EVENT = 1 << 22
#: Characters of a whole stream.
STREAM = 1 << 28
#: Bytes of an answer that is an error, of which a part is shown.
ERROR = 1 << 16
#: Bytes at the beginning of a log that are searched.
LOG = 1 << 26
#: Bytes at the end of a log that are shown.
TAIL = 1 << 16


def read_answer(answer: BinaryIO, origin: str) -> bytes:
    """Read all of an answer.

    Raises:
        CheckFailed: It has more than ANSWER bytes.
    """
    data = answer.read(ANSWER + 1)
    if len(data) > ANSWER:
        raise CheckFailed(f"{origin} sent more than {ANSWER} bytes, as no answer has: is it vLLM?")
    return data


def read_lines(stream: TextIO, origin: str) -> Iterator[str]:
    """Yield the lines of a stream of events.

    Raises:
        CheckFailed: An event, up to its empty line, has more than EVENT characters, or all of them
            have more than STREAM.
    """
    stream_size = 0
    event_size = 0
    while line := stream.readline(EVENT + 1):
        stream_size += len(line)
        if line.strip():
            event_size += len(line)
        else:
            event_size = 0
        if event_size > EVENT:
            raise CheckFailed(f"{origin} sent an event of more than {EVENT} characters")
        if stream_size > STREAM:
            raise CheckFailed(f"{origin} sent a stream of more than {STREAM} characters")
        yield line


def read_log(file: Path) -> str:
    """Return the text of a log, up to its first LOG bytes."""
    with file.open("rb") as stream:
        return stream.read(LOG).decode(errors="replace")


def read_last_lines(file: Path, number: int) -> str:
    """Return the last lines of a log, joined by bars; they come from its last TAIL bytes."""
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - TAIL))
        text = stream.read(TAIL).decode(errors="replace")
    lines = text.strip().splitlines()
    return " | ".join(lines[-number:])
