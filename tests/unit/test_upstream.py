# SPDX-License-Identifier: BSD-3-Clause
"""Each patch has a report to its upstream project, and tools/upstream_links.py checks the links."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.patches import GOOD as PATCH
from support.project import CHECKOUT
from support.servers import QuietHandler, served

FOLDER = CHECKOUT / "patches"
KEYS = {"to", "title", "state", "patches", "seen"}
STATE = re.compile(r"unsent|(sent|merged) https://\S+|moot \S.*")
REPORTS = sorted(FOLDER.glob("*/*.report.md"))


def list_patches(folder: Path) -> set[str]:
    """Return the patches below a folder, each as PROJECT/FILE."""
    return {str(path.relative_to(folder)) for path in folder.glob("*/*.patch")}


def find_faults(text: str) -> Iterator[str]:
    """Yield the faults of a report."""
    match = re.fullmatch(r"---\n(.*?)\n---\n(.*)", text, re.S)
    head = yaml.safe_load(match[1]) if match else None
    if not match or not isinstance(head, dict):
        yield "no head between two lines ---"
        return
    if head.keys() != KEYS:
        yield f"the head's keys are not {', '.join(sorted(KEYS))}"
        return
    if not str(head["to"]).startswith("https://github.com/"):
        yield "`to` is no address on GitHub"
    if not STATE.fullmatch(str(head["state"])):
        yield f"`state` is {head['state']!r}"
    if len(match[2].split()) < 40:
        yield "the body has fewer than 40 words"
    if re.search(r"strix-forge|/work/|/tmp/", match[2]):
        yield "the body names this repository or a machine's path"
    for language, program in re.findall(r"^```(python|sh)\n(.*?)^```$", match[2], re.S | re.M):
        for error in find_syntax_errors(language, program):
            yield f"{language}: {error}"


def find_syntax_errors(language: str, program: str) -> Iterator[str]:
    """Yield the syntax errors of a program in Python or sh."""
    if language == "python":
        try:
            ast.parse(program)
        except SyntaxError as error:
            yield str(error)
    else:
        done = subprocess.run(
            ["sh", "-n"], input=program, capture_output=True, text=True, check=False
        )
        yield from done.stderr.splitlines()


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_report_has_its_form(path: Path) -> None:
    assert list(find_faults(path.read_text())) == []


def test_each_patch_has_one_report() -> None:
    patches: list[str] = []
    for path in REPORTS:
        head = path.read_text().removeprefix("---\n").split("\n---\n")[0]
        patches += yaml.safe_load(head)["patches"]
    assert sorted(patches) == sorted(list_patches(FOLDER))


GOOD = """---
to: https://github.com/a/b
title: t
state: unsent
patches: []
seen: nothing ran
---
{}
```python
print(1)
```
""".format("word " * 40)


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("---\nto", "to", "no head"),
        ("seen: nothing ran\n", "", "keys are not"),
        ("https://github.com/a/b", "them", "no address"),
        ("unsent", "sent it", "`state` is"),
        ("unsent", "moot", "`state` is"),
        ("word word ", "", "fewer than 40 words"),
        ("print(1)", "print(", "was never closed"),
        ("```python\nprint(1)", "```sh\nif true", "python|sh|unexpected"),
        ("word word", "strix-forge word", "names this repository"),
    ],
)
def test_a_bad_report_is_found(old: str, new: str, finding: str) -> None:
    assert list(find_faults(GOOD)) == []
    assert re.search(finding, "\n".join(find_faults(GOOD.replace(old, new))))


# --- The links in Upstream-Status. `forge outdated` checks them, here with a mock of GitHub's API.

OPEN = {"state": "open", "labels": []}
CLOSED = {"state": "closed", "closed_at": "2026-09-14T10:00:00Z", "labels": []}
MERGED = CLOSED | {"pull_request": {"merged_at": "2026-09-14T10:00:00Z"}}
LANDED = CLOSED | {"pull_request": {"merged_at": None}, "labels": [{"name": "Merged"}]}
EVENTS = [{"event": "labeled", "commit_id": None}, {"event": "closed", "commit_id": "c0ffee"}]
RELEASE = {"draft": False, "prerelease": False}
RELEASES = [
    RELEASE | {"tag_name": "v4", "published_at": "2026-12-01"},
    RELEASE | {"tag_name": "v3", "published_at": "2026-11-01", "prerelease": True},
    RELEASE | {"tag_name": "v2", "published_at": "2026-10-01"},
    RELEASE | {"tag_name": "v1", "published_at": "2026-08-01"},
]
ANSWERS: dict[str, Any] = {
    "/repos/a/b/issues/1": OPEN,
    "/repos/a/b/issues/2": CLOSED,
    "/repos/a/b/issues/3": MERGED,
    "/repos/a/b/issues/4": LANDED,
    "/repos/a/b/issues/3/events": EVENTS,
    "/repos/a/b/issues/4/events": EVENTS,
    "/repos/a/b/releases": RELEASES,
    "/repos/a/b/compare/v2...c0ffee": {"status": "diverged"},
    "/repos/a/b/compare/v4...c0ffee": {"status": "behind"},
    "/repos/c/d/issues/5": MERGED,
    "/repos/c/d/issues/5/events": EVENTS,
    "/repos/c/d/releases": RELEASES[2:],
    "/repos/c/d/compare/v2...c0ffee": {"status": "ahead"},
    "/repos/a/b/issues/6": "no object",
}


class GitHub(QuietHandler):
    """A handler that sends the answer that ANSWERS has for the path, or 404."""

    def do_GET(self) -> None:
        answer = ANSWERS.get(self.path.partition("?")[0])
        self.send_response(200 if answer is not None else 404)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


RunTool = Callable[..., tuple[int, str]]


@pytest.fixture
def run_tool(tmp_path: Path) -> Iterator[RunTool]:
    """A function that runs tools/upstream_links.py on a patch with this Upstream-Status.

    It returns the exit code and the output.
    """

    def run(status: str, url: str = "") -> tuple[int, str]:
        patch = tmp_path / "alpha" / "0001-word.patch"
        patch.parent.mkdir(exist_ok=True)
        patch.write_text(PATCH.replace("Inappropriate (a test)", status))
        command = [sys.executable, str(CHECKOUT / "tools/upstream_links.py"), str(tmp_path)]
        environment = os.environ | {"GITHUB_API_URL": url or api.rstrip("/")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.stderr == ""
        return done.returncode, done.stdout

    with served(tmp_path, GitHub) as api:
        yield run


HUB = "https://github.com/a/b"


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (f"Pending as {HUB}/pull/1", 0, "pull/1: open"),
        (f"Pending as {HUB}/issues/2", 1, "closed 2026-09-14; the patch has the status Pending"),
        (f"Pending {HUB}/issues/2 closed", 0, "closed 2026-09-14\n"),
        (
            f"Submitted {HUB}/pull/3",
            1,
            "merged 2026-09-14, in v4; the patch has the status Submitted",
        ),
        (f"Backport {HUB}/pull/4", 0, "merged 2026-09-14, in v4\n"),
        ("Backport https://github.com/c/d/pull/5", 0, "merged 2026-09-14, in no release yet\n"),
        (f"Pending {HUB}/pull/6", 3, "not known"),
        (f"Pending {HUB}/pull/7", 3, "not known: HTTP Error 404"),
        (f"Pending {HUB}/pull/1 and {HUB}/pull/3", 1, "pull/3: merged"),
        (f"Pending {HUB}/pull/7 and {HUB}/pull/3", 1, "pull/3: merged"),
        ("Pending nobody was told", 0, ""),
    ],
)
def test_state(run_tool: RunTool, status: str, code: int, message: str) -> None:
    exit_code, text = run_tool(status)
    assert exit_code == code, text
    assert message in text


def test_github_out_of_reach(run_tool: RunTool) -> None:
    code, text = run_tool(f"Pending {HUB}/pull/1", "http://127.0.0.1:1")
    assert code == 3
    assert "not known: " in text
