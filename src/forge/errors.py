# SPDX-License-Identifier: BSD-3-Clause
"""What goes wrong, and the exit code of each."""

import re

# Credentials in URLs. From each character of a word to its end takes minutes: hence the limits.
SECRETS = ((r"(\w:/{1,2})[^/\s]+(@|%40)", r"\1"),
           (r"(?<![^\s/'\"]):*[^\s/:'\"]+:[^\s/@]{1,4000}(@|%40)(?=[\w[])", ""),
           (r"(/|%2F)(t|%74)\1[^/\s)]+", "/t/***"), (r";\w{,40}(token|key|auth)\w*=[^\s/)]+", ""),
           (r"(\w:/[^\s)?#]{1,4000})[?#]\S*[^\s),.:;'\"]", r"\1"))  # fmt: skip
LONG = re.compile(r"(\S{300})\S{100,}")


def redacted(error: object) -> str:
    """Strip the credentials from the URLs in a text."""
    text = str(error)
    for pattern, public in SECRETS:
        text = re.sub(pattern, public, text, flags=re.I)
    return text


class ForgeError(Exception):
    """A usage or configuration error: what, where, what to do, in words that may be logged."""

    exit_code = 2

    def __init__(self, message: object) -> None:
        text = (c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in redacted(message))
        super().__init__(LONG.sub(r"\1...", "".join(text)))


class Failed(ForgeError):
    """What was asked for did not succeed: a build, a test, an installation, a write."""

    exit_code = 1


class Refused(ForgeError):
    """A request contradicts the facts, for example a download with another hash."""

    exit_code = 1


class NotAttempted(ForgeError):
    """Something could not be tried at all, for example because a source is unreachable."""

    exit_code = 3


def one_line(text: str) -> str:
    """Turn foreign text into one short line that every terminal and log takes."""
    return " ".join(ascii(redacted(text))[1:-1].split())[:600]
