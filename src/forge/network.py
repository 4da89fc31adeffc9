# SPDX-License-Identifier: BSD-3-Clause
"""Network access with pixi's configuration (mirrors and credentials) and with time limits.

Without the limits, a server that sends nothing or one byte a second would block a command for ever.
py-rattler 0.27 reads pixi's configuration itself (rattler.Config, Client.from_config). Once the
project no longer supports older versions of py-rattler, `_read_mirrors` and `client` can be
removed.
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
# In bytes per second.
LOWEST_RATE = 1000
TIMEOUT_VARIABLE = "FORGE_TIMEOUT"


def patience() -> int:
    """Return how long a server may send nothing, or send at less than LOWEST_RATE, in seconds.

    The environment variable FORGE_TIMEOUT sets the number. The default is 60. Raise ForgeError if
    the value is not a positive whole number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE) or "60"
    if not text.isdecimal() or len(text) > 9 or not int(text):
        raise ForgeError(f"{TIMEOUT_VARIABLE}={text:.40} is not a positive whole number of seconds")
    return int(text)


class Pace:
    """The pace at which a server sends a file.

    Attributes:
        host: The server, without credentials.
        start: The time.monotonic() at which the current interval began.
        bytes: The bytes received in this interval. The receiver of the file adds them.
    """

    def __init__(self, url: str) -> None:
        self.host = urlsplit(url).netloc.rpartition("@")[2]
        self.start = time.monotonic()
        self.bytes = 0

    def check(self) -> str:
        """Return a message if the server was too slow in this interval, else an empty string.

        An interval ends with the first call after `patience()` seconds, so call this often.
        """
        elapsed = time.monotonic() - self.start
        seconds = patience()
        if elapsed < seconds:
            return ""
        if self.bytes < LOWEST_RATE * elapsed:
            return (
                f"{self.host} sent {self.bytes} bytes in {elapsed:.0f} s; "
                f"{TIMEOUT_VARIABLE}={seconds} may be too short"
            )
        self.start = time.monotonic()
        self.bytes = 0
        return ""


def _read_mirrors() -> dict[str, list[str]]:
    """Read [mirrors] from pixi's configuration files. Each returned URL ends with a slash.

    As in pixi, a later file takes precedence. This function also sets the environment variable
    RATTLER_AUTH_FILE to the store of credentials that the last file names, unless it is already
    set.
    """
    user = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", "pixi")
    home = Path(os.environ.get("PIXI_HOME") or Path.home() / ".pixi")
    project = Project.default_root() / ".pixi"
    mirrors: dict[str, list[str]] = {}
    auth_file = None
    for folder in (Path("/etc/pixi"), user, home, project):
        path = folder / "config.toml"
        if not path.is_file():
            continue
        try:
            data: dict[str, Any] = tomllib.loads(read_text(path))
            for url, urls in data.get("mirrors", {}).items():
                mirrors[_with_slash(url)] = [_with_slash(mirror) for mirror in urls]
            if data.get("authentication-override-file"):
                auth_file = Path(data["authentication-override-file"]).expanduser()
        except (ValueError, TypeError, AttributeError) as error:
            raise ForgeError(f"{path} is not a pixi configuration: {error}") from None
    if auth_file:
        os.environ.setdefault(AUTH_FILE, str(auth_file))
    return mirrors


def _with_slash(url: str) -> str:
    if urlsplit(url).scheme not in ("http", "https", "oci"):
        raise ValueError(f"mirrors: {url!r} is not an http(s) or oci URL")
    return f"{url.rstrip('/')}/"


def client(retries: int = 3, seconds: int | None = None) -> networking.Client:
    """Make an HTTP client with pixi's middleware, in pixi's order, so that retries change mirrors.

    Args:
        retries: How often a failed request is repeated.
        seconds: The time limit of each request; None for no limit.

    Raises:
        ForgeError: The configuration or the credentials cannot be read.
    """
    # Read the mirrors before AUTH_FILE, because the same configuration may set AUTH_FILE.
    mirrors = networking.MirrorMiddleware(_read_mirrors())
    authentication = networking.AuthenticationMiddleware()
    oci = networking.OciMiddleware()
    retry = networking.RetryMiddleware(retries)
    require_file(Path(os.environ.get(AUTH_FILE, "")))
    try:
        return networking.Client([retry, mirrors, authentication, oci], timeout=seconds)
    except Exception as error:
        # This may be an AuthenticationStorageError, for example.
        reason = " ".join(str(error).split())
        raise ForgeError(f"credentials ({AUTH_FILE}, or in HOME): {reason}") from None


def make_solver_client() -> networking.Client:
    """Make the HTTP client for solvers.

    Its requests have a time limit, because solvers do not report the progress of a download.
    """
    return client(retries=1, seconds=patience())


def mirrored(url: str) -> str:
    """Return a URL with its first mirror, if any, applied, for programs that ignore [mirrors].

    One such program is rattler-build if it is called through its Python bindings.
    """
    mirrors = _read_mirrors()
    for prefix in sorted(mirrors, key=len, reverse=True):
        if _with_slash(url).startswith(prefix) and mirrors[prefix]:
            mirror = mirrors[prefix][0]
            return _with_slash(url).replace(prefix, mirror, 1).rstrip("/")
    return url


class _CountingWriter:
    """Writes received data, and counts its bytes."""

    def __init__(self, out: Any, pace: Pace) -> None:
        self.out = out
        self.pace = pace

    def write(self, data: bytes) -> None:
        self.pace.bytes += len(data)
        self.out.write(data)


def download(client: networking.Client, url: str, out: Any) -> None:
    """Download a file and write it to `out` in chunks.

    Raises:
        RuntimeError: The server does not send the file, or too slowly.
        OSError: This machine cannot write it.
    """
    pace = Pace(mirrored(url))
    writer = _CountingWriter(out, pace)

    async def receive() -> None:
        # This function is async, because the bindings need a running event loop.
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
        # If a connection breaks, the bindings raise OSError without an errno. An OSError with an
        # errno is an error of this machine, for example a full disk.
        if isinstance(error, OSError) and error.errno:
            raise
        host = "" if pace.host in str(error) else f"{pace.host}: "
        raise RuntimeError(f"{host}{error}") from None


class _Answered(Exception):
    """Raised to end a download once its first bytes have arrived."""


class _EndingWriter:
    """Ends a download at its first bytes."""

    def write(self, _: bytes) -> None:
        raise _Answered


def find_outage(url: str, seconds: int) -> str:
    """Return why a URL cannot be read; an empty string if its first bytes arrive in `seconds`."""
    try:
        download(client(retries=0, seconds=seconds), url, _EndingWriter())
    except _Answered:
        return ""
    except RuntimeError as error:
        return str(error)
    return "it is empty"
