# SPDX-License-Identifier: BSD-3-Clause
"""Sources come first: fetched, checked by sha256 and kept, so that a build never downloads.

Two kinds: `url:` of an upstream host, and `${{ env.get("PYPI_SOURCES") }}/FILE`, a file of PyPI
that the recipe's `extra.purls` name by package URL. The latter comes through pip's own configured
index, so a mirror, a proxy or a wheel folder that pip knows serves us too.
"""

from __future__ import annotations

import json
import lzma
import shutil
import tarfile
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import siphash24
from filelock import FileLock
from packageurl import PackageURL
from pip._internal.models.link import Link

from forge.errors import ForgeError, NotAttempted, Refused
from forge.files import sha256_file, write_text
from forge.project import Project
from forge.sources import git as git_sources
from forge.sources.download import UNREACHABLE, Progress, download, link_to

PYPI_SOURCES = "PYPI_SOURCES"
# Where rendered recipes see PyPI's files. A build never opens it: rattler-build finds them in its
# cache. Its rebuild has no cache that could be filled, hence a place relative to the process.
PYPI_URL = "file:///proc/self/cwd/pypi-sources"
ARCHIVES = (".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar", ".zip")


@dataclass(frozen=True)
class Source:
    """One file that a recipe names, or one git commit. `purl` is set for a file of PyPI.

    `mirrors` are further URLs of the same bytes, tried in turn. For a git source `commit` is set,
    and `sha256` empty.
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
        """What names its content: sha256 or commit."""
        return self.sha256 or self.commit

    @property
    def origin(self) -> str:
        return str(self.purl or self.url)


class SourceCache:
    """Sources by content: `build/sources/SHA256/FILE` or `COMMIT/NAME.git`.

    What is there under its name is whole.
    """

    def __init__(self, project: Project) -> None:
        self.folder = project.sources

    def path(self, source: Source) -> Path:
        return self.folder / source.digest / source.file_name

    def fetch(self, source: Source, progress: Progress) -> Path:
        """Bring one source into the cache, going on where an interrupted download ended.

        Raises NotAttempted when no URL of it can be reached, ForgeError when its sha256 is not
        the recipe's.
        """
        path = self.path(source)
        if path.exists():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        # `sources fetch` beside a build would write into the same partial file
        with FileLock(path.parent / ".lock"):
            return path if path.exists() else self._fetch(source, path, progress)

    def _fetch(self, source: Source, path: Path, progress: Progress) -> Path:
        partial = path.with_name(path.name + ".partial")
        if source.commit:
            try:
                git_sources.fetch(source.url, source.commit, path)
            except NotAttempted as error:
                raise NotAttempted(f"{source.origin} cannot be reached ({error})") from None
            return path
        try:
            self._download_any(source, partial, progress)
        except NotAttempted as error:
            raise NotAttempted(
                f"{error}. Download it on another machine and run: forge sources add FILE "
                f"(sha256 {source.sha256})"
            ) from None
        return self._accept(partial, source)

    def pin(self, source: Source, progress: Progress) -> Source:
        """Download a file whose sha256 is still to be found, and keep it under what was found.

        Nothing of an earlier try is used: bytes of two files would give the sha256 of neither.
        Raises NotAttempted like fetch, Refused for a file that is no whole archive, or that has
        another sha256 than pip's index gives.
        """
        partial = self.folder / f"pin-{cache_key(source.url, '')}" / f"{source.file_name}.partial"
        shutil.rmtree(partial.parent, ignore_errors=True)
        partial.parent.mkdir(parents=True)
        try:
            link = self._download_any(source, partial, progress)
            found = sha256_file(partial)
            if link.hash_name == "sha256" and link.hash != found:
                raise Refused(
                    f"{source.origin} has sha256 {found}, but pip's index says {link.hash}: "
                    "damaged on its way, or tampered with; nothing of it was kept"
                )
            if not is_whole(partial):
                raise Refused(
                    f"{link.url_without_fragment} is no whole archive: cut off, or an error's page?"
                )
            pinned = replace(source, sha256=found)
            if not self.path(pinned).exists():
                self.path(pinned).parent.mkdir(parents=True, exist_ok=True)
                partial.replace(self.path(pinned))
            return pinned
        finally:
            shutil.rmtree(partial.parent, ignore_errors=True)

    def add(self, file: Path, known: list[Source]) -> Source:
        """Take what somebody brought by hand. Raises ForgeError if no recipe wants it."""
        if file.is_dir():
            return self._add_repository(file, known)
        found = sha256_file(file)
        for source in known:
            if source.sha256 == found:
                path = self.path(source)
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    partial = path.with_name(path.name + ".partial")
                    shutil.copyfile(file, partial)
                    self._accept(partial, source)
                return source
        named = [source.sha256 for source in known if source.file_name == file.name]
        wanted = f"; a recipe wants a {file.name} with sha256 {named[0]}" if named else ""
        raise ForgeError(f"{file} has sha256 {found}, which no recipe names{wanted}")

    def _add_repository(self, folder: Path, known: list[Source]) -> Source:
        wanted = [s for s in known if s.commit and s.file_name == folder.name]
        for source in wanted:
            if git_sources.intact(folder, source.commit):
                path = self.path(source)
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    git_sources.copy(folder, source.commit, path)
                return source
        names = " or ".join(source.commit for source in wanted) or "no recipe names one"
        raise ForgeError(f"{folder} is not an intact repository of the wanted commit: {names}")

    def state(self, source: Source) -> str:
        """`absent`, `partial`, `whole`, or `changed` when its bytes are no longer the recipe's."""
        path = self.path(source)
        if not path.exists():
            return "partial" if path.with_name(path.name + ".partial").exists() else "absent"
        if source.commit:
            return "whole" if git_sources.intact(path, source.commit) else "changed"
        return "whole" if sha256_file(path) == source.sha256 else "changed"

    def export(self, sources: list[Source], folder: Path) -> int:
        """Copy the cached of `sources` to FOLDER as they lie in the cache.

        A SHA256SUMS beside them is for sha256sum -c; git repositories prove themselves.

        Returns how many; raises ForgeError for a file whose bytes were changed in the cache.
        """
        present = [source for source in sources if self.path(source).exists()]
        lines = []
        for source in present:
            path, name = self.path(source), f"{source.digest}/{source.file_name}"
            if self.state(source) != "whole":
                raise ForgeError(f"{path} was changed since it was fetched; delete it, fetch again")
            if not (folder / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                if source.commit:
                    git_sources.copy(path, source.commit, folder / name)
                    continue
                temporary = folder / f"{name}.partial"
                shutil.copyfile(path, temporary)
                temporary.replace(folder / name)
            lines += [] if source.commit else [f"{source.sha256}  {name}"]
        write_text(folder / "SHA256SUMS", "".join(f"{line}\n" for line in sorted(set(lines))))
        return len(present)

    def _download_any(self, source: Source, partial: Path, progress: Progress) -> Link:
        """Download from the first URL that answers; returns it as pip's link."""
        reasons = []
        for url in (source.url, *source.mirrors):
            try:
                with link_to(url, source.purl) as (session, link):
                    download(session, link.url_without_fragment, partial, progress)
                    return link
            except NotAttempted as error:
                reasons.append(f"{url}: {error}" if source.mirrors else str(error))
        raise NotAttempted(f"{source.origin} cannot be reached ({'; '.join(reasons)})")

    def _accept(self, partial: Path, source: Source) -> Path:
        found = sha256_file(partial)
        if found != source.sha256:
            partial.unlink()
            raise ForgeError(
                f"{source.origin} has sha256 {found}, but the recipe says {source.sha256}. "
                "If upstream really changed the file, check why before you change the recipe"
            )
        return partial.replace(self.path(source))

    def prefill(self, source: Source, folder: Path) -> None:
        """Put a source where rattler-build looks before it downloads (`OUTPUT/src_cache`).

        The layout is rattler-build 0.73's (crates/rattler_build_source_cache).
        Raises ForgeError when the cached file was changed since it was fetched.
        """
        path = self.path(source)
        if source.commit:
            self._prefill_repository(source, folder)
            return
        if sha256_file(path) != source.sha256:
            path.unlink()
            raise ForgeError(f"{path} was changed since it was fetched; run the command again")
        key = cache_key(source.url, source.sha256)
        folder.mkdir(parents=True, exist_ok=True)
        name, extracted = f"{key}_{source.file_name}", None
        (folder / name).symlink_to(path.resolve())
        if name.endswith(ARCHIVES):
            extracted = f"{key}_extracted"
            unpack(path, folder / extracted)
        _enter(folder, key, source_type="url", url=source.url, cache_path=name,
               checksum=source.sha256, checksum_type="sha256", extracted_path=extracted)  # fmt: skip

    def _prefill_repository(self, source: Source, folder: Path) -> None:
        path = self.path(source)
        if not git_sources.intact(path, source.commit):
            raise ForgeError(f"{path} was changed since it was fetched; delete it, fetch again")
        key = f"git_{cache_key(source.url, source.commit)}"
        git_sources.check_out(path, folder / key)
        _enter(folder, key, source_type="git", url=source.url, cache_path=key,
               git_commit=source.commit, git_rev=source.commit)  # fmt: skip


def _enter(folder: Path, key: str, **known: str | None) -> None:
    """Write an entry of rattler-build's index; the times only steer its own clean-up."""
    fields = (
        "checksum", "checksum_type", "actual_filename", "git_commit", "git_rev", "extracted_path",
        "lock_file",
    )  # fmt: skip
    entry = dict.fromkeys(fields) | {"attestation_verified": False} | known
    entry |= dict.fromkeys(("last_accessed", "created"), "2026-01-01T00:00:00Z")
    file = folder / ".metadata" / f"{key}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(entry))


def cache_key(url: str, sha256: str) -> str:
    """rattler-build's name for a source: SipHash-1-3 of url and checksum, each ended by 0xff."""
    parts = b"".join(text.encode() + b"\xff" for text in (url, sha256))
    # its own intdigest() is signed
    return f"{int.from_bytes(siphash24.siphash13(parts, key=bytes(16)).digest(), 'little'):x}"


def is_whole(archive: Path) -> bool:
    """Whether a wheel or an archive can be read to its end.

    A host that names no length may end at any byte.
    """
    if zipfile.is_zipfile(archive):  # its list of files is its end
        return True
    try:
        with tarfile.open(archive) as tar:
            return len(tar.getmembers()) > 0
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError):
        return False


def unpack(archive: Path, target: Path) -> None:
    """Unpack as rattler-build does: a single top folder is dropped."""
    temporary = target.with_suffix(".unpacking")
    if archive.suffix == ".zip":
        shutil.unpack_archive(archive, temporary)
    else:
        with tarfile.open(archive) as tar:
            # CPython before 3.11.4 has no filters; the archive is the one that the sha256 names
            tar.extraction_filter = getattr(tarfile, "tar_filter", lambda member, _: member)
            tar.extractall(temporary)
    top = list(temporary.iterdir())
    if len(top) == 1 and top[0].is_dir():
        top[0].replace(target)
        temporary.rmdir()
    else:
        temporary.replace(target)


def remote_size(source: Source) -> int | None:
    """Bytes of a source as its server tells them, or None."""
    try:
        with link_to(source.url, source.purl) as (session, link):
            url = link.url_without_fragment
            length = session.head(url, allow_redirects=True).headers.get("content-length")
            return int(length) if length else None
    except (*UNREACHABLE, NotAttempted):
        return None
