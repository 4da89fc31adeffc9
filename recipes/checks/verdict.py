# SPDX-License-Identifier: BSD-3-Clause
"""How a package check fails.

Checks call `require` in place of `assert`: Python drops assert statements under -O and
PYTHONOPTIMIZE, and every check would pass.
"""


class CheckFailed(SystemExit):
    """Ends a program with its message on stderr and exit status 1, unless it is caught."""


def require(condition: object, message: str) -> None:
    """Raise CheckFailed with `message` unless `condition` is true."""
    if not condition:
        raise CheckFailed(message)
