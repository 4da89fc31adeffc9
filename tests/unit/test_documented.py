# SPDX-License-Identifier: BSD-3-Clause
"""What pages name exists: commands of the driver and of both products, tasks, workspaces, files."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from strix_validate.cli import app as validate
from support.commands import understood
from support.project import CHECKOUT, copy_checkout, tracked_files
from typer.main import get_command
from typer.testing import CliRunner

from forge.cli.main import app

# read, not imported: the emulator needs numpy, which the driver's environment has not
EMULATOR = (CHECKOUT / "packages/strix-emulate/src/strix_emulate/cli.py").read_text()
COMMANDS = {
    "forge": get_command(app).commands,
    "strix-validate": get_command(validate).commands,
    "strix-emulate": dict.fromkeys(re.findall(r"@app\.command\(.*\)\ndef (\w+)", EMULATOR)),
}
PAGES = [
    CHECKOUT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
]
PAGES += [*CHECKOUT.glob("docs/*.md"), *CHECKOUT.glob("stacks/*/*.md")]
PAGES += [*CHECKOUT.glob("packages/*/*.md"), CHECKOUT / "docs/evidence/README.md"]
STACKS = sorted(path.parent for path in CHECKOUT.glob("stacks/*/pixi.toml"))
ARE_PROGRAMS = {"python", "pip", "pre-commit", "strix-validate", "strix-emulate"}  # no tasks


def tasks_of(manifest: Path) -> dict[str, set[str]]:
    """Tasks by environment; those of the workspace are in each that has the default feature."""
    data = tomllib.loads(manifest.read_text())
    shared, features = set(data.get("tasks", ())), data.get("feature", {})
    found = {"default": shared}
    for name, environment in data.get("environments", {}).items():
        spec = environment if isinstance(environment, dict) else {"features": environment}
        own = {
            t for feature in spec.get("features", ()) for t in features[feature].get("tasks", ())
        }
        found[name] = own | (set() if spec.get("no-default-feature") else shared)
    return found


def tasks(page: Path) -> dict[str, set[str]]:
    """Those that a page may name: its own workspace's, or those of any here."""
    own = page.parent / "pixi.toml"
    manifests = [own] if own in (s / "pixi.toml" for s in STACKS) else [
        CHECKOUT / "pixi.toml", *(s / "pixi.toml" for s in STACKS)
    ]  # fmt: skip
    found: dict[str, set[str]] = {}
    for manifest in manifests:
        for environment, names in tasks_of(manifest).items():
            found[environment] = found.get(environment, set()) | names
    return found


def code(text: str) -> Iterator[str]:
    """Each span of code in a line, and each line of a block, fenced or indented."""
    fenced = r"(?ms)^```.*?^```"
    for block in re.findall(fenced, text):
        yield from block.splitlines()[1:-1]
    prose = re.sub(fenced, "", text)
    yield from re.findall(r"(?m)^    \S.*", prose)
    yield from (re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", prose))


def present(page: Path) -> str:
    """The text of a page, without CHANGELOG's section of what was removed."""
    return re.sub(r"(?ms)^### Removed$.*?(?=^### )", "", page.read_text())


def lacking(page: Path, text: str) -> list[str]:
    """What a page's code names and there is not."""
    found, known = [], tasks(page)
    every = set().union(*known.values())
    for span in code(text):
        line = re.split(r"(?:^|\s)#\s", span)[0]
        for name, words in re.findall(
            r"(?:^|[\s(]|(?<!\w)\./)(forge|strix-validate|strix-emulate)((?: [a-z][\w-]*){0,2})",
            line,
        ):
            there = COMMANDS[name]
            for word in words.split() if words else ():
                if word not in there:
                    found.append(f"{name}{words}")
                if not (there := getattr(there.get(word), "commands", None)):
                    break
        for environment, task in re.findall(r"\bpixi run (?:-e ([\w-]+) )?([a-z][\w-]*)", line):
            if task not in known.get(environment, every) | ARE_PROGRAMS:
                found.append(f"pixi run {task}")
    for stack in re.findall(r"(?<!build/)\bstacks/([a-z][\w-]*)(?![\w-]|\.toml)", text):
        if CHECKOUT / "stacks" / stack not in STACKS:
            found.append(f"stacks/{stack}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_a_page_names_what_exists(page: Path) -> None:
    assert lacking(page, present(page)) == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("`./forge provenance`", "forge provenance"),
        ("`./forge sources list`", "forge sources list"),
        ("```sh\n./forge lock x && ./forge set-up x\n```", "forge set-up"),
        ("`strix-validate cluster`", "strix-validate cluster"),
        ("    strix-emulate debug K", "strix-emulate debug"),
        ("`pixi run patches`", "pixi run patches"),
        ("`pixi run -e pack publish`", "pixi run publish"),
        ("[none](stacks/training/README.md)", "stacks/training"),
    ],
)
def test_what_does_not_exist_is_found(text: str, named: str) -> None:
    (found,) = lacking(CHECKOUT / "README.md", text)
    assert found.startswith(named)


