# SPDX-License-Identifier: BSD-3-Clause
"""A channel that is read: a folder, or a URL through rattler's client and its credential store."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rattler.networking import Client
from rattler.package_streaming import download_bytes, download_to_writer

from forge.errors import ForgeError, NotAttempted

CHUNK = 1 << 20
PACKAGES = (".conda", ".tar.bz2")
# rattler puts the token of its store into the URL, and some hosts lead on to a URL that is signed
IN_URL = (
    (r"(https?://)[^/\s@]+@", r"\1"),
    (r"/t/[^/\s)]+", "/t/***"),
    (r"(://[^\s)?]+)\?[^\s)]+", r"\1"),
)
FORMS = "a folder, https://prefix.dev/CHANNEL or https://anaconda.org/OWNER"


class Unreadable(NotAttempted):
    """A server, or one file of it, that does not answer as it should."""


@dataclass(frozen=True)
class Digest:
    """What a repodata record says of a file: hashes as hex, size in bytes."""

    sha256: str
    md5: str
    size: int


class _Hasher:
    """Takes a file in chunks and keeps none of them."""

    def __init__(self) -> None:
        self.sha256, self.md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
        self.size = 0

    def write(self, chunk: bytes) -> None:
        self.sha256.update(chunk)
        self.md5.update(chunk)
        self.size += len(chunk)

    def digest(self) -> Digest:
        return Digest(self.sha256.hexdigest(), self.md5.hexdigest(), self.size)


class Folder:
    """A channel folder of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def read(self, name: str) -> bytes | None:
        """The bytes of a file by its path in the channel, or None where there is none."""
        path = self.path / name
        return path.read_bytes() if path.is_file() else None

    def digest(self, name: str) -> Digest | None:
        """Hashes and size of a file, read in chunks, or None where there is none."""
        path, hasher = self.path / name, _Hasher()
        if not path.is_file():
            return None
        with path.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                hasher.write(chunk)
        return hasher.digest()

    def packages(self) -> set[str] | None:
        """Every package file below the subdirs, named in an index or not."""
        files = (f for f in self.path.glob("*/*") if f.name.endswith(PACKAGES))
        return {f"{file.parent.name}/{file.name}" for file in files}


class Web:
    """A channel behind a URL. Credentials come from rattler's store, if it has some for the host.

    Raises Unreadable for every answer that is neither the file nor 404.
    """

    def __init__(self, url: str, retries: int = 3) -> None:
        self.url, self.client = url.rstrip("/"), Client.default_client(max_retries=retries)

    def __str__(self) -> str:
        return self.url

    def read(self, name: str) -> bytes | None:
        return self._get(download_bytes(self.client, f"{self.url}/{name}"))

    def digest(self, name: str) -> Digest | None:
        hasher = _Hasher()
        found = self._get(download_to_writer(self.client, f"{self.url}/{name}", hasher), b"")
        return None if found is None else hasher.digest()

    def packages(self) -> set[str] | None:
        """None: a web server does not list."""
        return None

    def _get(self, request: Coroutine[Any, Any, Any], empty: bytes | None = None) -> Any:
        async def wait() -> Any:
            return await request

        try:
            found = asyncio.run(wait())
            return empty if found is None else found
        except Exception as error:  # the bindings raise RuntimeError for everything
            if "(404 " in str(error):
                return None
            raise Unreadable(f"{self.url} cannot be read: {redacted(error)}") from None


def parse(text: str) -> Folder | Web:
    """The channel that a person named.

    Raises ForgeError for nothing at all, and for a URL that is damaged or carries a credential.
    """
    if not text:
        raise ForgeError("the channel's name is empty: give a folder or a URL")
    if "://" not in text:
        return Folder(Path(text).resolve())
    refuse_credentials(text)
    parts = urlsplit(text)
    if parts.scheme == "file":
        return Folder(Path(unquote(parts.path)))
    if parts.scheme in ("http", "https") and parts.hostname:
        return Web(text)
    raise ForgeError(f"{text} is neither a folder nor an http(s) URL")


def refuse_credentials(url: str) -> None:
    """Raise ForgeError, which does not repeat the URL, where one has a password, token or query.

    One without a valid host and port is refused, too: a password may stand where a port would.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # it is not repeated: what is no URL may hold anything
        raise ForgeError("what was named for a channel looks like a URL, and is none") from None
    if "@" in parts.netloc or "/t/" in f"{parts.path}/" or parts.query or parts.fragment:
        raise ForgeError(
            "the URL carries a credential (user:password@, /t/TOKEN/ or a query), which command "
            "lines, logs and locks would show. Name the plain URL and put the credential where "
            "RATTLER_AUTH_FILE points, or into the keyring (pixi auth login)"
        )


def redacted(error: object) -> str:
    """What a client says of a request, without credentials in its URLs."""
    text = str(error)
    for pattern, public in IN_URL:
        text = re.sub(pattern, public, text)
    return text
