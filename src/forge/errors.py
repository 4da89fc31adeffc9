# SPDX-License-Identifier: BSD-3-Clause
"""What goes wrong, and the exit code of each."""

import re
from collections.abc import Mapping
from urllib.parse import quote

# Credentials in URLs. From each character of a word to its end takes minutes: hence the limits.
SECRETS = ((r"(\w:/{1,2})[^/\s]+(@|%40)", r"\1"),
           (r"(?<![^\s/'\"]):*[^\s/:'\"]+:[^\s/@]{1,4000}(@|%40)(?=[\w[])", ""),
           (r"(/|%2F)(t|%74)\1[^/\s)]+", "/t/***"), (r";\w{,40}(token|key|auth)\w*=[^\s/)]+", ""),
           (r"(\w:/[^\s)?#]{1,4000})[?#]\S*[^\s),.:;'\"]", r"\1"))  # fmt: skip
LONG = re.compile(r"(\S{300})\S{100,}")
# Names of environment variables whose values are secrets, and what secrets look like in a text.
SECRET_NAME = re.compile(
    r"token|secret|passw|passphrase|credential|cookie|(api|access|private)_?key"
    r"|(^|_)(auth|key|pass|pat|pwd)(_|$)",
    re.I,
)
SECRET_TEXT = re.compile(
    r"((?:passwo?r?d|passphrase|secret|token|(?:api|access|private)[-_]?key)[\"']?\s?[:=]\s?[\"']?"
    r"|\bpassword\s)(?:(?<=\")[^\"\n]+|(?<=')[^'\n]+|[^\s\"']+)"
    r"|((?:authorization|cookie)[\"']?\s?[:=]\s?[\"']?)[^\"'\n]+"
    r"|\b(?:gh[opsur]_|github_pat_|glpat-|hf_|pypi-|sk-|AKIA|eyJ)[\w.-]{12,}"
    r"|-----BEGIN [A-Z ]{,30}PRIVATE KEY-----.*?(?:-----END|\Z)",
    re.I | re.S,
)
SHORTEST = 4  # characters of a secret; shorter values stand everywhere


def redacted(error: object) -> str:
    """Strip the credentials from the URLs in a text."""
    text = str(error)
    for pattern, public in SECRETS:
        text = re.sub(pattern, public, text, flags=re.I)
    return text


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """Return what strangers may read of a log: no URL's credentials, and no secret.

    Args:
        text: A log that other programs wrote.
        environment: Their environment. Values of variables that are named like a secret are taken
            out wherever they stand, also folded by a terminal's width.
    """
    secrets = set[str]()
    for name, value in environment.items():
        if SECRET_NAME.search(name):
            secrets.update([value, *value.split()])
        for user in re.findall(r"://([^/\s]+)@", value):
            secrets.add(user.partition(":")[2] or user)
    secrets.update([quote(secret, safe="") for secret in secrets])
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= SHORTEST:
            text = re.sub(r"\n?".join(map(re.escape, secret)), "***", text)
    return SECRET_TEXT.sub(lambda match: f"{match[1] or match[2] or ''}***", redacted(text))


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
