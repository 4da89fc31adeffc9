# SPDX-License-Identifier: BSD-3-Clause
"""Run channel.yml and release.yml, and install from the channel that they publish.

support/workflow_runner.py simulates GitHub, with machines that have small disks. conda-forge is
replaced by a stand-in. The recipes are small, and have the names that the workflows use. The
driver, the scripts of the workflows' steps and the packages are real.
"""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from support import hosted
from support.hosted import CODE, Hosting
from support.hub import Hub
from support.kills import needs_time
from support.machine import GH
from support.pixi import Pixi
from support.project import CHECKOUT, driver, driver_environment
from support.servers import served
from support.stand_in import write_mirrors
from support.workflow_runner import FAILURE, SKIPPED, SUCCESS, Run

from forge.bases import CONDA_FORGE

PYTORCH_JOBS = ("pytorch-1", "pytorch-2", "pytorch-3")


def list_jobs(results: dict[str, str], result: str) -> set[str]:
    """Return the jobs that have this result."""
    return {job for job, own_result in results.items() if own_result == result}


class User:
    """A user with an empty home folder and a stack, `mine`, of the published channel."""

    def __init__(self, folder: Path, mirrors: dict[str, str]) -> None:
        write_mirrors(folder, mirrors)
        self.root = folder
        stack = folder / "stacks" / "mine"
        stack.mkdir(parents=True)
        text = hosted.MANIFEST.format(name="mine", channel=hosted.ADDRESS)
        (stack / "pixi.toml").write_text(text)
        (folder / "recipes").mkdir()
        for name in ("recipes/bases", "variants.yaml"):
            (folder / name).symlink_to(CHECKOUT / name)

    def forge(self, *words: str) -> None:
        """Run the driver, and require that it succeeds."""
        environment = driver_environment(self.root) | {
            "HOME": str(self.root),
            "FORGE_BASE": "conda-forge",
            "FORGE_CHANNEL": hosted.ADDRESS,
        }
        command = driver(CHECKOUT, *words)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_what_was_published_is_installed(
    hosting: Hosting, published_hub: Hub, tmp_path: Path
) -> None:
    """A user locks and installs the packages from the public URL, through GitHub's redirects.

    The lock has the URL and the sha256 of each published file.
    """
    files = hosted.read_published(published_hub)
    assert {name.split("/")[1].partition("-1.0-")[0] for name in files} == hosted.NEEDS.keys()
    notes = (published_hub.releases / hosted.NAME / "linux-64/.notes").read_text()
    assert "no package of this channel has run on a gfx1151 GPU" in notes
    assert f"/owner/strix-forge/releases/download/{hosted.NAME}" in notes
    with served(published_hub.folder, hosted.Assets) as github:
        releases = f"{github}/download/{hosted.NAME}"
        user = User(tmp_path, {CONDA_FORGE: hosting.conda_forge, hosted.ADDRESS: releases})
        user.forge("lock", "mine")
        user.forge("install", "mine")
    lock = (tmp_path / "build/stacks/mine/pixi.lock").read_text()
    for name, digest in files.items():
        assert f"{hosted.ADDRESS}/{name}" in lock and digest in lock
    text = tmp_path / "build/stacks/mine/.pixi/envs/default/share/pytorch/text"
    assert text.read_text() == "prepare of pytorch\ncompile of pytorch\ninstall of pytorch\n"


@pytest.mark.pixi
def test_pixi_installs_what_was_published(
    hosting: Hosting, published_hub: Hub, tmp_path: Path
) -> None:
    """pixi installs the packages with the commands of docs/publishing.md."""
    page = (CHECKOUT / "docs/publishing.md").read_text()
    init, add = re.search(r"^pixi (init .*)\ncd mine && pixi (add .*)$", page, re.M).groups()
    with served(published_hub.folder, hosted.Assets) as github:
        releases = f"{github}/download/{hosted.NAME}"
        pixi = Pixi(tmp_path / "home", {CONDA_FORGE: hosting.conda_forge, hosted.ADDRESS: releases})
        pixi(*shlex.split(init.replace("/YOU/", "/owner/")), cwd=tmp_path)
        pixi(*shlex.split(add), cwd=tmp_path / "mine")
    lock = (tmp_path / "mine/pixi.lock").read_text()
    installed = tmp_path / "mine/.pixi/envs/default/share"
    for name, digest in hosted.read_published(published_hub).items():
        if "/vllm-" not in name:
            assert f"{hosted.ADDRESS}/{name}" in lock and digest in lock
    assert {path.name for path in installed.iterdir()} == hosted.NEEDS.keys() - {"vllm"}


