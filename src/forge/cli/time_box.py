# SPDX-License-Identifier: BSD-3-Clause
"""The option --stop-after, which ends a command cleanly after a given time."""

import contextlib
import re
import signal
from collections.abc import Iterator
from typing import Annotated

from typer import Option

from forge.errors import ForgeError

# This is EX_TEMPFAIL of sysexits.h, because the command can be run again.
NOT_FINISHED = 75
SECONDS = {"s": 1, "m": 60, "h": 3600}

StopAfter = Annotated[
    str | None,
    Option("--stop-after", metavar="TIME", help="End after 5h, 90m or 45s with exit code 75."),
]


class TimeUp(BaseException):
    """The time of --stop-after is up.

    It is not a subclass of Exception, so that only the command line catches it.
    """


def parse_duration(text: str) -> int:
    """Return the seconds of a duration such as 5h, 90m or 45s. Raise ForgeError for other text."""
    match = re.fullmatch(r"([1-9][0-9]{,5})([smh])", text)
    if not match:
        reason = f"--stop-after {text!r:.40} is not a duration"
        raise ForgeError(f"{reason}: write hours, minutes or seconds as 5h, 90m or 45s")
    number, unit = match.groups()
    return int(number) * SECONDS[unit]


@contextlib.contextmanager
def time_box(duration: str | None) -> Iterator[None]:
    """Raise TimeUp in the block once a duration has passed.

    Args:
        duration: A text such as 5h, 90m or 45s; None for no limit.

    Raises:
        ForgeError: The text is not a duration.
    """
    if duration is None:
        yield
        return

    def end(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise TimeUp(f"the time of --stop-after {duration} is up")

    seconds = parse_duration(duration)
    earlier_handler = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier_handler)
