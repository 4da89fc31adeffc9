# SPDX-License-Identifier: BSD-3-Clause
"""Solve every environment of a plan before anything is downloaded.

These are the environments that rattler-build solves for a recipe: build, host, and those of its
tests; and for each Python, the one in which the package is installed. Packages that are not built
yet are records without files. They require what their recipe says, and what the packages of their
build and host environments export.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import rattler
from rattler.exceptions import SolverError

from forge import limits, network
from forge.bases import CONDA_FORGE, Base
from forge.building.run_exports import Exports, RunExports
from forge.conda.local import Channel
from forge.conda.package import cache_folder, scratch
from forge.envs.solver import find_conflict, list_missing, solve
from forge.errors import one_line
from forge.files import write_text
from forge.limits import read_bytes
from forge.project import SUBDIRS
from forge.recipes.plan import BUILD, RecipeSet, Step
from forge.recipes.recipe import package_name

Data = dict[str, Any]


def unsolvable(
    recipes: RecipeSet,
    steps: Sequence[Step],
    channel: Channel,
    show: Callable[[str], None] = lambda _: None,
    theirs: str = CONDA_FORGE,
) -> dict[str, str]:
    """Return, by recipe, why it cannot be built with what conda-forge has; dependents included.

    Args:
        channel: Where the packages of steps that are up to date are.
        show: Gets a line for each environment that is about to be solved.
        theirs: The address of conda-forge.

    Raises:
        Exception: What the bindings raise if conda-forge does not answer.
    """
    reasons: dict[str, str] = {}
    with scratch(cache_folder()) as folder:
        preview = Preview(Path(folder), recipes.base, channel, theirs, show)
        for number, step in enumerate(steps, 1):
            name = step.recipe.name
            reason = recipes.describe_missing(name, reasons.keys()) if step.action == BUILD else ""
            reason = reason or preview.examine(step, f"[{number}/{len(steps)}] {name}")
            if reason:
                reasons[name] = reason
    return reasons


class Unsolvable(Exception):
    """An environment does not solve; the message says why.

    Attributes:
        kind: Which environment it is: build, host, run or test.
        python: The number of its Python; empty if any will do.
    """

    def __init__(self, reason: str, kind: str, python: str) -> None:
        super().__init__(reason)
        self.kind, self.python = kind, python


class Preview:
    """Our packages as they would be, and a solver that takes all others from conda-forge.

    Attributes:
        packages: Records of our packages by subdir and file name, as in a repodata.json.
        exports: The run exports of our packages, by file name.
        solved: The records of each environment that was solved, by its requirements.
    """

    def __init__(
        self, folder: Path, base: Base, channel: Channel, theirs: str, show: Callable[[str], None]
    ) -> None:
        self.folder, self.base, self.channel = folder, base, channel
        self.theirs, self.show = theirs, show
        self.gateway = rattler.Gateway(client=network.for_indexes())
        self.packages: dict[str, dict[str, Data]] = {subdir: {} for subdir in SUBDIRS}
        self.exports: dict[str, Exports] = {}
        self.their_exports = RunExports(theirs)
        self.solved: dict[frozenset[str], list[rattler.RepoDataRecord]] = {}
        self.revision, self.is_written = 0, False

    def examine(self, step: Step, label: str) -> str:
        """Solve every environment of a step to build, and add its packages to ours.

        Returns the requirement that cannot be satisfied, with the environment and the Pythons; an
        empty string if all environments solve.
        """
        if step.action != BUILD:
            self._add_built(step)
            return ""
        every_python = list(self.base.variants["python"])
        for examine in (self._add, self._install, self._test):
            failures: dict[str, Unsolvable] = {}  # by variant of Python
            for rendered in step.rendered:
                own = rendered["build_configuration"]["variant"].get("python", "")
                installs_anywhere = examine == self._install and not own
                for python in every_python if installs_anywhere else [own]:
                    if python not in failures:
                        try:
                            examine(label, rendered, step.rendered, python)
                        except Unsolvable as error:
                            failures[python] = error
            if failures:
                return _describe(list(failures.values()))
        return ""

    def _add_built(self, step: Step) -> None:
        """Add the packages of a step that is up to date, as the channel has them."""
        exports = {_file_name(r): _own_exports(r, step.rendered) for r in step.rendered}
        for output in step.outputs:
            index = self.channel.folder / output.subdir / "repodata.json"
            records = json.loads(read_bytes(index, limits.INDEX))["packages.conda"]
            self.packages[output.subdir][output.file_name] = records[output.file_name]
            self.exports[output.file_name] = exports[output.file_name]
        self.is_written = False

    def _add(self, label: str, rendered: Data, outputs: Sequence[Data], python: str) -> None:
        """Solve the build and host environments of an output, and add its package to ours."""
        output = rendered["recipe"]
        requirements = output.get("requirements", {})
        host: dict[str, rattler.RepoDataRecord] = {}
        exported: list[str] = []
        for section in [*output.get("staging_caches", []), output]:
            own = section.get("requirements", {})
            ignored = [part.get("ignore_run_exports", {}) for part in (own, requirements)]
            specs = _bare_pinned(_resolved(own.get("build", []), rendered, outputs), rendered)
            build = self._solve(label, "build", _number(python), specs)
            strong = self._exported(build, specs, ignored, ("strong",))
            specs = _bare_pinned(_resolved(own.get("host", []), rendered, outputs), rendered)
            if specs:
                records = self._solve(label, "host", _number(python), [*specs, *strong])
                host |= {record.name.normalized: record for record in records}
                kinds = ("noarch",) if output["build"].get("noarch") else ("strong", "weak")
                exported += self._exported(records, specs, ignored, kinds)
            exported += [] if output["build"].get("noarch") else strong
        run = _resolved(requirements.get("run", []), rendered, outputs, host)
        constraints = requirements.get("run_constraints", [])
        name, build_string = output["package"]["name"], output["build"]["string"]
        subdir, file_name = rendered["build_configuration"]["target_platform"], _file_name(rendered)
        self.packages[subdir][file_name] = {
            "name": name,
            "version": str(output["package"]["version"]),
            "build": build_string,
            "build_number": int(build_string.rsplit("_", 1)[1]),
            "subdir": subdir,
            "depends": list(dict.fromkeys([*run, *exported])),
            "constrains": _resolved(constraints, rendered, outputs, host),
        }
        self.exports[file_name] = _own_exports(rendered, outputs)
        self.is_written = False

    def _install(self, label: str, rendered: Data, outputs: Sequence[Data], python: str) -> None:
        """Solve the environment in which a user installs a package."""
        subdir = rendered["build_configuration"]["target_platform"]
        depends = self.packages[subdir][_file_name(rendered)]["depends"]
        spec = f"python {python}"
        specs = [spec, _exactly(rendered)]
        self._solve(label, "run", _number(python), specs, instead=[spec, *depends])

    def _test(self, label: str, rendered: Data, outputs: Sequence[Data], python: str) -> None:
        """Solve the environments of a package's tests."""
        for test in rendered["recipe"].get("tests", []):
            for number, specs in _test_environments(test, rendered, outputs):
                self._solve(label, "test", number or _number(python), specs)

    def _solve(
        self,
        label: str,
        kind: str,
        python: str,
        specs: Sequence[str],
        instead: Sequence[str] = (),
    ) -> list[rattler.RepoDataRecord]:
        """Solve an environment, or take what was solved before. Raises Unsolvable.

        Args:
            label: The recipe whose environment it is, to be shown.
            kind: Which of its environments: build, host, run or test.
            python: The number of the Python that it has; empty if any will do.
            specs: What the environment requires.
            instead: What to name a requirement of in the reason, if not of `specs`.
        """
        key = frozenset(specs)
        if not specs or key in self.solved:
            return self.solved.get(key, [])
        self.show(f"{label}: {kind}{f', Python {python}' if python else ''}")
        channels = [self._ours(), self.theirs]
        try:
            self.solved[key] = solve(channels, specs, self.gateway)
        except SolverError as error:
            missing = list_missing(channels, instead or specs, self.gateway)
            reason = f"conda-forge has no {'; '.join(missing)}" if missing else ""
            reason = reason or find_conflict(channels, instead or specs, self.gateway)
            reason = reason or one_line(str(error))
            raise Unsolvable(reason, kind, python) from None
        return self.solved[key]

    def _ours(self) -> str:
        """Return the address of a channel of our packages as they are now known."""
        if not self.is_written:
            self.revision += 1  # at another address, since solvers keep what they have read
            for subdir, packages in self.packages.items():
                text = json.dumps({"packages": {}, "packages.conda": packages})
                write_text(self.folder / str(self.revision) / subdir / "repodata.json", text)
            self.is_written = True
        return (self.folder / str(self.revision)).as_uri()

    def _exported(
        self,
        records: Sequence[rattler.RepoDataRecord],
        specs: Sequence[str],
        ignored: Sequence[Data],
        kinds: Sequence[str],
    ) -> list[str]:
        """List what the packages that `specs` name export, unless the recipe ignores it."""
        named = {package_name(spec) for spec in specs}
        for ignore in ignored:
            named -= {package_name(spec) for spec in ignore.get("from_package", [])}
        unwanted = {package_name(s) for ignore in ignored for s in ignore.get("by_name", [])}
        exported = []
        for record in records:
            if record.name.normalized in named:
                ours = self.exports.get(record.file_name)
                exports = self.their_exports.of(record) if ours is None else ours
                exported += [spec for kind in kinds for spec in exports.get(kind, [])]
        return [spec for spec in exported if package_name(spec) not in unwanted]