@needs_time
def test_interrupted_in_each_stage(hosting: Hosting, published_hub: Hub) -> None:
    """The published files do not change if jobs lose their machines.

    In addition, all three jobs of pytorch run out of time once.
    """
    hub = hosting.hub("interrupted")
    # The limit is in bytes. A cache has 78 bytes at most, so older caches are evicted.
    hub.cache_limit = 120
    run = Run(hub, "channel.yml")
    points_by_label = {
        "plan": "list",
        "sdk / build": "rocm-sdk-compile",
        "aotriton / build": "aotriton-install",
        "pytorch-3 / build": "pytorch-install",
        "layer-1 (strix-validate) / build": "strix-validate-prepare",
        "layer-2 (flash-attn) / build": "flash-attn-compile",
        "layer-3 (vllm) / build": "vllm-install",
        "publish": "upload",
    }
    lost = []
    for label, point in points_by_label.items():
        if label == "pytorch-3 / build":
            # Before this job loses its machine, all jobs of pytorch run out of time.
            hub.stops = {}
            for job, stage in zip(PYTORCH_JOBS, hosted.STAGES, strict=True):
                hub.stops[f"{job} / build"] = (f"pytorch-{stage}", "time")
            results = run.rerun_failed()
            # The driver's exit status 75 means that the time is up. Only the last of the three jobs
            # fails with this status.
            assert [results[job] for job in PYTORCH_JOBS] == [SUCCESS, SUCCESS, FAILURE], run.log
            assert results["layer-1"] == SKIPPED and results["publish"] == SUCCESS
            names = {name.split("-1.0-")[0] for name in hosted.read_published(hub)}
            assert names == {"noarch/rocm-sdk", "noarch/aotriton"}
        hub.stops = {label: (point, "kill")}
        results = run.rerun_failed() if lost else run.start("push", CODE)
        assert results[label.split()[0]] == FAILURE, run.log
        lost.append(f"{label}: lost at {point}")
    assert hosted.read_published(hub).items() < hosted.read_published(published_hub).items()
    results = run.rerun_failed()
    assert results.keys() - list_jobs(results, SUCCESS) == {"release"}
    assert hosted.read_published(hub) == hosted.read_published(published_hub)
    assert [line for line in run.log if "lost at" in line] == lost
    assert any("evicted" in line for line in run.log)
    stages = hosted.take_executed(hub)
    assert {*stages} == {f"{name}-{stage}" for name in hosted.NEEDS for stage in hosted.STAGES}
    assert stages.count("rocm-sdk-prepare") == 2, (
        "a lost machine must save no cache, so that its stages run again"
    )
    assert stages.count("pytorch-compile") == 1, "a job whose time is up must pass on its cache"


def test_a_push_builds_what_it_changed(hosting: Hosting, published_hub: Hub) -> None:
    """A push builds the changed recipe and its dependents, and keeps the published packages.

    The next push has nothing to build, which is not a failure.
    """
    source = hosting.copy_source("changed")
    hosted.write_recipe(source, "strix-validate", ["pytorch"], version="1.1")
    hub = hosting.hub("next", source, after=published_hub)
    before = hosted.read_published(hub)
    results = Run(hub, "channel.yml").start("push", CODE)
    assert list_jobs(results, SKIPPED) == {"sdk", "aotriton", *PYTORCH_JOBS, "release"}
    built = {stage.rpartition("-")[0] for stage in hosted.take_executed(hub)}
    assert built == {"strix-validate", "flash-attn", "vllm"}
    after = hosted.read_published(hub)
    assert after.items() > before.items() and len(after) == len(before) + 3
    results = Run(hub, "channel.yml").start("push", CODE)
    assert list_jobs(results, SUCCESS) == {"plan", "publish"}
    assert set(results.values()) == {SUCCESS, SKIPPED} and hosted.read_published(hub) == after


