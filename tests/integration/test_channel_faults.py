# SPDX-License-Identifier: BSD-3-Clause
"""channel.yml and release.yml with bad input, and with machines lost while they hand work on."""

import re
import shutil
from pathlib import Path

import pytest
from rehearsal import checkout, workflow
from support import hosted
from support.hosted import CODE, Hosting
from support.hub import Hub
from support.kills import needs_time
from support.project import CHECKOUT
from support.workflow_runner import CANCELLED, FAILURE, SKIPPED, SUCCESS, Run

CHAIN = ("rocm-sdk", "aotriton", "pytorch")  # recipes up to the last of pytorch's jobs


def names(files: dict[str, str]) -> set[str]:
    return {file.partition("/")[2].partition("-1.0-")[0] for file in files}


def logs(hub: Hub) -> str:
    return "".join(log.read_text() for log in (hub.folder / "logs").iterdir())


@needs_time
def test_lost_in_each_part_of_the_chain(hosting: Hosting, whole: Hub) -> None:
    """While it builds, and while it hands on its cache and its packages: the files are the same."""
    hub = hosting.hub("chain-hub", hosting.copy_source("chain", CHAIN))
    run = Run(hub, "channel.yml")
    losses = [
        {"plan": ("list", "kill")},
        {"sdk / build": ("artifact", "kill")},
        {"aotriton / build": ("cache", "kill")},
        {"pytorch-1 / build": ("pytorch-prepare", "late")},
        {
            "pytorch-1 / build": ("pytorch-compile", "time"),
            "pytorch-2 / build": ("pytorch-install", "kill"),
        },
        {"pytorch-2 / build": ("cache", "kill")},
        {"pytorch-2 / build": ("artifact", "kill")},
        {"pytorch-3 / build": ("cache", "kill")},
    ]
    for number, stops in enumerate(losses):
        hub.stops = dict(stops)
        results = run.rerun_failed() if number else run.start("push", CODE)
        label, (point, _) = list(stops.items())[-1]
        is_late = point == "pytorch-prepare"
        assert results[label.split()[0]] == (CANCELLED if is_late else FAILURE), run.log
        assert f"{label}: {'out of time' if is_late else 'lost'} at {point}" in run.log
        assert not hub.stops, "each machine was lost"
    results = run.rerun_failed()
    assert results["publish"] == SUCCESS, run.log
    files = hosted.read_published(hub)
    assert names(files) == {*CHAIN} and files.items() <= hosted.read_published(whole).items()
    stages = hosted.take_executed(hub)
    assert stages.count("pytorch-prepare") == 1, "a part whose time is up hands on its cache"
    assert stages.count("pytorch-install") == 2, "what was lost with its cache is built again"


def test_caches_that_are_too_large(hosting: Hosting, whole: Hub) -> None:
    """They are not kept. The next part begins anew, and has the same files."""
    hub = hosting.hub("large-hub", hosting.copy_source("large", CHAIN))
    hub.cache_limit = 10
    hub.stops = {"pytorch-1 / build": ("pytorch-install", "time")}
    run = Run(hub, "channel.yml")
    results = run.start("push", CODE)
    assert results.pop("publish") == SUCCESS and FAILURE not in results.values(), run.log
    assert any("cache not saved" in line for line in run.log) and hub.caches == []
    files = hosted.read_published(hub)
    assert names(files) == {*CHAIN} and files.items() <= hosted.read_published(whole).items()
    assert hosted.take_executed(hub).count("pytorch-compile") == 2


def test_a_failure_beside_the_sdk(hosting: Hosting) -> None:
    """In the SDK's job: it costs nothing that does not need it."""
    source = hosting.copy_source("beside", CHAIN)
    hosted.write_recipe(source, "triton", [])
    (source / "recipes/triton/build.sh").write_text("exit 1\n")
    hub = hosting.hub("beside-hub", source)
    run = Run(hub, "channel.yml")
    results = run.start("push", CODE)
    assert results["sdk"] == FAILURE and results["publish"] == SUCCESS, run.log
    assert names(hosted.read_published(hub)) == {*CHAIN}
    hosted.take_executed(hub)


def test_an_sdk_that_fails(hosting: Hosting) -> None:
    """What needs it ends at once, and says why; nothing is left to publish."""
    source = hosting.copy_source("no-sdk", CHAIN)
    (source / "recipes/rocm-sdk/build.sh").write_text("exit 1\n")
    hub = hosting.hub("no-sdk-hub", source)
    results = Run(hub, "channel.yml").start("push", CODE)
    assert [results[job] for job in ("sdk", "aotriton", "pytorch-1", "publish")] == [
        FAILURE,
        FAILURE,
        SKIPPED,
        SUCCESS,
    ]
    assert "needs rocm-sdk, and --only builds only the named packages" in logs(hub)
    assert hosted.read_published(hub) == {} and hosted.take_executed(hub) == []


