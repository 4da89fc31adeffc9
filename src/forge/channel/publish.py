# SPDX-License-Identifier: BSD-3-Clause
"""A channel in a folder that any static web server, mirror or bucket can serve.

The channel consists of the packages in the folder. `withdrawn.json` lists the packages that were
taken out of it. A change first copies new packages, then renames the shards and each index file
into place, and moves withdrawn packages out last. So an index never names a missing file. If a
command is killed, the next command completes its work.
"""

import json
import os
import re
import shutil
import stat
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rattler_build import assemble_package

from forge.channel import gate
from forge.conda import pypi
from forge.conda.index import FILE_NAME, find_fault, parse, records
from forge.conda.local import LocalChannel, write_index
from forge.conda.scratch import scratch
from forge.errors import Failed, ForgeError, Refused
from forge.files import copy_whole, hold, move_whole, read_text, sha256_file, write_text
from forge.project import SUBDIRS

# This file marks a folder as a published channel. In a new folder, it is written before the
# packages.
WITHDRAWN = "withdrawn.json"
PAGE = "index.html"
# tools/channel_page.py writes this tag.
GENERATOR = '<meta name="generator" content="strix-forge">'
HEADERS = "_headers"
UNPATCHED = "repodata_from_packages.json"
FORMS = (
    "repodata_shards.msgpack.zst",
    UNPATCHED,
    "repodata.json.zst",
    "repodata.json",
)


def _list_index_files() -> list[str]:
    names = []
    for form in FORMS:
        names += [f"{subdir}/{form}" for subdir in SUBDIRS]
    return names


INDEX_FILES = _list_index_files()


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


@dataclass(frozen=True)
class Withdrawal:
    """A package that was taken out of a published channel.

    Attributes:
        file: The package as SUBDIR/FILE. This name is never published again.
        sha256: The sha256 of the file.
        reason: One line for the channel's page.
        date: The day of the withdrawal in UTC, such as 2026-11-30.
    """

    file: str
    sha256: str
    reason: str
    date: str = field(default_factory=_today)

    def is_valid(self) -> bool:
        """Return whether `file` is a valid SUBDIR/FILE, and the other values are strings."""
        subdir, _, name = self.file.partition("/")
        if subdir not in SUBDIRS or not FILE_NAME.fullmatch(name):
            return False
        return all(isinstance(text, str) for text in (self.sha256, self.reason, self.date))


