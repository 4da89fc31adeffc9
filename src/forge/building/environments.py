# SPDX-License-Identifier: BSD-3-Clause
"""Solve the environments of the recipes that a plan builds, before anything is downloaded.

For each recipe, these are the environments that rattler-build solves (build, host and test), and
the run environment in which a user installs the package, for each Python. Packages that are not
built yet are represented by records without files. The dependencies of such a record are the run
requirements of the recipe, and the run exports of the packages in the build and host environments.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rattler
from rattler.exceptions import SolverError

from forge import limits, network
from forge.bases import CONDA_FORGE, Base
from forge.building.run_exports import Exports, RunExports
from forge.conda.local import LocalChannel
from forge.conda.scratch import cache_folder, scratch
from forge.conda.solve import find_conflict, list_missing, solve
from forge.errors import one_line
from forge.files import write_text
from forge.limits import read_bytes
from forge.project import SUBDIRS
from forge.recipes.plan import BUILD, RecipeSet, Step
from forge.recipes.recipe import parse_package_name

Data = dict[str, Any]
Records = list[rattler.RepoDataRecord]


def find_unsolvable(
    recipes: RecipeSet,
    steps: Sequence[Step],
    channel: LocalChannel,
    show: Callable[[str], None] = lambda _: None,
    conda_forge: str = CONDA_FORGE,
) -> dict[str, str]:
    """Find the recipes with an environment that cannot be solved, and their dependents.

    The environments consist of our packages and conda-forge's.

    Args:
        recipes: All recipes.
        steps: The plan.
        channel: The local channel, with the packages of steps that are up to date.
        show: Called with a line for each environment before it is solved.
        conda_forge: The address of conda-forge.

    Returns:
        The name of each such recipe, with the reason.

    Raises:
        Exception: conda-forge does not answer. The bindings raise several types.
    """
    reasons: dict[str, str] = {}
    with scratch(cache_folder()) as folder:
        preview = Preview(
            Path(folder),
            recipes.base,
            channel,
            conda_forge,
            show,
        )
        for number, step in enumerate(steps, 1):
            name = step.recipe.name
            reason = ""
            if step.action == BUILD:
                reason = recipes.describe_missing(name, reasons.keys())
            if not reason:
                label = f"[{number}/{len(steps)}] {name}"
                reason = preview.examine(step, label)
            if reason:
                reasons[name] = reason
    return reasons


@dataclass(frozen=True)
class RenderedOutput:
    """An output of a recipe in one variant.

    Attributes:
        rendered: The output as rattler-build renders it: `recipe` and `build_configuration`.
        siblings: All rendered outputs of the recipe, including this one.
    """

    rendered: Data
    siblings: Sequence[Data]

    @property
    def recipe(self) -> Data:
        """The output's part of the rendered recipe."""
        recipe: Data = self.rendered["recipe"]
        return recipe

    @property
    def name(self) -> str:
        """The package's name."""
        return str(self.recipe["package"]["name"])

    @property
    def version(self) -> str:
        """The package's version."""
        return str(self.recipe["package"]["version"])

    @property
    def build(self) -> str:
        """The build string."""
        return str(self.recipe["build"]["string"])

    @property
    def subdir(self) -> str:
        """The subdir in which a channel has the package."""
        return str(self.rendered["build_configuration"]["target_platform"])

    @property
    def file_name(self) -> str:
        """The name of the package's file."""
        return f"{self.name}-{self.version}-{self.build}.conda"

    @property
    def spec(self) -> str:
        """The match spec of exactly this package."""
        return f"{self.name} =={self.version} {self.build}"

    @property
    def variant(self) -> Data:
        """The values of the variant keys."""
        variant: Data = self.rendered["build_configuration"]["variant"]
        return variant

    @property
    def python(self) -> str:
        """The Python variant, such as `3.12.* *_cpython`; empty if the package has none."""
        return str(self.variant.get("python", ""))

    @property
    def is_noarch(self) -> bool:
        """Whether the package is noarch: for any platform."""
        return bool(self.recipe["build"].get("noarch"))

    @property
    def requirements(self) -> Data:
        """The rendered requirements by kind, such as `host` or `run_exports`."""
        requirements: Data = self.recipe.get("requirements", {})
        return requirements

    def find_sibling(self, name: str) -> "RenderedOutput":
        """Return the sibling with this name and this output's Python.

        Without such a sibling, return the first one with this name.
        """
        named = []
        for rendered in self.siblings:
            output = RenderedOutput(rendered, self.siblings)
            if output.name == name:
                named.append(output)
        for output in named:
            if _python_number(output.python) == _python_number(self.python):
                return output
        return named[0]