BAD_NAMES = [
    "Untested",
    "untested channel",
    "untested/x",
    "../untested",
    "-untested",
    ".untested",
    "untested..x",
    "untested.lock",
    "untested\nx",
    "$(touch untested)",
    "ünuntested",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_no_channel_can_have(name: str, hosting: Hosting) -> None:
    """It is refused before hours of builds. GitHub's `contains` takes capitals for small ones."""
    hub = hosting.hub(f"name-{BAD_NAMES.index(name)}")
    hub.variables = {"CHANNEL_UNTESTED": name}
    results = Run(hub, "channel.yml").start("push", CODE)
    assert results.pop("plan") == FAILURE and set(results.values()) == {SKIPPED}
    assert "CHANNEL_UNTESTED has to contain 'untested', in lower case" in logs(hub)
    assert list(hub.releases.iterdir()) == [] and hosted.take_executed(hub) == []


@pytest.mark.parametrize("part", ["noarch", "forge"])
def test_a_file_that_never_arrived(part: str, hosting: Hosting, whole: Hub) -> None:
    """GitHub lists the half of an interrupted upload, which nobody can download."""
    hub = hosting.hub(f"half-{part}", after=whole)
    name = {"noarch": "vllm-1.0-h0000000_9.conda", "forge": "vllm-1.0-h0000000_9.json"}[part]
    (hub.releases / hosted.NAME / part / f"{name}.started").touch()
    results = Run(hub, "channel.yml").start("push", CODE)
    assert {n for n, r in results.items() if r != SKIPPED} == {"plan", "publish"}
    assert set(results.values()) == {SUCCESS, SKIPPED}, logs(hub)


@pytest.mark.parametrize(
    "fault",
    [
        "cut off",
        pytest.param("missing", marks=needs_time),
        pytest.param("note cut off", marks=needs_time),
    ],
)
def test_an_artifact_that_is_damaged(fault: str, hosting: Hosting, whole: Hub) -> None:
    """It is named, and what is published is whole; the next run builds what is missing."""
    source = hosting.copy_source(f"artifact-{fault}", CHAIN)
    hub = hosting.hub(f"artifact-{fault}-hub", source)
    run = Run(hub, "channel.yml")
    hub.stops = {"pytorch-1 / build": ("pytorch-compile", "kill")}
    assert run.start("push", CODE)["pytorch-1"] == FAILURE, run.log
    artifact = run.artifacts / "built-aotriton-1"
    pattern = "forge/*.json" if "note" in fault else "*/*.conda"
    (file,) = artifact.glob(pattern)
    if fault == "missing":
        shutil.rmtree(artifact)
    else:
        file.write_bytes(file.read_bytes()[:-30])
    hub.stops = {}
    results = run.rerun_failed()
    published = hosted.read_published(hub)
    assert published.items() <= hosted.read_published(whole).items()
    reason = {
        "cut off": rf"{file.name} is damaged, perhaps cut off: delete it and build it again",
        "missing": "needs aotriton, and --only builds only the named packages",
        "note cut off": rf"{file.name[:-5]}\S* has no note of passed tests for these bytes",
    }[fault]
    assert re.search(reason, logs(hub)), logs(hub)
    assert FAILURE in results.values(), run.log
    results = Run(hub, "channel.yml").start("push", CODE)
    assert results["publish"] == SUCCESS and FAILURE not in results.values()
    files = hosted.read_published(hub)
    assert names(files) == {*CHAIN} and files.items() <= hosted.read_published(whole).items()
    hosted.take_executed(hub)


@needs_time
def test_a_release_whose_machines_are_lost(hosting: Hosting, whole: Hub) -> None:
    """While it fetches, validates, hands on what it validated, and uploads."""
    hub = hosted.switch_release_on(hosting.hub("release-lost", after=whole))
    run = Run(hub, "release.yml")
    losses = {"artifact": "fetch", "validation": "gpu", "promotion": "publish"}
    for number, (point, job) in enumerate(losses.items()):
        hub.stops = {job: (point, "kill")}
        results = run.rerun_failed() if number else run.start()
        assert results[job] == FAILURE and f"{job}: lost at {point}" in run.log
    whole_files = {n.partition("/")[2]: d for n, d in hosted.read_published(whole).items()}
    promoted = hosted.read_promoted(hub)
    assert len(promoted) == 1 and promoted.items() < whole_files.items()
    assert set(run.rerun_failed().values()) == {SUCCESS}
    assert hosted.read_promoted(hub) == whole_files


def test_the_workflow_on_the_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/rehearsal channel`, here with small recipes: what it publishes is installed."""
    monkeypatch.setattr(workflow, "DISK", hosted.DISK)
    own = checkout.Place.make(tmp_path / "rehearsal")
    hosted.write_repository(own.root)
    shutil.copytree(CHECKOUT / "src", own.root / "src")  # with its package `channel`
    (own.root / "build/sources").mkdir(parents=True)
    hosted.make_conda_forge(own.conda_forge)
    assert workflow.run_channel(own, ["rocm-sdk", "aotriton"]) == 0
    hub = own.folder / "workflow/hub"
    installed = hub / "user/build/stacks/mine/.pixi/envs/default/share"
    assert {path.name for path in installed.iterdir()} == {"rocm-sdk", "aotriton"}
    recipe = own.root / "recipes/aotriton/build.sh"
    recipe.write_text("exit 1\n")
    assert workflow.run_channel(own, ["rocm-sdk", "aotriton"]) == 1
