# SPDX-License-Identifier: BSD-3-Clause
"""Sources are fetched first, verified and kept, so that a build never downloads.

`url: ${{ pypi }}/FILE` is a file of PyPI whose package URL is in `extra.purls`, found on the index
that pip is configured for: a mirror or a wheel folder will do.
"""

import functools
import json
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import siphash24
from filelock import FileLock
from packageurl import PackageURL

from forge.conda.package import scratch
from forge.errors import ForgeError, NotAttempted, Refused
from forge.files import sha256_file, write_text
from forge.project import Project
from forge.sources import git
from forge.sources.archives import ARCHIVES, unpack

if TYPE_CHECKING:
    from forge.sources.download import Downloader

PYPI_SOURCES = "PYPI_SOURCES"
# Where rendered recipes see PyPI's files; our builds find them in rattler-build's cache instead.
PYPI_URL = "file:///proc/self/cwd/pypi-sources"
DIGEST = re.compile("[0-9a-f]{64}|[0-9a-f]{40}")
FILE_NAME = re.compile(r"[^./\\\x00-\x20\x7f][^/\\\x00-\x20\x7f]{0,199}")
Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, in all if known


@dataclass(frozen=True)
class Source:
    """A file that a recipe names (of PyPI: with `purl`), or a git commit (with an empty `sha256`).

    `mirrors` are further URLs of the same bytes, tried in turn.
    """

    url: str
    sha256: str
    purl: PackageURL | None = None
    mirrors: tuple[str, ...] = ()
    commit: str = ""

    def __post_init__(self) -> None:
        """Raise ForgeError for a digest or a file name that would lead out of the cache."""
        if not DIGEST.fullmatch(self.digest):
            raise ForgeError(f"{self.url}: {self.digest!a:.80} is no {self.kind} in lower case")
        if not FILE_NAME.fullmatch(self.file_name):
            where = f"{self.url} ends in {self.file_name!a:.80}"
            raise ForgeError(f"{where}, which cannot be the name of a file: name another URL")

    @property
    def file_name(self) -> str:
        """The last part of its URL."""
        return self.url.rsplit("/", 1)[1]

    @property
    def digest(self) -> str:
        """Its sha256 or commit."""
        return self.sha256 or self.commit

    @property
    def kind(self) -> str:
        """What the digest is."""
        return "commit" if self.commit else "sha256"

    @property
    def origin(self) -> str:
        """Its package URL, else its URL."""
        return str(self.purl or self.url)


