# SPDX-License-Identifier: BSD-3-Clause
"""Fail a package check with a message.
Checks call `require` instead of `assert`, because Python ignores assert statements with -O or
PYTHONOPTIMIZE, and then every check would pass.
"""


class CheckFailed(SystemExit):
    """A failed check. Unless caught, it ends the program with the message and exit status 1."""


def require(condition: object, message: str) -> None:
    """Raise CheckFailed with `message` unless `condition` is true."""
    if not condition:
        raise CheckFailed(message)
