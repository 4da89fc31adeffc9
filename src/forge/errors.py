# SPDX-License-Identifier: BSD-3-Clause
"""Errors with their exit codes, and functions that remove secrets from texts."""

import re
from collections.abc import Mapping
from urllib.parse import quote

# Patterns of credentials in URLs, each with its replacement. Some repetitions are limited to 4000
# or 40 characters. Without these limits, the search in a very long word would take minutes, because
# a match would be tried from many of its characters to its end.
SECRETS = (
    # https://USER:PASSWORD@HOST
    (r"(\w:/{1,2})[^/\s]+(@|%40)", r"\1"),
    # USER:PASSWORD@HOST
    (r"(?<![^\s/'\"]):*[^\s/:'\"]+:[^\s/@]{1,4000}(@|%40)(?=[\w[])", ""),
    # /t/TOKEN/, as in URLs of conda channels
    (r"(/|%2F)(t|%74)\1[^/\s)]+", "/t/***"),
    # ;token=TOKEN
    (r";\w{,40}(token|key|auth)\w*=[^\s/)]+", ""),
    # a query or a fragment
    (r"(\w:/[^\s)?#]{1,4000})[?#]\S*[^\s),.:;'\"]", r"\1"),
)
LONG_WORD = re.compile(r"(\S{300})\S{100,}")
# Names of environment variables whose values are secrets.
SECRET_NAME = re.compile(
    r"token|secret|passw|passphrase|credential|cookie|(api|access|private)_?key"
    r"|(^|_)(auth|key|pass|pat|pwd)(_|$)",
    re.I,
)
# Secrets in a text: values after a word such as `token=`, values of HTTP headers, words with a
# known prefix, and private keys.
SECRET_TEXT = re.compile(
    r"((?:passwo?r?d|passphrase|secret|token|(?:api|access|private)[-_]?key)[\"']?\s?[:=]\s?[\"']?"
    r"|\bpassword\s)(?:(?<=\")[^\"\n]+|(?<=')[^'\n]+|[^\s\"']+)"
    r"|((?:authorization|cookie)[\"']?\s?[:=]\s?[\"']?)[^\"'\n]+"
    r"|\b(?:gh[opsur]_|github_pat_|glpat-|hf_|pypi-|sk-|AKIA|eyJ)[\w.-]{12,}"
    r"|-----BEGIN [A-Z ]{,30}PRIVATE KEY-----.*?(?:-----END|\Z)",
    re.I | re.S,
)
# The minimum length of a masked value, in characters. Shorter values are not masked, because
# ordinary words contain them.
SHORTEST_SECRET = 4
# In characters.
LONGEST_LINE = 600


def redact(error: object) -> str:
    """Return a text without the credentials, queries and fragments of its URLs."""
    text = str(error)
    for pattern, replacement in SECRETS:
        text = re.sub(pattern, replacement, text, flags=re.I)
    return text


def remove_secrets(text: str, environment: Mapping[str, str]) -> str:
    """Return a log without secrets and without credentials in URLs, so that it can be published.

    Args:
        text: A log that other programs wrote.
        environment: The environment variables of these programs. If the name of a variable is that
            of a secret, its value, and each word of the value, is masked wherever it occurs, even
            if line breaks split it. The same holds for the credential in a URL in any variable.
            Values of fewer than SHORTEST_SECRET characters are not looked for.
    """
    secrets = set[str]()
    for name, value in environment.items():
        if SECRET_NAME.search(name):
            secrets.update([value, *value.split()])
        for user in re.findall(r"://([^/\s]+)@", value):
            password = user.partition(":")[2]
            secrets.add(password or user)
    secrets.update([quote(secret, safe="") for secret in secrets])
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= SHORTEST_SECRET:
            characters = map(re.escape, secret)
            text = re.sub(r"\n?".join(characters), "***", text)
    return SECRET_TEXT.sub(_mask, redact(text))


def _mask(secret: re.Match[str]) -> str:
    """Return the replacement for a match of SECRET_TEXT: ***, after the word before the secret."""
    introduction = secret[1] or secret[2] or ""
    return f"{introduction}***"


class ForgeError(Exception):
    """A usage or configuration error.

    The message states the error, its place and what to do. Credentials in URLs are
    removed from it.
    """

    exit_code = 2

    def __init__(self, message: object) -> None:
        """Remove credentials from the message, escape control characters, and cut long words."""
        text = "".join(_escape(character) for character in redact(message))
        super().__init__(LONG_WORD.sub(r"\1...", text))


def _escape(character: str) -> str:
    """Escape a character, unless it is printable, a newline or a tab."""
    if character.isprintable() or character in "\n\t":
        return character
    return ascii(character)[1:-1]


class Failed(ForgeError):
    """A build, test, installation or write did not succeed, or a file is damaged."""

    exit_code = 1


class Refused(ForgeError):
    """Something breaks a rule or is not what it should be, such as a download with another hash."""

    exit_code = 1


class NotAttempted(ForgeError):
    """Something could not be attempted, for example because a source is unreachable."""

    exit_code = 3


def one_line(text: str) -> str:
    """Return the text of another program as one short line of ASCII, for terminals and logs."""
    plain = ascii(redact(text))[1:-1]
    return " ".join(plain.split())[:LONGEST_LINE]