class SourceCache:
    """Complete sources by content: `build/sources/SHA256/FILE` or `COMMIT/NAME.git`."""

    def __init__(self, project: Project) -> None:
        self.folder = project.sources

    @cached_property
    def _downloader(self) -> "Downloader":
        from forge.sources.download import Downloader  # unearth, which most commands do without

        return Downloader()

    def path(self, source: Source) -> Path:
        """Return where a source is or would be."""
        return self.folder / source.digest / source.file_name

    def fetch(self, source: Source, progress: Progress) -> Path:
        """Fetch a source, or the rest of it. Raises NotAttempted, Refused for another sha256."""
        return self._keep(source, lambda partial: self._download(source, partial, progress))

    def take(self, file: Path, source: Source) -> Path:
        """Move a file into the cache. Raises Refused for another sha256."""
        return self._keep(source, file.replace)

    def _keep(self, source: Source, bring: Callable[[Path], object]) -> Path:
        """Have a source in the cache: `bring` writes it to a path where it is missing."""
        path = self.path(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        # `sources fetch` beside a build would write into the same partial file
        with FileLock(path.parent / ".lock"):
            if self.state(source) == "whole":
                return path
            bring(partial := _partial(path))
            if source.sha256 and (found := sha256_file(partial)) != source.sha256:
                raise Refused(self._another(source, partial, found))
            # a cut or damaged copy
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            return partial.replace(path)

    def _another(self, source: Source, file: Path, found: str) -> str:
        """Say why a file is not the recipe's, and whether its sha256 may be written there.

        One that may is kept under that sha256; any other is deleted.
        """
        wrong = f"{source.origin} has sha256 {found}, the recipe says {source.sha256}"
        link = self._downloader.locate(source.url, source.purl)
        stated = (link.hash_option or {}).get("sha256", [])
        try:
            if stated and found not in stated:
                raise Refused(f"pip's index states {stated[0]}: damaged in transit, or forged")
            if source.file_name.endswith((*ARCHIVES, ".whl")):
                with scratch(self.folder) as folder:
                    unpack(file, Path(folder, "tree"), ())
        except Refused as error:
            file.unlink()
            return f"{wrong}. It was deleted: {error}"
        kept = self.path(replace(source, sha256=found))
        kept.parent.mkdir(exist_ok=True)
        file.replace(kept)
        says = "pip's index states the same" if stated else "no index states it: ask upstream"
        move = "If the recipe has just moved to this release, write that sha256 into it"
        return f"{wrong}; {says}. {move}; if not, upstream replaced the file: find out why"

    def _download(self, source: Source, partial: Path, progress: Progress) -> None:
        """Download from the first URL that answers."""
        reasons = []
        for url in (source.url, *source.mirrors):
            try:
                if source.commit:
                    return git.fetch(url, source.commit, partial)
                link = self._downloader.locate(url, source.purl)
                return self._downloader.download(link, partial, progress)
            except NotAttempted as error:
                reasons.append(f"{url}: {error}" if source.mirrors else str(error))
        hint = f"; get {source.kind} {source.digest} elsewhere and run: forge sources add FILE"
        raise NotAttempted(f"{source.origin} cannot be reached ({'; '.join(reasons)}){hint}")

    def add(self, file: Path, sources: list[Source]) -> Source:
        """Take a file, or a repository's commit. Raises ForgeError if no recipe names it."""
        digest = "" if file.is_dir() else sha256_file(file)
        for source in sources:
            if git.holds(file, source.commit) if source.commit else digest == source.sha256:
                copy = functools.partial(shutil.copyfile, file)
                clone = functools.partial(git.fetch, file.absolute().as_uri(), source.commit)
                self._keep(source, clone if source.commit else copy)
                return source
        named = [source.digest for source in sources if source.file_name == file.name]
        hint = f"; a recipe names a {file.name} with {named[0]}" if named else ""
        what = f"has sha256 {digest}, which" if digest else "has no commit that"
        raise ForgeError(f"{file} {what} no recipe names{hint}")

    def state(self, source: Source) -> str:
        """Say `absent`, `partial`, `whole`, or `changed`: its bytes are no longer the recipe's."""
        path = self.path(source)
        if path.exists():
            if source.commit:
                return "whole" if git.holds(path, source.commit, intact=True) else "changed"
            return "whole" if sha256_file(path) == source.sha256 else "changed"
        return "partial" if _partial(path).exists() else "absent"

    def prefill(
        self,
        source: Source,
        folder: Path,
        only: Collection[str] | None = None,
        packed: bool = False,
    ) -> Path:
        """Put a source where rattler-build 0.73 looks before it downloads (`OUTPUT/src_cache`).

        Returns the folder of its files; `only` is for `unpack`, which a `packed` source is spared.
        The layout: its crate rattler_build_source_cache; times only serve its clean-up. Raises
        Refused as `unpack` does.
        """
        path, key = self.path(source), cache_key(source.url, source.digest)
        if self.state(source) != "whole":
            raise ForgeError(f"{path} was changed since it was fetched: run the same command again")
        entry = dict.fromkeys(("last_accessed", "created"), "2026-01-01T00:00:00Z")
        tree, name = path.parent, f"{key}_{source.file_name}"
        folder.mkdir(parents=True, exist_ok=True)
        if source.commit:
            key = f"git_{key}"
            tree = folder / key
            git.check_out(path, source.commit, tree)
            entry |= {"source_type": "git", "cache_path": key, "git_commit": source.commit}
        else:
            (folder / name).symlink_to(path.resolve())
            entry |= {"source_type": "url", "cache_path": name}
            if name.endswith(ARCHIVES) and not packed:
                tree = folder / f"{key}_extracted"
                unpack(path, tree, only)
                entry["extracted_path"] = tree.name
        write_text(folder / ".metadata" / f"{key}.json", json.dumps(entry | {"url": source.url}))
        return tree


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def cache_key(url: str, digest: str) -> str:
    """Make rattler-build's name for a source: SipHash-1-3 of url and digest, each ended by 0xff."""
    parts = b"".join(text.encode() + b"\xff" for text in (url, digest))
    # its own intdigest() is signed
    return f"{int.from_bytes(siphash24.siphash13(parts, key=bytes(16)).digest(), 'little'):x}"
