# SPDX-License-Identifier: BSD-3-Clause
"""The commands, tasks, workspaces and files that the documentation names exist."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from strix_validate.cli import app as validate
from support.commands import is_accepted
from support.project import CHECKOUT, copy_checkout, tracked_files
from typer.main import get_command
from typer.testing import CliRunner

from forge.cli.main import app

# The emulator's source is read and not imported, because the driver's environment lacks numpy.
EMULATOR = (CHECKOUT / "packages/strix-emulate/src/strix_emulate/cli.py").read_text()
COMMANDS = {
    "forge": get_command(app).commands,
    "strix-validate": get_command(validate).commands,
    "strix-emulate": dict.fromkeys(re.findall(r"@app\.command\(.*\)\ndef (\w+)", EMULATOR)),
}
TOP_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = [CHECKOUT / name for name in TOP_PAGES]
PAGES += [*CHECKOUT.glob("docs/*.md"), *CHECKOUT.glob("stacks/*/*.md")]
PAGES += [*CHECKOUT.glob("packages/*/*.md"), CHECKOUT / "docs/evidence/README.md"]
STACKS = sorted(path.parent for path in CHECKOUT.glob("stacks/*/pixi.toml"))
# Programs that pages run with `pixi run` and that are no tasks.
PROGRAMS = {"python", "pip", "pre-commit", "strix-validate", "strix-emulate"}


def read_tasks(manifest: Path) -> dict[str, set[str]]:
    """Return the tasks of a manifest by environment.

    Tasks of the workspace belong to each environment that has the default feature.
    """
    data = tomllib.loads(manifest.read_text())
    shared = set(data.get("tasks", ()))
    features = data.get("feature", {})
    result = {"default": shared}
    for name, environment in data.get("environments", {}).items():
        spec = environment if isinstance(environment, dict) else {"features": environment}
        names: set[str] = set()
        for feature in spec.get("features", ()):
            names.update(features[feature].get("tasks", ()))
        if not spec.get("no-default-feature"):
            names |= shared
        result[name] = names
    return result


def collect_tasks(page: Path) -> dict[str, set[str]]:
    """Return the tasks that a page may name, by environment.

    A page of a stack may name the tasks of that stack. Any other page may name the tasks of every
    manifest here.
    """
    manifests = [stack / "pixi.toml" for stack in STACKS]
    if page.parent in STACKS:
        manifests = [page.parent / "pixi.toml"]
    else:
        manifests.append(CHECKOUT / "pixi.toml")
    result: dict[str, set[str]] = {}
    for manifest in manifests:
        for environment, names in read_tasks(manifest).items():
            result[environment] = result.get(environment, set()) | names
    return result


def extract_code(text: str) -> Iterator[str]:
    """Yield each span of code in prose, and each line of a fenced or indented block."""
    fenced = r"(?ms)^```.*?^```"
    for block in re.findall(fenced, text):
        yield from block.splitlines()[1:-1]
    prose = re.sub(fenced, "", text)
    yield from re.findall(r"(?m)^    \S.*", prose)
    for span in re.findall(r"`([^`]+)`", prose):
        yield re.sub(r"\s+", " ", span)


def read_current(page: Path) -> str:
    """Return the text of a page, without the section Removed of CHANGELOG."""
    return re.sub(r"(?ms)^### Removed$.*?(?=^### )", "", page.read_text())


COMMAND_LINE = re.compile(
    r"(?:^|[\s(]|(?<!\w)\./)(forge|strix-validate|strix-emulate)((?: [a-z][\w-]*){0,2})"
)
TASK = re.compile(r"\bpixi run (?:-e ([\w-]+) )?([a-z][\w-]*)")
STACK_FOLDER = re.compile(r"(?<!build/)\bstacks/([a-z][\w-]*)(?![\w-]|\.toml)")


def is_command(program: str, words: list[str]) -> bool:
    """Return whether the words after a program begin with one of its commands.

    If the command is a group, the word after it has to be a command of the group.
    """
    commands = COMMANDS[program]
    for word in words:
        if word not in commands:
            return False
        commands = getattr(commands.get(word), "commands", None)
        if not commands:
            break
    return True


def find_missing(page: Path, text: str) -> list[str]:
    """Return the commands, tasks and stacks that a page names and that do not exist."""
    result: list[str] = []
    tasks_by_environment = collect_tasks(page)
    all_tasks = set().union(*tasks_by_environment.values())
    for span in extract_code(text):
        line = re.split(r"(?:^|\s)#\s", span)[0]
        for program, words in COMMAND_LINE.findall(line):
            if not is_command(program, words.split()):
                result.append(f"{program}{words}")
        for environment, task in TASK.findall(line):
            if task not in tasks_by_environment.get(environment, all_tasks) | PROGRAMS:
                result.append(f"pixi run {task}")
    for stack in STACK_FOLDER.findall(text):
        if CHECKOUT / "stacks" / stack not in STACKS:
            result.append(f"stacks/{stack}")
    return result


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_a_page_names_what_exists(page: Path) -> None:
    assert find_missing(page, read_current(page)) == []


@pytest.mark.parametrize(
    ("text", "expected"),
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
def test_what_does_not_exist_is_found(text: str, expected: str) -> None:
    (name,) = find_missing(CHECKOUT / "README.md", text)
    assert name.startswith(expected)


def test_a_task_of_another_workspace_is_found_on_a_stacks_page() -> None:
    page = CHECKOUT / "stacks/attention/README.md"
    assert find_missing(page, "`pixi run image`") == ["pixi run image"]
    assert find_missing(page, "`pixi run doctor`") == []


def test_the_readme_links_every_workspace_and_page() -> None:
    links = set(re.findall(r"\]\(([^)#]+)", (CHECKOUT / "README.md").read_text()))
    pages = {f"stacks/{stack.name}/README.md" for stack in STACKS}
    pages |= {f"docs/{page.name}" for page in CHECKOUT.glob("docs/*.md")}
    assert pages <= links


def extract_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each `./forge COMMAND` in the code of a page."""
    for line in re.findall(r"(?:^|&& |`)\./forge ([^#`|&>\n]+)", text, re.M):
        words = shlex.split(line)
        # A line without a command has a placeholder, such as `./forge CMD`.
        if COMMANDS["forge"].keys() & {*words}:
            yield words


