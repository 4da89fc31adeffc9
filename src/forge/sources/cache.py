# SPDX-License-Identifier: BSD-3-Clause
"""Sources are fetched first, verified and kept, so that a build never downloads.

`url: ${{ env.get("PYPI_SOURCES") }}/FILE` is a file of PyPI whose package URL is in `extra.purls`,
found on the index that pip is configured for: a mirror or a wheel folder will do.
"""

import json
import shutil
import tarfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import siphash24
from filelock import FileLock
from packageurl import PackageURL

from forge.errors import ForgeError, NotAttempted, Refused
from forge.files import sha256_file, write_text
from forge.project import Project
from forge.sources import git
from forge.sources.download import Downloader, Progress

PYPI_SOURCES = "PYPI_SOURCES"
# Where rendered recipes see PyPI's files; our builds find them in rattler-build's cache instead.
PYPI_URL = "file:///proc/self/cwd/pypi-sources"
ARCHIVES = tuple(ext for _, extensions, _ in shutil.get_unpack_formats() for ext in extensions)

if hasattr(tarfile, "tar_filter"):  # since CPython 3.11.4
    tarfile.TarFile.extraction_filter = staticmethod(tarfile.tar_filter)


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

    @property
    def file_name(self) -> str:
        return self.url.rsplit("/", 1)[1]

    @property
    def digest(self) -> str:
        return self.sha256 or self.commit

    @property
    def kind(self) -> str:
        return "commit" if self.commit else "sha256"

    @property
    def origin(self) -> str:
        return str(self.purl or self.url)


class SourceCache:
    """Complete sources by content: `build/sources/SHA256/FILE` or `COMMIT/NAME.git`."""

    def __init__(self, project: Project) -> None:
        self.folder = project.sources

    @cached_property
    def _downloader(self) -> Downloader:
        return Downloader()

    def path(self, source: Source) -> Path:
        return self.folder / source.digest / source.file_name

    def fetch(self, source: Source, progress: Progress) -> Path:
        """Bring a source into the cache, resuming an interrupted download.

        Raises NotAttempted if no URL of it can be reached, Refused for another sha256.
        """
        path = self.path(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        # `sources fetch` beside a build would write into the same partial file
        with FileLock(path.parent / ".lock"):
            if path.exists():
                return path
            partial = _partial(path)
            self.download(source, partial, progress)
            if source.sha256 and (found := sha256_file(partial)) != source.sha256:
                partial.unlink()
                wrong = f"{source.origin} has sha256 {found}, the recipe says {source.sha256}"
                raise Refused(f"{wrong}. Find out why before you change the recipe")
            return partial.replace(path)

    def download(self, source: Source, partial: Path, progress: Progress) -> str:
        """Download from the first URL that answers; returns the sha256 that pip's index states."""
        reasons = []
        for url in (source.url, *source.mirrors):
            try:
                if source.commit:
                    git.fetch(url, source.commit, partial)
                    return ""
                link = self._downloader.locate(url, source.purl)
                self._downloader.download(link, partial, progress)
                return ((link.hash_option or {}).get("sha256") or [""])[0]
            except NotAttempted as error:
                reasons.append(f"{url}: {error}" if source.mirrors else str(error))
        hint = f"get {source.kind} {source.digest} elsewhere and run: forge sources add FILE"
        raise NotAttempted(f"{source.origin} cannot be reached ({'; '.join(reasons)}); {hint}")

    def add(self, file: Path, sources: list[Source]) -> Source:
        """Take a file or repository obtained elsewhere. Raises ForgeError if no recipe names it."""
        digest = _digest(file)
        for source in sources:
            if source.digest == digest:
                if self.state(source) == "changed":
                    shutil.rmtree(self.path(source).parent)
                _copy(file, self.path(source))
                return source
        named = [source.digest for source in sources if source.file_name == file.name]
        hint = f"; a recipe names a {file.name} with {named[0]}" if named else ""
        what = f"has digest {digest}, which no recipe names" if digest else "is not intact"
        raise ForgeError(f"{file} {what}{hint}")

    def state(self, source: Source) -> str:
        """`absent`, `partial`, `whole`, or `changed` if its bytes are no longer the recipe's."""
        path = self.path(source)
        if path.exists():
            return "whole" if _digest(path) == source.digest else "changed"
        return "partial" if _partial(path).exists() else "absent"

    def export(self, sources: list[Source], folder: Path) -> int:
        """Copy the cached ones of `sources` to FOLDER, with a SHA256SUMS; returns their number."""
        present = [source for source in sources if self.path(source).exists()]
        for source in present:
            _copy(self._verified(source), folder / source.digest / source.file_name)
        lines = {f"{s.sha256}  {s.sha256}/{s.file_name}\n" for s in present if s.sha256}
        write_text(folder / "SHA256SUMS", "".join(sorted(lines)))
        return len(present)

    def prefill(self, source: Source, folder: Path) -> None:
        """Put a source where rattler-build 0.73 looks before it downloads (`OUTPUT/src_cache`).

        Its layout: crates/rattler_build_source_cache. The times only serve its clean-up.
        """
        path, key = self._verified(source), cache_key(source.url, source.digest)
        entry = dict.fromkeys(("last_accessed", "created"), "2026-01-01T00:00:00Z")
        entry["url"] = source.url
        folder.mkdir(parents=True, exist_ok=True)
        if source.commit:
            key = f"git_{key}"
            git.check_out(path, folder / key)
            entry |= {"source_type": "git", "cache_path": key, "git_commit": source.commit}
        else:
            name = f"{key}_{source.file_name}"
            (folder / name).symlink_to(path.resolve())
            entry |= {"source_type": "url", "cache_path": name}
            if name.endswith(ARCHIVES):
                unpack(path, folder / f"{key}_extracted")
                entry["extracted_path"] = f"{key}_extracted"
        write_text(folder / ".metadata" / f"{key}.json", json.dumps(entry))

    def _verified(self, source: Source) -> Path:
        if self.state(source) == "whole":
            return self.path(source)
        raise ForgeError(f"{self.path(source)} was changed since it was fetched; delete it")


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _digest(path: Path) -> str:
    return git.commit_of(path) if path.is_dir() else sha256_file(path)


def _copy(source: Path, target: Path) -> None:
    """Copy a file or a repository, complete or not at all."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(target)
    shutil.rmtree(partial, ignore_errors=True)
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, partial)
    partial.replace(target)


def cache_key(url: str, digest: str) -> str:
    """rattler-build's name for a source: SipHash-1-3 of url and digest, each ended by 0xff."""
    parts = b"".join(text.encode() + b"\xff" for text in (url, digest))
    # its own intdigest() is signed
    return f"{int.from_bytes(siphash24.siphash13(parts, key=bytes(16)).digest(), 'little'):x}"


def unpack(archive: Path, target: Path) -> None:
    """Unpack as rattler-build does: a single top folder is dropped."""
    temporary = target.with_suffix(".unpacking")
    shutil.unpack_archive(archive, temporary)
    top = list(temporary.iterdir())
    (top[0] if len(top) == 1 and top[0].is_dir() else temporary).replace(target)
    shutil.rmtree(temporary, ignore_errors=True)
