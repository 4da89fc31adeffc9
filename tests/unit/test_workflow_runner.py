# SPDX-License-Identifier: BSD-3-Clause
"""The tests' runner of workflows works as GitHub does, and refuses features that it lacks."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support.expressions import Unsupported, fill, holds
from support.hub import Hub
from support.machine import Machine
from support.project import processes_in
from support.workflow_runner import CANCELLED, FAILURE, SKIPPED, SUCCESS, Run

CONTEXTS = {
    "vars": {"NAME": "Untested", "EMPTY": ""},
    "needs": {"plan": {"result": "success", "outputs": {"names": '["a", "b"]'}}},
    "inputs": {"go-on": 75, "flag": True},
}
RUNNING = {"always": True, "cancelled": False, "failure": False, "success": True}
FAILED = RUNNING | {"failure": True, "success": False}
VALUES: dict[str, Any] = {
    "'it''s'": "it's",
    "vars.NAME == 'untested'": True,
    "vars.NONE == ''": True,
    "vars.NONE.deeper != ''": False,
    "contains(vars.NAME, 'TEST')": True,
    "contains(vars.NONE, 'untested')": False,
    "contains(fromJSON(needs.plan.outputs.names), 'b')": True,
    "fromJSON(needs.plan.outputs.names)": ["a", "b"],
    "vars.EMPTY || 'ubuntu'": "ubuntu",
    "vars.NAME && inputs.go-on": 75,
    "!(vars.EMPTY || vars.NONE) && true": True,
    "inputs.go-on == 75 && inputs.flag": True,
    "null": None,
}
UNKNOWN = (
    "secrets.TOKEN",
    "hashFiles('x')",
    "vars.NAME > 3",
    "vars['NAME']",
    "vars.*",
    "always()",
    "'open",
    "vars.",
    "(true",
    "contains('a'",
    "true false",
    "",
)


@pytest.mark.parametrize("text", VALUES)
def test_expression(text: str) -> None:
    assert fill("${{ " + text + " }}", CONTEXTS) == VALUES[text]


@pytest.mark.parametrize("text", UNKNOWN)
def test_what_is_unknown_is_refused(text: str) -> None:
    with pytest.raises(Unsupported):
        fill("${{ " + text + " }}", CONTEXTS)


def test_text_with_expressions() -> None:
    text = "${{ vars.NAME }}/${{ inputs.go-on }}-${{ inputs.flag }}${{ vars.NONE }}"
    assert fill(text, CONTEXTS) == "Untested/75-true"
    with pytest.raises(Unsupported, match="a list"):
        fill("x ${{ fromJSON(needs.plan.outputs.names) }}", CONTEXTS)


@pytest.mark.parametrize(
    ("condition", "status", "result"),
    [
        ("vars.NAME != ''", RUNNING, True),
        ("vars.NAME != ''", FAILED, False),
        ("${{ !failure() && vars.NAME != '' }}", RUNNING, True),
        ("${{ !failure() && vars.NAME != '' }}", FAILED, False),
        ("${{ always() }}", FAILED, True),
        ("failure()", FAILED, True),
        ("vars.EMPTY", RUNNING, False),
    ],
)
def test_condition(condition: str, status: dict[str, bool], result: bool) -> None:
    """An `if` without a status function requires success() too."""
    assert holds(condition, CONTEXTS, status) is result


STEP = "steps: [{run: 'echo ran >>../../ran'}]"
HEAD = "on: {push: {branches: [main], paths-ignore: ['docs/**']}, workflow_dispatch: }\njobs:\n"


class Repository:
    """A repository with one workflow, on a mock of GitHub."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hub = Hub(folder / "hub", folder / "source", folder / "machines")
        (folder / "source/.github/workflows").mkdir(parents=True)

    def write(self, jobs: str, name: str = "x.yml", head: str = HEAD) -> None:
        """Write a workflow with these jobs."""
        lines = "".join(f"  {line}\n" for line in jobs.splitlines())
        (self.folder / "source/.github/workflows" / name).write_text(head + lines)

    def run(self, jobs: str) -> Run:
        """Run a workflow with these jobs, one per line, and return the run."""
        self.write(jobs)
        run = Run(self.hub, "x.yml")
        run.start()
        return run

    @property
    def step_count(self) -> int:
        """Return the number of executed steps: each appends a word to the file `ran`."""
        file = self.hub.machines / "ran"
        return len(file.read_text().split()) if file.exists() else 0


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def read_results(run: Run) -> dict[str, str]:
    return {name: outcome.result for name, outcome in run.outcomes.items()}


BASE = "runs-on: x, timeout-minutes: 1"


def test_what_a_job_needs(repository: Repository) -> None:
    """After a failed or a skipped job, all jobs that depend on it are skipped.

    A dependent job that has a condition of its own may run nevertheless.
    """
    run = repository.run(
        f"a: {{{BASE}, steps: [{{run: exit 3}}]}}\n"
        f"b: {{{BASE}, needs: a, {STEP}}}\n"
        f"c: {{{BASE}, needs: b, if: '!cancelled()', {STEP}}}\n"
        f"d: {{{BASE}, needs: c, {STEP}}}\n"
        f"e: {{{BASE}, needs: c, if: '!failure()', {STEP}}}\n"
        f"f: {{{BASE}, {STEP}}}\n"
    )
    assert read_results(run) == {
        "a": FAILURE,
        "b": SKIPPED,
        "c": SUCCESS,
        "d": SKIPPED,
        "e": SKIPPED,
        "f": SUCCESS,
    }
    assert repository.step_count == 2


