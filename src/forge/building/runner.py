# SPDX-License-Identifier: BSD-3-Clause
"""Carry out a plan: fetch, build and test packages, two side by side, and add them to the channel.

A package is built in `build/staging/NAME` and enters the channel only when it is whole and its
tests passed, by one rename. So a run may be interrupted or killed at any point: the next one keeps
what is in the channel and does the rest.
"""

import contextlib
import functools
import itertools
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rattler_build import Package

from forge.bases import Base
from forge.building.display import Display
from forge.building.jobs import resume, run_job
from forge.building.preflight import UNKNOWN, fits
from forge.conda.local import Channel
from forge.errors import Failed, ForgeError, NotAttempted
from forge.files import write_text
from forge.processes import max_jobs
from forge.project import MADE, Project
from forge.recipes.cost import Cost, read_costs
from forge.recipes.plan import BUILD, UP_TO_DATE, RecipeSet, Step
from forge.recipes.recipe import Recipe, prepare, sources_of
from forge.sources.cache import SourceCache

FETCHED, BUILT, CURRENT = "fetched", "built", "up to date"
FAILED, NOT_ATTEMPTED = "failed", "not attempted"
AT_ONCE = 2  # builds: scripts and tests seldom use more than one core


@dataclass
class Result:
    """What became of one recipe."""

    step: Step
    state: str
    detail: str = ""
    seconds: float = 0.0


class Builder:
    """Carries out the steps of a plan, into the project's channel."""

    def __init__(self, project: Project, base: Base, display: Display, package_format: str) -> None:
        self.project, self.base, self.display = project, base, display
        self.channel, self.sources = Channel(project.channel, project.recipes), SourceCache(project)
        self.package_format = package_format
        self.stop, self.adding = threading.Event(), threading.Lock()
        self.run_job = functools.partial(run_job, project, max_jobs(), display.line, self.stop)

    def run(
        self,
        recipes: RecipeSet,
        steps: list[Step],
        keep_going: bool,
        unsolvable: Mapping[str, str],
    ) -> list[Result]:
        """Fetch the sources of all `steps` to build, then build these in order, two side by side.

        A recipe whose dependency was not built is not attempted, and none of those that are known
        to be `unsolvable`, which maps their names to the reason. After a failure what runs is
        finished, and the rest is not attempted unless `keep_going`.
        """
        results = {step.recipe.name: Result(step, CURRENT) for step in steps}
        for name in results.keys() & unsolvable.keys():
            results[name].state, results[name].detail = NOT_ATTEMPTED, unsolvable[name]
        todo = {
            name: result
            for name, result in results.items()
            if result.step.action == BUILD and name not in unsolvable
        }

        def require(name: str) -> None:
            lost = {n for n, r in results.items() if r.state in (FAILED, NOT_ATTEMPTED)}
            if reason := recipes.describe_missing(name, lost | recipes.broken.keys()):
                raise NotAttempted(reason)

        for name, result in todo.items():  # all sources first, so that no build waits for a server
            with self._attempt(result, FETCHED, name):
                require(name)
                self._fetch(result.step)
        self.display.phase("")
        fetched = {name: result for name, result in todo.items() if result.state == FETCHED}
        costs = read_costs((result.step.recipe for result in fetched.values()), self.base)
        begun, start = itertools.count(1), time.monotonic()

        def build(name: str, earlier: dict[str, Future[None]]) -> None:
            needs, result = recipes.direct_needs(name), fetched[name]
            own_cost = costs.get(name, UNKNOWN)
            apart = [
                other
                for other in earlier
                if other in needs or not fits([own_cost, costs.get(other, UNKNOWN)], self.project)
            ]
            wait([earlier[other] for other in apart])
            with self._attempt(result, BUILT, name):
                failed = next((n for n, r in fetched.items() if r.state == FAILED), "")
                if failed and not keep_going:
                    raise NotAttempted(f"{failed} failed; --continue-on-failure goes on")
                require(name)
                label = f"[{next(begun)}/{len(fetched)}] {name} {result.step.recipe.version}"
                self._build(result.step, label)
            self.display.phase("")
            if result.state == BUILT:
                left = _time_left(fetched, costs, time.monotonic() - start)
                self.display.say(f"{label}: built in {result.seconds:.0f} s{left}")

        futures: dict[str, Future[None]] = {}
        with ThreadPoolExecutor(min(AT_ONCE, max_jobs())) as pool:
            try:
                for name in fetched:
                    futures[name] = pool.submit(build, name, futures.copy())
                for future in wait(futures.values(), return_when=FIRST_EXCEPTION).done:
                    future.result()
            finally:  # at Ctrl-C too, of which the other threads hear nothing
                self.stop.set()
                pool.shutdown(cancel_futures=True)
        return list(results.values())

    def test_packages(self, steps: list[Step]) -> list[Result]:
        """Run the tests inside the packages of the channel again, where these are up to date."""
        results = [Result(step, NOT_ATTEMPTED) for step in steps]
        for result in results:
            step, name = result.step, result.step.recipe.name
            with self._attempt(result, "passed", name):
                if step.action != UP_TO_DATE:
                    raise NotAttempted(f"{step.reason}; run: forge build {name}")
                self.display.phase(f"{name}: testing")
                log = self.project.logs / f"{name}.test.log"
                log.unlink(missing_ok=True)
                packages = [self.channel.path(output) for output in step.outputs]
                self._test(step.recipe, packages, log)
        return results

    @contextlib.contextmanager
    def _attempt(self, result: Result, success: str, label: str) -> Iterator[None]:
        """Put into `result` what came of the block; `success` is the word for no error."""
        start = time.monotonic()
        if self.stop.is_set():
            raise KeyboardInterrupt
        try:
            yield
            result.state = success
        except NotAttempted as error:
            result.state, result.detail = NOT_ATTEMPTED, str(error)
        except (ForgeError, OSError) as error:
            self.display.say(f"{label}: {error}", always=True)
            result.state = FAILED
        result.seconds += time.monotonic() - start

    def _build(self, step: Step, label: str) -> None:
        name = step.recipe.name
        output, log = self.project.staging / name, self.project.logs / f"{name}.log"
        expected = [output / out.subdir / out.file_name for out in step.outputs]
        # Names are content: what an earlier run built to the end only has to be tested.
        whole = output / f"whole-{self.package_format}"
        if not (whole.exists() and all(path.exists() for path in expected)):
            self.display.phase(f"{label}: building ({step.reason})")
            job = self.base.arguments(step.digest_value, step.outputs[0].number) | {
                "action": "build", "recipes": [str(step.recipe.path)], "output_dir": str(output),
                "channel": [self.channel.folder.as_uri(), self.base.channel],
                "package_format": self.package_format, "pythons": step.pythons(),
            }  # fmt: skip
            resume(output, job)
            for source in step.recipe.sources:
                if wrong := prepare(step.recipe, source, self.sources, output / "src_cache"):
                    raise Failed(f"{wrong}. Nothing was built")
            self.run_job(job, log)
            if (built := sorted(output.glob("*/*.conda"))) != sorted(expected):
                raise Failed(f"built {built}, but the plan said {sorted(expected)}")
            whole.touch()
        for made in MADE:
            shutil.rmtree(output / made, ignore_errors=True)
        self.display.phase(f"{label}: testing")
        os.environ["TMPDIR"] = str(self.project.staging)  # rattler-build unpacks to count
        tests = {path: Package.from_file(path).test_count for path in expected}
        self._test(step.recipe, expected, log, output.as_uri())
        with self.adding:
            self.channel.add(tests, step.digest)
        shutil.rmtree(output, ignore_errors=True)

    def _fetch(self, step: Step) -> None:
        try:
            for source in sources_of(step.recipe):
                if not self.sources.path(source).exists():
                    self.display.phase(f"fetching {source.origin}")
                self.sources.fetch(source, self.display.download)
            _reason_file(self.project, step).unlink(missing_ok=True)
        except NotAttempted as error:  # for `skipped`
            write_text(_reason_file(self.project, step), f"{step.digest_value}\n{error}")
            raise

    def _test(self, recipe: Recipe, packages: list[Path], log: Path, *channels: str) -> None:
        channel = [*channels, self.channel.folder.as_uri(), self.base.channel]
        job: dict[str, Any] = {
            "action": "test",
            "packages": [str(package) for package in packages],
            "channel": channel,
        }
        cost = read_costs([recipe], self.base).get(recipe.name, UNKNOWN)
        if cost.test_hours is not None:
            job["hours"] = cost.test_hours
        self.run_job(job, log)