class PublishedChannel:
    """A channel in a folder that a web server serves, with the methods to change it.

    The methods that change the channel raise:

    - ForgeError if the folder is not a channel, if its list of withdrawn packages or its table of
      names is damaged, if another command is publishing to it, or if the packages to publish or
      the builds to withdraw do not exist
    - Refused if a package breaks a rule of `gate`, if the folder has a link, a pipe, a device or an
      index.html that tools/channel_page.py did not write, or if a withdrawn package would replace a
      different file
    - Failed if the folder cannot be read or written, or if a published file is missing or changed

    Attributes:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def withdrawn_folder(self) -> Path:
        """The folder of withdrawn packages, outside of the folder that a server serves."""
        return self.folder.with_name(f"{self.folder.name}-withdrawn")

    def publish(self, source: LocalChannel, validated: Set[str] | None = None) -> list[str]:
        """Add the packages of a local channel that are not published yet.

        Args:
            source: The local channel.
            validated: The sha256 of each validated file. Other files are refused.
                None accepts all files.

        Returns:
            The added packages as SUBDIR/FILE.
        """
        with self._changing(may_be_new=True) as staging:
            withdrawals = self.withdrawals()
            withdrawn = {withdrawal.file for withdrawal in withdrawals}
            published = self._list_published(withdrawn)
            self._require_as_published(published, withdrawn)
            self._require_room(withdrawn)
            added = gate.select_packages(source, published, withdrawn, validated)
            self._write_withdrawals(withdrawals)
            for name, record in sorted(added.items()):
                target = self.folder / name
                copy_whole(source.path(record), target)
                if sha256_file(target) != record.sha256:
                    target.unlink()
                    raise Failed(f"{source.path(record)} changed while it was published")
            names = {record.name: source.names.get(record.name) for record in source.records()}
            self._complete(staging, withdrawn, names)
        return sorted(added)

    def withdraw(self, builds: Iterable[str], reason: str) -> list[str]:
        """Take builds out of the channel.

        The files are moved to `withdrawn_folder`, and the index no longer names them. If a build is
        already withdrawn, its first reason is kept. Unfinished work of a killed command is
        completed, too.

        Args:
            builds: The builds as NAME-VERSION-BUILD.
            reason: One line for the channel's page.

        Returns:
            The packages of `builds` as SUBDIR/FILE, including those that were already withdrawn.
        """
        with self._changing() as staging:
            withdrawals = self.withdrawals()
            before = {withdrawal.file for withdrawal in withdrawals}
            published = self._list_published(before)
            indexed = self._read_indexed(before)
            names = _select_builds(set(builds), published.keys() | indexed.keys() | before)
            withdrawn = before | names
            self._require_as_published(published, withdrawn)
            self._require_room(withdrawn)
            for name in sorted(names - before):
                sha256 = indexed.get(name) or sha256_file(published[name])
                withdrawals.append(Withdrawal(name, sha256, reason))
            self._write_withdrawals(withdrawals)
            self._complete(staging, withdrawn, {})
        return sorted(names)

    def withdrawals(self) -> list[Withdrawal]:
        """Read the withdrawals, the oldest first. Raise ForgeError if the file is damaged."""
        path = self.folder / WITHDRAWN
        if not path.exists():
            return []
        try:
            entries = [Withdrawal(**entry) for entry in json.loads(read_text(path))["withdrawn"]]
            valid = all(entry.is_valid() for entry in entries)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            valid = False
        if not valid:
            raise ForgeError(f"{path} is damaged; restore it from a copy")
        return entries

    def is_ours(self) -> bool:
        """Return whether the folder is a published channel, or has no files except hidden ones."""
        return (self.folder / WITHDRAWN).is_file() or not any(self.folder.glob("[!.]*"))

    @contextmanager
    def _changing(self, may_be_new: bool = False) -> Iterator[Path]:
        """Check the folder, and hold its lock while the block runs.

        Yields:
            A folder for new index files.
        """
        self._require_ours(may_be_new)
        self._require_plain()
        # The web server reads the files as another user.
        umask = os.umask(0o022)
        try:
            with hold(self.folder, "publishing to"), scratch(self.folder) as staging:
                yield Path(staging)
        except OSError as error:
            reason = f"cannot read or write {error.filename or self.folder}: {error.strerror}"
            advice = "Fix that and run the same command again; clients can still use the channel"
            raise Failed(f"{reason}. {advice}") from None
        finally:
            os.umask(umask)

    def _require_ours(self, may_be_new: bool) -> None:
        """Raise ForgeError unless the folder is a published channel.

        Args:
            may_be_new: Accept a folder that is empty or does not exist, too.
        """
        if (self.folder / WITHDRAWN).is_file():
            return
        others = sorted(path.name for path in self.folder.glob("[!.]*"))
        reason = f"{self.folder} is not a published channel: it has no {WITHDRAWN}"
        if others:
            raise ForgeError(f"{reason}, but {others[0]}. Publish to a new folder")
        if not may_be_new:
            raise ForgeError(reason)

    def _require_plain(self) -> None:
        """Raise Refused for a link, pipe or device in one of the folders, or for a foreign page.

        The folders are that of the channel and that of its withdrawn packages. A page is foreign if
        tools/channel_page.py did not write it.
        """
        for folder in (self.folder, self.withdrawn_folder):
            for path in [folder] if folder.is_symlink() else folder.rglob("*"):
                mode = path.lstat().st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    kind = "a link" if stat.S_ISLNK(mode) else "a pipe or a device"
                    raise Refused(f"{path} is {kind}; nothing was written. Remove it")
        page = self.folder / PAGE
        if page.is_dir() or (page.exists() and GENERATOR.encode() not in page.read_bytes()):
            reason = f"{page} was not written by this program; nothing was written"
            raise Refused(f"{reason}. Move it elsewhere: publish would replace it")

    def _list_published(self, withdrawn: Set[str]) -> dict[str, Path]:
        """Return a mapping from SUBDIR/FILE to the path of each package that is not withdrawn."""
        packages = {}
        for subdir in sorted(SUBDIRS):
            for path in sorted((self.folder / subdir).glob("[!.]*.conda")):
                name = f"{subdir}/{path.name}"
                if name not in withdrawn:
                    packages[name] = path
        return packages

    def _read_indexed(self, withdrawn: Set[str]) -> dict[str, str]:
        """Return the sha256 that the index states for each SUBDIR/FILE.

        Withdrawn packages and invalid entries are left out.
        """
        digests = {}
        for subdir in SUBDIRS:
            path = self.folder / subdir / "repodata.json"
            data = parse(path.read_bytes()) if path.exists() else {}
            for file, record in records(data).items():
                name = f"{subdir}/{file}"
                if name not in withdrawn and not find_fault(file, record):
                    digests[name] = record["sha256"]
        return digests

    def _require_as_published(self, published: dict[str, Path], withdrawn: Set[str]) -> None:
        """Raise Failed if a file that the index names is missing or has changed."""
        for name, sha256 in sorted(self._read_indexed(withdrawn).items()):
            path = self.folder / name
            if name not in published:
                raise Failed(f"{path} was published, and is missing: restore a copy or withdraw it")
            if sha256_file(path) != sha256:
                reason = f"{path} differs from the published file (sha256 {sha256})"
                advice = "restore it from a copy, or withdraw it"
                raise Failed(f"{reason}. Lock files name the published file: {advice}")

    def _require_room(self, withdrawn: Set[str]) -> None:
        """Raise Refused if moving a withdrawn package would replace a different file."""
        for name in sorted(withdrawn):
            package = self.folder / name
            target = self.withdrawn_folder / name
            if not (package.exists() and target.exists()):
                continue
            if sha256_file(package) != sha256_file(target):
                reason = f"{package} and the withdrawn {target} differ; nothing was written"
                raise Refused(f"{reason}. Move one of them elsewhere")

    def _write_withdrawals(self, withdrawals: list[Withdrawal]) -> None:
        entries = [asdict(withdrawal) for withdrawal in withdrawals]
        text = json.dumps({"withdrawn": entries}, indent=1) + "\n"
        write_text(self.folder / WITHDRAWN, text)

    def _complete(self, staging: Path, withdrawn: Set[str], names: pypi.Names) -> None:
        """Index the packages in the folder, and then move the withdrawn ones out of it.

        Args:
            staging: A folder for new index files.
            withdrawn: The withdrawn packages as SUBDIR/FILE.
            names: Names on PyPI to add to the channel's table.
        """
        names = self._update_names(names)
        write_text(self.folder / HEADERS, headers())
        files = list(self._list_published(withdrawn))
        self._stage(staging, files)
        patch = _assemble_patch(staging, files, names)
        write_index(staging, repodata_patch=patch, force=True)
        # Shards are named by their content. Old shards stay for clients that have an old index.
        for subdir in SUBDIRS:
            for shard in (staging / subdir).glob("shards/*"):
                _rename(shard, self.folder / subdir / "shards" / shard.name)
        for name in INDEX_FILES:
            _rename(staging / name, self.folder / name)
        for name in withdrawn:
            if (self.folder / name).exists():
                move_whole(self.folder / name, self.withdrawn_folder / name)

    def _update_names(self, names: pypi.Names) -> pypi.Names:
        """Add names on PyPI to the channel's table, and return the complete table."""
        table = self.folder / pypi.TABLE
        text = table.read_bytes() if table.exists() else None
        updated = pypi.parse(text, table) | names
        write_text(table, json.dumps(updated, indent=1, sort_keys=True) + "\n")
        return updated

    def _stage(self, staging: Path, files: list[str]) -> None:
        """Link the packages into the folder that is indexed, and copy the previous index into it.

        The previous index has the time at which each package was first indexed. Clients use this
        time to exclude packages that are newer than a given date.
        """
        for subdir in SUBDIRS:
            (staging / subdir).mkdir(parents=True)
            index = self.folder / subdir / UNPATCHED
            if index.exists() and parse(index.read_bytes()):
                shutil.copy(index, staging / subdir)
        for name in files:
            os.link(self.folder / name, staging / name)


