# SPDX-License-Identifier: BSD-3-Clause
"""What became of the issues and pull requests that patches name, and in which release.

    python tools/upstream_links.py [FOLDER_OF_PATCHES]

Prints a line for each link in an `Upstream-Status`. Exit 1 if one was merged or closed that its
patch still calls open, 3 if GitHub did not answer for one. `GH_TOKEN` raises GitHub's limit of 60
questions an hour; `GITHUB_API_URL` is its API, as in a workflow.
"""

import json
import os
import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

API = os.environ.get("GITHUB_API_URL") or "https://api.github.com"
LINK = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+)/(?:pull|issues)/(\d+)")
PUBLIC = ("Accept", "User-agent")  # headers that any server may see
LIMIT = 1 << 26  # bytes of an answer; a hundred releases with their notes have a hundredth
RELEASES = 5  # asked for a commit, from the first after it on


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect to another scheme, host or port without the token."""

    def redirect_request(self, req, *answer):  # type: ignore[no-untyped-def]
        """Return the next request; GitHub redirects what was renamed, on its own server."""
        made = super().redirect_request(req, *answer)
        if made and server_of(made.full_url) != server_of(req.full_url):
            made.headers = {k: v for k, v in made.headers.items() if k in PUBLIC}
        return made


def server_of(url: str) -> tuple[str, str | None, int | None]:
    """Return scheme, host and port of a URL. Raises KeyError for one that is not of HTTP."""
    parts = urlsplit(url)
    port = {"http": 80, "https": 443}[parts.scheme]
    return parts.scheme, parts.hostname, parts.port or port


def ask(path: str) -> Any:
    """Return GitHub's answer. Raises OSError where it gives none, ValueError for an endless one."""
    request = urllib.request.Request(f"{API}/repos/{path}")
    if token := os.environ.get("GH_TOKEN") or os.environ.get("GITHUB_TOKEN"):
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.build_opener(Redirects).open(request, timeout=60) as answer:
        data = answer.read(LIMIT + 1)
    if len(data) > LIMIT:
        raise ValueError(f"{API} sent more than {LIMIT} bytes")
    return json.loads(data)


def commit_of(repository: str, number: str) -> str:
    """Find the commit that merged a pull request; PyTorch's bot closes it with one instead."""
    events = ask(f"{repository}/issues/{number}/events?per_page=100")
    commits = [e["commit_id"] for e in events if e["event"] in ("merged", "closed")]
    return next((commit for commit in reversed(commits) if commit), "")


def release_with(repository: str, commit: str, after: str) -> str:
    """Name the first release whose history has the commit.

    A release branch that picked it has another commit, and is not found.
    """
    later = [
        release
        for release in ask(f"{repository}/releases?per_page=100")
        if not (release["draft"] or release["prerelease"]) and release["published_at"] > after
    ]
    for release in sorted(later, key=lambda r: r["published_at"])[:RELEASES]:
        compared = ask(f"{repository}/compare/{release['tag_name']}...{commit}")
        if compared["status"] in ("behind", "identical"):
            return f"in {release['tag_name']}"
    return "in no release yet"


def state_of(repository: str, number: str) -> str:
    """Say what became of an issue or pull request: open, closed DATE or merged DATE, RELEASE."""
    thread = ask(f"{repository}/issues/{number}")
    if thread["state"] == "open":
        return "open"
    day = thread["closed_at"][:10]
    landed = "Merged" in [label["name"] for label in thread["labels"]]
    if not landed and not (thread.get("pull_request") or {}).get("merged_at"):
        return f"closed {day}"
    commit = commit_of(repository, number)
    where = release_with(repository, commit, thread["closed_at"]) if commit else "commit unknown"
    return f"merged {day}, {where}"


def links(patches: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield each patch's status and the links in it."""
    for path in sorted(patches.glob("*/*.patch")):
        text = path.read_text(encoding="utf-8").partition("\n---\n")[0]
        status = re.findall(r"^Upstream-Status: (.+)$", text, re.M)
        for match in LINK.finditer(status[0] if status else ""):
            yield path, status[0].split()[0], match[0]


def main(patches: Path) -> int:
    """Print what became of each link, asked once; returns the exit code."""
    known: dict[str, str] = {}
    codes = {0}
    for path, status, link in links(patches):
        if link not in known:
            try:
                known[link] = state_of(*LINK.fullmatch(link).groups())  # type: ignore[union-attr]
            except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
                known[link] = f"not known: {error}"
        state = known[link]
        # a Backport was merged, and who calls it merged or closed knows
        news = state.startswith(("merged", "closed")) and status in ("Pending", "Submitted")
        said = path.read_text(encoding="utf-8")
        news = news and not re.search(rf"{re.escape(link)} {state.split()[0]}\b", said)
        codes.add(3 if state.startswith("not known") else int(news))
        mark = f"; its patch says {status}: look again" if news else ""
        print(f"{path.parent.name}/{path.name}: {link}: {state}{mark}")
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main(Path(*sys.argv[1:]) if sys.argv[1:] else Path(__file__).parents[1] / "patches"))
