# SPDX-License-Identifier: BSD-3-Clause
"""The history of a published channel: `revisions/log.json`, and the index of each revision.

A publish writes its decision to the log before it switches the index. The log says which files
the channel has and which of them are yanked, so the next publish can complete a killed one.
"""

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from forge.channel.location import Location
from forge.errors import ForgeError

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


def index_path(revision: int, subdir: str) -> str:
    """Where the channel keeps the index of a revision."""
    return f"revisions/{revision}/{subdir}/repodata.json.zst"


def read(location: Location) -> list[Revision]:
    """The revisions of a channel, oldest first; none if it has no log."""
    text = location.read(LOG)
    try:
        return [] if text is None else [Revision(**entry) for entry in json.loads(text)]
    except (ValueError, TypeError):
        raise ForgeError(f"{location}/{LOG} is damaged; restore it from a copy") from None


def dump(log: list[Revision]) -> str:
    return json.dumps([asdict(entry) for entry in log], indent=1)


def state(log: list[Revision]) -> tuple[set[str], set[str]]:
    """The files of the channel after its last revision, and which of them are yanked."""
    files: set[str] = set()
    yanked: set[str] = set()
    for entry in log:
        files |= set(entry.added)
        yanked = (yanked | set(entry.yanked)) - set(entry.restored)
    return files, yanked
