# SPDX-License-Identifier: BSD-3-Clause
"""What became of the issues and pull requests that patches name, and in which release.

    python tools/upstream_links.py [FOLDER_OF_PATCHES]

Prints a line for each link in an `Upstream-Status`. Exit 1 if one was merged or closed whose patch
still calls it open, 3 if GitHub did not answer for one. `GH_TOKEN` raises GitHub's limit of 60
requests an hour; `GITHUB_API_URL` is the address of its API, as in a workflow.
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
# Headers that any server may get.
PUBLIC = ("Accept", "User-agent")
# Bytes of an answer. A hundred releases with their notes have a hundredth of it.
LIMIT = 1 << 26
# Releases to look for a commit in, from the first one after it.
RELEASES = 5
PORTS = {"http": 80, "https": 443}
UNKNOWN = "not known"


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect to another scheme, host or port without the token.

    GitHub redirects requests for what was renamed, on its own server.
    """

    def redirect_request(self, req, *answer):  # type: ignore[no-untyped-def]
        """Return the request to send next."""
        next_request = super().redirect_request(req, *answer)
        if next_request and is_elsewhere(next_request.full_url, req.full_url):
            headers = next_request.headers
            next_request.headers = {name: headers[name] for name in headers if name in PUBLIC}
        return next_request


def is_elsewhere(url: str, other: str) -> bool:
    """Return whether two URLs differ in scheme, host or port."""
    return parse_server(url) != parse_server(other)


def parse_server(url: str) -> tuple[str, str | None, int]:
    """Return scheme, host and port of a URL. Raises KeyError for one that is not of HTTP."""
    parts = urlsplit(url)
    port = PORTS[parts.scheme]
    return parts.scheme, parts.hostname, parts.port or port


def ask(path: str) -> Any:
    """Return GitHub's answer to a request.

    Args:
        path: The part of the API's URL after `repos/`.

    Raises:
        OSError: GitHub does not answer.
        ValueError: The answer has more than LIMIT bytes, or is not JSON.
    """
    request = urllib.request.Request(f"{API}/repos/{path}")
    token = os.environ.get("GH_TOKEN") or os.environ.get("GITHUB_TOKEN")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    opener = urllib.request.build_opener(Redirects)
    with opener.open(request, timeout=60) as answer:
        data = answer.read(LIMIT + 1)
    if len(data) > LIMIT:
        raise ValueError(f"{API} sent more than {LIMIT} bytes")
    return json.loads(data)


def find_commit(repository: str, number: str) -> str:
    """Return the commit that merged a pull request, or "".

    PyTorch's bot does not merge a pull request, but closes it with a commit.
    """
    events = ask(f"{repository}/issues/{number}/events?per_page=100")
    for event in reversed(events):
        if event["event"] in ("merged", "closed") and event["commit_id"]:
            return event["commit_id"]
    return ""


def find_release(repository: str, commit: str, merged: str) -> str:
    """Describe the first release whose history has a commit.

    A release branch on which the change was picked has another commit, and is not recognized.

    Args:
        repository: OWNER/NAME.
        commit: The commit.
        merged: When it was merged, in ISO 8601.
    """
    later = []
    for release in ask(f"{repository}/releases?per_page=100"):
        is_final = not release["draft"] and not release["prerelease"]
        if is_final and release["published_at"] > merged:
            later.append(release)
    later.sort(key=lambda release: release["published_at"])
    for release in later[:RELEASES]:
        tag = release["tag_name"]
        comparison = ask(f"{repository}/compare/{tag}...{commit}")
        if comparison["status"] in ("behind", "identical"):
            return f"in {tag}"
    return "in no release yet"


def find_state(repository: str, number: str) -> str:
    """Describe an issue or pull request: open, closed DATE or merged DATE, RELEASE."""
    thread = ask(f"{repository}/issues/{number}")
    if thread["state"] == "open":
        return "open"
    closed = thread["closed_at"]
    day = closed[:10]
    labels = [label["name"] for label in thread["labels"]]
    pull_request = thread.get("pull_request") or {}
    is_merged = "Merged" in labels or pull_request.get("merged_at")
    if not is_merged:
        return f"closed {day}"
    commit = find_commit(repository, number)
    if not commit:
        return f"merged {day}, commit unknown"
    return f"merged {day}, {find_release(repository, commit, closed)}"


def read_state(link: str) -> str:
    """Describe what a link leads to; UNKNOWN and the reason if GitHub does not tell."""
    repository, number = LINK.fullmatch(link).groups()  # type: ignore[union-attr]
    try:
        return find_state(repository, number)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        return f"{UNKNOWN}: {error}"


def list_links(patches: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield each link in the status of a patch: the patch, the status's first word, the link."""
    for path in sorted(patches.glob("*/*.patch")):
        message = path.read_text(encoding="utf-8").partition("\n---\n")[0]
        lines = re.findall(r"^Upstream-Status: (.+)$", message, re.M)
        if not lines:
            continue
        status = lines[0]
        for match in LINK.finditer(status):
            yield path, status.split()[0], match[0]


def is_news(patch: Path, status: str, link: str, state: str) -> bool:
    """Return whether something was merged or closed that the patch does not call so.

    Args:
        patch: The patch.
        status: The first word of its Upstream-Status. With Backport, it was merged before.
        link: The link.
        state: What the link leads to.
    """
    word = state.split()[0]
    if status not in ("Pending", "Submitted") or word not in ("merged", "closed"):
        return False
    text = patch.read_text(encoding="utf-8")
    return not re.search(rf"{re.escape(link)} {word}\b", text)


def main(patches: Path) -> int:
    """Print what became of each link; returns the exit code."""
    states: dict[str, str] = {}
    codes = {0}
    for path, status, link in list_links(patches):
        if link not in states:
            states[link] = read_state(link)
        state = states[link]
        mark = ""
        if state.startswith(UNKNOWN):
            codes.add(3)
        elif is_news(path, status, link, state):
            codes.add(1)
            mark = f"; its patch says {status}: look again"
        print(f"{path.parent.name}/{path.name}: {link}: {state}{mark}")
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    folder = Path(__file__).parents[1] / "patches"
    if sys.argv[1:]:
        folder = Path(sys.argv[1])
    sys.exit(main(folder))
