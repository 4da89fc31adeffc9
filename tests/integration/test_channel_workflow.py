# SPDX-License-Identifier: BSD-3-Clause
"""channel.yml and release.yml, executed: from nothing to a channel that users install from.

GitHub is support/workflow_runner.py, with machines whose disk is small, and conda-forge a stand-in.
The recipes are small, and have the names that the workflows name. All else is real: the driver, the
steps' scripts, the packages.
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

CHAIN = ("pytorch-1", "pytorch-2", "pytorch-3")


class User:
    """Somebody with an empty home folder, who reaches conda-forge and the releases."""

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

    def forge(self, *words: str) -> str:
        here = driver_environment(self.root) | {
            "HOME": str(self.root),
            "FORGE_BASE": "conda-forge",
            "FORGE_CHANNEL": hosted.ADDRESS,
        }
        command = driver(CHECKOUT, *words)
        done = subprocess.run(command, env=here, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def test_what_was_published_is_installed(hosting: Hosting, whole: Hub, tmp_path: Path) -> None:
    """From the public address, through GitHub's redirects, by a lock with the files' sha256."""
    files = hosted.read_published(whole)
    assert {name.split("/")[1].partition("-1.0-")[0] for name in files} == hosted.NEEDS.keys()
    notes = (whole.releases / hosted.NAME / "linux-64/.notes").read_text()
    assert "no package of this channel has run on a gfx1151 GPU" in notes
    assert f"/owner/strix-forge/releases/download/{hosted.NAME}" in notes
    with served(whole.folder, hosted.Assets) as github:
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
def test_pixi_installs_what_was_published(hosting: Hosting, whole: Hub, tmp_path: Path) -> None:
    """By the page's commands."""
    page = (CHECKOUT / "docs/publishing.md").read_text()
    (init, add) = re.search(r"^pixi (init .*)\ncd mine && pixi (add .*)$", page, re.M).groups()
    with served(whole.folder, hosted.Assets) as github:
        releases = f"{github}/download/{hosted.NAME}"
        pixi = Pixi(tmp_path / "home", {CONDA_FORGE: hosting.conda_forge, hosted.ADDRESS: releases})
        pixi(*shlex.split(init.replace("/YOU/", "/owner/")), cwd=tmp_path)
        pixi(*shlex.split(add), cwd=tmp_path / "mine")
    lock = (tmp_path / "mine/pixi.lock").read_text()
    installed = tmp_path / "mine/.pixi/envs/default/share"
    for name, digest in hosted.read_published(whole).items():
        if "/vllm-" not in name:
            assert f"{hosted.ADDRESS}/{name}" in lock and digest in lock
    assert {path.name for path in installed.iterdir()} == hosted.NEEDS.keys() - {"vllm"}


