# SPDX-License-Identifier: BSD-3-Clause
"""channel.yml and release.yml with bad input, and with machines that are lost during transfers."""

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

# The recipes of the jobs sdk, aotriton and pytorch.
CHAIN = ("rocm-sdk", "aotriton", "pytorch")


def list_names(files: dict[str, str]) -> set[str]:
    """Return the names of packages, given their files SUBDIR/FILE."""
    return {file.partition("/")[2].partition("-1.0-")[0] for file in files}


def read_logs(hub: Hub) -> str:
    return "".join(log.read_text() for log in (hub.folder / "logs").iterdir())


@needs_time
def test_lost_in_each_part_of_the_chain(hosting: Hosting, published_hub: Hub) -> None:
    """Jobs that lose machines or run out of time publish the same files as jobs without faults.

    Machines are lost in the job `plan`, during a build, and while a job passes its cache or its
    packages to the next job.
    """
    hub = hosting.hub("chain-hub", hosting.copy_source("chain", CHAIN))
    run = Run(hub, "channel.yml")
    # For each attempt, the points at which machines stop, by job. The result of the last job is
    # checked.
    stops_by_attempt = [
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
    for attempt, stops in enumerate(stops_by_attempt):
        hub.stops = dict(stops)
        results = run.rerun_failed() if attempt else run.start("push", CODE)
        label, (point, kind) = list(stops.items())[-1]
        job = label.split()[0]
        if kind == "late":
            assert results[job] == CANCELLED, run.log
            assert f"{label}: out of time at {point}" in run.log
        else:
            assert results[job] == FAILURE, run.log
            assert f"{label}: lost at {point}" in run.log
        assert not hub.stops, "each machine must reach the point at which it is to stop"
    results = run.rerun_failed()
    assert results["publish"] == SUCCESS, run.log
    require_chain(hub, published_hub)
    stages = hosted.take_executed(hub)
    assert stages.count("pytorch-prepare") == 1, "a job whose time is up must pass on its cache"
    assert stages.count("pytorch-install") == 2, "work must be repeated if its cache was lost"


def require_chain(hub: Hub, published_hub: Hub) -> None:
    """Require that `hub` has published the recipes of CHAIN, with the files of `published_hub`."""
    files = hosted.read_published(hub)
    assert list_names(files) == {*CHAIN}
    assert files.items() <= hosted.read_published(published_hub).items()


def test_caches_that_are_too_large(hosting: Hosting, published_hub: Hub) -> None:
    """GitHub does not keep a cache that is too large. Without it, the next job compiles again."""
    hub = hosting.hub("large-hub", hosting.copy_source("large", CHAIN))
    hub.cache_limit = 10
    hub.stops = {"pytorch-1 / build": ("pytorch-install", "time")}
    run = Run(hub, "channel.yml")
    results = run.start("push", CODE)
    assert results.pop("publish") == SUCCESS and FAILURE not in results.values(), run.log
    assert any("cache not saved" in line for line in run.log) and hub.caches == []
    require_chain(hub, published_hub)
    assert hosted.take_executed(hub).count("pytorch-compile") == 2


def test_a_failure_beside_the_sdk(hosting: Hosting) -> None:
    """A failure of another recipe in the SDK's job does not stop the jobs that need the SDK."""
    source = hosting.copy_source("beside", CHAIN)
    hosted.write_recipe(source, "triton", [])
    (source / "recipes/triton/build.sh").write_text("exit 1\n")
    hub = hosting.hub("beside-hub", source)
    run = Run(hub, "channel.yml")
    results = run.start("push", CODE)
    assert results["sdk"] == FAILURE and results["publish"] == SUCCESS, run.log
    assert list_names(hosted.read_published(hub)) == {*CHAIN}
    hosted.take_executed(hub)


def test_an_sdk_that_fails(hosting: Hosting) -> None:
    """If the SDK fails, the next job ends at once with the reason, and nothing is published."""
    source = hosting.copy_source("no-sdk", CHAIN)
    (source / "recipes/rocm-sdk/build.sh").write_text("exit 1\n")
    hub = hosting.hub("no-sdk-hub", source)
    results = Run(hub, "channel.yml").start("push", CODE)
    expected = {"sdk": FAILURE, "aotriton": FAILURE, "pytorch-1": SKIPPED, "publish": SUCCESS}
    assert results.items() >= expected.items()
    assert "needs rocm-sdk, and --only builds only the named packages" in read_logs(hub)
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
    """A channel's bad name is refused before any build starts.

    The condition in the workflow does not suffice, because GitHub's function `contains` ignores
    case and searches in the whole name.
    """
    hub = hosting.hub(f"name-{BAD_NAMES.index(name)}")
    hub.variables = {"CHANNEL_UNTESTED": name}
    results = Run(hub, "channel.yml").start("push", CODE)
    assert results.pop("plan") == FAILURE and set(results.values()) == {SKIPPED}
    assert "CHANNEL_UNTESTED has to contain 'untested', in lower case" in read_logs(hub)
    assert list(hub.releases.iterdir()) == [] and hosted.take_executed(hub) == []


@pytest.mark.parametrize("part", ["noarch", "forge"])
def test_a_file_that_never_arrived(part: str, hosting: Hosting, published_hub: Hub) -> None:
    """The workflow ignores the file of an interrupted upload.

    GitHub lists such a file, but nobody can download it.
    """
    hub = hosting.hub(f"half-{part}", after=published_hub)
    name = {"noarch": "vllm-1.0-h0000000_9.conda", "forge": "vllm-1.0-h0000000_9.json"}[part]
    (hub.releases / hosted.NAME / part / f"{name}.started").touch()
    results = Run(hub, "channel.yml").start("push", CODE)
    successful = {job for job, result in results.items() if result == SUCCESS}
    assert successful == {"plan", "publish"}, read_logs(hub)
    assert set(results.values()) == {SUCCESS, SKIPPED}, read_logs(hub)


@pytest.mark.parametrize(
    "fault",
    [
        "cut off",
        pytest.param("missing", marks=needs_time),
        pytest.param("note cut off", marks=needs_time),
    ],
)
def test_an_artifact_that_is_damaged(fault: str, hosting: Hosting, published_hub: Hub) -> None:
    """The log names the package that is damaged or missing, and only good packages are published.

    The next run builds the missing packages.
    """
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
    files = hosted.read_published(hub)
    assert files.items() <= hosted.read_published(published_hub).items()
    reason = {
        "cut off": rf"{file.name} is damaged, perhaps cut off: delete it and build it again",
        "missing": "needs aotriton, and --only builds only the named packages",
        "note cut off": rf"{file.name[:-5]}\S* has no note of passed tests for these bytes",
    }[fault]
    assert re.search(reason, read_logs(hub)), read_logs(hub)
    assert FAILURE in results.values(), run.log
    results = Run(hub, "channel.yml").start("push", CODE)
    assert results["publish"] == SUCCESS and FAILURE not in results.values()
    require_chain(hub, published_hub)
    hosted.take_executed(hub)


@needs_time
def test_a_release_whose_machines_are_lost(hosting: Hosting, published_hub: Hub) -> None:
    """A release promotes all packages although each job loses its machine once.

    The machines are lost while the jobs pass the fetched files on, validate them, and upload them.
    """
    hub = hosted.switch_release_on(hosting.hub("release-lost", after=published_hub))
    run = Run(hub, "release.yml")
    jobs_by_point = {"artifact": "fetch", "validation": "gpu", "promotion": "publish"}
    for attempt, (point, job) in enumerate(jobs_by_point.items()):
        hub.stops = {job: (point, "kill")}
        results = run.rerun_failed() if attempt else run.start()
        assert results[job] == FAILURE and f"{job}: lost at {point}" in run.log
    digests = {}
    for name, digest in hosted.read_published(published_hub).items():
        digests[name.partition("/")[2]] = digest
    promoted = hosted.read_promoted(hub)
    assert len(promoted) == 1 and promoted.items() < digests.items()
    assert set(run.rerun_failed().values()) == {SUCCESS}
    assert hosted.read_promoted(hub) == digests


def test_the_workflow_on_the_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/rehearsal channel` runs the workflow, and installs the published packages.

    The recipes of this test are small.
    """
    monkeypatch.setattr(workflow, "DISK", hosted.DISK)
    place = checkout.Place.make(tmp_path / "rehearsal")
    hosted.write_repository(place.root)
    shutil.copytree(CHECKOUT / "src", place.root / "src")
    (place.root / "build/sources").mkdir(parents=True)
    hosted.make_conda_forge(place.conda_forge)
    assert workflow.run_channel(place, ["rocm-sdk", "aotriton"]) == 0
    hub = place.folder / "workflow/hub"
    installed = hub / "user/build/stacks/mine/.pixi/envs/default/share"
    assert {path.name for path in installed.iterdir()} == {"rocm-sdk", "aotriton"}
    script = place.root / "recipes/aotriton/build.sh"
    script.write_text("exit 1\n")
    assert workflow.run_channel(place, ["rocm-sdk", "aotriton"]) == 1
