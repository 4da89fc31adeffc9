# SPDX-License-Identifier: BSD-3-Clause
"""Downloads, and the files on pip's index: over the network as pip is configured to use it.

pip itself is not asked for files: for an sdist it runs setup.py, and flash-attn's imports torch.
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

from packageurl import PackageURL
from unearth import Link, Package, PackageFinder
from unearth.auth import MultiDomainBasicAuth
from unearth.fetchers import PyPIClient

from forge import limits, network
from forge.errors import Failed, ForgeError, NotAttempted

CLIENT: Any = PyPIClient  # unearth's own types do not agree on what a client is
# unearth 0.19 is built on httpx2, 0.18 on httpx
HTTPX = importlib.import_module(PyPIClient.__base__.__module__)
# what is no page of an index
UNREADABLE = (HTTPX.HTTPError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


class Paced(HTTPX.SyncByteStream):  # type: ignore[name-defined]
    """The body of an answer, as long as it comes fast enough."""

    def __init__(self, response: Any) -> None:
        self.stream, self.pace = response.stream, network.Pace(str(response.url))
        response.stream = self

    def __iter__(self) -> Iterator[bytes]:
        for data in self.stream:
            self.pace.bytes += len(data)
            yield data
            if why := self.pace.behind():
                raise HTTPX.ReadTimeout(why)

    def close(self) -> None:
        """Close the body."""
        self.stream.close()


class Client(CLIENT):
    """Gives a server `network.patience()` seconds to answer; one that takes more is asked once."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(timeout=network.patience(), **settings)
        self.slow: set[str] = set()

    def send(self, request: Any, *, stream: bool = False, **settings: Any) -> Any:
        """Get an answer; its body too unless `stream`. Raises ReadTimeout that names the server."""
        host = request.url.netloc.decode().rpartition("@")[2]
        try:
            if host not in self.slow:  # httpx counts from byte to byte alone, so a thread waits
                send = ThreadPoolExecutor(1).submit(super().send, request, stream=True, **settings)
                response = send.result(network.patience())
                if not stream:  # a page of an index; httpx reads it without an end
                    body, excess = bytearray(), f"{host} sent more than {limits.PAGE} bytes"
                    for data in response.iter_bytes():
                        body += data
                        if len(body) > limits.PAGE:
                            response.close()
                            raise HTTPX.DecodingError(excess)
                    response._content = bytes(body)
                return response
        except (TimeoutError, HTTPX.TimeoutException):
            self.slow.add(host)
        says = f"{host} took more than {network.patience()} s (FORGE_TIMEOUT)"
        raise HTTPX.ReadTimeout(says) from None


@functools.cache
def pip_settings() -> dict[str, str]:
    """Read `pip install`'s options from its configuration files and PIP_* variables."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ForgeError(f"pip cannot read its configuration: {done.stderr.strip()}")
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for section, key, value in re.findall(r"^(.+?)\.([\w-]+)=(.*)$", done.stdout, re.M):
        sections.get(section, {})[key] = ast.literal_eval(value)
    return sections["global"] | sections["install"] | sections[":env:"]


class Downloader:
    """Finds and downloads files with the indexes, credentials, proxy and certificates of pip."""

    def __init__(self) -> None:
        pip = pip_settings()
        words = {key: value.split() for key, value in pip.items()}
        index, extra = words.get("index-url", []), words.get("extra-index-url", [])
        bundle = pip.get("cert") or os.environ.get("REQUESTS_CA_BUNDLE")
        try:
            verify = ssl.create_default_context(cafile=bundle) if bundle else True
        except OSError as error:
            raise ForgeError(f"cannot read pip's certificates {bundle}: {error}") from None
        self.client = Client(
            trusted_hosts=words.get("trusted-host", []),
            verify=verify,
            cert=pip.get("client-cert"),
            proxy=pip.get("proxy"),
            auth=MultiDomainBasicAuth(prompting=False, index_urls=[*index, *extra]),
            follow_redirects=True,
            event_hooks={"response": [Paced]},
        )
        # without an index, unearth takes PyPI
        self._finder = PackageFinder(self.client, index_urls=index, ignore_compatibility=True)
        for url in extra:
            self._finder.add_index_url(url)
        if pip.get("no-index", "").lower() in ("1", "t", "true", "y", "yes", "on"):
            self._finder.sources.clear()
        for folder in map(os.path.expanduser, words.get("find-links", [])):
            if "://" in folder or Path(folder).exists():  # as pip, which only warns
                self._finder.add_find_links(folder)
        self._indexes = list(self._finder.sources)

    def files_of(self, project: str) -> list[Package]:
        """List a project's files, yanked or not. Raises NotAttempted with each index's reason."""
        found: list[Package] = []
        reasons: list[str] = []

        def collect(record: logging.LogRecord) -> bool:
            reasons.append(record.getMessage())
            return False

        # unearth only logs why it passes over an index
        logging.getLogger("unearth.collector").filters[:] = [collect]
        for index in self._indexes:  # one that is down hides nothing that another has
            self._finder.sources = [index]
            try:
                found += self._finder.find_all_packages(project, allow_yanked=True)
            except UNREADABLE as error:
                reasons.append(f"{Link(index['url']).redacted}: {error!r:.300}")
        if not found:
            raise NotAttempted(f"pip's index offers no {project} ({'; '.join(reasons)})")
        return found

    def locate(self, url: str, purl: PackageURL | None) -> Link:
        """Find the link to a file: its URL or, with a package URL, pip's. Raises NotAttempted."""
        if not purl:
            return Link(url)
        for file in self.files_of(purl.name):
            if file.link.filename == url.rpartition("/")[2]:
                return file.link
        raise NotAttempted("pip's index does not offer it")

    def download(self, link: Link, partial: Path, progress: Callable[..., None]) -> None:
        """Download a file from where `partial` ends. Raises NotAttempted, or Failed at a write."""
        have = partial.stat().st_size if partial.exists() else 0
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        try:
            with self.client.stream("GET", link.url_without_fragment, headers=headers) as response:
                if response.status_code == 416:  # nothing is missing
                    return
                if response.status_code >= 400:
                    raise NotAttempted(f"HTTP {response.status_code}")
                resumed = response.status_code == 206
                have = have if resumed else 0
                length = response.headers.get("content-length")
                total = have + int(length) if length else None
                with partial.open("ab" if resumed else "wb") as out:
                    # as sent: no buffer whose content a broken connection would lose
                    for chunk in response.iter_raw():
                        have += out.write(chunk)
                        if have > limits.SOURCE:
                            excess = f"sent more than {limits.SOURCE} bytes, which no source has"
                            raise NotAttempted(f"{link.redacted} {excess}")
                        progress(link.filename, have, total)
        except HTTPX.HTTPError as error:
            raise NotAttempted(str(error) or repr(error)) from None
        except OSError as error:  # a full disk stays full with what is there
            partial.unlink(missing_ok=True)
            raise Failed(f"cannot write {partial}: {error.strerror}. Make room") from None
