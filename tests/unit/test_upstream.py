# SPDX-License-Identifier: BSD-3-Clause
"""Each patch has a report to its project, and each report what that project needs to act on it."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.project import CHECKOUT

FOLDER = CHECKOUT / "upstream"
KEYS = {"to", "title", "state", "patches", "seen"}
STATE = re.compile(r"unsent|(sent|merged) https://\S+|moot \S.*")
REPORTS = sorted(FOLDER.glob("*/*.md"))


def patches_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.glob("*/*.patch")}


def findings(text: str) -> Iterator[str]:
    """Yield what a report lacks."""
    match = re.fullmatch(r"---\n(.*?)\n---\n(.*)", text, re.S)
    head = yaml.safe_load(match[1]) if match else None
    if not match or not isinstance(head, dict):
        yield "no head between two lines ---"
        return
    if head.keys() != KEYS:
        yield f"the head's keys are not {', '.join(sorted(KEYS))}"
        return
    if not str(head["to"]).startswith("https://github.com/"):
        yield "`to` is no address at GitHub"
    if not STATE.fullmatch(str(head["state"])):
        yield f"`state` is {head['state']!r}"
    if len(match[2].split()) < 40:
        yield "the body says too little"
    if re.search(r"strix-forge|/work/|/tmp/", match[2]):
        yield "the body names this repository or a machine's path"
    for language, program in re.findall(r"^```(python|sh)\n(.*?)^```$", match[2], re.S | re.M):
        yield from (f"{language}: {wrong}" for wrong in unreadable(language, program))


def unreadable(language: str, program: str) -> Iterator[str]:
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
    assert list(findings(path.read_text())) == []


def test_each_patch_has_one_report() -> None:
    named = [
        p
        for path in REPORTS
        for p in yaml.safe_load(path.read_text()[4:].split("\n---\n")[0])["patches"]
    ]
    assert sorted(named) == sorted(patches_of(CHECKOUT / "patches"))


def test_the_table_has_a_row_for_each_report() -> None:
    rows = re.findall(r"(?m)^\| \[(\S+)\]\((\S+)\) \| \S", (FOLDER / "README.md").read_text())
    reports = [str(path.relative_to(FOLDER)) for path in REPORTS]
    assert rows == [(name.removesuffix(".md"), name) for name in reports]


def test_the_table_says_what_the_report_says() -> None:
    """A program that ran on a card or a CPU was `run on` it; one that did not was not."""
    for line in re.findall(r"(?m)^\| \[.+$", (FOLDER / "README.md").read_text()):
        _, report, program, _, _ = (cell.strip() for cell in line.split("|"))
        head = (FOLDER / re.search(r"\((.+)\)", report)[1]).read_text().split("\n---\n")[0]
        said = re.search(r"(?m)^seen: (.+)$", head)[1]
        ran = "run on" in said and not re.match(r'"?not run', said)
        assert ran == (not re.match("no:|has no program", program)), line
        assert all(card in said for card in ("H100",) if card in program), line


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
        ("word word ", "", "too little"),
        ("print(1)", "print(", "was never closed"),
        ("```python\nprint(1)", "```sh\nif true", "python|sh|unexpected"),
        ("word word", "strix-forge word", "names this repository"),
    ],
)
def test_a_bad_report_is_found(old: str, new: str, finding: str) -> None:
    assert list(findings(GOOD)) == []
    assert re.search(finding, "\n".join(findings(GOOD.replace(old, new))))
