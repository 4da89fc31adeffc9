# SPDX-License-Identifier: BSD-3-Clause
"""Where a channel is read from: a folder, or a URL through rattler and its credential store."""

import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from forge import network
from forge.conda.package import is_plain
from forge.errors import ForgeError, NotAttempted

HOST = re.compile(r"([\w.-]+|\[[\da-fA-F:.]+\])(:\d+)?")


class Location:
    """A channel to read. Its files are named by their path in the channel.

    `folder` is None for a URL. Raises ForgeError for an empty name, and for a URL that is malformed
    or carries a credential. Reading raises NotAttempted for any answer but the file and 404.
    """

    def __init__(self, channel: str | Path, retries: int = 3) -> None:
        text = str(channel)
        refuse_credentials(text)
        self.folder = folder_of(text)
        if not self.folder and not text.startswith(("http://", "https://")):
            raise ForgeError(f"{text} is neither a folder nor an http(s) URL")
        self.url = self.folder.as_uri() if self.folder else text.rstrip("/")
        self._client = network.client(retries)

    def __str__(self) -> str:
        return str(self.folder or self.url)

    def stream(self, name: str, out: Any) -> bool:
        """Write a file to `out` in chunks. Returns False if there is no such file.

        Raises ForgeError for a name that leads out of the channel.
        """
        if not is_plain(name):
            raise ForgeError(f"{name!a:.200} is not the name of a file in {self}: nothing is read")
        if self.folder:
            path = self.folder / name
            if path.is_file():
                with path.open("rb") as file:
                    shutil.copyfileobj(file, out)
            return path.is_file()
        try:
            network.download(self._client, f"{self.url}/{name}", out)
        except RuntimeError as error:
            if "(404 " in str(error):
                return False
            raise NotAttempted(f"{self.url} cannot be read: {error}") from None
        return True


def folder_of(url: str) -> Path | None:
    """Return the folder or file of this machine that a `file:` URL or a bare path names.

    Raises ForgeError for what no path may be.
    """
    if "://" not in url:
        try:
            return Path(url).resolve()
        except (OSError, RuntimeError, ValueError):  # a circle of links, a NUL
            raise ForgeError(f"{url!a:.80} is not a path that this system has") from None
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def refuse_credentials(channel: str) -> None:
    """Raise ForgeError, without repeating a URL, if it has a password, a token or a query."""
    if not channel:
        raise ForgeError("the channel's name is empty: give a folder or a URL")
    if "://" not in channel and not channel.startswith(("http:", "https:")):
        return
    try:
        parts = urlsplit(channel)
        _ = parts.port  # in https://user:password/x the password stands where a port would
    except ValueError:  # not echoed: it may contain a secret
        raise ForgeError("malformed channel URL") from None
    token = parts.scheme != "file" and ("/t/" in unquote(f"{parts.path}/") or ";" in parts.path)
    if "@" in unquote(parts.netloc) or token or parts.query or parts.fragment:
        raise ForgeError(
            "the channel URL carries a credential (a password, a token or a query), which "
            "command lines, logs and locks would expose. Give the plain URL, and store the "
            "credential with pixi auth login or in the file that RATTLER_AUTH_FILE names"
        )
    if parts.scheme in ("http", "https") and not HOST.fullmatch(parts.netloc):
        raise ForgeError(f"malformed channel URL: {parts.netloc!a:.80} is not HOST or HOST:PORT")
