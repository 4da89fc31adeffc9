# SPDX-License-Identifier: BSD-3-Clause
"""What goes wrong, and the exit code of each."""


class ForgeError(Exception):
    """A usage or configuration error. The message says what, where and what to do."""

    exit_code = 2


class BuildFailed(ForgeError):
    """A build, a package test or an installation failed."""

    exit_code = 1


class Refused(ForgeError):
    """A request contradicts the facts, for example a download with another hash."""

    exit_code = 1


class NotAttempted(ForgeError):
    """Something could not be tried at all, for example because a source is unreachable."""

    exit_code = 3


def one_line(text: str) -> str:
    """Foreign text as one short line that every terminal and log takes."""
    return " ".join(ascii(text)[1:-1].split())[:600]
