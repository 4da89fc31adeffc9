# SPDX-License-Identifier: BSD-3-Clause
"""Download files, and list the files on pip's index, with pip's network configuration.

`pip download` is not used here, because for an sdist it runs setup.py, and that of flash-attn
imports torch. pip downloads only the wheels of the host base: see hostbase/lock.py.
"""

import ast
import functools
import importlib
import logging
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from packageurl import PackageURL
from unearth import Link, Package, PackageFinder
from unearth.auth import MultiDomainBasicAuth
from unearth.fetchers import PyPIClient

from forge import limits, network
from forge.errors import Failed, ForgeError, NotAttempted
from forge.files import ADVICE

# The type is Any, because unearth's types of a client contradict each other.
CLIENT: Any = PyPIClient
# The HTTP library of unearth: httpx2 for version 0.19, httpx for version 0.18.
HTTPX = importlib.import_module(PyPIClient.__base__.__module__)
# The exceptions for a page of an index that cannot be fetched or read.
UNREADABLE = (
    HTTPX.HTTPError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)
# These are pip's words for true.
TRUE = ("1", "t", "true", "y", "yes", "on")


class PacedBody(HTTPX.SyncByteStream):  # type: ignore[name-defined]
    """The body of a response.

    Reading it raises ReadTimeout if the server is too slow, and ReadError if it is the content of a
    local file that cannot be read.
    """

    def __init__(self, response: Any) -> None:
        """Replace the body of a response by this object."""
        self.stream = response.stream
        self.pace = network.Pace(str(response.url))
        response.stream = self

    def __iter__(self) -> Iterator[bytes]:
        try:
            for data in self.stream:
                self.pace.bytes += len(data)
                yield data
                delay = self.pace.check()
                if delay:
                    raise HTTPX.ReadTimeout(delay)
        except OSError as error:
            raise HTTPX.ReadError(f"cannot read it: {error.strerror}") from None

    def close(self) -> None:
        """Close the body."""
        self.stream.close()


class Client(CLIENT):
    """A client that gives a server `network.patience()` seconds to answer.

    Attributes:
        slow_hosts: Servers whose answer, or whose page of an index, took longer. No further
            requests are sent to them.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(timeout=network.patience(), **settings)
        self.slow_hosts = set[str]()

    def send(self, request: Any, *, stream: bool = False, **settings: Any) -> Any:
        """Send a request and return the response.

        Args:
            request: The request.
            stream: Do not read the body.
            settings: Further arguments of httpx.

        Raises:
            ReadTimeout: The server took too long. The message names the server.
        """
        host = request.url.netloc.decode().rpartition("@")[2]
        seconds = network.patience()
        try:
            if host not in self.slow_hosts:
                # httpx limits only the time between two bytes. With a thread, the time until the
                # response begins can be limited too.
                thread = ThreadPoolExecutor(1)
                future = thread.submit(super().send, request, stream=True, **settings)
                response = future.result(seconds)
                if not stream:
                    self._read_page(response, host)
                return response
        except (TimeoutError, HTTPX.TimeoutException):
            self.slow_hosts.add(host)
        message = f"{host} took more than {seconds} s ({network.TIMEOUT_VARIABLE})"
        raise HTTPX.ReadTimeout(message) from None

    @staticmethod
    def _read_page(response: Any, host: str) -> None:
        """Read the body of a response, a page of an index, up to limits.PAGE bytes.

        httpx itself would read any number of bytes.
        """
        body = bytearray()
        for data in response.iter_bytes():
            body += data
            if len(body) > limits.PAGE:
                response.close()
                raise HTTPX.DecodingError(f"{host} sent more than {limits.PAGE} bytes")
        response._content = bytes(body)


@functools.cache
def pip_settings() -> dict[str, str]:
    """Read the options of `pip install` from pip's configuration files and PIP_* variables."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ForgeError(f"pip cannot read its configuration: {done.stderr.strip()}")
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for section, key, value in re.findall(r"^(.+?)\.([\w-]+)=(.*)$", done.stdout, re.M):
        # Like pip, ignore empty values. For example, containers often set PIP_PROXY to nothing.
        if section in sections and ast.literal_eval(value):
            sections[section][key] = ast.literal_eval(value)
    return sections["global"] | sections["install"] | sections[":env:"]


