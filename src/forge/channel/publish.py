# SPDX-License-Identifier: BSD-3-Clause
"""A channel in a folder that any static web server, mirror or bucket can serve.

Packages come first and never change; then the shards; then the log, which names the index files
to come beside those that are there; then these, each by one rename; last the log without the old
ones. So whatever a client reads, and whenever, is the log's and names files that exist, and the
next publish completes one that was killed. No published file is ever deleted.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zstandard
from rattler_build import assemble_package

from forge.channel import gate, revisions, verify
from forge.channel.revisions import Log, Revision
from forge.conda import attestations, pypi
from forge.conda.index import load, records
from forge.conda.local import Channel, Record, write_index
from forge.conda.location import Location
from forge.conda.package import scratch
from forge.conda.provenance import SUFFIX
from forge.errors import Failed, ForgeError
from forge.files import hold, sha256_file, write_text
from forge.project import SUBDIRS

# A yanked package depends on what no channel has, as conda-index does it, so that solvers which
# do not know `removed` avoid it too.
REVOKED = "package_has_been_revoked"

HEADERS = "_headers"
# each form of the index, in the order in which a publish switches them
INDEX_FILES = [f"{d}/{form}" for form in (*verify.FORMS, "repodata.json") for d in SUBDIRS]


class StaticChannel:
    """The publishing side of a channel folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.location = folder, Location(folder)

    def publish(
        self, source: Channel | None, yank: Iterable[str] = (), restore: Iterable[str] = ()
    ) -> Revision | None:
        """Add the packages of `source`, and yank or restore builds NAME-VERSION-BUILD.

        Returns the new revision, or None if nothing changes. Raises Refused for what the gate
        refuses, ForgeError for an unknown build, another folder, or another publisher at work;
        Failed if the folder cannot be written or the index cannot be made.
        """
        self._require_ours(source)
        umask = os.umask(0o022)  # the web server runs as another user
        try:
            with hold(self.folder, "publishing to"), scratch(self.folder) as staging:
                self.staging = Path(staging)
                return self._publish(source, set(yank), set(restore))
        except OSError as error:
            why = f"cannot write {error.filename or self.folder}: {error.strerror}"
            seen = "clients still see what was published before"
            raise Failed(f"{why}. Fix that and publish again; {seen}") from None
        finally:
            os.umask(umask)
            os.environ["TMPDIR"] = tempfile.gettempdir()

    def _require_ours(self, source: Channel | None) -> None:
        """Raise ForgeError for a folder with content but no log: it is not a published channel."""
        if (self.folder / revisions.LOG).exists():
            return
        foreign = [path.name for path in self.folder.glob("[!.]*")]
        if foreign or not source:
            but = f", but {min(foreign)}. Publish to a new folder" if foreign else ""
            why = f"is not a published channel: it has no {revisions.LOG}{but}"
            raise ForgeError(f"{self.folder} {why}")

    def _publish(
        self, source: Channel | None, yank: set[str], restore: set[str]
    ) -> Revision | None:
        table = self.location.read(pypi.TABLE)
        names = pypi.parse(table, self.folder / pypi.TABLE) | (source.names if source else {})
        index, log = verify.read_index(self.location), revisions.read(self.location)
        files, yanked = revisions.state(log.revisions)
        packages = {}
        if source:
            packages = gate.admitted(source, lambda n: self._sha256(n, index))
        added = packages.keys() - files
        files |= added
        yank = _named(yank, files) - yanked
        restore = _named(restore, files) & yanked
        if source:
            self._copy_packages(source, packages)
        self._require_complete(files, index)
        changed = bool(added or yank or restore)
        entries = log.revisions
        if changed:
            lists = sorted(added), sorted(yank), sorted(restore)
            entries = [*entries, Revision(len(entries) + 1, *lists)]
        elif not entries:
            return None
        if not (self._describe(names) or changed or index.findings):
            return None
        self._stage(files, (yanked | yank) - restore, index, names)
        self._switch(log, entries)
        return entries[-1] if changed else None

    def _describe(self, names: pypi.Names) -> bool:
        """Write what web servers and clients read of a channel; returns whether it is new."""
        texts = {pypi.TABLE: json.dumps(names, indent=1, sort_keys=True) + "\n", HEADERS: headers()}
        new = {n: t for n, t in texts.items() if t.encode() != (self.location.read(n) or b"")}
        for name, text in new.items():
            self._write(text, self.folder / name)
        return bool(new)

    def _sha256(self, name: str, index: verify.Index) -> str | None:
        if known := index.records.get(name, {}).get("sha256"):
            return known
        path = self.folder / name  # maybe of a killed publish
        return sha256_file(path) if path.exists() else None

    def _copy_packages(self, source: Channel, packages: dict[str, Record]) -> None:
        """Copy each package, its attestation and its provenance, where there are such."""
        if not (self.folder / revisions.LOG).exists():  # by which the next publish knows the folder
            self._write(revisions.dump(Log()), self.folder / revisions.LOG)
        for name, record in sorted(packages.items()):
            for file in (name, f"forge/{record.dist}{SUFFIX}"):
                target, partial = self.folder / file, self.staging / "partial"
                if target.exists() or not (source.folder / file).exists():
                    continue
                shutil.copyfile(source.folder / file, partial)
                with partial.open("rb") as stream:
                    os.fsync(stream.fileno())
                if file == name and sha256_file(partial) != record.sha256:
                    raise ForgeError(f"{source.path(record)} changed while it was published")
                _move(partial, target)
            if not any((self.folder / record.subdir).glob(f"{record.file_name}.sigs.*")):
                for file, text in attestations.sidecar(source.path(record)).items():
                    self._write(text, self.folder / record.subdir / file)

    def _require_complete(self, files: set[str], index: verify.Index) -> None:
        """Raise Failed for a published file that is missing or truncated."""
        for name in sorted(files):
            path, size = self.folder / name, index.records.get(name, {}).get("size")
            if not path.exists() or size not in (None, path.stat().st_size):
                raise Failed(f"{path} was published, and is missing or truncated: restore a copy")

    def _stage(
        self, files: set[str], yanked: set[str], index: verify.Index, names: pypi.Names
    ) -> None:
        """Make every index file for exactly `files` in the staging folder.

        Where the present index is damaged, every record is read anew from its package. Raises
        Failed for a package that cannot be read or has another hash than it had.
        """
        anew = bool(index.findings)
        for subdir in SUBDIRS:
            (self.staging / subdir).mkdir(parents=True)
            if not anew:
                name = f"{subdir}/repodata_from_packages.json"
                shutil.copy(self.folder / name, self.staging / name)
        for name in files:
            os.link(self.folder / name, self.staging / name)
        write_index(self.staging, repodata_patch=self._patch(files, yanked, names), force=anew)
        attestations.advertise(self.staging, self.folder)
        for name, record in verify.read_index(Location(self.staging)).records.items():
            sha256 = record["sha256"]
            if (known := index.records.get(name, {}).get("sha256", sha256)) != sha256:
                why = f"{self.folder / name} has sha256 {sha256}, but was published as {known}"
                raise Failed(f"{why}: restore it from a copy; locks name the old one")
        for subdir in SUBDIRS:
            folder = self.staging / subdir
            made = records(json.loads((folder / "repodata_from_packages.json").read_bytes()))
            exports = {n: {"run_exports": r.get("run_exports", {})} for n, r in made.items()}
            info = {"subdir": subdir, "version": 1}
            text = json.dumps({"info": info, "packages": {}, "packages.conda": exports})
            self._write(text, folder / "run_exports.json", folder / "run_exports.json.zst")

    def _patch(self, files: set[str], yanked: set[str], names: pypi.Names) -> str:
        """Make the indexer's repodata patch package; returns its path in the staged noarch/."""
        content = self.staging / "patch"
        for subdir in SUBDIRS:
            own = {f.removeprefix(f"{subdir}/"): f for f in files if f.startswith(f"{subdir}/")}
            patched: dict[str, dict[str, list[str]]] = {}
            for name, file in own.items():
                patched[name] = {"purls": pypi.purls(name, names)}
                if file in yanked:
                    patched[name]["depends"] = [REVOKED]
            patch = {
                "patch_instructions_version": 1,
                "remove": sorted(name for name, file in own.items() if file in yanked),
                "packages.conda": patched,
            }
            write_text(content / subdir / "patch_instructions.json", json.dumps(patch))
        folder = self.staging / "noarch" / "patch"  # which the indexer does not look into
        folder.mkdir()
        words = "patch", "0", "noarch", "0", folder
        os.environ["TMPDIR"] = str(folder)  # else what a killed process assembled stays
        try:
            package = assemble_package(*words, files_dir=content, noarch="generic")
        except Exception as error:  # a disk that fails
            raise Failed(f"cannot write {folder}: {error}. Publish again") from None
        return f"patch/{package.path.name}"

    def _switch(self, log: Log, entries: list[Revision]) -> None:
        """Move what was staged to where clients find it, in the order that keeps every view whole.

        Shards are named by their content, and old ones stay for clients with an older index.
        """
        for subdir in SUBDIRS:
            for shard in (self.staging / subdir).glob("shards/*"):
                _move(shard, self.folder / subdir / "shards" / shard.name)
            name = f"{subdir}/repodata.json"
            self._write_revision(entries[-1], subdir, load(Location(self.staging), name) or {})
            for entry in entries[:-1]:
                packed, plain = revisions.index_paths(entry.revision, subdir)
                data = load(self.location, packed) or load(self.location, plain)
                if data:
                    self._write_revision(entry, subdir, data)
        before = {n: sha256_file(self.folder / n)
                  for n in INDEX_FILES if log.holds(n, self.location.read(n))}  # fmt: skip
        index = {name: sha256_file(self.staging / name) for name in INDEX_FILES}
        file = self.folder / revisions.LOG
        self._write(revisions.dump(Log(entries, log.serial + 1, index, before)), file)
        for name in INDEX_FILES:
            _move(self.staging / name, self.folder / name)
        self._write(revisions.dump(Log(entries, log.serial + 2, index)), file)

    def _write_revision(self, entry: Revision, subdir: str, data: dict[str, Any]) -> None:
        """Write the index of a revision, whose packages are the channel's (CEP 15)."""
        info = data.get("info", {}) | {"base_url": f"../../../{subdir}/"}
        paths = revisions.index_paths(entry.revision, subdir)
        present = [load(self.location, path) for path in paths]
        data = data | {"info": info, "repodata_version": 2}
        if present != [data, data]:
            self._write(json.dumps(data), *(self.folder / path for path in paths))

    def _write(self, text: str, *targets: Path) -> None:
        """Write each target by one rename, those named .zst compressed."""
        for target in targets:
            packed = target.suffix == ".zst"
            partial = self.staging / target.name
            partial.write_bytes(zstandard.compress(text.encode(), 19) if packed else text.encode())
            _move(partial, target)


def headers() -> str:
    """Return what Netlify and Cloudflare Pages read in a site's root: they join what overlaps."""
    rules = {f"/{file}": "no-cache" for file in (revisions.LOG, pypi.TABLE, *INDEX_FILES)}
    # shards are named by their content
    rules |= {f"/{d}/shards/*": "public, max-age=31536000, immutable" for d in SUBDIRS}
    return "".join(f"{path}\n  Cache-Control: {value}\n" for path, value in rules.items())


def _named(dists: set[str], files: set[str]) -> set[str]:
    """Find the files of builds NAME-VERSION-BUILD. Raises ForgeError for an unknown build."""
    known = {Path(file).stem for file in files}
    if lost := ", ".join(sorted(dists - known)):
        raise ForgeError(f"no such build {lost}; there are: {', '.join(sorted(known)) or 'none'}")
    return {file for file in files if Path(file).stem in dists}


def _move(source: Path, target: Path) -> None:
    """Rename into place, readable for a web server."""
    target.parent.mkdir(parents=True, exist_ok=True)
    source.chmod(0o644)
    source.replace(target)