def test_outputs_make_a_matrix(repository: Repository) -> None:
    steps = "steps: [{id: s, run: 'echo names=[1, 2, 3] >>$GITHUB_OUTPUT'}]"
    matrix = "{n: '${{ fromJSON(needs.a.outputs.names) }}'}"
    step = "steps: [{env: {N: '${{ matrix.n }}'}, run: 'echo ran >>../../ran; test $N != 2'}]"
    jobs = (
        f"a: {{{BASE}, outputs: {{names: '${{{{ steps.s.outputs.names }}}}'}}, {steps}}}\n"
        f"b: {{{BASE}, needs: a, strategy: {{fail-fast: false, matrix: {matrix}}}, {step}}}\n"
    )
    assert read_results(repository.run(jobs)) == {"a": SUCCESS, "b": FAILURE}
    assert repository.step_count == 3, "the other jobs must run although one fails"
    repository.run(jobs.replace("fail-fast: false, ", ""))
    assert repository.step_count == 5


def test_steps_after_a_failure(repository: Repository) -> None:
    run = repository.run(
        f"a: {{{BASE}, steps: [{{id: s, run: 'false'}}, {{run: echo ran >>../../ran}}, "
        "{if: \"${{ always() && steps.s.outcome == 'failure' }}\", run: 'echo ran >>../../ran'}]}\n"
    )
    assert read_results(run) == {"a": FAILURE} and repository.step_count == 1


def test_a_workflow_that_is_called(repository: Repository) -> None:
    inputs = "{n: {type: number, default: 4}, m: {required: true}}"
    head = f"on: {{workflow_call: {{inputs: {inputs}}}}}\njobs:\n"
    step = "steps: [{env: {N: '${{ inputs.n }}${{ inputs.m }}'}, run: 'test $N = 41'}]"
    repository.write(f"a: {{{BASE}, {step}}}", "y.yml", head)
    uses = "uses: ./.github/workflows/y.yml, with: "
    assert read_results(repository.run(f"b: {{{uses} {{m: 1}}}}")) == {"b": SUCCESS}
    assert read_results(repository.run(f"b: {{{uses} {{m: 2}}}}")) == {"b": FAILURE}
    for inputs in ("{}", "{m: 1, other: 2}"):
        with pytest.raises(Unsupported, match=r"input m is missing|inputs: other"):
            repository.run(f"b: {{{uses} {inputs}}}")


def test_a_job_out_of_time_is_killed(repository: Repository) -> None:
    """All processes of the job are killed, and no further step of it runs."""
    repository.hub.seconds = 0.2
    run = repository.run(
        f"a: {{{BASE}, steps: [{{run: 'env -i setsid sleep 600 & sleep 600'}}, "
        "{if: always(), run: 'echo ran >>../../ran'}]}"
    )
    assert read_results(run) == {"a": CANCELLED} and repository.step_count == 0
    assert processes_in(repository.hub.machines) == []


def test_a_disk_is_as_large_as_it_is(repository: Repository) -> None:
    """A step fails if the files of the job are larger than the disk.

    On a mounted disk, the write itself fails.
    """
    repository.hub.disk, repository.hub.image = 24 << 20, 14 << 20
    write = "{run: 'head -c 12000000 /dev/zero >file'}"
    free = "{run: sudo rm -rf /usr/local/lib/android}"
    jobs = f"a: {{{BASE}, steps: [{write}]}}\nb: {{{BASE}, steps: [{free}, {write}]}}"
    run = repository.run(jobs)
    assert read_results(run) == {"a": FAILURE, "b": SUCCESS}, run.log


