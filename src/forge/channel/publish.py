# SPDX-License-Identifier: BSD-3-Clause
"""A channel in a folder that any static web server, mirror or bucket can serve.

Packages come first and never change; then the shards; then the log of revisions; last the index
files, each by one rename. So whatever a client reads, at whatever moment, names files that are
there, and a publish killed anywhere is completed by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import zstandard
from rattler.index import index_fs
from rattler_build import assemble_package

from forge.channel import gate, revisions, verify
from forge.channel.local import Channel, is_host_bound
from forge.channel.places import Folder
from forge.channel.revisions import Revision
from forge.errors import BuildFailed, ForgeError
from forge.files import sha256_file
from forge.locks import hold
from forge.project import SUBDIRS
from forge.provenance.records import RECORD, SBOM

SHARD_SECONDS = 7 * 86400  # as long as a client may go on with an older index
CHUNK = 1 << 20
# Last what clients ask for first: with it everything else is there.
INDEX_FILES = (
    "run_exports.json",
    "run_exports.json.zst",
    "repodata_from_packages.json",
    "repodata.json",
    "repodata.json.zst",
    "repodata_shards.msgpack.zst",
)
# What conda-index makes a revoked package depend on. No channel has it, so that also a solver that
# does not know `removed` leaves the package alone.
REVOKED = "package_has_been_revoked"


class StaticChannel:
    """The publishing side of a channel folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.place = folder, Folder(folder)
        self.staging = folder / ".staging"

    def publish(
        self, source: Channel | None, yank: Iterable[str] = (), restore: Iterable[str] = ()
    ) -> Revision | None:
        """Bring the packages of `source` in, and mark builds NAME-VERSION-BUILD as yanked or not.

        Returns the revision that this makes, or None where nothing is to be changed. Raises
        ForgeError for what the gate refuses, an unknown build, or another publisher at work;
        BuildFailed when the folder cannot be written or the index cannot be made.
        """
        if source and source.folder.resolve() == self.folder.resolve():
            raise ForgeError(f"{self.folder} is what builds go to: publish to another folder")
        if foreign := self._foreign():
            raise ForgeError(
                f"{self.folder} is no channel: it holds {foreign}. Publish to an empty folder"
            )
        new = not self.folder.exists()
        with hold(self.folder, "publishing to"):
            if new:
                self.folder.chmod(0o755)
            try:
                self._clean()
                return self._publish(source, set(yank), set(restore))
            except OSError as error:
                raise BuildFailed(
                    f"cannot write {error.filename or self.folder}: {error.strerror}. Mend that "
                    "and publish again; clients still have what was published before"
                ) from None
            finally:
                with contextlib.suppress(OSError):
                    self._clean()

    def _publish(
        self, source: Channel | None, yank: set[str], restore: set[str]
    ) -> Revision | None:
        index = verify.read_index(self.place)
        log = revisions.read(self.place)
        if not (source or log):  # such as the folder that builds go to
            raise ForgeError(f"{self.folder} has no {revisions.LOG}: forge publish makes one")
        # a channel that was there before the log: what its index names
        files, yanked = revisions.state(log) if log else (set(index.records), index.removed)
        packages = gate.admitted(source, lambda name: self._sha256(name, index)) if source else {}
        if not log:
            self._require_known(files | set(packages))
        added = set(packages) - files
        yank = _named(yank, files | added) - yanked
        restore = _named(restore, files | added) & yanked
        change = Revision(
            log[-1].revision + 1 if log else 1,
            sorted(added if log else added | files),
            sorted(yank if log else (yank | yanked) & (added | files)),
            sorted(restore),
        )
        for name in sorted(packages):
            if name in added or not (self.folder / name).exists():
                self._place(source.path(packages[name]), name, packages[name].sha256)
        if source:
            self._copy_companions(source, packages)
        if lost := sorted(n for n in files | added if not self._is_there(n, index)):
            raise BuildFailed(
                f"{self.folder / lost[0]} is published but not there, or cut off ({len(lost)} "
                "such): take it back from a copy; a published file is never dropped"
            )
        changed = bool(change.added or change.yanked or change.restored)
        if not changed and log and not index.findings:
            return None
        # Records are read anew from every package where what is there cannot be trusted.
        self._stage(files | added, (yanked | yank) - restore, index.findings or not log)
        self._require_same(index)
        self._switch([*log, change] if changed else log)
        return change if changed else None

    def _foreign(self) -> str:
        """A file of something else, in a folder that is no channel yet; or nothing."""
        indexes = [self.folder / subdir / "repodata.json" for subdir in SUBDIRS]
        if not self.folder.is_dir() or any(path.exists() for path in indexes):
            return ""
        ours = {*SUBDIRS, "forge", "revisions"}
        names = sorted(path.name for path in self.folder.iterdir())
        return next((n for n in names if n not in ours and not n.startswith(".")), "")

    def _is_there(self, name: str, index: verify.Index) -> bool:
        """Whether a published file is there with its size.

        Its hash is looked at where the index is made anew, and by `forge channel verify`.
        """
        path = self.folder / name
        size = None if index.findings else index.records.get(name, {}).get("size")
        return path.exists() and size in (None, path.stat().st_size)

    def _require_known(self, known: set[str]) -> None:
        """Refuse to take over a folder whose index would lose packages, or has another base's."""
        for name in sorted(self.place.packages() or ()):
            if name not in known:
                raise ForgeError(
                    f"{self.folder / name} is in no index, and {revisions.LOG} is not there to "
                    "tell why. Index or remove it, or publish to an empty folder"
                )
            if is_host_bound(self.folder / name):
                raise ForgeError(
                    f"{self.folder / name} is host-bound: this is no folder to publish to"
                )

    def _clean(self) -> None:
        shutil.rmtree(self.staging, ignore_errors=True)

    def _sha256(self, name: str, index: verify.Index) -> str | None:
        if known := index.records.get(name, {}).get("sha256"):
            return known
        path = self.folder / name
        return sha256_file(path) if path.exists() else None

    def _place(self, source: Path, name: str, sha256: str) -> None:
        """Copy a package in by one rename, holding its bytes against the record once more."""
        target = self.folder / name
        if target.exists():  # left by a killed publish, and found equal by the gate
            return
        partial, hasher = self.staging / "partial", hashlib.sha256()
        _folder(self.staging)
        with source.open("rb") as stream, partial.open("wb") as out:
            while chunk := stream.read(CHUNK):
                hasher.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        if hasher.hexdigest() != sha256:
            raise ForgeError(f"{source} changed while it was published; nothing names it yet")
        _move(partial, target)

    def _copy_companions(self, source: Channel, packages: dict) -> None:
        """The provenance and SBOM of each package, where the build made them."""
        for record in packages.values():
            for suffix in (RECORD, SBOM):
                name = f"forge/{record.dist}{suffix}"
                if (source.folder / name).exists() and not (self.folder / name).exists():
                    _folder(self.staging)
                    _move(shutil.copy(source.folder / name, self.staging), self.folder / name)

    def _stage(self, files: set[str], yanked: set[str], anew: object) -> None:
        """Make every index file for exactly `files` in the staging folder."""
        for subdir in SUBDIRS:
            folder = _folder(self.staging / subdir)
            for name in files:
                if name.startswith(f"{subdir}/"):
                    os.link(self.folder / name, self.staging / name)
            known = self.folder / subdir / "repodata_from_packages.json"
            if known.exists() and not anew:
                shutil.copy(known, folder)
        try:
            patch = self._patch(yanked)
            asyncio.run(index_fs(self.staging, repodata_patch=patch, force=bool(anew)))
        except Exception as error:
            raise BuildFailed(f"cannot index {self.folder}: {error}") from None
        for subdir in SUBDIRS:
            folder = self.staging / subdir
            records = json.loads((folder / "repodata_from_packages.json").read_bytes())
            exports = {"info": {"subdir": subdir, "version": 1}, "packages": {}}
            exports["packages.conda"] = {
                name: {"run_exports": record.get("run_exports", {})}
                for name, record in sorted(records["packages.conda"].items())
            }
            text = json.dumps(exports).encode()
            (folder / "run_exports.json").write_bytes(text)
            (folder / "run_exports.json.zst").write_bytes(zstandard.compress(text, 19))

    def _require_same(self, index: verify.Index) -> None:
        """Refuse an index that would give a damaged package's new hash for its old one."""
        staged = verify.hashes(Folder(self.staging))
        for name, record in index.records.items():
            known = record.get("sha256")
            if known and name in staged and staged[name] != known:
                raise BuildFailed(
                    f"{self.folder / name} has sha256 {staged[name]}, but was published as "
                    f"{known}: take it back from a copy; locks name the old one"
                )

    def _patch(self, yanked: set[str]) -> str:
        """Make the repodata patch package of the indexer, where it does not index it itself.

        Returns its path in the staged noarch/.
        """
        with TemporaryDirectory(dir=self.staging) as content:
            for subdir in SUBDIRS:
                names = sorted(n.split("/")[1] for n in yanked if n.startswith(f"{subdir}/"))
                patch = {
                    "patch_instructions_version": 1,
                    "remove": names,
                    "packages.conda": {name: {"depends": [REVOKED]} for name in names},
                }
                path = _folder(Path(content) / subdir) / "patch_instructions.json"
                path.write_text(json.dumps(patch))
            folder = _folder(self.staging / "noarch" / "patch")
            package = assemble_package(
                "patch", "0", "noarch", "0", folder, files_dir=content, noarch="generic"
            )
        return f"patch/{package.path.name}"

    def _switch(self, log: list[Revision]) -> None:
        """Move what was staged to where clients find it, in the order that keeps every view whole.

        Shards are named by their content; those of the index that goes now stay for a while.
        """
        for subdir in SUBDIRS:
            shards = self.folder / subdir / "shards"
            for name in verify.shard_files(self.place, subdir):
                with contextlib.suppress(FileNotFoundError):
                    os.utime(shards / name)
            for shard in (self.staging / subdir).glob("shards/*"):
                _move(shard, shards / shard.name)
            copy = shutil.copy(self.staging / subdir / "repodata.json.zst", self.staging)
            _move(copy, self.folder / revisions.index_path(log[-1].revision, subdir))
        text = self.staging / "log.json"
        text.write_text(revisions.dump(log))
        _move(text, self.folder / revisions.LOG)
        for name in INDEX_FILES:
            for subdir in SUBDIRS:
                _move(self.staging / subdir / name, self.folder / subdir / name)
        for subdir in SUBDIRS:
            named = verify.shard_files(self.place, subdir)
            for shard in (self.folder / subdir).glob("shards/*"):
                old = time.time() - shard.stat().st_mtime > SHARD_SECONDS
                if old and shard.name not in named:
                    shard.unlink()


def _named(dists: set[str], files: set[str]) -> set[str]:
    """The files of builds NAME-VERSION-BUILD; raises ForgeError for one that is not there."""
    found = {dist: {f for f in files if f.split("/")[1] == f"{dist}.conda"} for dist in dists}
    if unknown := sorted(dist for dist, names in found.items() if not names):
        known = ", ".join(sorted(f.split("/")[1].removesuffix(".conda") for f in files)) or "none"
        raise ForgeError(f"no such build {', '.join(unknown)}; there are: {known}")
    return set().union(*found.values())


def _folder(path: Path) -> Path:
    """A folder that a web server may read, whatever the umask of the one who publishes."""
    if not path.is_dir():
        _folder(path.parent)
        path.mkdir()
        path.chmod(0o755)
    return path


def _move(source: str | Path, target: Path) -> None:
    """Rename into place with the mode that web servers need."""
    Path(source).chmod(0o644)
    _folder(target.parent)
    Path(source).replace(target)
