# SPDX-License-Identifier: BSD-3-Clause
"""Print the state of the issues and pull requests that patches name.

    python tools/upstream_links.py [FOLDER_OF_PATCHES]

There is a line for each link in the `Upstream-Status` of a patch. If a pull request was merged, the
line also names the first release that has it. Exit 1 if an issue or pull request was merged or
closed, and its patch, with the status Pending or Submitted, does not mention that; otherwise exit 3
if GitHub did not answer a request. GH_TOKEN or GITHUB_TOKEN raises GitHub's limit of 60 requests an
hour. GITHUB_API_URL is the address of GitHub's API, as in a workflow.
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
# Headers that may be sent to any server.
PUBLIC = ("Accept", "User-agent")
# Maximum bytes of an answer. A hundred releases with their notes have a hundredth of that.
LIMIT = 1 << 26
# Number of releases that are searched for a commit, beginning with the first after its merge.
RELEASES = 5
PORTS = {"http": 80, "https": 443}
UNKNOWN = "not known"


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but does not send the token to another scheme, host or port.

    GitHub redirects requests for a renamed repository within its own server.
    """

    def redirect_request(self, req, *answer):  # type: ignore[no-untyped-def]
        """Return the request that follows a redirect, without the token if the server differs."""
        next_request = super().redirect_request(req, *answer)
        if next_request and is_elsewhere(next_request.full_url, req.full_url):
            headers = next_request.headers
            next_request.headers = {name: headers[name] for name in headers if name in PUBLIC}
        return next_request


def is_elsewhere(url: str, other: str) -> bool:
    """Return whether two URLs differ in scheme, host or port."""
    return parse_server(url) != parse_server(other)


def parse_server(url: str) -> tuple[str, str | None, int]:
    """Return the scheme, host and port of a URL. Raise KeyError for a scheme other than HTTP(S)."""
    parts = urlsplit(url)
    port = PORTS[parts.scheme]
    return parts.scheme, parts.hostname, parts.port or port


def request_api(path: str) -> Any:
    """Send a request to GitHub's API, and return the answer.

    Args:
        path: The part of the API's URL after `repos/`.

    Raises:
        OSError: GitHub does not answer, or answers with an error.
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

    A closing commit counts as well, because PyTorch's bot closes pull requests instead of merging.
    """
    events = request_api(f"{repository}/issues/{number}/events?per_page=100")
    for event in reversed(events):
        if event["event"] in ("merged", "closed") and event["commit_id"]:
            return event["commit_id"]
    return ""


def find_release(repository: str, commit: str, merged: str) -> str:
    """Return `in TAG` for the first release whose history has a commit, or `in no release yet`.

    Only the first RELEASES final releases after the merge are searched. If a change was
    cherry-picked to a release branch, it has another commit there. That release is not recognized.

    Args:
        repository: The repository as OWNER/NAME.
        commit: The commit.
        merged: The time of the merge, in ISO 8601.
    """
    later = []
    for release in request_api(f"{repository}/releases?per_page=100"):
        is_final = not release["draft"] and not release["prerelease"]
        if is_final and release["published_at"] > merged:
            later.append(release)
    later.sort(key=lambda release: release["published_at"])
    for release in later[:RELEASES]:
        tag = release["tag_name"]
        comparison = request_api(f"{repository}/compare/{tag}...{commit}")
        if comparison["status"] in ("behind", "identical"):
            return f"in {tag}"
    return "in no release yet"


def find_state(repository: str, number: str) -> str:
    """Return the state of an issue or pull request: open, closed DATE, or merged DATE, RELEASE."""
    thread = request_api(f"{repository}/issues/{number}")
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
    """Return the state of a link's target, or UNKNOWN and the reason why it cannot be read."""
    repository, number = LINK.fullmatch(link).groups()  # type: ignore[union-attr]
    try:
        return find_state(repository, number)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        return f"{UNKNOWN}: {error}"


def list_links(patches: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield a tuple for each link in a patch's status: patch, first word of the status, link."""
    for path in sorted(patches.glob("*/*.patch")):
        message = path.read_text(encoding="utf-8").partition("\n---\n")[0]
        lines = re.findall(r"^Upstream-Status: (.+)$", message, re.M)
        if not lines:
            continue
        status = lines[0]
        for match in LINK.finditer(status):
            yield path, status.split()[0], match[0]


def is_news(patch: Path, status: str, link: str, state: str) -> bool:
    """Return whether the target of a link was merged or closed, and the patch does not mention it.

    Args:
        patch: The patch.
        status: The first word of its Upstream-Status. A state is news only if this word is Pending
            or Submitted. A Backport, for example, was already merged.
        link: The link.
        state: The state of the link's target.
    """
    word = state.split()[0]
    if status not in ("Pending", "Submitted") or word not in ("merged", "closed"):
        return False
    text = patch.read_text(encoding="utf-8")
    return not re.search(rf"{re.escape(link)} {word}\b", text)


def main(patches: Path) -> int:
    """Print the state of each link's target, and return the exit code."""
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
            mark = f"; the patch has the status {status}: update it"
        print(f"{path.parent.name}/{path.name}: {link}: {state}{mark}")
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    folder = Path(__file__).parents[1] / "patches"
    if sys.argv[1:]:
        folder = Path(sys.argv[1])
    sys.exit(main(folder))