def test_what_cannot_be_built_costs_what_needs_it(hosting: Hosting, published_hub: Hub) -> None:
    """If a recipe cannot be built, its dependents are not built either. The rest is published.

    One recipe requires a package that conda-forge lacks. The build of another recipe fails.
    """
    source = hosting.copy_source("lacking")
    hosted.write_recipe(source, "flash-attn", ["strix-validate", "no-such-package >=2"])
    hosted.write_recipe(source, "torchvision", ["pytorch"])
    (source / "recipes/torchvision/build.sh").write_text("exit 1\n")
    hosted.write_recipe(source, "liger-kernel", ["strix-validate"])
    hosted.write_recipe(source, "sageattention", ["strix-validate", "torchvision"])
    hub = hosting.hub("lacking-hub", source, after=published_hub)
    run = Run(hub, "channel.yml")
    results = run.start("push", CODE)
    layers = [results[f"layer-{number}"] for number in (1, 2, 3)]
    assert layers == [FAILURE, SUCCESS, SUCCESS], run.log
    assert results["publish"] == SUCCESS and results["release"] == SKIPPED
    reasons = {
        "flash-attn": "conda-forge has no no-such-package >=2",
        "sageattention": "needs torchvision, and --only builds only the named packages",
        "vllm": "needs flash-attn, and --only builds only the named packages",
    }
    for name, reason in reasons.items():
        (log,) = (log for log in (hub.folder / "logs").iterdir() if f"({name})" in log.name)
        text = log.read_text()
        assert reason in text and f"::warning::./forge build {name}: exit code 3" in text
    added = hosted.read_published(hub).keys() - hosted.read_published(published_hub).keys()
    assert [name.partition("-1.0-")[0] for name in added] == ["noarch/liger-kernel"]


def test_a_build_is_withdrawn_from_the_releases(hosting: Hosting, published_hub: Hub) -> None:
    """The commands of docs/publishing.md withdraw a build.

    The index no longer has the build, and the workflow no longer fetches it.
    """
    page = (CHECKOUT / "docs/publishing.md").read_text()
    (commands,) = re.findall(r"(?m)^export GITHUB_REPOSITORY=.*\n([^`]+)^```$", page)
    assert commands.count("NAME-VERSION-BUILD") == 1
    hub = hosting.hub("withdrawn", after=published_hub)
    (file,) = (name for name in hosted.read_published(hub) if "/vllm-" in name)
    build = file.partition("/")[2].removesuffix(".conda")
    script = commands.replace("NAME-VERSION-BUILD", build)
    script += ".github/channel.sh fetch untested again notes\nls again/*\n"
    checkout = {"uses": "actions/checkout@x", "with": {"persist-credentials": False}}
    step = {"env": {"FORGE_BASE": "conda-forge", "GH_TOKEN": "x"}, "run": script}
    jobs = {"a": {"runs-on": "x", "steps": [checkout, step]}}
    source = hosting.copy_source("withdrawing")
    (source / ".github/workflows/by-hand.yml").write_text(
        f"on: {{workflow_dispatch: }}\njobs: {json.dumps(jobs)}\n"
    )
    hub.source = source
    run = Run(hub, "by-hand.yml")
    assert run.start() == {"a": SUCCESS}, run.log
    index = json.loads((hub.releases / hosted.NAME / "noarch/repodata.json").read_text())
    names = {f"noarch/{name}" for name in index["packages.conda"]}
    assert names == hosted.read_published(hub).keys() - {file}
    (log,) = (hub.folder / "logs").iterdir()
    fetched = log.read_text().rpartition("again/noarch:")[2]
    assert "pytorch-1.0-" in fetched and "vllm-1.0-" not in fetched