class Downloader:
    """Finds and downloads files with the indexes, credentials, proxy and certificates of pip.

    Attributes:
        client: The HTTP client.
    """

    def __init__(self) -> None:
        settings = pip_settings()
        words = {key: value.split() for key, value in settings.items()}
        index_urls = words.get("index-url", [])
        extra_urls = words.get("extra-index-url", [])
        self.client = _make_client(settings, [*index_urls, *extra_urls])
        # If no index is given, unearth uses PyPI.
        self._finder = PackageFinder(
            self.client,
            index_urls=index_urls,
            ignore_compatibility=True,
        )
        for url in extra_urls:
            self._finder.add_index_url(url)
        if settings.get("no-index", "").lower() in TRUE:
            self._finder.sources.clear()
        for place in words.get("find-links", []):
            folder = _expand(place)
            # A folder that does not exist is ignored; pip also only warns about it.
            if "://" in folder or Path(folder).exists():
                self._finder.add_find_links(folder)
        self._indexes = list(self._finder.sources)

    def files_of(self, project: str) -> list[Package]:
        """List all files of a project, including yanked ones.

        Raises:
            NotAttempted: No index offers a file. The message has the reasons that are known.
        """
        files: list[Package] = []
        reasons: list[str] = []

        def collect(record: logging.LogRecord) -> bool:
            reasons.append(record.getMessage())
            return False

        # unearth only logs why it skips an index. The filter collects these messages.
        logging.getLogger("unearth.collector").filters[:] = [collect]
        for index in self._indexes:
            # Search one index at a time, so that an error affects only it.
            self._finder.sources = [index]
            try:
                files += self._finder.find_all_packages(project, allow_yanked=True)
            except UNREADABLE as error:
                reasons.append(f"{index['url']}: {error!r:.300}")
        if not files:
            raise NotAttempted(f"pip's index offers no {project} ({'; '.join(reasons)})")
        return files

    def locate(self, url: str, purl: PackageURL | None) -> Link:
        """Return the link to a file.

        Args:
            url: The file's URL. With a package URL, only its last part, the file name, is used.
            purl: The package URL if the file is on PyPI. It is then looked up on pip's index.

        Raises:
            NotAttempted: pip's index does not offer the file.
        """
        if not purl:
            return Link(url)
        for file in self.files_of(purl.name):
            if file.link.filename == url.rpartition("/")[2]:
                return file.link
        raise NotAttempted("pip's index does not offer it")

    def download(self, link: Link, partial: Path, progress: Callable[..., None]) -> None:
        """Download a file, or continue a partial download.

        Args:
            link: The link to the file.
            partial: The path to write to. If it exists, only the missing bytes are requested.
            progress: Shows the progress; see Progress in sources.cache.

        Raises:
            NotAttempted: The server does not send the file, the URL is invalid, or the file is too
                large.
            Failed: The file cannot be written.
        """
        size = partial.stat().st_size if partial.exists() else 0
        headers = {"Accept-Encoding": "identity"}
        if size:
            headers["Range"] = f"bytes={size}-"
        try:
            url = link.url_without_fragment
            with self.client.stream("GET", url, headers=headers) as response:
                if response.status_code == 416:
                    # The file is already complete.
                    return
                if response.status_code >= 400:
                    raise NotAttempted(f"HTTP {response.status_code}")
                _write_body(response, link, partial, size, progress)
        except HTTPX.HTTPError as error:
            raise NotAttempted(str(error) or repr(error)) from None
        except OSError as error:
            # The URL may be that of a folder, for example.
            raise NotAttempted(f"cannot read {link.redacted}: {error.strerror}") from None
        except (ValueError, HTTPX.InvalidURL) as error:
            # The port may not be a number, for example.
            raise NotAttempted(f"{link.url} is not a valid URL: {error}") from None


