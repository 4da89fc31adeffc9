# SPDX-License-Identifier: BSD-3-Clause
"""How a channel is served: what hosts are asked to tell clients, and what a server tells them."""

import re
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime

from forge import network
from forge.channel.revisions import LOG
from forge.conda.location import Location
from forge.conda.pypi import TABLE
from forge.errors import NotAttempted
from forge.project import SUBDIRS
from forge.sources.download import Downloader, HTTPError

HEADERS = "_headers"
INDEXES = (
    "repodata_shards.msgpack.zst", "repodata.json.zst", "repodata.json",
    "repodata_from_packages.json", "run_exports.json.zst", "run_exports.json",
)  # fmt: skip
# Seconds for which an index may be kept: a yank must be seen soon.
LIMIT = 300


def headers() -> str:
    """Return what Netlify and Cloudflare Pages read in a site's root: they join what overlaps."""
    asked = [LOG, TABLE, *(f"{subdir}/{file}" for subdir in SUBDIRS for file in INDEXES)]
    rules = {f"/{file}": "no-cache" for file in asked}
    for subdir in SUBDIRS:  # shards are named by their content
        rules[f"/{subdir}/shards/*"] = "public, max-age=31536000, immutable"
    return "".join(f"{path}\n  Cache-Control: {value}\n" for path, value in rules.items())


def kept_for(answer: Mapping[str, str]) -> int:
    """Count the seconds a client may keep an answer without asking anew (RFC 9111, section 4.2)."""
    control = (answer.get("Cache-Control") or "").lower()
    if re.search(r"\bno-(cache|store)\b", control):
        return 0
    if age := re.search(r"\bmax-age=\"?(\d+)", control):
        return int(age[1])
    try:
        date, changed = (
            parsedate_to_datetime(answer[name]).timestamp() for name in ("Date", "Last-Modified")
        )
    except (KeyError, TypeError, ValueError):
        return 0
    return max(0, int(date - changed) // 10)  # what clients do that were told nothing


def kept(location: Location) -> Iterator[tuple[str, int]]:
    """Yield each index of a served channel that answers, and the seconds that clients keep it."""
    client = Downloader().client
    for subdir in SUBDIRS:
        for file in INDEXES[:3]:
            name = f"{subdir}/{file}"
            try:
                with client.stream("GET", network.mirrored(f"{location.url}/{name}")) as answer:
                    if answer.is_success:  # else missing, found elsewhere
                        yield name, kept_for(answer.headers)
            except HTTPError as error:
                raise NotAttempted(f"{location.url}/{name}: {error}") from None
