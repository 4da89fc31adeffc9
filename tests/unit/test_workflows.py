# SPDX-License-Identifier: BSD-3-Clause
"""The workflows for GitHub are linted, pinned and without secrets. Their commands exist."""

import json
import os
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
from support.commands import is_accepted
from support.project import CHECKOUT, RECIPES, STACKS, module

from forge.files import write_text
from forge.recipes.plan import RecipeSet

GITHUB = CHECKOUT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
OWN_TOKEN = re.compile(r"(GH|GITHUB)_TOKEN: \$\{\{ github\.token \}\}")
PINNED_ACTION = re.compile(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")
LINTERS = {
    # Without these options, actionlint would also run other programs if they are installed.
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
    "an unknown machine": ("ubuntu-24.04", "gfx9999", "actionlint", "runner-label"),
    "an injected template": (
        "echo fine",
        "echo ${{ github.event.head_commit.message }}",
        "zizmor",
        "template-injection",
    ),
    "credentials that stay": (
        "run: echo fine",
        f"uses: actions/checkout@{'a' * 40} # v7.0.1",
        "zizmor",
        "artipacked",
    ),
}


def lint(tool: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run one of LINTERS. The environment of the tests must have it."""
    program = shutil.which(tool, path=str(Path(sys.executable).parent))
    assert program, f"{tool} of requirements-dev.txt is not installed"
    command = [program, *LINTERS[tool], *map(str, paths)]
    return subprocess.run(command, cwd=CHECKOUT, text=True, capture_output=True, check=False)


@pytest.mark.parametrize("tool", LINTERS)
def test_linted(tool: str) -> None:
    done = lint(tool, *WORKFLOWS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("fault", BAD)
def test_linters_find(fault: str, tmp_path: Path) -> None:
    """The command of test_linted accepts a good workflow, and refuses one with a fault."""
    old, new, tool, rule = BAD[fault]
    assert old in GOOD
    file = tmp_path / ".github/workflows/x.yml"
    file.parent.mkdir(parents=True)
    file.write_text(GOOD)
    assert lint(tool, file).returncode == 0
    file.write_text(GOOD.replace(old, new))
    done = lint(tool, file)
    assert done.returncode, done.stdout + done.stderr
    assert rule in done.stdout, done.stdout + done.stderr


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def test_every_action_is_a_commit_with_its_version() -> None:
    lines: list[str] = []
    for path in WORKFLOWS:
        for line in path.read_text().splitlines():
            if re.search(r"uses:\s", line) and "uses: ./" not in line:
                lines.append(line.strip())
    assert lines
    assert not [line for line in lines if not PINNED_ACTION.search(line)]
    versions: dict[str, set[str]] = {}
    for line in lines:
        action, _, pin = line.partition("uses: ")[2].partition("@")
        versions.setdefault("/".join(action.split("/")[:2]), set()).add(pin)
    assert {action: pins for action, pins in versions.items() if len(pins) > 1} == {}


def test_no_secret_and_no_more_permission_than_named() -> None:
    """No workflow has a secret, since trusted publishing needs none.

    Only one job of channel.yml and one of release.yml have an identity token. Permissions to write,
    other than for publishing, are listed here.
    """
    tokens = set()
    publishing = {"id-token", "attestations"}
    other_writes = {"pins/outdated": {"issues"}, "channel/publish": {"contents"}}
    for path in WORKFLOWS:
        text = OWN_TOKEN.sub("", path.read_text())
        workflow = load(path)
        assert not re.search(r"secrets\b|(?i:password|api[_-]?key|_token:)", text), path
        assert workflow["permissions"] == {}
        for name, job in workflow["jobs"].items():
            permissions = job["permissions"]
            if "id-token" in permissions:
                tokens.add((path.stem, name))
            writes = {key for key, value in permissions.items() if value == "write"}
            assert writes <= publishing or writes == other_writes.get(f"{path.stem}/{name}")
    assert tokens == {("channel", "release"), ("release", "publish")}


def test_what_may_write_runs_no_pixi_by_its_version_alone() -> None:
    """The job that publishes verifies the downloaded pixi before running it.

    It does not use setup-pixi, which accepts a version and no hash.
    """
    jobs: list[dict[str, Any]] = []
    for path in WORKFLOWS:
        jobs += load(path)["jobs"].values()
    writers = [str(job.get("steps")) for job in jobs if "write" in job["permissions"].values()]
    assert not [steps for steps in writers if "setup-pixi@" in steps]
    (publisher,) = (steps for steps in writers if "pixi upload" in steps)
    (version,) = set(re.findall(r"'pixi-version': '(\S+)'", str(jobs)))
    parts = [
        f"gh release download {version} ",
        f"gh release verify-asset {version} ",
        "install -D ",
        "'run': './forge",
        "'run': 'pixi",
    ]
    positions = [publisher.find(part) for part in parts]
    assert -1 not in positions
    assert positions == sorted(positions)


def find_starters(path: Path) -> list[dict[str, Any]]:
    """Return the callers of a workflow, and the workflow itself if it has other triggers."""
    workflow = load(path)
    # YAML 1.1 reads the key `on` as true.
    triggers = set(workflow[True])
    use = f"uses: ./.github/workflows/{path.name}"
    callers = [load(other) for other in WORKFLOWS if use in other.read_text()]
    assert bool(callers) == ("workflow_call" in triggers), path.name
    if triggers == {"workflow_call"}:
        return callers
    return [workflow, *callers]


def test_own_machines_run_no_pull_request() -> None:
    pattern = re.compile(r"self-hosted|BUILD_RUNNER")
    paths = [path for path in WORKFLOWS if pattern.search(path.read_text())]
    assert {path.stem for path in paths} == {"build", "channel", "release"}
    allowed_triggers = {"push", "schedule", "workflow_call", "workflow_dispatch"}
    for path in paths:
        for workflow in find_starters(path):
            assert set(workflow[True]) <= allowed_triggers


def test_no_upload_is_cancelled() -> None:
    for path in WORKFLOWS:
        if re.search("publish --|pixi upload|gh issue|channel.sh send", path.read_text()):
            for workflow in find_starters(path):
                assert workflow["concurrency"]["cancel-in-progress"] is False


def read_scripts() -> Iterator[tuple[str, list[str]]]:
    """Yield WORKFLOW/JOB and the lines of each shell step."""
    for path in WORKFLOWS:
        for name, job in load(path)["jobs"].items():
            for step in job.get("steps", []):
                if "run" in step:
                    yield f"{path.stem}/{name}", step["run"].splitlines()


OURS = re.compile(r"(\./forge|pixi run) ")


def list_own_steps() -> list[tuple[str, str]]:
    """Return WORKFLOW/JOB and the line of each call of the driver or of pixi."""
    steps = set()
    for job, lines in read_scripts():
        steps.update((job, line) for line in lines if OURS.match(line))
    return sorted(steps)


STEPS = list_own_steps()


@pytest.mark.parametrize(("job", "line"), STEPS, ids=[f"{job}: {line}" for job, line in STEPS])
def test_steps_are_commands_that_people_run(job: str, line: str) -> None:
    """Each `./forge` or `pixi run` is followed by a command, a task, or a program of a stack."""
    words = shlex.split(re.split(r" *(?:>>?|\|\|) *", OURS.sub("", line))[0])
    if line.startswith("./forge"):
        assert is_accepted(words), job
    elif words[:2] == ["--locked", "--manifest-path"]:
        manifest, program, script = words[2:5]
        assert (CHECKOUT / manifest.removeprefix("build/") / "pixi.toml").is_file()
        assert program in ("strix-validate", "python")
        if program == "python":
            assert (CHECKOUT / script).is_file()
    else:
        pixi = tomllib.loads((CHECKOUT / "pixi.toml").read_text())
        assert words[0] in pixi["feature"]["lint"]["tasks"], job


def test_the_list_of_releases_edits_no_issue_of_others() -> None:
    """The workflow edits only its own issue: the search has an author and an exact title.

    GitHub's search alone finds all issues whose title has the words.
    """
    texts = ["\n".join(lines) for job, lines in read_scripts() if job.startswith("pins/")]
    (text,) = [text for text in texts if "gh issue" in text]
    assert "gh issue list --app github-actions " in text
    assert 'map(select(.title == "Newer releases"))' in text


def test_no_step_works_past_the_driver() -> None:
    allowed = re.compile(
        rf"{OURS.pattern}|pixi (upload|exec) |gh release download|\.github/(channel|free_disk)\.sh"
        r"|find \. -newer |sha256sum channel/|packages/strix-emulate/suites/debian\.sh "
    )
    assert [job for job, lines in read_scripts() if not any(map(allowed.match, lines))] == []


def test_a_package_is_sent_with_its_own_note(tmp_path: Path) -> None:
    """The note on a package that is not published is replaced. Other notes stay.

    An interrupted run may have sent a note on a package that never arrived. The new package may
    have other bytes.
    """
    releases = tmp_path / "releases/untested"
    for part, names in {"forge": ["a", "b"], "linux-64": ["b"], "noarch": []}.items():
        write_text(releases / part / ".notes", "")
        for name in names:
            extension = "json" if part == "forge" else "conda"
            write_text(releases / part / f"{name}-1-h_0.{extension}", "published")
    for name in ("a", "b"):
        write_text(tmp_path / f"channel/linux-64/{name}-1-h_0.conda", "new")
        write_text(tmp_path / f"notes/{name}-1-h_0.json", "new")
    write_text(tmp_path / "channel/withdrawn.json", "{}")
    for subdir in ("linux-64", "noarch"):
        for form in ("_from_packages.json", ".json", ".json.zst"):
            write_text(tmp_path / "channel" / subdir / f"repodata{form}", "{}")
    gh = tmp_path / "bin/gh"
    write_text(gh, f'#!/bin/sh\nexec {sys.executable} {CHECKOUT}/tests/support/mock_gh.py "$@"\n')
    gh.chmod(0o755)
    environment = {
        "PATH": f"{gh.parent}:{os.environ['PATH']}",
        "GITHUB_REPOSITORY": "someone/strix-forge",
        "GH_TOKEN": "token",
        "RELEASES": str(releases.parent),
        "HOLD": str(tmp_path),
    }
    command = [GITHUB / "channel.sh", "send", "untested", "channel", "notes"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    sent = {path.name: path.read_text() for path in releases.rglob("[ab]-*")}
    assert sent == {
        "a-1-h_0.conda": "new",
        "a-1-h_0.json": "new",
        "b-1-h_0.conda": "published",
        "b-1-h_0.json": "published",
    }


def test_a_pipe_fails_if_its_first_program_fails() -> None:
    """Each script that pipes to tee sets pipefail, because GitHub's default shell is `bash -e`."""
    for job, lines in read_scripts():
        has_pipe = any(re.search(r" \| tee ", line) for line in lines)
        assert not has_pipe or lines[0] == "set -o pipefail", job


def test_a_job_ends_in_time_and_saves_what_it_has() -> None:
    """A build ends before the time of its job is up, so that later steps can save its results.

    GitHub cancels a job that exceeds its time, and the steps that would save results do not run.
    """
    job = load(GITHUB / "workflows/build.yml")["jobs"]["build"]
    assert job["timeout-minutes"] == 360, "the limit must be that of GitHub's runners: six hours"
    steps = job["steps"]
    (build,) = [step for step in steps if step.get("id") == "build"]
    (line,) = [line for line in build["run"].splitlines() if line.startswith("./forge build")]
    # A release needs zstd level 19. With a lower level, rocm-sdk is larger than servers accept.
    assert "--package-format conda:19 --stop-after 5h " in line

    def find_step(action: str) -> dict[str, Any]:
        return next(step for step in steps if f"actions/{action}@" in step.get("uses", ""))

    restore = find_step("cache/restore")
    save = find_step("cache/save")
    upload = find_step("upload-artifact")
    order = [steps.index(step) for step in (restore, build, save, upload)]
    assert order == sorted(order)
    for step in steps[order[1] + 1 :]:
        assert step["if"] == "${{ always() && steps.build.outcome != 'skipped' }}"
    assert save["with"] == {key: restore["with"][key] for key in ("path", "key")}
    assert save["with"]["key"].startswith(restore["with"]["restore-keys"])
    assert restore["with"]["restore-keys"].endswith("/"), (
        "the key must end with a slash, or triton would use the cache of triton-packages"
    )


def test_no_machine_of_our_own_loses_what_github_brings() -> None:
    for path in WORKFLOWS:
        for job in load(path)["jobs"].values():
            for step in job.get("steps", []):
                if "free_disk.sh" not in step.get("run", ""):
                    continue
                is_hosted = step.get("if") == "runner.environment == 'github-hosted'"
                assert is_hosted or job["runs-on"] == "ubuntu-24.04", path


def test_the_caches_of_a_run_fit() -> None:
    """The caches of a run fit into the 10 GB that GitHub stores.

    Each job of pytorch's chain saves a cache, which may be as large as CCACHE_MAXSIZE.
    """
    jobs = load(GITHUB / "workflows/channel.yml")["jobs"]
    chain = [job for job in jobs.values() if job.get("with", {}).get("cache") == "pytorch"]
    steps = load(GITHUB / "workflows/build.yml")["jobs"]["build"]["steps"]
    (build,) = [step for step in steps if step.get("id") == "build"]
    size = build["env"]["CCACHE_MAXSIZE"]
    assert len(chain) * int(size.removesuffix("M")) < 8_000
    recipe = (CHECKOUT / "recipes/pytorch/recipe.yaml").read_text()
    assert 'CCACHE_MAXSIZE: ${{ env.get("CCACHE_MAXSIZE"' in recipe


stages = module(GITHUB / "stages.py")


def make_rows(recipes: RecipeSet) -> list[dict[str, Any]]:
    """Return the rows of a plan that builds all recipes."""
    rows = []
    for name in recipes.recipes:
        needs = sorted(recipes.direct_needs(name))
        rows.append({"recipe": name, "action": "build", "needs": needs})
    return rows


def read_names(job: str, value: str) -> list[str]:
    """Return the recipes of a job. A layer has them as a JSON list, any other job as words."""
    if job.startswith("layer"):
        return json.loads(value)
    return value.split()


def test_each_recipe_has_a_job_after_those_that_it_needs(recipes: RecipeSet) -> None:
    rows = make_rows(recipes)
    jobs = stages.sort_recipes(rows)
    names = {job: read_names(job, value) for job, value in jobs.items()}
    built: set[str] = set()
    for job, names_of_job in names.items():
        available = set(built)
        if job == "sdk":
            # The recipes of this job are built one after the other.
            available |= set(names_of_job)
        for name in names_of_job:
            assert recipes.direct_needs(name) <= available, name
        built |= set(names_of_job)
    assert built == set(RECIPES)
    assert sum(map(len, names.values())) == len(RECIPES)
    # The workflow must declare the outputs of `plan`, because GitHub passes on only declared
    # outputs.
    outputs = load(GITHUB / "workflows/channel.yml")["jobs"]["plan"]["outputs"]
    assert list(outputs) == list(jobs)
    rows[0]["action"] = "up-to-date"
    assert rows[0]["recipe"] not in stages.sort_recipes(rows)["sdk"].split()
    layers = stages.LAYERS
    rows.append({"recipe": "deeper", "action": "build", "needs": names[f"layer{layers}"][:1]})
    message = f"has {layers} layers, but the recipes need {layers + 1}: add a job"
    with pytest.raises(SystemExit, match=message):
        stages.sort_recipes(rows)


def test_plans_that_no_job_fits() -> None:
    row = {"recipe": "alpha", "action": "build", "needs": ["beta"]}
    with pytest.raises(SystemExit, match="alpha needs beta, which is not before it in the plan"):
        stages.sort_recipes([row, {"recipe": "beta", "action": "build", "needs": []}])
    pytorch = {"recipe": "pytorch", "action": "build", "needs": []}
    assert stages.sort_recipes([pytorch]) == {"pytorch": "pytorch"}
    assert stages.sort_recipes([pytorch | {"action": "up-to-date"}]) == {}
    assert stages.sort_recipes([]) == {}


def test_nothing_is_published_that_did_not_pass_on_the_gpu() -> None:
    """Files are published only after the checks on the GPU, except in the untested channel.

    integration/test_channel_workflow.py executes both workflows.
    """
    release = load(GITHUB / "workflows/channel.yml")["jobs"]["release"]
    assert release["needs"] == "publish"
    assert "!failure()" in release["if"]
    jobs = load(GITHUB / "workflows/release.yml")["jobs"]
    assert jobs["gpu"]["runs-on"] == ["self-hosted", "gfx1151"]
    assert jobs["publish"]["needs"] == "gpu"
    assert jobs["publish"]["environment"]
    assert "refs/heads/main" in jobs["fetch"]["if"]
    assert jobs["gpu"]["needs"] == "fetch"
    publishing: list[tuple[str, str]] = []
    for job, lines in read_scripts():
        publishing += [(job, line) for line in lines if "publish --" in line]
    (channel_job, channel_line), (release_job, release_line) = publishing
    assert channel_job == "channel/publish"
    assert release_job == "release/publish"
    assert " --untested " in channel_line
    assert release_line.endswith(" --validated build/evidence/validated.sha256")
    gpu = [step.get("run", "") for step in jobs["gpu"]["steps"]]
    digests = [number for number, line in enumerate(gpu) if line.startswith("sha256sum ")]
    checks = [number for number, line in enumerate(gpu) if line.startswith("pixi run ")]
    assert digests
    assert max(checks) < min(digests), "the list of files must be written after all checks"


@pytest.mark.parametrize("stack", STACKS)
def test_every_stack_is_validated_before_all_is_published(stack: str) -> None:
    jobs = load(GITHUB / "workflows/release.yml")["jobs"]
    steps = {name: [step.get("run", "") for step in job["steps"]] for name, job in jobs.items()}
    locked = f"./forge lock --base conda-forge {stack}"
    check = "strix-validate run --evidence build/evidence"
    program = CHECKOUT / "stacks" / stack / "check.py"
    if program.exists():
        check = f"python {program.relative_to(CHECKOUT)}"
    validated = f"pixi run --locked --manifest-path build/stacks/{stack} {check}"
    matching = [line for line in steps["gpu"] if line.startswith(validated)]
    assert steps["gpu"].index(locked) < steps["gpu"].index(matching[0])
    assert locked in steps["publish"]


def test_the_issue_form_is_valid() -> None:
    """The form has the fields that GitHub requires, unique IDs, and a field for the record."""
    form = load(GITHUB / "ISSUE_TEMPLATE/evidence.yml")
    assert {"name", "description", "body"} <= set(form)
    fields = [item for item in form["body"] if item["type"] != "markdown"]
    assert all(item["attributes"]["label"] for item in fields)
    assert len({item["id"] for item in fields}) == len(fields)
    (record,) = [item for item in fields if item["id"] == "record"]
    assert record["attributes"]["render"] == "json"
    assert record["validations"]["required"]
