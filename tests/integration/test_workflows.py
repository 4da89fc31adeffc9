# SPDX-License-Identifier: BSD-3-Clause
"""GitHub's workflows: linted, pinned, without secrets, made of commands that there are."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.project import CHECKOUT
from typer.testing import CliRunner

from forge.cli.main import app

GITHUB = CHECKOUT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PINNED_ACTION = re.compile(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")
LINTERS = {
    # other programs that it would call where they are found
    "actionlint": ["-shellcheck=", "-pyflakes="],
    "zizmor": ["--offline", "--no-progress", "--persona", "pedantic"],
}
GOOD = """\
name: x
on: push
permissions: {}
concurrency: {group: x, cancel-in-progress: true}
jobs:
  x:
    name: x
    runs-on: ubuntu-24.04
    timeout-minutes: 5
    steps:
      - run: echo fine
"""
BAD = {
    "a syntax error": ("run: echo fine", "runs: echo fine", "actionlint", "syntax-check"),
    "an unknown output": (
        "echo fine", "echo ${{ steps.no.outputs.x }}", "actionlint", "expression"
    ),
    "an unknown machine": ("ubuntu-24.04", "gfx9999", "actionlint", "runner-label"),
    "an action by its tag": ("run: echo fine", "uses: o/r@v1", "zizmor", "unpinned-uses"),
    "an injected template": (
        "echo fine", "echo ${{ github.event.head_commit.message }}", "zizmor", "template-injection"
    ),
    "credentials that stay": (
        "run: echo fine", f"uses: actions/checkout@{'a' * 40} # v7.0.1", "zizmor", "artipacked"
    ),
    "too much permission": ("permissions: {}", "permissions: write-all", "zizmor",
                            "excessive-permissions"),
}  # fmt: skip


def lint(tool: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run one of LINTERS from this environment."""
    program = shutil.which(tool, path=str(Path(sys.executable).parent))
    assert program, f"requirements.txt and pixi.toml have {tool}, and it is not here"
    command = [program, *LINTERS[tool], *map(str, paths)]
    return subprocess.run(command, cwd=CHECKOUT, text=True, capture_output=True, check=False)


@pytest.mark.parametrize("tool", LINTERS)
def test_linted(tool: str) -> None:
    done = lint(tool, *WORKFLOWS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("fault", BAD)
def test_linters_find(fault: str, tmp_path: Path) -> None:
    """The same command fails on a workflow with one fault, and passes the one without."""
    right, wrong, tool, rule = BAD[fault]
    assert right in GOOD
    file = tmp_path / ".github/workflows/x.yml"
    file.parent.mkdir(parents=True)
    file.write_text(GOOD)
    assert lint(tool, file).returncode == 0
    file.write_text(GOOD.replace(right, wrong))
    done = lint(tool, file)
    assert done.returncode and rule in done.stdout, done.stdout + done.stderr


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def test_every_action_is_a_commit_with_its_version() -> None:
    found = [
        line.strip() for path in WORKFLOWS for line in path.read_text().splitlines()
        if re.search(r"uses:\s", line) and "uses: ./" not in line
    ]  # fmt: skip
    assert found
    assert not [line for line in found if not PINNED_ACTION.search(line)]
    versions: dict[str, set[str]] = {}
    for line in found:
        action, _, pin = line.partition("uses: ")[2].partition("@")
        versions.setdefault("/".join(action.split("/")[:2]), set()).add(pin)
    assert {action: pins for action, pins in versions.items() if len(pins) > 1} == {}


def test_no_secret_and_no_more_permission_than_named() -> None:
    """Trusted publishing needs no secret; the token that proves who we are is for one job."""
    tokens = set()
    for path in WORKFLOWS:
        text, workflow = path.read_text(), load(path)
        assert not re.search(r"secrets\b|(?i:password|api[_-]?key|_token:)", text), path
        assert workflow["permissions"] == {}
        for name, job in workflow["jobs"].items():
            permissions = job["permissions"]
            tokens |= {(path.stem, name)} if "id-token" in permissions else set()
            writes = {key for key, value in permissions.items() if value == "write"}
            assert writes <= {"id-token"} or path.stem == "pins"
    assert tokens == {("build", "publish")}
    publish = load(GITHUB / "workflows/build.yml")["jobs"]["publish"]
    assert publish["environment"] and publish["needs"] == "gpu"


def test_own_machines_run_no_pull_request() -> None:
    for path in WORKFLOWS:
        workflow = load(path)
        own = [job for job in workflow["jobs"].values() if "self-hosted" in job.get("runs-on", "")]
        # YAML 1.1 reads the key `on` as true
        assert not own or set(workflow[True]) <= {"push", "schedule", "workflow_dispatch"}


def test_no_upload_is_cancelled() -> None:
    for path in WORKFLOWS:
        workflow = load(path)
        uploads = "publish --" in path.read_text() or "create-pull-request" in path.read_text()
        if uploads:
            assert workflow["concurrency"]["cancel-in-progress"] is False


def scripts() -> Iterator[tuple[str, list[str]]]:
    """The lines of every shell step, with the job where it stands."""
    for path in WORKFLOWS:
        for name, job in load(path)["jobs"].items():
            for step in job.get("steps", []):
                if "run" in step:
                    yield f"{path.stem}/{name}", step["run"].splitlines()


OURS = re.compile(r"(\./forge|pixi run) ")
STEPS = sorted({(where, line) for where, step in scripts() for line in step if OURS.match(line)})


def understood(arguments: list[str]) -> bool:
    """Whether the driver knows a line, up to what it passes on; --help keeps it from running."""
    stops = [arguments.index(stop) + 1 for stop in ("run", "test", "validate") if stop in arguments]
    words = [*arguments[: min(stops, default=None)], "--help"]
    return CliRunner().invoke(app, words).exit_code == 0


@pytest.mark.parametrize(("where", "line"), STEPS, ids=[f"{w}: {line}" for w, line in STEPS])
def test_steps_are_commands_that_people_run(where: str, line: str) -> None:
    """Where pixi is, `./forge` is `pixi run`: so each command is a task, too."""
    pixi = tomllib.loads((CHECKOUT / "pixi.toml").read_text())
    tasks = pixi["tasks"] | pixi["feature"]["lint"]["tasks"]
    words = shlex.split(re.split(r" *(?:>>?|\|\|) *", OURS.sub("", line))[0])
    assert words[0] in tasks, where
    assert line.startswith("pixi") or understood(words), where


def test_no_step_works_past_the_driver() -> None:
    assert [where for where, step in scripts() if not any(map(OURS.match, step))] == []


@pytest.mark.parametrize("line", ["biuld flash-attn", "plan --jsn", "patches chek"])
def test_steps_that_are_no_commands(line: str) -> None:
    assert not understood(line.split())