def _make_client(settings: dict[str, str], index_urls: list[str]) -> Client:
    """Make a client with the credentials, proxy and certificates of pip.

    Args:
        settings: The settings of pip.
        index_urls: The URLs of the indexes that pip's settings name.

    Raises:
        ForgeError: A setting is invalid.
    """
    trusted_hosts = settings.get("trusted-host", "").split()
    for url in index_urls:
        _require_url(f"the index {url}", url)
    for host in trusted_hosts:
        _require_url(f"trusted-host {host}", f"all://{host}")
    proxy = settings.get("proxy")
    if proxy and "://" not in proxy:
        # pip also accepts HOST:PORT.
        proxy = f"http://{proxy}"
    client_certificate = settings.get("client-cert")
    if client_certificate:
        client_certificate = _expand(client_certificate)
    verify = _load_certificates(settings)
    try:
        return Client(
            trusted_hosts=trusted_hosts,
            verify=verify,
            cert=client_certificate,
            proxy=proxy,
            auth=MultiDomainBasicAuth(prompting=False, index_urls=index_urls),
            follow_redirects=True,
            event_hooks={"response": [PacedBody]},
        )
    except (ValueError, ImportError, HTTPX.InvalidURL) as error:
        # The proxy may be socks5:// without socksio, for example.
        reason = f"the proxy of pip or of the environment cannot be used: {error}"
        raise ForgeError(reason) from None
    except OSError as error:
        file = client_certificate or "that SSL_CERT_FILE names"
        raise ForgeError(f"cannot read the certificate {file}: {error}") from None


def _require_url(setting: str, url: str) -> None:
    """Raise ForgeError if a URL is invalid. The message names `setting`, its origin."""
    try:
        # Unlike httpx, urllib checks the range of the port.
        _ = urlsplit(url).port
        HTTPX.URL(url)
    except (ValueError, HTTPX.InvalidURL) as error:
        reason = f"pip's configuration has {setting}, which is invalid: {error}"
        raise ForgeError(f"{reason}. Correct it; pip config debug names its place") from None


def _expand(path: str) -> str:
    """Replace a leading ~ by the home folder if that is known. `path` may also be a URL."""
    # Path.expanduser raises RuntimeError if there is no home folder.
    return os.path.expanduser(path)  # noqa: PTH111


def _load_certificates(settings: dict[str, str]) -> ssl.SSLContext | bool:
    """Return the certificates that pip's settings name, for httpx; True if they name none."""
    bundle = settings.get("cert") or os.environ.get("REQUESTS_CA_BUNDLE")
    if not bundle:
        return True
    try:
        return ssl.create_default_context(cafile=_expand(bundle))
    except OSError as error:
        raise ForgeError(f"cannot read pip's certificates {bundle}: {error}") from None


def _write_body(
    response: Any,
    link: Link,
    partial: Path,
    start: int,
    progress: Callable[..., None],
) -> None:
    """Write the body of a response to a file.

    Args:
        response: The response. With status 206, it has only the bytes from `start` on.
        link: The link to the file.
        partial: The path to write to.
        start: The number of bytes that `partial` already has.
        progress: Shows the progress; see Progress in sources.cache.

    Raises:
        NotAttempted: The file is too large.
        Failed: The file cannot be written.
    """
    is_resumed = response.status_code == 206
    size = start if is_resumed else 0
    length = response.headers.get("content-length")
    total = size + int(length) if length else None
    try:
        with partial.open("ab" if is_resumed else "wb") as out:
            # iter_raw does not buffer. A buffer's content would be lost if the connection breaks.
            for chunk in response.iter_raw():
                size += out.write(chunk)
                if size > limits.SOURCE:
                    excess = f"sent more than {limits.SOURCE} bytes, which no source has"
                    raise NotAttempted(f"{link.redacted} {excess}")
                progress(link.filename, size, total)
    except OSError as error:
        # Remove the partial file, because otherwise a full disk would stay full.
        partial.unlink(missing_ok=True)
        raise Failed(f"cannot write {partial}: {error.strerror}. {ADVICE}") from None