class Unsolvable(Exception):
    """An environment cannot be solved; the message is the reason.

    Attributes:
        kind: The kind of environment: build, host, run or test.
        python: Its Python version, such as 3.12; empty if any version is allowed.
    """

    def __init__(self, reason: str, kind: str, python: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.python = python


class Preview:
    """Lists our packages before they are built, and solves environments with them.

    The environments also have packages of conda-forge.

    Attributes:
        folder: A folder for the index of our packages.
        base: The base of the recipes.
        channel: The local channel, with the packages of steps that are up to date.
        conda_forge: The address of conda-forge.
        show: Called with a line for each environment before it is solved.
        packages: Records of our packages by subdir and file name, as in a repodata.json.
        exports: The run exports of our packages, by file name.
        solved: The records of each environment that was solved, by its requirements.
    """

    def __init__(
        self,
        folder: Path,
        base: Base,
        channel: LocalChannel,
        conda_forge: str,
        show: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self.base = base
        self.channel = channel
        self.conda_forge = conda_forge
        self.show = show
        self.packages: dict[str, dict[str, Data]] = {}
        for subdir in SUBDIRS:
            self.packages[subdir] = {}
        self.exports: dict[str, Exports] = {}
        self.solved: dict[frozenset[str], Records] = {}
        self._gateway = rattler.Gateway(client=network.make_solver_client())
        self._conda_forge_exports = RunExports(conda_forge)
        self._revision = 0
        self._is_written = False

    def examine(self, step: Step, label: str) -> str:
        """Solve the environments of a step, and add the step's packages to the preview.

        Build and host environments are the first stage, run environments the second, and test
        environments the third. If a stage has an environment that cannot be solved, the next stage
        is not attempted.

        Args:
            step: A step of the plan. If it is up to date, its packages are added without solving.
            label: The beginning of the lines that are shown, such as `[2/4] flash-attn`.

        Returns:
            The requirements that cannot be satisfied, each with its environment and Pythons; an
            empty string if all environments can be solved.
        """
        if step.action != BUILD:
            self._add_built(step)
            return ""
        outputs = [RenderedOutput(rendered, step.rendered) for rendered in step.rendered]
        for solve_environments in (self._add, self._install, self._test):
            failures: dict[str, Unsolvable] = {}
            for output in outputs:
                pythons = [output.python]
                if solve_environments == self._install and not output.python:
                    pythons = list(self.base.variants["python"])
                for python in pythons:
                    if python in failures:
                        continue
                    try:
                        solve_environments(label, output, python)
                    except Unsolvable as error:
                        failures[python] = error
            if failures:
                return _describe(list(failures.values()))
        return ""

    def _add_built(self, step: Step) -> None:
        """Copy the records of a step's packages from the channel to the preview.

        The step is up to date, so the channel has its packages.
        """
        exports = {}
        for rendered in step.rendered:
            output = RenderedOutput(rendered, step.rendered)
            exports[output.file_name] = _stated_exports(output)
        for package in step.outputs:
            index = self.channel.folder / package.subdir / "repodata.json"
            repodata = json.loads(read_bytes(index, limits.INDEX))
            record = repodata["packages.conda"][package.file_name]
            self.packages[package.subdir][package.file_name] = record
            self.exports[package.file_name] = exports[package.file_name]
        self._is_written = False

    def _add(self, label: str, output: RenderedOutput, python: str) -> None:
        """Solve an output's build and host environments, and add its package to the preview."""
        host: dict[str, rattler.RepoDataRecord] = {}
        exported: list[str] = []
        staging_caches = output.recipe.get("staging_caches", [])
        for section in [*staging_caches, output.recipe]:
            records, specs = self._solve_section(label, output, section, python)
            for record in records:
                host[record.name.normalized] = record
            exported += specs
        run = _resolve(output.requirements.get("run", []), output, host)
        constraints = output.requirements.get("run_constraints", [])
        self.packages[output.subdir][output.file_name] = {
            "name": output.name,
            "version": output.version,
            "build": output.build,
            "build_number": int(output.build.rsplit("_", 1)[1]),
            "subdir": output.subdir,
            "depends": list(dict.fromkeys([*run, *exported])),
            "constrains": _resolve(constraints, output, host),
        }
        self.exports[output.file_name] = _stated_exports(output)
        self._is_written = False

    def _solve_section(
        self,
        label: str,
        output: RenderedOutput,
        section: Data,
        python: str,
    ) -> tuple[Records, list[str]]:
        """Solve the build and host environments of an output or of one of its staging caches.

        Args:
            label: The beginning of the lines that are shown, such as `[2/4] flash-attn`.
            output: The output.
            section: The rendered section with the requirements: the output's or the cache's.
            python: The Python variant.

        Returns:
            The records of the host environment, and the run exports that the package gets from
            both environments.
        """
        requirements = section.get("requirements", {})
        ignored = []
        for part in (requirements, output.requirements):
            ignored.append(part.get("ignore_run_exports", {}))
        number = _python_number(python)

        build_specs = _resolve(requirements.get("build", []), output)
        build_specs = _pin_by_variant(build_specs, output)
        build = self._solve(label, "build", number, build_specs)
        strong = self._list_exported(build, build_specs, ignored, ["strong"])

        host: Records = []
        exported: list[str] = []
        host_specs = _resolve(requirements.get("host", []), output)
        host_specs = _pin_by_variant(host_specs, output)
        if host_specs:
            host = self._solve(label, "host", number, [*host_specs, *strong])
            kinds = ["noarch"] if output.is_noarch else ["strong", "weak"]
            exported = self._list_exported(host, host_specs, ignored, kinds)
        if not output.is_noarch:
            exported += strong
        return host, exported

    def _install(self, label: str, output: RenderedOutput, python: str) -> None:
        """Solve the environment in which a user installs the package."""
        record = self.packages[output.subdir][output.file_name]
        python_spec = f"python {python}"
        self._solve(
            label,
            "run",
            _python_number(python),
            [python_spec, output.spec],
            blame=[python_spec, *record["depends"]],
        )

    def _test(self, label: str, output: RenderedOutput, python: str) -> None:
        """Solve the environments of the package's tests."""
        for test in output.recipe.get("tests", []):
            for test_python, specs in _list_test_environments(test, output):
                number = test_python or _python_number(python)
                self._solve(label, "test", number, specs)

    def _solve(
        self,
        label: str,
        kind: str,
        python: str,
        specs: Sequence[str],
        blame: Sequence[str] = (),
    ) -> Records:
        """Return the records of an environment. Solve it only if it was not solved before.

        Without requirements, there are no records.

        Args:
            label: The beginning of the lines that are shown, such as `[2/4] flash-attn`.
            kind: The kind of environment: build, host, run or test.
            python: The Python version of the environment; empty if any version is allowed.
            specs: The requirements of the environment.
            blame: The requirements among which to look for the reason of a failure; by default,
                `specs`.

        Raises:
            Unsolvable: The environment cannot be solved.
        """
        key = frozenset(specs)
        if not specs or key in self.solved:
            return self.solved.get(key, [])
        with_python = f", Python {python}" if python else ""
        self.show(f"{label}: {kind}{with_python}")
        channels = [self._write_channel(), self.conda_forge]
        try:
            records = solve(channels, specs, self._gateway)
        except SolverError as error:
            reason = self._explain(channels, blame or specs) or one_line(str(error))
            raise Unsolvable(reason, kind, python) from None
        self.solved[key] = records
        return records

    def _explain(self, channels: list[str], specs: Sequence[str]) -> str:
        """Return which requirements cannot be satisfied; "" if no such requirement is found."""
        missing = list_missing(channels, specs, self._gateway)
        if missing:
            return f"conda-forge has no {'; '.join(missing)}"
        return find_conflict(channels, specs, self._gateway)

    def _write_channel(self) -> str:
        """Write the index of our packages if packages were added, and return its address."""
        if not self._is_written:
            # Each index gets a new address, because solvers cache an index by its address.
            self._revision += 1
            for subdir, packages in self.packages.items():
                path = self.folder / str(self._revision) / subdir / "repodata.json"
                repodata = {"packages": {}, "packages.conda": packages}
                write_text(path, json.dumps(repodata))
            self._is_written = True
        return (self.folder / str(self._revision)).as_uri()

    def _list_exported(
        self,
        records: Records,
        specs: Sequence[str],
        ignored: Sequence[Data],
        kinds: Sequence[str],
    ) -> list[str]:
        """List the run exports of the packages that `specs` name, except for the ignored ones.

        Args:
            records: The packages of a solved environment.
            specs: The requirements of that environment. Packages that are only dependencies of
                these requirements export nothing.
            ignored: `ignore_run_exports` sections: packages and names of exports to ignore.
            kinds: The kinds of run exports to list, such as weak.
        """
        required = {parse_package_name(spec) for spec in specs}
        ignored_names = set()
        for section in ignored:
            for spec in section.get("from_package", []):
                required.discard(parse_package_name(spec))
            for spec in section.get("by_name", []):
                ignored_names.add(parse_package_name(spec))
        exported = []
        for record in records:
            if record.name.normalized not in required:
                continue
            exports = self.exports.get(record.file_name)
            if exports is None:
                # This is a package of conda-forge.
                exports = self._conda_forge_exports.read(record)
            for kind in kinds:
                exported += exports.get(kind, [])
        return [spec for spec in exported if parse_package_name(spec) not in ignored_names]


def _describe(failures: Sequence[Unsolvable]) -> str:
    """Describe all failures in one line: each reason with its environment and its Pythons."""
    pythons: dict[tuple[str, str], list[str]] = {}
    for failure in failures:
        key = (str(failure), failure.kind)
        pythons.setdefault(key, []).append(failure.python)
    descriptions = []
    for (reason, kind), numbers in pythons.items():
        environment = f"{kind} environment"
        named = dict.fromkeys(filter(None, numbers))
        if named:
            environment += f", Python {' and '.join(named)}"
        descriptions.append(f"{reason} ({environment})")
    return "; ".join(descriptions)


def _python_number(variant: str) -> str:
    """Return the number in a Python variant, such as 3.12 for `3.12.* *_cpython`."""
    return variant.partition(".*")[0]


def _stated_exports(output: RenderedOutput) -> Exports:
    """Return the run exports that a recipe states for an output."""
    stated = output.requirements.get("run_exports", {})
    if not isinstance(stated, dict):
        # This is a list without kinds.
        stated = {"weak": stated}
    exports = {}
    for kind, requirements in stated.items():
        exports[kind] = _resolve(requirements, output)
    return exports


def _list_test_environments(
    test: Data,
    output: RenderedOutput,
) -> Iterator[tuple[str, list[str]]]:
    """Yield the Python version (or "") and the requirements of each environment of a test."""
    if "package_contents" in test:
        # This test needs no environment.
        return
    requirements = test.get("requirements", {})
    run = [output.spec, *_resolve(requirements.get("run", []), output)]
    versions: str | list[str] = []
    python = test.get("python")
    if python is not None:
        if python.get("pip_check", True):
            run.append("pip")
        versions = python.get("python_version") or []
    if isinstance(versions, str):
        versions = [versions]
    for version in versions:
        yield _python_number(version), [*run, f"python {version}"]
    if not versions:
        yield "", run
    yield "", _resolve(requirements.get("build", []), output)


def _pin_by_variant(specs: list[str], output: RenderedOutput) -> list[str]:
    """Add a version to each spec that is only a name and that the variant has a value for.

    rattler-build does the same for the requirements of the build and host environments.
    """
    pinned = []
    for spec in specs:
        key = spec.replace("-", "_")
        value = str(output.variant.get(key, ""))
        is_version = value.replace(".", "").isalnum()
        if is_version:
            value = f"={value}"
        pinned.append(f"{spec} {value}".strip())
    return pinned


def _resolve(
    requirements: Sequence[Any],
    output: RenderedOutput,
    host: dict[str, rattler.RepoDataRecord] | None = None,
) -> list[str]:
    """Turn rendered requirements into match specs.

    Args:
        requirements: Match specs, and mappings with `pin_subpackage` or `pin_compatible`.
        output: The output that has the requirements.
        host: The packages of the host environment by name, for `pin_compatible`. For a package
            that is not among them, the match spec is only the package's name.
    """
    specs = []
    for requirement in requirements:
        if isinstance(requirement, str):
            specs.append(requirement)
        elif "pin_subpackage" in requirement:
            pin = requirement["pin_subpackage"]
            sibling = output.find_sibling(pin["name"])
            specs.append(_resolve_pin(pin, sibling.version, sibling.build))
        else:
            pin = requirement["pin_compatible"]
            record = (host or {}).get(pin["name"])
            if record:
                spec = _resolve_pin(pin, str(record.version), str(record.build))
            else:
                spec = pin["name"]
            specs.append(spec)
    return specs


def _resolve_pin(pin: Data, version: str, build: str) -> str:
    """Return the match spec of a pin.

    Args:
        pin: `name`, and `exact`, `lower_bound` or `upper_bound`. Both bounds may be given. A bound
            is a version or a pattern. The pattern `x.x` stands for the first two components of the
            version; for the upper bound, the last of them is increased by one.
        version: The version of the package that the pin refers to.
        build: The build string of that package.
    """
    name = pin["name"]
    if pin.get("exact"):
        return f"{name} =={version} {build}"
    bounds = []
    lower = pin.get("lower_bound")
    if lower:
        if _is_pattern(lower):
            lower = ".".join(_cut_version(version, lower))
        bounds.append(f">={lower}")
    upper = pin.get("upper_bound")
    if upper:
        if _is_pattern(upper):
            *leading, last = _cut_version(version, upper)
            upper = ".".join([*leading, f"{int(last) + 1}.0a0"])
        bounds.append(f"<{upper}")
    return f"{name} {','.join(bounds)}".strip()


def _is_pattern(bound: str) -> bool:
    """Return whether a bound of a pin is a pattern such as `x.x`."""
    return set(bound) <= {"x", "."}


def _cut_version(version: str, pattern: str) -> list[str]:
    """Return as many components of a version as a pattern has."""
    return version.split(".")[: pattern.count("x")]
