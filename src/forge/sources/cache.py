# SPDX-License-Identifier: BSD-3-Clause
"""The cache of sources. A source is fetched and verified before a build.

In recipes, `url: ${{ pypi }}/FILE` means a file on PyPI whose package URL is in `extra.purls`. The
file is fetched from the index in pip's configuration, which may be a mirror or a folder of wheels.
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

from forge.conda.scratch import scratch
from forge.errors import ForgeError, NotAttempted, Refused
from forge.files import require_file, sha256_file, write_text
from forge.project import Project
from forge.sources import git
from forge.sources.archives import ARCHIVES, unpack

if TYPE_CHECKING:
    from forge.sources.download import Downloader

PYPI_SOURCES = "PYPI_SOURCES"
# The URL of the folder of PyPI's files in rendered recipes. The folder need not exist, because the
# driver puts the sources into rattler-build's cache before a build.
PYPI_URL = "file:///proc/self/cwd/pypi-sources"
DIGEST = re.compile("[0-9a-f]{64}|[0-9a-f]{40}")
FILE_NAME = re.compile(r"[^./\\\x00-\x20\x7f][^/\\\x00-\x20\x7f]{0,199}")
# Shows the progress of a download. The arguments are the name of the file, the number of bytes so
# far, and the size of the file, if known.
Progress = Callable[[str, int, int | None], None]
# The time stamp in entries of rattler-build's cache. It can be in the past, because rattler-build
# does not remove old entries during a run.
ENTRY_TIME = "2026-01-01T00:00:00Z"


@dataclass(frozen=True)
class Source:
    """A file or a git commit that a recipe names.

    Attributes:
        url: The URL of the file or the repository.
        sha256: The digest of the file; empty for a git commit.
        purl: The package URL of a file on PyPI; None for other sources.
        mirrors: Further URLs of the same file, which are tried in turn.
        commit: The full hash of a git commit; empty for a file.
    """

    url: str
    sha256: str
    purl: PackageURL | None = None
    mirrors: tuple[str, ...] = ()
    commit: str = ""

    def __post_init__(self) -> None:
        """Raise ForgeError if the digest or the file name cannot be part of a path in the cache."""
        if not DIGEST.fullmatch(self.digest):
            raise ForgeError(f"{self.url}: {self.digest!a:.80} is not a lower-case {self.kind}")
        if not FILE_NAME.fullmatch(self.file_name):
            reason = "which the cache does not accept as a file name: use another URL"
            raise ForgeError(f"{self.url} ends in {self.file_name!a:.80}, {reason}")

    @property
    def file_name(self) -> str:
        """The last part of the URL."""
        return self.url.rsplit("/", 1)[1]

    @property
    def digest(self) -> str:
        """The sha256 or the commit."""
        return self.sha256 or self.commit

    @property
    def kind(self) -> str:
        """The kind of `digest`: "sha256" or "commit"."""
        return "commit" if self.commit else "sha256"

    @property
    def origin(self) -> str:
        """The package URL if there is one, else the URL."""
        return str(self.purl or self.url)


class SourceCache:
    """The cache of sources: `build/sources/SHA256/FILE` and `build/sources/COMMIT/NAME.git`.

    Attributes:
        folder: The folder of the cache.
    """

    def __init__(self, project: Project) -> None:
        self.folder = project.sources

    @cached_property
    def _downloader(self) -> "Downloader":
        # Imported only here, because it loads unearth, which most commands do not need.
        from forge.sources.download import Downloader

        return Downloader()

    def path(self, source: Source) -> Path:
        """Return the path that a source has in the cache. The path need not exist."""
        return self.folder / source.digest / source.file_name

    def fetch(self, source: Source, progress: Progress) -> Path:
        """Fetch a source unless the cache has it, and return its path.

        A partial download of a file is continued. A partial fetch of a git commit begins again.

        Raises:
            NotAttempted: No server sends the source.
            Refused: The file's sha256 differs from that of the source.
        """
        return self._store(source, lambda partial: self._download(source, partial, progress))

    def take(self, file: Path, source: Source) -> Path:
        """Move a file into the cache unless the cache has it, and return its path there.

        Raises:
            Refused: The file's sha256 differs from that of the source.
        """
        return self._store(source, file.replace)

    def _store(self, source: Source, write: Callable[[Path], object]) -> Path:
        """Return the path of a source in the cache. Call `write` unless the source is whole."""
        path = self.path(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without the lock, a build and `sources fetch` could write the same partial file.
        with FileLock(path.parent / ".lock"):
            if self.state(source) == "whole":
                return path
            partial = _partial_of(path)
            write(partial)
            if source.sha256:
                sha256 = sha256_file(partial)
                if sha256 != source.sha256:
                    raise Refused(self._describe_difference(source, partial, sha256))
            # An existing file is incomplete or damaged: remove it.
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            return partial.replace(path)

    def _describe_difference(self, source: Source, file: Path, sha256: str) -> str:
        """Return a message that a sha256 differs. It also states what the user can do.

        The file is deleted if it is damaged, or if pip's index states another sha256. Otherwise it
        is kept in the cache under its actual sha256.

        Args:
            source: The source as the recipe names it.
            file: The file that was fetched for it.
            sha256: The sha256 of that file.

        Raises:
            NotAttempted: pip's index does not offer the file any more.
        """
        difference = f"{source.origin} has sha256 {sha256}, the recipe says {source.sha256}"
        link = self._downloader.locate(source.url, source.purl)
        stated = (link.hash_option or {}).get("sha256", [])
        try:
            if stated and sha256 not in stated:
                raise Refused(f"pip's index states {stated[0]}: damaged in transit, or forged")
            if source.file_name.endswith((*ARCHIVES, ".whl")):
                with scratch(self.folder) as folder:
                    unpack(file, Path(folder, "tree"), only=())
        except Refused as error:
            file.unlink()
            return f"{difference}. It was deleted: {error}"
        path = self.path(replace(source, sha256=sha256))
        path.parent.mkdir(exist_ok=True)
        file.replace(path)
        if stated:
            confirmation = "pip's index states the same"
        else:
            confirmation = "no index states it: ask upstream"
        return (
            f"{difference}; {confirmation}. If you have just changed the recipe to this release, "
            "write the file's sha256 into the recipe; if not, upstream replaced the file: find out "
            "why"
        )

    def _download(self, source: Source, partial: Path, progress: Progress) -> None:
        """Download a source from the first URL that sends it. Raise NotAttempted if none does."""
        reasons = []
        for url in (source.url, *source.mirrors):
            try:
                if source.commit:
                    git.fetch(url, source.commit, partial)
                else:
                    link = self._downloader.locate(url, source.purl)
                    self._downloader.download(link, partial, progress)
                return
            except NotAttempted as error:
                reasons.append(f"{url}: {error}" if source.mirrors else str(error))
        raise NotAttempted(
            f"{source.origin} cannot be fetched ({'; '.join(reasons)}); "
            f"get {source.kind} {source.digest} elsewhere and run: ./forge sources add FILE"
        )

    def add(self, file: Path, sources: list[Source]) -> Source:
        """Add a file, or a commit of a repository, to the cache.

        Args:
            file: A file or a git repository.
            sources: The sources that recipes name.

        Returns:
            The matching source.

        Raises:
            ForgeError: No source matches the file or the repository, or the file cannot be read.
        """
        require_file(file)
        try:
            sha256 = "" if file.is_dir() else sha256_file(file)
        except OSError as error:
            raise ForgeError(f"{file} cannot be read: {error.strerror}") from None
        for source in sources:
            if source.commit:
                if git.has_commit(file, source.commit):
                    url = file.absolute().as_uri()
                    self._store(source, functools.partial(git.fetch, url, source.commit))
                    return source
            elif source.sha256 == sha256:
                self._store(source, functools.partial(shutil.copyfile, file))
                return source
        content = f"has sha256 {sha256}, which no" if sha256 else "has no commit that a"
        digests = [source.digest for source in sources if source.file_name == file.name]
        hint = f"; a recipe names a {file.name} with {digests[0]}" if digests else ""
        raise ForgeError(f"{file} {content} recipe names{hint}")

    def state(self, source: Source) -> str:
        """Return the state of a source in the cache.

        Returns:
            "absent", "partial", "whole", or "changed" if the content does not match the digest.
        """
        path = self.path(source)
        if not path.exists():
            return "partial" if _partial_of(path).exists() else "absent"
        if source.commit:
            is_whole = git.has_commit(path, source.commit, intact=True)
        else:
            is_whole = sha256_file(path) == source.sha256
        return "whole" if is_whole else "changed"

    def prefill(
        self,
        source: Source,
        folder: Path,
        only: Collection[str] | None = None,
        packed: bool = False,
    ) -> Path:
        """Put a source into rattler-build's own cache, so that rattler-build does not download it.

        The layout is that of the crate rattler_build_source_cache in rattler-build 0.73.

        Args:
            source: A source that this cache has.
            folder: The folder of rattler-build's cache: OUTPUT/src_cache.
            only: The paths of the files to unpack from an archive; None for all files.
            packed: Do not unpack the source if it is an archive.

        Returns:
            The folder with the source's files, or with the file if it is not unpacked.

        Raises:
            ForgeError: The source has changed in this cache, or was removed from it.
            Refused: The archive cannot be unpacked safely; see `unpack`.
        """
        path = self.path(source)
        if self.state(source) != "whole":
            reason = "was changed or removed since it was fetched"
            raise ForgeError(f"{path} {reason}: run the same command again")
        key = cache_key(source.url, source.digest)
        folder.mkdir(parents=True, exist_ok=True)
        entry = {"last_accessed": ENTRY_TIME, "created": ENTRY_TIME}
        if source.commit:
            key = f"git_{key}"
            tree = folder / key
            git.check_out(path, source.commit, tree)
            entry["source_type"] = "git"
            entry["cache_path"] = key
            entry["git_commit"] = source.commit
        else:
            tree = path.parent
            name = f"{key}_{source.file_name}"
            (folder / name).symlink_to(path.resolve())
            entry["source_type"] = "url"
            entry["cache_path"] = name
            if name.endswith(ARCHIVES) and not packed:
                tree = folder / f"{key}_extracted"
                unpack(path, tree, only)
                entry["extracted_path"] = tree.name
        entry["url"] = source.url
        write_text(folder / ".metadata" / f"{key}.json", json.dumps(entry))
        return tree


def _partial_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def cache_key(url: str, digest: str) -> str:
    """Return the key of a source in rattler-build's cache.

    The key is the SipHash-1-3 of the URL and the digest, each followed by 0xff.
    """
    parts = b"".join(text.encode() + b"\xff" for text in (url, digest))
    hashed = siphash24.siphash13(parts, key=bytes(16)).digest()
    # intdigest() would return a signed number.
    number = int.from_bytes(hashed, "little")
    return f"{number:x}"
