# SPDX-License-Identifier: BSD-3-Clause
"""A solver over our rendered outputs and real conda-forge records.

The committed records are a part of conda-forge. data/conda-forge/lacks.yaml lists the requirements
that no record satisfies. The solver leaves these requirements out.
"""

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
import zstandard
from rattler import (
    Channel,
    GenericVirtualPackage,
    MatchSpec,
    PackageName,
    RepoDataRecord,
    SparseRepoData,
    Version,
    solve_with_sparse_repodata,
)
from rattler_build import VariantConfig
from support.bindings import BuildString
from support.project import CHECKOUT

from forge import bases
from forge.conda import pypi
from forge.project import SUBDIRS, Project
from forge.recipes.plan import RecipeSet
from forge.recipes.recipe import parse_package_name
from forge.recipes.render import render
from forge.sources.cache import PYPI_SOURCES, PYPI_URL

os.environ[PYPI_SOURCES] = PYPI_URL
DATA = CHECKOUT / "tests" / "data" / "conda-forge"
LACKS: dict[str, list[str]] = yaml.safe_load((DATA / "lacks.yaml").read_text())
# Packages of other ROCm distributions. other-rocm.yaml lists them by channel.
OTHER_ROCM: list[str] = []
for packages in yaml.safe_load((DATA / "other-rocm.yaml").read_text()).values():
    OTHER_ROCM += packages
PROJECT = Project.at(CHECKOUT)
NAMES = pypi.read_names(PROJECT.recipes)
# By Python and recipe: requirements that some record satisfies, but that cannot be installed for
# that Python together with the recipe's other requirements. The solver leaves out these
# requirements, too. In the records, sentencepiece for Python 3.13 was built with an older protobuf.
# tiktoken, and the version of regex that transformers 5 needs, have records only for other Pythons.
CONFLICTING = {
    "python 3.13.* *_cp313": {
        "vllm": {"sentencepiece", "tiktoken"},
        "flash-linear-attention": {"transformers"},
    }
}
MACHINE = {"__unix": "0", "__linux": "6.18", "__glibc": "2.39", "__archspec": "1"}
# The virtual packages that a stack states with `amdgpu = "gfx1151"`.
STRIX_HALO = MACHINE | {"__amdgpu": "0", "__amdgpu_arch": "11.5.1"}


class RecipeEnvironment(NamedTuple):
    """The specs of one environment of a recipe.

    Attributes:
        label: The kind of the environment and its output, for messages.
        specs: Its match specs.
    """

    label: str
    specs: list[str]


def to_spec(requirement: Any, outputs: dict[str, dict[str, Any]]) -> str:
    """Return a rendered requirement as a match spec. `outputs` gives the versions for pins."""
    if not isinstance(requirement, dict):
        return requirement
    pin = requirement.get("pin_subpackage") or requirement["pin_compatible"]
    output = outputs.get(pin["name"])
    if output is None:
        return pin["name"]
    spec = f"{pin['name']} =={output['package']['version']}"
    if pin.get("exact"):
        spec += f" {output['build']['string']}"
    return spec


