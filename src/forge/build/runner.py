# SPDX-License-Identifier: BSD-3-Clause
"""Carry out a plan: fetch, build, test and place one package after another.

A package is built in `build/staging/NAME` and enters the channel only when it is whole and its
tests passed, by one rename. So a run may be interrupted or killed at any point: the next one keeps
what is in the channel and does the rest.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rattler_build import Package
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from forge.provenance import records
from forge.bases import Base
from forge.channel.local import Channel
from forge.errors import BuildFailed, ForgeError, NotAttempted
from forge.files import write_text
from forge.processes import max_jobs
from forge.project import FORGE_CACHE, Project
from forge.sources.cache import SourceCache
from forge.recipes.plan import RecipeSet, Step, sources_of

POLL_SECONDS = 0.1
TAIL_LINES = 40
ENGINE_LOG = "engine.log"
LARGE = 50 << 20  # bytes
BUILT, CURRENT, FAILED, LEFT = "built", "up to date", "failed", "not attempted"


class Display:
    """What a person sees of a run: one live line on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console, self.live = console, console.is_terminal
        self.progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn(),
            TextColumn("{task.fields[line]}", style="dim", markup=False),
            console=console, transient=True,
        )  # fmt: skip
        self.task = self.progress.add_task("", line="")
        self.tenth = -1

    def __enter__(self) -> Display:
        if self.live:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.progress.stop()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def phase(self, name: str) -> None:
        """A new phase, for example `[2/4] flash-attn 2.8.3: testing`."""
        self.progress.reset(self.task, description=name, line="")
        if not self.live:
            self.say(name)

    def line(self, text: str) -> None:
        """The last line of the running log."""
        self.progress.update(self.task, line=text.strip()[: max(20, self.console.width // 2)])

    def download(self, name: str, have: int, total: int | None) -> None:
        """Bytes of a download; every tenth of a large one where there is no terminal."""
        self.line(f"{name} {have >> 20} of {(total or 0) >> 20 or '?'} MiB")
        tenth = have * 10 // total if total else 0
        if not self.live and total and total > LARGE and tenth != self.tenth:
            self.say(f"  {name}: {have >> 20} of {total >> 20} MiB")
        self.tenth = tenth


@dataclass
class Result:
    """What became of one recipe."""

    step: Step
    state: str
    detail: str = ""
    seconds: float = 0.0


class Builder:
    """Builds the wanted steps of a plan into the project's channel."""

    def __init__(self, project: Project, base: Base, display: Display, package_format: str) -> None:
        self.project, self.base, self.display = project, base, display
        self.channel, self.sources = Channel(project.channel), SourceCache(project)
        self.package_format, self.jobs = package_format, max_jobs()
        self.unfetched: dict[str, ForgeError] = {}

    def run(self, recipes: RecipeSet, steps: list[Step], keep_going: bool) -> list[Result]:
        """Fetch all sources of the wanted among `steps`, then build these in order.

        A recipe whose dependency did not come to be is not attempted. After a failure the rest is
        not attempted either, unless `keep_going`.
        """
        results: dict[str, Result] = {}
        wanted = [step for step in steps if step.wanted]
        self.unfetched = {
            step.recipe.name: NotAttempted(lacks)
            for step in wanted
            if (lacks := base_lacks(recipes, step.recipe.name))
        }
        hopeless = recipes.dependents(set(self.unfetched))
        self.unfetched |= self._fetch([s for s in wanted if s.recipe.name not in hopeless])
        stopped = ""
        for step in steps:
            name = step.recipe.name
            result = results[name] = Result(step, CURRENT)
            if not step.wanted:
                continue
            absent = {other for other, r in results.items() if r.state in (FAILED, LEFT)}
            lacking = sorted(recipes.direct_needs(name) & absent)
            if stopped or lacking:
                result.state, result.detail = LEFT, stopped or f"needs {', '.join(lacking)}"
                continue
            label = f"[{wanted.index(step) + 1}/{len(wanted)}] {name} {step.recipe.version}"
            self._attempt(result, BUILT, label, self._build)
            if result.state == FAILED and not keep_going:
                stopped = f"stopped after {name} failed; --continue-on-failure goes on"
        return list(results.values())

    def test_packages(self, steps: list[Step]) -> list[Result]:
        """Run the tests inside the packages of the channel again."""
        results = [Result(step, LEFT, f"{step.reason}; run: forge build-all") for step in steps]
        for result in results:
            if not result.step.wanted:
                self._attempt(result, "passed", result.step.recipe.name, self._test_again)
        return results

    def _attempt(
        self, result: Result, state: str, label: str, action: Callable[[Step, str], None]
    ) -> None:
        """Run `action` and note in `result` what came of it; `state` is the word for success."""
        start = time.monotonic()
        try:
            action(result.step, label)
            result.state, result.detail = state, ""
        except NotAttempted as error:
            result.state, result.detail = LEFT, str(error)
            note = not_attempted_note(self.project, result.step)
            write_text(note, f"{result.step.digest_value}\n{error}")
        except ForgeError as error:
            self.display.say(f"{label}: {error}")
            result.state = FAILED
        result.seconds = time.monotonic() - start

    def _build(self, step: Step, label: str) -> None:
        if step.recipe.name in self.unfetched:
            raise self.unfetched[step.recipe.name]
        output = self.project.staging / step.recipe.name
        log = self.project.logs / f"{step.recipe.name}.log"
        expected = {output / out.subdir / out.file_name for out in step.outputs}
        # Names are content: what an earlier run built to the end only has to be tested.
        whole = output / f"whole-{self.package_format}"
        if not (whole.exists() and all(path.exists() for path in expected)):
            self.display.phase(f"{label}: building ({step.reason})")
            self._prefill(step, output / "src_cache")
            job = {
                "action": "build",
                "recipes": [str(step.recipe.path)],
                "channel": [self.channel.folder.as_uri(), self.base.channel],
                "output_dir": str(output),
                "package_format": self.package_format,
                **self.base.arguments(step.digest_value, step.outputs[0].number),
            }
            self.run_job(job, log)
            found = set(output.glob("*/*.conda"))
            if found != expected:
                raise BuildFailed(f"built {sorted(found)}, but the plan said {sorted(expected)}")
            whole.touch()
        self.display.phase(f"{label}: testing")
        self._test(expected, log, output.as_uri())
        for package in expected:  # before it enters: a package without a record is not built again
            recipe, root = step.recipe.path, self.project.root
            records.write(self.channel.folder, package, recipe, root, self.base.name)
        tests = {path: Package.from_file(path).test_count for path in sorted(expected)}
        self.channel.add(tests, step.digest)
        shutil.rmtree(output, ignore_errors=True)

    def _fetch(self, steps: list[Step]) -> dict[str, ForgeError]:
        """Bring all sources first, so that no build waits for a host; returns what failed."""
        failed: dict[str, ForgeError] = {}
        for step in steps:
            try:
                for source in sources_of(step.recipe):
                    if not self.sources.path(source).exists():
                        self.display.phase(f"fetching {source.origin}")
                    self.sources.fetch(source, self.display.download)
            except ForgeError as error:
                failed[step.recipe.name] = error
        return failed

    def _prefill(self, step: Step, folder: Path) -> None:
        shutil.rmtree(folder.parent, ignore_errors=True)
        try:
            for source in sources_of(step.recipe):
                self.sources.prefill(source, folder)
        except OSError as error:
            raise BuildFailed(f"cannot unpack into {folder}: {error.strerror}") from None

    def _test_again(self, step: Step, label: str) -> None:
        self.display.phase(f"{label}: testing")
        log = self.project.logs / f"{step.recipe.name}.test.log"
        log.unlink(missing_ok=True)
        self._test({self.channel.path(output) for output in step.outputs}, log)

    def _test(self, packages: set[Path], log: Path, *channels: str) -> None:
        channel = [*channels, self.channel.folder.as_uri(), self.base.channel]
        paths = sorted(str(path) for path in packages)
        self.run_job({"action": "test", "packages": paths, "channel": channel}, log)

    def run_job(self, job: dict, log: Path) -> None:
        """Run an engine job in a child process, following its log into `log`.

        Raises BuildFailed with the last lines and the path of the log.
        """
        output = Path(job.get("output_dir", self.project.staging / "test"))
        if job["action"] == "test":  # environments that a killed run left there
            shutil.rmtree(output, ignore_errors=True)
        try:
            output.mkdir(parents=True, exist_ok=True)
            log.parent.mkdir(parents=True, exist_ok=True)
            (output / "job.json").write_text(json.dumps(job))
            if job["action"] == "build":
                log.unlink(missing_ok=True)
            stream = (output / ENGINE_LOG).open("wb")
        except OSError as error:
            raise BuildFailed(f"cannot write {error.filename}: {error.strerror}") from None
        environment = os.environ | {
            "CPU_COUNT": str(self.jobs),
            "TMPDIR": str(output),
            FORGE_CACHE: str(self.project.cache),
        }
        command = [sys.executable, "-m", "forge.build.engine", output / "job.json"]
        with stream:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=environment,
                start_new_session=True,
            )
        try:
            follower = _Follower(output, log)
            while child.poll() is None:
                self.display.line(follower.advance())
                time.sleep(POLL_SECONDS)
            follower.advance()
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if child.returncode:
            lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
            tail = "\n".join(f"  | {line}" for line in lines)
            what = f"{job['action']} failed"
            if child.returncode < 0:
                what += f" (killed by signal {-child.returncode}; out of memory?)"
            raise BuildFailed(
                f"{what}; the last lines of {log}:\n{tail}\n"
                f"  whole log: {log}\n  work folder: {output}"
            )


class _Follower:
    """Copies the scripts' logs, then the engine's, to ours: so the closing error stands last."""

    def __init__(self, output: Path, log: Path) -> None:
        self.output, self.log = output, log
        self.seen: dict[Path, tuple[int, bytes]] = {}
        self.last = ""

    def advance(self) -> str:
        """Take over what is new; returns the last line so far."""
        for file in [*self.output.glob("bld/*/work/conda_build.log"), self.output / ENGINE_LOG]:
            with file.open("rb") as stream:
                inode = os.fstat(stream.fileno()).st_ino
                known, text = self.seen.get(file, (0, b""))
                if inode != known:
                    # the next output of the recipe, whose log begins with that of its staging
                    text = os.path.commonprefix([text, stream.read()])
                stream.seek(len(text))
                data = stream.read()
            if data:
                self.seen[file] = inode, text + data
                with self.log.open("ab") as out:
                    out.write(data)
                self.last = data.decode(errors="replace").rstrip().rsplit("\n", 1)[-1]
        return self.last


def not_attempted_note(project: Project, step: Step) -> Path:
    """The file that holds the content digest and the reason of a step that was not attempted."""
    return project.build / "not-attempted" / step.recipe.name


def base_lacks(recipes: RecipeSet, name: str) -> str:
    """One line about what a recipe needs and the base does not have, or nothing."""
    lacking = recipes.lacking(name)
    return f"the {recipes.base.name} base has no {', '.join(lacking)}" if lacking else ""


def why_not_attempted(project: Project, recipes: RecipeSet, step: Step) -> str:
    """Why the last run could not attempt this very content, or this base cannot; or nothing."""
    if not step.wanted:
        return ""
    if lacks := base_lacks(recipes, step.recipe.name):
        return lacks
    note = not_attempted_note(project, step)
    digest, _, why = note.read_text().partition("\n") if note.exists() else ("", "", "")
    return why if digest == step.digest_value else ""


def table(results: list[Result]) -> Table:
    """The closing table of a run."""
    grid = Table("package", "version", "build", "state", "seconds", box=None, pad_edge=False)
    for result in results:
        name, first = result.step.recipe.name, result.step.outputs[0]
        seconds = f"{result.seconds:.1f}"
        grid.add_row(name, first.version, first.build, result.state, seconds)
    return grid
