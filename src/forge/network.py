# SPDX-License-Identifier: BSD-3-Clause
"""The network with pixi's configuration (mirrors, credentials), and limits on waiting.

A server that sends nothing, or a byte a second, would otherwise hold a command for ever.
py-rattler 0.27 reads that configuration itself (rattler.Config, Client.from_config): once
conda-forge's records hold it, `_read_mirrors` and `client` can go.
"""

import asyncio
import os
import time
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rattler import networking
from rattler.package_streaming import download_to_writer

from forge.errors import ForgeError
from forge.files import read_text, require_file
from forge.project import Project

AUTH_FILE = "RATTLER_AUTH_FILE"
LOWEST_RATE = 1000  # bytes a second


def patience() -> int:
    """Return how many seconds a server may take to answer, or send at less than LOWEST_RATE.

    The environment variable FORGE_TIMEOUT sets the number.
    """
    text = os.environ.get("FORGE_TIMEOUT") or "60"
    if not text.isdecimal() or len(text) > 9 or not int(text):
        raise ForgeError(f"FORGE_TIMEOUT={text:.40} is not a number of seconds")
    return int(text)


class Pace:
    """The pace at which a server sends a file.

    Attributes:
        host: The server, without credentials.
        start: When the current interval began, by time.monotonic().
        bytes: The bytes since then. Whoever receives them adds them.
    """

    def __init__(self, url: str) -> None:
        self.host = urlsplit(url).netloc.rpartition("@")[2]
        self.start = time.monotonic()
        self.bytes = 0

    def check(self) -> str:
        """Return a message if the last `patience()` seconds were too slow, else an empty string.

        Call it often: the first call after that many seconds begins a new interval.
        """
        elapsed = time.monotonic() - self.start
        seconds = patience()
        if elapsed < seconds:
            return ""
        if self.bytes < LOWEST_RATE * elapsed:
            return (
                f"{self.host} sent {self.bytes} bytes in {elapsed:.0f} s; "
                f"FORGE_TIMEOUT={seconds} may be too short"
            )
        self.start = time.monotonic()
        self.bytes = 0
        return ""


def _read_mirrors() -> dict[str, list[str]]:
    """Read pixi's [mirrors]; as in pixi, a later file wins. Each URL ends in a slash.

    Also sets AUTH_FILE where a file names another store of credentials.
    """
    user = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", "pixi")
    home = Path(os.environ.get("PIXI_HOME") or Path.home() / ".pixi")
    project = Project.default_root() / ".pixi"
    mirrors: dict[str, list[str]] = {}
    for folder in (Path("/etc/pixi"), user, home, project):
        path = folder / "config.toml"
        if not path.is_file():
            continue
        try:
            data: dict[str, Any] = tomllib.loads(read_text(path))
            for url, urls in data.get("mirrors", {}).items():
                mirrors[_with_slash(url)] = [_with_slash(mirror) for mirror in urls]
            auth_file = data.get("authentication-override-file")
            if auth_file:
                os.environ.setdefault(AUTH_FILE, str(Path(auth_file).expanduser()))
        except (ValueError, TypeError, AttributeError) as error:
            raise ForgeError(f"{path} is not a pixi configuration: {error}") from None
    return mirrors


def _with_slash(url: str) -> str:
    if urlsplit(url).scheme not in ("http", "https", "oci"):
        raise ValueError(f"mirrors: {url!r} is not an http(s) or oci URL")
    return f"{url.rstrip('/')}/"


def client(retries: int = 3, seconds: int | None = None) -> networking.Client:
    """Make an HTTP client with pixi's middleware in pixi's order: a retry takes another mirror.

    Args:
        retries: How often a request is repeated.
        seconds: The limit of each request, if it has one.

    Raises:
        ForgeError: The configuration or the credentials cannot be read.
    """
    # The mirrors come before AUTH_FILE is read, because their configuration may set it.
    mirrors = networking.MirrorMiddleware(_read_mirrors())
    authentication = networking.AuthenticationMiddleware()
    oci = networking.OciMiddleware()
    retry = networking.RetryMiddleware(retries)
    require_file(Path(os.environ.get(AUTH_FILE, "")))
    try:
        return networking.Client([retry, mirrors, authentication, oci], timeout=seconds)
    except Exception as error:  # AuthenticationStorageError cannot be imported
        reason = " ".join(str(error).split())
        raise ForgeError(f"credentials ({AUTH_FILE}, or in HOME): {reason}") from None


def make_solver_client() -> networking.Client:
    """Make the client for solvers, with a limit, since they report no progress of a download."""
    return client(retries=1, seconds=patience())


def mirrored(url: str) -> str:
    """Return the first mirror's address of a URL, for programs that read no [mirrors].

    rattler-build, through its bindings, is one.
    """
    mirrors = _read_mirrors()
    for prefix in sorted(mirrors, key=len, reverse=True):
        if _with_slash(url).startswith(prefix) and mirrors[prefix]:
            mirror = mirrors[prefix][0]
            return _with_slash(url).replace(prefix, mirror, 1).rstrip("/")
    return url


class _CountingWriter:
    """Writes what a server sends, and counts it."""

    def __init__(self, out: Any, pace: Pace) -> None:
        self.out = out
        self.pace = pace

    def write(self, data: bytes) -> None:
        self.pace.bytes += len(data)
        self.out.write(data)


def download(client: networking.Client, url: str, out: Any) -> None:
    """Write a file to `out` in chunks.

    Raises:
        RuntimeError: The server does not send the file, or too slowly.
        OSError: This machine cannot write it.
    """
    pace = Pace(mirrored(url))
    writer = _CountingWriter(out, pace)

    async def receive() -> None:  # the bindings need a running loop
        task = asyncio.ensure_future(download_to_writer(client, url, writer))
        while True:
            done, _ = await asyncio.wait([task], timeout=1)
            if done:
                break
            delay = pace.check()
            if delay:
                task.cancel()
                raise RuntimeError(delay)
        await task

    try:
        asyncio.run(receive())
    except (RuntimeError, OSError) as error:
        # Where a connection breaks, the bindings raise OSError without a number. One with a number
        # is this machine's, for example a full disk.
        if isinstance(error, OSError) and error.errno:
            raise
        host = "" if pace.host in str(error) else f"{pace.host}: "
        raise RuntimeError(f"{host}{error}") from None


class _Answered(Exception):
    """Ends a download, because its first bytes came."""


class _EndingWriter:
    """Ends a download at its first bytes."""

    def write(self, _: bytes) -> None:
        raise _Answered


def find_outage(url: str, seconds: int) -> str:
    """Return why a file cannot be read; empty if its first bytes come within some seconds."""
    try:
        download(client(retries=0, seconds=seconds), url, _EndingWriter())
    except _Answered:
        return ""
    except RuntimeError as error:
        return str(error)
    return "it is empty"