def headers() -> str:
    """Return the content of `_headers`, from which Netlify and Cloudflare Pages read HTTP headers.

    Both services combine the headers of overlapping rules, so each file is in only one rule.
    """
    rules = {f"/{file}": "no-cache" for file in (WITHDRAWN, pypi.TABLE, *INDEX_FILES)}
    for subdir in SUBDIRS:
        # Shards are named by their content.
        rules[f"/{subdir}/shards/*"] = "public, max-age=31536000, immutable"
    return "".join(f"{path}\n  Cache-Control: {value}\n" for path, value in rules.items())


def _assemble_patch(staging: Path, files: list[str], names: pypi.Names) -> str:
    """Make the repodata patch package that adds the name on PyPI to each record.

    Args:
        staging: The folder that is indexed.
        files: The packages as SUBDIR/FILE.
        names: The names on PyPI.

    Returns:
        The path of the patch package, relative to its subdir.
    """
    content = staging / "patch"
    for subdir in SUBDIRS:
        changes = {}
        for name in files:
            file_subdir, _, file = name.partition("/")
            if file_subdir == subdir:
                changes[file] = {"purls": pypi.purls(file, names)}
        patch = {
            "patch_instructions_version": 1,
            "packages.conda": changes,
            "remove": [],
        }
        write_text(content / subdir / "patch_instructions.json", json.dumps(patch))
    # The indexer ignores this folder.
    folder = staging / "noarch" / "patch"
    folder.mkdir()
    # rattler-build assembles the package in TMPDIR. Set it to this folder: it is inside a scratch
    # folder, so if the process is killed, its leftovers are removed later.
    os.environ["TMPDIR"] = str(folder)
    try:
        package = assemble_package(
            "patch",
            "0",
            "noarch",
            "0",
            folder,
            files_dir=content,
            noarch="generic",
        )
    except Exception as error:
        # The disk may be failing, for example. The bindings raise any type.
        raise Failed(f"cannot write {folder}: {error}. Publish again") from None
    finally:
        os.environ["TMPDIR"] = tempfile.gettempdir()
    return f"patch/{package.path.name}"


def _select_builds(builds: set[str], names: Iterable[str]) -> set[str]:
    """Return the files that belong to builds.

    Args:
        builds: The builds as NAME-VERSION-BUILD.
        names: The files that are or were in the channel, as SUBDIR/FILE.

    Raises:
        ForgeError: The channel has no such build.
    """
    by_build = defaultdict(set)
    for name in names:
        file = name.partition("/")[2]
        by_build[re.sub(r"\.(conda|tar\.bz2)$", "", file)].add(name)
    unknown = sorted(builds - by_build.keys())
    if unknown:
        present = ", ".join(sorted(by_build)) or "none"
        raise ForgeError(f"no such build {', '.join(unknown)}; there are: {present}")
    return set().union(*(by_build[build] for build in builds))


def _rename(source: Path, target: Path) -> None:
    """Rename a file to its final name, and make it readable for the web server."""
    target.parent.mkdir(parents=True, exist_ok=True)
    source.chmod(0o644)
    source.replace(target)
