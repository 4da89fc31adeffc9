# SPDX-License-Identifier: BSD-3-Clause
"""The host base: a conda channel made from the running CPython and PyPI's wheels.

For machines that reach PyPI but not conda-forge. Everything in it is host-bound (its Python links
this machine's libraries, its compilers are this machine's) and is never published.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from forge.bases import Base
from forge.conda.local import Channel
from forge.errors import ForgeError, NotAttempted
from forge.files import digest_tree, hold, move_whole, read_text, sha256_file, write_text
from forge.hostbase.lock import fetch_wheels, read_pins, require_pinned
from forge.hostbase.wheels import CODE, CONDA_NAMES, Wheel, is_nvidia
from forge.project import Project
from forge.recipes.cost import Cost, parse_cost
from forge.recipes.recipe import packages_in, without_extra
from forge.sources.cache import SourceCache

Say = Callable[[str], None]
RunJob = Callable[[dict[str, Any], Path], None]
VERSION = platform.python_version()
LOCK = "requirements.txt"
# Set, the base has NVIDIA's own libraries, for a machine with an NVIDIA GPU, and no stubs of them.
NVIDIA_WHEELS = "FORGE_NVIDIA_WHEELS"


def require_compilers() -> None:
    """Require that this machine has a C and a C++ compiler. Raises NotAttempted."""
    missing = [name for name in ("gcc", "g++") if shutil.which(name) is None]
    if missing:
        advice = "also for triton at run time; on Debian: apt-get install g++"
        raise NotAttempted(f"the host base needs {' and '.join(missing)}, {advice}")


class HostBase:
    """Makes `build/host-base` and keeps it current. Interrupted, it goes on where it was."""

    def __init__(self, project: Project, base: Base) -> None:
        self.project, self.base = project, base
        self.folder = base.folder or project.build / "host-base"
        self.recipe = project.recipes / "bases" / "host"
        self.output, self.log = project.staging / "host-base", project.logs / "host-base.log"
        self.python = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
        self.has_nvidia_wheels = bool(os.environ.get(NVIDIA_WHEELS))

    @property
    def cost(self) -> Cost:
        """What making it takes, as its recipe states it. Raises ForgeError."""
        path = self.recipe / "recipe.yaml"
        extra = yaml.safe_load(read_text(path))["extra"]
        key = "cost_with_nvidia_wheels" if self.has_nvidia_wheels else "cost"
        return parse_cost(extra[key], path)

    @cached_property
    def key(self) -> str:
        """A digest of what the base is made from: equal keys, equal packages."""
        recipe_file = self.recipe / "recipe.yaml"
        contents = {recipe_file: without_extra(recipe_file.read_bytes())}
        inputs = [
            digest_tree(self.recipe, self.project.root, contents=contents),
            CODE,
            self.requirements,
            sys.version,
            version("py-rattler-build"),
            sha256_file(Path(self.python)),
            str(self._environment),
            f"{NVIDIA_WHEELS}: {self.has_nvidia_wheels}",
        ]
        return hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:16]

    @cached_property
    def _environment(self) -> dict[str, str]:
        """What its recipe reads."""
        return {
            "FORGE_PYTHON": self.python,
            "FORGE_PYTHON_VERSION": VERSION,
            "FORGE_GCC_VERSION": subprocess.getoutput("gcc -dumpfullversion 2>/dev/null") or "0",
            "FORGE_GLIBC_VERSION": platform.libc_ver()[1] or "0",
        }

    @property
    def requirements(self) -> str:
        """What recipes and stacks need of PyPI, with the pins of variants.yaml filled in."""
        values = {key: values[0] for key, values in self.base.variants.items() if values}
        return Template(read_text(self.recipe / "requirements.in")).substitute(values)

    def names(self) -> frozenset[str]:
        """List the packages that recipes may need of it: what its requirements and recipe name."""
        own = packages_in(self.recipe / "recipe.yaml")
        return frozenset(own.union(CONDA_NAMES.get(name, name) for name in self._required()))

    def _required(self) -> set[str]:
        """Return the projects that its requirements name."""
        lines = [line for line in self.requirements.splitlines() if line and line[0] != "#"]
        return {canonicalize_name(Requirement(line).name) for line in lines}

    def _seal(self, data: dict[str, Any]) -> str:
        return hashlib.sha256(f"{self.key} {json.dumps(data)}".encode()).hexdigest()

    def _read(self, name: str) -> dict[str, Any]:
        """Read a JSON file of an earlier run, if whole and of these very inputs; else nothing."""
        try:
            data = json.loads((self.folder / name).read_bytes())
            return data if data.pop("key") == self._seal(data) else {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}

    def _write(self, name: str, **data: Any) -> None:
        write_text(self.folder / name, json.dumps({"key": self._seal(data), **data}, indent=1))

    def is_current(self) -> bool:
        """Return whether it was finished from exactly these inputs, and nothing was lost since."""
        there = {f.name: f.stat().st_size for f in self.folder.glob("linux-64/*.conda")}
        return self._read("base.json").get("packages") == self._indexed() == there

    def _indexed(self) -> dict[str, int]:
        """Return the sizes of its packages; nothing where the index is damaged."""
        try:
            return {r.file_name: r.size for r in Channel(self.folder).records()}
        except ForgeError:
            return {}

    def make(self, say: Say, run: RunJob) -> None:
        """Make the base if it is not current. `run(job, log)` runs an engine job.

        Two checkouts may share the folder by a link: the second waits for the first.

        Raises:
            NotAttempted: pip cannot fetch a wheel, or there is no compiler.
            Refused: A wheel is not one that the lock pins.
            Failed: A part of the base cannot be made.
        """
        if self.is_current():
            return
        require_compilers()
        with hold(self.folder, "making the host base in", say):
            if not self.is_current():
                self._make(say, run)

    def _make(self, say: Say, run: RunJob) -> None:
        subdir = self.folder / "linux-64"
        indexed = self._indexed()
        for package in subdir.glob("*.conda"):  # a cut one would be kept for its name
            if indexed.get(package.name, size := package.stat().st_size) != size:
                package.unlink()
        wheels = {wheel.name: wheel for wheel in self._wheels(say)}
        packages = self._build_recipe(say, run, wheels)
        wanted = {c.file_name: c for c in (w.conversion(wheels) for w in wheels.values())}
        if todo := [asdict(c) for name, c in wanted.items() if not (subdir / name).exists()]:
            say(f"host base: {len(todo)} wheels become packages")
            job = {"action": "convert", "wheels": todo, "subdir": str(subdir)}
            run(job | {"output_dir": str(self.output)}, self.log)
            shutil.rmtree(self.output)
        for name in {file.name for file in subdir.glob("*.conda")} - packages - wanted.keys():
            (subdir / name).unlink()
        known = {
            name: asdict(wheel) | {"build_number": 0, "subdir": subdir.name}
            | {"size": (subdir / name).stat().st_size, "sha256": sha256_file(subdir / name)}
            for name, wheel in wanted.items()
        }  # fmt: skip
        # anew: it may be damaged, or name other bytes; rattler would hash them for half a minute
        for folder, entries in ((subdir, known), (self.folder / "noarch", {})):
            write_text(folder / "repodata.json", json.dumps({"packages.conda": entries}))
        Channel(self.folder, self.project.recipes).index()
        record = [{"purl": wheel.purl, "sha256": wheel.sha256} for wheel in wheels.values()]
        self._write("base.json", packages=self._indexed(), wheels=record)

    def _wheels(self, say: Say) -> Iterator[Wheel]:
        """Yield the wheels of the lock, which has what the requirements ask for.

        Without those of NVIDIA that no requirement names, unless they are asked for.
        """
        file = self.recipe / LOCK
        pins = read_pins(file)
        require_pinned(self.requirements, pins, file)
        if not self.has_nvidia_wheels:
            named = self._required()
            pins = {name: p for name, p in pins.items() if name in named or not is_nvidia(name)}
        for path, source in fetch_wheels(pins.values(), file, SourceCache(self.project), say):
            local = parse_wheel_filename(path.name)[1].local
            yield Wheel.read(path, source, f"{local.split('.')[0]}_" if local else "")

    def _build_recipe(self, say: Say, run: RunJob, wheels: dict[str, Wheel]) -> set[str]:
        """Build Python, the compilers and stubs, by rattler-build like any recipe, and test them.

        The stubs are made from the wheel of torch, unless NVIDIA's wheels are there.
        """
        say(f"host base: CPython {VERSION} and the compilers")
        environment = dict(self._environment)
        if "torch" in wheels and not self.has_nvidia_wheels:
            environment["FORGE_TORCH"] = str(wheels["torch"].file)
            environment["FORGE_PYELFTOOLS"] = str(wheels["pyelftools"].file)
        output = self.output
        shutil.rmtree(output, ignore_errors=True)
        job = {
            "action": "build", "recipes": [str(self.recipe / "recipe.yaml")], "channel": [],
            "output_dir": str(output), "package_format": "conda:1",
            "environment": environment,
        }  # fmt: skip
        run(job | self.base.arguments(f"host-{self.key}", None), self.log)
        made = sorted(output.glob("linux-64/*.conda"))
        job = {"action": "test", "packages": [*map(str, made)], "channel": [output.as_uri()]}
        run(job, self.log)
        for package in made:
            move_whole(package, self.folder / "linux-64" / package.name)
        shutil.rmtree(output)
        return {package.name for package in made}
