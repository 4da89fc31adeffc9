# SPDX-License-Identifier: BSD-3-Clause
"""Before it fetches anything, a build states its costs and refuses a machine that is too small."""

import io
import re
import shutil
import threading
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console
from support.project import CHECKOUT, RECIPES, MiniProject
from typer.testing import CliRunner

from forge import bases
from forge.building import preflight
from forge.building.display import Display
from forge.building.runner import (
    BUILT,
    FAILED,
    FETCHED,
    NOT_ATTEMPTED,
    Builder,
    Result,
    format_time_left,
)
from forge.cli import building
from forge.cli.main import app
from forge.errors import ForgeError
from forge.hostbase.base import HostBaseMaker
from forge.project import Project
from forge.recipes.cost import Cost, parse_cost, read_costs
from forge.recipes.plan import RecipeSet, Step

ALPHA = {"download": 1.5, "disk": 20, "kept": 8, "memory": 2, "cpu_hours": 3}
BETA = {"download": 0.5, "disk": 13, "memory": 4, "cpu_hours": 1}
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def mini(tmp_path: Path) -> MiniProject:
    mini = MiniProject(tmp_path)
    mini.recipe("alpha", extra={"cost": ALPHA})
    mini.recipe("beta", extra={"cost": BETA})
    return mini