def test_the_quota_where_nothing_is_mounted(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    test_a_disk_is_as_large_as_it_is(repository)


def test_a_disk_gives_back_what_is_removed(tmp_path: Path) -> None:
    """Removing a file on a mounted disk frees its space in the disk's own file."""
    with Machine(tmp_path / "machine", tmp_path / "hold", 64 << 20) as machine:
        if not machine.is_mounted:
            pytest.skip("this process may not mount a disk")
        file = machine.work / "file"
        disk = machine.folder.with_suffix(".disk")
        file.write_bytes(os.urandom(32 << 20))
        subprocess.run(["sync", "-f", machine.work], check=True)
        full = disk.stat().st_blocks * 512
        file.unlink()
        subprocess.run(["sync", "-f", machine.work], check=True)
        end = time.monotonic() + 60  # The kernel frees the space a moment later.
        while disk.stat().st_blocks * 512 > full - (24 << 20) and time.monotonic() < end:
            time.sleep(0.05)
        assert disk.stat().st_blocks * 512 <= full - (24 << 20)


def make_saving_job(key: str, size: int) -> str:
    """Return the YAML of a job that saves a file of this size in the cache, under this key."""
    make = f"{{run: 'mkdir -p build && head -c {size} /dev/zero >build/file'}}"
    action = f"{{uses: actions/cache/save@x, with: {{path: build, key: {key}}}}}"
    return f"{BASE}, steps: [{make}, {action}]"


def test_caches_are_limited(repository: Repository) -> None:
    """The newest entry whose key has the prefix is restored.

    If all caches together are too large, the least recently used entry is removed.
    """
    repository.hub.cache_limit = 1000
    action = "{uses: actions/cache/restore@x, with: {path: build, key: new, restore-keys: p/}}"
    restore = f"{BASE}, steps: [{action}, {{run: 'test $(stat -c %s build/file) = 400'}}]"
    run = repository.run(
        f"a: {{{make_saving_job('p/1', 300)}}}\nb: {{needs: a, {make_saving_job('p/2', 400)}}}\n"
        f"c: {{needs: b, {restore}}}\nd: {{needs: c, {make_saving_job('q/1', 500)}}}\n"
        f"e: {{needs: d, {restore}}}"
    )
    assert set(read_results(run).values()) == {SUCCESS}, run.log
    assert [cache.key for cache in repository.hub.caches] == ["p/2", "q/1"]


def test_artifacts(repository: Repository) -> None:
    """A second artifact of the same name is refused, and hidden files are left out.

    A missing artifact is an error if it is named, but not if only a pattern is given.
    """
    make = "{run: mkdir -p d/e && touch d/e/f d/.lock}"
    upload = "{uses: actions/upload-artifact@x, with: {name: one, path: d}}"
    fetch = "uses: actions/download-artifact@x, with: {path: z, merge-multiple: true"
    check = "{run: 'test -e z/e/f && test ! -e z/.lock'}"
    run = repository.run(
        f"a: {{{BASE}, steps: [{make}, {upload}]}}\n"
        f"b: {{needs: a, {BASE}, steps: [{{{fetch}, pattern: o*}}}}, {check}]}}\n"
        f"c: {{needs: b, {BASE}, steps: [{{{fetch}, pattern: two-*}}}}, {{run: test ! -e z}}]}}\n"
        f"d: {{needs: c, {BASE}, steps: [{{{fetch}, name: two}}}}]}}\n"
        f"e: {{needs: c, {BASE}, steps: [{make}, {upload}]}}\n"
    )
    assert read_results(run) == {
        "a": SUCCESS,
        "b": SUCCESS,
        "c": SUCCESS,
        "d": FAILURE,
        "e": FAILURE,
    }


def test_what_failed_runs_again(repository: Repository) -> None:
    """A failed job and the jobs that need it run again. Jobs that have succeeded do not."""
    flaky = "steps: [{run: 'echo ran >>../../ran; test $(wc -l <../../ran) -gt 2'}]"
    run = repository.run(
        f"a: {{{BASE}, {STEP}}}\nb: {{needs: a, {BASE}, {flaky}}}\nc: {{needs: b, {BASE}, {STEP}}}"
    )
    assert read_results(run) == {"a": SUCCESS, "b": FAILURE, "c": SKIPPED}
    assert set(run.rerun_failed().values()) == {SUCCESS}
    assert repository.step_count == 4 and run.attempt == 2


def test_events(repository: Repository) -> None:
    repository.write(f"a: {{{BASE}, {STEP}}}")
    run = Run(repository.hub, "x.yml")
    assert run.start("push", ("docs/a.md", "docs/b/c.md")) == {}
    assert run.start("push", ("docs/a.md", "src/x.py")) == {"a": SUCCESS}
    with pytest.raises(Unsupported, match="the event pull_request"):
        run.start("pull_request")


REFUSED_STEPS = {
    "a step's key": "run: 'true', continue-on-error: true",
    "an action": "uses: actions/setup-node@x",
    "an input of an action": "uses: actions/setup-python@x, with: {cache: pip}",
    "credentials that stay": "uses: actions/checkout@x",
    "an expression in a script": "run: 'echo ${{ github.ref }}'",
    "artifacts of any name": "uses: actions/download-artifact@x, with: {merge-multiple: true}",
    "several paths": "uses: actions/upload-artifact@x, with: {name: a, path: '*.x'}",
}
REFUSED = {name: f"a: {{{BASE}, steps: [{{{step}}}]}}" for name, step in REFUSED_STEPS.items()} | {
    "a job's key": f"a: {{{BASE}, services: {{}}, {STEP}}}",
    "included values": f"a: {{{BASE}, strategy: {{matrix: {{include: [{{n: 1}}]}}}}, {STEP}}}",
    "jobs in a circle": f"a: {{needs: b, {BASE}, {STEP}}}\nb: {{needs: a, {BASE}, {STEP}}}",
    "a workflow elsewhere": "a: {uses: o/r/.github/workflows/y.yml@main}",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_workflow_must_not_use(case: str, repository: Repository) -> None:
    with pytest.raises(Unsupported):
        repository.run(REFUSED[case])