def _describe(failures: Sequence[Unsolvable]) -> str:
    """Say in one line what does not solve, in which environment and with which Pythons."""
    pythons: dict[tuple[str, str], list[str]] = {}
    for failure in failures:
        pythons.setdefault((str(failure), failure.kind), []).append(failure.python)
    lines = []
    for (reason, kind), numbers in pythons.items():
        named = " and ".join(dict.fromkeys(filter(None, numbers)))
        lines.append(f"{reason} ({kind} environment{f', Python {named}' if named else ''})")
    return "; ".join(lines)


def _exactly(rendered: Data) -> str:
    """Return the match spec of an output."""
    output = rendered["recipe"]
    package, build = output["package"], output["build"]["string"]
    return f"{package['name']} =={package['version']} {build}"


def _python(rendered: Data) -> str:
    """Return the number of the Python that an output is made for; empty if it serves all."""
    return _number(rendered["build_configuration"]["variant"].get("python", ""))


def _number(variant: str) -> str:
    """Return 3.12 of a variant such as `3.12.* *_cpython`."""
    return variant.partition(".*")[0]


def _file_name(rendered: Data) -> str:
    package, build = rendered["recipe"]["package"], rendered["recipe"]["build"]["string"]
    return f"{package['name']}-{package['version']}-{build}.conda"


