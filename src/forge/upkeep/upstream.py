# SPDX-License-Identifier: BSD-3-Clause
"""What upstream has released.

Where releases are listed follows from the recipe: a package URL of PyPI means pip's index, one of
GitHub the repository's tags; without either it is the page of the first source's folder.
"""

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from packaging.version import VERSION_PATTERN, InvalidVersion, Version
from unearth import Link
from unearth.collector import LinkCollectError, fetch_page, parse_html_page

from forge.errors import NotAttempted
from forge.recipes.recipe import Recipe, purls_of, sources_of
from forge.sources import git
from forge.sources.download import UNREADABLE, Downloader

VERSION = re.compile(VERSION_PATTERN, re.VERBOSE | re.IGNORECASE)


@dataclass(frozen=True)
class Release:
    """One released version, as upstream writes it. `yanked` is the reason, if it was yanked."""

    version: str
    yanked: str = ""

    @property
    def key(self) -> Version:
        """By which releases are ordered."""
        return Version(self.version)


def newest(releases: list[Release]) -> Release | None:
    """The latest release that is neither yanked nor a pre-release."""
    usual = [r for r in releases if not (r.yanked or r.key.is_prerelease)]
    return max(usual, key=lambda release: release.key, default=None)


def listed_at(recipe: Recipe) -> str:
    """Where the releases of a recipe's upstream are listed; empty for what is made here."""
    purls = {purl.type: purl for purl in purls_of(recipe)}
    if "pypi" in purls:
        return "PyPI"
    if "github" in purls:
        return f"tags of {purls['github'].namespace}/{purls['github'].name} on GitHub"
    sources = sources_of(recipe)
    return f"{sources[0].url.rpartition('/')[0]}/" if sources else ""


def releases(downloader: Downloader, recipe: Recipe) -> list[Release]:
    """Every release of a recipe's upstream, oldest first. Raises NotAttempted."""
    purls = {purl.type: purl for purl in purls_of(recipe)}
    if "pypi" in purls:
        found = _on_index(downloader, purls["pypi"].name)
    else:
        if "github" in purls:
            purl = purls["github"]
            names = git.tags(f"https://github.com/{purl.namespace}/{purl.name}")
            example = purl.version or ""
        else:
            folder, _, example = sources_of(recipe)[0].url.rpartition("/")
            names = _names_on_page(downloader, f"{folder}/")
        found = [Release(v) for v in versions_in(names, example, recipe.version)]
    return sorted(set(found), key=lambda release: release.key)


def _on_index(downloader: Downloader, project: str) -> list[Release]:
    yanked: dict[str, list[str]] = {}
    for file in downloader.files_of(project):
        # a local version is somebody's own build, in a wheel folder
        if file.version and VERSION.fullmatch(file.version) and not Version(file.version).local:
            # the reason is empty or True where upstream gives none
            reason = file.link.yank_reason if isinstance(file.link.yank_reason, str) else ""
            why = (reason or "no reason given") if file.link.is_yanked else ""
            yanked.setdefault(file.version, []).append(why)
    return [Release(v, reasons[0] if all(reasons) else "") for v, reasons in yanked.items()]


def _names_on_page(downloader: Downloader, url: str) -> list[str]:
    try:
        links = parse_html_page(fetch_page(downloader.client, Link(url)))
        names = [link.filename for link in links if link.filename]
    except (*UNREADABLE, LinkCollectError) as error:
        raise NotAttempted(f"{url}: {error!s:.300}") from None
    if not names:
        raise NotAttempted(f"{url} lists no files")
    return names


def versions_in(names: Iterable[str], example: str, version: str) -> list[str]:
    """The versions that `names` stand for, given that `example` stands for `version`.

    A name may leave out zeros at the end: AOTriton's tag 0.12b is 0.12.0.
    """
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
        if written != version:
            text += ".0" * (version.count(".") - text.count("."))
        with contextlib.suppress(InvalidVersion):
            Version(text)
            versions.append(text)
    return versions
