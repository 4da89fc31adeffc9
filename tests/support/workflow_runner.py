# SPDX-License-Identifier: BSD-3-Clause
"""Run a workflow as GitHub does, one job after the other.

The runner knows jobs with needs, conditions, matrices and time limits, reusable workflows, and
steps with outputs. It really executes the scripts of `run:`. For anything that it does not know, it
raises Unsupported.
"""

import fnmatch
import itertools
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from support.expressions import Unsupported, fill, holds, to_text
from support.hub import Hub, StepFailed, Use, use_action
from support.machine import Full, Lost, Machine

SUCCESS, FAILURE, CANCELLED, SKIPPED = "success", "failure", "cancelled", "skipped"
# YAML 1.1 reads the key `on` as true.
WORKFLOW_KEYS = {"name", True, "permissions", "concurrency", "jobs"}
JOB_KEYS = {
    "name",
    "needs",
    "if",
    "runs-on",
    "timeout-minutes",
    "permissions",
    "environment",
    "outputs",
    "strategy",
    "env",
    "steps",
    "uses",
    "with",
}
STEP_KEYS = {"id", "name", "if", "uses", "with", "run", "env"}
DEFAULT_MINUTES = 360


def require_known(keys: Iterable[Any], allowed: set[Any], where: str) -> None:
    """Raise Unsupported if there is a key that this runner would ignore."""
    unknown = set(keys) - allowed
    if unknown:
        raise Unsupported(f"{where}: {', '.join(map(str, unknown))}")


@dataclass
class Outcome:
    """The result of a job.

    Attributes:
        label: The name of the job in logs and in Hub.stops.
        result: SUCCESS, FAILURE, CANCELLED or SKIPPED.
        outputs: The outputs of the job.
    """

    label: str
    result: str
    outputs: dict[str, Any] = field(default_factory=dict)


