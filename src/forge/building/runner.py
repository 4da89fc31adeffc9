# SPDX-License-Identifier: BSD-3-Clause
"""Carry out a plan: fetch sources, build and test up to two recipes at once, fill the channel.

A package is built in `build/staging/NAME`. When it is complete and its tests have passed, it is
copied to a partial file in the channel, and renamed. A run can therefore be interrupted or killed
at any point. The next run keeps the packages in the channel and builds the other packages.
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
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rattler_build import Package

from forge.bases import Base
from forge.building.display import Display
from forge.building.jobs import resume, run_job
from forge.building.preflight import UNKNOWN, fits
from forge.conda.local import LocalChannel
from forge.errors import Failed, ForgeError, NotAttempted
from forge.files import write_text
from forge.processes import max_jobs
from forge.project import WORK_FOLDERS, Project
from forge.recipes.cost import Cost, read_costs
from forge.recipes.plan import BUILD, UP_TO_DATE, RecipeSet, Step
from forge.recipes.recipe import list_sources, prepare
from forge.sources.cache import SourceCache

# States of a result.
FETCHED = "fetched"
BUILT = "built"
PASSED = "passed"
CURRENT = "up to date"
FAILED = "failed"
NOT_ATTEMPTED = "not attempted"

# Two builds at a time, because scripts and tests seldom use more than one core.
PARALLEL_BUILDS = 2
NO_REASONS: Mapping[str, str] = MappingProxyType({})


@dataclass
class Result:
    """The result of one recipe in a run.

    Attributes:
        step: The recipe's step in the plan.
        state: One of this module's states, such as BUILT.
        detail: The reason if the recipe was not attempted.
        seconds: The duration, including the fetching of the sources.
    """

    step: Step
    state: str
    detail: str = ""
    seconds: float = 0.0


@dataclass
class Run:
    """The state of one run of a Builder.

    Attributes:
        recipes: All recipes.
        results: The result of each recipe by name, in the order of the builds.
        keep_going: Continue after a failure.
        fetched: The results of the recipes that are built. Their sources have been fetched.
        costs: The cost of each recipe in `fetched`. A recipe that states no cost has no entry.
        start: The time.monotonic() at which the builds began.
        numbers: Counts the builds that have begun.
    """

    recipes: RecipeSet
    results: dict[str, Result]
    keep_going: bool
    fetched: dict[str, Result] = field(default_factory=dict)
    costs: dict[str, Cost] = field(default_factory=dict)
    start: float = 0.0
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def cost(self, name: str) -> Cost:
        """Return the cost of a recipe, or UNKNOWN if the recipe states none."""
        return self.costs.get(name, UNKNOWN)

    def require_needs(self, name: str) -> None:
        """Raise NotAttempted if a recipe needs a package that is missing or that was not built."""
        lost = set(self.recipes.broken)
        for other, result in self.results.items():
            if result.state in (FAILED, NOT_ATTEMPTED):
                lost.add(other)
        reason = self.recipes.describe_missing(name, lost)
        if reason:
            raise NotAttempted(reason)

    def require_no_failure(self) -> None:
        """Raise NotAttempted after a failed fetch, build or test, unless the run keeps going."""
        if self.keep_going:
            return
        for name, result in self.results.items():
            if result.state == FAILED:
                raise NotAttempted(f"{name} failed; --continue-on-failure would continue")

    def estimate_time_left(self) -> str:
        """Return the estimated remaining time as the end of a line; see `format_time_left`."""
        elapsed = time.monotonic() - self.start
        return format_time_left(self.fetched, self.costs, elapsed)


class Builder:
    """Carries out the steps of a plan and adds the packages to the project's channel.

    Attributes:
        project: The checkout.
        base: The base that the packages are built on.
        display: Shows the progress.
        package_format: rattler-build's name of the format, such as `conda:19`.
        channel: The channel that the packages are added to.
        sources: The cache of source files.
        stop: An event that is set to end the running jobs.
        adding: A lock that is held while packages are added to the channel.
        run_job: A function that runs an engine job. Its arguments are the job and the log.
    """

    def __init__(
        self,
        project: Project,
        base: Base,
        display: Display,
        package_format: str,
    ) -> None:
        self.project = project
        self.base = base
        self.display = display
        self.package_format = package_format
        self.channel = LocalChannel(project.output_folder, project.recipes)
        self.sources = SourceCache(project)
        self.stop = threading.Event()
        self.adding = threading.Lock()
        self.run_job = functools.partial(
            run_job,
            project,
            max_jobs(),
            display.line,
            self.stop,
        )

    def run(
        self,
        recipes: RecipeSet,
        steps: list[Step],
        keep_going: bool,
        unsolvable: Mapping[str, str],
    ) -> list[Result]:
        """Fetch the sources of all steps to build, then build the steps, up to two at once.

        A recipe is not attempted if a package that it needs was not built.

        Args:
            recipes: All recipes.
            steps: The plan, or a part of it.
            keep_going: Continue after a failed fetch, build or test. Otherwise, the running builds
                are finished and the remaining ones are not attempted.
            unsolvable: The names of recipes that are not attempted, with the reasons.
        """
        results = {}
        for step in steps:
            result = Result(step, CURRENT)
            reason = unsolvable.get(step.recipe.name)
            if reason is not None:
                result.state = NOT_ATTEMPTED
                result.detail = reason
            results[step.recipe.name] = result
        run = Run(recipes, results, keep_going)
        self._fetch_all(run)
        if run.fetched:
            self._build_all(run)
        return list(results.values())

    def _fetch_all(self, run: Run) -> None:
        """Fetch all sources before the first build, so that no build has to wait for a source."""
        for name, result in run.results.items():
            if result.step.action != BUILD or result.state == NOT_ATTEMPTED:
                continue
            with self._attempt(result, FETCHED, name):
                run.require_needs(name)
                self._fetch(result.step)
            if result.state == FETCHED:
                run.fetched[name] = result
        self.display.phase("")

    def _build_all(self, run: Run) -> None:
        """Build the fetched recipes in threads. A build waits for others; see `_build_in_turn`."""
        recipes = [result.step.recipe for result in run.fetched.values()]
        run.costs = read_costs(recipes, self.base)
        run.start = time.monotonic()
        futures: dict[str, Future[None]] = {}
        workers = min(PARALLEL_BUILDS, max_jobs())
        with (
            _temporary_files_in(self.project.staging),
            ThreadPoolExecutor(workers) as pool,
        ):
            try:
                for name in run.fetched:
                    earlier = futures.copy()
                    futures[name] = pool.submit(self._build_in_turn, run, name, earlier)
                ended = wait(futures.values(), return_when=FIRST_EXCEPTION).done
                for future in ended:
                    future.result()
            finally:
                # Ctrl-C interrupts only this thread. The event stops the others.
                self.stop.set()
                pool.shutdown(cancel_futures=True)

    def _build_in_turn(
        self,
        run: Run,
        name: str,
        earlier: Mapping[str, Future[None]],
    ) -> None:
        """Build a recipe once the earlier builds that it has to wait for have ended.

        It waits for the builds of packages that it needs, and for builds that would not fit into
        memory or onto the disk together with it.
        """
        needs = run.recipes.direct_needs(name)
        awaited = []
        for other, future in earlier.items():
            costs = [run.cost(name), run.cost(other)]
            if other in needs or not fits(costs, self.project):
                awaited.append(future)
        wait(awaited)
        result = run.fetched[name]
        with self._attempt(result, BUILT, name):
            run.require_no_failure()
            run.require_needs(name)
            number = next(run.numbers)
            version = result.step.recipe.version
            label = f"[{number}/{len(run.fetched)}] {name} {version}"
            self._build(result.step, label, run.cost(name))
        self.display.phase("")
        if result.state == BUILT:
            time_left = run.estimate_time_left()
            self.display.say(f"{label}: built in {result.seconds:.0f} s{time_left}")

    def test_packages(self, steps: list[Step]) -> list[Result]:
        """Run the tests inside packages of the channel again, if the packages are up to date."""
        results = []
        costs = read_costs([step.recipe for step in steps], self.base)
        for step in steps:
            name = step.recipe.name
            result = Result(step, NOT_ATTEMPTED)
            results.append(result)
            with self._attempt(result, PASSED, name):
                if step.action != UP_TO_DATE:
                    raise NotAttempted(f"{step.reason}; run: ./forge build {name}")
                self.display.phase(f"{name}: testing")
                log = self.project.logs / f"{name}.test.log"
                log.unlink(missing_ok=True)
                packages = [self.channel.path(output) for output in step.outputs]
                self._test(packages, log, costs.get(name, UNKNOWN))
        return results

    @contextlib.contextmanager
    def _attempt(self, result: Result, success: str, label: str) -> Iterator[None]:
        """Record in `result` the state in which the block ends, and its duration.

        Args:
            result: The result to change.
            success: The state if the block raises nothing.
            label: The name of the recipe in the message of a failure.

        Raises:
            KeyboardInterrupt: The run has been stopped. The block is not entered.
        """
        start = time.monotonic()
        if self.stop.is_set():
            raise KeyboardInterrupt
        try:
            yield
            result.state = success
        except NotAttempted as error:
            result.state = NOT_ATTEMPTED
            result.detail = str(error)
        except (ForgeError, OSError) as error:
            self.display.say(f"{label}: {error}", always=True)
            result.state = FAILED
        result.seconds += time.monotonic() - start

    def _build(self, step: Step, label: str, cost: Cost) -> None:
        """Build and test the packages of a step and add them to the channel.

        Args:
            step: The step.
            label: The beginning of the lines that are shown.
            cost: The cost of the recipe.
        """
        name = step.recipe.name
        output = self.project.staging / name
        log = self.project.logs / f"{name}.log"
        packages = [output / package.subdir / package.file_name for package in step.outputs]
        # The names of package files contain a hash of the content digest. So if an earlier run has
        # built files with all of these names, the files are current and only have to be tested.
        mark = output / f"whole-{self.package_format}"
        is_complete = mark.exists() and all(path.exists() for path in packages)
        if not is_complete:
            self.display.phase(f"{label}: building ({step.reason})")
            self._run_build(step, output, packages, log)
            mark.touch()
        for folder in WORK_FOLDERS:
            shutil.rmtree(output / folder, ignore_errors=True)
        self.display.phase(f"{label}: testing")
        test_counts = {}
        for path in packages:
            test_counts[path] = Package.from_file(path).test_count
        self._test(packages, log, cost, output.as_uri())
        with self.adding:
            self.channel.add(test_counts, step.digest)
        shutil.rmtree(output, ignore_errors=True)

    def _run_build(
        self,
        step: Step,
        output: Path,
        packages: list[Path],
        log: Path,
    ) -> None:
        """Run rattler-build. Raise Failed unless it makes exactly the `packages` in `output`."""
        number = step.outputs[0].number
        job: dict[str, Any] = {
            **self.base.arguments(step.digest_value, number),
            "action": "build",
            "recipes": [str(step.recipe.path)],
            "output_dir": str(output),
            "channel": [self.channel.folder.as_uri(), self.base.channel_url],
            "package_format": self.package_format,
            "pythons": step.pythons(),
        }
        resume(output, job)
        for source in step.recipe.sources:
            problem = prepare(step.recipe, source, self.sources, output / "src_cache")
            if problem:
                raise Failed(f"{problem}. Nothing was built")
        self.run_job(job, log)
        built = sorted(output.glob("*/*.conda"))
        planned = sorted(packages)
        if built != planned:
            raise Failed(f"built {built}, but the plan has {planned}")

    def _fetch(self, step: Step) -> None:
        """Fetch the sources of a step. If one cannot be fetched, write the reason to a file."""
        reason_file = _locate_reason(self.project, step)
        try:
            for source in list_sources(step.recipe):
                if not self.sources.path(source).exists():
                    self.display.phase(f"fetching {source.origin}")
                self.sources.fetch(source, self.display.download)
        except NotAttempted as error:
            write_text(reason_file, f"{step.digest_value}\n{error}")
            raise
        reason_file.unlink(missing_ok=True)

    def _test(
        self,
        packages: list[Path],
        log: Path,
        cost: Cost,
        *channels: str,
    ) -> None:
        """Run the tests inside packages.

        Args:
            packages: The packages' files.
            log: The log to which the output is appended.
            cost: The cost of their recipe, which may limit the time of the tests.
            channels: Channels of a higher priority than those of the project and the base.
        """
        job: dict[str, Any] = {
            "action": "test",
            "packages": [str(package) for package in packages],
            "channel": [
                *channels,
                self.channel.folder.as_uri(),
                self.base.channel_url,
            ],
        }
        if cost.test_hours is not None:
            job["hours"] = cost.test_hours
        self.run_job(job, log)


@contextlib.contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """Make rattler-build unpack packages in a folder, by setting TMPDIR.

    rattler-build unpacks each package to count its tests. This needs gigabytes, and /tmp is often
    smaller. Enter the block before other threads are started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def format_time_left(
    fetched: Mapping[str, Result],
    costs: Mapping[str, Cost],
    elapsed: float,
) -> str:
    """Estimate the remaining time of a run from the time of the builds so far.

    Args:
        fetched: The results of the recipes to build.
        costs: The costs of the recipes that state one.
        elapsed: Seconds since the first build began.

    Returns:
        The end of a line, such as `, about 2 h 0 min left`; empty if the costs are unknown or
        nothing is left.
    """
    cpu_hours = {BUILT: 0.0, FETCHED: 0.0}
    for name, result in fetched.items():
        if result.state in cpu_hours:
            cost = costs.get(name, UNKNOWN)
            cpu_hours[result.state] += cost.cpu_hours
    if not all(cpu_hours.values()):
        return ""
    seconds = elapsed * cpu_hours[FETCHED] / cpu_hours[BUILT]
    hours, minutes = divmod(max(1, round(seconds / 60)), 60)
    return f", about {hours} h {minutes} min left"