def _own_exports(rendered: Data, outputs: Sequence[Data]) -> Exports:
    """Return the run exports that a recipe states for an output."""
    stated = rendered["recipe"].get("requirements", {}).get("run_exports", {})
    kinds = stated if isinstance(stated, dict) else {"weak": stated}
    return {kind: _resolved(specs, rendered, outputs) for kind, specs in kinds.items()}


def _test_environments(
    test: Data, rendered: Data, outputs: Sequence[Data]
) -> Iterator[tuple[str, list[str]]]:
    """Yield the Python, if it is given, and the requirements of each environment of a test."""
    if "package_contents" in test:
        return
    required = test.get("requirements", {})
    run = [_exactly(rendered), *_resolved(required.get("run", []), rendered, outputs)]
    python = test.get("python")
    if python is not None:
        run += ["pip"] if python.get("pip_check", True) else []
    versions = (python or {}).get("python_version") or []
    for version in [versions] if isinstance(versions, str) else versions:
        yield _number(version), [*run, f"python {version}"]
    if not versions:
        yield "", run
    yield "", _resolved(required.get("build", []), rendered, outputs)


def _bare_pinned(specs: list[str], rendered: Data) -> list[str]:
    """Give bare names the version that rattler-build gives them from the variants."""
    variant = rendered["build_configuration"]["variant"]
    result = []
    for spec in specs:
        value = str(variant.get(spec.replace("-", "_"), ""))
        is_number = value.replace(".", "").isalnum()
        result.append(f"{spec} {'=' if is_number else ''}{value}".strip())
    return result


def _resolved(
    requirements: Sequence[Any],
    rendered: Data,
    outputs: Sequence[Data],
    host: dict[str, rattler.RepoDataRecord] | None = None,
) -> list[str]:
    """Turn rendered requirements into match specs; a pin into what it pins to.

    Args:
        requirements: Match specs, and mappings of `pin_subpackage` and `pin_compatible`.
        rendered: The output that requires them.
        outputs: All outputs of its recipe.
        host: The packages of its host environment by name.
    """
    specs = []
    for requirement in requirements:
        if isinstance(requirement, str):
            specs.append(requirement)
        elif "pin_subpackage" in requirement:
            pin = requirement["pin_subpackage"]
            output = _output(pin["name"], rendered, outputs)
            version = str(output["package"]["version"])
            specs.append(_pinned(pin, version, output["build"]["string"]))
        else:
            pin = requirement["pin_compatible"]
            record = (host or {}).get(pin["name"])
            exact = record and _pinned(pin, str(record.version), str(record.build))
            specs.append(exact or pin["name"])
    return specs


def _output(name: str, rendered: Data, outputs: Sequence[Data]) -> Data:
    """Return the output of that name for the same Python, or for all."""
    named = [other for other in outputs if other["recipe"]["package"]["name"] == name]
    same = [other for other in named if _python(other) == _python(rendered)]
    output: Data = (same or named)[0]["recipe"]
    return output


def _pinned(pin: Data, version: str, build: str) -> str:
    """Return the match spec of a pin: exact, or from a lower to an upper bound such as `x.x`."""
    if pin.get("exact"):
        return f"{pin['name']} =={version} {build}"
    lower, upper = pin.get("lower_bound") or "", pin.get("upper_bound") or ""
    bounds = []
    if lower:
        is_pattern = set(lower) <= {"x", "."}
        count = lower.count("x")
        bounds.append(f">={'.'.join(version.split('.')[:count]) if is_pattern else lower}")
    if upper:
        *kept, last = version.split(".")[: upper.count("x")] or [upper]
        is_pattern = set(upper) <= {"x", "."}
        following = ".".join([*kept, f"{int(last) + 1}.0a0"]) if is_pattern else upper
        bounds.append(f"<{following}")
    return f"{pin['name']} {','.join(bounds)}".strip()
