# SPDX-License-Identifier: BSD-3-Clause
"""A channel in a folder that any static web server, mirror or bucket can serve.

The packages in the folder are the channel, and `withdrawn.json` lists what was taken out of it.
A change copies packages first; then come the shards, then each index file, each by one rename. So
no index ever names a missing file, and the next command completes one that was killed.
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
from forge.conda.index import FILE_NAME, fault, parse, records
from forge.conda.local import Channel, write_index
from forge.conda.package import scratch
from forge.errors import Failed, ForgeError, Refused
from forge.files import copy_whole, hold, move_whole, read_text, sha256_file, write_text
from forge.project import SUBDIRS

# Written first into a new folder: by it the next publish knows the folder as one of ours.
WITHDRAWN = "withdrawn.json"
PAGE = "index.html"
GENERATOR = '<meta name="generator" content="strix-forge">'  # in every page of ours
HEADERS = "_headers"
UNPATCHED = "repodata_from_packages.json"
FORMS = (
    "repodata_shards.msgpack.zst",
    UNPATCHED,
    "repodata.json.zst",
    "repodata.json",
)
INDEX_FILES = [f"{subdir}/{form}" for form in FORMS for subdir in SUBDIRS]


@dataclass(frozen=True)
class Withdrawal:
    """A package that was taken out of a published channel.

    Attributes:
        file: SUBDIR/FILE, a name that is never published again.
        sha256: Of the file.
        reason: In one line, for the channel's page.
        date: ISO 8601, UTC.
    """

    file: str
    sha256: str
    reason: str
    date: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())

    def is_valid(self) -> bool:
        """Return whether the values are those that `withdraw` writes."""
        subdir, _, name = self.file.partition("/")
        texts = (self.sha256, self.reason, self.date)
        is_name = subdir in SUBDIRS and FILE_NAME.fullmatch(name) is not None
        return is_name and all(isinstance(text, str) for text in texts)


class StaticChannel:
    """The publishing side of a channel folder.

    Every method raises ForgeError for a folder of something else and for another publisher at
    work, Refused for what the gate refuses, and Failed where the folder cannot be written or is not
    as it was published.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def withdrawn_folder(self) -> Path:
        """Where withdrawn packages go: beside the channel, so that no web server serves them."""
        return self.folder.with_name(f"{self.folder.name}-withdrawn")

    def publish(self, source: Channel, validated: Set[str] | None = None) -> list[str]:
        """Add the packages of `source` that are not published; returns them as SUBDIR/FILE.

        Args:
            source: The channel of a checkout.
            validated: The sha256 of each file that passed on the GPU; None to add others too.
        """
        with self._changing(may_be_new=True) as staging:
            withdrawals = self.withdrawals()
            gone = {withdrawal.file for withdrawal in withdrawals}
            published = {name: path for name, path in self._packages().items() if name not in gone}
            self._require_as_published(published, gone)
            self._require_room(gone)
            added = gate.select_packages(source, published, gone, validated)
            self._write_withdrawals(withdrawals)
            for name, record in sorted(added.items()):
                copy_whole(source.path(record), self.folder / name)
                if sha256_file(self.folder / name) != record.sha256:
                    (self.folder / name).unlink()
                    raise Failed(f"{source.path(record)} changed while it was published")
            names = {record.name: source.names.get(record.name) for record in source.records()}
            self._complete(staging, gone, names)
        return sorted(added)

    def withdraw(self, builds: Iterable[str], reason: str) -> list[str]:
        """Take builds NAME-VERSION-BUILD out of the channel; returns them as SUBDIR/FILE.

        The files move to `withdrawn_folder`, and the index no longer names them. Of builds that are
        withdrawn already, a killed command's work is completed, and the first reason stays.
        """
        with self._changing() as staging:
            withdrawals = self.withdrawals()
            gone = {withdrawal.file for withdrawal in withdrawals}
            published = {name: path for name, path in self._packages().items() if name not in gone}
            indexed = {name: sha for name, sha in self._indexed().items() if name not in gone}
            names = _select_builds(set(builds), published.keys() | indexed.keys() | gone)
            self._require_as_published(published, gone | names)
            self._require_room(gone | names)
            for name in sorted(names - gone):
                sha256 = indexed.get(name) or sha256_file(published[name])
                withdrawals.append(Withdrawal(name, sha256, reason))
            self._write_withdrawals(withdrawals)
            self._complete(staging, gone | names, {})
        return sorted(names)

    def withdrawals(self) -> list[Withdrawal]:
        """Read what was withdrawn, oldest first. Raises ForgeError if the file is damaged."""
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
        """Return whether the folder is a published channel, or holds nothing yet."""
        return (self.folder / WITHDRAWN).is_file() or not any(self.folder.glob("[!.]*"))

    @contextmanager
    def _changing(self, may_be_new: bool = False) -> Iterator[Path]:
        """Be the only publisher of a folder that is fit; yields a folder for new index files."""
        self._require_ours(may_be_new)
        self._require_plain()
        umask = os.umask(0o022)  # the web server runs as another user
        try:
            with hold(self.folder, "publishing to"), scratch(self.folder) as staging:
                yield Path(staging)
        except OSError as error:
            reason = f"cannot write {error.filename or self.folder}: {error.strerror}"
            advice = "Fix that and publish again; clients still see what was published before"
            raise Failed(f"{reason}. {advice}") from None
        finally:
            os.umask(umask)
            os.environ["TMPDIR"] = tempfile.gettempdir()

    def _require_ours(self, may_be_new: bool) -> None:
        """Raise ForgeError for a folder that holds something else than a published channel."""
        if (self.folder / WITHDRAWN).is_file():
            return
        others = sorted(path.name for path in self.folder.glob("[!.]*"))
        if others or not may_be_new:
            reason = f"{self.folder} is not a published channel: it has no {WITHDRAWN}"
            but = f", but {others[0]}. Publish to a new folder" if others else ""
            raise ForgeError(f"{reason}{but}")

    def _require_plain(self) -> None:
        """Raise Refused for a link, a pipe, or a page that is not ours."""
        for folder in (self.folder, self.withdrawn_folder):
            for path in [folder] if folder.is_symlink() else folder.rglob("*"):
                mode = path.lstat().st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    kind = "a link" if stat.S_ISLNK(mode) else "a pipe or a device"
                    raise Refused(f"{path} is {kind}; nothing was written. Move it away")
        page = self.folder / PAGE
        if page.is_dir() or (page.exists() and GENERATOR.encode() not in page.read_bytes()):
            reason = f"{page} is a page of somebody else; nothing was written"
            raise Refused(f"{reason}. Move it away: publish writes that file")

    def _packages(self) -> dict[str, Path]:
        """Map SUBDIR/FILE to each package in the folder."""
        paths = (path for subdir in SUBDIRS for path in (self.folder / subdir).glob("[!.]*.conda"))
        return {f"{path.parent.name}/{path.name}": path for path in sorted(paths)}

    def _indexed(self) -> dict[str, str]:
        """Map SUBDIR/FILE to the sha256 that the index gives; without what it gives wrongly."""
        digests = {}
        for subdir in SUBDIRS:
            path = self.folder / subdir / "repodata.json"
            data = parse(path.read_bytes()) if path.exists() else {}
            for file, record in records(data).items():
                if not fault(file, record):
                    digests[f"{subdir}/{file}"] = record["sha256"]
        return digests

    def _require_as_published(self, published: dict[str, Path], gone: set[str]) -> None:
        """Raise Failed for a file that the index names and that is missing or another one."""
        for name, sha256 in sorted(self._indexed().items()):
            if name in gone:
                continue
            path = self.folder / name
            if name not in published:
                raise Failed(f"{path} was published, and is missing: restore a copy or withdraw it")
            if sha256_file(path) != sha256:
                reason = f"{path} is not what was published (sha256 {sha256})"
                raise Failed(f"{reason}: restore it from a copy, or withdraw it; locks name it")

    def _require_room(self, gone: set[str]) -> None:
        """Raise Refused where a withdrawn package would replace another file."""
        for name in sorted(gone):
            package, kept = self.folder / name, self.withdrawn_folder / name
            if package.exists() and kept.exists() and sha256_file(package) != sha256_file(kept):
                raise Refused(f"{kept} is not {package}; nothing was written. Move one away")

    def _write_withdrawals(self, withdrawals: list[Withdrawal]) -> None:
        entries = [asdict(withdrawal) for withdrawal in withdrawals]
        text = json.dumps({"withdrawn": entries}, indent=1) + "\n"
        write_text(self.folder / WITHDRAWN, text)

    def _complete(self, staging: Path, gone: set[str], names: pypi.Names) -> None:
        """Make the index for what is there without what is `gone`, and move that away."""
        table = self.folder / pypi.TABLE
        text = table.read_bytes() if table.exists() else None
        names = pypi.parse(text, table) | names
        write_text(table, json.dumps(names, indent=1, sort_keys=True) + "\n")
        write_text(self.folder / HEADERS, headers())
        files = [name for name in self._packages() if name not in gone]
        for subdir in SUBDIRS:
            (staging / subdir).mkdir(parents=True)
            # says when each package was first indexed, by which clients leave out newer ones
            before = self.folder / subdir / UNPATCHED
            if before.exists() and parse(before.read_bytes()):
                shutil.copy(before, staging / subdir)
        for name in files:
            os.link(self.folder / name, staging / name)
        write_index(staging, repodata_patch=_assemble_patch(staging, files, names), force=True)
        for (
            subdir
        ) in SUBDIRS:  # named by their content; old ones stay for clients with an old index
            for shard in (staging / subdir).glob("shards/*"):
                _rename(shard, self.folder / subdir / "shards" / shard.name)
        for name in INDEX_FILES:
            _rename(staging / name, self.folder / name)
        for name in gone:
            if (self.folder / name).exists():
                move_whole(self.folder / name, self.withdrawn_folder / name)


