# SPDX-License-Identifier: BSD-3-Clause
"""The history of a published channel: `revisions/log.json`, and the index of each revision.

The log is what a publish decides, written before the index is switched: it says which files the
channel has and which of them are yanked, and a publish that was killed is completed from it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from forge.channel.places import Folder, Web
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
        changes = ((self.added, "added"), (self.yanked, "yanked"), (self.restored, "restored"))
        counts = [f"{len(files)} {word}" for files, word in changes if files]
        return f"revision {self.revision}: {', '.join(counts)}"


def index_path(revision: int, subdir: str) -> str:
    """Where the index as it was at a revision lies in the channel."""
    return f"revisions/{revision}/{subdir}/repodata.json.zst"


def read(place: Folder | Web) -> list[Revision]:
    """The revisions of a channel, oldest first; none where it has no log."""
    text = place.read(LOG)
    try:
        return [] if text is None else [Revision(**entry) for entry in json.loads(text)]
    except (ValueError, TypeError):
        raise ForgeError(f"{place}/{LOG} is damaged; take it back from a copy") from None


def dump(log: list[Revision]) -> str:
    order = ("revision", "time", "added", "yanked", "restored")
    return json.dumps([{key: asdict(entry)[key] for key in order} for entry in log], indent=1)


def state(log: list[Revision]) -> tuple[set[str], set[str]]:
    """The files that the channel has after its last revision, and those of them that are yanked."""
    files: set[str] = set()
    yanked: set[str] = set()
    for entry in log:
        files |= set(entry.added)
        yanked = (yanked | set(entry.yanked)) - set(entry.restored)
    return files, yanked