def _time_left(fetched: dict[str, Result], costs: dict[str, Cost], elapsed: float) -> str:
    """Estimate the rest at the pace so far, by the recipes' costs; empty if nobody can say."""
    hours = {BUILT: 0.0, FETCHED: 0.0}
    for name, result in fetched.items():
        if result.state in hours:
            hours[result.state] += costs.get(name, UNKNOWN).cpu_hours
    if not all(hours.values()):
        return ""
    minutes = max(1, round(elapsed * hours[FETCHED] / hours[BUILT] / 60))
    return f", about {minutes // 60} h {minutes % 60} min left"


def _reason_file(project: Project, step: Step) -> Path:
    """Return the file for the content digest of a step that was not attempted, and why."""
    return project.build / "not-attempted" / step.recipe.name


def skipped(
    project: Project,
    recipes: RecipeSet,
    steps: list[Step],
    last_run: bool = True,
    unsolvable: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Predict which recipes the next run skips, and why.

    Args:
        project: The checkout.
        recipes: All recipes.
        steps: The plan.
        last_run: Skip also what the last run could not fetch.
        unsolvable: Recipes whose environments do not solve, with the reason.
    """
    reasons: dict[str, str] = {}
    for step in (step for step in steps if step.action == BUILD):
        name, file = step.recipe.name, _reason_file(project, step)
        digest = last = ""
        with contextlib.suppress(OSError, ValueError):  # absent, or damaged and so unknown
            digest, _, last = file.read_text(encoding="utf-8").partition("\n")
        known = last if last_run and digest == step.digest_value else ""
        reason = known or unsolvable.get(name) or recipes.describe_missing(name, reasons.keys())
        if reason:
            reasons[name] = reason
    return reasons


def table(results: list[Result]) -> list[str]:
    """Format the closing table of a run, a line per recipe, as wide as it has to be."""
    rows = [("package", "version", "build", "state", "seconds")]
    for result in results:
        name, first = result.step.recipe.name, result.step.outputs[0]
        rows.append((name, first.version, first.build, result.state, f"{result.seconds:.1f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
