# SPDX-License-Identifier: BSD-3-Clause
"""The history of a published channel: `revisions/log.json`, and the index of each revision.

A publish writes its decision to the log before it switches the index. The log says which files
the channel has and which of them are yanked, so the next publish can complete a killed one.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from forge.conda.index import FILE_NAME, SHA256
from forge.conda.location import Location
from forge.errors import ForgeError, Refused
from forge.files import read_text, write_text
from forge.project import SUBDIRS

LOG = "revisions/log.json"


@dataclass(frozen=True)
class Revision:
    """One publish. Files are named SUBDIR/FILE; `time` is ISO 8601 in UTC.

    `index` is the sha256 of each index file: by it clients know an older index beside a newer log.
    """

    revision: int
    added: list[str] = field(default_factory=list)
    yanked: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    index: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        changes = {"added": self.added, "yanked": self.yanked, "restored": self.restored}
        counts = [f"{len(files)} {word}" for word, files in changes.items() if files]
        return f"revision {self.revision}: {', '.join(counts)}"

    def is_whole(self, number: int) -> bool:
        """Return whether this is the entry of that number, with values of the right kinds."""
        lists = [self.added, self.yanked, self.restored]
        files = [file.split("/", 1) for files in lists for file in files]
        datetime.fromisoformat(self.time)
        return (
            self.revision == number
            and all(isinstance(files, list) for files in lists)
            and all(
                n.split("/")[0] in SUBDIRS and SHA256.fullmatch(self.index[n]) for n in self.index
            )
            and all(d in SUBDIRS and FILE_NAME.fullmatch(name) for d, name in files)
        )


def index_paths(revision: int, subdir: str) -> list[str]:
    """List where the channel keeps the index of a revision, in the forms that clients ask for."""
    path = f"revisions/{revision}/{subdir}/repodata.json"
    return [f"{path}.zst", path]


def read(location: Location) -> list[Revision]:
    """Read the revisions of a channel, oldest first; none if it has no log."""
    text = location.read(LOG)
    try:
        entries = [] if text is None else json.loads(text)
        log = [Revision(**entry) for entry in entries]
        whole = isinstance(entries, list) and all(e.is_whole(n) for n, e in enumerate(log, 1))
    except (ValueError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise ForgeError(f"{location}/{LOG} is damaged; restore it from a copy")
    return log


def require_not_reset(location: Location, seen: Path, accept: bool = False) -> None:
    """Remember a channel's log in `seen`; raise Refused if it lacks what it had the last time.

    Likewise for an index that is not the log's last. Whoever serves older ones takes back yanks and
    fixes; `accept` takes them. A channel without a log has nothing that could be compared.
    """
    log, text = read(location), read_text(seen) if seen.exists() else "{}"
    try:
        known = json.loads(text)
        number, digest = known.get(location.url, (0, _digest([])))
        older = _digest(log[:number]) != digest
    except (ValueError, TypeError, AttributeError):
        raise ForgeError(f"{seen} is damaged; delete it to trust channels as they are") from None
    if older and not accept:
        raise Refused(
            f"{location} has {len(log)} revisions, and not the {number} that it had before: it was "
            "reset, or an old copy is served. --accept-older takes it as it is"
        )
    for name, says in log[-1].index.items() if log and not accept else ():
        if sha256(location.read(name) or b"").hexdigest() != says:
            raise Refused(
                f"{location}/{name} is not that of revision {len(log)}: an old copy is served, or "
                "a publish is under way: try again. --accept-older takes it as it is"
            )
    if log or number:
        seen.parent.mkdir(parents=True, exist_ok=True)
        write_text(seen, json.dumps(known | {location.url: (len(log), _digest(log))}, indent=1))


def _digest(log: list[Revision]) -> str:
    # a publish that completes a killed one may write the last index anew
    return sha256(dump([replace(entry, index={}) for entry in log]).encode()).hexdigest()


def dump(log: list[Revision]) -> str:
    """Format the log as its file has it."""
    return json.dumps([asdict(entry) for entry in log], indent=1)


def state(log: list[Revision]) -> tuple[set[str], set[str]]:
    """Compute the files of the channel after its last revision, and which of them are yanked."""
    files: set[str] = set()
    yanked: set[str] = set()
    for entry in log:
        files |= set(entry.added)
        yanked = (yanked | set(entry.yanked)) - set(entry.restored)
    return files, yanked