def _locate_reason(project: Project, step: Step) -> Path:
    """Return the path of the file that states why the sources of a step cannot be fetched.

    The first line of the file is the digest of the step. The reason follows.
    """
    return project.build / "not-attempted" / step.recipe.name


def read_unfetched(project: Project, steps: list[Step]) -> dict[str, str]:
    """Find steps whose sources an earlier run could not fetch, and that have not changed since.

    Returns:
        The name of each such recipe, with the reason.
    """
    reasons = {}
    for step in steps:
        file = _locate_reason(project, step)
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, ValueError):
            # The file is absent or damaged, so the reason is unknown.
            continue
        digest, _, reason = text.partition("\n")
        if reason and digest == step.digest_value:
            reasons[step.recipe.name] = reason
    return reasons


def predict_skipped(
    recipes: RecipeSet,
    steps: list[Step],
    excluded: Mapping[str, str] = NO_REASONS,
) -> dict[str, str]:
    """Predict which steps a run will not attempt, and the reasons.

    Args:
        recipes: All recipes.
        steps: The plan, or a part of it.
        excluded: The names of recipes that the run leaves out, with the reasons. Recipes that
            depend on them are skipped too.

    Returns:
        The name of each such recipe, with the reason. Steps that are up to date are not included.
    """
    reasons: dict[str, str] = {}
    for step in steps:
        if step.action != BUILD:
            continue
        name = step.recipe.name
        reason = excluded.get(name) or recipes.describe_missing(name, reasons.keys())
        if reason:
            reasons[name] = reason
    return reasons


def format_table(results: list[Result]) -> list[str]:
    """Format the table of results at the end of a run, with one line per recipe."""
    rows = [("package", "version", "build", "state", "seconds")]
    for result in results:
        output = result.step.outputs[0]
        rows.append(
            (
                result.step.recipe.name,
                output.version,
                output.build,
                result.state,
                f"{result.seconds:.1f}",
            )
        )
    columns = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in rows:
        cells = map(str.ljust, row, widths)
        lines.append("  ".join(cells).rstrip())
    return lines