def test_a_task_of_another_workspace_is_found_on_a_stacks_page() -> None:
    page = CHECKOUT / "stacks/attention/README.md"
    assert lacking(page, "`pixi run image`") == ["pixi run image"]
    assert lacking(page, "`pixi run doctor`") == []


def listed(text: str, head: str) -> set[str]:
    """The names of a list in CHANGELOG: `- HEAD: `a`, `b`.`"""
    (found,) = re.findall(rf"(?m)^- {head}:((?:.*\n)+?)(?=- |\n)", text)
    return set(re.findall(r"`([^`]+)`", found))


def test_the_changelog_lists_all_commands_tasks_and_workspaces() -> None:
    text = (CHECKOUT / "CHANGELOG.md").read_text()
    assert listed(text, "Commands of `./forge`") - {"./forge"} == set(COMMANDS["forge"])
    root = set().union(*tasks_of(CHECKOUT / "pixi.toml").values())
    assert listed(text, "Tasks of `pixi run`") - {"pixi run"} == root
    assert listed(text, "Workspaces") == {stack.name for stack in STACKS}


def test_the_readme_links_every_workspace_and_page() -> None:
    links = set(re.findall(r"\]\(([^)#]+)", (CHECKOUT / "README.md").read_text()))
    pages = {f"stacks/{stack.name}/README.md" for stack in STACKS}
    pages |= {f"docs/{page.name}" for page in CHECKOUT.glob("docs/*.md")}
    assert pages <= links


def forms(text: str) -> Iterator[list[str]]:
    """The words of each `./forge COMMAND` in a page's code."""
    for line in re.findall(r"(?:^|&& |`)\./forge ([^#`|&>\n]+)", text, re.M):
        words = shlex.split(line)
        if COMMANDS["forge"].keys() & {*words}:  # not `./forge CMD`
            yield words


def test_the_driver_has_every_form_that_pages_show() -> None:
    shown = {tuple(words) for page in PAGES for words in forms(present(page))}
    assert len(shown) > 25
    assert [words for words in sorted(shown) if not understood([*words])] == []


@pytest.mark.parametrize("line", ["plan --bases host", "--quite plan", "publish --from DIR"])
def test_a_form_that_the_driver_has_not_is_found(line: str) -> None:
    (words,) = forms(f"`./forge {line}`")
    assert not understood(words)


def validators() -> set[str]:
    """What follows `strix-validate`, alone, in a stack, or in an environment of its own."""
    spans = (re.split(r"\s(?:&&|[|]+|;|#)\s", s) for p in PAGES for s in code(p.read_text()))
    found = (re.match(r"(?:.* )?strix-validate ([a-z].*)", part) for span in spans for part in span)
    known = COMMANDS["strix-validate"]
    return {line[1].strip() for line in found if line and line[1].split()[0] in known}


@pytest.mark.parametrize("line", sorted(validators()))
def test_the_validator_understands_every_line(line: str) -> None:
    done = CliRunner().invoke(validate, [*shlex.split(line), "--help"])
    assert done.exit_code == 0 and "<bool>" not in done.output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_a_clone_is_of_the_address_that_the_reader_has(page: Path) -> None:
    """Whatever the host: no page knows where this repository is."""
    for address in re.findall(r"git clone ((?:-\S+ )*\S+)", page.read_text()):
        assert "strix-forge" not in address, address


def test_the_readme_says_how_to_get_the_repository() -> None:
    text = (CHECKOUT / "README.md").read_text()
    assert "git clone <this repository's address> strix-forge && cd strix-forge" in text
    assert "git init && git add -A" in text


def test_the_readme_shows_every_folder() -> None:
    """And none that is not there."""
    layout = re.findall(r"(?m)^([\w/]+)/ {2,}\w", (CHECKOUT / "README.md").read_text())
    tracked = {
        path.relative_to(CHECKOUT).parts[0] for path in tracked_files() if path.parent != CHECKOUT
    }
    assert {folder.split("/")[0] for folder in layout} == {n for n in tracked if n[0] != "."}
    assert all((CHECKOUT / folder).is_dir() for folder in layout)


def test_an_unpacked_archive_is_enough_to_plan(tmp_path: Path) -> None:
    """As README says: git is asked by the tests alone."""
    copy_checkout(tmp_path / "archive", packages=False)
    assert not (tmp_path / "archive/.git").exists()
    environment = {"FORGE_ROOT": str(tmp_path / "archive")}
    done = CliRunner(env=environment).invoke(app, ["plan", "--base", "host"])
    assert done.exit_code == 0 and "CPU hours" in done.output, done.output