def headers() -> str:
    """Return what Netlify and Cloudflare Pages read in a site's root: they join what overlaps."""
    rules = {f"/{file}": "no-cache" for file in (WITHDRAWN, pypi.TABLE, *INDEX_FILES)}
    # shards are named by their content
    rules |= {f"/{d}/shards/*": "public, max-age=31536000, immutable" for d in SUBDIRS}
    return "".join(f"{path}\n  Cache-Control: {value}\n" for path, value in rules.items())


def _assemble_patch(staging: Path, files: list[str], names: pypi.Names) -> str:
    """Make the repodata patch package that gives each record its name on PyPI; returns its path."""
    content = staging / "patch"
    for subdir in SUBDIRS:
        own = [name.partition("/")[2] for name in files if name.startswith(f"{subdir}/")]
        patched = {file: {"purls": pypi.purls(file, names)} for file in own}
        patch = {"patch_instructions_version": 1, "packages.conda": patched, "remove": []}
        write_text(content / subdir / "patch_instructions.json", json.dumps(patch))
    folder = staging / "noarch" / "patch"  # which the indexer does not look into
    folder.mkdir()
    os.environ["TMPDIR"] = str(folder)  # else what a killed process assembled stays
    try:
        package = assemble_package(
            "patch", "0", "noarch", "0", folder, files_dir=content, noarch="generic"
        )
    except Exception as error:  # a disk that fails; the bindings have no type for it
        raise Failed(f"cannot write {folder}: {error}. Publish again") from None
    return f"patch/{package.path.name}"


def _select_builds(builds: set[str], names: Iterable[str]) -> set[str]:
    """Return the files of builds NAME-VERSION-BUILD. Raises ForgeError for an unknown build."""
    by_build = defaultdict(set)
    for name in names:
        by_build[re.sub(r"\.(conda|tar\.bz2)$", "", name.partition("/")[2])].add(name)
    unknown = sorted(builds - by_build.keys())
    if unknown:
        present = ", ".join(sorted(by_build)) or "none"
        raise ForgeError(f"no such build {', '.join(unknown)}; there are: {present}")
    return set().union(*(by_build[build] for build in builds))


def _rename(source: Path, target: Path) -> None:
    """Rename into place, readable for a web server."""
    target.parent.mkdir(parents=True, exist_ok=True)
    source.chmod(0o644)
    source.replace(target)