@pytest.fixture
def ran(mini: MiniProject, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the recipes that commands would build. The project is `mini`."""
    monkeypatch.setenv("FORGE_ROOT", str(mini.root))
    names: list[str] = []

    def run(
        self: Builder, recipes: object, steps: list, keep_going: bool, unsolvable: dict[str, str]
    ) -> list:
        results = []
        for step in steps:
            reason = unsolvable.get(step.recipe.name)
            if reason is None:
                names.append(step.recipe.name)
            else:
                results.append(Result(step, NOT_ATTEMPTED, reason))
        return results

    monkeypatch.setattr(Builder, "run", run)
    return names


def compute_costs(root: Path = CHECKOUT, **variants: list[str]) -> dict[str, Cost]:
    """Return the costs of all recipes on the conda-forge base, by name."""
    project = Project.at(root)
    base = bases.load(project, "conda-forge", variants)
    return read_costs(RecipeSet(project, base).recipes.values(), base)


def set_machine(monkeypatch: pytest.MonkeyPatch, disk: float, memory: float) -> None:
    """Replace the machine's free disk space and memory by these, in GiB."""
    usage = Usage(0, 0, int(disk * 2**30))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(preflight, "memory_gib", lambda: memory)


def run_forge(*words: str) -> tuple[str, str]:
    """Run a command on the conda-forge base.

    Returns:
        The output; and `EXIT_CODE: MESSAGE` if the command ends with an error, else "".
    """
    done = CliRunner().invoke(app, [*words, "--base", "conda-forge"])
    assert done.exception is None or isinstance(done.exception, ForgeError | SystemExit)
    if isinstance(done.exception, ForgeError):
        return done.output, f"{done.exception.exit_code}: {done.exception}"
    return done.output, ""


def test_plan_says_what_it_costs(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 40, 24)
    output, refusal = run_forge("plan")
    assert not refusal
    alpha = r"alpha: 1.5 GiB to download, 20 GiB of disk, 2 GiB of memory per job, 3 CPU"
    assert re.search(alpha, output)
    total = "in all: 2.0 GiB to download, 23.0 GiB of disk including the downloads (40 GiB free)"
    assert total in output
    assert "4.0 CPU hours; this machine has 24 GiB of memory" in output
    set_machine(monkeypatch, 22, 24)
    assert "a build would not start: it needs 23.0 GiB of disk" in run_forge("plan")[0]


COMMANDS = pytest.mark.parametrize(
    "command", [["build-all"], ["build", "alpha", "beta"], ["rebuild", "alpha", "beta"]]
)


@COMMANDS
@pytest.mark.parametrize(
    ("disk", "memory", "shortage"),
    [(22, 24, "23.0 GiB of disk in .*22.0 GiB are free"), (40, 3, "4 GiB of memory for one job")],
)
def test_a_machine_that_is_too_small(
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    disk: float,
    memory: float,
    shortage: str,
) -> None:
    set_machine(monkeypatch, disk, memory)
    output, refusal = run_forge(*command)
    assert re.search(shortage, refusal)
    assert "--even-so" in refusal
    assert "\n" not in refusal
    assert refusal.startswith("3: not started")
    assert ran == []
    assert "in all: 2.0 GiB to download" in output
    assert not run_forge(*command, "--even-so")[1]
    assert ran == ["alpha", "beta"]
    set_machine(monkeypatch, 40, 24)
    assert not run_forge(*command)[1]


@COMMANDS
@pytest.mark.parametrize("option", [[], ["--continue-on-failure"]])
def test_a_failure_ends_the_run_unless_asked(
    mini: MiniProject, monkeypatch: pytest.MonkeyPatch, command: list[str], option: list[str]
) -> None:
    """A failure ends the run, except with --continue-on-failure. --quiet does not hide it."""
    set_machine(monkeypatch, 40, 24)
    monkeypatch.setenv("FORGE_ROOT", str(mini.root))
    monkeypatch.setenv("MAX_JOBS", "1")
    monkeypatch.setattr(building, "find_unsolved", lambda *_: {})
    attempts: list[str] = []

    def build(_: Builder, step: Step, *_rest: object) -> None:
        attempts.append(step.recipe.name)
        raise ForgeError(f"{step.recipe.name} does not compile")

    monkeypatch.setattr(Builder, "_build", build)
    output, _ = run_forge("--quiet", *command, *option)
    assert attempts == ["alpha", "beta"][: 1 + len(option)]
    assert all(f": {name} does not compile" in output for name in attempts)


@pytest.fixture
def unsolved(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The recipes that conda-forge cannot satisfy, with the reasons: beta only."""
    reasons = {"beta": "conda-forge has no gamma"}
    monkeypatch.setattr(bases, "find_outage", lambda: "")
    monkeypatch.setattr(building, "find_unsolvable", lambda *_: reasons)
    return reasons


@pytest.mark.parametrize(
    ("command", "code"),
    [("build-all", 0), ("build-all --strict", 3), ("build alpha", 0), ("build alpha beta", 3)],
)
def test_what_does_not_solve_is_skipped_and_the_rest_built(
    ran: list[str],
    unsolved: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    code: int,
) -> None:
    set_machine(monkeypatch, 22, 24)
    done = CliRunner().invoke(app, [*command.split(), "--base", "conda-forge"])
    assert (done.exit_code, ran) == (code, ["alpha"]), done.output
    assert "in all: 1.5 GiB to download" in done.output, "the sum must leave out beta's costs"
    line = "not attempted: beta: conda-forge has no gamma"
    assert (line in done.output) == (command != "build alpha")


def test_nothing_is_done_for_what_does_not_solve(
    mini: MiniProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe that cannot be solved, and one that needs it, are neither fetched nor built.

    The table at the end has the reasons.
    """
    mini.recipe("gamma", run=["beta"])
    project = Project.at(mini.root)
    base = bases.load(project, "conda-forge")
    recipes = RecipeSet(project, base)
    output = io.StringIO()
    builder = Builder(project, base, Display(Console(file=output)), "conda:1")
    done: list[str] = []
    monkeypatch.setattr(builder, "_fetch", lambda step: done.append(f"fetch {step.recipe.name}"))
    monkeypatch.setattr(builder, "_build", lambda step, *_: done.append(step.recipe.name))
    steps = recipes.plan(builder.channel)
    results = builder.run(recipes, steps, False, {"beta": "conda-forge has no delta"})
    assert done == ["fetch alpha", "alpha"]
    rows = [(result.step.recipe.name, result.state, result.detail) for result in results]
    assert rows == [
        ("alpha", BUILT, ""),
        ("beta", NOT_ATTEMPTED, "conda-forge has no delta"),
        ("gamma", NOT_ATTEMPTED, "needs beta"),
    ]


def test_what_needs_a_failed_build_is_not_attempted(
    mini: MiniProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --continue-on-failure, a failure prevents only builds that need the failed package."""
    mini.recipe("gamma", run=["alpha"])
    project = Project.at(mini.root)
    base = bases.load(project, "conda-forge")
    recipes = RecipeSet(project, base)
    builder = Builder(project, base, Display(Console(file=io.StringIO())), "conda:1")

    def build(step: Step, *_: object) -> None:
        if step.recipe.name == "alpha":
            raise ForgeError("alpha does not compile")

    monkeypatch.setattr(builder, "_fetch", lambda step: None)
    monkeypatch.setattr(builder, "_build", build)
    results = builder.run(recipes, recipes.plan(builder.channel), True, {})
    rows = [(result.step.recipe.name, result.state, result.detail) for result in results]
    assert rows == [
        ("alpha", FAILED, ""),
        ("beta", BUILT, ""),
        ("gamma", NOT_ATTEMPTED, "needs alpha"),
    ]


def test_a_stopped_run_begins_no_further_build(
    mini: MiniProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build that has waited for its turn does not begin after Ctrl-C."""
    monkeypatch.setenv("MAX_JOBS", "1")
    project = Project.at(mini.root)
    base = bases.load(project, "conda-forge")
    recipes = RecipeSet(project, base)
    builder = Builder(project, base, Display(Console(file=io.StringIO())), "conda:1")
    begun: list[str] = []

    def build(step: Step, *_: object) -> None:
        begun.append(step.recipe.name)
        builder.stop.set()

    monkeypatch.setattr(builder, "_fetch", lambda step: None)
    monkeypatch.setattr(builder, "_build", build)
    with pytest.raises(KeyboardInterrupt):
        builder.run(recipes, recipes.plan(builder.channel), False, {})
    assert begun == ["alpha"]


def test_what_was_named_does_not_solve(
    ran: list[str], unsolved: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_machine(monkeypatch, 40, 24)
    _, refusal = run_forge("build", "beta")
    assert "3: not started: beta: conda-forge has no gamma." in refusal
    assert ran == []
    _, refusal = run_forge("build", "beta", "--even-so")
    assert not refusal
    assert ran == ["beta"]


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--strict"], 3)])
def test_a_plan_names_what_is_skipped(
    ran: list[str],
    unsolved: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    code: int,
) -> None:
    set_machine(monkeypatch, 22, 24)
    done = CliRunner().invoke(app, ["plan", "--base", "conda-forge", *options])
    assert done.exit_code == code
    assert re.search(r"1 build +alpha-1.0", done.output)
    assert re.search(r"2 skipped +beta-1.0-\S+: conda-forge has no gamma", done.output)
    assert "in all: 1.5 GiB to download" in done.output
    assert "would not start" not in done.output


@pytest.mark.parametrize(
    ("is_terminal", "line", "answer", "is_prompted", "is_built"),
    [
        (True, "build-all --base conda-forge", "n", True, False),
        (True, "build-all --base conda-forge", "y", True, True),
        (True, "build-all --base conda-forge --yes", "", False, True),
        (True, "build alpha beta --base conda-forge", "", False, True),
        (False, "build-all --base conda-forge", "", False, True),
        (True, "build-all --base host", "", False, True),
    ],
)
def test_build_all_asks_a_terminal_before_it_starts(
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
    is_terminal: bool,
    line: str,
    answer: str,
    is_prompted: bool,
    is_built: bool,
) -> None:
    """The question is asked on the conda-forge base only, and after the costs."""
    set_machine(monkeypatch, 40, 24)
    # Replace HostBaseMaker.make. Otherwise the command would make the host base if it is outdated.
    monkeypatch.setattr(HostBaseMaker, "make", lambda *_: None)
    stdin = SimpleNamespace(isatty=lambda: is_terminal)
    monkeypatch.setattr("forge.cli.building.sys", SimpleNamespace(stdin=stdin))
    done = CliRunner().invoke(app, line.split(), input=answer)
    assert ("Build all of this? [y/N]" in done.output) == is_prompted
    if is_prompted:
        assert done.output.index("in all: 2.0 GiB") < done.output.index("Build all")
    if is_built:
        assert ran == ["alpha", "beta"]
    else:
        assert ran == []
        assert isinstance(done.exception, ForgeError)
        assert done.exception.exit_code == 3
        assert "--yes" in str(done.exception)


def test_only_what_is_to_be_built_counts(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 22, 24)
    assert not run_forge("build", "alpha")[1]
    assert ran == ["alpha"]


def test_the_host_base_counts_until_it_is_made(
    mini: MiniProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_ROOT", str(mini.root))
    recipe = mini.root / "recipes/bases/host/recipe.yaml"
    text = recipe.read_text()
    cost = yaml.safe_load(text)["extra"]["cost"]
    recipe.write_text(text.replace(f"download: {cost['download']}, ", "download: 3, "))
    mini.recipe("beta", run=["nowhere"])
    (mini.root / "build" / "host-base").unlink()
    output = CliRunner().invoke(app, ["plan", "--base", "host"]).output
    assert "host base: would be made first" in output
    assert "host base: 3 GiB to download" in output
    assert "in all: 4.5 GiB to download" in output, (
        "the sum must leave out beta, which nothing can build"
    )
    monkeypatch.setenv("FORGE_NVIDIA_WHEELS", "1")
    output = CliRunner().invoke(app, ["plan", "--base", "host"]).output
    with_wheels = yaml.safe_load(text)["extra"]["cost_with_nvidia_wheels"]["download"]
    assert f"host base: {with_wheels} GiB to download" in output


def test_every_recipe_has_its_figures() -> None:
    costs_by_name = compute_costs()
    assert costs_by_name.keys() == {*RECIPES}
    for cost in costs_by_name.values():
        assert cost.kept <= cost.disk + cost.download
    assert compute_costs(aotriton_kernels=["sample"])["aotriton"].cpu_hours == 0.3


def test_each_further_python_costs(mini: MiniProject) -> None:
    further = {"further_python": {"disk": 5, "cpu_hours": 0.5}}
    mini.recipe("beta", extra={"cost": BETA | further})
    for pythons, disk, hours in ((["3.13"], 13, 1), (["3.12", "3.13"], 18, 1.5)):
        costs_by_name = compute_costs(mini.root, python=pythons)
        assert (costs_by_name["beta"].disk, costs_by_name["beta"].cpu_hours) == (disk, hours)
        assert costs_by_name["alpha"].disk == 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"disc": 1}, "extra.cost: disc is none of cpu_hours, disk"),
        ({"disk": "much"}, "extra.cost: could not convert string to float: 'much'"),
        ({"disk": None}, "extra.cost: float"),
        ({"further_python": {"kept_there": 1}}, "extra.cost: 'kept_there'"),
    ],
)
def test_a_malformed_cost_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ForgeError, match=re.escape(f"recipes/x/recipe.yaml: {message}")):
        parse_cost(BETA | change, "recipes/x/recipe.yaml")
    lacking = {key: value for key, value in BETA.items() if key != "memory"}
    with pytest.raises(ForgeError, match="'memory'"):
        parse_cost(lacking, "recipes/x/recipe.yaml")