@needs_time
def test_interrupted_in_each_stage(hosting: Hosting, whole: Hub) -> None:
    """Machines are lost in each job, and pytorch's time is up thrice: the files are the same."""
    hub = hosting.hub("interrupted")
    hub.cache_limit = 120  # bytes: an entry has 57 at most, and older ones go
    run = Run(hub, "channel.yml")
    kills = {
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
    for label, point in kills.items():
        hub.stops = {label: (point, "kill")}
        if label == "pytorch-3 / build":  # first its time is up, as is that of the parts before
            for job, stage in zip(CHAIN, hosted.STAGES, strict=True):
                hub.stops[f"{job} / build"] = (f"pytorch-{stage}", "time")
            results = run.rerun_failed()
            # 75 is no failure but of the last part
            assert [results[job] for job in CHAIN] == [SUCCESS, SUCCESS, FAILURE], run.log
            assert results["layer-1"] == SKIPPED and results["publish"] == SUCCESS
            assert {name.split("-1.0-")[0] for name in hosted.read_published(hub)} == {
                "noarch/rocm-sdk",
                "noarch/aotriton",
            }
            hub.stops = {label: (point, "kill")}
        results = run.rerun_failed() if lost else run.start("push", CODE)
        assert results[label.split()[0]] == FAILURE, run.log
        lost.append(f"{label}: lost at {point}")
    assert hosted.read_published(hub).items() < hosted.read_published(whole).items()
    results = run.rerun_failed()
    assert {name for name, result in results.items() if result != SUCCESS} == {"release"}
    assert hosted.read_published(hub) == hosted.read_published(whole)
    assert [line for line in run.log if "lost at" in line] == lost
    assert any("evicted" in line for line in run.log)
    stages = hosted.take_executed(hub)
    assert {*stages} == {f"{n}-{stage}" for n in hosted.NEEDS for stage in hosted.STAGES}
    assert stages.count("rocm-sdk-prepare") == 2, "a machine that is lost saves nothing"
    assert stages.count("pytorch-compile") == 1, "a part whose time is up hands on its cache"


def test_a_push_builds_what_it_changed(hosting: Hosting, whole: Hub) -> None:
    """What is published is not built again and stays as it is; nothing to build is no failure."""
    source = hosting.copy_source("changed")
    hosted.write_recipe(source, "strix-validate", ["pytorch"], version="1.1")
    hub = hosting.hub("next", source, after=whole)
    before = hosted.read_published(hub)
    results = Run(hub, "channel.yml").start("push", CODE)
    skipped = {name for name, result in results.items() if result == SKIPPED}
    assert skipped == {"sdk", "aotriton", *CHAIN, "release"}
    assert {stage.rpartition("-")[0] for stage in hosted.take_executed(hub)} == {
        "strix-validate",
        "flash-attn",
        "vllm",
    }
    after = hosted.read_published(hub)
    assert after.items() > before.items() and len(after) == len(before) + 3
    results = Run(hub, "channel.yml").start("push", CODE)
    assert {n for n, r in results.items() if r != SKIPPED} == {"plan", "publish"}
    assert set(results.values()) == {SUCCESS, SKIPPED} and hosted.read_published(hub) == after


def test_what_cannot_be_built_costs_what_needs_it(hosting: Hosting, whole: Hub) -> None:
    """Be it that conda-forge lacks something, or that a build fails; the rest is published."""
    source = hosting.copy_source("lacking")
    hosted.write_recipe(source, "flash-attn", ["strix-validate", "no-such-package >=2"])
    hosted.write_recipe(source, "torchvision", ["pytorch"])
    (source / "recipes/torchvision/build.sh").write_text("exit 1\n")
    hosted.write_recipe(source, "liger-kernel", ["strix-validate"])
    hosted.write_recipe(source, "sageattention", ["strix-validate", "torchvision"])
    hub = hosting.hub("lacking-hub", source, after=whole)
    run = Run(hub, "channel.yml")
    results = run.start("push", CODE)
    layers = [results[f"layer-{number}"] for number in (1, 2, 3)]
    assert layers == [FAILURE, SUCCESS, SUCCESS], run.log
    assert results["publish"] == SUCCESS and results["release"] == SKIPPED
    logs = {log.name: log.read_text() for log in (hub.folder / "logs").iterdir()}
    expected = {
        "flash-attn": "conda-forge has no no-such-package >=2",
        "sageattention": "needs torchvision, and --only builds only the named packages",
        "vllm": "needs flash-attn, and --only builds only the named packages",
    }
    for name, reason in expected.items():
        (log,) = (text for file, text in logs.items() if f"({name})" in file)
        assert reason in log and f"::warning::./forge build {name}: exit code 3" in log
    added = hosted.read_published(hub).keys() - hosted.read_published(whole).keys()
    assert [name.partition("-1.0-")[0] for name in added] == ["noarch/liger-kernel"]


# docs/publishing.md
WITHDRAW = """\
.github/channel.sh fetch untested published/untested
./forge publish --to published/untested --withdraw {build} --reason "wrong gradients in bfloat16"
.github/channel.sh send untested published/untested channel/forge
"""


def test_a_build_is_withdrawn_from_the_releases(hosting: Hosting, whole: Hub) -> None:
    """By the page's commands: the index no longer names it, and nothing is built with it."""
    assert (
        WITHDRAW.format(build="NAME-VERSION-BUILD") in (CHECKOUT / "docs/publishing.md").read_text()
    )
    hub = hosting.hub("withdrawn", after=whole)
    (file,) = (name for name in hosted.read_published(hub) if "/vllm-" in name)
    build = file.partition("/")[2].removesuffix(".conda")
    source = hosting.copy_source("withdrawing")
    checkout = "{uses: actions/checkout@x, with: {persist-credentials: false}}"
    script = (
        WITHDRAW.format(build=build) + ".github/channel.sh fetch untested again notes\nls again/*\n"
    )
    step = f"{{env: {{FORGE_BASE: conda-forge, GH_TOKEN: x}}, run: {json.dumps(script)}}}"
    (source / ".github/workflows/by-hand.yml").write_text(
        f"on: {{workflow_dispatch: }}\njobs: {{a: {{runs-on: x, steps: [{checkout}, {step}]}}}}"
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
    command: str, hosting: Hosting, whole: Hub
) -> None:
    """Or all would be built again, under names that are published."""
    hub = hosting.hub(f"no-{command}", after=whole)
    fails = f'test "$2" != {command} || exit 1\nexec'
    hub.programs = {"gh": GH.replace("exec", fails)}
    results = Run(hub, "channel.yml").start()
    assert results.pop("plan") == FAILURE and set(results.values()) == {SKIPPED}


def test_a_recipe_without_a_job_is_an_error(hosting: Hosting) -> None:
    """Where a pipe hid it, nothing was built, and that was a success."""
    source = hosting.copy_source("deep")
    hosted.write_recipe(source, "deeper", ["vllm"])
    results = Run(hosting.hub("deep-hub", source), "channel.yml").start()
    assert results.pop("plan") == FAILURE and set(results.values()) == {SKIPPED}


def test_pages_alone_start_nothing(hosting: Hosting) -> None:
    hub = hosting.hub("pages")
    assert Run(hub, "channel.yml").start("push", ("README.md", "docs/a/b.png")) == {}


def test_the_files_that_were_validated_are_promoted_unchanged(hosting: Hosting, whole: Hub) -> None:
    hub = hosted.switch_release_on(hosting.hub("promoted", after=whole))
    run = Run(hub, "release.yml")
    assert set(run.start().values()) == {SUCCESS}, run.log
    files = {
        name.partition("/")[2]: digest for name, digest in hosted.read_published(whole).items()
    }
    assert hosted.read_promoted(hub) == files
    sums = (run.artifacts / "evidence/validated.sha256").read_text()
    assert {line.split()[0] for line in sums.splitlines()} == set(files.values())


FAULTS = {
    # the machine with the GPU has validated another file than the one that was fetched
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
def test_nothing_else_is_promoted(fault: str, hosting: Hosting, whole: Hub) -> None:
    right, wrong, results = FAULTS[fault]
    assert right in hosted.PIXI
    hub = hosted.switch_release_on(
        hosting.hub(f"fault-{fault}", after=whole), hosted.PIXI.replace(right, wrong)
    )
    run = Run(hub, "release.yml")
    assert run.start() == results, run.log
    assert hosted.read_promoted(hub) == {} and (run.artifacts / "evidence").is_dir()
    logs = "".join(log.read_text() for log in (hub.folder / "logs").iterdir())
    assert ("vllm-1.0" in logs and "was not validated on the GPU" in logs) == (
        fault == "another file"
    )
