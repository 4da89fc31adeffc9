# SPDX-License-Identifier: BSD-3-Clause
"""The small runner of workflows does as GitHub does, and refuses what it does not know."""

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
    """Without a function of the status, success() is required as well."""
    assert holds(condition, CONTEXTS, status) is result


STEP = "steps: [{run: 'echo ran >>../../ran'}]"
HEAD = "on: {push: {branches: [main], paths-ignore: ['docs/**']}, workflow_dispatch: }\njobs:\n"


class Repository:
    """A repository with one workflow, and the hub that it is on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hub = Hub(folder / "hub", folder / "source", folder / "machines")
        (folder / "source/.github/workflows").mkdir(parents=True)

    def write(self, jobs: str, name: str = "x.yml", head: str = HEAD) -> None:
        """Write a workflow of these jobs."""
        lines = "".join(f"  {line}\n" for line in jobs.splitlines())
        (self.folder / "source/.github/workflows" / name).write_text(head + lines)

    def run(self, jobs: str) -> Run:
        """Run a workflow of these jobs, each line of which is one."""
        self.write(jobs)
        run = Run(self.hub, "x.yml")
        run.start()
        return run

    @property
    def ran(self) -> int:
        """How many steps have said that they ran."""
        file = self.hub.machines / "ran"
        return len(file.read_text().split()) if file.exists() else 0


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def read_results(run: Run) -> dict[str, str]:
    return {name: outcome.result for name, outcome in run.outcomes.items()}


BASE = "runs-on: x, timeout-minutes: 1"


def test_what_a_job_needs(repository: Repository) -> None:
    """A failure or a skip passes on along the whole chain, unless a condition asks for more."""
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
    assert repository.ran == 2


def test_outputs_make_a_matrix(repository: Repository) -> None:
    steps = "steps: [{id: s, run: 'echo names=[1, 2, 3] >>$GITHUB_OUTPUT'}]"
    matrix = "{n: '${{ fromJSON(needs.a.outputs.names) }}'}"
    step = "steps: [{env: {N: '${{ matrix.n }}'}, run: 'echo ran >>../../ran; test $N != 2'}]"
    jobs = (
        f"a: {{{BASE}, outputs: {{names: '${{{{ steps.s.outputs.names }}}}'}}, {steps}}}\n"
        f"b: {{{BASE}, needs: a, strategy: {{fail-fast: false, matrix: {matrix}}}, {step}}}\n"
    )
    assert read_results(repository.run(jobs)) == {"a": SUCCESS, "b": FAILURE}
    assert repository.ran == 3, "the others run although one fails"
    repository.run(jobs.replace("fail-fast: false, ", ""))
    assert repository.ran == 5


def test_steps_after_a_failure(repository: Repository) -> None:
    run = repository.run(
        f"a: {{{BASE}, steps: [{{id: s, run: 'false'}}, {{run: echo ran >>../../ran}}, "
        "{if: \"${{ always() && steps.s.outcome == 'failure' }}\", run: 'echo ran >>../../ran'}]}\n"
    )
    assert read_results(run) == {"a": FAILURE} and repository.ran == 1


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
    """With all that it has started, and no step of it runs any more."""
    repository.hub.seconds = 0.2
    run = repository.run(
        f"a: {{{BASE}, steps: [{{run: 'env -i setsid sleep 600 & sleep 600'}}, "
        "{if: always(), run: 'echo ran >>../../ran'}]}"
    )
    assert read_results(run) == {"a": CANCELLED} and repository.ran == 0
    assert processes_in(repository.hub.machines) == []


def test_a_disk_is_as_large_as_it_is(repository: Repository) -> None:
    """Where it may be mounted a write fails; elsewhere the step does."""
    repository.hub.disk, repository.hub.image = 24 << 20, 14 << 20
    fill = "{run: 'head -c 12000000 /dev/zero >file'}"
    free = "{run: sudo rm -rf /usr/local/lib/android}"
    run = repository.run(f"a: {{{BASE}, steps: [{fill}]}}\nb: {{{BASE}, steps: [{free}, {fill}]}}")
    assert read_results(run) == {"a": FAILURE, "b": SUCCESS}, run.log


def test_the_quota_where_nothing_is_mounted(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    test_a_disk_is_as_large_as_it_is(repository)


def test_a_disk_gives_back_what_is_removed(tmp_path: Path) -> None:
    """The file that it is does not keep the size of all that was ever written."""
    with Machine(tmp_path / "machine", tmp_path / "hold", 64 << 20) as machine:
        if not machine.is_mounted:
            pytest.skip("nothing can be mounted here")
        file, disk = machine.work / "file", machine.folder.with_suffix(".disk")
        file.write_bytes(os.urandom(32 << 20))
        subprocess.run(["sync", "-f", machine.work], check=True)
        full = disk.stat().st_blocks * 512
        file.unlink()
        subprocess.run(["sync", "-f", machine.work], check=True)
        end = time.monotonic() + 60  # the kernel does it a moment later
        while disk.stat().st_blocks * 512 > full - (24 << 20) and time.monotonic() < end:
            time.sleep(0.05)
        assert disk.stat().st_blocks * 512 <= full - (24 << 20)


def save(key: str, size: int) -> str:
    make = f"{{run: 'mkdir -p build && head -c {size} /dev/zero >build/file'}}"
    action = f"{{uses: actions/cache/save@x, with: {{path: build, key: {key}}}}}"
    return f"{BASE}, steps: [{make}, {action}]"


def test_caches_are_limited(repository: Repository) -> None:
    """The newest entry of a prefix is restored; the one that rests longest makes room."""
    repository.hub.cache_limit = 1000
    action = "{uses: actions/cache/restore@x, with: {path: build, key: new, restore-keys: p/}}"
    restore = f"{BASE}, steps: [{action}, {{run: 'test $(stat -c %s build/file) = 400'}}]"
    run = repository.run(
        f"a: {{{save('p/1', 300)}}}\nb: {{needs: a, {save('p/2', 400)}}}\n"
        f"c: {{needs: b, {restore}}}\nd: {{needs: c, {save('q/1', 500)}}}\n"
        f"e: {{needs: d, {restore}}}"
    )
    assert set(read_results(run).values()) == {SUCCESS}, run.log
    assert [cache.key for cache in repository.hub.caches] == ["p/2", "q/1"]


def test_artifacts(repository: Repository) -> None:
    """A name is taken once, hidden files stay, and what is missing fails by its name alone."""
    make = "{run: mkdir -p d/e && touch d/e/f d/.lock}"
    put = "{uses: actions/upload-artifact@x, with: {name: one, path: d}}"
    get = "uses: actions/download-artifact@x, with: {path: z, merge-multiple: true"
    check = "{run: 'test -e z/e/f && test ! -e z/.lock'}"
    run = repository.run(
        f"a: {{{BASE}, steps: [{make}, {put}]}}\n"
        f"b: {{needs: a, {BASE}, steps: [{{{get}, pattern: o*}}}}, {check}]}}\n"
        f"c: {{needs: b, {BASE}, steps: [{{{get}, pattern: two-*}}}}, {{run: test ! -e z}}]}}\n"
        f"d: {{needs: c, {BASE}, steps: [{{{get}, name: two}}}}]}}\n"
        f"e: {{needs: c, {BASE}, steps: [{make}, {put}]}}\n"
    )
    assert read_results(run) == {
        "a": SUCCESS,
        "b": SUCCESS,
        "c": SUCCESS,
        "d": FAILURE,
        "e": FAILURE,
    }


def test_what_failed_runs_again(repository: Repository) -> None:
    """With what needs it, and not what has succeeded; artifacts of before are there."""
    flaky = "steps: [{run: 'echo ran >>../../ran; test $(wc -l <../../ran) -gt 2'}]"
    run = repository.run(
        f"a: {{{BASE}, {STEP}}}\nb: {{needs: a, {BASE}, {flaky}}}\nc: {{needs: b, {BASE}, {STEP}}}"
    )
    assert read_results(run) == {"a": SUCCESS, "b": FAILURE, "c": SKIPPED}
    assert set(run.rerun_failed().values()) == {SUCCESS}
    assert repository.ran == 4 and run.attempt == 2


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