@pytest.mark.parametrize("name", ["", "stable"])
def test_a_fork_does_nothing_until_it_is_switched_on(name: str, hosting: Hosting) -> None:
    hub = hosting.hub(f"off-{name}")
    hub.variables = {"CHANNEL_UNTESTED": name, "CHANNEL": "strix-forge"} if name else {}
    assert set(Run(hub, "channel.yml").start("push", CODE).values()) == {SKIPPED}
    assert list(hub.releases.iterdir()) == []


@pytest.mark.parametrize("command", ["list", "view", "download"])
def test_releases_that_do_not_answer_are_not_empty(
    command: str, hosting: Hosting, published_hub: Hub
) -> None:
    """If a command of gh fails, the job `plan` fails.

    If the job considered the release empty, all packages would be built again with names that are
    already published.
    """
    hub = hosting.hub(f"no-{command}", after=published_hub)
    fail = f'test "$2" != {command} || exit 1\nexec'
    hub.programs = {"gh": GH.replace("exec", fail)}
    results = Run(hub, "channel.yml").start()
    assert results.pop("plan") == FAILURE and set(results.values()) == {SKIPPED}


def test_a_recipe_without_a_job_is_an_error(hosting: Hosting) -> None:
    """The job `plan` fails if a recipe is in a layer for which the workflow has no job.

    In an earlier version, a pipe hid this error. The workflow then built nothing and succeeded.
    """
    source = hosting.copy_source("deep")
    hosted.write_recipe(source, "deeper", ["vllm"])
    results = Run(hosting.hub("deep-hub", source), "channel.yml").start()
    assert results.pop("plan") == FAILURE and set(results.values()) == {SKIPPED}


def test_pages_alone_start_nothing(hosting: Hosting) -> None:
    hub = hosting.hub("pages")
    assert Run(hub, "channel.yml").start("push", ("README.md", "docs/a/b.png")) == {}


def test_the_files_that_were_validated_are_promoted_unchanged(
    hosting: Hosting, published_hub: Hub
) -> None:
    hub = hosted.switch_release_on(hosting.hub("promoted", after=published_hub))
    run = Run(hub, "release.yml")
    assert set(run.start().values()) == {SUCCESS}, run.log
    digests = {}
    for name, digest in hosted.read_published(published_hub).items():
        digests[name.partition("/")[2]] = digest
    assert hosted.read_promoted(hub) == digests
    sums = (run.artifacts / "evidence/validated.sha256").read_text()
    assert {line.split()[0] for line in sums.splitlines()} == set(digests.values())


# Faults of the machine with the GPU: a part of the simulated pixi, the text that replaces the part,
# and the results of the jobs.
FAULTS = {
    # The machine changes a file after it has fetched the file.
    "another file": (
        '*" --evidence "*)',
        '*" --evidence "*) for f in channel/noarch/vllm-*; do echo more >>"$f"; done;',
        {"fetch": SUCCESS, "gpu": SUCCESS, "publish": FAILURE},
    ),
    "a check that fails": (
        '*" --evidence "*)',
        '*stacks/finetune*) exit 1 ;; *" --evidence "*)',
        {"fetch": SUCCESS, "gpu": FAILURE, "publish": SKIPPED},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_else_is_promoted(fault: str, hosting: Hosting, published_hub: Hub) -> None:
    """No package is promoted if a check fails, or if the fetched file is not the validated one."""
    old, new, results = FAULTS[fault]
    assert old in hosted.PIXI
    hub = hosting.hub(f"fault-{fault}", after=published_hub)
    hosted.switch_release_on(hub, hosted.PIXI.replace(old, new))
    run = Run(hub, "release.yml")
    assert run.start() == results, run.log
    assert hosted.read_promoted(hub) == {} and (run.artifacts / "evidence").is_dir()
    logs = "".join(log.read_text() for log in (hub.folder / "logs").iterdir())
    names_the_file = "vllm-1.0" in logs and "is not a validated file" in logs
    assert names_the_file == (fault == "another file")
