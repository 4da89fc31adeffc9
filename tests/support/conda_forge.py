# SPDX-License-Identifier: BSD-3-Clause
"""Our rendered outputs before real conda-forge records, and a solver for both.

What the conda-forge records lack is listed in data/conda-forge/lacks.yaml, and is left out.
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
# the packages of another ROCm, by who has them
OTHER_ROCM = [
    name
    for names in yaml.safe_load((DATA / "other-rocm.yaml").read_text()).values()
    for name in names
]
PROJECT = Project.at(CHECKOUT)
NAMES = pypi.read_names(PROJECT.recipes)
# What these records hold for a Python, but not beside the rest; not counted as solved either:
# for 3.13 sentencepiece has an older protobuf, and tiktoken, and regex as transformers 5 wants it,
# are for others alone
APART = {
    "python 3.13.* *_cp313": {
        "vllm": {"sentencepiece", "tiktoken"}, "flash-linear-attention": {"transformers"}
    }
}  # fmt: skip
MACHINE = {"__unix": "0", "__linux": "6.18", "__glibc": "2.39", "__archspec": "1"}
# what `amdgpu = "gfx1151"` of a stack promises
STRIX_HALO = MACHINE | {"__amdgpu": "0", "__amdgpu_arch": "11.5.1"}


class Wanted(NamedTuple):
    """The specs of one environment of one recipe, and which environment it is."""

    what: str
    specs: list[str]


def spec_of(requirement: Any, outputs: dict[str, dict[str, Any]]) -> str:
    """A rendered requirement as a match spec; pins become what they pin to."""
    if not isinstance(requirement, dict):
        return requirement
    pin = requirement.get("pin_subpackage") or requirement["pin_compatible"]
    output = outputs.get(pin["name"])
    if output is None:
        return pin["name"]
    version = output["package"]["version"]
    build = f" {output['build']['string']}" if pin.get("exact") else ""
    return f"{pin['name']} =={version}{build}"


class Rendered:
    """All recipes on the conda-forge base: their environments, and their outputs as records.

    Rendered for every Python of the base. What is for another one than `python` is left out.
    """

    def __init__(self, overrides: dict[str, list[str]], python: str = "3.12") -> None:
        base = bases.load(PROJECT, "conda-forge", overrides)
        (chosen,) = [value for value in base.variants["python"] if value.startswith(f"{python}.")]
        self.variants = base.variants.merge(VariantConfig({"python": [chosen]}))
        self.python = self.pinned("python")
        recipes = RecipeSet(PROJECT, base)
        self.by_recipe = {
            name: [
                data["recipe"]
                for data in render(recipe.path, recipes.base, "x")
                if data["build_configuration"]["variant"].get("python", chosen) == chosen
            ]
            for name, recipe in recipes.recipes.items()
        }
        self.outputs = {o["package"]["name"]: o for many in self.by_recipe.values() for o in many}
        self.lacks = {
            output["package"]["name"]: {*LACKS.get(recipe, []), *self.apart(recipe)}
            for recipe, many in self.by_recipe.items()
            for output in many
        }

    def apart(self, recipe: str) -> set[str]:
        return APART.get(self.python, {}).get(recipe, set())

    def pinned(self, spec: str) -> str:
        """A bare name with the version that rattler-build gives it from the variants."""
        key = spec.replace("-", "_")
        if key not in self.variants.keys():  # noqa: SIM118  VariantConfig has no __contains__
            return spec
        value = self.variants[key][0]
        return f"{spec} {'=' if value.replace('.', '').isalnum() else ''}{value}"

    def run(self, output: dict[str, Any]) -> list[str]:
        """Run requirements with what python and our own host packages export."""
        requirements = output.get("requirements", {})
        specs = [spec_of(r, self.outputs) for r in requirements.get("run", [])]
        sections = [output, *output.get("staging_caches", [])]
        ignored = requirements.get("ignore_run_exports", {}).get("from_package", [])
        for section in sections:
            own = section.get("requirements", {})
            unbound = output["build"].get("noarch") or own.get("ignore_run_exports")
            for host in own.get("host", []):
                name = parse_package_name(spec_of(host, self.outputs))
                if name == "python" and not unbound:
                    number = self.python.split()[1].removesuffix(".*")
                    specs.append(f"python_abi {number}.* *_cp{number.replace('.', '')}")
                if name in self.outputs and name not in ignored:
                    exports = self.outputs[name].get("requirements", {}).get("run_exports", {})
                    weak = exports.get("weak", []) if isinstance(exports, dict) else exports
                    specs += [spec_of(r, self.outputs) for r in weak]
        return specs

    def environments(self, recipe: str) -> Iterator[Wanted]:
        """Each build, host and run environment of a recipe once."""
        seen = set()
        for output in self.by_recipe[recipe]:
            name = output["package"]["name"]
            for section in [output, *output.get("staging_caches", [])]:
                requirements = section.get("requirements", {})
                for kind in ("build", "host"):
                    specs = [spec_of(r, self.outputs) for r in requirements.get(kind, [])]
                    specs = [self.pinned(spec) for spec in specs]
                    if specs and (kind, *specs) not in seen:
                        seen.add((kind, *specs))
                        yield Wanted(f"{kind} of {section.get('name', name)}", specs)
            if specs := self.run(output):
                yield Wanted(f"run of {name}", specs)

    def repodata(self, folder: Path, theirs: Callable[[str], bool]) -> Path:
        """Our outputs as a channel of records without files.

        A dependency that is neither ours nor `theirs`, or that lacks.yaml lists for the recipe, is
        left out: it counts as lacking already. What the folder has of another Python stays.
        """
        for subdir in ("linux-64", "noarch"):
            file = folder / subdir / "repodata.json"
            packages = json.loads(file.read_text())["packages.conda"] if file.exists() else {}
            for name, output in self.outputs.items():
                noarch = output["build"].get("noarch")
                if (subdir == "noarch") != bool(noarch):
                    continue
                build, version = output["build"]["string"], output["package"]["version"]
                constrains = output.get("requirements", {}).get("run_constraints", [])
                packages[f"{name}-{version}-{build}.conda"] = {
                    "name": name, "version": version, "build": build, "subdir": subdir,
                    "build_number": 0, "sha256": "0" * 64, "size": 1,
                    "depends": [
                        d for d in self.run(output) if parse_package_name(d) not in self.lacks[name]
                        and (parse_package_name(d) in self.outputs or theirs(d))
                    ],
                    "constrains": [spec_of(c, self.outputs) for c in constrains],
                    "purls": pypi.purls(f"{name}-{version}-{build}.conda", NAMES),
                }  # fmt: skip
            # other ROCms', which no record here holds
            for name in OTHER_ROCM if subdir == "linux-64" else ():
                packages[f"{name}-7.2.4-0.conda"] = {
                    "name": name, "version": "7.2.4", "build": "0", "build_number": 0,
                    "subdir": subdir, "depends": [], "sha256": "0" * 64, "size": 1,
                }  # fmt: skip
            file.parent.mkdir(parents=True, exist_ok=True)
            text = {"info": {"subdir": subdir}, "packages": {}, "packages.conda": packages}
            file.write_text(json.dumps(text))
        return folder


class Solver:
    """Our records before conda-forge's, strict priority, on a machine like a user's.

    Ours for each Python given are one channel.
    """

    def __init__(self, folder: Path, *rendered: Rendered) -> None:
        self.folder = folder
        theirs = folder / "conda-forge"
        for packed in DATA.glob("*/repodata.json.zst"):
            file = theirs / packed.parent.name / "repodata.json"
            file.parent.mkdir(parents=True)
            file.write_bytes(zstandard.ZstdDecompressor().stream_reader(packed.open("rb")).read())
        self.data: list[SparseRepoData] = []
        self.names: set[str] = set()
        self._load(theirs)
        for one in rendered:
            one.repodata(folder / "ours", self._has)
        self._load(folder / "ours")

    def _load(self, channel: Path) -> None:
        """Put a channel before those that are loaded already."""
        new = [
            SparseRepoData(Channel(channel.as_uri()), subdir, channel / subdir / "repodata.json")
            for subdir in ("linux-64", "noarch")
        ]
        self.data = new + self.data
        self.names |= {name for data in new for name in data.package_names()}

    def lacking(self, specs: list[str]) -> set[str]:
        """The names of which no record is as asked."""
        return {parse_package_name(spec) for spec in specs if not self._has(spec)}

    def _has(self, spec: str) -> bool:
        name, wanted = parse_package_name(spec), MatchSpec(spec)
        if name.startswith("__"):
            return True
        return name in self.names and any(
            wanted.matches(record)
            for data in self.data
            for record in data.load_records(PackageName(name))
        )

    def records(self, specs: list[str], machine: dict[str, str] = MACHINE) -> list[RepoDataRecord]:
        """The packages of the environment. Raises SolverError if there is none."""
        virtual = [
            GenericVirtualPackage(PackageName(name), Version(version), BuildString("0"))
            for name, version in machine.items()
        ]
        specs = [spec for spec in specs if parse_package_name(spec) not in self.lacking(specs)]
        return asyncio.run(solve_with_sparse_repodata(specs, self.data, virtual_packages=virtual))

    def solve(self, specs: list[str], machine: dict[str, str] = MACHINE) -> set[str]:
        """The names in the environment. Raises SolverError if there is none."""
        return {record.name.normalized for record in self.records(specs, machine)}


def records_of_both(folder: Path, *pythons: str) -> Path:
    """FOLDER/theirs are the committed records of conda-forge, FOLDER/ours the recipes rendered."""
    rendered = [Rendered({}, python) for python in pythons or ["3.12"]]
    solver = Solver(folder / "solver", *rendered)
    for one in rendered:
        one.repodata(folder / "ours", solver._has)
    (folder / "theirs").mkdir()
    for subdir in SUBDIRS:
        (folder / "theirs" / subdir).symlink_to(DATA / subdir)
    return folder
