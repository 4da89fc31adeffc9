# SPDX-License-Identifier: BSD-3-Clause
"""Limits on how much of each kind of untrusted input is read, and functions that enforce them."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from strix_validate.checks import CheckFailed

#: Maximum bytes of a small file. The largest known config.json has a few hundred thousand bytes; an
#: index of weights can have millions.
FILE = 1 << 24
#: Maximum bytes of a server's response; the longest responses list log probabilities of a prompt.
RESPONSE = 1 << 26
#: Maximum characters of a line, and of an event, in a stream of events.
EVENT = 1 << 22
#: Maximum characters of a stream of events.
STREAM = 1 << 28
#: Maximum bytes of an error response that are read. Only its beginning is shown.
ERROR = 1 << 16
#: Number of bytes at the beginning of a log that are searched.
LOG = 1 << 26
#: Number of bytes at the end of a log from which its last lines are shown.
TAIL = 1 << 16


def read_response(response: BinaryIO, origin: str) -> bytes:
    """Read a server's response.

    Raises:
        CheckFailed: The response has more than RESPONSE bytes.
    """
    data = response.read(RESPONSE + 1)
    if len(data) > RESPONSE:
        raise CheckFailed(
            f"{origin} sent more than {RESPONSE} bytes, more than vLLM sends: is this server vLLM?"
        )
    return data


def read_lines(stream: TextIO, origin: str) -> Iterator[str]:
    """Yield the lines of a stream of events.

    Raises:
        CheckFailed: An event, which ends at an empty line, has more than EVENT characters; or the
            stream has more than STREAM characters.
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
    """Return the last lines of a log, from its last TAIL bytes, joined by " | "."""
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - TAIL))
        text = stream.read(TAIL).decode(errors="replace")
    lines = text.strip().splitlines()
    return " | ".join(lines[-number:])