def test_memory_is_within_a_third_of_what_was_measured() -> None:
    """The memory that a recipe states agrees with the largest process in the rehearsal's record.

    The two numbers are independent facts: the recipe has an estimate for the next build, and the
    record has a dated measurement. The measurement has a precision of 0.1 GiB.
    """
    costs_by_name = compute_costs()
    text = (CHECKOUT / "docs/evidence/2026-11-25-rehearsal.md").read_text()
    table = text.partition("## The largest process\n")[2].partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| ([\w-]+) \| ([\d.]+) \|", table)
    differing = {}
    for name, text in rows:
        measured = float(text)
        stated = costs_by_name[name].memory
        if abs(stated - measured) > max(measured / 3, 0.1):
            differing[name] = (stated, measured)
    assert len(rows) > 8
    assert not differing


def test_disk_is_the_largest_build_beside_what_is_kept(
    mini: MiniProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The required disk space is that of the largest build, and of what earlier builds keep.

    It is not the sum of all builds, because a build removes its folder before the next one begins.
    """
    set_machine(monkeypatch, 1000, 24)
    project = Project.at(mini.root)
    costs_by_name = compute_costs(mini.root)
    for names, disk in ((["alpha", "beta"], "23.0"), (["beta", "alpha"], "22.0")):
        lines, _ = preflight.preflight(project, {name: costs_by_name[name] for name in names})
        assert f"{disk} GiB of disk including the downloads" in lines[-1]


def test_two_builds_share_memory_and_disk(
    mini: MiniProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two builds may run at once if their disk space and memory fit.

    alpha and beta together need 33 GiB of disk, and 6 GiB of memory for each of two jobs. The costs
    of gamma are unknown.
    """
    monkeypatch.setenv("MAX_JOBS", "2")
    project = Project.at(mini.root)
    costs_by_name = compute_costs(mini.root)
    for letters, disk, memory, fits in (
        ("ab", 33, 12, True),
        ("ab", 32.9, 12, False),
        ("ab", 33, 11.9, False),
        ("ag", 20, 8, True),
        ("ag", 20, 7.9, False),
        ("g", 0, 4, True),
    ):
        set_machine(monkeypatch, disk=disk, memory=memory)
        by_letter = {
            "a": costs_by_name["alpha"],
            "b": costs_by_name["beta"],
            "g": preflight.UNKNOWN,
        }
        assert preflight.fits([by_letter[letter] for letter in letters], project) is fits


@pytest.mark.parametrize("memory", [12, 11.9])
def test_what_does_not_fit_beside_another_waits_for_it(
    mini: MiniProject, monkeypatch: pytest.MonkeyPatch, memory: float
) -> None:
    """A second build begins beside the first one only if the memory suffices.

    Here the build of alpha waits until beta begins, or for a second.
    """
    monkeypatch.setenv("MAX_JOBS", "2")
    set_machine(monkeypatch, disk=100, memory=memory)
    project = Project.at(mini.root)
    base = bases.load(project, "conda-forge")
    builder = Builder(project, base, Display(Console(file=io.StringIO())), "conda:1")
    recipes = RecipeSet(project, base)
    beginnings = threading.Semaphore(0)
    overlaps: list[bool] = []

    def build(step: Step, *_: object) -> None:
        if step.recipe.name == "alpha":
            timeout = 300 if memory == 12 else 1
            overlaps.append(beginnings.acquire(timeout=timeout))
        beginnings.release()

    monkeypatch.setattr(builder, "_build", build)
    builder.run(recipes, recipes.plan(builder.channel), False, {})
    assert overlaps == [memory == 12]


def test_time_left_is_at_the_pace_so_far() -> None:
    """The remaining time is estimated from the CPU hours so far.

    Here two CPU hours took 30 minutes, and eight are left. A failed build takes no more time.
    """
    states = {"a": BUILT, "b": BUILT, "c": FETCHED, "d": FAILED}
    todo = {name: SimpleNamespace(state=state) for name, state in states.items()}
    hours = {"a": 0.5, "b": 1.5, "c": 8, "d": 9}
    costs_by_name = {
        name: replace(preflight.UNKNOWN, cpu_hours=cost) for name, cost in hours.items()
    }
    assert format_time_left(todo, costs_by_name, 1800) == ", about 2 h 0 min left"
    assert format_time_left(todo, costs_by_name | {"c": preflight.UNKNOWN}, 1800) == ""
    assert format_time_left(todo, {"c": costs_by_name["c"]}, 1800) == ""
