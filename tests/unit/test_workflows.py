# SPDX-License-Identifier: BSD-3-Clause
"""GitHub's workflows: linted, pinned, without secrets, made of commands that there are."""

import json
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
from support.commands import understood
from support.project import CHECKOUT, RECIPES, STACKS, module

from forge.recipes.cost import read_costs
from forge.recipes.plan import RecipeSet

GITHUB = CHECKOUT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
OWN_TOKEN = re.compile(r"(GH|GITHUB)_TOKEN: \$\{\{ github\.token \}\}")
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
    "an unknown machine": ("ubuntu-24.04", "gfx9999", "actionlint", "runner-label"),
    "an injected template": (
        "echo fine", "echo ${{ github.event.head_commit.message }}", "zizmor", "template-injection"
    ),
    "credentials that stay": (
        "run: echo fine", f"uses: actions/checkout@{'a' * 40} # v7.0.1", "zizmor", "artipacked"
    ),
}  # fmt: skip


def lint(tool: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run one of LINTERS from this environment; skips the test where it belongs to another."""
    program = shutil.which(tool, path=str(Path(sys.executable).parent))
    assert program, f"requirements-dev.txt brings {tool}, and it is not here"
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
    """Trusted publishing needs no secret; the token that proves who we are is for one job, and
    what a job's own token may write its permissions say."""
    tokens = set()
    for path in WORKFLOWS:
        text, workflow = OWN_TOKEN.sub("", path.read_text()), load(path)
        assert not re.search(r"secrets\b|(?i:password|api[_-]?key|_token:)", text), path
        assert workflow["permissions"] == {}
        for name, job in workflow["jobs"].items():
            permissions = job["permissions"]
            tokens |= {(path.stem, name)} if "id-token" in permissions else set()
            writes = {key for key, value in permissions.items() if value == "write"}
            publishing = {"id-token", "attestations"}
            own = {"pins/outdated": {"issues"}, "channel/publish": {"contents"}}
            assert writes <= publishing or writes == own.get(f"{path.stem}/{name}")
    assert tokens == {("channel", "release"), ("release", "publish")}


def test_what_may_write_runs_no_pixi_by_its_version_alone() -> None:
    """setup-pixi takes no hash: the job that publishes verifies pixi before it runs, or ends."""
    jobs = [job for path in WORKFLOWS for job in load(path)["jobs"].values()]
    writers = [str(j.get("steps")) for j in jobs if "write" in j["permissions"].values()]
    assert not [steps for steps in writers if "setup-pixi@" in steps]
    (publisher,) = (steps for steps in writers if "pixi upload" in steps)
    (version,) = set(re.findall(r"'pixi-version': '(\S+)'", str(jobs)))
    parts = f"gh release download {version} ", f"gh release verify-asset {version} ", "install -D "
    found = [publisher.find(part) for part in (*parts, "'run': './forge", "'run': 'pixi")]
    assert -1 not in found and found == sorted(found)


def starters(path: Path) -> list[dict[str, Any]]:
    """A workflow itself, unless others call it alone, and those that call it."""
    workflow = load(path)
    # YAML 1.1 reads the key `on` as true
    called = "workflow_call" in workflow[True]
    callers = [p for p in WORKFLOWS if f"uses: ./.github/workflows/{path.name}" in p.read_text()]
    assert bool(callers) == called, path.name
    starts = [workflow] if set(workflow[True]) != {"workflow_call"} else []
    return [*starts, *(load(caller) for caller in callers)]


def test_own_machines_run_no_pull_request() -> None:
    own = [path for path in WORKFLOWS if re.search(r"self-hosted|BUILD_RUNNER", path.read_text())]
    assert {path.stem for path in own} == {"build", "channel", "release"}
    started_by = {"push", "schedule", "workflow_call", "workflow_dispatch"}
    for path in own:
        for workflow in starters(path):
            assert set(workflow[True]) <= started_by


def test_no_upload_is_cancelled() -> None:
    for path in WORKFLOWS:
        if re.search("publish --|pixi upload|gh issue|channel.sh send", path.read_text()):
            for workflow in starters(path):
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


@pytest.mark.parametrize(("where", "line"), STEPS, ids=[f"{w}: {line}" for w, line in STEPS])
def test_steps_are_commands_that_people_run(where: str, line: str) -> None:
    """A command of the driver, a task, or a program in a stack's environment."""
    words = shlex.split(re.split(r" *(?:>>?|\|\|) *", OURS.sub("", line))[0])
    if line.startswith("./forge"):
        assert understood(words), where
    elif words[:2] == ["--locked", "--manifest-path"]:
        manifest, program, script = words[2:5]
        assert (CHECKOUT / manifest.removeprefix("build/") / "pixi.toml").is_file()
        assert program == "strix-validate" or (
            program == "python" and (CHECKOUT / script).is_file()
        )
    else:
        pixi = tomllib.loads((CHECKOUT / "pixi.toml").read_text())
        assert words[0] in pixi["feature"]["lint"]["tasks"], where


def test_random_kernels_have_all_that_the_emulator_imports() -> None:
    """The recipe's list; typer and rich are the command's, which they do not go through."""
    (step,) = (step for where, step in scripts() if where == "seeds/kernels")
    given = set(re.findall(r"--spec ([\w-]+)", "\n".join(step)))
    recipe = yaml.safe_load((CHECKOUT / "recipes/strix-emulate/recipe.yaml").read_text())
    wanted = {line.split()[0] for line in recipe["outputs"][0]["requirements"]["run"]}
    assert wanted - given == {"${{", "typer", "rich"}


def test_the_list_of_releases_edits_no_issue_of_others() -> None:
    """GitHub's search finds every issue whose title has the words, whoever opened it."""
    (step,) = (s for where, s in scripts() if where.startswith("pins/") and "gh issue" in str(s))
    text = "\n".join(step)
    assert "gh issue list --app github-actions " in text
    assert 'map(select(.title == "Newer releases"))' in text


def test_no_step_works_past_the_driver() -> None:
    known = re.compile(
        rf"{OURS.pattern}|pixi (upload|exec) |gh release download|\.github/(channel|free_disk)\.sh"
        r"|find \. -newer |sha256sum channel/|packages/strix-emulate/suites/debian\.sh "
    )
    assert [where for where, step in scripts() if not any(map(known.match, step))] == []


def test_a_job_ends_in_time_and_saves_what_it_has() -> None:
    """A job that exceeds its time is cancelled and saves nothing, so the build has to end first."""
    job = load(GITHUB / "workflows/build.yml")["jobs"]["build"]
    assert job["timeout-minutes"] == 360, "GitHub's runners end a job after six hours"
    steps = job["steps"]
    (build,) = (step for step in steps if step.get("id") == "build")
    (line,) = (line for line in build["run"].splitlines() if line.startswith("./forge build"))
    # the zstd level of a release: rocm-sdk at another one is larger than servers take
    assert "--package-format conda:19 --stop-after 5h " in line
    restore, save, upload = (
        next(step for step in steps if f"actions/{action}@" in step.get("uses", ""))
        for action in ("cache/restore", "cache/save", "upload-artifact")
    )
    order = [steps.index(step) for step in (restore, build, save, upload)]
    assert order == sorted(order)
    for step in steps[order[1] + 1 :]:
        assert step["if"] == "${{ always() && steps.build.outcome != 'skipped' }}"
    assert save["with"] == {key: restore["with"][key] for key in ("path", "key")}
    assert save["with"]["key"].startswith(restore["with"]["restore-keys"])
    assert restore["with"]["restore-keys"].endswith("/"), "else triton takes triton-packages'"


def test_no_machine_of_our_own_loses_what_github_brings() -> None:
    for path in WORKFLOWS:
        for job in load(path)["jobs"].values():
            for step in job.get("steps", []):
                if "free_disk.sh" in step.get("run", ""):
                    hosted = step.get("if") == "runner.environment == 'github-hosted'"
                    assert hosted or job["runs-on"] == "ubuntu-24.04", path


def test_the_caches_of_a_run_fit() -> None:
    """GitHub keeps 10 GB; each job of pytorch's chain saves what ccache may hold."""
    jobs = load(GITHUB / "workflows/channel.yml")["jobs"]
    chain = [job for job in jobs.values() if job.get("with", {}).get("cache") == "pytorch"]
    (build,) = (
        step
        for step in load(GITHUB / "workflows/build.yml")["jobs"]["build"]["steps"]
        if step.get("id") == "build"
    )
    size = build["env"]["CCACHE_MAXSIZE"]
    assert len(chain) * int(size.removesuffix("M")) < 8_000
    recipe = (CHECKOUT / "recipes/pytorch/recipe.yaml").read_text()
    assert 'CCACHE_MAXSIZE: ${{ env.get("CCACHE_MAXSIZE"' in recipe


stages = module(GITHUB / "stages.py")


def test_each_recipe_has_a_job_after_those_that_it_needs(recipes: RecipeSet) -> None:
    rows = [
        {"recipe": name, "action": "build", "needs": sorted(recipes.direct_needs(name))}
        for name in recipes.recipes
    ]
    jobs = stages.sort_recipes(rows)
    assert list(jobs) == ["sdk", "aotriton", "pytorch", "layer1", "layer2", "layer3"]
    names = {
        job: json.loads(value) if job.startswith("layer") else value.split()
        for job, value in jobs.items()
    }
    built: set[str] = set()
    for job in names:
        for name in names[job]:
            own = set(names[job]) if job == "sdk" else set()
            assert recipes.direct_needs(name) <= built | own, name
        built |= set(names[job])
    assert built == set(RECIPES) and sum(map(len, names.values())) == len(RECIPES)
    outputs = load(GITHUB / "workflows/channel.yml")["jobs"]["plan"]["outputs"]
    assert list(outputs) == list(jobs)
    rows[0]["action"] = "up-to-date"
    assert rows[0]["recipe"] not in stages.sort_recipes(rows)["sdk"].split()
    rows.append({"recipe": "deeper", "action": "build", "needs": names["layer3"][:1]})
    with pytest.raises(SystemExit, match="has 3 layers, and the recipes need 4: add a job"):
        stages.sort_recipes(rows)


def test_plans_that_no_job_fits() -> None:
    row = {"recipe": "alpha", "action": "build", "needs": ["beta"]}
    with pytest.raises(SystemExit, match="alpha needs beta, which the plan does not name before"):
        stages.sort_recipes([row, {"recipe": "beta", "action": "build", "needs": []}])
    pytorch = {"recipe": "pytorch", "action": "build", "needs": []}
    assert stages.sort_recipes([pytorch]) == {"pytorch": "pytorch"}
    assert stages.sort_recipes([pytorch | {"action": "up-to-date"}]) == {}
    assert stages.sort_recipes([]) == {}


def test_the_page_says_what_a_run_costs(recipes: RecipeSet) -> None:
    """Hours on four cores, and disk, by the recipes' costs; of a layer, the longest job's."""
    rows = [
        {"recipe": name, "action": "build", "needs": sorted(recipes.direct_needs(name))}
        for name in recipes.recipes
    ]
    known = read_costs(recipes.recipes.values(), recipes.base)
    page = (CHECKOUT / "docs/publishing.md").read_text()
    table = dict(re.findall(r"^\| `([a-z0-9-]+)`[^|]*\| (.* \| .* \| .*) \|$", page, re.M))
    hours = elapsed = 0.0
    for job, value in stages.sort_recipes(rows).items():
        is_layer = job.startswith("layer")
        names = json.loads(value) if is_layer else value.split()
        each = [known[name].cpu_hours / 4 for name in names]
        longest = max(each) if is_layer else sum(each)
        hours, elapsed = hours + sum(each), elapsed + longest
        disk = max(known[name].disk for name in names)
        row = table[{"pytorch": "pytorch-1"}.get(job, job.replace("layer", "layer-"))]
        assert row.endswith(f" | {longest:.1f} | {disk:.0f}"), (job, longest, disk)
        assert not is_layer or row.startswith(f"{len(names)} recipes "), row
    text = " ".join(page.split())
    assert f"About {hours:.0f} runner hours of building" in text
    assert f"you wait about {elapsed:.0f} hours" in text


def test_nothing_is_published_that_did_not_pass_on_the_gpu() -> None:
    """But as untested; integration/test_channel_workflow.py executes both."""
    release = load(GITHUB / "workflows/channel.yml")["jobs"]["release"]
    assert release["needs"] == "publish" and "!failure()" in release["if"]
    jobs = load(GITHUB / "workflows/release.yml")["jobs"]
    assert jobs["gpu"]["runs-on"] == ["self-hosted", "gfx1151"]
    assert jobs["publish"]["needs"] == "gpu" and jobs["publish"]["environment"]
    assert "refs/heads/main" in jobs["fetch"]["if"] and jobs["gpu"]["needs"] == "fetch"
    lines = [(where, line) for where, step in scripts() for line in step if "publish --" in line]
    assert [where for where, _ in lines] == ["channel/publish", "release/publish"]
    assert " --untested " in lines[0][1]
    assert lines[1][1].endswith(" --validated build/evidence/validated.sha256")
    gpu = [step.get("run", "") for step in jobs["gpu"]["steps"]]
    names = [number for number, line in enumerate(gpu) if line.startswith("sha256sum ")]
    checks = [number for number, line in enumerate(gpu) if line.startswith("pixi run ")]
    assert names and max(checks) < min(names), "after everything has passed"


@pytest.mark.parametrize("stack", STACKS)
def test_every_stack_is_validated_before_all_is_published(stack: str) -> None:
    jobs = load(GITHUB / "workflows/release.yml")["jobs"]
    steps = {name: [step.get("run", "") for step in job["steps"]] for name, job in jobs.items()}
    locked = f"./forge lock --base conda-forge {stack}"
    own = CHECKOUT / "stacks" / stack / "check.py"
    check = (
        f"python {own.relative_to(CHECKOUT)}"
        if own.exists()
        else "strix-validate run --evidence build/evidence"
    )
    validated = f"pixi run --locked --manifest-path build/stacks/{stack} {check}"
    last = next(n for n, line in enumerate(steps["gpu"]) if line.startswith(validated))
    assert steps["gpu"].index(locked) < last
    assert locked in steps["publish"]


def test_the_issue_form_is_valid() -> None:
    """The fields that GitHub's form syntax requires, each ID once, and a field for the record."""
    form = load(GITHUB / "ISSUE_TEMPLATE/evidence.yml")
    assert {"name", "description", "body"} <= set(form)
    fields = [item for item in form["body"] if item["type"] != "markdown"]
    assert all(item["attributes"]["label"] for item in fields)
    assert len({item["id"] for item in fields}) == len(fields)
    (record,) = (item for item in fields if item["id"] == "record")
    assert record["attributes"]["render"] == "json" and record["validations"]["required"]