class Rendered:
    """All recipes, rendered on the conda-forge base.

    Recipes are rendered for every Python of the base; outputs for another Python than `python` are
    left out.

    Attributes:
        variants: The variants of the base with one Python.
        python: The match spec of that Python.
        by_recipe: The rendered outputs of each recipe.
        outputs: The rendered outputs by name.
        lacks: For each output the names of requirements that the solver leaves out.
    """

    def __init__(self, overrides: dict[str, list[str]], python: str = "3.12") -> None:
        base = bases.load(PROJECT, "conda-forge", overrides)
        pythons = base.variants["python"]
        (selected,) = [value for value in pythons if value.startswith(f"{python}.")]
        self.variants = base.variants.merge(VariantConfig({"python": [selected]}))
        self.python = self.pinned("python")
        recipes = RecipeSet(PROJECT, base)
        self.by_recipe: dict[str, list[dict[str, Any]]] = {}
        self.outputs: dict[str, dict[str, Any]] = {}
        self.lacks: dict[str, set[str]] = {}
        for recipe_name, recipe in recipes.recipes.items():
            self.by_recipe[recipe_name] = []
            for data in render(recipe.path, recipes.base, "x"):
                if data["build_configuration"]["variant"].get("python", selected) != selected:
                    continue
                output = data["recipe"]
                name = output["package"]["name"]
                self.by_recipe[recipe_name].append(output)
                self.outputs[name] = output
                self.lacks[name] = {*LACKS.get(recipe_name, []), *self.conflicting(recipe_name)}

    def conflicting(self, recipe: str) -> set[str]:
        """Return the names of the recipe's requirements that CONFLICTING lists for this Python."""
        return CONFLICTING.get(self.python, {}).get(recipe, set())

    def pinned(self, spec: str) -> str:
        """Return a package name with the version that rattler-build takes from the variants."""
        key = spec.replace("-", "_")
        if key not in self.variants.keys():  # noqa: SIM118  VariantConfig has no __contains__
            return spec
        value = self.variants[key][0]
        operator = "=" if value.replace(".", "").isalnum() else ""
        return f"{spec} {operator}{value}"

    def run(self, output: dict[str, Any]) -> list[str]:
        """Return the run requirements of an output, with the run_exports of its host section.

        The run_exports are those of python and of our own packages.
        """
        requirements = output.get("requirements", {})
        specs = self._to_specs(requirements.get("run", []))
        ignored = requirements.get("ignore_run_exports", {}).get("from_package", [])
        for section in [output, *output.get("staging_caches", [])]:
            section_requirements = section.get("requirements", {})
            is_noarch = output["build"].get("noarch")
            is_unbound = is_noarch or section_requirements.get("ignore_run_exports")
            for spec in self._to_specs(section_requirements.get("host", [])):
                name = parse_package_name(spec)
                if name == "python" and not is_unbound:
                    number = self.python.split()[1].removesuffix(".*")
                    specs.append(f"python_abi {number}.* *_cp{number.replace('.', '')}")
                if name in self.outputs and name not in ignored:
                    specs += self._read_weak_exports(name)
        return specs

    def _to_specs(self, requirements: list[Any]) -> list[str]:
        return [to_spec(requirement, self.outputs) for requirement in requirements]

    def _read_weak_exports(self, name: str) -> list[str]:
        exports = self.outputs[name].get("requirements", {}).get("run_exports", {})
        if isinstance(exports, dict):
            exports = exports.get("weak", [])
        return self._to_specs(exports)

    def environments(self, recipe: str) -> Iterator[RecipeEnvironment]:
        """Yield a recipe's environments. Of equal build or host environments, yield only one."""
        visited = set()
        for output in self.by_recipe[recipe]:
            name = output["package"]["name"]
            for section in [output, *output.get("staging_caches", [])]:
                requirements = section.get("requirements", {})
                for kind in ("build", "host"):
                    specs = self._to_specs(requirements.get(kind, []))
                    specs = [self.pinned(spec) for spec in specs]
                    if specs and (kind, *specs) not in visited:
                        visited.add((kind, *specs))
                        yield RecipeEnvironment(f"{kind} of {section.get('name', name)}", specs)
            specs = self.run(output)
            if specs:
                yield RecipeEnvironment(f"run of {name}", specs)

    def repodata(self, folder: Path, is_in_conda_forge: Callable[[str], bool]) -> Path:
        """Write our outputs as a channel of records without files, and return its folder.

        A dependency is left out if `lacks` has it for the output, or if neither we nor conda-forge
        have it. Records that an earlier call has written for another Python stay in the folder.
        """
        for subdir in ("linux-64", "noarch"):
            file = folder / subdir / "repodata.json"
            packages = json.loads(file.read_text())["packages.conda"] if file.exists() else {}
            for name, output in self.outputs.items():
                is_noarch = bool(output["build"].get("noarch"))
                if (subdir == "noarch") != is_noarch:
                    continue
                record = self._make_record(output, subdir, is_in_conda_forge)
                packages[f"{name}-{record['version']}-{record['build']}.conda"] = record
            if subdir == "linux-64":
                # Add packages of another ROCm, because the committed records have none. A test
                # requires that rocm-sdk-core cannot be installed together with these packages.
                for name in OTHER_ROCM:
                    packages[f"{name}-7.2.4-0.conda"] = {
                        "name": name,
                        "version": "7.2.4",
                        "build": "0",
                        "build_number": 0,
                        "subdir": subdir,
                        "depends": [],
                        "sha256": "0" * 64,
                        "size": 1,
                    }
            file.parent.mkdir(parents=True, exist_ok=True)
            text = {"info": {"subdir": subdir}, "packages": {}, "packages.conda": packages}
            file.write_text(json.dumps(text))
        return folder

    def _make_record(
        self, output: dict[str, Any], subdir: str, is_in_conda_forge: Callable[[str], bool]
    ) -> dict[str, Any]:
        name = output["package"]["name"]
        version = output["package"]["version"]
        build = output["build"]["string"]
        depends = []
        for spec in self.run(output):
            dependency = parse_package_name(spec)
            if dependency in self.lacks[name]:
                continue
            if dependency in self.outputs or is_in_conda_forge(spec):
                depends.append(spec)
        constrains = output.get("requirements", {}).get("run_constraints", [])
        return {
            "name": name,
            "version": version,
            "build": build,
            "subdir": subdir,
            "build_number": 0,
            "sha256": "0" * 64,
            "size": 1,
            "depends": depends,
            "constrains": self._to_specs(constrains),
            "purls": pypi.purls(f"{name}-{version}-{build}.conda", NAMES),
        }