class Run:
    """A run of a workflow. An event starts it, and its failed jobs can be run again.

    Attributes:
        outcomes: The outcome of each job by its name. A job with a matrix has one outcome.
        log: A line for each step, for the actions that it used, and for each job.
    """

    def __init__(self, hub: Hub, workflow: str) -> None:
        self.hub, self.workflow = hub, workflow
        hub.runs += 1
        self.id, self.attempt = hub.runs, 0
        self.artifacts = hub.folder / "artifacts" / str(self.id)
        self.outcomes: dict[str, Outcome] = {}
        self.earlier: dict[str, Outcome] = {}  # outcomes of jobs that do not run again
        self.log: list[str] = []
        self.event = "workflow_dispatch"

    def start(
        self, event: str = "workflow_dispatch", changed: tuple[str, ...] = ()
    ) -> dict[str, str]:
        """Run all jobs if the event starts the workflow, and return their results by name.

        Args:
            event: The name of the event. A push is always to the branch main.
            changed: The files that a push changed.
        """
        self.event = event
        if self._is_started(event, changed):
            self._attempt()
        return {name: outcome.result for name, outcome in self.outcomes.items()}

    def rerun_failed(self) -> dict[str, str]:
        """Run the failed and cancelled jobs again, and those that need them; return all results."""
        repeated = {n for n, o in self.outcomes.items() if o.result in (FAILURE, CANCELLED)}
        jobs = self._load(self.workflow)["jobs"]
        repeated |= {name for name in jobs if self._ancestors(jobs, name) & repeated}
        self.earlier = {n: o for n, o in self.outcomes.items() if n not in repeated}
        self._attempt()
        return {name: outcome.result for name, outcome in self.outcomes.items()}

    def _is_started(self, event: str, changed: tuple[str, ...]) -> bool:
        triggers = self._load(self.workflow)[True]
        if event not in triggers:
            raise Unsupported(f"{self.workflow}: the event {event}")
        filters = dict(triggers[event] or {}) if event == "push" else {}
        branches = filters.pop("branches", ["main"])
        ignored = [pattern.replace("**", "*") for pattern in filters.pop("paths-ignore", [])]
        require_known(filters, set(), f"{self.workflow}: push")
        is_ignored = [any(fnmatch.fnmatchcase(path, p) for p in ignored) for path in changed]
        return "main" in branches and not (ignored and changed and all(is_ignored))

    def _attempt(self) -> None:
        self.attempt += 1
        self.artifacts.mkdir(exist_ok=True)
        self.outcomes = self._run_jobs(self.workflow, "", {})

    def _load(self, name: str) -> dict[Any, Any]:
        path = self.hub.source / ".github/workflows" / name
        workflow = yaml.safe_load(path.read_text())
        require_known(workflow, WORKFLOW_KEYS, name)
        return workflow

    @staticmethod
    def _needs(job: Mapping[str, Any]) -> list[str]:
        needs = job.get("needs", [])
        return [needs] if isinstance(needs, str) else list(needs)

    def _ancestors(self, jobs: Mapping[str, Any], name: str) -> set[str]:
        result = set(self._needs(jobs[name]))
        for need in list(result):
            result |= self._ancestors(jobs, need)
        return result

    def _contexts(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        github = {
            "ref": "refs/heads/main",
            "run_id": self.id,
            "run_attempt": self.attempt,
            "token": "a token",
            "event_name": self.event,
        }
        return {"github": github, "vars": self.hub.variables, "inputs": inputs}

    def _run_jobs(
        self, workflow: str, caller: str, inputs: Mapping[str, Any]
    ) -> dict[str, Outcome]:
        """Run the jobs of a workflow, and return their outcomes by name.

        `caller` is the label of the job that calls the workflow, or empty.
        """
        jobs = self._load(workflow)["jobs"]
        outcomes: dict[str, Outcome] = {} if caller else dict(self.earlier)
        waiting = [name for name in jobs if name not in outcomes]
        while waiting:
            ready = [n for n in waiting if all(m in outcomes for m in self._needs(jobs[n]))]
            if not ready:
                raise Unsupported(f"{workflow}: jobs need each other: {', '.join(waiting)}")
            name = ready[0]
            waiting.remove(name)
            require_known(jobs[name], JOB_KEYS, f"{workflow}, job {name}")
            ancestors = [outcomes[other] for other in self._ancestors(jobs, name)]
            needs = {
                need: {"result": outcomes[need].result, "outputs": outcomes[need].outputs}
                for need in self._needs(jobs[name])
            }
            contexts = self._contexts(inputs) | {"needs": needs}
            status = {
                "always": True,
                "cancelled": False,
                "failure": any(outcome.result == FAILURE for outcome in ancestors),
                "success": all(outcome.result == SUCCESS for outcome in ancestors),
            }
            label = f"{caller} / {name}" if caller else name
            if holds(jobs[name].get("if", "true"), contexts, status):
                outcomes[name] = self._run_matrix(jobs[name], label, contexts)
            else:
                outcomes[name] = Outcome(label, SKIPPED)
            self.log.append(f"{label}: {outcomes[name].result}")
        return outcomes

    def _run_matrix(
        self, job: Mapping[str, Any], label: str, contexts: Mapping[str, Any]
    ) -> Outcome:
        """Run a job once for each combination of its matrix's values.

        With fail-fast, no more combinations are run after one that does not succeed.
        """
        if "strategy" not in job:
            return self._run_job(job, label, {**contexts})
        strategy = dict(job["strategy"])
        matrix = fill(strategy.pop("matrix"), contexts)
        fails_fast = strategy.pop("fail-fast", True)
        require_known(strategy, set(), f"{label}: strategy")
        if not matrix or {"include", "exclude"} & matrix.keys() or not all(matrix.values()):
            raise Unsupported(f"{label}: the matrix {matrix!r}")
        results = []
        for values in itertools.product(*matrix.values()):
            combination = dict(zip(matrix, values, strict=True))
            own_label = f"{label} ({', '.join(map(str, values))})"
            outcome = self._run_job(job, own_label, {**contexts, "matrix": combination})
            results.append(outcome.result)
            if fails_fast and results[-1] != SUCCESS:
                break
        worst = next((r for r in (FAILURE, CANCELLED, SKIPPED) if r in results), SUCCESS)
        return Outcome(label, worst)

    def _run_job(self, job: Mapping[str, Any], label: str, contexts: dict[str, Any]) -> Outcome:
        fill(job.get("name", ""), contexts)
        if "uses" in job:
            return self._call(job, label, contexts)
        if not fill(job["runs-on"], contexts):
            raise Unsupported(f"{label}: no runs-on")
        fill(job.get("environment", ""), contexts)
        minutes = job.get("timeout-minutes", DEFAULT_MINUTES)
        deadline = time.monotonic() + minutes * self.hub.seconds
        _, stop = self.hub.stops.get(label, ("", ""))
        for file in self.hub.hold.iterdir():
            file.unlink()
        if stop:
            point, _ = self.hub.stops.pop(label)
            (self.hub.hold / point).touch()
        steps: dict[str, Any] = {}
        contexts |= {"steps": steps, "runner": {"environment": "github-hosted", "os": "Linux"}}
        state = JobState(self, label, contexts, deadline, stop)
        with self.hub.machine() as machine:
            try:
                self.hub.furnish(machine)
                for step in job["steps"]:
                    state.run(step, machine, fill(job.get("env", {}), contexts))
            except Lost as reason:
                self.log.append(f"{label}: {reason}")
                return Outcome(label, CANCELLED if "time" in str(reason) else FAILURE)
        outputs = fill(job.get("outputs", {}), contexts)
        return Outcome(label, state.result, outputs)

    def _call(self, job: Mapping[str, Any], label: str, contexts: Mapping[str, Any]) -> Outcome:
        """Run the jobs of a workflow that a job calls."""
        name = re.fullmatch(r"\./\.github/workflows/([\w-]+\.yml)", job["uses"])
        if not name:
            raise Unsupported(f"{label}: the workflow {job['uses']}")
        declared = (self._load(name[1])[True]["workflow_call"] or {}).get("inputs", {})
        values = fill(job.get("with", {}), contexts)
        require_known(values, set(declared), f"{label}: inputs")
        inputs = {}
        for key, entry in declared.items():
            require_known(entry, {"type", "required", "default", "description"}, f"input {key}")
            if entry.get("required") and values.get(key) in (None, ""):
                raise Unsupported(f"{label}: the input {key} is missing")
            inputs[key] = values.get(key, entry.get("default", ""))
        results = [o.result for o in self._run_jobs(name[1], label, inputs).values()]
        worst = next((r for r in (FAILURE, CANCELLED) if r in results), SUCCESS)
        return Outcome(label, worst if set(results) != {SKIPPED} else SKIPPED)


class JobState:
    """The state of a job while its steps run.

    Attributes:
        workflow_run: The run that the job is part of.
        label: The label of the job.
        contexts: The contexts of expressions.
        deadline: The time, of time.monotonic(), at which the job's time is up.
        stop: How a script is stopped at a point of Hub.hold: see Machine.run.
        result: The result of the steps so far.
        path: The folders that steps have added to PATH.
    """

    def __init__(
        self, run: Run, label: str, contexts: dict[str, Any], deadline: float, stop: str
    ) -> None:
        self.workflow_run, self.label, self.contexts = run, label, contexts
        self.deadline, self.stop = deadline, stop
        self.result = SUCCESS
        self.path: list[str] = []

    def run(
        self, step: Mapping[str, Any], machine: Machine, environment: Mapping[str, Any]
    ) -> None:
        """Run a step if its condition holds. Raises Lost and Unsupported."""
        require_known(step, STEP_KEYS, f"{self.label}: step")
        contexts, run = self.contexts, self.workflow_run
        status = {
            "always": True,
            "cancelled": False,
            "failure": self.result == FAILURE,
            "success": self.result == SUCCESS,
        }
        name = step.get("name") or step.get("uses") or step["run"].splitlines()[0]
        outputs: dict[str, str] = {}
        outcome = SKIPPED
        if holds(step.get("if", "true"), contexts, status):
            outcome = SUCCESS
            try:
                if "uses" in step:
                    inputs = fill(dict(step.get("with", {})), contexts)
                    note = run.log.append
                    artifacts = run.artifacts
                    use = Use(run.hub, machine, artifacts, inputs, lambda t: note(f"  {t}"))
                    use_action(step["uses"], use)
                else:
                    variables = environment | fill(step.get("env", {}), contexts)
                    self._execute(step["run"], machine, variables, outputs)
                machine.check()
            except (StepFailed, Full) as reason:
                run.log.append(f"  {reason}")
                outcome = self.result = FAILURE
            except OSError as error:
                run.log.append(f"  {error}")
                outcome = self.result = FAILURE
        if "id" in step:
            contexts["steps"][step["id"]] = {"outputs": outputs, "outcome": outcome}
        run.log.append(f"{self.label}: {name}: {outcome}")

    def _execute(
        self, script: str, machine: Machine, variables: Mapping[str, Any], outputs: dict[str, str]
    ) -> None:
        """Execute a script. Raises StepFailed for an exit code other than 0."""
        if "${{" in script:
            raise Unsupported(f"{self.label}: an expression in a script")
        run, hub = self.workflow_run, self.workflow_run.hub
        files = {name: machine.temp / name for name in ("GITHUB_OUTPUT", "GITHUB_PATH")}
        for file in files.values():
            file.write_text("")
        folders = [*reversed(self.path), machine.folder / "bin", Path(sys.executable).parent]
        environment = {
            "PATH": ":".join([*map(str, folders), os.environ["PATH"]]),
            "HOME": str(machine.folder / "home"),
            "LANG": "C.UTF-8",
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            "GITHUB_REPOSITORY": "owner/strix-forge",
            "GITHUB_RUN_ID": str(run.id),
            "GITHUB_WORKSPACE": str(machine.work),
            "RUNNER_TEMP": str(machine.temp),
            "MACHINE": str(machine.folder),
            "HOLD": str(hub.hold),
            "RELEASES": str(hub.releases),
        }
        environment |= {name: str(file) for name, file in files.items()}
        environment |= hub.environment | {key: to_text(value) for key, value in variables.items()}
        log = hub.folder / "logs" / f"{run.id}-{run.attempt} {self.label.replace('/', '-')}.log"
        code = machine.run(script, environment, log, self.stop, self.deadline)
        outputs |= read_outputs(files["GITHUB_OUTPUT"].read_text())
        self.path += files["GITHUB_PATH"].read_text().split()
        if code:
            raise StepFailed(f"exit code {code}; {log}")


def read_outputs(text: str) -> dict[str, str]:
    """Return the outputs of a step by name: the lines NAME=VALUE of GITHUB_OUTPUT."""
    outputs = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if not equals or "<<" in name:
            raise Unsupported(f"the output {line!r}")
        outputs[name] = value
    return outputs
