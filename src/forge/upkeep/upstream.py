# SPDX-License-Identifier: BSD-3-Clause
"""What upstream says: which versions of a package it has released, and what they require.

Where to ask follows from the recipe: its package URL means pip's configured index, a github.com URL
the repository's tags, any other URL the listing of its folder. Nothing is kept; sources.py
downloads.
"""

from __future__ import annotations

import email
import html.parser
import re
import tarfile
import urllib.parse
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packageurl import PackageURL
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version
from pip._internal.network.lazy_wheel import HTTPRangeRequestUnsupported, dist_from_wheel_url

from forge.errors import NotAttempted
from forge.sources import git as git_sources
from forge.sources.download import UNREACHABLE, pip_session, reason_of

GITHUB = re.compile(
    r"(?P<repository>https://github\.com/[^/]+/[^/]+)/"
    r"(archive/refs/tags/(?P<archive>[^/]+)\.tar\.gz|releases/download/(?P<asset>[^/]+)/[^/]+)"
)
# Where our packages run: markers of requirements are read for it.
TARGET = {
    "os_name": "posix", "sys_platform": "linux", "platform_system": "Linux",
    "platform_machine": "x86_64", "python_version": "3.12", "python_full_version": "3.12.0",
    "implementation_name": "cpython", "platform_python_implementation": "CPython", "extra": "",
}  # fmt: skip


@dataclass(frozen=True)
class Release:
    """One released version, as upstream writes it. `yanked` is the reason, where it was yanked."""

    version: str
    yanked: str = ""

    @property
    def key(self) -> Version:
        return Version(self.version)

    @property
    def usual(self) -> bool:
        """Whether one would take it without being told to."""
        return not (self.yanked or self.key.is_prerelease)


@dataclass(frozen=True)
class Place:
    """Where the releases of one package are listed.

    `example` is the name in that list that belongs to `version`: it tells how names follow from
    versions. Of PyPI only `name` is needed.
    """

    kind: str  # pypi, git or listing
    name: str
    example: str = ""

    @classmethod
    def of(cls, url: str, purl: PackageURL | None) -> Place:
        """The place for a source's URL and package URL, of which the latter is asked first."""
        if purl is not None and purl.type == "pypi":
            return cls("pypi", purl.name)
        if found := GITHUB.match(url):
            return cls("git", found["repository"], found["archive"] or found["asset"])
        folder, _, file = url.rpartition("/")
        return cls("listing", f"{folder}/", file)

    def __str__(self) -> str:
        words = {"pypi": "PyPI", "git": f"tags of {self.name}", "listing": self.name}
        return words[self.kind]

    def releases(self, version: str) -> list[Release]:
        """Every release, oldest first; `version` is the one of our recipe.

        Raises NotAttempted when the place cannot be asked.
        """
        if self.kind == "pypi":
            found = _on_index(self.name)
        else:
            names = git_sources.tags(self.name) if self.kind == "git" else links(self.name)
            found = [Release(v) for v in versions_in(names, self.example, version)]
        return sorted(set(found), key=lambda release: release.key)


def _on_index(name: str) -> list[Release]:
    with pip_session() as (_, finder):
        candidates = finder.find_all_candidates(name)
    if not candidates:
        raise NotAttempted(f"pip's index offers no {name}")
    yanked: dict[str, list[str | None]] = {}
    for candidate in candidates:
        # a local version is somebody's own build in a wheel folder that pip knows
        if not Version(str(candidate.version)).local:
            yanked.setdefault(str(candidate.version), []).append(candidate.link.yanked_reason)
    return [
        Release(version, "" if None in reasons else str(reasons[0] or "no reason given"))
        for version, reasons in yanked.items()
    ]


def versions_in(names: Iterable[str], example: str, version: str) -> list[str]:
    """The versions that `names` stand for, when `example` stands for `version`.

    A name may leave out zeros at the end: AOTriton's tag 0.12b is 0.12.0.
    """
    parts = version.split(".")
    written = version
    while written not in example and written.endswith(".0"):
        written = written.removesuffix(".0")
    before, found, after = example.partition(written)
    if not found:
        return []
    pattern = re.compile(re.escape(before) + r"(\d[\w.+-]*?)" + re.escape(after))
    versions = []
    for match in filter(None, map(pattern.fullmatch, names)):
        text = match[1]
        if written != version and text.count(".") + 1 < len(parts):
            text += ".0" * (len(parts) - text.count(".") - 1)
        try:
            versions += [text] if Version(text) else []
        except InvalidVersion:
            continue
    return versions


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        path = urllib.parse.urlsplit(dict(attrs).get("href") or "").path if tag == "a" else ""
        self.found += [urllib.parse.unquote(path.rstrip("/").rpartition("/")[2])] if path else []


def links(url: str) -> list[str]:
    """The names that a web page of a folder links to. Raises NotAttempted where it has none."""
    with pip_session() as (session, _):
        try:
            with session.get(url) as response:
                if response.status_code >= 400:
                    raise NotAttempted(f"{url}: HTTP {response.status_code}")
                parser = _Links()
                parser.feed(response.text)
        except UNREACHABLE as error:
            raise NotAttempted(f"{url}: {reason_of(error)}") from None
    if not parser.found:
        raise NotAttempted(f"{url} lists no files")
    return parser.found


def requirements(name: str, version: str, known: Iterable[Path] = ()) -> list[Requirement]:
    """What a release on PyPI requires where our packages run, by the metadata of one of its files.

    Of a wheel only the metadata is read, by pip's range requests. An sdist is read from `known`
    files. Raises NotAttempted when neither serves.
    """
    texts = _metadata_of_wheel(name, version)
    if texts is None:
        files = [path for path in known if path.exists()]
        if not files:
            raise NotAttempted(f"pip's index has no wheel of {name} {version}, and its sdist is "
                               "not in the cache")  # fmt: skip
        texts = metadata_of(files[0]).get_all("Requires-Dist", [])
    found = []
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise NotAttempted(f"{name} {version} requires {text!r}: {error}") from None
        if requirement.marker is None or requirement.marker.evaluate(TARGET):
            found.append(requirement)
    return found


def _metadata_of_wheel(name: str, version: str) -> list[str] | None:
    with pip_session() as (session, finder):
        for candidate in finder.find_all_candidates(name):
            link = candidate.link
            if str(candidate.version) != version or not link.is_wheel:
                continue
            if link.is_file:
                return metadata_of(Path(link.file_path)).get_all("Requires-Dist", [])
            try:
                wheel: Any = dist_from_wheel_url(name, link.url_without_fragment, session)
                return [str(requirement) for requirement in wheel.iter_dependencies()]
            except HTTPRangeRequestUnsupported:
                raise NotAttempted(f"{link.filename}: its host serves no parts of files") from None
            except UNREACHABLE as error:
                raise NotAttempted(f"{link.filename}: {reason_of(error)}") from None
    return None


def metadata_of(file: Path) -> email.message.Message:
    """The metadata of a wheel or an sdist. Raises NotAttempted for a file without any."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as wheel:
            for name in wheel.namelist():
                if re.fullmatch(r"[^/]+\.dist-info/METADATA", name):
                    return email.message_from_bytes(wheel.read(name))
    elif tarfile.is_tarfile(file):
        with tarfile.open(file) as sdist:
            for member in sdist:
                if re.fullmatch(r"[^/]+/PKG-INFO", member.name) and (
                    stream := sdist.extractfile(member)
                ):
                    return email.message_from_bytes(stream.read())
    raise NotAttempted(f"{file.name} has no metadata")