class Solver:
    """A solver with strict priority: our records first, then those of conda-forge.

    The records of all `rendered` form one channel.

    Attributes:
        folder: The folder of both channels.
        data: The records in order of priority.
        names: The names of all packages.
    """

    def __init__(self, folder: Path, *rendered: Rendered) -> None:
        self.folder = folder
        conda_forge = folder / "conda-forge"
        for packed in DATA.glob("*/repodata.json.zst"):
            file = conda_forge / packed.parent.name / "repodata.json"
            file.parent.mkdir(parents=True)
            with packed.open("rb") as stream:
                file.write_bytes(zstandard.ZstdDecompressor().stream_reader(stream).read())
        self.data: list[SparseRepoData] = []
        self.names: set[str] = set()
        self._load(conda_forge)
        for recipes in rendered:
            recipes.repodata(folder / "ours", self._has)
        self._load(folder / "ours")

    def _load(self, channel: Path) -> None:
        """Load a channel. Its priority is higher than that of each channel loaded before."""
        new = [
            SparseRepoData(Channel(channel.as_uri()), subdir, channel / subdir / "repodata.json")
            for subdir in ("linux-64", "noarch")
        ]
        self.data = new + self.data
        for data in new:
            self.names.update(data.package_names())

    def lacking(self, specs: list[str]) -> set[str]:
        """Return the names of the specs that no record matches."""
        return {parse_package_name(spec) for spec in specs if not self._has(spec)}

    def _has(self, spec: str) -> bool:
        name = parse_package_name(spec)
        if name.startswith("__"):
            return True
        if name not in self.names:
            return False
        match_spec = MatchSpec(spec)
        for data in self.data:
            if any(match_spec.matches(record) for record in data.load_records(PackageName(name))):
                return True
        return False

    def records(self, specs: list[str], machine: dict[str, str] = MACHINE) -> list[RepoDataRecord]:
        """Solve the specs that some record matches, and return the packages of the environment.

        Raises:
            SolverError: There is no such environment.
        """
        virtual = [
            GenericVirtualPackage(PackageName(name), Version(version), BuildString("0"))
            for name, version in machine.items()
        ]
        lacking = self.lacking(specs)
        specs = [spec for spec in specs if parse_package_name(spec) not in lacking]
        return asyncio.run(solve_with_sparse_repodata(specs, self.data, virtual_packages=virtual))

    def solve(self, specs: list[str], machine: dict[str, str] = MACHINE) -> set[str]:
        """Return the names of the packages of the environment. Raises as `records` does."""
        return {record.name.normalized for record in self.records(specs, machine)}


def records_of_both(folder: Path, *pythons: str) -> Path:
    """Make two channels: FOLDER/theirs has the records of conda-forge, FOLDER/ours our records."""
    rendered = [Rendered({}, python) for python in pythons or ["3.12"]]
    solver = Solver(folder / "solver", *rendered)
    for recipes in rendered:
        recipes.repodata(folder / "ours", solver._has)
    (folder / "theirs").mkdir()
    for subdir in SUBDIRS:
        (folder / "theirs" / subdir).symlink_to(DATA / subdir)
    return folder
