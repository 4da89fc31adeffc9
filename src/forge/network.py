# SPDX-License-Identifier: BSD-3-Clause
"""The network as pixi's configuration has it, mirrors and credentials, and how long it may take.

A server that says nothing, or a byte a second, would otherwise hold a command for ever.
py-rattler 0.27 reads that configuration itself (rattler.Config, Client.from_config): once
conda-forge's records hold it, `_mirrors` and `client` go.
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
LOWEST = 1000  # bytes a second


def patience() -> int:
    """Return the seconds a server may take for an index, or send a file at less than LOWEST."""
    text = os.environ.get("FORGE_TIMEOUT") or "60"
    if not text.isdecimal() or len(text) > 9 or not int(text):
        raise ForgeError(f"FORGE_TIMEOUT={text:.40} is not a number of seconds")
    return int(text)


class Pace:
    """Counts what a server sends; `behind` says in words if it takes too long."""

    def __init__(self, url: str) -> None:
        self.host = urlsplit(url).netloc.rpartition("@")[2]
        self.start, self.bytes = time.monotonic(), 0

    def behind(self) -> str:
        """Say if it was too slow over the last `patience()` seconds, or nothing; call it often."""
        passed, seconds = time.monotonic() - self.start, patience()
        if passed < seconds:
            return ""
        if self.bytes < LOWEST * passed:
            says = f"{self.host} sent {self.bytes} bytes in {passed:.0f} s"
            return f"{says}; FORGE_TIMEOUT={seconds} may be too short"
        self.start, self.bytes = time.monotonic(), 0
        return ""


def _mirrors() -> dict[str, list[str]]:
    """Read pixi's [mirrors], a slash at the end of each URL; a later file wins, as in pixi."""
    user = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", "pixi")
    home = Path(os.environ.get("PIXI_HOME") or Path.home() / ".pixi")
    folders = [Path("/etc/pixi"), user, home, Project.default_root() / ".pixi"]
    mirrors: dict[str, list[str]] = {}
    for path in filter(Path.is_file, (folder / "config.toml" for folder in folders)):
        try:
            data: dict[str, Any] = tomllib.loads(read_text(path))
            for url, others in data.get("mirrors", {}).items():
                mirrors[_slashed(url)] = [_slashed(other) for other in others]
            if kept := data.get("authentication-override-file"):
                os.environ.setdefault(AUTH_FILE, str(Path(kept).expanduser()))
        except (ValueError, TypeError, AttributeError) as error:
            raise ForgeError(f"{path} is not a pixi configuration: {error}") from None
    return mirrors


def _slashed(url: str) -> str:
    if urlsplit(url).scheme not in ("http", "https", "oci"):
        raise ValueError(f"mirrors: {url!r} is not an http(s) or oci URL")
    return f"{url.rstrip('/')}/"


def client(retries: int = 3, seconds: int | None = None) -> networking.Client:
    """Make the client of every request, in the order of pixi's own: a retry takes another mirror.

    `seconds` bound each request. Raises ForgeError for unreadable configuration or credentials.
    """
    mirrors = networking.MirrorMiddleware(_mirrors())  # first: it may say where credentials are
    rest = networking.AuthenticationMiddleware(), networking.OciMiddleware()
    retry = networking.RetryMiddleware(retries)
    require_file(Path(os.environ.get(AUTH_FILE, "")))
    try:
        return networking.Client([retry, mirrors, *rest], timeout=seconds)
    except Exception as error:  # AuthenticationStorageError is nowhere to be imported from
        why = " ".join(str(error).split())
        raise ForgeError(f"credentials ({AUTH_FILE}, or in HOME): {why}") from None


def for_indexes() -> networking.Client:
    """Make the client of solvers, which tell nobody how far a download is."""
    return client(1, patience())


def mirrored(url: str) -> str:
    """Choose the address to ask for `url`, for what reads no [mirrors], such as rattler-build."""
    mirrors = _mirrors()
    for prefix in sorted(mirrors, key=len, reverse=True):
        if _slashed(url).startswith(prefix) and mirrors[prefix]:
            return _slashed(url).replace(prefix, mirrors[prefix][0], 1).rstrip("/")
    return url


def download(client: networking.Client, url: str, out: Any) -> None:
    """Write a file to `out` in chunks. Raises RuntimeError where the server does not give it.

    The bindings have an OSError for what breaks off in the middle, which lacks a number.
    """
    pace = Pace(mirrored(url))

    class Counted:
        @staticmethod
        def write(data: bytes) -> None:
            pace.bytes += len(data)
            out.write(data)

    async def run() -> None:  # the bindings need a running loop
        task = asyncio.ensure_future(download_to_writer(client, url, Counted))
        while not (await asyncio.wait([task], timeout=1))[0]:
            if why := pace.behind():
                task.cancel()
                raise RuntimeError(why)
        await task

    try:
        asyncio.run(run())
    except (RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # of this machine: a full disk
            raise
        host = "" if pace.host in str(error) else f"{pace.host}: "
        raise RuntimeError(f"{host}{error}") from None


class _Answered(Exception):
    """The first bytes came."""

    @staticmethod
    def write(_: bytes) -> None:
        raise _Answered


def unanswered(url: str, seconds: int) -> str:
    """Return why a file cannot be read; empty when its first bytes come in time."""
    try:
        download(client(0, seconds), url, _Answered)
    except _Answered:
        return ""
    except RuntimeError as error:
        return str(error)
    return "it is empty"
