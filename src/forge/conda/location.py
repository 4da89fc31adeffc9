# SPDX-License-Identifier: BSD-3-Clause
"""Read a channel from a folder, or from a URL with rattler and its credential store."""

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
    """A channel to read.

    Attributes:
        folder: The folder of the channel, or None if the channel is on a server.
        url: The URL of the channel, without a slash at its end.
    """

    def __init__(self, channel: str | Path, retries: int = 3) -> None:
        """Parse the name of a channel. Nothing is read yet.

        Args:
            channel: A folder or a URL.
            retries: How often a failed request is repeated.

        Raises:
            ForgeError: The name is empty or is neither a folder nor an http(s) URL, or a URL is
                malformed or carries a credential.
        """
        text = str(channel)
        refuse_credentials(text)
        self.folder = folder_of(text)
        if self.folder:
            self.url = self.folder.as_uri()
        elif text.startswith(("http://", "https://")):
            self.url = text.rstrip("/")
        else:
            raise ForgeError(f"{text} is neither a folder nor an http(s) URL")
        self._client = network.client(retries)

    def __str__(self) -> str:
        return str(self.folder or self.url)

    def stream(self, name: str, out: Any) -> bool:
        """Write a file of the channel to `out` in chunks.

        Args:
            name: The file's path in the channel.
            out: An object with a method `write`.

        Returns:
            Whether the channel has such a file.

        Raises:
            ForgeError: The name leads out of the channel.
            NotAttempted: The server answers neither with the file nor with 404.
        """
        if not is_plain(name):
            raise ForgeError(f"{name!a:.200} is not the name of a file in {self}: nothing is read")
        if self.folder:
            path = self.folder / name
            if not path.is_file():
                return False
            with path.open("rb") as file:
                shutil.copyfileobj(file, out)
            return True
        try:
            network.download(self._client, f"{self.url}/{name}", out)
        except RuntimeError as error:
            if "(404 " in str(error):
                return False
            raise NotAttempted(f"{self.url} cannot be read: {error}") from None
        return True


def folder_of(url: str) -> Path | None:
    """Return the folder or file that a `file:` URL or a bare path names; None for other URLs.

    Raises:
        ForgeError: The text cannot be a path.
    """
    if "://" not in url:
        try:
            return Path(url).resolve()
        except (OSError, RuntimeError, ValueError):
            # The path may have a circle of links or a NUL, for example.
            raise ForgeError(f"{url!a:.80} cannot be a path on this system") from None
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def refuse_credentials(channel: str) -> None:
    """Raise ForgeError if a channel URL is malformed, or has a user, token, query or fragment.

    An empty text is refused, too; a path is accepted. The message does not repeat a URL that may
    contain a secret.
    """
    if not channel:
        raise ForgeError("the channel's name is empty: give a folder or a URL")
    if "://" not in channel and not channel.startswith(("http:", "https:")):
        return
    try:
        parts = urlsplit(channel)
        # This raises ValueError for https://user:password/x, whose password is parsed as a port.
        _ = parts.port
    except ValueError:
        raise ForgeError("malformed channel URL") from None
    has_user = "@" in unquote(parts.netloc)
    has_token = "/t/" in unquote(f"{parts.path}/") or ";" in parts.path
    if parts.scheme == "file":
        # In the path of a folder, /t/ and ; are allowed.
        has_token = False
    if has_user or has_token or parts.query or parts.fragment:
        raise ForgeError(
            "the channel URL carries a credential (a user name or password, a token, a query or a "
            "fragment), which command lines, logs and locks would expose. Give the plain URL, and "
            "store the credential with pixi auth login or in the file that RATTLER_AUTH_FILE names"
        )
    if parts.scheme in ("http", "https") and not HOST.fullmatch(parts.netloc):
        raise ForgeError(f"malformed channel URL: {parts.netloc!a:.80} is not HOST or HOST:PORT")