def test_the_driver_has_every_form_that_pages_show() -> None:
    shown: set[tuple[str, ...]] = set()
    for page in PAGES:
        shown.update(tuple(words) for words in extract_commands(read_current(page)))
    assert len(shown) > 25
    assert [words for words in sorted(shown) if not is_accepted([*words])] == []


@pytest.mark.parametrize("line", ["plan --bases host", "--quite plan", "publish --from DIR"])
def test_a_form_that_the_driver_has_not_is_found(line: str) -> None:
    (words,) = extract_commands(f"`./forge {line}`")
    assert not is_accepted(words)


def extract_validator_lines() -> set[str]:
    """Return the arguments of each `strix-validate COMMAND` that pages show."""
    result = set()
    for page in PAGES:
        for span in extract_code(page.read_text()):
            for part in re.split(r"\s(?:&&|[|]+|;|#)\s", span):
                match = re.match(r"(?:.* )?strix-validate ([a-z].*)", part)
                if match and match[1].split()[0] in COMMANDS["strix-validate"]:
                    result.add(match[1].strip())
    return result


@pytest.mark.parametrize("line", sorted(extract_validator_lines()))
def test_the_validator_understands_every_line(line: str) -> None:
    done = CliRunner().invoke(validate, [*shlex.split(line), "--help"])
    assert done.exit_code == 0
    assert "<bool>" not in done.output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_a_clone_is_of_the_address_that_the_reader_has(page: Path) -> None:
    """No `git clone` on a page states where this repository is hosted."""
    for address in re.findall(r"git clone ((?:-\S+ )*\S+)", page.read_text()):
        assert "strix-forge" not in address, address


def test_the_readme_shows_every_folder() -> None:
    """README describes every top-level folder that git tracks, and no folder that does not exist.

    Folders whose names begin with a dot are left out. The descriptions are written by hand.
    """
    layout = re.findall(r"(?m)^([\w/]+)/ {2,}\w", (CHECKOUT / "README.md").read_text())
    paths = [path.relative_to(CHECKOUT) for path in tracked_files()]
    folders = {path.parts[0] for path in paths if len(path.parts) > 1}
    visible = {folder for folder in folders if not folder.startswith(".")}
    assert {folder.split("/")[0] for folder in layout} == visible
    assert all((CHECKOUT / folder).is_dir() for folder in layout)


def test_an_unpacked_archive_is_enough_to_plan(tmp_path: Path) -> None:
    """The driver can plan without a git repository. README states that only the tests need one."""
    copy_checkout(tmp_path / "archive", packages=False)
    assert not (tmp_path / "archive/.git").exists()
    environment = {"FORGE_ROOT": str(tmp_path / "archive")}
    done = CliRunner(env=environment).invoke(app, ["plan", "--base", "host"])
    assert done.exit_code == 0, done.output
    assert "CPU hours" in done.output, done.output
