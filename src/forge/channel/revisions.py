# SPDX-License-Identifier: BSD-3-Clause
"""The history of a published channel: `revisions/log.json`, and the index of each revision.

The log says which files the channel has, which of them are yanked, and the sha256 of every form of
the index: it is to a channel what TUF's snapshot is to a repository. Its attestation, which counts
for some days, is TUF's timestamp.
"""

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock

from forge.conda.attestations import BUNDLE, Publisher
from forge.conda.index import FILE_NAME, SHA256, parse, records
from forge.conda.location import Location
from forge.errors import ForgeError, Refused
from forge.files import read_text, write_text
from forge.project import SUBDIRS

LOG = "revisions/log.json"


@dataclass(frozen=True)
class Revision:
    """One publish. Files are named SUBDIR/FILE; `time` is ISO 8601 in UTC."""

    revision: int
    added: list[str] = field(default_factory=list)
    yanked: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def __str__(self) -> str:
        changes = {"added": self.added, "yanked": self.yanked, "restored": self.restored}
        counts = [f"{len(files)} {word}" for word, files in changes.items() if files]
        return f"revision {self.revision}: {', '.join(counts)}"

    def is_whole(self, number: int) -> bool:
        """Return whether this is the entry of that number, with values of the right kinds."""
        lists = [self.added, self.yanked, self.restored]
        files = [file.split("/", 1) for files in lists for file in files]
        datetime.fromisoformat(self.time)
        kinds = [self.revision == number, *(isinstance(files, list) for files in lists)]
        return all([*kinds, *(d in SUBDIRS and FILE_NAME.fullmatch(name) for d, name in files)])


@dataclass(frozen=True)
class Log:
    """All revisions, oldest first, and the index of the last: the sha256 of each of its files.

    `serial` grows with each writing. `before` has the files that a publish is about to replace.
    """

    revisions: list[Revision] = field(default_factory=list)
    serial: int = 0
    index: dict[str, str] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)

    def is_whole(self) -> bool:
        """Return whether all values are of the right kinds."""
        hashes = [*self.index.items(), *self.before.items()]
        entries = [entry.is_whole(number) for number, entry in enumerate(self.revisions, 1)]
        named = [n.split("/")[0] in SUBDIRS and SHA256.fullmatch(d) for n, d in hashes]
        return all([*entries, *named, type(self.serial) is int and self.serial >= 0])

    def holds(self, name: str, content: bytes | None) -> bool:
        """Return whether an index file is this log's."""
        return sha256(content or b"").hexdigest() in (self.index.get(name), self.before.get(name))


def index_paths(revision: int, subdir: str) -> list[str]:
    """List where the channel keeps the index of a revision, in the forms that clients ask for."""
    path = f"revisions/{revision}/{subdir}/repodata.json"
    return [f"{path}.zst", path]


def read(location: Location) -> Log:
    """Read the log of a channel; an empty one if it has none."""
    return _parsed(location, location.read(LOG))


def _parsed(location: Location, text: bytes | None) -> Log:
    try:
        data = {} if text is None else json.loads(text)
        entries = [Revision(**entry) for entry in data.get("revisions", [])]
        whole = (log := Log(**data | {"revisions": entries})).is_whole()
    except (ValueError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise ForgeError(f"{location}/{LOG} is damaged; restore it from a copy")
    return log


def require_current(
    location: Location, seen: Path, accept: bool = False, publisher: Publisher | None = None
) -> set[str] | None:
    """Return the sha256 of each package that a channel serves, without those that are yanked.

    Raises Refused for a log that lacks what it had the last time (remembered in `seen`), that the
    publisher has not attested of late, if he does, and for an index that is not the log's: whoever
    serves older ones takes back yanks and fixes. `accept` takes them. Returns None then, and for a
    channel without a log, which has nothing that could be compared.
    """
    log = _parsed(location, text := location.read(LOG))
    known, files = _known(location, seen, log, accept), None
    if not accept and publisher and publisher.log_days:
        publisher.require_log(f"{location}/{LOG}", text or b"", location.read(LOG + BUNDLE) or b"")
    if not accept and log.index:
        files = _served(location, log)
    if log.serial or location.url in known:
        known[location.url] = log.serial, len(log.revisions), _digest(log.revisions)
        seen.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(seen.with_suffix(".lock")):
            write_text(seen, json.dumps(known, indent=1))
    return files


def _served(location: Location, log: Log) -> set[str]:
    found: set[str] = set()
    for name in log.index:
        if not log.holds(name, raw := location.read(name)):
            raise Refused(f"{location}/{name} is not that of revision {len(log.revisions)}: an old "
                          "copy is served. --accept-older takes it as it is")  # fmt: skip
        if name.endswith("/repodata.json"):
            data = parse(name, raw or b"")
            usable = records(data).keys() - set(data.get("removed", []))
            found |= {str(records(data)[file].get("sha256")) for file in usable}
    return found


def _known(location: Location, seen: Path, log: Log, accept: bool) -> dict[str, Any]:
    """Read how far channels were. Raises Refused if this one was further, unless accepted."""
    text = read_text(seen) if seen.exists() else "{}"
    try:
        known = json.loads(text)
        serial, number, digest = known.get(location.url, (0, 0, _digest([])))
        older = log.serial < serial or _digest(log.revisions[:number]) != digest
    except (ValueError, TypeError, AttributeError):
        raise ForgeError(f"{seen} is damaged; delete it to trust channels as they are") from None
    if older and not accept:
        raise Refused(f"{location} has {len(log.revisions)} revisions (serial {log.serial}), and "
                      f"not the {number} (serial {serial}) that it had before: it was reset, or an "
                      "old copy is served. --accept-older takes it as it is")  # fmt: skip
    return dict(known)


def _digest(revisions: list[Revision]) -> str:
    return sha256(json.dumps([asdict(entry) for entry in revisions]).encode()).hexdigest()


def dump(log: Log) -> str:
    """Format the log as its file has it."""
    return json.dumps(asdict(log), indent=1)


def state(revisions: list[Revision]) -> tuple[set[str], set[str]]:
    """Compute the files of a channel after its last revision, and which of them are yanked."""
    files: set[str] = set()
    yanked: set[str] = set()
    for entry in revisions:
        files |= set(entry.added)
        yanked = (yanked | set(entry.yanked)) - set(entry.restored)
    return files, yanked
